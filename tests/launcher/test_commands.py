"""A command on many ranks: what each process finds, who failed first, and that none is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import Interrupted, ProgramError, RequestError, Stopped
from allranks.job.run_folder import read_events
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.linux import state_of
from allranks.launcher.scripts.plan import CommandRequest
from allranks.launcher.scripts.run import CommandWatcher, run_command
from allranks.launcher.scripts.supervise import ForwardedSignals
from allranks.launcher.scripts.topology import parse_roles
from allranks.launcher.start import Result

PATIENCE_S = 60
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def plain_server() -> Iterator[ForkServer]:
    with ForkServer(()) as server:
        yield server


@pytest.fixture
def run(plain_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(script, ranks)`: a script on so many ranks, in a run folder named `run`."""
    monkeypatch.chdir(tmp_path)

    def run(script: str, ranks: int = 2, **request: Any) -> Result:
        watcher, forwarded = request.pop("watcher", None), request.pop("forwarded", None)
        (tmp_path / "script.py").write_text("import os, sys, time\n" + textwrap.dedent(script))
        request.setdefault("command", (sys.executable, "script.py"))
        request.setdefault("run_dir", str(tmp_path / "run"))
        asked = CommandRequest(processes=ranks, **request)
        return run_command(
            asked, plain_server, watcher=watcher, signals=forwarded or ForwardedSignals()
        )

    return run


def log(folder: Path, rank: int) -> str:
    return (folder / "run" / "logs" / f"rank-{rank:03d}.log").read_text()


def events(folder: Path, *names: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "run") if event["event"] in names]


def ends_badly(run: Run, *words: Any, **request: Any) -> list[str]:
    """The lines of the report of a run that fails."""
    with pytest.raises(ProgramError) as raised:
        run(*words, **request)
    return str(raised.value).splitlines()


class Sends(CommandWatcher):
    """Sends signals to the job, each once all ranks have printed a word."""

    def __new__(
        cls, forwarded: ForwardedSignals, folder: Path, ranks: int, *plan: tuple[str, int]
    ) -> Any:
        left = list(plan)

        def tick() -> None:
            word = left and left[0][0]
            if left and all(word in log(folder, rank) for rank in range(ranks)):
                forwarded._note(left.pop(0)[1], None)

        return CommandWatcher(tick=tick)


# --- what a process finds ---------------------------------------------------------------------


def test_a_process_is_as_a_shell_would_start_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    script = """
    import json, signal
    print(json.dumps({
        "rank": os.environ["RANK"], "size": os.environ["WORLD_SIZE"], "argv": sys.argv,
        "stdin": sys.stdin.read(), "files": sorted(map(int, os.listdir("/proc/self/fd")))[:3],
        "many": len(os.listdir("/proc/self/fd")), "cwd": os.getcwd(),
        "blas": os.environ["OPENBLAS_NUM_THREADS"], "id": os.environ["TORCHELASTIC_RUN_ID"],
        "handled": [int(n) for n in signal.Signals if signal.getsignal(n) == signal.SIG_IGN],
    }))
    """
    command = (sys.executable, "script.py", "--name", "a b'c")
    result = run(script, 3, command=command)
    for rank in range(3):
        found = json.loads(log(tmp_path, rank))
        assert found == {
            "rank": str(rank),
            "size": "3",
            "argv": ["script.py", "--name", "a b'c"],
            "stdin": "",
            "files": [0, 1, 2],
            "many": 4,  # and the folder that is listed
            "cwd": str(tmp_path),
            "blas": "3",
            "id": "run",
            "handled": [signal.SIGPIPE, signal.SIGXFSZ],  # what Python itself ignores
        }
    assert result.summary["exits"] == {0: 0, 1: 0, 2: 0} and result.summary["world_size"] == 3


def test_a_program_finds_no_signal_ignored(run: Run, tmp_path: Path) -> None:
    run("", 1, command=("sh", "-c", "grep SigIgn /proc/$$/status"))
    of_libc = 0b11 << 31  # 32 and 33 are libc's own: no program can set them
    assert int(log(tmp_path, 0).split()[1], 16) & ~of_libc == 0


@pytest.mark.parametrize("argument", ["--local_rank", "--local-rank"])
def test_the_local_rank_stands_behind_the_script(run: Run, tmp_path: Path, argument: str) -> None:
    command = (sys.executable, "-X", "dev", "-u", "script.py", "--lr", "1")
    run("print(sys.argv[1:])", command=command, local_rank_argument=argument)
    assert log(tmp_path, 1) == f"['{argument}=1', '--lr', '1']\n"


def test_secrets_are_not_written_down(run: Run, tmp_path: Path) -> None:
    command = (sys.executable, "script.py", "--api-key", "abc123", "--token=xyz789", "--lr", "1")
    run("", 1, command=command)
    written = "".join(p.read_text() for p in (tmp_path / "run").glob("*.*"))
    assert "abc123" not in written and "xyz789" not in written
    job = tomllib.loads((tmp_path / "run" / "job.toml").read_text())
    assert job["command"].endswith("script.py --api-key '[redacted]' '--token=[redacted]' --lr 1")
    assert (job["kind"], job["ranks"]) == ("run", 1)


# --- how it ends ------------------------------------------------------------------------------


def test_the_rank_that_failed_is_named(run: Run, tmp_path: Path) -> None:
    script = """
    def step(): raise ValueError("on purpose")
    if os.environ["RANK"] == "1": step()
    time.sleep(600)
    """
    lines = ends_badly(run, script, 3)
    assert lines[0].startswith("rank 1 on ")
    assert lines[0].endswith(" failed first: exit code 1: ValueError: on purpose")
    assert any("in step" in line for line in lines)
    assert "stopped because of it: rank 0, 2" in lines
    assert lines[-1] == f"its output: {tmp_path}/run/logs/rank-001.log"
    (failed,) = events(tmp_path, "failed")
    assert failed["exits"] == {"0": -signal.SIGTERM, "1": 1, "2": -signal.SIGTERM}


def test_a_victim_is_not_named_though_it_ends_first(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allranks.launcher.supervisor.GRACE_S", PATIENCE_S)
    script = """
    import pathlib, signal
    if os.environ["RANK"] == "0":
        pathlib.Path("victim").touch()
        raise RuntimeError("[gloo/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while not os.path.exists("victim"): time.sleep(0.01)
    time.sleep(0.3)
    raise ValueError("the cause")
    """
    lines = ends_badly(run, script)
    assert lines[0].startswith("rank 1 on ") and lines[0].endswith("ValueError: the cause")
    assert "stopped because of it: rank 0" in lines


def test_a_rank_that_left_with_zero_is_told_of(run: Run) -> None:
    script = """
    if os.environ["RANK"] == "1":
        os.symlink(f"/proc/{os.getpid()}", "left"); sys.exit(0)
    while not os.path.lexists("left") or os.path.exists("left"): time.sleep(0.01)
    raise ConnectionResetError("Connection reset by peer")
    """
    lines = ends_badly(run, script)
    assert "it lost rank 1, which had left with exit code 0" in lines[0]


def test_a_rank_that_is_still_leaving_when_its_peer_fails_is_told_of(run: Run) -> None:
    script = """
    if os.environ["RANK"] == "1":
        open("leaves", "w").close(); time.sleep(0.5); sys.exit(0)
    while not os.path.exists("leaves"): time.sleep(0.01)
    raise ConnectionResetError("Connection reset by peer")
    """
    lines = ends_badly(run, script)
    assert "it lost rank 1, which had left with exit code 0" in lines[0]
    assert lines[1].startswith("rank 1 ended its program while rank 0 went on")


def test_an_interpreter_that_is_not_there_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_bytes(b"#!/bin/bash\r\necho hello\r\n")
    (tmp_path / "train.sh").chmod(0o755)
    ends_badly(run, "", 1, command=("./train.sh",))
    assert "the interpreter of its first line, '/bin/bash\\r'" in log(tmp_path, 0)
    assert "Windows line ends" in log(tmp_path, 0)


TORCH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(100):
    dist.all_reduce(torch.ones(4))
    if step == 5 and dist.get_rank() == 1: FAILS
"""
JAX = """
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
from jax.experimental import multihost_utils
jax.distributed.initialize()
for step in range(100):
    multihost_utils.process_allgather(jax.numpy.ones(4))
    if step == 5 and jax.process_index() == 1: FAILS
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "fails", "told"),
    [
        (TORCH, "raise ValueError('the cause')", "rank 1 on HOST failed first: "),
        (TORCH, "os.kill(os.getpid(), 9)", "rank 1 on HOST failed first: killed by SIGKILL"),
        (TORCH, "os._exit(0)", "it lost rank 1, which had left with exit code 0"),
        (JAX, "os.kill(os.getpid(), 9)", "rank 1 on HOST failed first: killed by SIGKILL"),
    ],
)
def test_the_victims_of_a_framework_are_not_named(
    run: Run, script: str, fails: str, told: str
) -> None:
    lines = ends_badly(run, script.replace("FAILS", fails), 3)
    assert told.replace("HOST", socket.gethostname()) in lines[0]
    if "raise" in fails:  # torch may abort while it is taken apart
        assert lines[0].endswith("ValueError: the cause")


@pytest.mark.slow(but=4)
@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL (it held "),
        ("sys.exit(3)", "exit code 3"),
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV (it held "),
        ("raise MemoryError", "out of memory: exit code 1: MemoryError"),
        ("sys.exit('no data in /data')", "exit code 1: no data in /data"),
        (
            "print('[rank1]: Traceback (most recent call last):\\n"
            '[rank1]:   File "t.py", line 1\\n[rank1]: RuntimeError: torch says so\');sys.exit(1)',
            "exit code 1: RuntimeError: torch says so",
        ),
    ],
)
def test_the_cause_in_words(run: Run, body: str, cause: str) -> None:
    lines = ends_badly(run, f"if os.environ['RANK'] == '1': {body}\ntime.sleep(600)")
    assert f"failed first: {cause}" in lines[0]


def test_a_fatal_signal_leaves_a_stack(run: Run) -> None:
    lines = ends_badly(
        run, "def deep(): os.abort()\nif os.environ['RANK'] == '1': deep()\ntime.sleep(600)"
    )
    assert "killed by SIGABRT" in lines[0]
    assert any("in deep" in line for line in lines)


def test_a_program_that_is_not_there_is_not_tried_again(run: Run, tmp_path: Path) -> None:
    lines = ends_badly(run, "", command=("no-such-program",), max_restarts=3)
    assert "exit code 127 (there is no such program): allranks: 'no-such-program'" in lines[0]
    assert len(events(tmp_path, "attempt")) == 1


def test_a_program_that_cannot_be_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello\n")
    (tmp_path / "notes.txt").chmod(0o755)
    lines = ends_badly(run, "", 1, command=("./notes.txt",))
    assert "exit code 126" in lines[0] and "begins with a line like #!/bin/sh" in lines[0]


def test_what_a_process_has_started_is_gone_with_it(run: Run, tmp_path: Path) -> None:
    script = """
    import subprocess
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print(child.pid, flush=True)
    if os.environ["RANK"] == "1": sys.exit(1)
    """
    ends_badly(run, script)
    assert all(state_of(int(log(tmp_path, rank))) in ("", "Z") for rank in range(2))


# --- again ------------------------------------------------------------------------------------


def test_a_fault_is_followed_by_another_attempt_with_other_ports(run: Run, tmp_path: Path) -> None:
    script = """
    count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print(os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
    if count < 2 and os.environ["RANK"] == "0": raise ValueError(f"attempt {count}")
    if count < 2: time.sleep(600)
    """
    told: list[str] = []
    result = run(script, max_restarts=3, watcher=CommandWatcher(report=told.append))
    assert result.summary["restarts"] == 2
    lines = log(tmp_path, 1).splitlines()
    assert len(set(lines)) == 3 and {line.split()[1] for line in lines} == {"3"}
    assert [line.splitlines()[0].rpartition(": ")[2] for line in told] == ["attempt 0", "attempt 1"]
    assert [event["first_rank"] for event in events(tmp_path, "restart")] == [0, 0]


def test_only_the_last_words_of_the_last_attempt_count(run: Run) -> None:
    script = """
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0": raise ValueError("the first")
    os._exit(7)
    """
    lines = ends_badly(run, script, 1, max_restarts=1)
    assert lines[0].endswith("failed first: exit code 7") and "ValueError" not in "".join(lines)


def test_a_folder_that_was_interrupted_is_gone_on_with(run: Run, tmp_path: Path) -> None:
    script = "if not os.path.exists('seen'): open('seen', 'w'); sys.exit(1)"
    ends_badly(run, script, 1)
    assert run(script, 1).summary["exits"] == {0: 0}
    assert len(events(tmp_path, "attempt")) == 2
    with pytest.raises(RequestError, match="something is there already"):
        run(script, 1)  # it is done


# --- asked to stop ----------------------------------------------------------------------------

SAVES = """
import signal
def save(number, frame):
    time.sleep(3)
    print("saved", flush=True)
    sys.exit(0)
if os.environ["RANK"] == "0": signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_who_saves_at_a_signal_has_the_grace_for_it(run: Run, tmp_path: Path) -> None:
    """Rank 1 dies of the signal at once; rank 0 is not hurried because of it."""
    forwarded = ForwardedSignals()
    watcher = Sends(forwarded, tmp_path, 2, ("ready", signal.SIGTERM))
    with pytest.raises(Interrupted, match=r"SIGTERM.*rank 0: 0, rank 1: SIGTERM"):
        run(SAVES, watcher=watcher, forwarded=forwarded, max_restarts=3, grace_s=PATIENCE_S)
    assert "saved" in log(tmp_path, 0)
    assert len(events(tmp_path, "attempt")) == len(events(tmp_path, "interrupted")) == 1


def test_scripts_that_all_save_and_leave_are_stopped_and_may_go_on(
    run: Run, tmp_path: Path
) -> None:
    """With 4, as a task that was stopped: a scheduler puts the job back into its queue for that."""
    script = """
    import signal
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("ready", flush=True)
    while True: time.sleep(600)
    """
    forwarded = ForwardedSignals()
    watcher = Sends(forwarded, tmp_path, 2, ("ready", signal.SIGTERM))
    with pytest.raises(Stopped, match=r"stopped \(SIGTERM\)") as stopped:
        run(script, watcher=watcher, forwarded=forwarded, grace_s=PATIENCE_S)
    assert stopped.value.exit_code == 4
    assert len(events(tmp_path, "stopped")) == 1 and not events(tmp_path, "done")


def test_after_the_grace_all_are_killed(run: Run, tmp_path: Path) -> None:
    script = (
        "import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('ready', "
        "flush=True)\ntime.sleep(600)"
    )
    forwarded = ForwardedSignals()
    watcher = Sends(forwarded, tmp_path, 2, ("ready", signal.SIGTERM))
    with pytest.raises(Interrupted, match="rank 0: SIGKILL, rank 1: SIGKILL"):
        run(script, watcher=watcher, forwarded=forwarded, grace_s=0.2)


def test_ctrl_c_twice_waits_for_nobody(run: Run, tmp_path: Path) -> None:
    script = """
    import signal
    signal.signal(signal.SIGINT, lambda *_: print("once", flush=True))
    print("ready", flush=True)
    while True: time.sleep(600)
    """
    forwarded = ForwardedSignals()
    both = (("ready", signal.SIGINT), ("once", signal.SIGINT))
    with pytest.raises(Interrupted, match="SIGKILL"):
        run(script, watcher=Sends(forwarded, tmp_path, 2, *both), forwarded=forwarded, grace_s=600)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_message_is_passed_on_and_the_job_goes_on(
    run: Run, tmp_path: Path, number: signal.Signals
) -> None:
    script = f"""
    import signal
    heard = []
    signal.signal({int(number)}, lambda *_: heard.append(1))
    print("ready", flush=True)
    while not heard: time.sleep(0.01)
    print("heard it")
    """
    forwarded = ForwardedSignals()
    result = run(
        script, watcher=Sends(forwarded, tmp_path, 2, ("ready", number)), forwarded=forwarded
    )
    assert result.summary["exits"] == {0: 0, 1: 0}
    assert all("heard it" in log(tmp_path, rank) for rank in range(2))


def test_who_does_not_know_a_message_dies_of_it(run: Run, tmp_path: Path) -> None:
    forwarded = ForwardedSignals()
    watcher = Sends(forwarded, tmp_path, 2, ("ready", signal.SIGUSR1))
    with pytest.raises(Interrupted, match="SIGUSR1"):
        run("print('ready', flush=True)\ntime.sleep(600)", watcher=watcher, forwarded=forwarded)


def test_the_time_limit(run: Run) -> None:
    with pytest.raises(Interrupted, match="time limit"):
        run("time.sleep(600)", time_limit_s=0.5)


@pytest.mark.slow
def test_silence_ends_in_the_stacks_of_all(run: Run, tmp_path: Path) -> None:
    script = """
    import threading
    def waits_for_the_other(): time.sleep(600)
    for _ in range(50): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    print("begins", flush=True)
    waits_for_the_other()
    """
    lines = ends_badly(run, script, hang_timeout_s=5.0)
    assert lines[0] == "no output of any process for 5 s (--hang-timeout)"
    assert sum("in waits_for_the_other" in line for line in lines) == 2 and len(lines) < 60
    written = (tmp_path / "run" / "logs" / "hang-0.txt").read_text()
    assert written.count("in waits_for_the_other") == 2 and written.count("Thread 0x") == 100


@pytest.mark.slow
def test_who_prints_now_and_then_is_alive(run: Run) -> None:
    script = """
    if os.environ["RANK"] == "0": time.sleep(9); sys.exit()
    for _ in range(16): time.sleep(0.5); print(".", flush=True)
    """
    assert run(script, hang_timeout_s=5.0).summary["exits"] == {0: 0, 1: 0}


# --- roles ------------------------------------------------------------------------------------


def test_the_job_is_done_when_the_chief_is(run: Run, tmp_path: Path) -> None:
    script = """
    if os.environ["ROLE_NAME"] != "chief": time.sleep(600)
    print("trained")
    """
    roles = parse_roles("chief=1,worker=1,ps=1")
    result = run(script, 3, roles=roles)
    assert result.summary["exits"] == {0: 0, 1: -signal.SIGTERM, 2: -signal.SIGTERM}
    assert log(tmp_path, 0) == "trained\n"


@pytest.mark.slow
def test_an_evaluator_may_finish_when_the_chief_has(run: Run, tmp_path: Path) -> None:
    script = """
    if os.environ["ROLE_NAME"] == "evaluator":
        while not os.path.exists("trained"): time.sleep(0.01)
        time.sleep(4)
        print("evaluated")
    else:
        open("trained", "w").close()
    """
    result = run(script, 2, roles=parse_roles("chief=1,evaluator=1"), grace_s=PATIENCE_S)
    assert result.summary["exits"] == {0: 0, 1: 0} and log(tmp_path, 1) == "evaluated\n"


def test_a_server_that_fails_fails_the_job(run: Run) -> None:
    script = """
    if os.environ["DMLC_ROLE"] == "server": raise OSError("no room")
    time.sleep(600)
    """
    lines = ends_badly(run, script, 3, roles=parse_roles("scheduler=1,server=1,worker=1"))
    assert lines[0].startswith("rank 1 on ") and lines[0].endswith("OSError: no room")


# --- what cannot be ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"roles": (("chief", 3),)}, "exactly one"),
        ({"master_addr": "192.0.2.7"}, "rank 0 listens there"),
        ({"warm": "torch", "command": ("sh", "-c", "true")}, "runs in a fork of "),
        ({"run_dir": "/dev/null/run"}, "a job writes its log"),
    ],
)
def test_a_wrong_request_leaves_no_folder(
    run: Run, tmp_path: Path, request_: dict[str, Any], why: str
) -> None:
    with pytest.raises(RequestError, match=why):
        run("", **request_)
    assert not (tmp_path / "run").exists()


# --- warm -------------------------------------------------------------------------------------


def test_a_warm_script_cannot_tell(plain_server: ForkServer, run: Run, tmp_path: Path) -> None:
    """The same words, plain and in the fork: `__main__`, arguments, path, threads and the end."""
    script = """
    import atexit, json, threading, __main__
    class Here: pass
    atexit.register(lambda: print("at exit"))
    threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
    print(json.dumps([__name__, __file__, sys.argv, sys.path[0], __main__.Here is Here]))
    sys.exit("told at the end")
    """
    told = []
    for warm in ("", "torch"):
        folder = tmp_path / f"warm-{warm}"
        folder.mkdir()
        ends_badly(
            run,
            script,
            1,
            warm=warm,
            run_dir=str(folder / "run"),
            command=(sys.executable, "script.py", "x"),
        )
        told.append(sorted(log(folder, 0).splitlines()))
    assert told[0] == told[1] and len(told[0]) == 4


def test_a_warm_module_and_its_traceback(run: Run, tmp_path: Path) -> None:
    (tmp_path / "package.py").write_text("def fails(): raise ValueError('in it')\nfails()\n")
    lines = ends_badly(run, "", 1, warm="torch", command=(sys.executable, "-m", "package"))
    assert lines[0].endswith("ValueError: in it")
    assert not any("runpy" in line or "exec_command" in line for line in lines)


def test_no_process_outlives_a_watcher_that_breaks(run: Run, tmp_path: Path) -> None:
    def breaks() -> None:
        if log(tmp_path, 1):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run("print(os.getpid(), flush=True)\ntime.sleep(600)", watcher=CommandWatcher(tick=breaks))
    deadline = time.monotonic() + PATIENCE_S
    while state_of(int(log(tmp_path, 1))) not in ("", "Z"):
        assert time.monotonic() < deadline
    assert os.path.exists(tmp_path / "run")
