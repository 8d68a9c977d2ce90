"""Reductions made of messages: schedules in one process, then real ranks; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import RequestError
from allranks.job.config import resolve
from allranks.strategies.card import Workload
from allranks.strategies.cards import CARDS
from allranks.strategies.reduction_schedules import SCHEDULES, chunks_of
from allranks.strategies.resolve import resolved_strategy
from conftest import Train

PLAIN = [name for name in SCHEDULES if name != "hierarchical"]


def played(name: str, ranks: int, size: int, group: int) -> tuple[list[list[int]], list[list[int]]]:
    """What every rank holds in the end, where rank r began with 10^r; elements sent to each rank.

    Raises where a message is not waited for, or comes in another turn or as another part.
    """
    held = [[10**rank] * size for rank in range(ranks)]
    sent = [[0] * ranks for _ in range(ranks)]
    options = {"group": group}
    plans = [SCHEDULES[name](ranks, rank, size, options) for rank in range(ranks)]
    for turns in zip(*plans, strict=True):
        under_way = {}
        for rank, turn in enumerate(turns):
            for peer, part in turn.sends:
                under_way[rank, peer] = part, held[rank][part.start : part.stop]
                sent[rank][peer] += len(part)
        for rank, turn in enumerate(turns):
            for peer, part in turn.receives:
                there, came = under_way.pop((peer, rank))
                assert there == part
                for place, value in zip(part, came, strict=True):
                    held[rank][place] = value + (held[rank][place] if turn.adds else 0)
        assert not under_way
    return held, sent


@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 17), st.integers(0, 40), st.integers(1, 5))
def test_every_schedule_ends_with_the_sum_on_every_rank(
    name: str, ranks: int, size: int, group: int
) -> None:
    """Any number of ranks, messages that are uneven, shorter than the ranks, empty."""
    ranks = ranks * group if name == "hierarchical" and ranks * group <= 20 else ranks
    group = group if ranks % group == 0 else ranks
    held, _ = played(name, ranks, size, group)
    assert held == [[sum(10**rank for rank in range(ranks))] * size] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_card_says_what_the_busiest_rank_sends(name: str, ranks: int) -> None:
    for group in [g for g in range(1, ranks + 1) if ranks % g == 0]:
        written = f"{name}(group={group})" if name == "hierarchical" else name
        options = CARDS["ddp"].read_options({"reduce": written})
        size = 3 * chunks_of(name, ranks)
        _, sent = played(name, ranks, size, group)
        promised = CARDS["ddp"].bytes_sent(Workload((8 * size,), ranks, 8), options)
        assert promised == 8 * max(map(sum, sent)), (written, ranks)
        if name == "hierarchical":
            groups = ranks // group
            far = [
                sum(n for p, n in enumerate(row) if p // group != r // group)
                for r, row in enumerate(sent)
            ]
            assert far == [round(2 * (groups - 1) / groups * size / group)] * ranks
            halves = ranks // 2  # what its node sends through a ring over all ranks
            assert halves <= 1 or sum(far[:group]) <= 2 * (ranks - 1) / ranks * size * group


@pytest.mark.slow
@pytest.mark.cases("ranks", [3, 4], exhaustive=[2, 5, 8])
def test_ranks_end_with_the_sum_and_send_what_the_card_says(
    ranks: int, on_ranks: Callable[..., Any]
) -> None:
    """float64 within rounding, the same bits on all, with and without pieces."""
    groups = [g for g in range(1, ranks + 1) if ranks % g == 0]
    ways = [*PLAIN, "ring(pieces=3)", "star(pieces=2)", "halving-doubling(pieces=2)"]
    ways += ["binary-tree(pieces=4)", f"hierarchical(group={ranks},pieces=2)"]
    ways += [f"hierarchical(group={group})" for group in groups]
    on_ranks(ranks, "reduction_workers:sums_are_the_sums", {"ways": ways})


def test_groups_are_those_of_the_nodes() -> None:
    flags: dict[str, Any] = {"strategy": "ddp:reduce=hierarchical", "ranks": 4, "nodes": 2}
    job = resolve("digits", {**flags, "place": "simulated"}).job
    assert job.strategy == "ddp:reduce=hierarchical(group=2,pieces=1)"
    assert str(
        resolved_strategy("ddp:reduce=hierarchical", ranks=1, bitwise=False, per_node=1)
    ) == ("ddp:reduce=hierarchical")


@pytest.mark.parametrize(
    ("reduce", "per_node", "found"),
    [
        ("hierarchical", 4, "one node"),
        ("hierarchical(pieces=2)", 0, "nodes with different numbers of ranks"),
        ("hierarchical(group=3)", 4, "4 ranks, which are no whole groups of 3"),
        ("ring(pieces=0)", 4, "pieces=0"),
        ("ring(group=2)", 4, "option 'group'"),
    ],
)
def test_groups_that_cannot_be_are_refused(reduce: str, per_node: int, found: str) -> None:
    with pytest.raises(RequestError) as refused:
        _ = resolved_strategy(
            f"ddp:reduce={reduce}", ranks=4, bitwise=False, per_node=per_node
        ).mesh
    assert refused.value.found == found


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("way", ["ring(pieces=2)", "halving-doubling", "binary-tree", "star"])
def test_a_peer_that_goes_away_is_a_lost_peer(way: str, on_ranks: Callable[..., Any]) -> None:
    on_ranks(3, "reduction_workers:a_peer_is_lost", {"way": way})


@pytest.mark.slow
def test_a_killed_rank_is_the_fault_and_the_training_goes_on(train: Train) -> None:
    """The others are victims; after a restart the weights are those of a training without it."""
    flags: dict[str, Any] = {"strategy": "ddp:reduce=ring", "ranks": 3, "steps": 8}
    kill = {"checkpoint_every": 3, "max_restarts": 1, "inject": "kill@rank=1,step=5"}
    results = [train("contract_tasks:Plain", **flags, **more) for more in ({}, kill)]
    first, second = (result.summary for result in results)
    assert second["restarts"] == 1
    assert first["weights_sha256"] == second["weights_sha256"]
