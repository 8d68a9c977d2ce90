"""A loss over the batch: what of all ranks is put together, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from allranks.errors import RequestError
from allranks.torch.data.collate import joined, own_rows, split_rows
from conftest import Train

FLAGS = {"precision": "fp64", "steps": 6, "threads": 1}


def weights(train: Train, task: str, **flags: Any) -> dict[str, Tensor]:
    result = train(f"kinds_tasks:{task}", **{**FLAGS, **flags})
    return load_file(result.run_dir / "weights.safetensors")


@pytest.mark.slow
def test_texts_and_numbers_of_all_ranks_are_put_together_in_order(train: Train) -> None:
    wanted = weights(train, "Named", ranks=1)
    for flags in ({"ranks": 1, "micro_batch": 4}, {"ranks": 2}, {"ranks": 3, "micro_batch": 3}):
        found = weights(train, "Named", **flags)
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-13)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("flags", [{"ranks": 2}, {"ranks": 1, "micro_batch": 4}])
@pytest.mark.parametrize(
    ("task", "match"),
    [
        ("Arrays", r"batch\['names'\] over the whole .*\nfound: a numpy.ndarray"),
        ("Ragged", r"output over the whole .*\nfound: torch.float64 rows of shape"),
    ],
)
def test_what_cannot_be_put_together_is_refused_by_its_name(
    task: str, match: str, flags: dict[str, Any], train: Train
) -> None:
    with pytest.raises(RequestError, match=match):
        weights(train, task, **flags)


def test_columns_and_rows_are_told_apart() -> None:
    value = (torch.zeros(2, 3), [["a"], ["b", "c"]], (["d", "e"], [1, 2]), 0.5, None)
    rows = split_rows(value, 2)
    assert rows.lists == {"[1]": [["a"], ["b", "c"]], "[2][0]": ["d", "e"], "[2][1]": [1, 2]}
    assert rows.fixed == {"[3]": 0.5, "[4]": None}
    other = split_rows((torch.ones(1, 3), [["f"]], (["g"], [3]), 0.5, None), 1)
    whole = joined([rows, other])
    found = whole.rebuilt(whole.tensors, whole.lists)
    assert found[1:] == ([["a"], ["b", "c"], ["f"]], (["d", "e", "g"], [1, 2, 3]), 0.5, None)
    assert found[0].shape == (3, 3)
    for wrong in ((torch.ones(1, 4), *value[1:]), (*value[:3], 0.25, None)):
        refused = own_rows([(value, 2), (wrong, 2)])
        assert isinstance(refused, RequestError)
