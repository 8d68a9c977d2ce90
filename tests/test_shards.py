"""Shard arithmetic: every sample of the global batch is worked on once, whoever owns it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from allranks.strategies.shards import (
    Piece,
    busy_fraction,
    even_sizes,
    largest_shard,
    micro_batches,
    owned_shards,
)

SHARD_SIZES = st.dictionaries(st.integers(0, 30), st.integers(0, 40), max_size=12).map(
    lambda sizes: dict(sorted(sizes.items()))
)


@given(total=st.integers(0, 5000), parts=st.integers(1, 64))
def test_even_sizes_are_as_even_as_can_be_the_longer_first(total: int, parts: int) -> None:
    sizes = even_sizes(total, parts)
    assert sum(sizes) == total and len(sizes) == parts
    assert sizes[0] - sizes[-1] <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(shards=st.integers(1, 64), data=st.data())
def test_spans_of_all_ranks_cover_the_shards_once(shards: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, shards))
    owned = [owned_shards(shards, ranks, rank) for rank in range(ranks)]
    assert [shard for span in owned for shard in span] == list(range(shards))
    assert all(owned), "as long as there are shards enough, no rank is without work"


def test_golden_spans_and_sizes() -> None:
    assert even_sizes(5, 8) == (1, 1, 1, 1, 1, 0, 0, 0)
    assert [list(owned_shards(8, 3, rank)) for rank in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert largest_shard(100, 8) == 13


def test_the_busy_part_of_the_time() -> None:
    assert [busy_fraction(8, ranks) for ranks in (1, 2, 4, 8)] == [1, 1, 1, 1]
    assert busy_fraction(8, 6) == 8 / 12


@given(sizes=SHARD_SIZES, limit=st.none() | st.integers(1, 50))
def test_micro_batches_hold_every_sample_once_and_in_order(
    sizes: dict[int, int], limit: int | None
) -> None:
    micros = micro_batches(sizes, limit)
    assert all(micros), "no micro-batch is empty"
    visited = [(p.shard, s) for micro in micros for p in micro for s in range(p.start, p.stop)]
    assert visited == [(shard, s) for shard, size in sizes.items() for s in range(size)]
    for micro in micros:
        assert limit is None or sum(piece.samples for piece in micro) <= limit
        assert all(piece.shard_size == sizes[piece.shard] for piece in micro)
        cut = [piece for piece in micro if piece.samples < piece.shard_size]
        assert not cut or len(micro) == 1, "part of a shard goes through the model alone"


def test_only_a_shard_larger_than_the_limit_is_cut() -> None:
    whole = Piece(0, 0, 4, 4)
    assert micro_batches({0: 4, 1: 4, 2: 4}, 8) == (
        (whole, Piece(1, 0, 4, 4)),
        (Piece(2, 0, 4, 4),),
    )
    assert micro_batches({0: 4}, 3) == ((Piece(0, 0, 3, 4),), (Piece(0, 3, 4, 4),))
    assert micro_batches({0: 4, 1: 0, 2: 0}, None) == ((whole,),)
