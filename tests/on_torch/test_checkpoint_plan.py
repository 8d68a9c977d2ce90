"""The plain plan of whole tensors,
beside what the planner of torch.distributed.checkpoint makes."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from allranks.checkpoint.commit import ALONE
from allranks.errors import RequestError
from allranks.torch.checkpoint.plan import (
    ELSEWHERE,
    Planner,
    TorchSnapshot,
    WritePart,
    dtensor_plan,
    global_plan,
    read_parts,
)
from counting import calls_of

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def whole(path: str, shape: tuple[int, ...]) -> WritePart:
    return WritePart(path, "F32", shape, (0,) * len(shape), shape)


def elsewhere(part: WritePart) -> WritePart:
    return replace(part, kind=ELSEWHERE)


def planned(ranks: list[list[WritePart]]) -> list[list[WritePart]]:
    texts = [json.dumps([astuple(part) for part in parts]) for parts in ranks]
    return [list(parts) for parts in global_plan([read_parts(text) for text in texts]).parts]


@given(st.lists(SHAPES, max_size=12), st.integers(1, 5), st.lists(SHAPES, max_size=3))
def test_each_part_is_written_once_as_the_planner_of_torch_has_it(
    shapes: list[tuple[int, ...]], ranks: int, own: list[tuple[int, ...]]
) -> None:
    shared = [whole(f"common/{number}", shape) for number, shape in enumerate(shapes)]
    held = [
        [*shared, *(whole(f"own/{rank}/{n}", shape) for n, shape in enumerate(own))]
        for rank in range(ranks)
    ]
    ours, theirs = planned(held), dtensor_plan(held)
    written = [part for parts in ours for part in parts]
    assert sorted(written, key=str) == sorted((p for parts in theirs for p in parts), key=str)
    assert all(part in held[rank] for rank, parts in enumerate(ours) for part in parts)


def test_the_work_is_shared_out_by_bytes() -> None:
    parts = [whole(f"common/{n}", (size,)) for n, size in enumerate((70, 40, 30, 10, 10))]
    sizes = [sum(part.shape[0] for part in own) for own in planned([parts, parts])]
    assert sorted(sizes) == [80, 80]


def test_what_one_rank_holds_is_written_by_it() -> None:
    """A tensor of another stage is known by all ranks and held by one (or several)."""
    first, second, both = (whole(f"common/{name}", (3,)) for name in "abc")
    held = [[first, elsewhere(second), both], [elsewhere(first), second, both]]
    written = planned(held)
    assert first in written[0] and second in written[1]
    assert sorted(len(parts) for parts in written) == [1, 2]
    with pytest.raises(RequestError, match="without storage on any rank"):
        planned([[elsewhere(first)], [elsewhere(first)]])
    with pytest.raises(RequestError, match="not on the other"):
        planned([[first], []])


def test_what_ranks_hold_unlike_is_refused() -> None:
    with pytest.raises(RequestError, match="all ranks hold"):
        planned([[whole("common/a", (2,))], [whole("common/a", (3,))]])
    with pytest.raises(RequestError, match="not on the other"):
        planned([[whole("common/a", (2,))], []])


def _saved(
    planner: Planner, snapshot: TorchSnapshot, step: int, tensors: dict[str, Tensor]
) -> None:
    snapshot.take(planner.plan(step, tensors)[1])


def test_a_tensor_more_costs_a_save_few_calls() -> None:
    """A model may have tens of thousands."""
    first, again = {}, {}
    for count in (10, 110):
        tensors = {f"common/{n}": torch.full((2,), float(n)) for n in range(count)}
        planner, snapshot = Planner(ALONE), TorchSnapshot()
        first[count] = calls_of(partial(_saved, planner, snapshot, 1, tensors))
        again[count] = calls_of(partial(_saved, planner, snapshot, 2, tensors))
        tensors["common/0"].fill_(7.0)
        _saved(planner, snapshot, 3, tensors)
        kept = torch.frombuffer(bytearray(snapshot.data), dtype=torch.float32)
        pieces = snapshot.layout.pieces
        assert {p: kept[pieces[p].begin // 4].item() for p in tensors} == {
            path: tensor[0].item() for path, tensor in tensors.items()
        }
    assert (first[110] - first[10]) / 100 <= 22.5
    assert (again[110] - again[10]) / 100 <= 12
