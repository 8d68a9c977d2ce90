"""A sweep: jobs packed into slots, each as it would be alone, whatever becomes of the others."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from allranks.cli.sweep import name_of, plan, sweep, table
from allranks.errors import RequestError
from allranks.job.run_folder import read_events, read_rows
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.linux import state_of
from allranks.tools.sweep import SweepJob, locked_folder, share_out
from conftest import Train
from launch_host import Host, Launch, children_of, until

TASK = "resume_tasks:Rates"
SLOW = ("--inject", "slow@seconds=0.25,attempt=-1")  # the first trains until the second does too


def jobs_of(launch: Launch) -> dict[str, dict[str, Any]]:
    """What a sweep with `--json` says in the end of each job."""
    return {job["name"]: job for job in launch.summary()["jobs"]}


def most_at_once(spans: list[tuple[float, float]]) -> int:
    """How many of the spans of time hold one and the same moment."""
    return max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)


def test_four_jobs_in_two_slots_one_of_them_failing(
    host: Host, train: Train, tmp_path: Path
) -> None:
    words = ("sweep", TASK, "--ranks", "1", "--steps", "6", "--set", "lr=1e-2,1e38,0.02,3e-2")
    folder = tmp_path / "sweep"
    launch = host.launch(tmp_path, *words, "--slots", "2", "--run-dir", "sweep", "--json")
    assert launch.wait() == 1, launch.err
    jobs = jobs_of(launch)
    names = ["lr=0.01", "lr=1e+38", "lr=0.02", "lr=0.03"]
    assert list(jobs) == names
    assert [jobs[name]["state"] for name in names] == ["done", "failed", "done", "done"]
    assert "the loss is" in jobs["lr=1e+38"]["report"]
    assert f"1 of 4 jobs failed: lr=1e+38; to resume, say the same with --run-dir {folder}" in (
        launch.err
    )
    _as_when_run_alone(jobs, folder, train)
    _never_more_than_two(jobs, folder)

    times = {name: (folder / name / "job.toml").stat().st_mtime_ns for name in names}
    again = host.launch(tmp_path, *words, "--slots", "1", "--run-dir", "sweep")
    assert again.wait() == 1, again.err
    changed = [n for n in names if (folder / n / "job.toml").stat().st_mtime_ns != times[n]]
    assert changed == ["lr=1e+38"]
    lines = again.out.splitlines()
    assert lines[0].split() == ["lr", "state", "loss", "train", "loss", "run", "folder"]
    assert [line.split()[:2] for line in lines[1:]] == [
        *(["1e-2", "done"], ["1e38", "failed"], ["0.02", "done"], ["3e-2", "done"])
    ]
    other = host.launch(tmp_path, *words[:-1], "lr=1,2", "--run-dir", "sweep")
    assert other.wait() == 2 and "found: a sweep of other jobs" in other.err
    for more, asked in ((("--seed", "1"), "seed"), (("--set", "hidden=4"), "hidden")):
        other = host.launch(tmp_path, *words, *more, "--run-dir", "sweep")
        assert other.wait() == 2 and asked in other.err, other.err
    fewer = [word if word != "6" else "5" for word in words]
    other = host.launch(tmp_path, *fewer, "--run-dir", "sweep")
    assert other.wait() == 2 and "lr=0.01 was started with steps = 6" in other.err


def _as_when_run_alone(jobs: dict[str, dict[str, Any]], folder: Path, train: Train) -> None:
    """Bits of the same job, run by itself with the threads that the sweep wrote into it."""
    for name in ("lr=0.01", "lr=0.02", "lr=0.03"):
        alone = train(
            TASK, name, ranks=1, steps=6, threads=jobs[name]["threads"], strategy="single"
        )
        assert jobs[name]["summary"]["weights_sha256"] == alone.summary["weights_sha256"]
        assert f"threads = {jobs[name]['threads']}\n" in (folder / name / "job.toml").read_text()


def _never_more_than_two(jobs: dict[str, dict[str, Any]], folder: Path) -> None:
    assert most_at_once([(job["started"], job["ended"]) for job in jobs.values()]) == 2
    ran = []
    for name in jobs:
        times = [row["time"] for row in read_rows(folder / name / "events.jsonl")]
        ran.append((times[0], times[-1]))
    assert most_at_once(ran) <= 2


@pytest.fixture
def slow_sweep(host: Host, tmp_path: Path) -> Launch:
    """Three jobs in two slots, of which two are training."""
    words = ("sweep", TASK, "--ranks", "2", "--steps", "20", "--set", "seed=1,2,3", *SLOW)
    launch = host.launch(tmp_path, *words, "--slots", "2", "--run-dir", "sweep", "--json")
    runs = [tmp_path / "sweep" / f"seed={seed}" for seed in (1, 2)]

    def are_training() -> bool:
        return all(any(e["event"] == "training" for e in read_events(run)) for run in runs)

    until(lambda: are_training() or launch.code is not None, "two jobs to train")
    assert launch.code is None, launch.err
    return launch


def processes_below(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        found += children_of(parent)
    return found


def until_gone(pids: list[int]) -> None:
    until(lambda: all(state_of(pid) in ("", "Z") for pid in pids), "no process is left")


@pytest.mark.slow
def test_one_that_is_interrupted_leaves_nothing_and_goes_on(
    slow_sweep: Launch, host: Host, train: Train, tmp_path: Path
) -> None:
    below = processes_below(slow_sweep.pid)
    assert len(below) == 1 + 2 * (1 + 1 + 2)  # per job: supervisor, fork server, ranks
    slow_sweep.signal(signal.SIGINT)
    assert slow_sweep.wait() == 130
    until_gone(below)
    states = [job["state"] for job in jobs_of(slow_sweep).values()]
    assert states == ["interrupted", "interrupted", "waiting"]
    assert "interrupted (SIGINT); 0 of 3 jobs are done" in slow_sweep.err

    words = ("sweep", TASK, "--ranks", "2", "--steps", "20", "--set", "seed=1,2,3", *SLOW)
    again = host.launch(tmp_path, *words, "--slots", "3", "--run-dir", "sweep", "--json")
    assert again.wait() == 0, again.err
    jobs = jobs_of(again)
    assert [job["state"] for job in jobs.values()] == ["done"] * 3
    resumed = [job["summary"]["resumed_from_step"] for job in jobs.values()]
    assert resumed[0] and resumed[1] and resumed[2] is None
    alone = train(TASK, ranks=2, steps=20, threads=jobs["seed=1"]["threads"], seed=1)
    assert jobs["seed=1"]["summary"]["weights_sha256"] == alone.summary["weights_sha256"]


def test_one_that_is_killed_leaves_nothing(slow_sweep: Launch) -> None:
    below = processes_below(slow_sweep.pid)
    slow_sweep.signal(signal.SIGKILL)
    slow_sweep.wait()
    until_gone(below)


def test_a_job_is_started_on_its_cores_and_dies_with_the_sweep(tmp_path: Path) -> None:
    """The real command, which waits for a job file that nobody writes."""
    os.mkfifo(tmp_path / "job.toml")
    core = min(os.sched_getaffinity(0))
    code = f"""if True:
        import time
        from pathlib import Path
        from allranks.tools.sweep import start_command
        words = ["--job", "job.toml", "--run-dir", "run"]
        print(start_command(words, [{core}], Path("log")).pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    assert os.sched_getaffinity(pid) == {core} and os.getsid(pid) == pid
    assert b"allranks.cli.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    parent.kill()
    parent.wait()
    until_gone([pid])


# --- what is asked for --------------------------------------------------------------------------


def planned(*words: str) -> dict[str, Any]:
    """What `sweep synthetic WORDS --dry-run` says; the program is not loaded for it."""
    given = ["synthetic", *words, "--dry-run", "--json"]
    with patch("allranks.cli.sweep.look_at_program"):
        done = CliRunner().invoke(sweep, given, catch_exceptions=False)
    found: dict[str, Any] = json.loads(done.output)
    return found


def test_the_plan_is_the_product_in_the_order_of_the_words() -> None:
    plan = planned("--set", "lr=1e-3,0.1", "--set", "micro-batch=8,16", "--slots", "9")
    assert [job["name"] for job in plan["jobs"]] == [
        *("lr=0.001,micro-batch=8", "lr=0.001,micro-batch=16"),
        *("lr=0.1,micro-batch=8", "lr=0.1,micro-batch=16"),
    ]
    assert plan["jobs"][0]["settings"] == {"lr": "1e-3", "micro-batch": "8"}
    assert len(plan["slots"]) == 4 and "/runs/synthetic-sweep-" in plan["sweep_dir"]
    assert not Path(plan["sweep_dir"]).exists()


def test_threads_are_cores_by_slots_by_ranks_unless_said() -> None:
    cores = len(os.sched_getaffinity(0))
    plan = planned("--set", "ranks=1,2", "--slots", "2")
    assert [job["threads"] for job in plan["jobs"]] == [
        max(1, cores // 2 // ranks) for ranks in (1, 2)
    ]
    plan = planned("--set", "lr=1,2", "--threads", "3")
    assert [job["threads"] for job in plan["jobs"]] == [3, 3]
    plan = planned("--set", "bitwise=true,false", "--ranks", "1")
    cores = len(os.sched_getaffinity(0))
    assert [job["threads"] for job in plan["jobs"]] == [1, cores]


def test_brackets_keep_a_value_together_and_devices_are_shared_out() -> None:
    plan = planned("--set", "strategy=ddp(reduce=tree,bucket_mb=1),ddp", "--ranks", "2")
    assert [job["settings"]["strategy"] for job in plan["jobs"]] == [
        *("ddp(reduce=tree,bucket_mb=1)", "ddp")
    ]
    words = ("--device", "cuda", "--devices", "0,1,4,5", "--ranks", "2", "--slots", "2")
    plan = planned("--set", "lr=1,2", *words)
    assert [slot["words"] for slot in plan["slots"]] == [["--devices=0,1"], ["--devices=4,5"]]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ((), "no --set with several values"),
        (("--set", "lr=1"), "no --set with several values"),
        (("--set", "lr=1,2", "--set", "width"), "no '=' in it"),
        (("--set", "lr=1,,2"), "not NAME=VALUE,VALUE"),
        (("--set", "lr=1e-3,0.001"), "one value stands there twice"),
        (("--set", "lr=1,2", "--set", "lr=2,3"), "two --set have this name"),
        (("--set", "lr=1,2", "--set", "lr=2"), "two --set have this name"),
        (("--set", "steps=1,2", "--steps", "3"), "--steps is given too"),
        (("--set", "run-dir=a,b"), "not a value of a job"),
        (("--set", "bitwise=perhaps,true"), "takes true or false"),
        (("--set", "precision=bf16,fp17"), "no precision of that name"),
    ],
)
def test_what_is_no_sweep_is_refused(words: tuple[str, ...], found: str) -> None:
    with pytest.raises(RequestError) as error:
        planned(*words)
    assert found in error.value.found
    with pytest.raises(click.UsageError):
        sweep.main(["synthetic", "--set", "steps=1,x"], standalone_mode=False)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_a_program_without_a_task_is_refused_before_a_job_is_started(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    program, folder = tmp_path / "nope.py", tmp_path / "sweep"
    given = [str(program), "--set", "seed=1,2", "--run-dir", str(folder), *words]
    said = CliRunner().invoke(sweep, given)
    assert isinstance(said.exception, RequestError) and "nope.py" in str(said.exception)
    assert not folder.exists()


def test_what_has_one_value_is_said_to_every_job() -> None:
    """The words of the jobs; a field of one value is a field, and sweeps nothing."""
    words = ["synthetic", "--set", "lr=1,2", "--set", "width=8", "--ranks", "1", "--seed", "0"]
    planned = plan(sweep.make_context("sweep", words))
    assert [set(job.words) for job in planned.jobs] == [
        {"synthetic", "--set=width=8", f"--set=lr={lr}", "--ranks=1", "--seed=0"} for lr in (1, 2)
    ]


def test_a_folder_is_of_one_sweep_which_may_get_more_jobs(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    with locked_folder(folder, ["a"]):
        with (
            pytest.raises(RequestError, match="a sweep that is running"),
            locked_folder(folder, []),
        ):
            pass
        (folder / "a").mkdir()
        (folder / "a" / "job.toml").touch()
    with locked_folder(folder, ["b", "a"]):
        pass
    with pytest.raises(RequestError, match="a sweep of other jobs"), locked_folder(folder, ["b"]):
        pass
    for foreign in (tmp_path, folder / "a"):
        with pytest.raises(RequestError, match="no sweep left it"), locked_folder(foreign, ["b"]):
            pass


# --- a folder that is there -----------------------------------------------------------------------

PROGRAM = """
from resume_tasks import Rates

class Mine(Rates):
    pass
"""
WORDS = ("mine.py", "--ranks=1", "--steps=2", "--set=seed=1,2", "--run-dir=sweep")
FIELD, NUMBERS = "--set=hidden=4", "--precision=fp64"

Swept = Callable[..., tuple[Result, list[SweepJob]]]


@pytest.fixture
def swept(
    server: ForkServer, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Swept:
    """A sweep of which seed 1 is done and seed 2 is not; `swept(*words)` runs the command.

    It returns its result, and the jobs it would have run.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("allranks.launcher.start.ForkServer", lambda _: nullcontext(server))
    Path("mine.py").write_text(PROGRAM)
    with locked_folder(tmp_path / "sweep", []):
        flags: dict[str, Any] = {"seed": 1, "precision": "fp64", "steps": 2, "threads": 1}
        train("mine.py", "hidden=4", run_dir="sweep/seed=1", **flags)

    def run(*words: str) -> tuple[Result, list[SweepJob]]:
        jobs: list[SweepJob] = []

        def keep(planned: Sequence[SweepJob], *_: Any) -> str:
            jobs.extend(planned)
            return ""

        with patch("allranks.cli.sweep.run_jobs", keep):
            return CliRunner().invoke(sweep, words), jobs

    return run


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("state", ["done", "started"])
@pytest.mark.parametrize(
    ("words", "field"),
    [
        ((NUMBERS,), "task.hidden = 4"),
        ((FIELD,), "precision = fp64"),
        ((FIELD, NUMBERS, "--threads=2"), "threads = 1"),
        ((FIELD, NUMBERS, "--set=momentum=0.5"), "task.momentum = 0.9"),
        ((FIELD, NUMBERS, "an edited program"), "program_sha256 = "),
    ],
)
def test_a_run_of_another_job_is_refused_before_anything_starts(
    swept: Swept, state: str, words: tuple[str, ...], field: str
) -> None:
    if words[-1] == "an edited program":
        words = words[:-1]
        Path("mine.py").write_text(PROGRAM + "# edited\n")
    if state == "started":
        events = Path("sweep/seed=1/events.jsonl")
        events.write_text("".join(events.read_text().splitlines(keepends=True)[:-1]))
    for more in ((), ("--dry-run",)):
        result, jobs = swept(*WORDS, *words, *more)
        assert isinstance(result.exception, RequestError) and result.exception.exit_code == 2
        assert f"seed=1 was started with {field}" in result.exception.found
        assert not jobs


def test_a_run_of_the_same_job_is_done_however_it_is_said_and_protected(swept: Swept) -> None:
    same = ("--set=hidden=04", "--set=momentum=0.9", "--keep=1", "--max-restarts=1", "--log=csv")
    _, jobs = swept(*WORDS, NUMBERS, *same)
    assert [job.state for job in jobs] == ["done", "waiting"] and jobs[0].threads == 1


def test_a_strategy_that_was_chosen_is_no_other_word(swept: Swept) -> None:
    """`auto` writes its choice into the run folder."""
    file = Path("sweep/seed=1/job.toml")
    for was, now in (("ranks = 1", "ranks = 2"), ('"single"', '"ddp(reduce=tree)"')):
        file.write_text(file.read_text().replace(was, now, 1))
    words = (*WORDS, FIELD, NUMBERS, "--ranks=2")
    result, _ = swept(*words)
    assert isinstance(result.exception, RequestError) and "strategy" in result.exception.found
    _, jobs = swept(*words, "--strategy=auto")
    assert [job.state for job in jobs] == ["done", "waiting"]


def test_what_is_done_is_read_when_the_folder_is_locked(swept: Swept) -> None:
    """Another sweep may end while this one looks at its program."""
    shutil.move("sweep", "other")
    with patch("allranks.cli.sweep.look_at_program", lambda _: shutil.move("other", "sweep")):
        _, jobs = swept(*WORDS, FIELD, NUMBERS)
    assert [job.state for job in jobs] == ["done", "waiting"]


def test_a_folder_with_logs_is_no_sweep(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "main.py").touch()
    with pytest.raises(RequestError, match="no sweep left it"), locked_folder(tmp_path, ["a"]):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"logs", "main.py"}


def test_names_are_safe_and_differ() -> None:
    assert name_of({"lr": "3e-4", "width": "16"}) == "lr=0.0003,width=16"
    hostile = [name_of({"data": value}) for value in ("../a b", "..-a b", "x" * 500, "x" * 501)]
    assert len(set(hostile)) == 4
    assert all("/" not in name and len(name.encode()) < 200 for name in hostile)


@given(st.integers(1, 100), st.integers(1, 20))
def test_cores_are_shared_out_evenly_and_none_twice(cores: int, slots: int) -> None:
    shares = share_out(range(cores), slots)
    assert len(shares) == slots
    if cores < slots:
        assert set(shares) == {()}
    else:
        assert [core for share in shares for core in share] == list(range(cores))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_table_has_every_metric_and_steers_no_terminal() -> None:
    summary = {"eval": {"accuracy": 0.91234}, "train_loss": 0.25}
    rows = [
        SweepJob("a", {"lr": "1"}, 1, os.path.abspath("runs/a"), state="done", summary=summary),
        SweepJob("b", {"lr": "\x1b[2J"}, 1, os.path.abspath("runs/b"), state="failed"),
    ]
    assert table(rows).splitlines() == [
        "lr       state   accuracy  train loss  run folder",
        "1        done    0.9123    0.2500      runs/a",
        "\\x1b[2J  failed                        runs/b",
    ]
