"""The first check of a job: compares its first steps with one process, before it trains.

A strategy that cuts the model can silently compute something else: forward may read one part of a
weight, a hook may see one part of a gradient. So a job makes a short `check` before it starts: two
steps on its own batches, in float64, with the witness on, and again in the precision of the job if
that has 16 bits. If the witness names something and two steps agree, eight are compared, because
what it names may show later. The result is cached under the program's files, its fields, the
options of the job, and the versions. The next start costs nothing, while all files that the check
has read are unchanged.

    --first-check auto   if one process can hold the model, for at most `BUDGET_S`
    --first-check STEPS  so many steps, without a limit of time
    --first-check off    none; the result says that equality is not proved

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
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from allranks.catalog import ENGINES
from allranks.checkpoint.files import as_json, write_whole
from allranks.errors import Interrupted, NotEqual, ProgramError, RequestError, Stopped
from allranks.job.config import Resolved
from allranks.job.engines import preload_for
from allranks.job.job import Job
from allranks.job.place import LOCAL
from allranks.job.program import State, changed_reads, environment_of
from allranks.job.run_folder import rank_events_path, read_events, read_rows
from allranks.job.units import format_bytes
from allranks.launcher.describe import EqualityProof, ask_task
from allranks.launcher.nodes.nodes import Nodes
from allranks.launcher.plan import LaunchPlan, LocalMachine, Resources
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.supervisor import Signals
from allranks.strategies.card import Approximate, Exact
from allranks.strategies.resolve import resolved_strategy
from allranks.tools.check.against_single import (
    Check,
    CheckedRun,
    CheckPlan,
    on_one_rank,
    undisturbed,
)
from allranks.tools.check.check import exact_setting, exact_tolerance
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
        *("share", "elastic", "spare_state", "digest_every"),
        *("audit", "audit_every"),
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
    """The proof for a planned job whose strategy cuts the model. Raises `NotEqual` if they differ.

    `announce` is called once steps are compared; not for a job that its ranks refuse in setup. The
    only file that stays is the cached result.
    """
    job = plan.job
    steps = STEPS if job.first_check == "auto" else int(job.first_check)
    if why := _not_comparable(job):
        return EqualityProof(False, why)
    weighed = ask_task(resources, on_one_rank(job), "weigh", "weighed", signals)
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
            first.deadline, first.signals, first.announcement = deadline, signals, announcement
            return first.proof(), first

    with _server(resources, job) as server:
        proof, checked = check(steps)
        is_open = auto and checked.witnessed and not proof.proved
        if is_open and not _too_large(job, weighed["weight_bytes"], STEPS_OF_NAMED):
            check(STEPS_OF_NAMED)  # for the difference that it may find
    if proof.proved or (auto and not checked.has_failed):
        _remember(path, proof, steps, checked.read)
    return proof


class _Announcement:
    """A line that is printed once: when the ranks are set up, or after `SILENT_S`."""

    def __init__(self, text: str, announce: Callable[[str], None]) -> None:
        self._text, self._announce = text, announce
        self._announced, self._latest = False, time.monotonic() + SILENT_S

    def announce_if_due(self, run_dir: Path | None) -> None:
        """`run_dir`: the folder of the run whose ranks are being set up, if one has begun."""
        if self._announced:
            return
        rows = () if run_dir is None else read_rows(rank_events_path(run_dir, 0))
        if time.monotonic() > self._latest or any(row["event"] == "ready" for row in rows):
            self.announce()

    def announce(self) -> None:
        if not self._announced:
            self._announced = True
            self._announce(self._text)


class FirstCheck(Check):
    """A check with a deadline: in float64, and in the job's 16 bits, or bit by bit."""

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
            undisturbed(job), nodes=1, place=LOCAL, ranks=plan.job_ranks, steps=few
        )
        here = dataclasses.replace(here, schedule_steps=job.steps)
        super().__init__(resolved, here, folder, server, plan)
        self.deadline = float("inf")
        self.announcement = _Announcement("", lambda text: None)
        self._ranks_at: Path | None = None
        self.witnessed: list[str] = []
        self.draws, self.has_failed, self.exact_at = False, False, ""
        self.read: dict[str, State] = {}

    def proof(self) -> EqualityProof:
        """Whether it is proved; raises `NotEqual`, or `Interrupted` where the job is stopped."""
        try:
            looks = tuple(self._first_looks())
        except _OutOfTime:
            for path in sorted(self.folder.iterdir()):  # files that the interrupted run has read
                self._record_reads(path)
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
        if self.witnessed:  # in one process; --witness decides what the job does about it
            return EqualityProof(False, f"the witness found: {'; '.join(self.witnessed)}")
        return EqualityProof(True, self._in_words(looks))

    def _in_words(self, looks: Sequence[Look]) -> str:
        look = looks[-1]
        steps = f"{look.comparison.steps} step{'s' if look.comparison.steps > 1 else ''}"
        at = f" of {self.exact_at}" if self.exact_at else ""
        precisions = dict.fromkeys(look.precision for look in looks)
        how = "bit by bit" if look.bitwise else f"in {' and in '.join(precisions)}"
        return f"{steps}{at} on {self.plan.job_ranks} ranks agree with one process {how}"

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
            with suppress(RequestError):  # bitwise, random numbers are drawn per shard
                looks = list(self._bits(self.plan.many))
        yield from looks
        casts = self.job.precision not in ("fp32", "fp64")  # within passes, or scales the loss
        if casts and looks[-1].precision == "fp64" and looks[-1].first is None:
            yield self._in_own_precision()

    def run(self, name: str, job: Job) -> CheckedRun:
        """A run that writes no weights at its end; the reference has the witness on."""
        alone = job.ranks == 1 and not job.replay
        watched = alone and "witness" not in ENGINES[job.engine].lacks
        job = dataclasses.replace(job, brief=True, witness="warn" if watched else "off")
        self._ranks_at = None if alone else self.folder / name
        run = super().run(name, job)
        self.announcement.announce_if_due(self._ranks_at)
        self._record_reads(run.result.run_dir)
        if alone:
            self.witnessed += run.summary.get("witness", {}).get("found", [])
        self.draws = self.draws or bool(run.trace.draws or run.summary["user_randomness"])
        return run

    def _record_reads(self, run_dir: Path) -> None:
        """Note the files that ranks have read; for one that changed meanwhile, its first state."""
        reads = (event for event in read_events(run_dir) if event["event"] == "read")
        for path, state in (file for event in reads for file in event["files"].items()):
            if not path.startswith(f"{self.folder}{os.sep}"):
                self.read.setdefault(path, state)

    def tick(self) -> None:
        """Called while ranks run: ends them at the deadline."""
        self.announcement.announce_if_due(self._ranks_at)
        if time.monotonic() > self.deadline:
            self.announcement.announce()
            raise _OutOfTime


def _not_comparable(job: Job) -> str:
    """Why no step of this strategy can be compared with one process; "" if it can."""
    guarantee = job.strategy_spec.guarantee
    if not ENGINES[job.engine].traces:
        return f"the {job.engine} engine does not record the insides of its steps"
    if isinstance(guarantee, Approximate) and guarantee.setting:
        return ""
    if not isinstance(guarantee, Exact):
        return f"{job.strategy} does not promise the result of one process"
    return ""


def _too_large(job: Job, weight_bytes: int | None, steps: int) -> str:
    """Why memory or disk cannot hold so many steps in float64; "" if they can, or unknown."""
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


def _ranks_here(plan: LaunchPlan) -> int:
    """The number of ranks of the check: all of the job, or those of the first of several nodes."""
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
    """The fork server of this machine: the job's, or a new one where the job runs on nodes."""
    if isinstance(resources, LocalMachine):
        yield resources.server
        return
    assert isinstance(resources.server, Nodes)
    with resources.server.attended(), ForkServer(preload_for(job.program, job.engine)) as server:
        yield server


# --- cached results ---------------------------------------------------------------------------


def _remembered(plan: LaunchPlan, program: dict[str, Any]) -> Path:
    """The file that caches the result of the check of such a job."""
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
    """A digest that changes with any file of this package."""
    root = Path(sys.modules["allranks"].__path__[0])
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".so"))
    stamps = [(str(p.relative_to(root)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()


def _remembered_proof(path: Path, steps: int, auto: bool) -> EqualityProof | None:
    """The cached result of an earlier check of at least as many steps.

    With `auto`, a check that proved nothing is not repeated: it would give the same result.
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
    """Cache the result; if the home cannot be written, the next start checks again."""
    row = {**proof.to_data(), "steps": steps, "date": time.strftime("%Y-%m-%d")}
    with suppress(OSError):
        row |= {"read": read, "environment": environment_of(read)}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, as_json(row).encode())
