"""What a person sees while a job runs: the picture, what it is made of,
and both ways to show it."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from allranks.cli.display.following import Anomaly, Evaluation, FollowedJob, Follower
from allranks.cli.display.live import Picture, PictureLine, Terminal, drawn
from allranks.job.job import Job
from allranks.job.run_folder import JsonLines, rank_events_path, rank_log_path
from allranks.launcher.plan import LaunchPlan, Shape
from launch_host import Host, Launch, until

ROW: dict[str, Any] = {
    "step": 1233,
    "epoch": 2,
    "loss": 0.12341,
    "samples": 256,
    "learning_rate": 3e-4,
    "monotonic": 50.0,
}
FULL = FollowedJob(
    ranks=4,
    row=ROW,
    total_steps=2344,
    epochs=5,
    samples_per_s=18324.2,
    seconds_left=83.4,
    elapsed_s=3700.0,
    quiet_s=45.0,
    evaluation=Evaluation(1000, {"accuracy": 0.91234, "loss": 0.3}, best=True),
    saved_step=1200,
    anomalies=(
        Anomaly(1, "slow in `compute`: 52.8 ms per step, the others 2.8 ms"),
        Anomaly(3, "step 5: the loss of sample 408 (shard 3) is nan", times=3),
    ),
)


def text_of(state: FollowedJob, width: int) -> str:
    """The picture as it is without colours."""
    paper = io.StringIO()
    Console(file=paper, width=width, color_system=None).print(Picture(state))
    return paper.getvalue()


# --- the picture ------------------------------------------------------------------------------


def test_the_picture_at_80_columns() -> None:
    assert text_of(FULL, 79) == (
        "53%        ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸\n"
        "4 ranks    step 1234 of 2344  epoch 3 of 5  loss 0.1234  learning rate 0.0003\n"
        "           18,324 samples/s  1h01m so far  ETA 1m23s\n"
        "           no step for 45s\n"
        "evaluated  after step 1000: accuracy 0.9123, loss 0.3000 (best so far)\n"
        "saved      after step 1200\n"
        "rank 1     slow in `compute`: 52.8 ms per step, the others 2.8 ms\n"
        "rank 3     step 5: the loss of sample 408 (shard 3) is nan (3 times)\n"
    )


def test_the_picture_at_40_columns() -> None:
    assert text_of(FULL, 39) == (
        "53%        ━━━━━━━━━━━━━━╸\n"
        "4 ranks    step 1234 of 2344\n"
        "  epoch 3 of 5  loss 0.1234\n"
        "  learning rate 0.0003\n"
        "  18,324 samples/s  1h01m so far\n"
        "  ETA 1m23s\n"
        "           no step for 45s\n"
        "evaluated  after step 1000: accuracy 0…\n"
        "saved      after step 1200\n"
        "rank 1     slow in `compute`: 52.8 ms …\n"
        "rank 3     step 5: the loss of sample …\n"
    )


def test_an_unknown_end_is_not_guessed() -> None:
    state = FollowedJob(ranks=2, row=ROW, samples_per_s=100.0, elapsed_s=59.6)
    assert text_of(state, 79) == (
        "2 ranks    step 1234  epoch 3  loss 0.1234  learning rate 0.0003  100 samples/s\n"
        "           1m00s so far\n"
    )


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (FollowedJob(ranks=3), "3 ranks    starting  0s so far\n"),
        (FollowedJob(), "1 rank     starting  0s so far\n"),
        (FollowedJob(ranks=3, agree=False), "rank 0     starting  0s so far\n"),
    ],
)
def test_whom_the_line_is_of(state: FollowedJob, expected: str) -> None:
    assert text_of(state, 79) == expected


def test_many_anomalies_leave_room() -> None:
    state = FollowedJob(ranks=64, anomalies=tuple(Anomaly(rank, "slow") for rank in range(20)))
    lines = text_of(state, 79).splitlines()
    assert lines[-2:] == ["rank 7     slow", "           and 12 more, told above"]


WORDS = st.text("ab \t\n\r\x1b[\x9b\u202e\u0301日é", max_size=60)
STATES = st.builds(
    FollowedJob,
    ranks=st.integers(1, 4096),
    agree=st.booleans(),
    row=st.none() | st.fixed_dictionaries({**dict.fromkeys(ROW, st.integers(0, 10**9))}),
    total_steps=st.none() | st.integers(1, 10**9),
    samples_per_s=st.none() | st.floats(0, 1e12),
    seconds_left=st.none() | st.floats(0, 1e9),
    quiet_s=st.floats(0, 1e6),
    evaluation=st.none()
    | st.builds(Evaluation, st.integers(0), st.dictionaries(WORDS, st.floats(), max_size=3)),
    anomalies=st.lists(st.builds(Anomaly, st.none() | st.integers(0, 99), WORDS), max_size=9).map(
        tuple
    ),
)


@settings(max_examples=30)
@given(STATES, st.integers(1, 130))
def test_the_picture_fits_and_steers_no_terminal(state: FollowedJob, width: int) -> None:
    for line in text_of(state, width).removesuffix("\n").split("\n"):
        assert cell_len(line) <= width
        assert all(c.isprintable() for c in line), repr(line)


# --- what it is made of -----------------------------------------------------------------------


def plan_of(run_dir: Path, **job: Any) -> LaunchPlan:
    job = {"program": "made.py", "strategy": "ddp", "run_dir": str(run_dir), **job}
    return LaunchPlan(Job(**job), Shape({"epochs": 5}, 32, 8), (), ("a note",))


class Made:
    """A run folder that is written by hand, and its follower."""

    def __init__(self, path: Path, **job: Any) -> None:
        self.path = path
        (path / "logs").mkdir()
        self.follower = Follower(plan_of(path, **job))
        self._now = time.monotonic()

    def event(self, writer: int | None, name: str, /, **values: Any) -> None:
        path = self.path / "events.jsonl"
        if writer is not None:
            path = rank_events_path(self.path, writer)
        with JsonLines(path) as events:
            events.event(name, **values)

    def rows(self, *steps: int, pace_s: float = 0.5) -> None:
        with JsonLines(self.path / "metrics.jsonl") as metrics:
            for step in steps:
                self._now += pace_s
                metrics.row({**ROW, "step": step, "monotonic": self._now})

    def look(self) -> list[str]:
        return self.follower.look()

    @property
    def state(self) -> FollowedJob:
        return self.follower.state


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Made]:
    return lambda **job: Made(tmp_path, **{"ranks": 3, **job})


def test_steps_rate_and_time_left(made: Callable[..., Made]) -> None:
    job = made()
    assert job.look() == [] and job.state.step is None
    job.event(0, "training", step=0, total_steps=100)
    job.rows(0)
    assert job.look() == []
    assert (job.state.step, job.state.total_steps, job.state.epochs) == (1, 100, 5)
    assert job.state.samples_per_s is None and job.state.seconds_left is None, "one is no pace"
    job.rows(*range(1, 11), pace_s=0.25)
    job.look()
    assert job.state.samples_per_s == pytest.approx(256 / 0.25)
    assert job.state.seconds_left == pytest.approx(89 * 0.25)
    job.rows(6, 7, pace_s=1.0)  # started again
    job.look()
    assert job.state.step == 8 and job.state.seconds_left is None
    job.rows(8, pace_s=1.0)
    job.look()
    assert job.state.seconds_left == pytest.approx(91.0)


def test_a_stream_without_an_end_has_none(made: Callable[..., Made]) -> None:
    job = made()
    job.event(0, "training", step=0, total_steps=None)
    for step in range(3):
        job.rows(step)
        job.look()
    assert (job.state.step, job.state.total_steps, job.state.seconds_left) == (3, None, None)
    assert job.state.samples_per_s is not None


def test_anomalies_carry_the_number_of_their_rank(made: Callable[..., Made]) -> None:
    job = made()
    slow = {"phase": "data", "seconds_per_step": 0.2, "usual_seconds_per_step": 0.01}
    job.event(None, "straggler", rank=2, host="here", **slow)
    bad = "the loss is nan; rank 1: the loss of sample 4 (shard 3) is nan; rank 2: of sample 9"
    culprits = [(1, "the loss of sample 4 (shard 3) is nan"), (2, "of sample 9")]
    for step in (7, 8):
        job.event(0, "bad_step", step=step, bad=f"step {step}: {bad}", culprits=culprits)
    job.event(0, "bad_step", step=9, bad="step 9: the gradient is not finite")
    job.event(0, "checkpoint_failed", step=20, rank=1, error="No space left on device")
    assert job.look() == [
        "note: rank 2 on here is slow in `data`: 200.0 ms per step, the others 10.0 ms",
        *(f"note: step {step}: {bad}" for step in (7, 8)),
        "note: step 9: the gradient is not finite",
        "note: no checkpoint of step 20 (rank 1: No space left on device); training goes on",
    ]
    assert text_of(job.state, 79).splitlines()[1:] == [
        "the job    step 9: the gradient is not finite",
        "rank 1     step 8: the loss of sample 4 (shard 3) is nan (2 times)",
        "rank 1     no checkpoint of step 20: No space left on device",
        "rank 2     slow in `data`: 200.0 ms per step, the others 10.0 ms",
        "rank 2     step 8: of sample 9 (2 times)",
    ]


def test_a_restart_names_who_failed_and_forgets_who_was_slow(made: Callable[..., Made]) -> None:
    job = made()
    slow = {"phase": "data", "seconds_per_step": 0.2, "usual_seconds_per_step": 0.01}
    job.event(None, "straggler", rank=2, host="here", **slow)
    report = "rank 1 on here failed first: boom\nTraceback"
    job.event(None, "restart", first_rank=1, report=report, resumes_from=40, lost_steps=3)
    job.event(None, "attempt", attempt=1)
    assert job.look()[1:] == [report.splitlines()[0], "starting again from step 40: 3 steps lost"]
    assert job.state.anomalies == (Anomaly(1, "failed; all ranks started again from step 40"),)


def test_ranks_that_train_apart_speak_for_themselves(made: Callable[..., Made]) -> None:
    job = made(strategy="independent")
    for rank in (0, 2):
        job.event(rank, "evaluated", step=rank + 5, metrics={"loss": float("nan")}, best=False)
        job.event(rank, "bad_step", step=9, bad="step 9: the loss is nan")
    assert job.look() == [
        "evaluated after step 5: loss nan",
        "note: step 9: the loss is nan",
        "rank 2: evaluated after step 7: loss nan",
        "note: rank 2: step 9: the loss is nan",
    ]
    assert not job.state.agree and job.state.evaluation is not None
    assert job.state.evaluation.step == 5
    assert [anomaly.rank for anomaly in job.state.anomalies] == [0, 2]


def test_what_the_leader_printed_and_its_checkpoints(made: Callable[..., Made]) -> None:
    job = made()
    rank_log_path(job.path, 0).write_bytes(b"one\n\x1b[2Jtwo\nhalf")
    job.event(0, "checkpoint", step=60, path="p", bytes=1, stall_s=0.0, seconds=0.1)
    assert job.look() == ["rank 0: one", "rank 0: \x1b[2Jtwo"] and job.state.saved_step == 60
    with open(rank_log_path(job.path, 0), "ab") as log:
        log.write(b" a line\n")
    assert job.look() == ["rank 0: half a line"]
    assert job.look() == []


def test_of_a_run_that_goes_on_only_what_is_new(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    rank_log_path(tmp_path, 0).write_text("old\n")
    with JsonLines(tmp_path / "metrics.jsonl") as metrics:
        metrics.row(ROW)
    follower = Follower(plan_of(tmp_path, ranks=1, steps=20))
    assert follower.look() == [] and follower.state.row is None
    assert follower.state.total_steps == 20 and follower.state.epochs is None


# --- a terminal -------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal of 60 columns: what is shown is read from the first."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 60, 0, 0))
    os.set_blocking(ours, False)
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def written(ours: int) -> bytes:
    """What was written since the last call."""
    content = b""
    with suppress(BlockingIOError):
        while True:
            content += os.read(ours, 1 << 16)
    return content


def shown(content: bytes) -> str:
    return content.decode().replace("\r\r\n", "\n")


def test_a_terminal_that_became_narrower_is_cleared_of_the_broken_lines(
    pair: tuple[int, int],
) -> None:
    ours, theirs = pair
    terminal = Terminal(theirs)
    terminal.paint(["told"], [PictureLine("a" * 50, 50), PictureLine("b", 1)])
    assert shown(written(ours)) == f"told\n{'a' * 50}\nb\n"
    terminal.paint([], [PictureLine("a" * 50, 50), PictureLine("b", 1)])
    assert shown(written(ours)) == "", "nothing is new"
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 20, 0, 0))
    terminal.paint(["more"], [PictureLine("c", 1)])
    assert shown(written(ours)) == "\r\x1b[4A\x1b[Jmore\nc\n"
    terminal.forget()
    terminal.paint([], [PictureLine("d", 1)])
    assert shown(written(ours)) == "d\n"
    terminal.close()


def test_rich_is_imported_where_it_is_shown_only() -> None:
    code = "import sys, allranks.cli.train, allranks.cli.runs\nassert 'rich' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_in_the_background_no_picture_is_drawn(
    pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair
    terminal = Terminal(theirs)
    terminal.paint([], [PictureLine("a", 1)])
    monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp() + 1)
    terminal.paint([], [PictureLine("b", 1)])
    assert shown(written(ours)) == "a\n"
    terminal.paint(["told"], [PictureLine("b", 1)])
    assert shown(written(ours)) == "told\n"
    terminal.close()


def test_a_halted_terminal_is_not_waited_for(pair: tuple[int, int]) -> None:
    """It takes a few kilobytes while nobody reads; then pictures are left out, and lines kept."""
    ours, theirs = pair
    terminal = Terminal(theirs)
    for number in range(400):
        terminal.paint([f"line {number} {'x' * 200}"], [PictureLine(f"picture {number}", 11)])
    content = written(ours)
    assert len(content) < 100_000
    for number in range(20):
        terminal.paint([], [PictureLine(f"later {number}", 8)])
        content += written(ours)
    terminal.close()
    seen = shown(content)
    assert re.findall(r"line (\d+) x{200}\n", seen) == [str(number) for number in range(400)]
    assert 0 < seen.count("picture") < 400 and seen.endswith("later 19\n")


@pytest.mark.parametrize("without", [False, True])
def test_colours_only_where_they_are_wanted(
    pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch, without: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("COLORTERM", raising=False)
    monkeypatch.setenv("NO_COLOR", "1") if without else monkeypatch.delenv("NO_COLOR", False)
    terminal = Terminal(pair[1])
    lines = drawn(Picture(FULL), terminal)
    terminal.close()
    coloured = [line for line in lines if re.search(r"\x1b\[[\d;]*3\d", line.text)]
    assert bool(coloured) != without
    plain = [re.sub(r"\x1b\[[\d;]*m", "", line.text) for line in lines]
    assert [cell_len(text) for text in plain] == [line.cells for line in lines]
    assert len(lines) <= 11 and max(line.cells for line in lines) < 60


# --- whole jobs -------------------------------------------------------------------------------

TALKS = """
from allranks.programs.synthetic import Synthetic

class Talks(Synthetic):
    def model(self):
        print("hello \\x1b[2J from the model", flush=True)
        return super().model()
"""
JOB = (
    *("train", "talks.py", "--ranks", "2", "--run-dir", "run", "--checkpoint-every", "10"),
    *("--on-bad-step", "skip", "--inject", "nan@rank=1,step=5"),
    *("--inject", "slow@rank=0,seconds=0.05", "--inject", "slow@rank=1,seconds=0.05"),
)
SLOW = r"rank \d slow in \S+ [\d.]+ ms per step, the others [\d.]+ ms"  # a busy machine


class Tmux:
    """A terminal of 80 columns in a tmux of its own."""

    def __init__(self) -> None:
        self.name = f"allranks-{os.getpid()}"
        self._folder = tempfile.mkdtemp(prefix="allranks-tmux-")
        self._environment = {**os.environ, "TMUX_TMPDIR": self._folder, "LANG": "C.UTF-8"}
        self("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", "exec cat")
        self.tty = self("display-message", "-p", "#{pane_tty}")
        self.pid = int(self("display-message", "-p", "#{pid}"))

    def __call__(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-u", "-L", self.name, *words],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        return done.stdout.strip("\n")

    @property
    def screen(self) -> str:
        return self("capture-pane", "-p")

    def close(self) -> None:
        self("kill-server")
        until(lambda: not Path(f"/proc/{self.pid}").exists(), "the end of tmux")
        shutil.rmtree(self._folder)


@pytest.fixture
def tmux() -> Iterator[Tmux]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is missing")
    running = Tmux()
    yield running
    running.close()


@pytest.fixture
def launch(host: Host, tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """`launch(steps, err)`: a job whose picture has all its parts; it is killed if it is left."""
    started: list[Launch] = []
    (tmp_path / "talks.py").write_text(TALKS)

    def start(steps: int, err: str = "") -> Launch:
        words = (*JOB, "--steps", str(steps))
        environment = {"TERM": "tmux-256color", "LANG": "C.UTF-8"}
        started.append(host.launch(tmp_path, *words, err=err, environment=environment))
        return started[-1]

    yield start
    for going in started:
        if going.code is None:
            going.signal(signal.SIGKILL)
        going.wait()
        going.assert_nothing_left()


@pytest.mark.slow
def test_a_job_on_a_terminal_of_80_columns(launch: Callable[..., Launch], tmux: Tmux) -> None:
    """It is drawn over in its place, also when the terminal becomes narrower, until the end."""
    going = launch(60, tmux.tty)
    until(lambda: "saved " in tmux.screen or going.code is not None, "a checkpoint is shown")
    seen = re.fullmatch(
        r"talks.py on 2 ranks, ddp: /.* rank 0: hello \\x1b\[2J from the model .*"
        r"\d+% [━╸╺]+ 2 ranks step \d+ of 60 epoch 1 loss \d\.\d{4} learning rate 0\.1 "
        r"([\d,]+ samples/s )?\d+s so far (ETA \d+s )?saved after step \d0 "
        rf"({SLOW} )*rank 1 step 5: the loss of sample \d+ \(shard \d\) is nan( {SLOW})*",
        " ".join(tmux.screen.split()),
    )
    assert seen, tmux.screen
    tmux("resize-window", "-x", "44", "-y", "24")
    until(lambda: "\n  loss " in tmux.screen or going.code is not None, "it is drawn anew")
    assert going.wait() == 0, tmux.screen
    above, last = tmux.screen.split("100% ")
    seen = re.fullmatch(
        r" {6}━+\n2 ranks    step 60 of 60  epoch 1\n  loss \d\.\d{4}  learning rate 0\.1\n"
        r"  [\d,]+ samples/s  \d+s so far  ETA 0s\nsaved      after step 60\n"
        r"(rank \d     slow .*…\n)*rank 1     step 5: "
        r"the loss of sample .*…(\nrank 1     slow .*…)?",
        last.strip("\n"),
    )
    assert seen and "%" not in above, tmux.screen  # nothing is left of the pictures before
    assert going.out.startswith("train loss ")


@pytest.mark.slow
def test_a_job_without_a_terminal(launch: Callable[..., Launch], tmp_path: Path) -> None:
    going = launch(30)
    assert going.wait() == 0, going.err
    first, second, *lines = going.err.splitlines()
    assert first == f"talks.py on 2 ranks, ddp: {tmp_path / 'run'}"
    assert second == r"rank 0: hello \x1b[2J from the model"
    bad = [line for line in lines if line.startswith("note: step 5: the loss is nan and the")]
    steps = [
        line for line in lines if re.match(r"epoch   1  step {5,6}\d+  loss (nan|\d\.\d{4})", line)
    ]
    assert len(bad) == 1 and len(steps) > 1
    assert all(line in steps or line.startswith("note: ") for line in lines), going.err
    assert steps[-1].startswith("epoch   1  step     30") and steps[-1].endswith(" samples/s")
