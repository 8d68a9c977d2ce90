"""Faults of ranks: tensors that must be equal and differ, draws that must differ and do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from allranks.tools.script_check.rules.facts import (
    BY_RANK,
    END,
    RESULT,
    Fact,
    Rank,
    ScriptFinding,
    equal_draws,
    groups_of_replicas,
    groups_that_reduce,
    line_of,
    names_among,
)


def replicas_that_drift(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """A DDP whose parameters, or buffers that it does not broadcast, differ between ranks."""
    for number, members in groups_of_replicas(ranks):
        first, fact = members[0], members[0].by_id("replica")[number]
        if any(number in rank.by_id("hooked") for rank in members) or _averages(members):
            continue
        for kind in ("parameters", "buffers"):
            step, names = _first_difference(members, "replica", number, kind)
            if not names:
                continue
            last = [row for row in _digests(first, "replica", number).values()][-1]
            unused = last["forwards"] == 0
            cause = "; no forward of the DDP ran in training" if unused else ""
            yield ScriptFinding(
                "replicas-drift",
                RESULT,
                line_of(fact["where"]),
                f"{len(names)} {kind} differ between ranks {_when(step)}: {names_among(names)}"
                f"{cause}",
                "each rank has a model of its own; what is saved is that of one of them"
                if kind == "parameters"
                else "ranks evaluate with statistics of their own data; one of them is saved",
                "call the DDP itself in training, not its .module, and change no weight by itself"
                if kind == "parameters"
                else "broadcast_buffers=True, or SyncBatchNorm",
            )


def parameters_outside(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """Parameters that an optimizer trains, no DDP holds, and that differ between ranks."""
    if len(ranks) < 2 or _averages(list(ranks)) or any(_total(ranks, "to_one")):
        return
    for number, fact in ranks[0].by_id("optimizer").items():
        step, names = _first_difference(list(ranks), "loose", number, "parameters")
        if not fact["outside"] or fact["sent"] or not names:
            continue
        by_ddp = bool(fact["replicas"] or ranks[0].all("replica"))
        yield ScriptFinding(
            "parameters-outside-ddp" if by_ddp else "gradients-of-one-rank",
            RESULT,
            line_of(fact["where"]),
            f"{fact['name']} steps {len(fact['outside'])} parameters that "
            f"{'no DDP holds' if by_ddp else 'nothing reduces'}, and {len(names)} of them differ "
            f"between ranks {_when(step)}: {names_among(names)}",
            "each rank trains them on its own samples alone",
            "make them part of the module that DistributedDataParallel wraps"
            if by_ddp
            else "wrap the model: DistributedDataParallel(model)",
        )


def weights_that_begin_unequal(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """The script reduces gradients itself, for weights that were never equal."""
    for number, fact in ranks[0].by_id("optimizer").items() if len(ranks) > 1 else ():
        step, names = _first_difference(list(ranks), "loose", number, "parameters")
        if fact["sent"] and names and step == 0:
            yield ScriptFinding(
                "weights-begin-unequal",
                RESULT,
                line_of(fact["where"]),
                f"{len(names)} parameters differ between ranks before the first step: "
                f"{names_among(names)}",
                "the mean of gradients is applied to different weights, which stay different",
                "broadcast the weights of rank 0 before the first step, or use "
                "DistributedDataParallel, which does",
            )


def equal_random_streams(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """Training draws from generators that have the same state on all ranks."""
    for number, members in groups_of_replicas(ranks):
        tables = [_draws(rank, "replica", number) for rank in members]
        if equal := _equal_in(tables):
            where = line_of(next(iter(tables[0].values()))["where"])
            yield _equal_stream(equal, len(members), where, "forward", "dropout")
    for group in groups_that_reduce(ranks):
        for number, fact in group[0].by_id("loader", "loader").items():
            passes = [row for row in group[0].all("pass") if row["loader"] == number]
            equal = _equal_in([_draws(rank, "loader", number) for rank in group])
            if equal and any(row["backwards"] for row in passes):
                where = line_of(fact["where"])
                yield _equal_stream(equal, len(group), where, "loader", "augmentation")


def _equal_in(tables: list[dict[int, Fact]]) -> dict[str, int]:
    return equal_draws({n: fact["before"] for n, fact in table.items()} for table in tables)


SEEDS: dict[tuple[str, ...], str] = {
    ("random",): "random.seed(seed + rank)",
    ("numpy.random",): "numpy.random.seed(seed + rank)",
}


def _equal_stream(
    equal: dict[str, int], size: int, where: tuple[str, int] | None, of: str, kind: str
) -> ScriptFinding:
    return ScriptFinding(
        "equal-random-streams",
        RESULT,
        where,
        f"the {of} drew from {names_among(equal)} {max(equal.values())} times, each time in one "
        f"state on all {size} ranks",
        f"{kind} draws the same numbers on every rank: {size} ranks have the variety of one",
        SEEDS.get(tuple(equal), BY_RANK),
    )


def _draws(rank: Rank, of: str, number: int) -> dict[int, Fact]:
    return {
        fact["number"]: fact
        for fact in rank.all("draws")
        if fact["of"] == of and fact["id"] == number
    }


def _digests(rank: Rank, of: str, number: int) -> dict[int, Fact]:
    """Digests by step, those of the end last."""
    digests = {
        fact["step"]: fact
        for fact in rank.all("digest")
        if fact["of"] == of and fact["id"] == number
    }
    return dict(sorted(digests.items(), key=lambda item: (item[0] == END, item[0])))


def _first_difference(ranks: list[Rank], of: str, number: int, kind: str) -> tuple[int, list[str]]:
    """The first step at which digests differ, and the names that differ at the end.

    Buffers are compared at the end alone.
    """
    tables = [_digests(rank, of, number) for rank in ranks]
    at_end = _differing([table.get(END) for table in tables], kind)
    steps = list(tables[0]) if kind == "parameters" else [END]
    for step in steps:
        if _differing([table.get(step) for table in tables], kind):
            return step, at_end
    return END, at_end


def _differing(rows: list[Fact | None], kind: str) -> list[str]:
    known: list[dict[str, Any]] = [row[kind] for row in rows if row is not None]
    if len(known) < len(rows):
        return []
    names = [name for name in known[0] if all(name in row for row in known)]
    return [name for name in names if len({row[name] for row in known}) > 1]


def _averages(ranks: list[Rank]) -> bool:
    """Whether the script reduces large tensors itself, and so may keep replicas equal."""
    return any(rank.last("collectives", "large", 0) for rank in ranks)


def _total(ranks: tuple[Rank, ...], name: str) -> list[int]:
    return [rank.last("collectives", name, 0) for rank in ranks]


def _when(step: int) -> str:
    return {END: "at the end", 0: "from the start"}.get(
        step, f"from step {step} on, and at the end"
    )
