"""A state comes back as it was: keys, types, numbers;
what it cannot hold is refused by its path."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from allranks.checkpoint.export import model_name
from allranks.checkpoint.format import BadCheckpoint, unflatten
from allranks.errors import RequestError
from allranks.torch.checkpoint.state import DTYPES, flatten

KEYS = st.one_of(
    st.integers(), st.text(max_size=4), st.sampled_from(["", "0", "-1", "$tensor", "a/b", "a~1b@"])
)
TENSORS = st.sampled_from(sorted(DTYPES)).map(lambda name: torch.zeros(2).to(DTYPES[name]))
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4))
STATES = st.recursive(
    st.one_of(PLAIN, TENSORS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal, of the same types, in the same order; the tensors are the same objects' content."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.data_ptr() == other.data_ptr() and one.dtype == other.dtype
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or str(one) == str(other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def count(state: Any) -> int:
    if isinstance(state, dict):
        return sum(map(count, state.values()))
    if isinstance(state, (list, tuple)):
        return sum(map(count, state))
    return int(isinstance(state, Tensor))


@given(STATES)
def test_a_state_comes_back_as_it_was(state: Any) -> None:
    skeleton, tensors = flatten(state, "common")
    text = json.dumps(skeleton, allow_nan=False)
    assert len(tensors) == count(state), "every tensor has a path of its own"
    assert all(path == "common" or path.startswith("common/") for path in tensors)
    assert same(unflatten(json.loads(text), tensors), state)


@given(st.text(max_size=8))
def test_the_names_of_a_model_come_back(name: str) -> None:
    _, tensors = flatten({"model": {name: torch.zeros(1)}}, "common")
    assert [model_name(path) for path in tensors] == [name]


def test_tied_tensors_and_ordered_dicts_are_fine() -> None:
    tied = torch.nn.Parameter(torch.ones(2))
    skeleton, tensors = flatten(OrderedDict(a=tied, b=tied), "x")
    assert list(tensors) == ["x/a", "x/b"]
    assert not tensors["x/a"].requires_grad
    assert torch.equal(unflatten(skeleton, tensors)["b"], tied)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (Path("x"), "PosixPath"),
        (b"bytes", "bytes"),
        ({1, 2}, "set"),
        (namedtuple("Pair", "a b")(1, 2), "Pair"),
        (lambda: None, "function"),
        (torch.float32, "dtype"),
        ({True: 1}, "bool"),
        ({(1, 2): 1}, "tuple"),
        (torch.eye(2).to_sparse(), "sparse"),
    ],
)
def test_what_would_need_pickle_is_refused_by_its_path(value: Any, found: str) -> None:
    with pytest.raises(RequestError) as refused:
        flatten({"optimizer": {"state": [0, value]}}, "common")
    assert "common/optimizer/state/1" in refused.value.asked
    assert found in refused.value.found
    assert "cannot be checkpointed without pickle" in refused.value.why


@pytest.mark.parametrize(
    "skeleton",
    [
        {"$tensor": "unknown"},
        {"$tensor": []},
        {"$tuple": 1},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$float": "many"},
        {"$python": "import os"},
    ],
)
def test_what_was_never_written_is_never_read(skeleton: Any) -> None:
    with pytest.raises(BadCheckpoint):
        unflatten([skeleton], {})
