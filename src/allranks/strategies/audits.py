"""Audits: which shard of a step another rank computes again, and which rank is wrong.

At an audited step one shard is drawn, and a rank that computes it again with samples that it reads
itself. Where the two differ a third rank decides; of two ranks both compute once more, and the one
that contradicts itself is wrong. Pure arithmetic: every rank draws and judges alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from allranks.errors import RequestError
from allranks.strategies.resolve import StrategySpec

AUDITED = ("ddp", "ddp-plain", "zero1", "zero2", "fsdp", "hsdp")
SHARE_OF_TIME = 0.01
SHARDS_OF_AUDIT = 6.0
"""What an audit takes at most, in the time of a shard of a small model: measured, with room
(`benchmarks/audit.py`). Without `--bitwise` it is more, as a step has fewer passes."""
AUDIT_BYTES = 16  # of the digest that ranks compare
AUDIT = -5  # a key of the generator, beside those of shards and steps


def default_every(shards: int, ranks: int) -> int:
    """The steps from audit to audit that cost `SHARE_OF_TIME` of a step's passes."""
    busiest = max(1, math.ceil(shards / ranks))
    return math.ceil(SHARDS_OF_AUDIT / (busiest * SHARE_OF_TIME))


class Draw(NamedTuple):
    """The shard that is computed again, by numbers of ranks that read data.

    `third` decides where owner and auditor differ; there is none among two ranks.
    """

    shard: int
    owner: int
    auditor: int
    third: int | None

    @classmethod
    def of(cls, key: int, sizes: Sequence[int], runs: Sequence[range]) -> Draw | None:
        """The draw of a random `key`, for shards of `sizes` samples that ranks own in `runs`.

        `None` where there is no other rank.
        """
        if len(runs) < 2:
            return None
        key, number = divmod(key, samples := sum(size > 0 for size in sizes))
        assert samples, "a batch has a sample"
        shard = [shard for shard, size in enumerate(sizes) if size][number]
        owner = next(rank for rank, run in enumerate(runs) if shard in run)
        others = [rank for rank in range(len(runs)) if rank != owner]
        key, number = divmod(key, len(others))
        auditor = others.pop(number)
        return cls(shard, owner, auditor, others[key % len(others)] if others else None)


# --- judging -------------------------------------------------------------------------------------

Notes = dict[str, Any]
"""What a rank noted of one computation: digests by name of its `inputs` and `results`, and of each
result its `sizes`: two numbers that differ by rounding alone where results do."""


@dataclass(frozen=True)
class Findings:
    """What one rank knows when an audit has found a difference, as plain data.

    `rank` is the number of its process. `first` is what entered the step or was compared with it,
    `again` a computation made afterwards; empty of a rank that made none. `weights` are digests by
    name, of parts by names that say which.
    """

    rank: int
    host: str
    device: str
    first: Notes
    again: Notes
    weights: dict[str, str]


@dataclass(frozen=True)
class AuditVerdict:
    """Who is `wrong`, by its place among the ranks, and where it differs from a right one.

    `None`: nobody can be named. `differs` is one of `REASONS`, `tensor` the first that differs;
    `by` says who decided.
    """

    wrong: int | None
    differs: str
    tensor: str
    by: str


REASONS = {
    "weights": "its weights are others",
    "samples": "its samples are others",
    "random numbers": "its random numbers are others",
    "computation": "from equal weights, samples and random numbers it computes something else",
}


def first_difference(here: Notes, other: Notes, tolerance: float = 0.0) -> str:
    """The first result that differs, in the order of the model; "" if none does.

    With a `tolerance` only what is off by more than that part of the whole length.
    """
    names: list[str] = list(dict.fromkeys((*here["results"], *other["results"])))
    if not tolerance:
        return next((n for n in names if here["results"].get(n) != other["results"].get(n)), "")
    sizes, others = here["sizes"], other["sizes"]
    whole = math.hypot(*(size for size, _ in sizes.values() if math.isfinite(size)))
    for name in names:
        if name not in sizes or name not in others:
            return name
        finite = [all(map(math.isfinite, pair)) for pair in (sizes[name], others[name])]
        if not any(finite):  # as where fp16 overflows: nothing is known of either
            continue
        off = max(abs(a - b) for a, b in zip(sizes[name], others[name], strict=True))
        if not all(finite) or not off <= tolerance * (sizes[name][0] + whole):
            return name
    return ""


def judged(draw: Draw, rows: Sequence[Findings], tolerance: float = 0.0) -> AuditVerdict:
    """Who is wrong, from the findings of all ranks in their order.

    Nobody can be named where replicas hold a part of a weight unalike: a rank computes with parts
    of others, and so does the third.
    """
    if part := _unlike_part(rows):
        return AuditVerdict(None, "weights", part, "ranks hold that part unalike")

    def is_same(here: Notes, other: Notes) -> bool:
        return not first_difference(here, other, tolerance)

    owner, auditor = rows[draw.owner], rows[draw.auditor]
    wrong: Findings | None = None
    right, known = auditor, auditor.first
    if draw.third is not None:
        third = rows[draw.third]
        by = f"rank {third.rank} computed it, too"
        differ = [row for row in (owner, auditor) if not is_same(row.first, third.again)]
        if len(differ) == 1:
            wrong, right, known = differ[0], third, third.again
    else:
        by = "both computed it again"
        for row, other in ((owner, auditor), (auditor, owner)):
            if is_same(row.again, other.first) and is_same(other.again, other.first):
                by = f"computed again it has what rank {other.rank} has"
                wrong, right, known = row, other, other.first
    where = _difference(wrong or owner, right, known, tolerance)
    number = None if wrong is None else next(n for n, row in enumerate(rows) if row is wrong)
    return AuditVerdict(number, *where, by)


def _unlike_part(rows: Sequence[Findings]) -> str:
    """The first part of a weight that some ranks hold, not all, and not alike; "" if there is none.

    Names of parts say which part it is.
    """
    for name in dict.fromkeys(name for row in rows for name in row.weights):
        digests = [row.weights[name] for row in rows if name in row.weights]
        if len(digests) < len(rows) and len(set(digests)) > 1:
            return name
    return ""


def _difference(
    wrong: Findings, right: Findings, known: Notes, tolerance: float
) -> tuple[str, str]:
    """The reason, and the first tensor that differs."""
    for name, digest in wrong.weights.items():
        if right.weights.get(name, digest) != digest:
            return "weights", name
    result = first_difference(wrong.first, known, tolerance)
    for reason in ("samples", "random numbers"):
        if wrong.first["inputs"][reason] != known["inputs"][reason]:
            return reason, result
    return "computation", result


# --- requests ------------------------------------------------------------------------------------


def check_audit(text: str, every: int | None, spec: StrategySpec, elastic: str) -> None:
    """Raise `RequestError` for an audit that the strategy or its ranks cannot have."""
    if not text:
        raise RequestError(
            asked=f"--audit-every {every}",
            found="no --audit",
            why="it says how many steps there are from one audit to the next",
            do=f"--audit stop --audit-every {every}, or leave it out",
        )
    problem = why = ""
    do = "leave --audit out, or --strategy ddp, zero1, zero2 or fsdp"
    if spec.ranks < 2:
        problem, why = "one rank", "another rank computes a shard again"
        do = "leave --audit out, or --ranks 2"
    elif spec.name not in AUDITED:
        problem = f"--strategy {spec.name}"
        why = "one rank computes a shard again, and here a shard is computed by several"
    elif int(spec.options.get("tensor", 1)) > 1:
        problem, why = f"--strategy {spec.text}", "several ranks compute a layer together"
    elif why := spec.card.even_shares(spec.options):
        problem = f"--strategy {spec.text}"
    elif text == "leave" and not elastic:
        problem, why = (
            "no --elastic",
            "a rank leaves, and the others make the step again without it",
        )
        do = f"--audit leave --elastic {max(1, spec.ranks - 1)}:{spec.ranks}, or --audit stop"
    elif text == "leave" and elastic.partition(":")[0] == str(spec.ranks):
        problem, why = (
            f"--elastic {elastic}",
            "without the rank that leaves there are fewer than MIN",
        )
        do = f"--audit leave --elastic {spec.ranks - 1}:{spec.ranks}, or --audit stop"
    if problem:
        raise RequestError(asked=f"--audit {text}", found=problem, why=why, do=do)


def in_words(step: int, draw: Draw, verdict: AuditVerdict, rows: Sequence[Findings]) -> str:
    """One line about a verdict."""
    tensor = f", first in {verdict.tensor}" if verdict.tensor else ""
    named = f"audit of step {step}, shard {draw.shard}"
    wheres = [f"rank {row.rank} on {row.host} ({row.device})" for row in rows]
    if verdict.wrong is not None:
        is_wrong = f"{wheres[verdict.wrong]} is wrong: {REASONS[verdict.differs]}"
        return f"{named}: {is_wrong}{tensor}; {verdict.by}"
    pair = f"{wheres[draw.owner]} and {wheres[draw.auditor]} differ in {verdict.differs}"
    return f"{named}: {pair}{tensor}; {verdict.by}, and nobody can tell which of them is right"
