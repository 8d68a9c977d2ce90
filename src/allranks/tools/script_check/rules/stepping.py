"""Faults between two steps of an optimizer: schedules, accumulation, gradients not reduced."""

from __future__ import annotations

from collections.abc import Iterator

from allranks.tools.script_check.rules.facts import COST, RESULT, Fact, Finding, Rank, line_of

SCALE_FREE = (
    *("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam", "Adagrad", "Adadelta", "RMSprop"),
    *("Rprop", "Adafactor", "Muon"),
)
"""Optimizers whose step hardly changes when every gradient is multiplied by one number."""


def schedules_too_fast(ranks: tuple[Rank, ...]) -> Iterator[Finding]:
    """A scheduler that goes several steps for one of its optimizer."""
    for fact in _schedulers(ranks):
        runs = {int(run): count for run, count in fact["between"].items()}
        often = {run: count for run, count in runs.items() if run > 1}
        if not often or sum(often.values()) * 2 <= sum(runs.values()):
            continue
        if sum(runs.values()) < 2 and _scaled(ranks):
            continue
        run = max(often, key=lambda one: often[one])
        by_ranks = f", as many as there are ranks ({len(ranks)})" if run == len(ranks) else ""
        yield Finding(
            "schedule-too-fast",
            RESULT,
            line_of(fact["where"]),
            f"{fact['name']} made {run} steps for one of the optimizer, {often[run]} times"
            f"{by_ranks}",
            f"the learning rate runs through its schedule {run} times as fast as it is written",
            "one scheduler.step() behind each optimizer.step() (or one per epoch), whatever the "
            "ranks and micro-batches",
        )


def schedules_ahead(ranks: tuple[Rank, ...]) -> Iterator[Finding]:
    """A scheduler that makes its step before the first of its optimizer."""
    for fact in _schedulers(ranks):
        steps = ranks[0].last("counts", "steps", {}).get(str(fact["optimizer"]), 0)
        if fact["first"] == 1 and steps and not _scaled(ranks):
            yield Finding(
                "schedule-ahead",
                RESULT,
                line_of(fact["where"]),
                f"{fact['name']} made a step before the first one of the optimizer",
                "the first value of the schedule is never used, and all others come one step early",
                "optimizer.step() first, then scheduler.step()",
            )


def undivided_accumulation(ranks: tuple[Rank, ...]) -> Iterator[Finding]:
    """Micro-batches whose mean losses are added up, and not divided by their number."""
    rank = ranks[0]
    names = {number: fact["name"] for number, fact in rank.by_id("optimizer").items()}
    for fact in _one_of_each(rank, lambda one: one["accumulated"] and one["is_mean"]):
        if fact["unchanged"] is not True or names.get(fact["optimizer"]) in SCALE_FREE:
            continue
        count = fact["backwards"]
        yield Finding(
            "accumulation-not-divided",
            RESULT,
            line_of(fact["backward_where"]),
            f"{count} backward passes of a mean loss before one step, and the gradient of the "
            "step is their sum",
            f"steps are {count} times as long as with one batch of the same samples",
            f"(loss / {count}).backward()",
        )


def unreduced_steps(ranks: tuple[Rank, ...]) -> Iterator[Finding]:
    """Steps whose last micro-batch ran under no_sync: no rank has the gradients of the others."""
    if any(rank.last("collectives", "large", 0) for rank in ranks):
        return  # it may average weights or gradients by itself
    rank = ranks[0]
    found = [
        fact for fact in rank.all("window") if fact["forwards"] and not fact["forwards"][-1][1]
    ]
    counts = rank.last("counts", "windows", [])
    if found:
        times = sum(counts[fact["id"]] for fact in found if fact["id"] < len(counts))
        total = sum(counts)
        yield Finding(
            "step-without-reduction",
            RESULT,
            line_of(found[0]["where"]),
            f"{times} of {total} steps were made with the last micro-batch under no_sync; the "
            f"first is step {found[0]['step']}",
            "gradients of these micro-batches are reduced late or never: replicas drift apart",
            "leave no_sync for the last micro-batch before each step, and for the last of an epoch",
        )


def needless_reductions(ranks: tuple[Rank, ...]) -> Iterator[Finding]:
    """Gradient accumulation that reduces at every micro-batch."""
    rank = ranks[0]
    for fact in _one_of_each(rank, lambda one: one["accumulated"] and len(ranks) > 1):
        reduced = [synced for _, synced in fact["forwards"]]
        if len(reduced) == fact["backwards"] and all(reduced):
            yield Finding(
                "reduced-at-each-micro-batch",
                COST,
                line_of(fact["backward_where"]),
                f"{len(reduced)} reductions of all gradients before one step",
                f"nothing to the result; {len(reduced)} times the communication that it needs",
                "forward and backward of all but the last micro-batch under `with model.no_sync()`",
            )


def _one_of_each(rank: Rank, fits: object) -> list[Fact]:
    """The first window that fits of each line with a backward; the longest there."""
    found: dict[str, Fact] = {}
    for fact in rank.all("window"):
        key = str(fact["backward_where"])
        if callable(fits) and fits(fact):
            best = found.get(key)
            if best is None or (fact["unchanged"] is True, fact["backwards"]) > (
                best["unchanged"] is True,
                best["backwards"],
            ):
                found[key] = fact
    return list(found.values())


def _schedulers(ranks: tuple[Rank, ...]) -> list[Fact]:
    return [one for one in ranks[0].all("scheduler") if one["name"] != "ReduceLROnPlateau"]


def _scaled(ranks: tuple[Rank, ...]) -> bool:
    """Whether a GradScaler may have left steps of the optimizer out."""
    return bool(ranks[0].last("counts", "scaled", False))
