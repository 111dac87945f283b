"""Whether a file can be of the kind that it is given as at all: tells a slip of the user from damage.

Each function raises ReproduceError for what is something else; damage of the right thing is found while it is read.
"""

import struct
from pathlib import Path

from reproduce.errors import ReproduceError

_ANDREA_HEAD = struct.Struct("<ii")
_BYTES_OF_PARAMETER = 12  # an fp32 weight and its two moments


def require_folder(path: Path) -> None:
    """A bundle as plain files."""
    if not (path / "manifest.json").is_file():
        raise ReproduceError(
            f"{path} is not the folder of a bundle: it has no manifest.json. "
            "`reproduce export HASH FOLDER --as folder` writes one"
        )


def require_safetensors(path: Path) -> None:
    """A file that begins with the length of its header and then the header, which is JSON."""
    if not path.is_file():
        raise ReproduceError(f"{path}: there is no such file: name a safetensors file, or a folder with one")
    with path.open("rb") as file:
        begins = file.read(9)
    if begins[8:] != b"{":
        raise ReproduceError(
            f"{path} is not a safetensors file: `save_pretrained` of transformers or `reproduce export HASH FOLDER "
            "--as gpt2` writes one"
        )


def require_andrea(path: Path, parameters: int) -> None:
    """A file without a mark of its own: its head has to name as many parameters as the model has, or its length has to
    be that of the head's or the model's number."""
    if not path.is_file():
        raise ReproduceError(f"{path} is not a file: an ANDREA checkpoint is one")
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_ANDREA_HEAD.size)
    named = _ANDREA_HEAD.unpack(head)[1] if len(head) == _ANDREA_HEAD.size else None
    lengths = {_ANDREA_HEAD.size + _BYTES_OF_PARAMETER * count for count in (named, parameters) if count is not None}
    if named != parameters and size not in lengths:
        raise ReproduceError(
            f"{path} is no ANDREA checkpoint of the model in params.yaml: with its {parameters} parameters that has "
            f"{_ANDREA_HEAD.size + _BYTES_OF_PARAMETER * parameters} bytes, this file has {size}. Set `model` to what "
            "the checkpoint was made with, or give --as what the file is"
        )


def require_statement(path: Path) -> None:
    """An attestation, which is one JSON object."""
    with path.open("rb") as file:
        begins = file.read(1)
    if begins != b"{":
        raise ReproduceError(
            f"{path} is not an in-toto statement: `reproduce verify CAPSULE` writes one beside the capsule"
        )
