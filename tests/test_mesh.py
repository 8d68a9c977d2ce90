"""The mesh: where ranks lie, and which of them share an axis.
Torch's DeviceMesh lays them out alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.strategies.mesh import DATA, REPLICATE, SHARD, Mesh, replicated_mesh

HYBRID = Mesh(((REPLICATE, 2), (SHARD, 3), ("tensor", 2)))
NAMES = ("pipeline", REPLICATE, SHARD, "tensor")


def test_golden_values() -> None:
    assert HYBRID.ranks == 12
    assert HYBRID.place(7) == (1, 0, 1)
    assert HYBRID.group(7, SHARD) == (7, 9, 11)
    assert HYBRID.group(7, REPLICATE) == (1, 7)
    assert HYBRID.group(7, "tensor") == (6, 7)


def test_replicas_and_shards_read_the_global_batch_together() -> None:
    assert HYBRID.size(DATA) == 6
    assert HYBRID.group(7, DATA) == (1, 3, 5, 7, 9, 11)
    assert [rank for rank in range(12) if HYBRID.is_first_of_its_data(rank)] == [0, 2, 4, 6, 8, 10]


def test_an_axis_that_is_not_there_has_one_rank() -> None:
    mesh = replicated_mesh(4)
    assert mesh.size("tensor") == 1
    assert mesh.group(3, "tensor") == (3,)
    assert mesh.group(3, DATA) == (0, 1, 2, 3)
    assert all(mesh.is_first_of_its_data(rank) for rank in range(4))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_it_is_one_arange(sizes: list[int], data: st.DataObject) -> None:
    mesh = Mesh(tuple(zip(NAMES, sizes, strict=False)))
    grid = np.arange(mesh.ranks).reshape(sizes)
    rank = data.draw(st.integers(0, mesh.ranks - 1))
    where = tuple(int(at[0]) for at in np.where(grid == rank))
    assert mesh.place(rank) == where
    for number, (axis, size) in enumerate(mesh.axes):
        row = [*where[:number], slice(None), *where[number + 1 :]]
        assert mesh.group(rank, axis) == tuple(grid[tuple(row)])
        assert len(mesh.group(rank, axis)) == size
    assert rank in mesh.group(rank, DATA)


@pytest.mark.parametrize("axis", [REPLICATE, SHARD, "tensor", DATA])
def test_groups_of_an_axis_share_out_the_ranks(axis: str) -> None:
    groups = {HYBRID.group(rank, axis) for rank in range(HYBRID.ranks)}
    assert sorted(rank for group in groups for rank in group) == list(range(HYBRID.ranks))
