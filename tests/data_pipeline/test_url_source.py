"""Source `url`, against a server on the loopback interface."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from data_pipeline import CorruptDataError, RawManifest, SourceError, fetch
from tests.data_pipeline.corpora import make_spec

CONTENT = bytes(range(256)) * 20_000


class Server(ThreadingHTTPServer):
    """Serves `content`; the other attributes make it misbehave.

    `asked` holds the Range of every request.
    """

    daemon_threads = True
    content = CONTENT
    cut_after: int | None = None
    ranges = True
    wrong_range = False
    status: int | None = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers["Range"]
        self.server.asked.append(asked)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.server.ranges else 0
        body = self.server.content[start:]
        if self.server.status is not None:
            self.send_error(self.server.status)
            return
        if start and not body:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        if start:
            shown = 0 if self.server.wrong_range else start
            total = len(self.server.content)
            self.send_header("Content-Range", f"bytes {shown}-{total - 1}/{total}")
        self.end_headers()
        self.wfile.write(body[: self.server.cut_after])

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def take(root: Path, server: Server, content: bytes = CONTENT) -> RawManifest:
    address = f"http://127.0.0.1:{server.server_port}/a.txt"
    source = {"kind": "url", "url": address, "blake3": blake3(content).hexdigest()}
    return fetch(make_spec(sources=[source]), root / "raw", root)


def assert_fetched(root: Path, manifest: RawManifest) -> None:
    (document,) = manifest.documents
    assert (root / "raw" / document.file).read_bytes() == CONTENT
    assert document.blake3 == blake3(CONTENT).hexdigest()
    assert [path.name for path in root.iterdir()] == ["raw"]


def interrupt(root: Path, server: Server, after: int) -> None:
    server.cut_after = after
    with pytest.raises(SourceError, match=f"{after} bytes are kept; run again"):
        take(root, server)
    assert not (root / "raw").exists()
    server.cut_after = None


def test_content_is_fetched_and_nothing_else_left(tmp_path: Path, server: Server) -> None:
    assert_fetched(tmp_path, take(tmp_path, server))
    assert server.asked == [None]


def test_an_interrupted_download_goes_on(tmp_path: Path, server: Server) -> None:
    interrupt(tmp_path, server, 1_000_000)
    assert_fetched(tmp_path, take(tmp_path, server))
    assert server.asked == [None, "bytes=1000000-"]


def test_a_complete_partial_file_is_not_fetched_again(tmp_path: Path, server: Server) -> None:
    interrupt(tmp_path, server, 10)
    (partial,) = (tmp_path / ".raw.downloads").iterdir()
    partial.write_bytes(CONTENT)
    assert_fetched(tmp_path, take(tmp_path, server))
    assert len(server.asked) == 1


def test_a_server_that_cannot_resume_starts_over(tmp_path: Path, server: Server) -> None:
    interrupt(tmp_path, server, 1_000_000)
    server.ranges = False
    assert_fetched(tmp_path, take(tmp_path, server))


@pytest.mark.parametrize("damage", [b"x" * 1000, b"x" * len(CONTENT), b"x" * (len(CONTENT) + 1)])
def test_a_damaged_partial_file_is_fetched_anew(tmp_path: Path, server: Server, damage: bytes) -> None:
    interrupt(tmp_path, server, 10)
    (partial,) = (tmp_path / ".raw.downloads").iterdir()
    partial.write_bytes(damage)
    assert_fetched(tmp_path, take(tmp_path, server))
    assert server.asked[-1] is None


def test_a_wrong_hash_names_both_and_keeps_nothing(tmp_path: Path, server: Server) -> None:
    server.content = b"other"
    with pytest.raises(CorruptDataError) as caught:
        take(tmp_path, server)
    assert blake3(CONTENT).hexdigest() in str(caught.value)
    assert blake3(b"other").hexdigest() in str(caught.value)
    assert caught.value.exit_code == 4
    assert not (tmp_path / "raw").exists()
    server.content = CONTENT
    assert_fetched(tmp_path, take(tmp_path, server))


def test_a_range_from_elsewhere_is_refused(tmp_path: Path, server: Server) -> None:
    interrupt(tmp_path, server, 1_000)
    server.wrong_range = True
    with pytest.raises(SourceError, match="Content-Range"):
        take(tmp_path, server)


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_refusal_names_its_status(tmp_path: Path, server: Server, status: int) -> None:
    server.status = status
    with pytest.raises(SourceError, match=str(status)):
        take(tmp_path, server)
    assert not (tmp_path / "raw").exists()


def test_no_server_is_a_clear_error(tmp_path: Path, server: Server) -> None:
    server.shutdown()
    server.server_close()
    with pytest.raises(SourceError, match="not fetched"):
        take(tmp_path, server)


def test_empty_content(tmp_path: Path, server: Server) -> None:
    server.content = b""
    assert take(tmp_path, server, b"").documents[0].size == 0
