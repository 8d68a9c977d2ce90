"""`check`: compares the traces of a job with those of the same job in one process.

The candidate starts every step from the weights and buffers that the reference had there, so
rounding cannot add up; its optimizer keeps its own state. Weights whose gradient is only rounding
(a bias before BatchNorm) are named, not compared: AdamW turns it into steps of any size.

A check makes several comparisons ("looks"), and ends with the first difference:

1. float64, on every number of ranks: samples, losses, gradients, weights, their average, buffers
   and the evaluation must agree within 1e-10. For a bitwise job, one process compares the whole
   batch in one pass with its shards one by one, which shows samples that depend on each other.
2. the job's own precision: see `compare`. One process cuts its batches as the ranks do, so both
   round to 16 bits in the same places.
3. --bitwise: both run freely, and every bit must be equal. For a job without --bitwise this look
   is reported, and does not decide.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.catalog import ENGINES
from allranks.errors import ProgramError, RequestError
from allranks.job.config import Resolved
from allranks.job.engines import choose_engine, default_strategy
from allranks.job.job import Job
from allranks.job.place import LOCAL
from allranks.launcher.places import AgentPlace, find_place
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import JobWatcher, Result, run_job
from allranks.launcher.supervisor import Signals
from allranks.strategies.resolve import card_of, resolved_strategy
from allranks.tools.check.causes.cause import ConfirmedCause
from allranks.tools.check.causes.diagnose import cause_of
from allranks.tools.check.compare import (
    BITS,
    CLOSE,
    FP64,
    Difference,
    RecordedTrace,
    Tolerance,
    close,
    coarse,
    compare,
    hint_of_number,
    noise_between,
)
from allranks.tools.check.operators import search_operators
from allranks.tools.check.sizes import number_difference
from allranks.tools.check.verdict import Look, Verdict

# --- plan ----------------------------------------------------------------------------------------
# By default a check compares an even and an uneven number of ranks: two ranks share 8 shards
# evenly, and three show faults that need parts of unequal size.


USUAL = 2, 3
STEPS = 20
DEEP_STEPS = 100
TRACE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class CheckPlan:
    """What is compared: `many` numbers of ranks in float64, the job itself on `job_ranks`.

    `shards` is the task's number of shards: a strategy may run each through the model by itself.
    `trace_bytes` bounds the tensors that one run writes (0: as many as the steps need); `keep`
    leaves them in the folders of the runs. `deep` names the operator that computes something else.
    """

    many: tuple[int, ...]
    job_ranks: int
    shards: int
    trace_bytes: int = 0
    keep: bool = False
    deep: bool = False
    announce: Callable[[str], None] = lambda text: None
    """Called with a line when a run of the check begins."""


def usual_strategy(engine: str, program: str) -> str:
    """The default strategy of a check: the one for many ranks of the `engine` ("" for the one that
    trains `program`). Raises `RequestError` for an unknown engine."""
    return ENGINES[choose_engine(engine, "", program)].many


def options_left_out(program: str, flags: Mapping[str, Any], *, deep: bool) -> dict[str, Any]:
    """The options of a check that `flags` leave out: its steps, its strategy, its ranks.

    Raises `RequestError` for an unknown engine or strategy.
    """
    strategy = flags.get("strategy") or usual_strategy(flags.get("engine") or "", program)
    options = {"steps": DEEP_STEPS if deep else STEPS, "strategy": strategy}
    if flags.get("ranks") is None and flags.get("nodes") is None:
        options["ranks"] = USUAL[0] if card_of(strategy).many_ranks else 1
    return {name: value for name, value in options.items() if flags.get(name) is None}


def of_first_steps(resolved: Resolved, steps: int | None) -> Resolved:
    """The job for so many steps (None: all that it has); its schedule stays that of the whole."""
    job = dataclasses.replace(resolved.job, schedule_steps=resolved.job.steps)
    return dataclasses.replace(resolved, job=dataclasses.replace(job, steps=steps or job.steps))


def ranks_to_check(
    ranks: int, shards: int, *, explicit: bool, fits: Callable[[int], bool] = lambda ranks: True
) -> tuple[tuple[int, ...], int]:
    """The numbers of ranks to compare, and the number of the job itself.

    An `explicit` number comes first. A neighbour of it that does not divide the shards follows, if
    it `fits` the strategy.
    """
    if ranks == 1:
        return (1,), 1
    if shards == 1:
        raise RequestError(
            asked=f"to check {ranks} ranks beside one process",
            found="a task with shards = 1",
            why="no more than one rank can have a part of its batches",
            do="--set shards=8, or --ranks 1",
        )
    if not explicit:
        many = tuple(n for n in USUAL if n <= shards and (n == ranks or fits(n)))
        return many, many[-1]
    neighbours = [n for n in (ranks - 1, ranks + 1) if 1 < n <= shards and shards % n and fits(n)]
    return ((ranks, *neighbours[:1]) if shards % ranks == 0 else (ranks,)), ranks


UNDISTURBED: dict[str, Any] = {
    # a job file may say otherwise: both start at step 0 and come to the end
    **{"resume": "", "inject": "", "checkpoint_every": None, "best": "", "max_restarts": 0},
    **{"steps_per_call": 1, "time_limit": None, "early_stop": "", "until": "", "witness": "off"},
    **{"audit": "", "audit_every": None},
}
MANY_NAMES = 4


def check_against_one(
    resolved: Resolved, folder: Path, server: ForkServer, plan: CheckPlan
) -> Verdict:
    """Run the job and its references under `folder`, and compare them. The caller removes it."""
    return Check(resolved, undisturbed(resolved.job), folder, server, plan).verdict()


def undisturbed(job: Job) -> Job:
    """The job from its first step to its last: no resume, injected fault, early stop or limit."""
    lacks = ENGINES[job.engine].lacks
    return dataclasses.replace(
        job, **{name: value for name, value in UNDISTURBED.items() if name not in lacks}
    )


@dataclass(frozen=True)
class CheckedRun:
    """One finished run, and what it recorded."""

    result: Result
    trace: RecordedTrace

    @property
    def summary(self) -> dict[str, Any]:
        return self.result.summary

    def clear(self) -> None:
        """Delete its recorded tensors."""
        for name in ("tensors", "parts"):
            shutil.rmtree(self.trace.path / name, ignore_errors=True)


class Check:
    """One check: its looks in order, and notes on what it did not compare."""

    def __init__(
        self, resolved: Resolved, job: Job, folder: Path, server: ForkServer, plan: CheckPlan
    ) -> None:
        self.resolved, self.job, self.plan = resolved, job, plan
        self.folder, self.server = folder, server
        self.looks: list[Look] = []
        self.notes: list[str] = []
        self.user_randomness: set[str] = set()
        self.signals: Signals | None = None
        self.started, self.expected = 0, 0

    def verdict(self) -> Verdict:
        many, is_fp64 = len(self.plan.many), self.job.precision == "fp64"
        self.expected = 3 + many if self.job.bitwise else 1 + many + (2 if is_fp64 else 5)
        for look in self._looks():
            self.looks.append(look)
            if look.first is not None:
                if look.promised and look.tolerance.exact:  # the cause, or only rounding
                    self.looks += self.in_float64(many=(look.ranks,))
                break
        self.search_operators()
        return Verdict(self.job.program, self.job.strategy, tuple(self.looks), self.left_out())

    def _looks(self) -> Iterator[Look]:
        if self.job.bitwise:
            yield from self._shards_alone()
            yield from self._bits(self.plan.many)
            return
        yield from self.in_float64()
        if self.job.precision != "fp64":
            yield self._in_own_precision()
        yield from self._bits_unasked()

    # --- the looks ------------------------------------------------------------------------

    def in_float64(self, tolerance: Tolerance = FP64, many: tuple[int, ...] = ()) -> Iterator[Look]:
        """Compare every number of ranks with one process, in float64."""
        job = dataclasses.replace(self.job, precision="fp64", bitwise=False)
        reference = self._reference_in_float64(job)
        if reference is None:
            return
        for ranks in many or self.plan.many:
            on_ranks = dataclasses.replace(job, ranks=ranks, replay=_path(reference))
            try:
                candidate = self.run(f"fp64-{ranks}-ranks", on_ranks)
            except RequestError as error:
                if ranks == self.plan.job_ranks:
                    raise
                self.notes.append(f"{ranks} ranks: refused, {error.found}")
                continue
            yield self._look(on_ranks, reference, candidate, tolerance)
            self.clear(candidate)
        self.clear(reference)

    def _reference_in_float64(self, job: Job, name: str = "fp64-reference") -> CheckedRun | None:
        """The run of one process in float64; `None` if the task cannot be computed in it."""
        try:
            return self.run(name, in_one(job))
        except ProgramError as error:
            if self.job.precision == "fp64":
                raise
            self.notes.append(
                f"float64: one process fails in it ({error.cause}); a tensor that "
                "forward or loss makes must have the type of its input"
            )
            return None

    def _shards_alone(self) -> Iterator[Look]:
        """Compare in one process, in float64, the whole batch with its shards one by one."""
        whole = dataclasses.replace(in_one(self.job), precision="fp64", bitwise=False, threads=1)
        reference = self._reference_in_float64(whole, "shards-reference")
        if reference is None:
            return
        alone = dataclasses.replace(whole, bitwise=True, replay=_path(reference))
        candidate = self.run("fp64-shards", alone)
        look = self._look(alone, reference, candidate, FP64)
        look = dataclasses.replace(look, one_process=True, bitwise=False)
        self.clear(reference, candidate)
        drawn = reference.trace.draws or candidate.summary["user_randomness"]
        if look.first is not None and drawn:
            self.notes.append(
                "whether samples depend on each other: functions or layers draw random numbers in "
                "forward, which the shards do not share with the whole batch"
            )
            return
        yield look

    def _in_own_precision(self) -> Look:
        job, ranks = self.job, self.plan.job_ranks
        if job.threads is None:  # the same kernels with the same threads everywhere
            job = dataclasses.replace(job, threads=max(1, len(os.sched_getaffinity(0)) // ranks))
        reference = self.run(f"{job.precision}-reference", in_one(job))
        on_ranks = dataclasses.replace(job, ranks=ranks, replay=_path(reference))
        candidate = self.run(f"{job.precision}-{ranks}-ranks", on_ranks)
        look = self._look(on_ranks, reference, candidate, coarse(job.precision))
        spec = job.strategy_spec
        in_stages = spec.card.agreement.weights == "staged" and ranks > 1  # each shard goes alone
        parts = self.plan.shards if spec.adds_shards or in_stages else ranks
        if in_stages and job.micro_batch is not None:
            parts = spec.parts_of_a_batch
        closer = f"{job.precision} closer than {look.tolerance.tensors:g}"
        if spec.card.rounds_together and job.precision not in ("fp32", "fp64"):
            self.notes.append(
                f"{closer}: what a rank rounds are other sums than those of one process"
            )
        elif (parts > 1 or in_stages) and not candidate.summary["user_buffers"]:
            alike = dataclasses.replace(in_one(on_ranks), replay=on_ranks.replay, cut_for=parts)
            alike = dataclasses.replace(alike, micro_batch=job.micro_batch)
            look = self._closer(alike, look, reference, candidate)
        elif look.first is None and ranks > 1:
            self.notes.append(
                f"{closer}: what the model writes in its forward passes follows their number"
            )
        self.clear(reference, candidate)
        return look

    def _closer(self, job: Job, look: Look, reference: CheckedRun, candidate: CheckedRun) -> Look:
        """Compare with one process that cuts its batches as the ranks do."""
        cut = self.run(f"{job.precision}-cut", job)
        itself = compare(reference.trace, cut.trace, coarse(job.precision))
        closer = look
        if look.first is not None:
            closer = dataclasses.replace(look, one_process=itself.first is not None)
        elif itself.first is not None:
            self.notes.append(
                f"{job.precision} closer than {look.tolerance.tensors:g}: one process is no "
                "measure, as what it keeps follows the number of its forward passes"
            )
        else:
            noise = noise_between(reference.trace, cut.trace, CLOSE)
            closer = self._look(job, cut, candidate, close(job.precision, noise))
            closer = dataclasses.replace(closer, ranks=look.ranks)
        self.clear(cut)
        return closer

    def _bits(self, many: tuple[int, ...], *, promised: bool = True) -> Iterator[Look]:
        job = dataclasses.replace(self.job, bitwise=True)
        alike = dataclasses.replace(in_one(job), micro_batch=job.micro_batch)  # as passes add up
        reference = self.run("bits-reference", alike)
        for ranks in many:
            on_ranks = dataclasses.replace(job, ranks=ranks)
            candidate = self.run(f"bits-{ranks}-ranks", on_ranks)
            look = self._look(on_ranks, reference, candidate, BITS)
            self.clear(candidate)
            yield dataclasses.replace(look, promised=promised)
        self.clear(reference)

    def _bits_unasked(self) -> Iterator[Look]:
        job, ranks = self.job, self.plan.job_ranks
        lacks = ENGINES[job.engine].lacks
        if "bitwise" in lacks:
            self.notes.append(f"equal bits (--bitwise): {lacks['bitwise']}")
            return
        try:
            mesh = resolved_strategy(job.strategy, ranks=ranks, bitwise=True).mesh
            alike = job.threads in (None, 1) and job.device == "cpu" and not job.compile
            if mesh.ranks == 1 or not alike:
                self.notes.append("equal bits (--bitwise)")
                return
            yield from self._bits((ranks,), promised=False)
        except RequestError as error:
            self.notes.append(f"equal bits (--bitwise): refused, {error.found}")
        except ProgramError as error:
            self.notes.append(f"equal bits (--bitwise): a shard by itself fails, {error.cause}")

    # --- what they share ------------------------------------------------------------------

    def _look(
        self, job: Job, reference: CheckedRun, candidate: CheckedRun, tolerance: Tolerance
    ) -> Look:
        comparison = compare(reference.trace, candidate.trace, tolerance)
        at_end = None
        if comparison.first is None:
            at_end = _end_differs(reference.summary, candidate.summary, comparison.steps, tolerance)
        if comparison.passed_over:
            names = ", ".join(comparison.passed_over[:MANY_NAMES])
            more = len(comparison.passed_over) - MANY_NAMES
            names += f" and {more} others" if more > 0 else ""
            self.notes.append(f"weights of {names}: their gradient is only rounding")
        look = Look(job.ranks, job.precision, job.bitwise, comparison, tolerance, at_end)
        return dataclasses.replace(look, cause=self._cause(job, reference, look))

    def _cause(self, job: Job, reference: CheckedRun, look: Look) -> ConfirmedCause | None:
        """The cause of a difference, where steps were compared within a tolerance."""
        first = look.comparison.first
        if first is None or look.tolerance.exact:
            return None
        runs: list[CheckedRun] = []

        def run(name: str, job: Job) -> RecordedTrace:
            runs.append(self.run(name, job))
            return runs[-1].trace

        cause = cause_of(first, job, in_one(job), reference.trace, look.tolerance, run)
        self.clear(*runs)
        return cause

    def search_operators(self) -> None:
        """In a deep check: name the operator that differs first, in the look that decides."""
        verdict = Verdict("", "", tuple(self.looks))
        if not self.plan.deep or verdict.equal is not False or verdict.first is None:
            return
        look, job = verdict.deciding, self.job
        exact, shards = look.tolerance.exact, look.one_process
        ours = dataclasses.replace(job, precision=look.precision, bitwise=exact or shards)
        ours = in_one(ours) if shards else dataclasses.replace(ours, ranks=look.ranks)
        single = dataclasses.replace(in_one(ours), bitwise=exact)
        operators = search_operators(verdict.first, ours, single, look.tolerance, self.run)
        self.looks[self.looks.index(look)] = dataclasses.replace(look, operators=operators)

    def run(self, name: str, job: Job) -> CheckedRun:
        job = dataclasses.replace(
            job, trace=True, trace_bytes=self.plan.trace_bytes, run_dir=str(self.folder / name)
        )
        self.started += 1
        of_all = f" of about {self.expected}" if self.started <= self.expected else ""
        ranks = f"{job.ranks} rank{'s' if job.ranks > 1 else ''}"
        steps = f", {job.steps} steps" if job.steps else ""
        self.plan.announce(f"job {self.started}{of_all}: {name}, {ranks}{steps}")
        on_nodes = isinstance(find_place(job.place), AgentPlace)
        result = run_job(
            Resolved(job, self.resolved.sources),
            None if on_nodes else self.server,  # each node starts its own
            JobWatcher(tick=self.tick),
            self.signals,
        )
        self.user_randomness |= set(result.summary["user_randomness"])
        return CheckedRun(result, RecordedTrace(result.run_dir / "trace"))

    def tick(self) -> None:
        """Called while ranks run."""

    def clear(self, *runs: CheckedRun) -> None:
        if not self.plan.keep:
            for run in runs:
                run.clear()

    def left_out(self) -> tuple[str, ...]:
        """What this check did not compare."""
        left_out = ["what a task prints or writes by itself", "time and memory"]
        if self.user_randomness and not self.job.bitwise:
            names = ", ".join(sorted(self.user_randomness))
            left_out.append(f"randomness of {names}: it follows the micro-batch, not the shard")
        if self.job.precision != "fp64" and not self.job.bitwise:
            left_out.append(f"the optimizer in {self.job.precision}: each step starts afresh")
        if self.resolved.job.steps_per_call > 1:
            left_out.append("several steps in one call: each was made in a call of its own")
        steps = self.looks[0].comparison.steps if self.looks else 0
        if self.looks and self.looks[0].first is None and steps < (self.job.steps or 0):
            left_out.append(
                f"steps after {steps}: the tensors of more take over "
                f"{self.plan.trace_bytes // 2**20} MiB; --steps asks for more"
            )
        return tuple(dict.fromkeys([*self.notes, *left_out]))


def on_one_rank(job: Job) -> Job:
    """The same job in one process on this machine."""
    strategy = default_strategy(job.engine, 1)
    return dataclasses.replace(job, strategy=strategy, share="", ranks=1, nodes=1, place=LOCAL)


def in_one(job: Job) -> Job:
    """The same job in one process, its whole batch at once."""
    return dataclasses.replace(on_one_rank(job), micro_batch=None, replay="")


def _path(run: CheckedRun) -> str:
    return str(run.trace.path)


def _end_differs(
    wanted: dict[str, Any], actual: dict[str, Any], steps: int, tolerance: Tolerance
) -> Difference | None:
    """What differs after training: the evaluation, and for equal bits the digest of weights."""
    for name in sorted(wanted["eval"].keys() | actual["eval"].keys()):
        ours, theirs = actual["eval"].get(name), wanted["eval"].get(name)
        size = number_difference(ours, theirs, tolerance.floor)
        if size > tolerance.numbers:
            hint = hint_of_number("evaluation", {})
            text = f"{name} is {ours!r}, not {theirs!r}, after {steps} equal steps"
            return Difference(steps - 1, "evaluation", None, size, text, hint)
    if tolerance.exact and wanted["weights_sha256"] != actual["weights_sha256"]:
        text = f"weights sha256 {actual['weights_sha256']}, not {wanted['weights_sha256']}"
        hint = "weights that were changed after the last step"
        return Difference(steps - 1, "digest", None, None, text, hint)
    return None
