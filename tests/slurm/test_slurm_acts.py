"""Talking to Slurm: its commands, replaced by scripts that answer as recorded, and fail as it does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from allranks.errors import PlaceError
from allranks.launcher.slurm import commands as slurm
from allranks.launcher.slurm.commands import JobState
from slurm_answers import CONFIG, JOB, NODES, PARTITIONS, job_line

Install = Callable[[str, str], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install(name, python)`: a command of that name, first in PATH, in which `words` are known."""
    commands = tmp_path / "bin"
    commands.mkdir()
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")

    def make(name: str, body: str) -> Path:
        path = commands / name
        path.write_text(
            f"#!{sys.executable} -I\nimport json, os, sys, time\nwords = sys.argv[1:]\n{body}\n"
        )
        path.chmod(0o755)
        return path

    return make


def answers(*lines: str) -> str:
    return f"print({chr(10).join(lines)!r})"


def test_discover_asks_slurm(install: Install) -> None:
    table = {"config": CONFIG, "partition": PARTITIONS, "node": NODES}
    install("scontrol", f"print({table!r}[words[-1]])")
    assert slurm.is_here()
    site = slurm.discover()
    assert (site.name, site.partitions["gpu"].gpus) == ("borealis", 4)


def test_a_script_is_sent_without_the_environment(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor with variables of sbatch, which would go before what the script says."""
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/here.conf")
    seen = tmp_path / "seen.json"
    body = f"json.dump([words, dict(os.environ)], open({str(seen)!r}, 'w'))\nprint('4711;here')"
    install("sbatch", body)
    assert slurm.send(tmp_path / "a job.sbatch") == 4711
    words, environment = json.loads(seen.read_text())
    assert words == ["--parsable", "--export=NONE", str(tmp_path / "a job.sbatch")]
    assert "SBATCH_TIMELIMIT" not in environment
    assert environment["SLURM_CONF"] == "/etc/here.conf"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("sys.exit('sbatch: error: Invalid account')", "sbatch: error: Invalid account"),
        ("sys.exit(3)", "exit code 3"),
        ("", "named no job: ''"),
        ("print('Submitted batch job')", "named no job"),
    ],
)
def test_what_sbatch_answers_is_passed_on(install: Install, body: str, says: str) -> None:
    install("sbatch", body)
    with pytest.raises(PlaceError, match=says):
        slurm.send(Path("x.sbatch"))


def test_a_command_that_is_missing_or_hangs_is_a_failure_of_the_place(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install("scontrol", "time.sleep(60)")
    with pytest.raises(PlaceError, match=r"did not answer within 0\.2 s"):
        slurm.call("scontrol", "show", "config", timeout_s=0.2)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not slurm.is_here()
    with pytest.raises(PlaceError, match="there is no `scontrol` on this machine"):
        slurm.discover()


def test_the_state_of_a_job(install: Install) -> None:
    line = job_line(job=7, state="RUNNING", reason="None", restarts=1, code="0:0")
    install("scontrol", answers(line))
    assert slurm.state_of(7) == JobState("RUNNING", "None", None, None, 1)
    line = job_line(job=7, state="FAILED", reason="NonZeroExitCode", restarts=0, code="5:0")
    install("scontrol", answers(line))
    assert slurm.state_of(7) == JobState("FAILED", "NonZeroExitCode", 5, 0, 0)
    install("scontrol", "sys.exit('slurm_load_jobs error: Invalid job id specified')")
    assert slurm.state_of(7) is None
    install("scontrol", "sys.exit('slurm_load_jobs error: Unable to contact slurm controller')")
    with pytest.raises(PlaceError, match="Unable to contact"):
        slurm.state_of(7)


@pytest.mark.parametrize(
    ("end", "seconds"),
    [("2025-10-08T16:34:55", datetime(2025, 10, 8, 16, 34, 55).timestamp()), ("Unknown", None)],
)
def test_the_end_of_a_jobs_time(install: Install, end: str, seconds: float | None) -> None:
    line = job_line(job=7, state="RUNNING", reason="None", restarts=0, code="0:0", end=end)
    install("scontrol", answers(line))
    assert slurm.end_time_of(7) == seconds


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (JobState("COMPLETED", "None", 0, 0), 0),
        (JobState("FAILED", "NonZeroExitCode", 5, 0), 5),
        (JobState("FAILED", "RaisedSignal:9", 0, 9), 3),
        (JobState("CANCELLED", "None", 0, 15), 130),
        (JobState("TIMEOUT", "TimeLimit", 0, 0), 3),
        (JobState("NODE_FAIL", "NodeDown", 1, 0), 3),
        (JobState("OUT_OF_MEMORY", "OutOfMemory", 0, 125), 3),
        (None, None),
    ],
)
def test_the_exit_code_of_a_job(state: JobState | None, code: int | None) -> None:
    assert slurm.exit_code_of(state) == code


def test_a_job_is_followed_through_a_requeue_to_its_end(install: Install, tmp_path: Path) -> None:
    """Its output is handed on while it grows, once; each state is told once."""
    output = tmp_path / "out"
    life = [
        ("PENDING", "Priority", 0, "0:0", ""),
        ("PENDING", "Priority", 0, "0:0", ""),
        ("RUNNING", "None", 0, "0:0", "one\ntw"),
        ("COMPLETING", "None", 0, "0:0", "o\n"),
        ("PENDING", "BeginTime", 1, "0:0", ""),
        ("RUNNING", "None", 1, "0:0", "three\n" * 200_000),
        ("COMPLETED", "None", 1, "0:0", "end"),
    ]
    turn = tmp_path / "turn"
    turn.write_text("0")
    body = (
        f"life, job = {life!r}, {JOB!r}\n"
        f"n = int(open({str(turn)!r}).read()); open({str(turn)!r}, 'w').write(str(n + 1))\n"
        "state, reason, restarts, code, text = life[n]\n"
        f"open({str(output)!r}, 'a').write(text)\n"
        "print(job.format(end='Unknown', job=7, state=state, reason=reason, restarts=restarts, code=code))"
    )
    install("scontrol", body)
    chunks: list[bytes] = []
    told: list[str] = []
    state = slurm.follow(7, output, chunks.append, told.append, poll_s=0.0)
    assert b"".join(chunks).decode() == "".join(text for *_, text in life)
    assert state == JobState("COMPLETED", "None", 0, 0, 1)
    assert told == [
        "job 7: pending (Priority)",
        "job 7: running",
        "job 7: completing",
        "job 7: pending (BeginTime), start 2",
        "job 7: running, start 2",
        "job 7: completed, start 2",
    ]


def test_a_job_that_slurm_has_forgotten_has_no_known_end(install: Install, tmp_path: Path) -> None:
    install("scontrol", "sys.exit('slurm_load_jobs error: Invalid job id specified')")
    (tmp_path / "out").write_text("all of it")
    chunks: list[bytes] = []
    follow = slurm.follow(7, tmp_path / "out", chunks.append, lambda _: None, poll_s=0.0)
    assert (follow, chunks) == (None, [b"all of it"])


def test_output_that_never_comes_is_not_waited_for_long(install: Install, tmp_path: Path) -> None:
    line = job_line(job=7, state="CANCELLED", reason="None", restarts=0, code="0:15")
    install("scontrol", answers(line))
    state = slurm.follow(
        7, tmp_path / "none", pytest.fail, lambda _: None, poll_s=0.01, after_end_s=0.05
    )
    assert state is not None and state.state == "CANCELLED"
