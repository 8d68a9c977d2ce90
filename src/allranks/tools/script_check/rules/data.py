"""Faults of the data: orders that never change, samples of several ranks, padded evaluations."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from allranks.tools.script_check.rules.facts import (
    NOTE,
    RESULT,
    Fact,
    Rank,
    ScriptFinding,
    groups_of_replicas,
    groups_that_reduce,
    line_of,
)

DISTRIBUTED = "DistributedSampler"
LEAST_SAMPLES = 8
LEAST_SHARED = 0.2
"""The least share of repeated samples among all ranks; padding repeats far fewer."""


def orders_that_never_change(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """A shuffling DistributedSampler that gives each epoch the same order."""
    for loader, fact in loaders_of(ranks):
        passes = [row for row in passes_of(ranks[0], loader) if row["ended"] and row["backwards"]]
        orders = {row["order"] for row in passes}
        shuffled = fact["sampler"] == DISTRIBUTED and fact["shuffle"]
        if not shuffled or len(passes) < 2 or len(orders) > 1:
            continue
        if passes[0]["samples"] < LEAST_SAMPLES:  # two orders of few samples may be one by chance
            continue
        called = passes[-1]["epochs_set"]
        why = f"set_epoch was called {called} times with one number" if called else "no set_epoch"
        yield ScriptFinding(
            "same-order-each-epoch",
            RESULT,
            line_of(fact["sampler_where"] or fact["where"]),
            f"{len(passes)} epochs in one and the same order: {why}",
            "samples are shuffled once, and each batch meets the same neighbours in every epoch",
            "sampler.set_epoch(epoch) at the start of each epoch",
        )


def samples_of_several_ranks(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """Ranks that train on the same samples in one epoch, and reduce their gradients."""
    for group in groups_that_reduce(ranks):
        for loader, fact in loaders_of(tuple(group)):
            passes = [_first(rank, loader) for rank in group]
            known = [row for row in passes if row is not None and row["ids"]]
            if len(known) == len(group):
                yield from _shared(fact, known)


def _shared(loader: Fact, passes: list[Fact]) -> Iterator[ScriptFinding]:
    if any(len(set(row["ids"])) < len(row["ids"]) for row in passes):
        return  # drawn with replacement, or padded: repeated samples prove nothing
    size, ids = len(passes), [set(row["ids"]) for row in passes]
    total, unique = sum(map(len, ids)), len(set().union(*ids))
    if total - unique <= LEAST_SHARED * total or not _is_one_dataset(passes):
        return
    equal = len({row["order"] for row in passes}) == 1
    yield ScriptFinding(
        "same-samples-on-ranks",
        RESULT,
        line_of(loader["where"]),
        f"{total} samples were taken by {size} ranks, {unique} different ones; "
        f"the sampler is a {loader['sampler']}" + ", its order equal on all ranks" * equal,
        f"{size} ranks do the work of one: the mean of equal gradients"
        if equal
        else f"an epoch takes samples up to {size} times: counts and schedules by epoch are wrong",
        "DataLoader(…, sampler=DistributedSampler(dataset)), and shuffle=False",
    )


def samplers_of_other_ranks(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """A DistributedSampler for another number of ranks than there are."""
    sizes = {len(rank.by_id("replica")[number]["group"]) for number, members in
             groups_of_replicas(ranks) for rank in members[:1]}  # fmt: skip
    for loader, fact in loaders_of(ranks):
        trained = any(row["backwards"] for row in passes_of(ranks[0], loader))
        replicas = fact["replicas"]
        if fact["sampler"] != DISTRIBUTED or not trained or len(sizes) != 1 or replicas in sizes:
            continue
        size = sizes.pop()
        sizes = {size}
        ids = {i for rank in ranks for i in (_first(rank, loader) or {"ids": ()})["ids"]}
        yield ScriptFinding(
            "sampler-for-other-ranks",
            RESULT,
            line_of(fact["sampler_where"] or fact["where"]),
            f"num_replicas={replicas}, and {size} ranks train together: they saw {len(ids)} of "
            f"{fact['length']} samples in the first epoch",
            "samples are never seen" if replicas > size else "ranks train on the same samples",
            "leave num_replicas and rank to DistributedSampler, which asks the process group",
        )


def padded_evaluations(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """A metric that counts the samples that a sampler repeats; a note if that is not proved."""
    for loader, fact in loaders_of(ranks):
        for number in sorted({row["number"] for row in passes_of(ranks[0], loader)}):
            passes = [_numbered(rank, loader, number) for rank in ranks]
            ended = [row for row in passes if row and row["ended"] and not row["backwards"]]
            if len(ended) < len(ranks) or any(row["grad"] for row in ended):
                continue
            ids = list(chain.from_iterable(row["ids"] for row in ended))
            length, total = fact["length"], len(ids)
            if length is None or not length == len(set(ids)) < total < 2 * length:
                continue
            of = [loader, number]
            gathers = [f["trimmed"] for f in ranks[0].all("gathered") if f["of"] == of]
            columns = [column for _, column in _columns(ranks, of, (*ADDING, GATHER))]
            reduced = _values_after(ranks, loader, number)
            if length in reduced or any(gathers) or not (gathers or columns or total in reduced):
                continue
            proof = f"the count that was reduced is {total}" if total in reduced else ""
            proof = proof or _counted_twice(ended, length, columns)
            means = [m for f, m in _means_of(ranks) if [f["loader"], f["number"]] == of]
            if any(_losses_of_all(mean, ended, columns) for mean in means):
                proof = proof or "each rank gives the losses of all that it read"
            yield ScriptFinding(
                "padded-evaluation",
                RESULT if proof else NOTE,
                line_of(fact["sampler_where"] or fact["where"]),
                f"{length} samples were evaluated as {total}: the {fact['sampler']} repeats "
                f"{total - length}, and {proof or 'whether the metric counts them is not seen'}",
                "a metric that counts repeated samples twice changes with the number of ranks "
                f"(here {len(ranks)})",
                "evaluate range(rank, len(dataset), ranks) of it, which repeats none; or leave "
                "repeated samples out, as Accelerate's gather_for_metrics does",
            )
            break


def _counted_twice(passes: list[Fact], length: int, columns: list[list[float]]) -> str:
    """What proves that a number which the ranks give counts repeated samples; "" if none does."""
    counts = [len(row["ids"]) for row in passes]
    fewer = range(1, sum(counts) - length + 1)
    for column in columns:
        pairs = list(zip(column, counts, strict=True))
        if _are_shares(column, counts, length) and not any(
            _is_whole(value, count - less) for value, count in pairs for less in fewer
        ):
            return "each rank gives a share of all that it read"
    return ""


def split_by_each_rank(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """A dataset that is shared by its numbers, though a number is another sample on each rank."""
    for group in groups_that_reduce(ranks):
        for loader, fact in loaders_of(tuple(group)):
            facts = [rank.by_id("loader", "loader")[loader] for rank in group]
            passes = [row for rank in group if (row := _first(rank, loader))]
            if fact["sampler"] != DISTRIBUTED or not len(group) == len(passes) == fact["replicas"]:
                continue
            shared = ""
            if len({row.get("subset") for row in facts}) > 1:
                shared = "the Subset behind the sampler takes other samples on each rank"
            elif (count := _renumbered([_rows(rank, loader) for rank in group])) >= LEAST_SAMPLES:
                shared = f"{count} numbers are other samples on another rank, which has these "
                shared += "samples under other numbers"
            if shared:
                where = line_of(fact["where"])
                effect = "samples are trained on twice or never, also those that a rank holds out"
                fix = "split, shuffle and filter by one seed on all ranks: "
                fix += "random_split(…, generator=torch.Generator().manual_seed(seed))"
                yield ScriptFinding("split-of-each-rank", RESULT, where, shared, effect, fix)
                return


def _rows(rank: Rank, loader: int) -> dict[str, tuple[int, ...]]:
    """The rows of each sample, by its number, in all passes with a backward pass."""
    passes = [row for row in passes_of(rank, loader) if row["backwards"]]
    return {i: tuple(row) for fact in passes for i, row in fact["rows"].items() if row}


def _renumbered(tables: list[dict[str, tuple[int, ...]]]) -> int:
    """How many numbers of the first rank are another sample on a rank that has both elsewhere.

    0 if a rank repeats rows itself. Rows under other numbers alone may be repeated in the data.
    """
    rows = [set(table.values()) for table in tables]
    if any(len(row) < len(table) for row, table in zip(rows, tables, strict=True)):
        return 0
    first, *others = tables
    return sum(
        row in known and table.get(i, row) != row
        for table, known in zip(others, rows[1:], strict=True)
        for i, row in first.items()
    )


def unequal_batches(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """A mean of means: batches of ranks differ in size, but their gradients weigh the same."""
    is_mean = any(fact["is_mean"] for rank in ranks for fact in rank.all("window"))
    if not is_mean or not groups_of_replicas(ranks):
        return
    for loader, fact in loaders_of(ranks):
        passes = [_first(rank, loader) for rank in ranks]
        known = [row for row in passes if row is not None and row["samples"]]
        sizes = [[size for size, times in row["sizes"] for _ in range(times)] for row in known]
        if len(known) < len(ranks) or len(set(map(len, sizes))) > 1:
            continue
        at = next((i for i, row in enumerate(zip(*sizes, strict=True)) if len(set(row)) > 1), None)
        if at is None:
            continue
        yield ScriptFinding(
            "mean-of-unequal-means",
            RESULT,
            line_of(fact["where"]),
            f"batch {at + 1} has {' and '.join(str(size[at]) for size in sizes)} samples on the "
            "ranks, each takes the mean of its own, and DDP the mean of these",
            "samples of the smaller batch count for more than others",
            "equal batches (DistributedSampler, drop_last=True); or the sum of losses times ranks "
            "over the samples of all ranks",
        )


def _losses_of_all(means: list[PassMeans], passes: list[Fact], columns: list[list[float]]) -> bool:
    """Whether each rank gives the sum, or the mean, of the losses of all samples that it read."""
    counts = [sum(mean.counts) for mean in means]
    per_sample = {n / len(row["ids"]) for n, row in zip(counts, passes, strict=True)}
    if len(per_sample) > 1 or not per_sample.pop().is_integer():
        return False  # some samples, maybe the repeated ones, have no loss
    means_of_ranks = [mean.by_size for mean in means]
    sums = [mean * n for mean, n in zip(means_of_ranks, counts, strict=True)]
    return any(_are_close(column, by) for column in columns for by in (means_of_ranks, sums))


LEAST_UNEQUAL, SAME_FACTOR = 1.01, 1.001
"""How much larger one divisor is than another: what is less no one would see."""


def means_of_unequal_targets(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """A mean of means over unequal targets, or class weights, unless unequal factors correct it."""
    if any(True for _ in unequal_batches(ranks)) or any(rank.all("hooked") for rank in ranks):
        return
    for group in groups_that_reduce(ranks) or [list(ranks[:1])]:
        tables = [_trained_means(rank) for rank in group]
        steps = [[table.get(key, []) for table in tables] for key in tables[0]]
        unequal = [(rows[0][0], pair) for rows in steps if (pair := _unequal_divisors(rows))]
        if len(unequal) * 4 > len(steps):  # more than the last batch of an epoch
            fact, divisors = unequal[0]
            yield ScriptFinding(
                "mean-of-unequal-means",
                RESULT,
                line_of(fact["where"]),
                f"means over {' and '.join(f'{value:g}' for value in divisors)} targets, or sums "
                f"of class weights, count the same in step {fact['step'] + 1}; so do means in "
                f"{len(unequal)} of {len(steps)} steps",
                "targets of ranks and micro-batches that have few of them count for more",
                "reduction='sum', times the ranks over all targets, or class weights, of the step",
            )
            return


def _trained_means(rank: Rank) -> dict[tuple[int, str], list[Fact]]:
    table = defaultdict[tuple[int, str], list[Fact]](list)
    for fact in rank.all("trained"):
        table[fact["step"], str(fact["where"])].append(fact)
    return table


def _unequal_divisors(rows: list[list[Fact]]) -> list[float]:
    """The divisors of means of one step that count the same, and differ.

    They are of the ranks, or of the micro-batches of one: other batches of one loader.
    """
    columns = [list(column) for column in zip(*rows, strict=False)]
    for row in rows:
        batches = {tuple(fact["batch"]) for fact in row}
        is_of_one = len({loader for loader, *_ in batches}) == 1
        columns += [row] * (len(batches) == len(row) and is_of_one)
    for column in columns if len(set(map(len, rows))) == 1 else ():
        factors, divisors = ([fact[name] for fact in column] for name in ("factor", "divisor"))
        same = min(factors) > 0 and max(factors) <= SAME_FACTOR * min(factors)
        if same and max(divisors) > LEAST_UNEQUAL * min(divisors):
            return divisors
    return []


def loaders_of(ranks: tuple[Rank, ...]) -> list[tuple[int, Fact]]:
    """The loaders that have the same line and number on every rank."""
    tables = [rank.by_id("loader", "loader") for rank in ranks]
    return [
        (number, fact)
        for number, fact in tables[0].items()
        if all(table.get(number, {}).get("where") == fact["where"] for table in tables)
    ]


def passes_of(rank: Rank, loader: int) -> list[Fact]:
    return [row for row in rank.all("pass") if row["loader"] == loader and row["samples"]]


def _numbered(rank: Rank, loader: int, number: int) -> Fact | None:
    return next((row for row in passes_of(rank, loader) if row["number"] == number), None)


def _first(rank: Rank, loader: int) -> Fact | None:
    """Its first pass with a backward; scripts often inspect a batch before."""
    return next((row for row in passes_of(rank, loader) if row["backwards"]), None)


def _is_one_dataset(passes: list[Fact]) -> bool:
    """Whether an index means the same sample on all ranks: some tensor agrees in all of them."""
    first, *others = [row["rows"] for row in passes]
    for other in others:
        both = first.keys() & other.keys()
        columns = list(zip(*(zip(first[i], other[i], strict=False) for i in both), strict=False))
        alike = [column for column in columns if all(mine == its for mine, its in column)]
        if len(both) < LEAST_SAMPLES or not any(len(set(column)) > 1 for column in alike):
            return False
    return True


def _values_after(ranks: tuple[Rank, ...], loader: int, number: int) -> set[float]:
    """The numbers that were reduced between the end of a pass and the end of the next."""
    return {
        value
        for rank in ranks
        for fact in rank.all("reduced")
        if fact["after"] == [loader, number]
        for value in fact["values"]
    }


# --- evaluations ---------------------------------------------------------------------------------
# Metrics that are means of means: batches, or ranks, of unequal size that count the same.
#
# Proved by numbers: what the script reduces, or prints, is the mean of the means that it took, to
# the last digit, and not their mean by size.


LEAST_ERROR = 1e-4
"""Of the metric: what is less no one would see."""
EQUAL = 1e-5
NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.])")
LEAST_DIGITS = 4
ROUNDING = 1e-6
ADDING, GATHER = ("SUM", "AVG"), "GATHER"
FIX = "add up sums and counts of all batches, all_reduce both, and divide once"


@dataclass(frozen=True)
class PassMeans:
    """The means over batches that one rank took in one pass, and of how many elements each is."""

    values: tuple[float, ...]
    counts: tuple[int, ...]
    gathered: tuple[float, ...] = ()
    """What the rank gathered after each."""

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
    for fact, passes in _means_of(ranks):
        if str(fact["where"]) in reported:
            continue
        for look in (_times_ranks, _reduced, _printed):
            if finding := look(ranks, fact, passes):
                reported.add(str(fact["where"]))
                yield finding
                break


def _means_of(ranks: tuple[Rank, ...]) -> Iterator[tuple[Fact, list[PassMeans]]]:
    """The means that all ranks took at one line in one pass."""
    for fact in ranks[0].all("means"):
        rows = [_same_line(rank, fact) for rank in ranks]
        passes = [row for row in rows if row is not None]
        if len(passes) == len(ranks):
            yield fact, passes


def _same_line(rank: Rank, fact: Fact) -> PassMeans | None:
    names = ("loader", "number", "name", "is_sum", "where")
    for other in rank.all("means"):
        if all(other.get(name) == fact.get(name) for name in names) and other["values"]:
            values = tuple(map(float, other["values"]))
            is_finite = all(map(math.isfinite, values))
            gathered = tuple(other.get("gathered", ()))
            return PassMeans(values, tuple(other["counts"]), gathered) if is_finite else None
    return None


def _reduced(ranks: tuple[Rank, ...], fact: Fact, passes: list[PassMeans]) -> ScriptFinding | None:
    """A finding if every rank reduces its mean, or the sum of its means."""
    wanted = _over_all(passes)
    everywhere = [value for row in passes for value in row.values]
    sums = [math.fsum(means.values) for means in passes]
    by_sample, by_batch = _means_over(passes)
    ways = {
        "the mean of its samples": ([means.by_size for means in passes], by_sample),
        "the mean of its batches": ([means.of_means for means in passes], by_batch),
        "the sum of its batches' means": (sums, math.fsum(everywhere) / len(everywhere)),
    }
    for where, columns in _columns(ranks, [fact["loader"], fact["number"]]):
        for kind, (inputs, comes_out) in ways.items():
            if _are_close(columns, inputs) and not _close(comes_out, wanted, LEAST_ERROR):
                says = f"each rank gives {kind}" if len(ranks) > 1 else f"it is {kind}"
                return _mean_of_means(where, says, passes, comes_out, wanted)
    return None


def _printed(ranks: tuple[Rank, ...], fact: Fact, passes: list[PassMeans]) -> ScriptFinding | None:
    """A finding if a rank prints its mean of means, or that of all ranks, equal in every digit."""
    after = _after(ranks, [fact["loader"], fact["number"]])
    looks = [(rank.all("print"), [m], m.of_means) for rank, m in zip(ranks, passes, strict=True)]
    looks += [(after, passes, mean) for mean in _means_over(passes)]
    for printed, means, mean in looks:
        wanted, of = _over_all(means), "batches" if len(means) == 1 else "ranks"
        for line in printed if not _close(mean, wanted, LEAST_ERROR) else ():
            if _is_printed(line, mean, wanted):
                says = f"what is printed is the mean of the {of}"
                return _mean_of_means(line_of(line["where"]), says, means, mean, wanted)
    return None


def _is_printed(fact: Fact, value: float, wanted: float) -> bool:
    """Whether a number of the line is `value`, and not `wanted`, in at least four digits."""
    for text in NUMBER.findall(fact["text"]):
        decimals = len(text.partition(".")[2])
        digits = len(text.replace(".", "").lstrip("0"))
        if digits >= LEAST_DIGITS and text == f"{value:.{decimals}f}" != f"{wanted:.{decimals}f}":
            return True
    return False


def _after(ranks: tuple[Rank, ...], of: list[int]) -> list[Fact]:
    """The lines that are printed after a pass, before the next one."""
    return [fact for rank in ranks for fact in rank.all("print") if fact.get("after") == of]


def _times_ranks(
    ranks: tuple[Rank, ...], fact: Fact, passes: list[PassMeans]
) -> ScriptFinding | None:
    """A finding if means are gathered, or printed, as many times too large as there are ranks."""
    size, whole = len(passes), _over_all(passes)
    places = [
        line["where"]
        for line in _after(ranks, [fact["loader"], fact["number"]])
        if any(_is_printed(line, size * mean, mean) for mean in (whole, *_means_over(passes)))
    ]
    if all(_are_close(row.gathered, [size * value for value in row.values]) for row in passes):
        places = [fact["where"]]
    if size == 1 or not places or fact.get("is_sum"):
        return None
    return ScriptFinding(
        "mean-times-ranks",
        RESULT,
        line_of(places[0]),
        f"the mean loss of an evaluation is {whole:.6g}, and what {size} ranks give of it is "
        f"{size} times as large",
        "the metric grows with the ranks",
        "divide the sum over ranks by their number; for transformers' Trainer, "
        "average_tokens_across_devices=False",
    )


def _mean_of_means(
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
            rows = [_numbered(rank, loader, number) for rank in ranks]
            passes = [row for row in rows if row and row["ended"] and not row["grad"]]
            counts = [int(row["samples"]) for row in passes]
            if len(passes) < len(ranks) or len(set(counts)) == 1:
                continue
            for where, column in _columns(ranks, [loader, number]):
                if not _are_shares(column, counts, sum(counts)):
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


def _are_shares(column: list[float], counts: list[int], total: int) -> bool:
    """Whether each is a whole count over its rank's samples, and not over all `total` samples."""
    local = all(map(_is_whole, column, counts))
    uneven = all(float(value) != round(value) for value in column)
    fine = all(count >= 8 and not _is_simple(v) for v, count in zip(column, counts, strict=True))
    return local and uneven and fine and not all(_is_whole(value, total) for value in column)


def _is_whole(value: float, count: int) -> bool:
    return any(
        abs(part - round(part)) <= ROUNDING * max(1.0, part) and 0 < round(part) < count
        for part in (value * count, value * count / 100)
    )


def _is_simple(value: float) -> bool:
    """A half, a third, a quarter: a share of any number of samples by chance."""
    return any(
        abs(part * times - round(part * times)) < 1e-5
        for part in (value, value / 100)
        for times in (1, 2, 3, 4)
    )


def _columns(
    ranks: tuple[Rank, ...], after: list[int], operations: tuple[str, ...] = ADDING
) -> Iterator[tuple[tuple[str, int] | None, list[float]]]:
    """The inputs of each reduction after a pass: one number per rank."""
    tables = [
        [f for f in rank.all("reduced") if f["after"] == after and f["operation"] in operations]
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


def _means_over(passes: list[PassMeans]) -> tuple[float, ...]:
    """The mean of the ranks' means by sample, and of their means by batch."""
    pairs = [(means.by_size, means.of_means) for means in passes]
    return tuple(math.fsum(column) / len(pairs) for column in zip(*pairs, strict=True))


def _are_close(values: Sequence[float], others: Sequence[float]) -> bool:
    return len(values) == len(others) and all(map(_close, values, others, repeat(EQUAL)))


def _close(value: float, other: float, within: float) -> bool:
    return math.isfinite(value) and abs(value - other) <= within * max(abs(value), abs(other))
