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
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.catalog import ENGINES, TORCH, load
from allranks.checkpoint.export import verified
from allranks.checkpoint.folder import committed, step_of
from allranks.checkpoint.format import BadCheckpoint
from allranks.errors import ProgramError, RequestError
from allranks.job.config import Resolved
from allranks.job.job import HIDDEN, Job, read_job_file
from allranks.job.limits import checked
from allranks.job.place import LOCAL
from allranks.job.program import MODULES, PROGRAM, by_name
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
from allranks.launcher.plan import LocalMachine, Resources
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.leftovers import scratch_folder
from allranks.launcher.start import resources_for, run_job
from allranks.strategies.card import Exact
from allranks.tools.report.records import REPLAYS, read_job
from allranks.training.record.digests import Row, broken_link, differing, read_digests
from allranks.training.record.logs import METRICS

UNDISTURBED: dict[str, Any] = {
    **{"nodes": 1, "place": LOCAL, "elastic": "", "share": "", "inject": "", "max_restarts": 0},
    **{"checkpoint_every": None, "best": "", "log": "", "profile": False, "time_limit": None},
    **{"verify_every": None, "witness": "off", "first_check": "off", "micro_batch_trial": False},
    **{"devices": "", "digest_every": 0, "brief": True, "resume": ""},
    **{"audit": "", "audit_every": None, "spare_state": False},
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
    rows = max((int(row["step"]) + 1 for row in read_rows(run / METRICS)), default=0)
    saved = max(map(step_of, committed(run / CHECKPOINTS)), default=0)
    return max(rows, saved, *read_digests(run), 0)


def _checkpoint(request: ReplayRequest) -> tuple[Path | None, int, list[str]]:
    """The newest checkpoint from which the step can be made; (`None`, 0) if there is none.

    A run that branched off another one may begin at a checkpoint there.
    """
    notes: list[str] = []
    resumed = [e for e in read_events(request.run) if e["event"] == "resumed"]
    elsewhere = [
        Path(e["path"]) for e in resumed if Path(e["path"]).parent.parent != request.run.absolute()
    ]
    for folder in (*committed(request.run / CHECKPOINTS), *elsewhere):
        if step_of(folder) >= request.step:
            continue
        try:
            verified(folder)
        except (BadCheckpoint, OSError) as error:
            notes.append(f"the checkpoint {folder.name} does not hold: {error}")
            continue
        return folder, step_of(folder), notes
    if elsewhere:
        raise request.refused(
            f"a run that began at {elsewhere[0]}, which is gone or does not hold"
            if step_of(elsewhere[0]) < request.step
            else f"a run that began after step {step_of(elsewhere[0])}",
            "its first steps are those of another run",
            "replay a step after a checkpoint that is there: allranks checkpoints list RUN",
        )
    if oldest := committed(request.run / CHECKPOINTS)[-1:]:
        after = f"its checkpoints are of step {step_of(oldest[0])} and later"
        notes.append(f"{after}: began at the beginning (--keep N keeps more)")
    return None, 0, notes


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
        with ExitStack() as stack:
            resources: Resources = (
                stack.enter_context(resources_for(job, Rendezvous()))
                if server is None
                else LocalMachine(server)
            )
            notes = check_program(request, job, resources)
            if not request.look:
                result = run_job(Resolved(job, {}), resources=resources)
                sha256 = result.summary["weights_sha256"]
        if request.look:
            replay_here(job)
        plan = dataclasses.replace(plan, notes=(*plan.notes, *notes))
        replayed = compare(request, plan, Path(job.run_dir))
        replayed.weights_sha256, replayed.rows = sha256, read_digests(Path(job.run_dir))
    row = {"event": "replay", "time": time.time(), **replayed.to_data()}
    with suppress(OSError), JsonLines(request.run / REPLAYS) as file:
        file.row(row)
    return replayed


def check_program(request: ReplayRequest, job: Job, resources: Resources) -> list[str]:
    """Raise `RequestError` if a file of the program is no longer what the run has loaded.

    With `changed` it is a note.
    """
    ready = [e for e in read_events(request.run) if e["event"] == "ready" and "machine" in e]
    if not ready:
        return ["the run has not written which program it was"]
    alone = dataclasses.replace(job, strategy="single", ranks=1)
    facts = ask_task(resources, alone, "weigh", "weighed")["program"]
    before = {name: ready[-1]["machine"].get(name) for name in (PROGRAM, MODULES)}
    was, now = by_name(before), by_name(facts)
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


def compare(request: ReplayRequest, plan: ReplayPlan, again: Path) -> Replayed:
    """Compare the digests and losses of the replay in the folder `again` with those of the run."""
    result = Replayed(plan, request.step)
    rows, rows_again = read_digests(request.run), read_digests(again)
    wrong: dict[int, list[str]] = {}
    for step in plan.job.digest_at:
        result.digests.append(step)
        wrong[step] = ["digests: none was written"]
        if step in rows_again:
            wrong[step] = differing(rows[step], rows_again[step])
    was, now = metrics_of(request.run), metrics_of(again)
    compared = OF_SAME_RANKS if plan.is_as_run else OF_ANY_RANKS
    reached = max(now, default=plan.start)
    if reached < request.last:
        wrong[reached + 1] = [f"end: the training ended after step {reached}"]
    for step in range(plan.start + 1, request.last + 1):
        if step in was and step in now:
            result.losses += 1
            names = [n for n in compared if was[step].get(n) != now[step].get(n)]
            wrong[step] = list(dict.fromkeys([*wrong.get(step, []), *names]))
            result.worst = max(result.worst, _relative(was[step]["loss"], now[step]["loss"]))
    result.differs = [(step, names) for step, names in sorted(wrong.items()) if names]
    return result


def metrics_of(run: Path) -> dict[int, Row]:
    """The rows of the metrics by step, counted from 1."""
    return {int(row["step"]) + 1: row for row in read_rows(run / METRICS)}


def _relative(was: Any, now: Any) -> float:
    """The difference of two losses by the size of the first; infinite if one is no number."""
    was, now = (math.nan if loss is None else float(loss) for loss in (was, now))
    difference = abs(now - was) / max(abs(was), 1e-30)
    return difference if math.isfinite(difference) else math.inf
