"""Metrics that are means of means: batches, or ranks, of unequal size that count the same.

Proved by numbers: what the script reduces, or prints, is the mean of the means that it took, to
the last digit, and not their mean by size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from allranks.tools.script_check.rules.data import loaders_of, passes_of
from allranks.tools.script_check.rules.facts import RESULT, Fact, Rank, ScriptFinding, line_of

LEAST_ERROR = 1e-4
"""Of the metric: what is less no one would see."""
EQUAL = 1e-5
NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.])")
LEAST_DIGITS = 4
ROUNDING = 1e-6
ADDING = ("SUM", "AVG")
FIX = "add up sums and counts of all batches, all_reduce both, and divide once"


@dataclass(frozen=True)
class PassMeans:
    """The means over batches that one rank took in one pass, and of how many elements each is."""

    values: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def of_means(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def by_size(self) -> float:
        pairs = zip(self.values, self.counts, strict=True)
        return math.fsum(value * count for value, count in pairs) / max(1, sum(self.counts))

    @property
    def sizes(self) -> str:
        return f"{len(self.values)} batches of {min(self.counts)} to {max(self.counts)}"


def means_of_batch_means(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """A loss that is evaluated as the mean of its batches' means, where these are uneven."""
    told: set[str] = set()
    for fact in ranks[0].all("means"):
        rows = [_same_line(rank, fact) for rank in ranks]
        taken = [row for row in rows if row is not None]
        if str(fact["where"]) in told or len(taken) < len(ranks):
            continue
        for finding in (_reduced(ranks, fact, taken), _printed(ranks, taken)):
            if finding is not None:
                told.add(str(fact["where"]))
                yield finding
                break


def _same_line(rank: Rank, fact: Fact) -> PassMeans | None:
    names = ("loader", "number", "name", "where")
    for one in rank.all("means"):
        if all(one[name] == fact[name] for name in names) and one["values"]:
            values = tuple(map(float, one["values"]))
            return (
                PassMeans(values, tuple(one["counts"])) if all(map(math.isfinite, values)) else None
            )
    return None


def _reduced(ranks: tuple[Rank, ...], fact: Fact, taken: list[PassMeans]) -> ScriptFinding | None:
    """Where every rank gives its mean, or the sum of its means, to a reduction."""
    wanted = _over_all(taken)
    everywhere = [one for row in taken for one in row.values]
    sums = [math.fsum(one.values) for one in taken]
    ways = {
        "the mean of its batches": ([one.of_means for one in taken], _mean_of(taken)),
        "the sum of its batches' means": (sums, math.fsum(everywhere) / len(everywhere)),
    }
    for where, columns in _columns(ranks, [fact["loader"], fact["number"]]):
        for what, (given, comes_out) in ways.items():
            is_it = all(_close(a, b, EQUAL) for a, b in zip(columns, given, strict=True))
            if is_it and not _close(comes_out, wanted, LEAST_ERROR):
                who = f"each rank gives {what}" if len(ranks) > 1 else f"it is {what}"
                return _finding(where, who, taken, comes_out, wanted)
    return None


def _printed(ranks: tuple[Rank, ...], taken: list[PassMeans]) -> ScriptFinding | None:
    """Where a rank prints its mean of means, to the last digit."""
    for rank, one in zip(ranks, taken, strict=True):
        if _close(one.of_means, one.by_size, LEAST_ERROR):
            continue
        for fact in rank.all("print"):
            for text in NUMBER.findall(fact["text"]):
                decimals = len(text.partition(".")[2])
                digits = len(text.replace(".", "").lstrip("0"))
                printed = [f"{value:.{decimals}f}" for value in (one.of_means, one.by_size)]
                if digits >= LEAST_DIGITS and text == printed[0] != printed[1]:
                    who = "what is printed is the mean of the batches"
                    line = line_of(fact["where"])
                    return _finding(line, who, [one], one.of_means, one.by_size)
    return None


def _finding(
    where: tuple[str, int] | None, who: str, taken: list[PassMeans], comes_out: float, wanted: float
) -> ScriptFinding:
    share = abs(comes_out - wanted) / max(abs(wanted), 1e-300)
    sizes = "; ".join(dict.fromkeys(one.sizes for one in taken))
    return ScriptFinding(
        "mean-of-means",
        RESULT,
        where,
        f"{who} ({sizes} elements), which makes it {comes_out:.6g}; over all of them it is "
        f"{wanted:.6g}",
        f"what is in a small batch counts for more: the metric is {share:.2%} off, and moves with "
        "the batch size and the ranks",
        FIX,
    )


def means_of_ranks(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """A share (right ones of all) that each rank takes of its own samples, and then is averaged."""
    for loader, _ in loaders_of(ranks) if len(ranks) > 1 else ():
        for number in sorted({one["number"] for one in passes_of(ranks[0], loader)}):
            rows = [[p for p in passes_of(r, loader) if p["number"] == number] for r in ranks]
            given = [row[0] for row in rows if row and row[0]["ended"] and not row[0]["grad"]]
            counts = [int(one["samples"]) for one in given]
            if len(given) < len(ranks) or len(set(counts)) == 1:
                continue
            for where, column in _columns(ranks, [loader, number]):
                if not _are_shares(column, counts):
                    continue
                pairs = list(zip(column, counts, strict=True))
                wanted = math.fsum(value * count for value, count in pairs) / sum(counts)
                comes_out = math.fsum(column) / len(column)
                if _close(comes_out, wanted, LEAST_ERROR):
                    continue
                told = " and ".join(f"{value:.6g} of {count}" for value, count in pairs)
                yield ScriptFinding(
                    "mean-of-means",
                    RESULT,
                    where,
                    f"each rank gives its own average: {told} samples; their mean is "
                    f"{comes_out:.6g}, and over all samples it is {wanted:.6g}",
                    "samples of the rank that has fewer count for more, and the metric moves with "
                    "the ranks",
                    FIX,
                )
                return


def _are_shares(column: list[float], counts: list[int]) -> bool:
    """Whether each is a whole number over the samples of its rank, and not over those of all."""

    def whole(value: float, count: int) -> bool:
        return any(
            abs(part - round(part)) <= ROUNDING * max(1.0, part) and 0 < round(part) < count
            for part in (value * count, value * count / 100)
        )

    own = all(whole(value, count) for value, count in zip(column, counts, strict=True))
    total = sum(counts)
    uneven = all(float(value) != round(value) for value in column)
    fine = all(count >= 8 and not _is_simple(v) for v, count in zip(column, counts, strict=True))
    return own and uneven and fine and not all(whole(value, total) for value in column)


def _is_simple(value: float) -> bool:
    """A half, a third, a quarter: of any number of samples it may be a share by chance."""
    return any(
        abs(part * times - round(part * times)) < 1e-5
        for part in (value, value / 100)
        for times in (1, 2, 3, 4)
    )


def _columns(
    ranks: tuple[Rank, ...], after: list[int]
) -> Iterator[tuple[tuple[str, int] | None, list[float]]]:
    """What the ranks gave to each reduction after a pass: a number of every rank."""
    tables = [
        [one for one in rank.all("reduced") if one["after"] == after and one["operation"] in ADDING]
        for rank in ranks
    ]
    for facts in zip(*tables, strict=False):
        if len({str(one["where"]) for one in facts}) > 1:
            return
        for column in zip(*(one["before"] for one in facts), strict=False):
            yield line_of(facts[0]["where"]), list(map(float, column))


def _over_all(taken: list[PassMeans]) -> float:
    counts = [sum(one.counts) for one in taken]
    whole = math.fsum(one.by_size * n for one, n in zip(taken, counts, strict=True))
    return whole / max(1, sum(counts))


def _mean_of(taken: list[PassMeans]) -> float:
    return math.fsum(one.of_means for one in taken) / len(taken)


def _close(one: float, other: float, within: float) -> bool:
    return math.isfinite(one) and abs(one - other) <= within * max(abs(one), abs(other))
