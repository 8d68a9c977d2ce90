"""`allranks replay`: any step of a run again, in one process, compared with what the run wrote.

A replay is a training that is resumed from the newest checkpoint before the step, or begins anew
where there is none, in a temporary run folder. It makes the steps up to the one that is asked for,
and digests its state where the run did. The folder of the run is read, and nothing in it changes
but `replays.jsonl`, which says what was replayed.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.catalog import ENGINES, TORCH, load
from allranks.checkpoint.export import verified
from allranks.checkpoint.folder import committed, step_of
from allranks.checkpoint.format import BadCheckpoint
from allranks.errors import ProgramError, RequestError
from allranks.job.config import Resolved
from allranks.job.job import HIDDEN, MADE_ALONE, Job, read_job_file
from allranks.job.limits import checked
from allranks.job.program import PROGRAM, by_name
from allranks.job.resume import CHECKPOINTS, HARMLESS, find_base
from allranks.job.run_folder import (
    JsonLines,
    check_is_run,
    rank_events_path,
    read_events,
    read_rows,
)
from allranks.launcher.describe import ask_task
from allranks.launcher.places import Rendezvous
from allranks.launcher.plan import LocalMachine
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.leftovers import scratch_folder
from allranks.launcher.start import resources_for, run_job
from allranks.strategies.card import Exact
from allranks.tools.report.records import REPLAYS, read_job
from allranks.training.record.digests import Row, broken_link, differing, read_digests
from allranks.training.record.logs import METRICS

UNDISTURBED: dict[str, Any] = {
    **MADE_ALONE,
    **{"elastic": "", "max_restarts": 0, "best": "", "time_limit": None, "devices": ""},
    **{"first_check": "off", "micro_batch_trial": False, "spare_state": False},
    **{"digest_every": 0, "brief": True},
}
"""What a replay does otherwise than its run; none of it changes what a step computes."""
OF_ANY_RANKS = ("loss", "samples")
OF_SAME_RANKS = (*OF_ANY_RANKS, "grad_norm")
"""What is compared of each step: the norm, summed by rank, only on the ranks of the run."""


@dataclass(frozen=True)
class ReplayRequest:
    """What is asked: `step` counts from 1; `ranks` 0 means one process where that is right.

    `look` is "pdb" or "shell", and where: "pdb:before". With `changed` the program may be another.
    `command` is that of the user, if it is another one. With `only_shard` the step is looked at as
    the pass of that shard, and is not compared.
    """

    run: Path
    step: int
    ranks: int = 0
    look: str = ""
    changed: bool = False
    command: str = ""
    only_shard: int | None = None

    @property
    def last(self) -> int:
        """The last step that is made as a whole."""
        return self.step if self.only_shard is None else self.step - 1

    @property
    def words(self) -> str:
        """The request, as an error repeats it."""
        return self.command or f"replay {self.run} --step {self.step}"

    def refused(self, problem: str, why: str, do: str) -> RequestError:
        """The error for this request."""
        return RequestError(asked=self.words, found=problem, why=why, do=do)


@dataclass(frozen=True)
class ReplayPlan:
    """The job that makes the steps again, and from where. `is_as_run`: on the ranks of the run."""

    job: Job
    checkpoint: Path | None
    start: int
    is_as_run: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class WrittenSteps:
    """What a run or a replay has written: digests and metrics by step, counted from 1."""

    digests: dict[int, Row]
    metrics: dict[int, Row]
    layout: tuple[str, int]
    """Strategy and number of ranks."""

    @classmethod
    def read(cls, run: Path) -> WrittenSteps:
        """Of a run folder."""
        job = read_job(run) if (run / "job.toml").is_file() else {}
        layout = (str(job.get("strategy")), int(job.get("ranks", 0)))
        metrics = {int(row["step"]) + 1: row for row in read_rows(run / METRICS)}
        return cls(read_digests(run), metrics, layout)

    def unlike(
        self, other: WrittenSteps, first: int = 0, last: int | None = None
    ) -> dict[int, list[str]]:
        """The names of what differs, by step, in order, within these steps."""
        wrong: dict[int, list[str]] = {}
        compared = OF_SAME_RANKS if self.layout == other.layout else OF_ANY_RANKS
        for step in sorted({*self.digests, *self.metrics} & {*other.digests, *other.metrics}):
            if step < first or (last is not None and step > last):
                continue
            a, b = (side.metrics.get(step, {}) for side in (self, other))
            names = [n for n in compared if n in a and n in b and a[n] != b[n]]
            if step in self.digests and step in other.digests:
                names = [*differing(self.digests[step], other.digests[step]), *names]
            if names:
                wrong[step] = list(dict.fromkeys(names))
        return wrong

    @property
    def begin(self) -> int:
        """The step after which they begin: not 0 where a run branched off another one."""
        return min(self.metrics, default=1) - 1

    def in_common(self, other: WrittenSteps) -> tuple[list[int], int]:
        """The steps that both have digests of, and of how many steps both have losses."""
        steps = sorted(self.digests.keys() & other.digests.keys())
        return steps, len(self.metrics.keys() & other.metrics.keys())


@dataclass
class Replayed:
    """What a replay has shown; `differs` has (step, names of what is not as in the run)."""

    plan: ReplayPlan
    step: int
    digests: list[int] = field(default_factory=list)
    """The steps whose digests were compared."""
    losses: int = 0
    """How many steps have losses that were compared."""
    differs: list[tuple[int, list[str]]] = field(default_factory=list)
    worst: float = 0.0
    """The largest difference of a loss, by its size."""
    weights_sha256: str | None = None
    """Of the weights after the last of these steps."""
    rows: dict[int, Row] = field(default_factory=dict)
    """The digests that the replay has written, by their step."""

    @property
    def is_promised(self) -> bool:
        """Whether every bit must be that of the run."""
        return self.plan.job.bitwise

    @property
    def is_equal(self) -> bool:
        """Whether all that was compared has the bits of the run, and something was."""
        return not self.differs and bool(self.digests or self.losses)

    def to_data(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "step": self.step,
            "only_shard": plan.job.only_shard,
            "from_step": plan.start,
            "checkpoint": None if plan.checkpoint is None else str(plan.checkpoint),
            "ranks": plan.job.ranks,
            "strategy": plan.job.strategy,
            "bitwise": plan.job.bitwise,
            "digests": self.digests,
            "losses": self.losses,
            "equal": self.is_equal,
            "differs": [{"step": step, "what": names} for step, names in self.differs],
            "worst_loss": self.worst,
            "notes": list(plan.notes),
        }

    def __str__(self) -> str:
        plan, job = self.plan, self.plan.job
        where = "one process" if job.ranks == 1 else f"{job.ranks} ranks of {job.strategy}"
        begin = (
            "the beginning" if plan.checkpoint is None else f"the checkpoint of step {plan.start}"
        )
        lines = [f"note: {note}" for note in plan.notes]
        last = self.step if job.only_shard is None else self.step - 1
        steps = f"made steps {plan.start + 1} to {last} again" if last > plan.start else "began"
        lines.append(f"{steps} on {where}, from {begin}")
        if job.only_shard is not None:
            alone = f"of step {self.step} shard {job.only_shard} alone"
            lines.append(f"{alone}: its gradients, as the step adds them up, and no update")
        steps = ", ".join(map(str, self.digests))
        digests = f"digests after step {steps}" if steps else "no digests, the run wrote none here"
        norms = " and gradient norms" if plan.is_as_run else ""
        lines.append(f"compared: {digests}; losses{norms} of {self.losses} steps")
        if self.is_equal:
            lines.append("equal: every one has the bits of the run")
        elif self.differs and (self.is_promised or not self.losses):
            step, names = self.differs[0]
            at = "the checkpoint itself" if step == plan.start else "the first step"
            lines.append(f"DIFFERS: step {step} is {at} with other {', '.join(names)}")
        elif self.differs:
            lines.append(
                f"to rounding: without --bitwise sums have another order; losses differ by "
                f"{self.worst:.1e} of their size at most"
            )
        return "\n".join(lines)


# --- plan ----------------------------------------------------------------------------------------


def plan_replay(request: ReplayRequest) -> ReplayPlan:
    """The plan; raises `RequestError` for what cannot be replayed. Nothing is started."""
    _check_run(request)
    job = _job_of(request.run, request.step)
    for is_wrong, problem, why, do in _refusals(request, job):
        if is_wrong:
            raise request.refused(problem, why, do)
    checkpoint, start, notes = _checkpoint(request)
    _check_course(request, start)
    rows = read_digests(request.run)
    broken = broken_link(rows.values())
    if broken is not None:
        notes.append(f"digests.jsonl was changed by hand: its chain breaks at step {broken}")
    is_exact = isinstance(job.strategy_spec.guarantee, Exact)
    alone = is_exact and request.ranks <= 1
    ranks = 1 if alone else request.ranks or job.ranks
    first = start if is_exact else start + 1  # its end changes weights
    values: dict[str, Any] = {"ranks": ranks, "last_step": request.step, "look": request.look}
    values |= {"only_shard": request.only_shard, "strategy": "single" if alone else job.strategy}
    if alone and job.micro_batch is None and not job.bitwise:
        batch = int(job.task.get("batch_size", 0))
        values["micro_batch"] = -(-batch // job.ranks) if batch else None  # fits one device
    if checkpoint is not None:
        values["resume"] = str(checkpoint.absolute())
    again = checked(dataclasses.replace(job, **{**UNDISTURBED, **values}))
    at = tuple(row for row in rows if first <= row <= request.last)
    again = dataclasses.replace(again, digest_at=at)
    return ReplayPlan(again, checkpoint, start, ranks == job.ranks, tuple(notes))


def _check_run(request: ReplayRequest) -> None:
    """Raise `RequestError` unless the folder is that of a run that has made the step."""
    check_is_run(request.run, request.words)
    if "kind" in read_job(request.run):
        raise request.refused(
            "a run of a script", "its steps are its own", "replay a run of `allranks train`"
        )
    last = _last_step(request.run)
    if request.step > last:
        raise request.refused(
            f"a run that has made {last} steps",
            "a replay makes again what was made, and compares it",
            f"--step {last} or less" if last else "train first",
        )


def _refusals(request: ReplayRequest, job: Job) -> Iterator[tuple[bool, str, str, str]]:
    """For each rule: whether it is broken, what is wrong, why, and what works."""
    yield (
        job.engine != TORCH,
        f"a run of the {ENGINES[job.engine].title} engine",
        "only steps of torch are digested, and have equal bits",
        "replay a run of torch",
    )
    yield (
        not job.program,
        "a loop of your own, which names no program",
        "its steps are made by code that nobody can call",
        "train with `allranks train PROGRAM`",
    )
    agreement = job.strategy_spec.card.agreement
    yield (
        agreement.is_one_training and not agreement.lockstep,
        f"a run of {job.strategy}",
        "its processes run asynchronously: no two runs of it make the same steps",
        "replay a run of another strategy: allranks strategies",
    )
    kind, _, name = request.look.partition(":")
    exists = kind == "save" and os.path.lexists(name)
    yield (
        exists or (kind == "save" and not Path(name).parent.is_dir()),
        f"--save-step {name}: {'it exists' if exists else 'no such folder'}",
        "the script is a new file, replaces none, and no folder is made for it",
        "name a new file in a folder that is there",
    )
    is_exact, shard = isinstance(job.strategy_spec.guarantee, Exact), request.only_shard
    yield (
        not is_exact and request.ranks not in (0, job.ranks),
        f"--ranks {request.ranks} for a run of {job.strategy} on {job.ranks}",
        "its result depends on the number of ranks",
        "leave --ranks out",
    )
    yield (
        shard is not None and not request.look,
        f"--only-shard {shard}, and nothing to look with",
        "the pass of one shard is no step, and has nothing that the run wrote",
        "--pdb, --shell or --save-step FILE",
    )
    yield (
        shard is not None and not (job.bitwise and is_exact),
        f"--only-shard {shard} of a run of {job.strategy}{' without --bitwise' * is_exact}",
        "its passes go through the samples of several shards",
        "leave --only-shard out; train with --bitwise",
    )
    ranks = request.ranks if is_exact else job.ranks
    yield (
        bool(request.look) and ranks > 1,
        f"--{kind} on {ranks} ranks",
        "a terminal talks to one process",
        "replay it in one process, where the strategy allows that",
    )


def _check_course(request: ReplayRequest, start: int) -> None:
    """Raise `RequestError` if steps on the way were made by another job than the last one."""
    for event in read_events(request.run):
        is_between = event["event"] == "resumed" and start < event["step"] < request.step
        if is_between and (names := set(event["changes"]) - HARMLESS):
            raise request.refused(
                f"{', '.join(sorted(names))}: changed when the run was resumed after step "
                f"{event['step']}, and no checkpoint from there to step {request.step}",
                "one job makes all steps of a replay",
                f"--step {event['step']} or less, or a step after a checkpoint that is there",
            )


def _last_step(run: Path) -> int:
    """How many steps the run is known to have made."""
    written = WrittenSteps.read(run)
    saved = map(step_of, committed(run / CHECKPOINTS))
    return max(0, *written.metrics, *written.digests, *saved)


def _checkpoint(request: ReplayRequest) -> tuple[Path | None, int, list[str]]:
    """The newest checkpoint from which the step can be made; (`None`, 0) if there is none.

    A run that branched off another one may begin at a checkpoint there.
    """
    notes: list[str] = []
    resumed = [e for e in read_events(request.run) if e["event"] == "resumed"]
    elsewhere = [
        Path(e["path"]) for e in resumed if Path(e["path"]).parent.parent != request.run.absolute()
    ]
    saved = committed(request.run / CHECKPOINTS)
    earlier = (folder for folder in (*saved, *elsewhere) if step_of(folder) < request.step)
    for folder in holding(earlier, notes):
        return folder, step_of(folder), notes
    if elsewhere:
        raise request.refused(
            f"a run that began at {elsewhere[0]}, which is gone or does not hold"
            if step_of(elsewhere[0]) < request.step
            else f"a run that began after step {step_of(elsewhere[0])}",
            "its first steps are those of another run",
            "replay a step after a checkpoint that is there: allranks checkpoints list RUN",
        )
    if saved:
        after = f"its checkpoints are of step {step_of(saved[-1])} and later"
        notes.append(f"{after}: began at the beginning (--keep N keeps more)")
    return None, 0, notes


def holding(checkpoints: Iterable[Path], notes: list[str]) -> Iterator[Path]:
    """Those of the checkpoints that hold what was saved; adds a note of each other one."""
    for folder in checkpoints:
        try:
            verified(folder)
        except (BadCheckpoint, OSError) as error:
            notes.append(f"the checkpoint {folder.name} does not hold: {error}")
        else:
            yield folder


def _job_of(run: Path, step: int) -> Job:
    """The job that made the step: of the first checkpoint from there on, or as it was last."""
    newer = [folder for folder in committed(run / CHECKPOINTS) if step_of(folder) >= step]
    values, task = read_job_file(str(run / "job.toml"))
    if newer:
        with suppress(RequestError):
            base = find_base(newer[-1], resumes=False)
            values, task = base.values, base.task
    values = {name: value for name, value in values.items() if name not in ("resume", "run_dir")}
    return Job(**values, task={n: v for n, v in task.items() if v != HIDDEN})


# --- replay --------------------------------------------------------------------------------------


def replay(request: ReplayRequest, server: ForkServer | None = None) -> Replayed:
    """Make the steps again, and compare them; raises what `plan_replay` and `run_job` raise.

    Without `server` one is started.
    """
    plan, sha256 = plan_replay(request), None
    with scratch_folder() as folder:
        job = dataclasses.replace(plan.job, run_dir=str(Path(folder, "run")))
        with machine_for(job, server) as machine:
            notes = check_program(request, job, machine)
            if not request.look:
                result = run_job(Resolved(job, {}), resources=machine)
                sha256 = result.summary["weights_sha256"]
        if request.look:
            replay_here(job)
        plan = dataclasses.replace(plan, notes=(*plan.notes, *notes))
        replayed = compare(request, plan, WrittenSteps.read(Path(job.run_dir)))
        replayed.weights_sha256 = sha256
    row = {"event": "replay", "time": time.time(), **replayed.to_data()}
    with suppress(OSError), JsonLines(request.run / REPLAYS) as file:
        file.row(row)
    return replayed


@contextmanager
def machine_for(job: Job, server: ForkServer | None) -> Iterator[LocalMachine]:
    """Within, this machine with `server`; without one, with one that is started for the job."""
    if server is not None:
        yield LocalMachine(server)
        return
    with resources_for(job, Rendezvous()) as resources:
        assert isinstance(resources, LocalMachine), "a replay is made on this machine"
        yield resources


def check_program(request: ReplayRequest, job: Job, machine: LocalMachine) -> list[str]:
    """Raise `RequestError` if a file of the program is no longer what the run has loaded.

    With `changed` it is a note.
    """
    before = facts_of(read_events(request.run))
    if not before or PROGRAM not in before[-1]:
        return ["the run has not written which program it was"]
    alone = dataclasses.replace(job, strategy="single", ranks=1)
    was, now = before[-1], by_name(ask_task(machine, alone, "weigh", "weighed")["program"])
    names = [name for name in was if name in now and was[name] != now[name]]
    files = [job.program if name == PROGRAM else name for name in names]
    if files and not request.changed:
        raise request.refused(
            f"{', '.join(files)}: another content than the run has loaded",
            "other code makes other steps",
            "check out the version of the run, or see what it makes of the steps: --changed",
        )
    values = "fields of the task have the values of the run, not new defaults"
    return [f"{name} has changed since the run; {values}" for name in files]


def facts_of(events: list[dict[str, Any]]) -> list[dict[str, object]]:
    """What each rank has written of its machine and program, in each attempt, by name."""
    return [by_name(e["machine"]) for e in events if e["event"] == "ready" and "machine" in e]


def replay_here(job: Job) -> None:
    """Make the steps in this process, which has a terminal; raises what went wrong."""
    run = Path(job.run_dir)
    run.mkdir()
    if load(f"{ENGINES[job.engine].worker}:main")(job.to_data()) == 0:
        return
    rows = [row for row in read_rows(rank_events_path(run, 0)) if row["event"] == "failed"]
    failed: Row = next(reversed(rows), {"kind": "", "request": None, "traceback": "no report"})
    if failed["kind"] == "BdbQuit":
        raise ProgramError("left the debugger: nothing was compared")
    if failed["request"]:
        raise RequestError.from_data(failed["request"])
    raise ProgramError(str(failed["traceback"] or failed["message"]))


# --- compare -------------------------------------------------------------------------------------


def compare(request: ReplayRequest, plan: ReplayPlan, now: WrittenSteps) -> Replayed:
    """Compare the digests and losses `now`, of the replay, with those of the run."""
    was = WrittenSteps.read(request.run)
    now = dataclasses.replace(now, layout=was.layout if plan.is_as_run else ("", 0))
    result = Replayed(plan, request.step, digests=list(plan.job.digest_at), rows=now.digests)
    wrong = was.unlike(now, plan.start, request.last)
    for step in set(result.digests) - now.digests.keys():
        wrong[step] = ["digests: none was written", *wrong.get(step, [])]
    reached = max(now.metrics, default=plan.start)
    if reached < request.last:
        wrong[reached + 1] = [f"end: the training ended after step {reached}"]
    for step in set(range(plan.start + 1, request.last + 1)) & was.metrics.keys():
        if step in now.metrics:
            result.losses += 1
            both = (side.metrics[step]["loss"] for side in (was, now))
            result.worst = max(result.worst, _relative(*both))
    result.differs = sorted(wrong.items())
    return result


def _relative(was: Any, now: Any) -> float:
    """The difference of two losses by the size of the first; infinite if one is no number."""
    was, now = (math.nan if loss is None else float(loss) for loss in (was, now))
    difference = abs(now - was) / max(abs(was), 1e-30)
    return difference if math.isfinite(difference) else math.inf
