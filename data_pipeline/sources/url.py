"""Source `url`: one document over http or https, pinned by its BLAKE3 and resumable."""

import fcntl
import http.client
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Literal
from urllib.parse import urlsplit

from blake3 import blake3 as Blake3
from pydantic import AfterValidator

from data_pipeline.errors import CorruptDataError, SourceError
from data_pipeline.sources.document import CHUNK_BYTES, Document, Places, SourceSpec, file_chunks
from data_pipeline.strict import Hash

TIMEOUT_SECONDS = 60


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or " " in url:
        raise ValueError(f"expected an http or https address in ASCII, found {url!r}")
    if parts.username is not None or parts.password is not None:
        raise ValueError("expected an address without a user name or password: it would be kept in every manifest")
    return url


class UrlSource(SourceSpec):
    """One document, named by its address."""

    kind: Literal["url"]
    """The source's name."""
    url: Annotated[str, AfterValidator(_check_url)]
    """The address."""
    blake3: Hash
    """BLAKE3 of the content."""

    def documents(self, places: Places) -> Iterator[Document]:
        places.downloads.mkdir(exist_ok=True)
        path = places.downloads / self.blake3
        with path.open("ab+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SourceError(f"source url {self.url}: another process is downloading it to {path}") from None
            self._complete(file, path)
            yield Document(self.url, file_chunks(path))

    def _complete(self, file: BinaryIO, path: Path) -> None:
        """Bring the partial file to the pinned content.

        A resumed file with a wrong hash is fetched once more from the start: its beginning may be
        of another version.
        """
        resumed = _size(file) > 0
        if resumed and _blake3(path) == self.blake3:
            return
        _transfer(self.url, file)
        if resumed and _blake3(path) != self.blake3:
            file.truncate(0)
            _transfer(self.url, file)
        if (found := _blake3(path)) != self.blake3:
            size = _size(file)
            file.truncate(0)
            raise CorruptDataError(
                f"source url {self.url}: expected BLAKE3 {self.blake3}, found {found} in {size} "
                "bytes: "
                "the content has changed or the pinned hash is wrong"
            )


def _transfer(url: str, file: BinaryIO) -> None:
    """Append what is missing to `file` (from the start where the server cannot resume)."""
    start = _size(file)
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            _receive(url, response, file, start)
    except urllib.error.HTTPError as error:
        # 416: nothing lies beyond what is here already; the hash decides.
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE or not start:
            raise SourceError(f"source url {url}: the server answered {error.code} {error.reason}") from error
    except (
        urllib.error.URLError,
        http.client.HTTPException,
        ConnectionError,
        TimeoutError,
        ssl.SSLError,
    ) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise _interrupted(url, file, str(reason) or type(error).__name__) from error
    finally:
        file.flush()


def _receive(url: str, response: http.client.HTTPResponse, file: BinaryIO, start: int) -> None:
    if response.status == http.client.OK:
        file.truncate(0)
    elif response.status != http.client.PARTIAL_CONTENT:
        raise SourceError(f"source url {url}: expected status 200 or 206, found {response.status}")
    elif not (response.headers.get("Content-Range") or "").startswith(f"bytes {start}-"):
        raise SourceError(
            f"source url {url}: asked for bytes from {start}, found Content-Range "
            f"{response.headers.get('Content-Range')!r}: the server cannot resume; delete the "
            "partial file"
        )
    expected, received = response.headers.get("Content-Length"), 0
    while chunk := response.read(CHUNK_BYTES):
        file.write(chunk)
        received += len(chunk)
    # A bounded read reports a broken connection as an end, so the length must be compared.
    if expected is not None and received != int(expected):
        raise _interrupted(url, file, f"expected {expected} bytes, found {received}")


def _interrupted(url: str, file: BinaryIO, reason: str) -> SourceError:
    kept = _size(file)
    return SourceError(f"source url {url}: not fetched: {reason}. {kept} bytes are kept; run again to go on from there")


def _size(file: BinaryIO) -> int:
    return file.seek(0, os.SEEK_END)


def _blake3(path: Path) -> str:
    digest = Blake3()
    for chunk in file_chunks(path):
        digest.update(chunk)
    return digest.hexdigest()
