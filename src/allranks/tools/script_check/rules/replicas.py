"""Faults of ranks: tensors that must be equal and differ, draws that must differ and do not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from allranks.tools.script_check.rules.data import loaders_of, passes_of
from allranks.tools.script_check.rules.facts import (
    BY_RANK,
    END,
    RESULT,
    Fact,
    Rank,
    ScriptFinding,
    States,
    equal_draws,
    groups_of_replicas,
    groups_that_reduce,
    line_of,
    names_among,
)

LEAST_INPUTS = 4


def replicas_that_drift(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """A DDP whose parameters, or buffers that it does not broadcast, differ between ranks."""
    for number, members in groups_of_replicas(ranks):
        fact = members[0].by_id("replica")[number]
        if any(number in rank.by_id("hooked") for rank in members) or _sends(members, "large"):
            continue
        for kind in ("parameters", "buffers"):
            step, names = _first_difference(members, "replica", number, kind)
            if not names:
                continue
            causes = _causes_of_drift(members, number) if kind == "parameters" else {}
            yield ScriptFinding(
                "replicas-drift",
                RESULT,
                line_of(fact["where"]),
                f"{len(names)} {kind} differ between ranks {_when(step)}: {names_among(names)}"
                + f"; {'; '.join(causes) or 'no cause was seen'}" * (kind == "parameters"),
                "each rank has a model of its own; what is saved is that of one of them"
                if kind == "parameters"
                else "ranks evaluate with statistics of their own data; one of them is saved",
                "; ".join(causes.values()) or "look for what changes weights on some ranks alone"
                if kind == "parameters"
                else "broadcast_buffers=True, or SyncBatchNorm",
            )


def _causes_of_drift(members: list[Rank], number: int) -> dict[str, str]:
    """The causes of a drift that the facts show, each with its fix."""
    steps = max(map(sum, _of_optimizers(members, number, "steps")))
    last = [row for row in _digests(members[0], "replica", number).values()][-1]
    causes = {}
    if last["forwards"] < max(1, steps):
        count = f"only {last['forwards']} forwards" if last["forwards"] else "no forward"
        fix = "call the DDP itself in training, not its .module"
        causes[f"{count} of the DDP ran in training, for {steps} steps"] = fix
    if unreduced := last.get("unreduced"):
        fix = "wrap the model in a new DDP when requires_grad, or a layer, has changed"
        causes[
            f"DDP does not reduce {names_among(unreduced)}: frozen, or not there, at the wrap"
        ] = fix
    rates = _of_optimizers(members, number, "rates")
    if any(row != rates[0] for row in rates):
        fix = "step the schedule on all ranks; all_reduce a metric that it takes first"
        values = " and ".join(names_among(map(str, chain.from_iterable(row))) for row in rates)
        causes[f"the learning rates of the ranks are {values} at the end"] = fix
    return causes


def _of_optimizers(members: list[Rank], replica: int, name: str) -> list[list[Any]]:
    """For each rank: a count of each optimizer that steps a replica."""
    optimizers = members[0].by_id("optimizer").values()
    keys = [str(fact["id"]) for fact in optimizers if replica in fact["replicas"]]
    tables = [rank.last("counts", name, {}) for rank in members]
    return [[table[key] for key in keys if key in table] for table in tables]


def ranks_that_step_unequally(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """Ranks of one DDP that are more than one step apart: they do not wait for each other."""
    for number, members in groups_of_replicas(ranks):
        facts = [fact for rank in members for fact in rank.facts]
        if any(fact["fact"] in ("joined", "hooked") or fact.get("scaled") for fact in facts):
            continue
        counts = [sum(row) for row in _of_optimizers(members, number, "steps")]
        if 0 < min(counts) < max(counts) - 1:
            yield ScriptFinding(
                "unequal-steps",
                RESULT,
                line_of(members[0].by_id("replica")[number]["where"]),
                f"the ranks made {' and '.join(map(str, counts))} steps: rank "
                f"{members[counts.index(min(counts))].rank} skips some, or leaves its loop earlier",
                "weights part, or a rank waits for ever",
                "let all ranks decide alike: all_reduce what decides; for uneven data, use Join",
            )


def equal_batches(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """The first inputs of a DDP, each equal on all ranks and unlike the others."""
    for number, members in groups_of_replicas(ranks):
        facts = [[f for f in rank.all("inputs") if f["id"] == number] for rank in members]
        rows = [[tuple(fact["digests"]) for fact in row] for row in facts]
        has_sent = len({fact["sent"] for fact in facts[0]}) > 1  # ranks may share a batch
        is_varied = len(set(rows[0])) == len(rows[0]) >= LEAST_INPUTS and not has_sent
        if is_varied and all(row == rows[0] for row in rows):
            yield ScriptFinding(
                "equal-batches",
                RESULT,
                line_of(facts[0][0]["where"]),
                f"the first {len(rows[0])} inputs of the DDP are equal on all {len(rows)} ranks",
                f"{len(rows)} ranks do the work of one: the mean of equal gradients",
                "let each rank draw its own: seed + rank, or every ranks-th sample from rank on",
            )


def parameters_outside(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """Parameters that an optimizer trains, no DDP holds, and that differ between ranks."""
    if len(ranks) < 2 or _sends(ranks, "large") or _sends(ranks, "to_one"):
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


def _facts_of(rank: Rank, kind: str, of: str, number: int) -> list[Fact]:
    return [fact for fact in rank.all(kind) if fact["of"] == of and fact["id"] == number]


def _draws(rank: Rank, of: str, number: int) -> dict[int, Fact]:
    return {fact["number"]: fact for fact in _facts_of(rank, "draws", of, number)}


def _digests(rank: Rank, of: str, number: int) -> dict[int, Fact]:
    """Digests by step, those of the end last."""
    digests = {fact["step"]: fact for fact in _facts_of(rank, "digest", of, number)}
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


def _sends(ranks: Sequence[Rank], name: str) -> bool:
    """Whether the script itself sends large tensors, which may keep replicas equal, or to one."""
    return any(rank.last("collectives", name, 0) for rank in ranks)


def _when(step: int) -> str:
    return {END: "at the end", 0: "from the start"}.get(
        step, f"from step {step} on, and at the end"
    )


# --- workers -------------------------------------------------------------------------------------
# Faults of random numbers in the workers of a loader: identical streams.


BY_WORKER = (
    "let worker_init_fn seed by torch.initial_seed() % 2**32: another number in every worker, rank "
    "and epoch"
)


def equal_draws_of_workers(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """Workers, ranks or epochs whose augmentation draws the same numbers."""
    groups = groups_that_reduce(ranks)
    for loader, fact in loaders_of(ranks):
        if not any(row["backwards"] for row in passes_of(ranks[0], loader)):
            continue
        by_rank = BY_WORKER if fact.get("seeded") else BY_RANK
        among_workers = equal_draws(_by(ranks[0], loader, "worker").values())
        among_ranks: dict[str, int] = {}
        for group in groups:
            among_ranks |= equal_draws(_whole(rank, loader) for rank in group)
        among_passes = equal_draws(_by(ranks[0], loader, "pass").values())
        draws, same = "equal-random-streams", "augmentation draws the same numbers"
        workers = f"{same} in every worker, so samples of several batches are changed alike"
        of_ranks = f"{same} on all {len(ranks)} ranks, which have the variety of one"
        passes = "augmentation changes each sample in one way for ever, if its place is the same, "
        passes += "and else repeats its numbers in another order"
        for name, generators, among, effect, fix in (
            (draws, among_workers, "workers", workers, by_rank),
            (draws, {} if among_workers else among_ranks, "ranks", of_ranks, by_rank),
            ("same-draws-each-epoch", among_passes, "epochs", passes, BY_WORKER),
        ):
            if generators:
                drew = f"the {fact['workers']} workers of the loader drew from "
                drew += f"{names_among(generators)}, each time in one state in all {among}"
                yield ScriptFinding(name, RESULT, line_of(fact["where"]), drew, effect, fix)


def _whole(rank: Rank, loader: int) -> States:
    return {
        (fact["pass"], fact["worker"], fact["number"]): fact["before"]
        for fact in rank.all("worker")
        if fact["loader"] == loader
    }


def _by(rank: Rank, loader: int, name: str) -> dict[int, States]:
    """A table for each worker, or for each pass; its keys contain the other of the two."""
    tables: dict[int, States] = defaultdict(dict)
    place = ("pass", "worker").index(name)
    for key, before in _whole(rank, loader).items():
        tables[key[place]][key[:place] + key[place + 1 :]] = before
    return tables
