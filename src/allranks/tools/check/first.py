"""The first check of a job: its first steps beside one process, before anything is trained.

A strategy that cuts the model can compute something else in silence: a weight that forward reads
as a part, a hook that sees a part of a gradient. `check` finds these, so a job makes a short check
by itself before it starts: two steps on its own batches, in float64, with the witness on, and once
more in the precision of the job where its passes are others, in 16 bits. Where the witness names
something and two steps agree, eight are compared: what it names may come later. What
came of it is remembered by the program's files, its fields, the options of the job, and the
versions, so the next start costs nothing, while all that the check has read is as it was.

    --first-check auto   where one process can hold the model, and within `BUDGET_S`
    --first-check STEPS  so many steps, however long they take
    --first-check off    none; the result says that it is not proved

`single` and `ddp` are not checked: every rank holds the whole model there, and the witness of the
run itself sees all of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from allranks.catalog import ENGINES, preload_for
from allranks.checkpoint.files import as_json, write_whole
from allranks.errors import Interrupted, NotEqual, ProgramError, RequestError, Stopped
from allranks.job.config import Resolved
from allranks.job.job import Job
from allranks.job.place import LOCAL
from allranks.job.program import State, changed_reads, environment_of
from allranks.job.run_folder import rank_events_path, read_events, read_rows
from allranks.job.units import format_bytes
from allranks.launcher.describe import EqualityProof, ask_task
from allranks.launcher.plan import LaunchPlan, LocalMachine, Resources
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.signals import Signals
from allranks.strategies.card import Approximate, Exact
from allranks.strategies.resolve import resolved_strategy
from allranks.tools.check.against_single import Check, CheckedRun, CheckPlan, undisturbed
from allranks.tools.check.approximate import exact_setting, exact_tolerance
from allranks.tools.check.verdict import Look, Verdict

STEPS = 2
STEPS_OF_NAMED = 8  # are compared where the witness has named something that the first ones hide
BUDGET_S = 30.0
SILENT_S = 10.0  # a check that lasts is announced, whether or not its ranks are set up
COPIES_IN_MEMORY = 6  # of the weights in float64: gradient, two moments, a copy, room for passes
COPIES_ON_DISK = 8  # what two runs write down of each step
PACKAGES = ("torch", "tensorflow", "keras", "numpy", "transformers")
NOT_DECIDING = frozenset(  # options that leave the first steps as they are, or all but their bits
    (
        *("task", "seed", "steps", "prefetch", "threads", "place", "devices"),
        *("eval_every", "early_stop", "until", "patience", "verify_every", "time_limit"),
        *("checkpoint_every", "keep", "best", "resume", "max_restarts", "hang_timeout"),
        *("witness", "first_check", "inject", "run_dir", "log", "profile"),
    )
)


TRAIN_ALL_THE_SAME = (
    "nothing was trained. Mend it (`allranks check` says more), take --strategy ddp, or train it "
    "all the same with --first-check off"
)


class _OutOfTime(Exception):
    """The check has used up its budget."""


def first_check(
    resolved: Resolved,
    plan: LaunchPlan,
    resources: Resources,
    signals: Signals,
    announce: Callable[[str], None],
) -> EqualityProof:
    """The proof of a planned job whose strategy cuts the model. Raises `NotEqual` for a difference.

    `announce` hears when steps are compared; not of a job that its ranks refuse as they are set up.
    No file is left but what remembers it.
    """
    job = plan.job
    steps = STEPS if job.first_check == "auto" else int(job.first_check)
    if why := _not_comparable(job):
        return EqualityProof(False, why)
    weighed = ask_task(resources, _alone(job), "weigh", "weighed", signals)
    path = _remembered(plan, weighed["program"])
    auto = job.first_check == "auto"
    if (before := _remembered_proof(path, steps, auto)) is not None:
        return before
    if auto and (why := _too_large(job, weighed["weight_bytes"], steps)):
        return EqualityProof(False, f"{why}; --first-check {STEPS} asks for it all the same")
    ranks = _ranks_here(plan)
    if ranks == 0:
        return EqualityProof(
            False, "the ranks of one node cannot train with this strategy by themselves"
        )
    announcement = _Announcement(
        f"first check: {steps} steps of {job.strategy} on {ranks} ranks beside one process "
        "(--first-check off leaves it out)",
        announce,
    )
    deadline = time.monotonic() + BUDGET_S if auto else float("inf")
    check_plan = CheckPlan((ranks,), ranks, plan.shape.shards)

    def check(count: int) -> tuple[EqualityProof, FirstCheck]:
        with tempfile.TemporaryDirectory(prefix="allranks-") as folder:
            first = FirstCheck(resolved, job, count, Path(folder), server, check_plan)
            first.deadline, first.signals = deadline, signals
            first.announcement = announcement
            return first.proof(), first

    with _server(resources, job) as server:
        proof, made = check(steps)
        is_open = auto and made.witnessed and not proof.proved
        if is_open and not _too_large(job, weighed["weight_bytes"], STEPS_OF_NAMED):
            check(STEPS_OF_NAMED)  # for the difference that it may find
    if proof.proved or (auto and not made.has_failed):
        _remember(path, proof, steps, made.read)
    return proof


class _Announcement:
    """What is said once: when the ranks are set up, or after `SILENT_S`."""

    def __init__(self, text: str, announce: Callable[[str], None]) -> None:
        self._text, self._announce = text, announce
        self._said, self._latest = False, time.monotonic() + SILENT_S

    def look(self, run_dir: Path | None) -> None:
        """`run_dir` is that of the ranks that are set up, if they are."""
        if self._said:
            return
        rows = () if run_dir is None else read_rows(rank_events_path(run_dir, 0))
        if time.monotonic() > self._latest or any(row["event"] == "ready" for row in rows):
            self.say()

    def say(self) -> None:
        if not self._said:
            self._said = True
            self._announce(self._text)


class FirstCheck(Check):
    """The looks at float64, and at 16 bits where the job has them, or at bits; with a deadline."""

    def __init__(
        self,
        resolved: Resolved,
        job: Job,
        steps: int,
        folder: Path,
        server: ForkServer,
        plan: CheckPlan,
    ) -> None:
        few = steps if job.steps is None else min(job.steps, steps)
        here = dataclasses.replace(
            undisturbed(job), nodes=1, place=LOCAL, ranks=plan.own, steps=few
        )
        super().__init__(resolved, here, folder, server, plan)
        self.deadline = float("inf")
        self.announcement: _Announcement | None = None
        self._ranks_at: Path | None = None
        self.witnessed: list[str] = []
        self.draws, self.has_failed, self.exact_at = False, False, ""
        self.read: dict[str, State] = {}

    def proof(self) -> EqualityProof:
        """Whether it is proved; raises `NotEqual`, or `Interrupted` where the job is stopped."""
        try:
            looks = tuple(self._first_looks())
        except _OutOfTime:
            for path in sorted(self.folder.iterdir()):  # what the run that was cut short has read
                self._take_reads_of(path)
            return EqualityProof(False, f"the first check took more than {BUDGET_S:.0f} s")
        except RequestError as error:
            self.has_failed = True
            return EqualityProof(False, f"it cannot be compared: {error.found}")
        except (Stopped, Interrupted) as error:
            raise Interrupted("interrupted in the first check; nothing was trained") from error
        except ProgramError as error:
            cause = error.cause or str(error).splitlines()[0]
            self.has_failed = True
            return EqualityProof(False, f"the first check failed: {cause}")
        if not looks:
            return EqualityProof(False, "; ".join(self.notes) or "nothing could be compared")
        if looks[-1].first is not None and self.draws and not looks[-1].bitwise:
            return EqualityProof(False, "forward draws random numbers that follow the micro-batch")
        if looks[-1].one_process:
            return EqualityProof(
                False, f"one process gives two answers in {looks[-1].precision}: {looks[-1].first}"
            )
        verdict = Verdict(self.job.program, self.job.strategy, looks, self.left_out())
        if verdict.equal is False:
            raise NotEqual(f"{verdict}\n{TRAIN_ALL_THE_SAME}")
        if self.witnessed:  # seen in one process; --witness says what comes of it in the job
            return EqualityProof(False, f"the witness found: {'; '.join(self.witnessed)}")
        return EqualityProof(True, self._in_words(looks))

    def _in_words(self, looks: Sequence[Look]) -> str:
        look = looks[-1]
        steps = f"{look.comparison.steps} step{'s' if look.comparison.steps > 1 else ''}"
        at = f" of {self.exact_at}" if self.exact_at else ""
        precisions = dict.fromkeys(one.precision for one in looks)
        how = "bit by bit" if look.bitwise else f"in {' and in '.join(precisions)}"
        return f"{steps}{at} on {self.plan.own} ranks agree with one process {how}"

    def _first_looks(self) -> Iterator[Look]:
        guarantee = self.job.strategy_spec.guarantee
        if isinstance(guarantee, Approximate):
            self.job = exact_setting(self.job, guarantee)
            self.exact_at = self.job.strategy
            yield from self.in_float64(exact_tolerance(guarantee))
            return
        if self.job.bitwise:
            yield from self._bits(self.plan.many)
            return
        looks = list(self.in_float64())
        if not looks and self.job.precision != "fp64":
            looks = [self._in_own_precision()]
        if looks and looks[-1].first is not None and self.draws:
            with suppress(RequestError):  # there what is drawn belongs to the shard
                looks = list(self._bits(self.plan.many))
        yield from looks
        if self._has_other_passes and looks[-1].precision == "fp64" and looks[-1].first is None:
            yield self._in_own_precision()

    @property
    def _has_other_passes(self) -> bool:
        """Whether the job's precision casts within its passes, or scales the loss."""
        return self.job.precision not in ("fp32", "fp64")

    def run(self, name: str, job: Job) -> CheckedRun:
        """A run without an end: no weights are written, and the reference has the witness on."""
        alone = job.ranks == 1 and not job.replay
        watched = alone and "witness" not in ENGINES[job.engine].lacks
        job = dataclasses.replace(job, brief=True, witness="warn" if watched else "off")
        self._ranks_at = None if alone else self.folder / name
        run = super().run(name, job)
        self._announce_if_due()
        self._take_reads_of(run.result.run_dir)
        if alone:
            self.witnessed += run.summary.get("witness", {}).get("found", [])
        self.draws = self.draws or bool(run.trace.draws or run.summary["user_randomness"])
        return run

    def _take_reads_of(self, run_dir: Path) -> None:
        """What ranks have read; of a file that has changed meanwhile, what the first one saw."""
        reads = (event for event in read_events(run_dir) if event["event"] == "read")
        for path, state in (one for event in reads for one in event["files"].items()):
            if not path.startswith(f"{self.folder}{os.sep}"):
                self.read.setdefault(path, state)

    def tick(self) -> None:
        """Called while ranks run: ends them when the time is over."""
        self._announce_if_due()
        if time.monotonic() > self.deadline:
            if self.announcement is not None:
                self.announcement.say()
            raise _OutOfTime

    def _announce_if_due(self) -> None:
        if self.announcement is not None:
            self.announcement.look(self._ranks_at)


def _not_comparable(job: Job) -> str:
    """Why no step of this strategy can be compared with one process; "" where it can."""
    guarantee = job.strategy_spec.guarantee
    if not ENGINES[job.engine].traces:
        return f"the {job.engine} engine does not record the insides of its steps"
    if isinstance(guarantee, Approximate) and guarantee.setting:
        return ""
    if not isinstance(guarantee, Exact):
        return f"{job.strategy} does not promise the result of one process"
    return ""


def _too_large(job: Job, weight_bytes: int | None, steps: int) -> str:
    """Why memory or disk would not hold so many steps in float64; "" where they do, if known."""
    if weight_bytes is None:
        return ""
    if job.device == "cpu":
        need, free = COPIES_IN_MEMORY * weight_bytes, psutil.virtual_memory().available
        if need > free // 2:
            room = f"{format_bytes(need)} for the model, and {format_bytes(free)} are free"
            return f"one process would need {room}"
    need = COPIES_ON_DISK * steps * weight_bytes
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if need > free // 2:
        return f"a check would write {format_bytes(need)}, and {format_bytes(free)} are free"
    return ""


def _alone(job: Job) -> Job:
    return dataclasses.replace(
        job, strategy=ENGINES[job.engine].alone, ranks=1, nodes=1, place=LOCAL
    )


def _ranks_here(plan: LaunchPlan) -> int:
    """How many ranks the check has: all of the job, or on several nodes those of the first."""
    job = plan.job
    if job.nodes == 1:
        return job.ranks
    here = sum(rank.world.node == 0 for rank in plan.ranks)
    wanted = job.ranks if job.device == "cpu" and here == 1 else here
    try:
        resolved_strategy(job.strategy, ranks=wanted, bitwise=job.bitwise, per_node=wanted)
    except RequestError:
        return 0
    return wanted if wanted > 1 else 0


@contextmanager
def _server(resources: Resources, job: Job) -> Iterator[ForkServer]:
    """The fork server of this machine: that of the job, or one of its own beside nodes."""
    if isinstance(resources, LocalMachine):
        with nullcontext(resources.server) as server:
            yield server
        return
    with ForkServer(preload_for(job.program, job.engine)) as server:
        yield server


# --- what came of it ----------------------------------------------------------------------------


def _remembered(plan: LaunchPlan, program: dict[str, Any]) -> Path:
    """The file that says what came of the check of such a job."""
    key = {
        "job": {n: v for n, v in plan.job.to_data().items() if n not in NOT_DECIDING},
        "shape": repr(plan.shape),
        "files": program,
        "versions": {name: _version(name) for name in ("allranks", *PACKAGES)},
        "python": platform.python_version(),
        "package": _package_state(),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "allranks" / "first-checks" / f"{digest}.json"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _package_state() -> str:
    """Another text when a file of this package is another one."""
    root = Path(sys.modules["allranks"].__path__[0])
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".so"))
    told = [(str(p.relative_to(root)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _remembered_proof(path: Path, steps: int, auto: bool) -> EqualityProof | None:
    """What came of the check of an earlier start, of as many steps.

    One that proved nothing counts for `auto`: it would come to the same, and take as long.
    """
    try:
        row = json.loads(path.read_bytes())
        if changed_reads(row["read"]) or environment_of(row["read"]) != row["environment"]:
            return None
        if row["proved"] and row["steps"] >= steps:
            return EqualityProof(True, f"{row['why']} (checked on {row['date']})")
        if not row["proved"] and auto:
            again = f"checked on {row['date']}; --first-check {steps} checks again"
            return EqualityProof(False, f"{row['why']} ({again})")
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _remember(path: Path, proof: EqualityProof, steps: int, read: dict[str, State]) -> None:
    """Keep what came of it; a home that cannot be written costs the next start a check."""
    row = {**proof.to_data(), "steps": steps, "date": time.strftime("%Y-%m-%d")}
    with suppress(OSError):
        row |= {"read": read, "environment": environment_of(read)}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, as_json(row).encode())
