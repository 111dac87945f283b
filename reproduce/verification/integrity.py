"""Is a record whole and free of contradictions? Nothing is computed for this but hashes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from artifacts import Record, Store, load_bundle, read_attestations, read_digests, record_bundles, verify_bundle
from artifacts.bundle import load_manifest
from engine.digest import content_digest, content_hashes
from reproduce.configuration import Configuration, RunOptions, from_identity
from reproduce.errors import Changed, ConfigurationError, CorruptOutput
from reproduce.outputs import shortest
from reproduce.state import Identity
from reproduce.verification.lock import check_lock

_KNOWN_RESULTS = {"first_loss", "last_loss", "steps", "tokens", "validation", "validation_loss"}


@dataclass(frozen=True)
class Claims:
    """A record and what it claims. digests, losses: after each step, from step 1. bundles: by step."""

    name: str
    record: Record
    configuration: Configuration
    identity: Identity
    digests: list[bytes]
    losses: npt.NDArray[np.float32]
    bundles: Mapping[int, str]

    def with_threads(self, threads: int) -> "Claims":
        """The same, to be replayed with so many threads."""
        run = self.configuration.run.model_copy(update={"threads": threads})
        return replace(self, configuration=self.configuration.model_copy(update={"run": run}))

    @property
    def validation(self) -> Mapping[int, float]:
        """Claimed losses on held-out text, by step."""
        claimed: Any = self.record.results.get("validation")
        before = {int(step): loss for step, loss in claimed.items()} if isinstance(claimed, dict) else {}
        final: Any = self.record.results.get("validation_loss")
        return before if final is None else {**before, self.record.steps: final}


def read_claims(store: Store, name: str, record: Record, options: RunOptions) -> Claims:
    """What a record claims. CorruptOutput or Corrupt if it contradicts itself or something of it is missing; content of
    bundles in between is not looked at."""
    try:
        configuration = from_identity(record.configuration, options, "its configuration")
    except ConfigurationError as error:
        raise CorruptOutput(f"record {name}: {error}") from error
    identity = Identity(record.configuration, record.dataset, record.tokenizer)
    if identity.specification != record.specification:
        raise CorruptOutput(
            f"the record's specification is {record.specification}, that of its configuration {identity.specification}"
        )
    if configuration.train.steps != record.steps or configuration.tier != record.tier:
        raise CorruptOutput("steps or tier of the record are not those of its configuration")
    check_lock(record)
    digests = read_digests(store, record)
    final = load_bundle(store, record.final_bundle).tensors
    _check_history(final, digests, "final bundle")
    losses = final["history/loss"]
    if configuration.tier == "debug":
        _check_contents(final, digests)
    for result, at in (("first_loss", 0), ("last_loss", -1)):
        if record.results.get(result) != float(shortest(losses[at])):
            raise CorruptOutput(f"{result} of the record is not that of its final bundle")
    if unknown := sorted(set(record.results) - _KNOWN_RESULTS):
        raise CorruptOutput(f"the record has results that nobody here can check: {unknown}")
    return Claims(name, record, configuration, identity, digests, losses, bundles_by_step(store, name, record))


def bundles_by_step(store: Store, name: str, record: Record) -> dict[int, str]:
    """All listed bundles of a record. The first of a forked run is that of the step that it began at; the list has it
    at 0 as well."""
    listed = record_bundles(store, name)
    begins = load_manifest(store, record.first_bundle).state.get("step")
    return {step: bundle for step, bundle in listed.items() if step or begins == 0}


def check_bundles(store: Store, claims: Claims) -> None:
    """Every byte of every listed bundle and of every attestation, and that each bundle is the record's own at its
    step. Corrupt or CorruptOutput."""
    read_attestations(store, claims.name)
    for step, bundle in claims.bundles.items():
        manifest = verify_bundle(store, bundle)
        try:
            found = claims.identity.check(manifest.state, f"bundle {bundle}")
        except Changed as error:
            raise CorruptOutput(f"the record lists a bundle that is not its own: {error}") from error
        if found != step:
            raise CorruptOutput(f"bundle {bundle} is listed for step {step}, but is of step {found}")


def _check_contents(final: Mapping[str, npt.NDArray[Any]], digests: list[bytes]) -> None:
    """The hashes of all tensors after every step, against the step digests and what the final tensors are."""
    contents, losses = final.get("history/tensors"), final["history/loss"]
    if contents is None or len(contents) != len(digests):
        raise CorruptOutput("the final bundle does not hold the hashes of its tensors after every step")
    for step, (hashes, loss, digest) in enumerate(zip(contents, losses, digests, strict=True), 1):
        if content_digest(step, loss, hashes) != digest:
            raise CorruptOutput(f"the step digest of step {step} is not that of its tensors")
    tensors = {name: tensor for name, tensor in final.items() if not name.startswith("history/")}
    if content_hashes(tensors, 1).tobytes() != contents[-1].tobytes():
        raise CorruptOutput("the tensors of the final bundle are not those that its last step digest names")


def _check_history(tensors: Mapping[str, npt.NDArray[Any]], digests: list[bytes], what: str) -> None:
    if [bytes(row) for row in tensors["history/digest"]] != digests:
        raise CorruptOutput(f"the step digests of the record are not those of its {what}")
