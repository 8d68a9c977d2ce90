"""`allranks bisect`: the first step at which two runs differ, and within it the first tensor.

What the runs wrote narrows it down: digests of the state, and the loss and the norm of the
gradients of each step. Then the steps between the last equal state and the first difference are
made again on both sides, from checkpoints, with a digest after each (`tools.replay`). The first
step that differs is made once more and recorded. A side counts as made again if it has the digests
and losses that its run wrote.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from allranks.checkpoint.folder import committed, step_of
from allranks.errors import RequestError
from allranks.job.config import Resolved
from allranks.job.resume import CHECKPOINTS
from allranks.job.run_folder import read_events
from allranks.launcher.plan import LocalMachine
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.leftovers import scratch_folder
from allranks.launcher.start import run_job
from allranks.strategies.card import Exact
from allranks.tools.bisect_step import RecordDifference, compare_step
from allranks.tools.replay import (
    ReplayPlan,
    ReplayRequest,
    WrittenSteps,
    check_program,
    facts_of,
    machine_for,
    plan_replay,
)
from allranks.tools.report.records import read_job
from allranks.tools.report.tables import values_of
from allranks.training.record.digests import differing

RECORD, STEP = "record", "step"


@dataclass(frozen=True)
class MadeSteps:
    """Steps that were made again: on the ranks of the run, or (`alone`) in one process."""

    plan: ReplayPlan
    alone: bool
    run_dir: Path
    written: WrittenSteps


@dataclass
class Bisection:
    """The answer; `step` is the first that differs, `before` the last known to be equal."""

    labels: tuple[str, str]
    digests: int
    losses: int
    settings: list[str]
    before: int = 0
    known: int = 0
    """The first step at which what both have written differs."""
    step: int = 0
    names: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    first: RecordDifference | None = None

    @property
    def is_equal(self) -> bool:
        """Whether all that was compared has equal bits."""
        return not self.step

    def to_data(self) -> dict[str, Any]:
        first = None if self.first is None else self.first.to_data()
        return {**dataclasses.asdict(self), "equal": self.is_equal, "first": first}

    def __str__(self) -> str:
        lines = [f"{label}: {name}" for label, name in zip("AB", self.labels, strict=True)]
        lines += [f"differs in {line}" for line in self.settings]
        lines += [f"note: {note}" for note in self.notes]
        if self.is_equal:
            counts = f"{self.digests} rows of digests and losses of {self.losses} steps"
            return "\n".join([*lines, f"equal in all that both have: {counts}"])
        lines.append(f"what both have written differs first at step {self.known}")
        lines.append(f"the last state that is equal: {self.before or 'none is known'}")
        lines.append(f"DIFFERS: step {self.step} is the first, with other {', '.join(self.names)}")
        if self.first is not None:
            lines.append(str(self.first))
        return "\n".join(lines)


class ReplayedSide:
    """A run whose steps can be made again on `machine()`, in folders below `folder`."""

    def __init__(
        self, request: ReplayRequest, folder: Path, machine: Callable[[], LocalMachine]
    ) -> None:
        self.request, self.folder, self.machine = request, folder, machine
        folder.mkdir()
        self.written = WrittenSteps.read(request.run)
        self.wrong: tuple[int, list[str]] = (0, [])  # the first step that was made otherwise
        self.why = ""
        """Why its steps cannot be made again as they were; "" if they can."""
        self._count, self._is_checked = 0, False

    @property
    def ranks(self) -> int:
        """The ranks of the run."""
        return int(read_job(self.request.run)["ranks"])

    def plan(self, after: int, alone: bool = True) -> ReplayPlan:
        """The plan of the step after `after`, from the newest checkpoint up to there."""
        request = dataclasses.replace(self.request, step=after + 1)
        plan = plan_replay(request)
        if (alone and plan.job.bitwise) or plan.is_as_run:
            return plan
        return plan_replay(dataclasses.replace(request, ranks=self.ranks))

    def layouts(self, after: int) -> list[bool]:
        """Whether to make steps in one process (true), on the ranks of the run: by preference."""
        plan = self.plan(after)
        spec = plan.job.strategy_spec
        if plan.is_as_run or not (plan.job.bitwise and isinstance(spec.guarantee, Exact)):
            return [False]
        is_small = plan.job.device == "cpu" and self.ranks <= (os.cpu_count() or 1)
        return [False, True] if is_small else [True, False]

    def make(self, after: int, last: int, alone: bool, look: str = "") -> MadeSteps:
        """Make the steps up to `last`; digests after each, or the record of the last one."""
        plan, self._count = self.plan(after, alone), self._count + 1
        run_dir = self.folder / f"{self._count}"
        at = () if look else tuple(range(plan.start, last + 1))
        more: dict[str, Any] = {"last_step": last, "digest_at": at, "look": look}
        job = dataclasses.replace(plan.job, **more, run_dir=str(run_dir))
        if not self._is_checked:
            notes = check_program(self.request, job, self.machine())
            plan = dataclasses.replace(plan, notes=(*plan.notes, *notes))
            self._is_checked = True
        run_job(Resolved(job, {}), resources=self.machine())
        return MadeSteps(plan, alone, run_dir, WrittenSteps.read(run_dir))

    def as_written(self, after: int, last: int, alone: bool) -> MadeSteps | None:
        """The same, if it has all that the run wrote; else `why` says what it has not."""
        again = self.make(after, last, alone)
        wrong = self.written.unlike(again.written, again.plan.start, last)
        if not wrong:
            self.why = ""
            return again
        step, names = self.wrong = next(iter(wrong.items()))
        where = "in one process" if alone else "on its own ranks"
        at = "its checkpoint" if step == again.plan.start else f"step {step}"
        self.why = f"{at}, made again {where}, has other {', '.join(names)} than the run wrote"
        return None

    def recorded(self, like: MadeSteps, step: int) -> Path:
        """The folder of the record of a step, made as those were: from the same checkpoint."""
        return self.make(like.plan.start, step, like.alone, RECORD).run_dir / STEP


# --- search --------------------------------------------------------------------------------------


def bisect(run: Path, other: Path | None = None, server: ForkServer | None = None) -> Bisection:
    """The first difference of `other` from `run`; without `other`, of the program of today.

    Raises `RequestError` for runs that cannot be compared. Without `server` one is started.
    """
    words = f"bisect {run} {other}" if other is not None else f"bisect {run}"
    more: dict[str, Any] = {"changed": other is None, "command": words}
    with scratch_folder() as folder, ExitStack() as stack:

        def side(path: Path, name: str) -> ReplayedSide:
            request = ReplayRequest(path, WrittenSteps.read(path).begin + 1, **more)
            job = plan_replay(request).job
            machine = cache(lambda: stack.enter_context(machine_for(job, server)))
            return ReplayedSide(request, Path(folder, name), machine)

        a, b = side(run, "a"), side(other or run, "b")
        return _of_two(a, b) if other is not None else _of_today(a, b)


def _of_two(a: ReplayedSide, b: ReplayedSide) -> Bisection:
    settings = _comparable(a, b)
    steps, losses = a.written.in_common(b.written)
    if not steps and not losses:
        raise a.request.refused(
            "no step of which both have digests, or a loss",
            "what the runs have written says where to look",
            "train both with --digest-every N, over the same steps",
        )
    result = Bisection((str(a.request.run), str(b.request.run)), len(steps), losses, settings)
    wrong = a.written.unlike(b.written)
    if not wrong:
        return result
    result.known = min(wrong)
    begin = max(a.written.begin, b.written.begin)
    result.before = max((step for step in steps if step < result.known), default=begin)
    result.step, result.names = result.known, wrong[result.known]
    pair = _both(a, b, result)
    _name_missing(result, a, b)
    if pair is not None:
        _look_closer(result, a, b, *pair)
    return result


def _both(
    a: ReplayedSide, b: ReplayedSide, result: Bisection
) -> tuple[MadeSteps, MadeSteps] | None:
    """Both sides made again from an equal state on; `None` if one of them cannot be.

    An older checkpoint is tried where the state of the newest differs already, and where a side is
    not as it was, or both are equal now: a checkpoint holds one copy of what several ranks hold.
    """
    after, begin = result.before, max(a.written.begin, b.written.begin)
    while True:
        first, second = _pair(a, b, after, result.known)
        starts = [0 if each is None else each.plan.start for each in (first, second)]
        if first is not None and second is not None:
            rows = [each.written.digests.get(max(starts)) for each in (first, second)]
            is_one_state = None in rows or not differing(*rows)  # type: ignore[arg-type]
            if max(starts) <= begin or (is_one_state and first.written.unlike(second.written)):
                return first, second
        if after <= begin or "another content" in a.why + b.why:
            return None
        start = a.plan(after).start
        older = sorted(s for s in map(step_of, committed(a.request.run / CHECKPOINTS)) if s < start)
        after = max(begin, older[len(older) // 2] if older else 0)


def _pair(
    a: ReplayedSide, b: ReplayedSide, after: int, last: int
) -> tuple[MadeSteps | None, MadeSteps | None]:
    """Each side with what its run wrote, in one layout if there is one in which both have it.

    And in which they differ: a process alone does not have the norms that ranks have written.
    """
    pair: list[MadeSteps | None] = [None, None]
    for alone in dict.fromkeys([*a.layouts(after), *b.layouts(after)]):
        for place, side in enumerate((a, b)):
            if alone in side.layouts(after):
                try:
                    pair[place] = side.as_written(after, last, alone) or pair[place]
                except RequestError as error:  # its program has changed
                    side.why = error.found
        first, second = pair
        if first is None or second is None or not first.alone == second.alone == alone:
            continue
        if first.written.unlike(second.written):
            break
    for side, each in zip((a, b), pair, strict=True):
        side.why = "" if each is not None else side.why
    return pair[0], pair[1]


def _look_closer(
    result: Bisection, a: ReplayedSide, b: ReplayedSide, first: MadeSteps, second: MadeSteps
) -> None:
    """The first step of those that were made again, and the first tensor within it.

    A copy that is not digested may differ before: then the step before is looked at, too. What
    changed after the update is read by the operators of the next step.
    """
    wrong = first.written.unlike(second.written)
    if not wrong:
        result.notes.append("made again, both sides are equal: what the runs wrote is not")
        return
    step, result.names = next(iter(wrong.items()))
    start = max(first.plan.start, second.plan.start)
    for last in range(max(step, 1), start, -1):
        one_more = compare_step(a.recorded(first, last), b.recorded(second, last))
        if one_more is None:
            break
        result.step, result.first = last, one_more
        if one_more.stage != "state before the step":
            break
    result.before = result.step - 1
    following = result.step + 1
    is_there = all(following in side.written.metrics for side in (a, b))
    if result.first is not None and result.first.wants_reader and is_there:
        one_more = compare_step(a.recorded(first, following), b.recorded(second, following))
        if one_more is not None:
            result.first = result.first.read_by(one_more)


def _name_missing(result: Bisection, *sides: ReplayedSide) -> None:
    for label, side in zip("AB", sides, strict=True):
        if side.why:
            result.notes.append(f"{label} cannot be made again here: {side.why}")


# --- today ---------------------------------------------------------------------------------------


def _of_today(a: ReplayedSide, today: ReplayedSide) -> Bisection:
    """Where the program and the libraries of today make other steps than the run."""
    labels = str(a.request.run), "the program and libraries of today, here"
    written, after = a.written, a.written.begin
    last = max((*written.digests, *written.metrics), default=0)
    if not last:
        raise a.request.refused(
            "no digests and no metrics",
            "there is nothing to compare steps with",
            "train with --digest-every N; bisect two runs",
        )
    result = Bisection(labels, 0, 0, [])
    today.plan(after)
    ends = sorted(map(step_of, committed(a.request.run / CHECKPOINTS)))
    while after < last:
        alone = today.layouts(after)[-1] or today.layouts(after)[0]
        end = next((step for step in ends if step >= max(1, 2 * after)), last)
        again = today.make(after, min(end, last), alone)
        result.notes += [note for note in again.plan.notes if note not in result.notes]
        wrong = written.unlike(again.written, again.plan.start)
        steps, losses = written.in_common(again.written)
        if wrong:
            result.known = result.step = min(wrong)
            result.names = wrong[result.step]
            result.before = max((step for step in steps if step < result.step), default=0)
            break
        result.digests, result.losses = result.digests + len(steps), result.losses + losses
        after = min(end, last)
    if not result.is_equal:
        _against_own_ranks(result, a, today, again)
    return result


def _against_own_ranks(
    result: Bisection, a: ReplayedSide, today: ReplayedSide, again: MadeSteps
) -> None:
    """Name the tensor, if the run can be made again on its own ranks, and not in one process."""
    if not again.alone:
        a.why = "made again on its own ranks, it has other bits than the run wrote"
        _name_missing(result, a, today)
        return
    mine = a.as_written(result.before, result.known, False)
    _name_missing(result, a, today)
    if mine is None and a.wrong[0] < result.step:
        result.step, result.names = a.wrong  # the norm, which one process sums in another order
    if mine is not None:
        _look_closer(result, a, today, mine, again)


# --- what may be compared ------------------------------------------------------------------------


def _comparable(a: ReplayedSide, b: ReplayedSide) -> list[str]:
    """What differs between the runs before any step; raises if they cannot be compared."""
    jobs = [read_job(side.request.run) for side in (a, b)]
    names = [str(job["program"]).rpartition("/")[2] for job in jobs]
    if names[0] != names[1]:
        raise a.request.refused(
            f"runs of {names[0]} and of {names[1]}",
            "they train different models, whose tensors do not correspond",
            "bisect two runs of one program",
        )
    values = [values_of(job) for job in jobs]
    bits = [
        {name: value.get(name) for name in ("bitwise", "strategy", "ranks")} for value in values
    ]
    if bits[0] != bits[1] and not all(each["bitwise"] for each in bits):
        raise a.request.refused(
            " and ".join(f"{each['strategy']} on {each['ranks']} ranks" for each in bits),
            "without --bitwise on both, sums have another order: they differ from the first step",
            "train both with --bitwise, or with one strategy on as many ranks",
        )
    differ = [
        f"{name}: {values[0].get(name)!r}, and {values[1].get(name)!r}"
        for name in dict.fromkeys((*values[0], *values[1]))
        if values[0].get(name) != values[1].get(name) and name not in ("run_dir", "resume")
    ]
    return differ + _machines(a.request.run, b.request.run)


def _machines(*runs: Path) -> list[str]:
    """What differs in program, versions and machine, as the runs wrote it last."""
    a, b = ((facts_of(read_events(run)) or [{}])[-1] for run in runs)
    names = [name for name in a if name in b and a[name] != b[name]]
    return [f"{name}: {a[name]}, and {b[name]}" for name in names]
