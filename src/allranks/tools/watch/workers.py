"""Faults of random numbers in the workers of a loader: streams that are one and the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from allranks.tools.watch.data import loaders_of, passes_of
from allranks.tools.watch.facts import Fact, Rank, groups_that_reduce, line_of
from allranks.tools.watch.finding import RESULT, Finding, names_among

LEAST_DRAWS = 2
Table = dict[Any, dict[str, int]]
"""The states of the generators that drew, by what they are compared at."""
BY_WORKER = (
    "let worker_init_fn seed by torch.initial_seed() % 2**32: another number in every worker, rank "
    "and epoch"
)
BY_RANK = "torch.manual_seed(seed + rank) once the model is made"


def equal_draws_of_workers(ranks: tuple[Rank, ...]) -> Iterator[Finding]:
    """Workers of one rank, or ranks, or epochs whose augmentation draws the same numbers."""
    groups = groups_that_reduce(ranks)
    for loader, fact in loaders_of(ranks):
        if not any(one["backwards"] for one in passes_of(ranks[0], loader)):
            continue
        fix = BY_WORKER if fact.get("seeded") else BY_RANK
        among_workers = _equal(_by(ranks[0], loader, "worker").values())
        among_ranks: list[str] = []
        for group in groups:
            among_ranks += _equal(_whole(rank, loader) for rank in group)
        if among_workers:
            effect = "augmentation draws the same numbers in every worker, so samples of several "
            effect += "batches are changed alike"
            yield _finding("equal-random-streams", fact, among_workers, "workers", effect, fix)
        elif among_ranks:
            effect = f"augmentation draws the same numbers on all {len(ranks)} ranks, which have "
            effect += "the variety of one"
            yield _finding("equal-random-streams", fact, among_ranks, "ranks", effect, fix)
        among_passes = _equal(_by(ranks[0], loader, "pass").values())
        if among_passes:
            effect = "augmentation changes each sample in one way for ever, if its place is the "
            effect += "same, and else repeats its numbers in another order"
            yield _finding("same-draws-each-epoch", fact, among_passes, "epochs", effect, BY_WORKER)


def _finding(
    name: str, fact: Fact, generators: list[str], among: str, effect: str, fix: str
) -> Finding:
    return Finding(
        name,
        RESULT,
        line_of(fact["where"]),
        f"the {fact['workers']} workers of the loader drew from {names_among(generators)}, each "
        f"time in one state in all {among}",
        effect,
        fix,
    )


def _whole(rank: Rank, loader: int) -> Table:
    return {
        (one["pass"], one["worker"], one["number"]): one["before"]
        for one in rank.all("worker")
        if one["loader"] == loader
    }


def _by(rank: Rank, loader: int, name: str) -> dict[int, Table]:
    """A table for each worker, or each pass; the others of the two are what is compared at."""
    found: dict[int, Table] = defaultdict(dict)
    place = ("pass", "worker").index(name)
    for key, before in _whole(rank, loader).items():
        found[key[place]][key[:place] + key[place + 1 :]] = before
    return found


def _equal(tables: Iterable[Table]) -> list[str]:
    """The generators whose draws were all in one state; of one table alone nothing is said."""
    known = list(tables)
    if len(known) < 2:
        return []
    seen: dict[str, list[bool]] = defaultdict(list)
    for key in set.intersection(*map(set, known)):
        states = [table[key] for table in known]
        for name in set.intersection(*map(set, states)):
            seen[name].append(len({one[name] for one in states}) == 1)
    return sorted(n for n, equal in seen.items() if all(equal) and len(equal) >= LEAST_DRAWS)
