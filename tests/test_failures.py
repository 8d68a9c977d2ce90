"""Everything that stops a run, made on purpose with real ranks that train: who is named, how soon,
what is started again, with which result, and what is left (nothing).

Times are taken from the events of the run, on one monotonic clock: from the first step of the
attempt, which is before the fault, to the end that the supervisor wrote. The bounds only say that
nobody waited for a time-out of Gloo or of the job; how soon it is on a machine at ease is measured
in `benchmarks/`.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpoint.folder import committed, step_of
from allranks.cli.main import cli
from allranks.errors import ProgramError, RequestError
from allranks.job.config import resolve
from allranks.job.run_folder import RunFolder, read_events, read_rows
from allranks.launcher.processes import leftovers
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.linux import started_at, state_of
from allranks.launcher.start import Result, run_job
from conftest import TASKS
from launch_host import NOTHING_LEFT_S, Host, Launch, until

STEPS = 12
WITHIN_S = 30.0
HOST = socket.gethostname()
Train = Callable[..., Result]


@pytest.fixture(scope="module")
def undisturbed(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The SHA-256 of the weights of `digits` on 2 ranks after `STEPS` steps."""
    flags = {"ranks": 2, "steps": STEPS, "run_dir": str(tmp_path_factory.mktemp("run") / "run")}
    result = run_job(resolve("digits", flags), server)
    return str(result.summary["weights_sha256"])


def run(train: Train, tmp_path: Path, **flags: Any) -> Result:
    """`digits` on 2 ranks, in the run folder `run`."""
    return train(
        "digits", **{"ranks": 2, "steps": STEPS, "run_dir": str(tmp_path / "run"), **flags}
    )


def failed(train: Train, tmp_path: Path, **flags: Any) -> str:
    """The report of a run that fails."""
    with pytest.raises(ProgramError) as error:
        run(train, tmp_path, **flags)
    return str(error.value)


def named(path: Path, name: str, rank: int | None = None) -> list[dict[str, Any]]:
    return [e for e in read_events(path) if e["event"] == name and e["rank"] == rank]


def seconds_to_the_end(path: Path) -> float:
    """From the first step of the last attempt (before the fault) to the supervisor's last word."""
    end = [e for e in read_events(path) if e["rank"] is None][-1]
    begun = [e for e in read_events(path) if e["event"] == "training"]
    return float(end["monotonic"]) - min(float(e["monotonic"]) for e in begun)


# --- a rank dies ------------------------------------------------------------------------------


def test_a_rank_that_is_killed_is_named_with_host_and_signal(train: Train, tmp_path: Path) -> None:
    text = failed(train, tmp_path, inject="kill@rank=1,step=5")
    first = text.splitlines()[0]
    assert first.startswith(f"rank 1 on {HOST} failed first at step 5: killed by SIGKILL; it could")
    assert "stopped because of it: rank 0" in text
    assert seconds_to_the_end(tmp_path / "run") < WITHIN_S
    (last,) = named(tmp_path / "run", "failed")
    assert last["first_rank"] == 1 and last["exits"]["1"] == -9 and last["report"] == text


@pytest.mark.slow
def test_a_job_that_a_fault_ended_says_how_to_go_on(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = failed(train, tmp_path, inject="kill@rank=1,step=8", checkpoint_every=3)
    (newest, *_) = committed(tmp_path / "run" / "checkpoints")
    again = (
        f"its last checkpoint is that of step {step_of(newest)}; "
        f"resume with: allranks train --run-dir {tmp_path / 'run'}"
    )
    assert text.splitlines()[-1] == again
    capsys.readouterr()
    cli.main(["show", str(tmp_path / "run")], standalone_mode=False)
    assert again in capsys.readouterr().out.splitlines()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_started_again_and_the_result_is_the_same(
    train: Train, tmp_path: Path, undisturbed: str, rank: int
) -> None:
    result = run(
        train, tmp_path, inject=f"kill@rank={rank},step=8", checkpoint_every=3, max_restarts=1
    )
    assert result.summary["weights_sha256"] == undisturbed
    assert result.summary["restarts"] == 1
    (restart,) = named(tmp_path / "run", "restart")
    assert restart["first_rank"] == rank and restart["attempt"] == 0
    assert restart["resumes_from"] in (3, 6), "that of step 6 may not have been committed yet"
    assert restart["lost_steps"] == 8 - restart["resumes_from"]
    assert "killed by SIGKILL" in restart["report"]
    assert [e["attempt"] for e in named(tmp_path / "run", "attempt")] == [0, 1]
    assert result.summary["resumed_from_step"] == restart["resumes_from"]
    steps = [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")]
    assert steps == list(range(STEPS)), "every step is there once"


@pytest.mark.slow
def test_without_a_checkpoint_it_starts_from_the_beginning(
    train: Train, tmp_path: Path, undisturbed: str
) -> None:
    result = run(train, tmp_path, inject="kill@rank=1,step=5", max_restarts=1)
    assert result.summary["weights_sha256"] == undisturbed
    (restart,) = named(tmp_path / "run", "restart")
    assert (restart["resumes_from"], restart["lost_steps"]) == (0, 5)
    steps = [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")]
    assert steps == list(range(STEPS)), "every step is there once"


@pytest.mark.slow
def test_restarts_come_to_an_end(train: Train, tmp_path: Path) -> None:
    text = failed(train, tmp_path, inject="kill@rank=1,step=5,attempt=-1", max_restarts=2)
    assert "killed by SIGKILL" in text
    assert len(named(tmp_path / "run", "restart")) == 2
    assert len(named(tmp_path / "run", "attempt")) == 3


# --- a rank raises ----------------------------------------------------------------------------


def test_a_rank_that_raises_is_named_with_step_and_cause(train: Train, tmp_path: Path) -> None:
    text = failed(train, tmp_path, inject="fail@rank=1,step=5")
    cause = "Injected: fail on rank 1 at step, as asked"
    assert text.splitlines()[0] == f"rank 1 on {HOST} failed first at step 5: {cause}"
    assert "Traceback (most recent call last)" in text
    (said,) = named(tmp_path / "run", "failed", rank=1)
    (end,) = named(tmp_path / "run", "failed")
    assert end["monotonic"] - said["monotonic"] < WITHIN_S


@pytest.mark.slow
def test_a_fault_that_repeats_with_no_step_between_ends_the_job(
    train: Train, tmp_path: Path
) -> None:
    failed(train, tmp_path, inject="fail@step=5,attempt=-1", max_restarts=5, checkpoint_every=3)
    assert len(named(tmp_path / "run", "restart")) == 1, "once it was tried again"


@pytest.mark.slow
def test_a_fault_that_comes_later_each_time_is_tried_again(
    train: Train, tmp_path: Path, undisturbed: str
) -> None:
    faults = "fail@step=4,attempt=0 fail@step=7,attempt=1 fail@step=10,attempt=2"
    result = run(train, tmp_path, inject=faults, max_restarts=3, checkpoint_every=2)
    assert result.summary["weights_sha256"] == undisturbed
    resumed = [e["resumes_from"] for e in named(tmp_path / "run", "restart")]
    assert resumed == sorted(resumed) and len(resumed) == 3


def test_a_bad_request_is_not_tried_again(train: Train, tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        train("bad_tasks:ScalarLoss", ranks=2, max_restarts=3, run_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_what_was_trained_is_kept_though_the_program_was_broken_meanwhile(
    train: Train, tmp_path: Path
) -> None:
    """A bad request removes the run folder, but never after an attempt that trained."""
    flags = {"inject": "kill@rank=1,step=8", "checkpoint_every": 3, "max_restarts": 3}
    with pytest.raises(ProgramError, match="this file was edited"):
        train(
            "failure_tasks:BreaksLater",
            **{"ranks": 2, "steps": STEPS, "run_dir": str(tmp_path / "run"), **flags},
        )
    assert committed(tmp_path / "run" / "checkpoints")
    assert len(named(tmp_path / "run", "attempt")) == 2, "and it is not tried a third time"
    assert named(tmp_path / "run", "failed")


# --- a rank leaves ----------------------------------------------------------------------------


@pytest.mark.slow
def test_exit_code_0_in_mid_training_is_a_fault(train: Train, tmp_path: Path) -> None:
    text = failed(train, tmp_path, inject="exit@rank=1,step=5,code=0")
    assert text.splitlines()[0] == (
        f"rank 1 on {HOST} failed first at step 5: it left with exit code 0 before the training "
        "was done: who calls os._exit?"
    )
    assert seconds_to_the_end(tmp_path / "run") < WITHIN_S


def test_the_only_rank_leaves_with_0(train: Train, tmp_path: Path) -> None:
    assert "exit code 0" in failed(train, tmp_path, ranks=1, inject="exit@step=5,code=0")


def test_sys_exit_of_a_program_is_named(train: Train, tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"rank 1 on .* failed first at step 2: SystemExit: 0"):
        train("failure_tasks:Exits", ranks=2, run_dir=str(tmp_path / "run"))


HUNG_S = 4.0  # a rank of a loaded machine is silent for seconds while it starts


@pytest.mark.slow
@pytest.mark.thinned(1, ("fault", ["abort", "kill", "exit", "hang", "stop"]), ("rank", [0, 1]))
def test_whatever_happens_to_a_process_after_it_is_done_the_job_is_done(
    train: Train, tmp_path: Path, undisturbed: str, fault: str, rank: int
) -> None:
    result = run(
        train, tmp_path, inject=f"{fault}@rank={rank},at=done", hang_timeout=HUNG_S, max_restarts=1
    )
    assert result.summary["weights_sha256"] == undisturbed
    assert result.summary["restarts"] == 0


# --- a rank shows no sign of life -------------------------------------------------------------


def assert_named_in_time(text: str, path: Path, *, rank: int = 1, at: str) -> None:
    lines = text.splitlines()
    assert lines[0] == f"no sign of life for {HUNG_S:g} s (--hang-timeout)"
    assert lines[1].startswith(f"rank {rank} on {HOST} is missing: in ")
    assert at in text.split("rank 0 waits")[0], "its stack"
    assert seconds_to_the_end(path) < HUNG_S + WITHIN_S


@pytest.mark.slow(but=1)
@pytest.mark.cases(
    ("inject", "said", "at"),
    [
        ("hang@rank=1,at=evaluate", ["running: computing, or in an endless loop"], "in evaluate"),
        ("slow@rank=1,at=start,seconds=600", ["in `start`", "sleeping"], "in _slow"),
    ],
    exhaustive=[  # `stop` is in `test_after_a_hang_it_is_started_again` too
        ("stop@rank=1,step=5", ["stopped by a signal"], "in _stop"),
        ("hang@rank=1,step=5", ["running: computing, or in an endless loop"], "in _hang"),
        ("slow@rank=1,step=5,seconds=600", ["sleeping"], "in _slow"),
    ],
)
def test_a_rank_that_stands_still_is_named_with_its_stack(
    train: Train, tmp_path: Path, inject: str, said: list[str], at: str
) -> None:
    text = failed(train, tmp_path, inject=inject, hang_timeout=HUNG_S)
    if "at=start" not in inject:
        assert_named_in_time(text, tmp_path / "run", at=at)
    assert all(words in text.splitlines()[1] for words in said) and at in text
    assert "rank 0 waits in `exchange`" in text
    whole = (tmp_path / "run" / "logs" / "hang-0.txt").read_text()
    assert whole.startswith("rank 1 (missing): ") and "rank 0: in `exchange`" in whole


@pytest.mark.slow
def test_a_rank_stuck_in_a_save_is_named(train: Train, tmp_path: Path) -> None:
    """All wait in the save; the one at fault stands in the fault, its thread tells."""
    text = failed(
        train,
        tmp_path,
        inject="slow@rank=1,at=save:write,seconds=600",
        checkpoint_every=3,
        hang_timeout=HUNG_S,
    )
    assert f"rank 1 on {HOST} is missing: in `save`" in text and "in _slow" in text
    assert "rank 0 waits in `save`" in text
    assert seconds_to_the_end(tmp_path / "run") < HUNG_S + WITHIN_S


@pytest.mark.slow
@pytest.mark.cases("workers", [1], exhaustive=[0])
def test_a_rank_stuck_in_reading_data_is_named(train: Train, tmp_path: Path, workers: int) -> None:
    with pytest.raises(ProgramError) as error:
        train(
            "failure_tasks:StuckInData",
            **{"ranks": 2, "loader_workers": workers, "run_dir": str(tmp_path / "run")},
            hang_timeout=HUNG_S,
        )
    lines = str(error.value).splitlines()
    assert lines[1].startswith(f"rank 1 on {HOST} is missing: in `data`")
    assert "rank 0 waits in `exchange`" in str(error.value)
    assert ("_try_get_data" if workers else "__getitem__") in str(error.value)


@pytest.mark.slow
def test_a_loop_in_c_that_holds_the_interpreter_is_named(train: Train, tmp_path: Path) -> None:
    with pytest.raises(ProgramError) as error:
        train(
            "failure_tasks:HoldsTheInterpreter",
            **{"ranks": 2, "run_dir": str(tmp_path / "run"), "hang_timeout": HUNG_S},
        )
    assert_named_in_time(str(error.value), tmp_path / "run", at="in go_wrong")
    assert "running: computing, or in an endless loop" in str(error.value)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_collective_more_is_told_with_its_rank_and_line(
    train: Train, tmp_path: Path, ranks: int
) -> None:
    """In shared memory it is told what each of two ranks makes."""
    text = one_more(train, tmp_path, ranks=ranks)
    whole = "all_reduce of 5000 float32"
    told = re.findall(
        r"rank (\d) makes another collective \((.*?)\) than rank (\d) \((.*?)\)", text
    )
    assert told and all(
        (who == "1", than == "1") == (what == whole, other == whole)
        for who, what, than, other in told
    )
    assert any("1" in (who, than) for who, _, than, _ in told)
    found = re.findall(r"([^\s\"]*failure_tasks.py)\"?,? line \d+,? in (\w+)", text)
    assert (str(TASKS / "failure_tasks.py"), "loss") in found


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_gloo_s_words_of_one_collective_more_stand_in_the_report(
    train: Train, tmp_path: Path, ranks: int
) -> None:
    """Gloo ends a rank that waits for something else."""
    text = one_more(train, tmp_path, ranks=ranks, backend="gloo")
    assert "killed by SIGABRT: " in text and "Received data size doesn't match" in text
    assert "no traceback" not in text and "Extension" not in text
    found = re.findall(r"rank (\d) called it: (\S+) line \d+ in (\w+)", text)
    assert found == [("1", str(TASKS / "failure_tasks.py"), "loss")]
    assert text.startswith("rank 1 called a collective that the others did not at step ")


def one_more(train: Train, tmp_path: Path, **flags: Any) -> str:
    """What the report says of a task of which rank 1 makes a collective more."""
    with pytest.raises(ProgramError) as error:
        train("failure_tasks:OneMore", steps=20, run_dir=str(tmp_path / "run"), **flags)
    return str(error.value)


@pytest.mark.slow
def test_a_rank_that_leaves_out_a_collective_is_found(train: Train, tmp_path: Path) -> None:
    """The sums do not fit the step, or the rank waits alone in the end: it is never passed over."""
    text = failed(train, tmp_path, inject="skip-collective@rank=1,step=5", hang_timeout=HUNG_S)
    assert "the ranks are not at the same step" in text or "rank 1 on" in text
    assert seconds_to_the_end(tmp_path / "run") < HUNG_S + WITHIN_S


@pytest.mark.slow
def test_after_a_hang_it_is_started_again(train: Train, tmp_path: Path, undisturbed: str) -> None:
    # who is asked for its stack goes on for a moment: the steps that are left take longer
    result = run(
        train,
        tmp_path,
        **{
            "inject": "stop@rank=1,step=8 slow@rank=0,seconds=0.5",
            "checkpoint_every": 3,
            "max_restarts": 1,
        },
        hang_timeout=HUNG_S,
    )
    assert result.summary["weights_sha256"] == undisturbed
    (restart,) = named(tmp_path / "run", "restart")
    assert restart["first_rank"] == 1
    for words in (
        "no sign of life",
        f"rank 1 on {HOST} is missing",
        "stopped by a signal",
        "in _stop",
    ):
        assert words in restart["report"]


@pytest.mark.slow
def test_a_slow_rank_is_no_hang(train: Train, tmp_path: Path) -> None:
    """Every step takes a good part of the time-out, the whole longer than it."""
    inject = f"slow@rank=1,seconds={0.3 * HUNG_S}"
    result = run(train, tmp_path, inject=inject, steps=4, hang_timeout=HUNG_S)
    assert result.summary["steps"] == 4


# --- memory -----------------------------------------------------------------------------------


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("program", "kind"),
    [("IsRefusedMemory", "MemoryError"), ("IsRefusedMemoryByTorch", "RuntimeError")],
)
def test_memory_that_was_refused_is_out_of_memory(
    train: Train, tmp_path: Path, program: str, kind: str
) -> None:
    with pytest.raises(ProgramError) as error:
        train(f"failure_tasks:{program}", ranks=2, run_dir=str(tmp_path / "run"))
    first = str(error.value).splitlines()[0]
    assert first.startswith(f"rank 1 on {HOST} failed first at step 2: out of memory: {kind}")


@pytest.fixture
def memory_group() -> Iterator[str]:
    """A control group with 800 MB of memory, of the version that this machine has."""
    name = f"allranks-test-{os.getpid()}"
    base = Path("/sys/fs/cgroup")
    if (base / "memory").is_dir():
        group, limits = base / "memory" / name, ["memory.limit_in_bytes"]
    else:
        group, limits = base / name, ["memory.max"]
        with contextlib.suppress(OSError):
            (base / "cgroup.subtree_control").write_text("+memory")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    try:
        if not (group / limits[0]).exists():
            pytest.skip("control groups do not limit memory here")
        (group / limits[0]).write_text(str(800_000_000))
        with contextlib.suppress(OSError):
            (group / "memory.swap.max").write_text("0")
        yield str(group)
        until(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
    finally:
        until(lambda: _removed(group), "the group is removed")


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


@pytest.mark.slow
def test_the_kernels_kill_for_want_of_memory_is_told_as_that(
    host: Host, tmp_path: Path, memory_group: str
) -> None:
    launch = host.launch(
        tmp_path,
        *("train", "failure_tasks:Eats", "--ranks", "2", "--run-dir", "run"),
        groups=[memory_group],
    )
    assert launch.wait() == 1
    first = launch.err.partition("allranks: ")[2].splitlines()[0]
    assert first.startswith(
        f"rank 1 on {HOST} failed first at step 2: out of memory: the kernel killed it at the "
        "limit of its control group (it held "
    )
    launch.assert_nothing_left()


# --- stragglers -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_straggler_is_told_with_rank_host_and_phase(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allranks.launcher.heartbeat.EVERY_S", 0.5)
    monkeypatch.setattr("allranks.launcher.heartbeat.LEAST_S", 0.1)  # of a loaded machine
    flags: dict[str, Any] = {"ranks": 2, "steps": STEPS}
    wanted = train("bad_tasks:Good", **flags)
    flags |= {"inject": "slow@rank=1,seconds=0.3", "run_dir": str(tmp_path / "run")}
    result = train("bad_tasks:Good", **flags)
    rows = [r for r in read_rows(tmp_path / "run" / "events.jsonl") if r["event"] == "straggler"]
    (told,) = (r for r in rows if (r["rank"], r["phase"]) == (1, "compute"))  # a stall is told too
    assert told["host"] == HOST
    assert told["seconds_per_step"] > max(0.2, 2 * told["usual_seconds_per_step"])
    same = result.summary["weights_sha256"] == wanted.summary["weights_sha256"]
    assert same, "told, and not stopped"


# --- the supervisor or the fork server is killed ----------------------------------------------


@pytest.fixture
def launch(host: Host, tmp_path: Path) -> Callable[..., Launch]:
    """`launch(program, *words)`: a training of 2 ranks in the folder `run`, which is under way."""

    def start(program: str, *words: str, **more: Any) -> Launch:
        given = ("train", program, "--ranks", "2", "--run-dir", "run", "--json", *words)
        started = host.launch(tmp_path, *given, **more)
        metrics = tmp_path / "run" / "metrics.jsonl"
        until(
            lambda: started.code is not None or (metrics.exists() and metrics.stat().st_size),
            "the training is under way",
        )
        assert started.code is None, started.err
        return started

    return start


FOR_EVER = ("--steps", "1000000")


@pytest.mark.parametrize("victims", ["supervisor", "server", "both"])
def test_no_death_leaves_a_process_or_a_name(
    launch: Callable[..., Launch], host: Host, tmp_path: Path, victims: str
) -> None:
    """With loader workers, and with a process of each rank in a session of its own."""
    names = set(os.listdir("/dev/shm"))
    going = launch(
        "failure_tasks:StartsSessions",
        *("--loader-workers", "1", *FOR_EVER),
        environment={"PIDS": str(tmp_path)},
    )
    sessions = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(sessions) == 2 and set(sessions) <= set(going.left())
    until(lambda: len(going.workers) == 4, "two loader workers, two sessions")
    server = going.server
    assert server is not None
    if victims != "server":
        os.kill(going.pid, signal.SIGKILL)
    if victims != "supervisor":
        os.kill(server, signal.SIGKILL)
    if victims == "both":
        going.wait()
        host.launch(tmp_path, "train", "failure_tasks:ReadsRows", "--steps", "1").wait()
    elif victims == "server":
        assert going.wait() == 3
        assert "allranks: the fork server ended with code -9" in going.err
    else:
        assert going.wait() == -9
    going.assert_nothing_left()
    assert all(state_of(pid) in ("", "Z") for pid in sessions)
    until(lambda: not _left_in_shared_memory(names), "no name is left", NOTHING_LEFT_S)
    assert not list(Path(os.environ["TMPDIR"]).glob("allranks-scratch-*"))


def _left_in_shared_memory(names: set[str]) -> set[str]:
    """The names beside these of which the owner is dead.

    Tests that run beside may have such ones too; they go by themselves.
    """
    return {name for name in set(os.listdir("/dev/shm")) - names if _owner_is_dead(name)}


def _owner_is_dead(name: str) -> bool:
    number = re.match(r"torch_(\d+)_", name)
    return number is not None and state_of(int(number[1])) in ("", "Z")


@pytest.mark.slow
def test_a_started_program_that_is_killed_leaves_nothing_either(tmp_path: Path) -> None:
    """The same with everything started, not forked: marks, groups and pipes are the real ones."""
    words = ["train", "failure_tasks:StartsSessions", "--ranks", "2", "--loader-workers", "1"]
    command = [sys.executable, "-m", "allranks.cli.main", *words, *FOR_EVER, "--run-dir", "run"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PIDS": str(tmp_path)}, start_new_session=True
    )
    with process:
        here = leftovers.owner().rpartition(".")[2]
        mark = f"{process.pid}.{started_at(process.pid)}.{here}/1"
        metrics = tmp_path / "run" / "metrics.jsonl"
        until(lambda: metrics.exists() and metrics.stat().st_size, "it trains")
        until(lambda: len(leftovers.processes_of(mark)) >= 1 + 2 + 2 + 2, "all are there")
        process.kill()
    until(lambda: not leftovers.processes_of(mark), "no process is left", NOTHING_LEFT_S)


def test_the_death_of_the_fork_server_is_recorded(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    going = launch("bad_tasks:Good", *FOR_EVER)
    assert going.server is not None
    os.kill(going.server, signal.SIGKILL)
    assert going.wait() == 3
    (last,) = named(tmp_path / "run", "failed")
    assert "the fork server ended with code -9" in last["report"]


@pytest.mark.slow
def test_a_fork_server_that_somebody_stopped_goes_on(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    going = launch("bad_tasks:Good", "--steps", "200", *PACED)
    assert going.server is not None
    os.kill(going.server, signal.SIGSTOP)
    assert going.wait() == 0


@pytest.mark.slow
def test_a_job_that_was_suspended_as_a_whole_is_no_hang(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    """Schedulers suspend jobs; while nobody may run, nobody shows a sign of life."""
    going = launch("bad_tasks:Good", "--steps", "200", *PACED, "--hang-timeout", str(HUNG_S))
    everyone = [going.pid, going.server or 0, *going.ranks]
    assert len(everyone) == 4
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 1.2 * HUNG_S
    while time.monotonic() < deadline:
        assert going.code is None
        time.sleep(0.05)
    for pid in everyone:
        os.kill(pid, signal.SIGCONT)
    assert going.wait() == 0, going.err


# --- asked to stop ----------------------------------------------------------------------------

PACED = ("--inject", "slow@seconds=0.02")


@pytest.fixture(scope="module")
def good(host: Host, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The SHA-256 of `bad_tasks:Good` on 2 ranks after 200 steps."""
    folder = tmp_path_factory.mktemp("good")
    words = ("train", "bad_tasks:Good", "--ranks", "2", "--steps", "200", "--json")
    going = host.launch(folder, *words, "--run-dir", "run")
    assert going.wait() == 0, going.err
    return str(going.summary()["weights_sha256"])


def resumes(host: Host, folder: Path, *words: str) -> Launch:
    again = host.launch(folder, "train", "--run-dir", "run", "--json", *words)
    assert again.wait() == 0, again.err
    return again


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1], ids=lambda n: n.name
)
def test_a_signal_commits_and_the_job_can_be_gone_on_with(
    launch: Callable[..., Launch],
    host: Host,
    tmp_path: Path,
    good: str,
    number: signal.Signals,
) -> None:
    going = launch("bad_tasks:Good", "--steps", "200", *PACED)
    going.signal(number)
    assert going.wait() == 4, going.err
    (newest, *_) = committed(tmp_path / "run" / "checkpoints")
    said = going.err.splitlines()[-1]
    assert said == (
        f"allranks: stopped ({number.name}) after step {step_of(newest)}, which is committed; "
        f"resume with: allranks train --run-dir {tmp_path / 'run'}"
    )
    (stopped,) = named(tmp_path / "run", "stopped")
    assert (stopped["reason"], stopped["step"]) == (number.name, step_of(newest))
    going.assert_nothing_left()
    again = resumes(host, tmp_path)
    assert again.summary()["weights_sha256"] == good
    assert again.summary()["resumed_from_step"] == step_of(newest)


@pytest.mark.slow
def test_a_signal_to_every_process_of_the_job_commits_too(
    launch: Callable[..., Launch], host: Host, tmp_path: Path, good: str
) -> None:
    """As schedulers and systemd send it: to the supervisor,
    the fork server and the ranks at once."""
    going = launch("bad_tasks:Good", "--steps", "200", *PACED)
    assert going.server is not None
    for pid in (*going.ranks, going.server, going.pid):
        os.kill(pid, signal.SIGTERM)
    assert going.wait() == 4, going.err
    going.assert_nothing_left()
    assert resumes(host, tmp_path).summary()["weights_sha256"] == good


@pytest.mark.slow
def test_ctrl_c_commits_too_and_is_130(
    launch: Callable[..., Launch], host: Host, tmp_path: Path, good: str
) -> None:
    going = launch("bad_tasks:Good", "--steps", "200", *PACED)
    going.signal(signal.SIGINT)
    assert going.wait() == 130
    assert "stopped (SIGINT) after step" in going.err and "resume with: " in going.err
    assert resumes(host, tmp_path).summary()["weights_sha256"] == good


@pytest.mark.slow
def test_ctrl_c_twice_does_not_wait_for_a_rank_that_hangs(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    going = launch("bad_tasks:Good", *FOR_EVER, "--inject", "hang@rank=1,step=2000")
    until(lambda: _stands_still(going.ranks), "rank 0 waits")
    going.signal(signal.SIGINT)
    time.sleep(0.5)
    assert going.code is None, "once asks, and gives time to commit"
    asked = time.monotonic()
    going.signal(signal.SIGINT)
    assert going.wait() == 130
    assert time.monotonic() - asked < WITHIN_S
    assert "interrupted (SIGINT); every rank is stopped; there is no checkpoint" in going.err
    going.assert_nothing_left()


def _stands_still(pids: list[int]) -> bool:
    """Whether one of the processes did not run while another did: it waits for that one.

    In training no rank runs for so long without the others. One that is only not given a
    processor keeps the others waiting. Who waits looks around ten times a second.
    """
    before = [_ran_s(pid) for pid in pids]
    time.sleep(0.3)
    ran = [_ran_s(pid) - was_s for pid, was_s in zip(pids, before, strict=True)]
    return min(ran) < 0.01 and max(ran) > 0.05


def _ran_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


@pytest.mark.slow
def test_a_checkpoint_on_demand_and_training_goes_on(
    launch: Callable[..., Launch], tmp_path: Path, good: str
) -> None:
    going = launch("bad_tasks:Good", "--steps", "200", *PACED)
    going.signal(signal.SIGUSR2)
    until(lambda: committed(tmp_path / "run" / "checkpoints"), "a checkpoint")
    assert going.wait() == 0, going.err
    assert going.summary()["weights_sha256"] == good
    assert 0 < step_of(committed(tmp_path / "run" / "checkpoints")[0]) < 200


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("point", ["describe", "start"])
def test_asked_to_stop_before_anything_is_trained(host: Host, tmp_path: Path, point: str) -> None:
    words = ("train", "bad_tasks:Good", "--ranks", "2", "--run-dir", "run", *FOR_EVER)
    going = host.launch(tmp_path, *words, "--inject", "slow@at=start,seconds=1")
    if point == "describe":
        until(lambda: going.ranks, "its task is being loaded")
    else:
        until(lambda: (tmp_path / "run" / "events-1.jsonl").exists(), "the ranks come up")
    going.signal(signal.SIGTERM)
    code = going.wait()
    if point == "start":
        assert code == 4 and committed(tmp_path / "run" / "checkpoints")
    else:
        assert code in (4, 130)
        assert (code == 130) == (not (tmp_path / "run").exists())
    assert "Traceback" not in going.err
    going.assert_nothing_left()


@pytest.mark.slow
def test_a_time_limit_stops_with_a_checkpoint_and_the_rest_is_trained_later(
    host: Host, tmp_path: Path, good: str
) -> None:
    words = ("train", "bad_tasks:Good", "--ranks", "2", "--run-dir", "run", "--steps", "200")
    going = host.launch(tmp_path, *words, "--time-limit", "1.5", *PACED)
    assert going.wait() == 4, going.err
    assert "stopped (time limit) after step" in going.err
    again = resumes(host, tmp_path, "--time-limit", "1h")
    assert again.summary()["weights_sha256"] == good


@pytest.mark.slow
def test_a_terminal_that_is_closed_is_a_signal_and_no_failure(
    host: Host, tmp_path: Path, good: str
) -> None:
    """The connection breaks: what shows the progress fails, and SIGHUP asks to stop."""
    ours, theirs = pty.openpty()
    words = ("train", "bad_tasks:Good", "--ranks", "2", "--run-dir", "run", "--steps", "200")
    going = host.launch(tmp_path, *words, *PACED, err=os.ttyname(theirs))
    os.close(theirs)
    metrics = tmp_path / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.stat().st_size, "it trains")
    os.close(ours)
    going.wait()
    assert committed(tmp_path / "run" / "checkpoints"), "it was asked to stop, and has committed"
    assert resumes(host, tmp_path).summary()["weights_sha256"] == good
    going.assert_nothing_left()


# --- run folders ------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_jobs_at_once_do_not_disturb_each_other(host: Host, tmp_path: Path, good: str) -> None:
    words = ("train", "bad_tasks:Good", "--ranks", "2", "--steps", "200", "--json")
    one, other = (host.launch(tmp_path, *words, "--run-dir", name) for name in ("one", "other"))
    killed = host.launch(tmp_path, *words, "--run-dir", "killed", *PACED)
    until(lambda: (tmp_path / "killed" / "events-1.jsonl").exists(), "it comes up")
    killed.signal(signal.SIGKILL)
    assert killed.wait() == -9
    for going in (one, other):
        assert going.wait() == 0, going.err
        assert going.summary()["weights_sha256"] == good


@pytest.mark.slow
def test_the_same_run_folder_at_once_is_refused_to_the_second(
    launch: Callable[..., Launch], host: Host, tmp_path: Path, good: str
) -> None:
    going = launch("bad_tasks:Good", "--steps", "200", "--inject", "slow@seconds=0.06")
    for words in (("bad_tasks:Good", "--ranks", "2", "--steps", "200"), ()):
        second = host.launch(tmp_path, "train", *words, "--run-dir", "run")
        assert second.wait() == 2
        assert "a run folder in use by a running job" in second.err
    assert going.wait() == 0, going.err
    assert going.summary()["weights_sha256"] == good


WRITER = """
import sys
from pathlib import Path
from allranks.job.config import resolve
from allranks.job.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
print("here", flush=True)
for number in range(10**9):
    folder.write_job(resolve("digits", {"ranks": 2, "inject": "fail " * (number % 500)}))
"""


@pytest.mark.slow
def test_the_job_file_is_whole_whenever_its_writer_is_killed(
    tmp_path: Path, exhaustive: bool
) -> None:
    path = tmp_path / "run" / "job.toml"
    for number in range(8) if exhaustive else (0, 3, 7):
        command = [sys.executable, "-c", WRITER, str(path.parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"here\n"
            until(path.exists, "it is written")
            deadline = time.monotonic() + 0.003 * number
            while time.monotonic() < deadline:
                tomllib.loads(path.read_text())
            process.kill()
        assert tomllib.loads(path.read_text())["program"] == "digits"
        RunFolder(path.parent, resumes=True).close()
        assert not list(path.parent.glob(".job.toml.*")), "what it left is cleared away"
        for left in sorted(path.parent.rglob("*"), reverse=True):
            left.unlink() if left.is_file() else left.rmdir()
        path.parent.rmdir()
