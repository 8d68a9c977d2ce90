"""`check`: the job as asked, beside the same job in one process, with the traces compared.

The candidate starts every step from the weights and buffers that the reference had there, so that
legitimate rounding cannot add up; its optimizer runs on by itself. Weights whose gradient is only
rounding (a bias before BatchNorm) are named, not compared: AdamW makes steps of any size of it.

* fp64 (the default here): samples, losses, gradients, weights and buffers of every step must agree
  within 1e-10. Legitimate reordering of sums stays below 1e-13.
* fp32: gradients and buffers are compared, with a limit taken from measured noise: the reference
  again, shard by shard, so that its sums are in another order. Noise beyond what rounding can do
  is a difference by itself: the result follows the micro-batch.
* --bitwise: both run freely, and every bit must be equal.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.card import Exact
from allranks.cards import card_for
from allranks.check.compare import Comparison, Tolerance, Trace, compare
from allranks.choice import parse_choice
from allranks.config import Resolved
from allranks.errors import RequestError
from allranks.job import Job
from allranks.launch.ground import OneMachine
from allranks.launch.server import ForkServer
from allranks.launch.start import Result, describe, run_job
from allranks.shards import largest_shard

FP64 = Tolerance(tensors=1e-10, numbers=1e-10)
BITS = Tolerance(tensors=0.0, numbers=0.0, exact=True)
NOISE_FACTOR = 10.0
NOISE_FLOOR = 1e-6
NOISE_CEILING = 1e-3
MADE_IN_A_STEP = ("gradient", "clipped gradient", "buffer")
HERE: dict[str, Any] = {"nodes": 1, "place": "local"}
UNDISTURBED: dict[str, Any] = {
    # a job file may say otherwise: both start at step 0 and come to the end
    **{"resume": "", "inject": "", "checkpoint_every": None, "best": "", "max_restarts": 0},
    **{"time_limit": None},
}


@dataclass(frozen=True)
class Verdict:
    """What a check found, and what it could not look at."""

    comparison: Comparison
    tolerance: Tolerance
    evaluation_equal: bool
    not_checked: tuple[str, ...]
    one_process: bool = False
    """Whether what was compared is one process with itself: the ranks were never started."""

    @property
    def equal(self) -> bool:
        return self.comparison.first is None and self.evaluation_equal


def check_against_one(resolved: Resolved, folder: Path, server: ForkServer) -> Verdict:
    """Run the job and its reference under `folder`, which the caller owns, and compare them."""
    job = dataclasses.replace(resolved.job, trace=True, **UNDISTURBED)
    choice = parse_choice(job.strategy)
    card = card_for(choice)
    guarantee = card.guarantee_of(card.read_options(choice.options))
    if job.ranks > 1 and not isinstance(guarantee, Exact):
        raise RequestError(
            asked=f"check --strategy {job.strategy} --ranks {job.ranks}",
            found=f"its card says: {guarantee}",
            why="it does not promise to equal one process, so a difference would mean nothing",
            do="check it with --ranks 1, or another strategy",
        )
    run = _Runs(resolved, folder, server)
    one = dataclasses.replace(job, strategy="single", ranks=1, micro_batch=None, **HERE)
    reference = run("reference", one)
    trace = Trace(reference.run_dir / "trace")
    replay = str(reference.run_dir / "trace")
    tolerance = BITS if job.bitwise else FP64
    if job.precision != "fp64" and not job.bitwise:
        shape = describe(OneMachine(server), one)
        limit = largest_shard(shape.batch_size, shape.shards)
        again = dataclasses.replace(one, micro_batch=limit, replay=replay)
        believable = Tolerance(NOISE_CEILING, NOISE_CEILING, MADE_IN_A_STEP)
        repeated = run("noise", again)
        noise = compare(trace, Trace(repeated.run_dir / "trace"), believable)
        if noise.first is not None:  # no rounding: one process alone gives two answers
            return Verdict(noise, believable, True, _not_checked(again, repeated), True)
        limit_of_noise = max(NOISE_FACTOR * noise.largest, NOISE_FLOOR)
        tolerance = Tolerance(limit_of_noise, limit_of_noise, MADE_IN_A_STEP)
    job = dataclasses.replace(job, replay="" if job.bitwise else replay)
    candidate = run("candidate", job)
    comparison = compare(trace, Trace(candidate.run_dir / "trace"), tolerance)
    return Verdict(
        comparison=comparison,
        tolerance=tolerance,
        evaluation_equal=_close(reference.summary["eval"], candidate.summary["eval"], tolerance)
        or tolerance.stages == MADE_IN_A_STEP,
        not_checked=(*_passed_over(comparison), *_not_checked(job, candidate)),
    )


@dataclass(frozen=True)
class _Runs:
    """Runs jobs below one folder."""

    resolved: Resolved
    folder: Path
    server: ForkServer

    def __call__(self, name: str, job: Job) -> Result:
        job = dataclasses.replace(job, run_dir=str(self.folder / name))
        server = self.server if job.place == "local" else None  # nodes bring their own
        return run_job(Resolved(job, self.resolved.sources), server)


def _close(wanted: dict[str, float], found: dict[str, float], tolerance: Tolerance) -> bool:
    """Whether two evaluations agree."""
    return wanted.keys() == found.keys() and all(
        abs(found[name] - value) <= tolerance.numbers * max(abs(value), 1e-30)
        for name, value in wanted.items()
    )


def _passed_over(comparison: Comparison) -> tuple[str, ...]:
    names = ", ".join(comparison.passed_over)
    return (f"weights of {names}: their gradient is only rounding",) if names else ()


def _not_checked(job: Job, candidate: Result) -> tuple[str, ...]:
    """What a person should know this check did not look at."""
    left_out = ["what a task prints or writes by itself", "time and memory"]
    if candidate.summary["user_randomness"] and not job.bitwise:
        names = ", ".join(candidate.summary["user_randomness"])
        left_out.append(f"randomness of {names}: it follows the micro-batch, not the shard")
    if job.precision == "fp32" and not job.bitwise:
        left_out.append("the optimizer's own state and the evaluation: each step starts afresh")
    return tuple(left_out)
