"""Fetching: once for all processes of a node, checked, and never half a file under its name."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from allranks.errors import RequestError
from allranks.programs.readers.stream import LOCK, Remote, fetch

CONTENT = bytes(range(256)) * 4000
FETCHING = """
import sys
from allranks.programs.readers.stream import Remote, fetch
print("started", flush=True)
sys.stdin.readline()
print(*fetch([Remote(sys.argv[1], sys.argv[2])], sys.argv[3]))
"""


class Server(ThreadingHTTPServer):
    """Serves CONTENT under every name; `cut` sends half of it and then waits for `go_on`."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.cut, self.go_on = False, threading.Event()
        self.go_on.set()

    def remote(self, name: str = "a.bin", kind: str = "sha256") -> Remote:
        url = f"http://127.0.0.1:{self.server_address[1]}/{name}"
        return Remote(url, f"{kind}:{hashlib.new(kind, CONTENT).hexdigest()}")


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        half = len(CONTENT) // 2
        self.wfile.write(CONTENT[:half])
        self.wfile.flush()
        self.server.go_on.wait(60)
        if not self.server.cut:
            with contextlib.suppress(ConnectionError):  # whoever asked was killed
                self.wfile.write(CONTENT[half:])

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.go_on.set()
        server.shutdown()
        thread.join()


def fetching(remote: Remote, folder: Path) -> subprocess.Popen[str]:
    """A process that has started, and fetches once it is told to."""
    command = [sys.executable, "-c", FETCHING, remote.url, remote.digest, str(folder)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    return process


def begin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.01)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["sha256", "md5"])
def test_files_are_fetched_once_and_then_there(
    web: Server, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    remotes = [web.remote("a.bin", kind), web.remote("b.bin", kind)]
    folder = tmp_path / "new" / "data"
    for _ in range(2):
        assert fetch(remotes, folder) == [folder / "a.bin", folder / "b.bin"]
    assert web.asked == ["/a.bin", "/b.bin"] and names(folder) == [LOCK, "a.bin", "b.bin"]
    assert (folder / "b.bin").read_bytes() == CONTENT
    assert capsys.readouterr().err.count("fetching http") == 2


def test_of_two_processes_at_once_one_fetches_and_the_other_waits(
    web: Server, tmp_path: Path
) -> None:
    web.go_on.clear()
    processes = [fetching(web.remote(), tmp_path) for _ in range(2)]
    for process in processes:
        begin(process)
    wait_for(tmp_path / ".a.bin.part")
    assert names(tmp_path) == [".a.bin.part", LOCK]  # not under its name before it is whole
    web.go_on.set()
    told = [process.communicate(timeout=60) for process in processes]
    assert [out for out, _ in told] == [f"{tmp_path / 'a.bin'}\n"] * 2, told
    assert web.asked == ["/a.bin"] and names(tmp_path) == [LOCK, "a.bin"]
    assert sorted(bool(err) for _, err in told) == [False, True]  # one says that it fetches


def test_a_process_killed_while_it_fetches_leaves_the_way_free(web: Server, tmp_path: Path) -> None:
    web.go_on.clear()
    process = fetching(web.remote(), tmp_path)
    begin(process)
    wait_for(tmp_path / ".a.bin.part")
    process.kill()
    process.communicate(timeout=60)
    web.go_on.set()
    assert names(tmp_path) == [".a.bin.part", LOCK]
    assert fetch([web.remote()], tmp_path)[0].read_bytes() == CONTENT
    assert names(tmp_path) == [LOCK, "a.bin"]


def test_a_wrong_digest_is_refused_and_removed(web: Server, tmp_path: Path) -> None:
    right = web.remote()
    wrong = Remote(right.url, f"md5:{'0' * 32}")
    with pytest.raises(RequestError) as caught:
        fetch([wrong], tmp_path)
    assert "0" * 32 in caught.value.asked
    assert hashlib.md5(CONTENT).hexdigest() in caught.value.found
    assert names(tmp_path) == [LOCK]
    (tmp_path / "a.bin").write_bytes(CONTENT[:-1])  # put there by hand: refused, but not removed
    with pytest.raises(RequestError, match=r"remove .*a.bin"):
        fetch([right], tmp_path)
    assert names(tmp_path) == [LOCK, "a.bin"]


def test_a_connection_that_breaks_off_leaves_nothing(web: Server, tmp_path: Path) -> None:
    web.cut = True
    with pytest.raises(RequestError):
        fetch([web.remote()], tmp_path)
    assert names(tmp_path) == [LOCK]
    web.cut = False
    assert fetch([web.remote()], tmp_path)[0].read_bytes() == CONTENT


def test_without_the_network_the_error_says_what_to_put_where(web: Server, tmp_path: Path) -> None:
    remotes = [web.remote("missing"), web.remote("other")]
    with pytest.raises(RequestError) as caught:
        fetch(remotes, tmp_path)
    assert "404" in caught.value.found and remotes[0].url in caught.value.asked
    for part in (str(tmp_path), "missing", "other", *(remote.digest for remote in remotes)):
        assert part in caught.value.do
    web.go_on.set()
    nobody = Remote("http://127.0.0.1:9/a.bin", remotes[0].digest)
    with pytest.raises(RequestError, match="refused"):
        fetch([nobody], tmp_path)
    assert names(tmp_path) == [LOCK]


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(RequestError, match="--set data="):
        fetch([Remote("http://127.0.0.1:9/a.bin", "md5:0")], tmp_path / "file" / "data")
