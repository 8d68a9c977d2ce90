"""The fixed tree: whoever owns the shards, the same additions are made, in the same brackets."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.strategies.reduction_tree import (
    Span,
    are_siblings,
    rounds_of_pairs,
    split,
    subtree_roots,
)
from allranks.strategies.shards import owned_shards

Sum = tuple[Span, str]


def whole_tree(span: Span) -> str:
    """The additions of one process, as text: `((0+1)+2)`."""
    low, high = span
    if high - low == 1:
        return str(low)
    return f"({whole_tree((low, split(span)))}+{whole_tree((split(span), high))})"


def nodes(span: Span) -> set[Span]:
    low, high = span
    if high - low == 1:
        return {span}
    return {span} | nodes((low, split(span))) | nodes((split(span), high))


def added(sums: list[Sum], shards: int) -> list[Sum]:
    """Add neighbours, from left to right, as soon as both children of a node are there."""
    done: list[Sum] = []
    for span, text in sums:
        done.append((span, text))
        while len(done) > 1 and are_siblings(done[-2][0], done[-1][0], shards):
            ((low, _), left), ((_, high), right) = done[-2:]
            done[-2:] = [((low, high), f"({left}+{right})")]
    return done


def of_the_ranks(owned: list[range], shards: int) -> str:
    """The additions of all ranks: first each its own shards, then all of them the roots."""
    roots: list[Sum] = []
    for span in owned:
        own = added([((shard, shard + 1), str(shard)) for shard in span], shards)
        assert tuple(root for root, _ in own) == subtree_roots(span, shards)
        roots += own
    ((span, text),) = added(roots, shards)
    assert span == (0, shards)
    return text


@pytest.mark.parametrize("shards", range(1, 25))
def test_any_number_of_ranks_makes_the_same_additions(shards: int) -> None:
    wanted = whole_tree((0, shards))
    for ranks in range(1, shards + 1):
        owned = [owned_shards(shards, ranks, rank) for rank in range(ranks)]
        assert of_the_ranks(owned, shards) == wanted, ranks


@given(shards=st.integers(1, 40), data=st.data())
def test_any_cut_into_runs_makes_the_same_additions(shards: int, data: st.DataObject) -> None:
    cuts = data.draw(st.sets(st.integers(1, shards - 1))) if shards > 1 else set()
    edges = [0, *sorted(cuts), shards]
    owned = [range(low, high) for low, high in pairwise(edges)]
    assert of_the_ranks(owned, shards) == whole_tree((0, shards))


@given(shards=st.integers(1, 64), data=st.data())
def test_roots_are_nodes_of_the_tree_and_cover_what_is_owned(
    shards: int, data: st.DataObject
) -> None:
    low = data.draw(st.integers(0, shards - 1))
    owned = range(low, data.draw(st.integers(low + 1, shards)))
    roots = subtree_roots(owned, shards)
    assert set(roots) <= nodes((0, shards))
    assert [shard for root in roots for shard in range(*root)] == list(owned)


def test_a_rank_of_eight_shards_holds_at_most_three_roots() -> None:
    for ranks in range(1, 9):
        held = [len(subtree_roots(owned_shards(8, ranks, r), 8)) for r in range(ranks)]
        assert max(held) <= 3
        assert 8 % ranks or held == [1] * ranks, "one root where ranks divide the shards"


def test_golden_trees() -> None:
    assert whole_tree((0, 8)) == "(((0+1)+(2+3))+((4+5)+(6+7)))"
    assert whole_tree((0, 6)) == "(((0+1)+(2+3))+(4+5))"
    assert [subtree_roots(owned_shards(8, 3, rank), 8) for rank in range(3)] == [
        ((0, 2), (2, 3)),
        ((3, 4), (4, 6)),
        ((6, 8),),
    ]


def test_halves_that_do_not_meet_where_the_tree_splits_are_no_siblings() -> None:
    assert are_siblings((0, 4), (4, 6), 6)
    assert not are_siblings((0, 3), (3, 6), 6), "the root of six shards splits at four"
    assert not are_siblings((0, 1), (1, 4), 8)


def test_neighbours_of_different_parents_are_no_siblings() -> None:
    assert are_siblings((0, 2), (2, 4), 8)
    assert not are_siblings((2, 4), (4, 6), 8)
    assert not are_siblings((0, 1), (2, 3), 8)
    assert not are_siblings((2, 3), (1, 2), 8)


@given(st.integers(1, 24), st.integers(1, 24))
def test_rounds_of_pairs_are_the_tree_itself(shards: int, ranks: int) -> None:
    """Where ranks may pair up, every rank ends with the root, added as the tree adds."""
    rounds = rounds_of_pairs(shards, ranks) if ranks <= shards else None
    if rounds is None:
        return
    roots = [subtree_roots(owned_shards(shards, ranks, rank), shards) for rank in range(ranks)]
    held = [root for (root,) in roots]
    for number in range(rounds):
        pairs = [sorted((held[rank], held[rank ^ (1 << number)])) for rank in range(ranks)]
        assert all(are_siblings(left, right, shards) for left, right in pairs)
        held = [(left[0], right[1]) for left, right in pairs]
    assert set(held) == {(0, shards)}


def test_which_ranks_pair_up_on_8_shards() -> None:
    found = [rounds_of_pairs(8, ranks) for ranks in range(1, 9)]
    assert found == [0, 1, None, 2, None, None, None, 3]
    assert rounds_of_pairs(12, 4) is None, "3 shards each are no subtree of 8 | 4"
