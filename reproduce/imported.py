"""Text from an imported bundle: of the configuration's model, in the tokens of a dataset that the user names."""

from pathlib import Path

import numpy as np

from artifacts import Bundle
from artifacts.bundle import Array
from data_pipeline.manifest import MANIFEST
from engine.errors import StateMismatch
from reproduce.configuration import Configuration, SamplingSpec
from reproduce.errors import ReproduceError
from reproduce.workbench import open_workbench


def is_imported(bundle: Bundle) -> bool:
    """Whether it was made of another program's file, which told neither dataset nor tokenizer."""
    return "imported" in bundle.state


def sample_imported(
    bundle: Bundle, name: str, configuration: Configuration, tokenizer: Path | None, sampling: SamplingSpec
) -> str:
    """The prompt and what the model makes of it, in the tokens of the dataset in the folder `tokenizer`.

    Raises ReproduceError without one, or if the configuration's model is not that of the bundle.
    """
    if tokenizer is None:
        raise ReproduceError(
            f"bundle {name} was imported from a file that does not say what its tokens mean: "
            "add --tokenizer with the folder of a dataset that has the tokenizer it was trained with, "
            "such as --tokenizer data/dataset (`reproduce stage prepare` makes one)"
        )
    if not (tokenizer / MANIFEST).is_file():
        raise ReproduceError(
            f"--tokenizer: {tokenizer} is no dataset (it has no {MANIFEST}): name one's folder, such as data/dataset"
        )
    nothing_yet: dict[str, Array] = {
        "history/digest": np.empty((0, 32), np.uint8),
        "history/loss": np.empty(0, np.float32),
    }
    with open_workbench(configuration, tokenizer) as workbench:
        try:
            workbench.trainer.load_state({**bundle.tensors, **nothing_yet})
        except StateMismatch as error:
            raise ReproduceError(
                f"bundle {name} is not of the model in params.yaml: {error}. Describe its model there, as at its import"
            ) from error
        return workbench.sample(sampling)
