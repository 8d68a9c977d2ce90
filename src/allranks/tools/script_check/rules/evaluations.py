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
    """An evaluation loss that is the mean of the means of uneven batches."""
    reported: set[str] = set()
    for fact in ranks[0].all("means"):
        rows = [_same_line(rank, fact) for rank in ranks]
        passes = [row for row in rows if row is not None]
        if str(fact["where"]) in reported or len(passes) < len(ranks):
            continue
        for finding in (_reduced(ranks, fact, passes), _printed(ranks, passes)):
            if finding is not None:
                reported.add(str(fact["where"]))
                yield finding
                break


def _same_line(rank: Rank, fact: Fact) -> PassMeans | None:
    names = ("loader", "number", "name", "where")
    for other in rank.all("means"):
        if all(other[name] == fact[name] for name in names) and other["values"]:
            values = tuple(map(float, other["values"]))
            is_finite = all(map(math.isfinite, values))
            return PassMeans(values, tuple(other["counts"])) if is_finite else None
    return None


def _reduced(ranks: tuple[Rank, ...], fact: Fact, passes: list[PassMeans]) -> ScriptFinding | None:
    """A finding if every rank reduces its mean, or the sum of its means."""
    wanted = _over_all(passes)
    everywhere = [value for row in passes for value in row.values]
    sums = [math.fsum(means.values) for means in passes]
    ways = {
        "the mean of its batches": ([means.of_means for means in passes], _mean_of(passes)),
        "the sum of its batches' means": (sums, math.fsum(everywhere) / len(everywhere)),
    }
    for where, columns in _columns(ranks, [fact["loader"], fact["number"]]):
        for kind, (inputs, comes_out) in ways.items():
            is_it = all(_close(a, b, EQUAL) for a, b in zip(columns, inputs, strict=True))
            if is_it and not _close(comes_out, wanted, LEAST_ERROR):
                says = f"each rank gives {kind}" if len(ranks) > 1 else f"it is {kind}"
                return _finding(where, says, passes, comes_out, wanted)
    return None


def _printed(ranks: tuple[Rank, ...], passes: list[PassMeans]) -> ScriptFinding | None:
    """A finding if a rank prints its mean of means, equal in every digit."""
    for rank, means in zip(ranks, passes, strict=True):
        if _close(means.of_means, means.by_size, LEAST_ERROR):
            continue
        for fact in rank.all("print"):
            for text in NUMBER.findall(fact["text"]):
                decimals = len(text.partition(".")[2])
                digits = len(text.replace(".", "").lstrip("0"))
                printed = [f"{value:.{decimals}f}" for value in (means.of_means, means.by_size)]
                if digits >= LEAST_DIGITS and text == printed[0] != printed[1]:
                    says = "what is printed is the mean of the batches"
                    line = line_of(fact["where"])
                    return _finding(line, says, [means], means.of_means, means.by_size)
    return None


def _finding(
    where: tuple[str, int] | None, says: str, passes: list[PassMeans], result: float, wanted: float
) -> ScriptFinding:
    share = abs(result - wanted) / max(abs(wanted), 1e-300)
    sizes = "; ".join(dict.fromkeys(means.sizes for means in passes))
    return ScriptFinding(
        "mean-of-means",
        RESULT,
        where,
        f"{says} ({sizes} elements), which makes it {result:.6g}; over all of them it is "
        f"{wanted:.6g}",
        f"what is in a small batch counts for more: the metric is {share:.2%} off, and moves with "
        "the batch size and the ranks",
        FIX,
    )


def means_of_ranks(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """A share, such as accuracy, that each rank computes of its samples, averaged over ranks."""
    for loader, _ in loaders_of(ranks) if len(ranks) > 1 else ():
        for number in sorted({row["number"] for row in passes_of(ranks[0], loader)}):
            rows = [[p for p in passes_of(r, loader) if p["number"] == number] for r in ranks]
            passes = [row[0] for row in rows if row and row[0]["ended"] and not row[0]["grad"]]
            counts = [int(row["samples"]) for row in passes]
            if len(passes) < len(ranks) or len(set(counts)) == 1:
                continue
            for where, column in _columns(ranks, [loader, number]):
                if not _are_shares(column, counts):
                    continue
                pairs = list(zip(column, counts, strict=True))
                wanted = math.fsum(value * count for value, count in pairs) / sum(counts)
                comes_out = math.fsum(column) / len(column)
                if _close(comes_out, wanted, LEAST_ERROR):
                    continue
                averages = " and ".join(f"{value:.6g} of {count}" for value, count in pairs)
                yield ScriptFinding(
                    "mean-of-means",
                    RESULT,
                    where,
                    f"each rank gives its own average: {averages} samples; their mean is "
                    f"{comes_out:.6g}, and over all samples it is {wanted:.6g}",
                    "samples of the rank that has fewer count for more, and the metric moves with "
                    "the ranks",
                    FIX,
                )
                return


def _are_shares(column: list[float], counts: list[int]) -> bool:
    """Whether each is a whole count over its rank's samples, and not over all samples."""

    def whole(value: float, count: int) -> bool:
        return any(
            abs(part - round(part)) <= ROUNDING * max(1.0, part) and 0 < round(part) < count
            for part in (value * count, value * count / 100)
        )

    local = all(whole(value, count) for value, count in zip(column, counts, strict=True))
    total = sum(counts)
    uneven = all(float(value) != round(value) for value in column)
    fine = all(count >= 8 and not _is_simple(v) for v, count in zip(column, counts, strict=True))
    return local and uneven and fine and not all(whole(value, total) for value in column)


def _is_simple(value: float) -> bool:
    """A half, a third, a quarter: a share of any number of samples by chance."""
    return any(
        abs(part * times - round(part * times)) < 1e-5
        for part in (value, value / 100)
        for times in (1, 2, 3, 4)
    )


def _columns(
    ranks: tuple[Rank, ...], after: list[int]
) -> Iterator[tuple[tuple[str, int] | None, list[float]]]:
    """The inputs of each reduction after a pass: one number per rank."""
    tables = [
        [f for f in rank.all("reduced") if f["after"] == after and f["operation"] in ADDING]
        for rank in ranks
    ]
    for facts in zip(*tables, strict=False):
        if len({str(fact["where"]) for fact in facts}) > 1:
            return
        for column in zip(*(fact["before"] for fact in facts), strict=False):
            yield line_of(facts[0]["where"]), list(map(float, column))


def _over_all(passes: list[PassMeans]) -> float:
    counts = [sum(means.counts) for means in passes]
    whole = math.fsum(means.by_size * n for means, n in zip(passes, counts, strict=True))
    return whole / max(1, sum(counts))


def _mean_of(passes: list[PassMeans]) -> float:
    return math.fsum(means.of_means for means in passes) / len(passes)


def _close(value: float, other: float, within: float) -> bool:
    return math.isfinite(value) and abs(value - other) <= within * max(abs(value), abs(other))
