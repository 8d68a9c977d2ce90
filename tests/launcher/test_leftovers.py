"""Leftovers: what a dead owner left is removed by its name, and nothing else is ever touched."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.launcher.processes import leftovers
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.leftovers import (
    SCRATCH,
    VARIABLE,
    is_dead,
    owner,
    scratch_folder,
    sweep,
)
from allranks.launcher.processes.linux import is_dying, started_at, state_of
from allranks.launcher.processes.process import Process
from launch_host import until

Start = Callable[..., subprocess.Popen[bytes]]
MARK = f"{owner()}/0"  # servers count from 1, and those of other tests live on
OWNER_OF_ITS_OWN = "from allranks.launcher.processes.leftovers import owner; print(owner())"


@pytest.fixture
def dead() -> str:
    """The name of an owner that has ended."""
    done = subprocess.run(
        [sys.executable, "-c", OWNER_OF_ITS_OWN], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that carries this mark in its environment (or none)."""
    started = []

    def run(
        mark: str | None, variables: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[bytes]:
        marked = {} if mark is None else {VARIABLE: mark}
        environment = {"PATH": os.environ["PATH"], **variables, **marked}
        process = subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True)
        started.append(process)
        deadline = time.monotonic() + 60  # until it is `sleep`, with its own environment
        while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
            assert time.monotonic() < deadline
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def assert_only_ended(
    ended: list[subprocess.Popen[bytes]], spared: list[subprocess.Popen[bytes]]
) -> None:
    """The first have ended, and a moment after them the others go on."""
    for process in ended:
        process.wait(60)
    time.sleep(0.3)
    assert not [process.args for process in spared if process.poll() is not None]


# --- names --------------------------------------------------------------------------------------


def test_the_name_of_a_process_is_its_own_and_no_other_ever_has_it(dead: str) -> None:
    assert not is_dead(owner())
    assert is_dead(dead)
    pid, start, here = owner().split(".")
    assert (pid, start) == (str(os.getpid()), started_at(os.getpid()))
    assert is_dead(f"{pid}.{int(start) + 1}.{here}"), "the id was used again"


def test_a_zombie_is_dead() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER_OF_ITS_OWN], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    name = process.stdout.read().strip()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(name)
    process.communicate()


def test_of_another_machine_or_container_nothing_is_known(dead: str) -> None:
    pid, start, here = dead.split(".")
    assert not is_dead(f"{pid}.{start}.{int(here, 16) ^ 1:08x}")


@pytest.mark.parametrize("name", ["", "foo", "1", "1.", ".1", "1.2", "².5.00000000", "9" * 5000])
def test_what_is_no_name_of_ours_is_not_dead(name: str) -> None:
    assert not is_dead(name)


@pytest.mark.slow
@given(st.text())
def test_any_text_is_answered(text: str) -> None:
    assert not is_dead(text)


# --- processes ----------------------------------------------------------------------------------


def test_processes_of_a_dead_owner_are_ended_and_no_others(dead: str, start: Start) -> None:
    left = [start(f"{dead}/1"), start(f"{dead}/2")]
    spared = [start(mark) for mark in (None, f"{owner()}/1", "", "mine", "1.2.3/1", "x" * 80)]
    sweep()
    assert_only_ended(left, spared)


def test_of_one_server_only_what_it_started_is_ended(start: Start) -> None:
    own, others = start(MARK), start(f"{MARK}1")
    leftovers.end_processes_of(MARK)
    assert_only_ended([own], [others])


@pytest.mark.parametrize("variable", ["TMPDIR", "TMP"])
def test_what_a_process_kept_goes_with_it_wherever_its_temporary_files_are(
    variable: str, dead: str, start: Start, tmp_path: Path
) -> None:
    """A fork server whose owner died is ended while it cleans up, by any job that starts."""
    kept, spared = (tmp_path / f"{SCRATCH}{name}" for name in (f"{dead}-1-77", f"{dead}-11-77"))
    kept.mkdir()
    spared.mkdir()
    left = start(f"{dead}/1", {variable: str(tmp_path)})
    sweep()
    assert_only_ended([left], [])
    assert (kept.exists(), spared.exists()) == (False, True)


# --- folders ------------------------------------------------------------------------------------


def test_a_scratch_folder_is_removed_when_its_owner_is_dead(
    dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pid, start, here = dead.split(".")
    elsewhere = f"{int(here, 16) ^ 1:08x}"
    (tmp_path / f"allranks-scratch-{dead}-abc" / "logs").mkdir(parents=True)
    spared = {
        *(f"allranks-scratch-{name}" for name in ("", "-", "mine", "².5-x", "1.2-x", "9" * 200)),
        f"allranks-scratch-{pid}.{start}.{elsewhere}-abc",
        f"allranks-other-{dead}-abc",
    }
    for name in spared:
        (tmp_path / name).mkdir()
    (tmp_path / f"allranks-scratch-{dead}-file").touch()
    (tmp_path / f"allranks-scratch-{dead}-link").symlink_to(tmp_path / "allranks-scratch-mine")
    with scratch_folder() as own:
        sweep()
        assert Path(own).is_dir(), "of the living"
    there = {path.name for path in tmp_path.iterdir()}
    files = {f"allranks-scratch-{dead}-file", f"allranks-scratch-{dead}-link"}
    assert there == spared | files, "only folders, and only those of dead owners of this place"


def test_a_scratch_folder_that_another_start_removes_meanwhile_is_no_error(
    dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = tmp_path / f"allranks-scratch-{dead}-gone"
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([gone]))
    monkeypatch.setattr(leftovers, "_marked", list)
    sweep()


@pytest.mark.parametrize("number", [signal.SIGKILL, 0])
def test_what_multiprocessing_keeps_for_a_rank_goes_with_it(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder of sockets has a random name, and nobody knew whose it was when it was killed."""
    short = Path(tempfile.mkdtemp(prefix="t"))  # the name of a socket has 107 characters at most
    monkeypatch.setenv("TMPDIR", str(short))  # the server's, and so that of what it starts
    log = tmp_path / "log"
    with ForkServer(()) as server:
        environment = {"PYTHONPATH": os.environ["PYTHONPATH"]}
        target = "launch_workers:keeps_sockets"
        server.spawn(Process(0, target, {"number": int(number)}, environment, log))
        deadline = time.monotonic() + 60
        while not (ended := server.exits(0.1)):
            assert time.monotonic() < deadline
        made = Path(log.read_text().strip())
        assert ended[0].code == -number and made.is_relative_to(short)
    short.rmdir()  # it is empty


def test_shared_memory_of_an_ended_process_is_removed_by_its_number() -> None:
    names = [f"/dev/shm/torch_{os.getpid()}{rest}" for rest in ("_1_0", "0_1_0", "")]
    for name in names:
        Path(name).touch()
    try:
        leftovers.remove_shared_memory(os.getpid())
        assert [Path(name).exists() for name in names] == [False, True, True]
    finally:
        for name in names:
            Path(name).unlink(missing_ok=True)


def test_what_a_killed_leftover_kept_in_shared_memory_goes_with_it(start: Start) -> None:
    killed, spared = start(MARK), start(f"{MARK}1")
    names = [f"/dev/shm/torch_{process.pid}_1_0" for process in (killed, spared)]
    for name in names:
        Path(name).touch()
    try:
        leftovers.end_processes_of(MARK)
        assert [Path(name).exists() for name in names] == [False, True]
    finally:
        for name in names:
            Path(name).unlink(missing_ok=True)


def test_what_loader_processes_of_the_dead_kept_is_found_by_the_notes_in_a_folder(
    dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank and loader processes ended before anyone saw them; of a process that lives, nothing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pid, living = dead.partition(".")[0], str(os.getpid())
    assert not started_at(int(pid)), "the id was used again"
    folder = tmp_path / f"allranks-scratch-{dead}-1-{pid}"
    folder.mkdir()
    process = multiprocessing.process.current_process()
    monkeypatch.setitem(process._config, "tempdir", str(folder))  # type: ignore[attr-defined]
    leftovers.note_names()
    assert os.listdir(folder) == [living]
    names = [Path(f"/dev/shm/torch_{number}_1_0") for number in (pid, living)]
    for name in names:
        name.touch()
    try:
        sweep()
        assert [name.exists() for name in names] == [False, True]
        assert not folder.exists()
    finally:
        for name in names:
            name.unlink(missing_ok=True)


STARTS = """
import sys
from allranks.launcher.processes import leftovers
from allranks.launcher.processes.fork_server_client import ForkServer
leftovers.owner = lambda: "nobody"  # a sweep by another test would end it
server = ForkServer(("imports_for_ever",))  # it ends as soon as nobody holds it
print(server._process.pid, flush=True)
sys.stdin.read()
"""


def test_a_fork_server_that_still_imports_ends_with_its_owner(tmp_path: Path) -> None:
    """It reads no socket yet, and imports take seconds."""
    (tmp_path / "imports_for_ever.py").write_text(
        "import pathlib, time; pathlib.Path(__file__).with_name('begun').touch(); time.sleep(600)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", STARTS],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    try:
        until(lambda: (tmp_path / "begun").exists(), "the import to begin")
        owner.kill()
        owner.wait()  # not for the end of its output, which the fork server holds too
        until(lambda: state_of(pid) in ("", "Z"), "the end of the fork server", 60)
    finally:
        owner.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        owner.communicate()


@pytest.mark.slow
def test_what_torch_makes_as_it_is_imported_is_removed(tmp_path: Path) -> None:
    """A fork server of torch leaves no `torchinductor_USER` among the temporary files."""
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    variables.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch sets it in this process
    words = [sys.executable, "-c", "import allranks.torch.preload"]
    subprocess.run(words, env=variables, check=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("end", ["exits 3", "exits 0", "is killed", "runs", "is stopped"])
def test_who_ends_with_a_bad_code_is_known_before_it_is_reaped(end: str) -> None:
    code = {"exits 3": "raise SystemExit(3)", "exits 0": ""}.get(end, "import time; time.sleep(99)")
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    try:
        if end in ("is killed", "is stopped"):
            process.send_signal(signal.SIGKILL if end == "is killed" else signal.SIGSTOP)
        state = {"runs": "S", "is stopped": "T"}.get(end, "Z")
        until(lambda: state_of(process.pid) == state, state)
        assert is_dying(process.pid) == (end in ("exits 3", "is killed"))
    finally:
        process.kill()
        process.wait()
