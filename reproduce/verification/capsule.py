"""Verifying a capsule where there is no project: in a folder made for the while, which is removed afterwards."""

import tempfile
from pathlib import Path

from artifacts import canonical, read_attestations
from artifacts.attestation import statement
from reproduce.capsules import require_capsule, take_capsule
from reproduce.configuration import RunOptions
from reproduce.display import say
from reproduce.naming import are_digits
from reproduce.outputs import write_bytes
from reproduce.project import Project
from reproduce.verification.verifying import Request, verify

OPTIONS = RunOptions(
    device="cpu",
    threads=0,
    recompute=0,
    save_every_steps=1,
    store=".samebits/store",
    progress="auto",
)


def is_capsule(argument: str) -> bool:
    """Whether what somebody named is a file rather than a hash. A file of a hash's name needs `./` before it."""
    return not are_digits(argument) and Path(argument).is_file()


def verify_capsule(path: Path, request: Request) -> int:
    """As `verify` of the record in the capsule, with nothing but what is in it. The attestation is written beside it.

    Raises Missing and Corrupt of the capsule itself, ReproduceError for what is none.
    """
    require_capsule(path)
    path = path.absolute()
    with tempfile.TemporaryDirectory(prefix="samebits-capsule-") as folder:
        project = Project(Path(folder))
        store = project.store(OPTIONS)
        contents, _ = take_capsule(project, store, path, None)
        before = set(read_attestations(store, contents.record))
        code = verify(project, OPTIONS, contents.record, request)
        for name, attestation in read_attestations(store, contents.record).items():
            if name not in before:
                target = path.with_name(f"{path.name}.{name[:12]}.json")
                write_bytes(target, canonical.dumps(statement(attestation)))
                if not request.as_json:
                    say(f"attestation: {target}; `reproduce attest {contents.record[:12]} --add FILE` takes it in")
    return code
