"""Digests on the way: the same rows on any number of ranks, and one that differs is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allranks.job.config import resolve
from allranks.job.run_folder import read_events, read_rows
from allranks.launcher.start import Result, run_job
from allranks.torch.checkpoint.plan import WritePart
from allranks.torch.checkpoint.state import NAMES
from allranks.torch.witness.digests import MASK, _keys, _summed, _summed_there, part_digest
from allranks.training.record.digests import NAME, broken_link, chain_of, differing, read_digests

Train = Callable[..., Result]
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex128]
DIGESTS = {"digest_every": 3, "checkpoint_every": 4, "steps": 12, "bitwise": True}
IMAGES = "contract_tasks:Images"


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape).mul(9).to(dtype)


def digest(tensor: torch.Tensor, box: tuple[slice, ...] | None = None, name: str = "w") -> int:
    shape = tuple(tensor.shape)
    box = box or tuple(slice(0, n) for n in shape)
    offsets = tuple(s.start for s in box)
    sizes = tuple(s.stop - s.start for s in box)
    return part_digest(
        WritePart(f"common/model/{name}", NAMES[tensor.dtype], shape, offsets, sizes), tensor[box]
    )


@given(st.lists(st.integers(1, 9), max_size=4).map(tuple), st.sampled_from(TYPES), st.data())
def test_the_parts_of_a_tensor_add_up_to_its_digest(
    shape: tuple[int, ...], dtype: torch.dtype, data: Any
) -> None:
    tensor, whole = drawn(shape, dtype), tuple(slice(0, n) for n in shape)
    parts = [whole]
    if shape:
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, shape[dim]))
        cuts = (slice(0, at), slice(at, shape[dim]))
        parts = [(*whole[:dim], cut, *whole[dim + 1 :]) for cut in cuts]
    assert sum(digest(tensor, part) for part in parts) & MASK == digest(tensor)


@pytest.mark.parametrize("dtype", TYPES)
def test_any_bit_changes_the_digest(dtype: torch.dtype) -> None:
    tensor = drawn((3, 50), dtype)
    before, there = digest(tensor), tensor.view(-1).view(torch.uint8)
    for bit in range(8) if dtype != torch.bool else range(1):
        for place in range(0, len(there), 7):
            there[place] ^= 1 << bit
            assert digest(tensor) != before
            there[place] ^= 1 << bit
    assert digest(tensor) == before


def test_signs_that_flip_in_many_rows_change_it() -> None:
    tensor = drawn((64, 4), torch.float64)
    before = digest(tensor)
    tensor[:, 1] *= -1
    assert digest(tensor) != before


def test_tensors_that_change_places_change_the_sum() -> None:
    a, b = drawn((3, 4), torch.float32).unbind(0)[:2]
    assert digest(a) + digest(b, name="v") != digest(b) + digest(a, name="v")


def test_a_device_adds_up_alike() -> None:
    words = drawn((70, 3000), torch.float32).view(torch.int32)
    keys = _keys(5, 75, 1), _keys(0, 3000, 2)
    assert _summed(words, *keys) == _summed_there(words, *keys)


def test_what_a_row_does_not_have_is_equal() -> None:
    row = {"step": 3, "weights": "a", "gradients": None, "loss": 1.0}
    assert differing(row, {**row, "gradients": "b"}) == []
    assert differing(row, {**row, "weights": "b", "loss": 2.0}) == ["weights", "loss"]


def test_the_chain_names_the_first_row_that_was_changed() -> None:
    rows: list[dict[str, Any]] = []
    for step in range(3):
        row = {"step": step, "weights": f"{step}"}
        rows.append({**row, "chain": chain_of(row, rows[-1]["chain"] if rows else "")})
    assert broken_link(rows) is None
    assert broken_link([rows[0], rows[2]]) == 2, "a row is missing"
    rows[1]["weights"] = "another"
    assert broken_link(rows) == 1


@pytest.fixture(scope="module")
def alone(server: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of one process that nobody disturbs."""
    run = tmp_path_factory.mktemp("run") / "run"
    run_job(resolve(IMAGES, {**DIGESTS, "run_dir": str(run)}), server)
    return (run / NAME).read_bytes()


def steps_of(content: Path) -> list[int]:
    return [row["step"] for row in read_rows(content)]


@pytest.mark.slow(but=1, most=3)
@pytest.mark.parametrize(
    ("strategy", "ranks"), [("zero1", 3), ("ddp", 2), ("fsdp", 3), ("1f1b", 2), ("hsdp", 4)]
)
def test_the_file_is_the_same_whoever_holds_what(
    train: Train, alone: bytes, strategy: str, ranks: int
) -> None:
    flags = {"strategy": strategy, "ranks": ranks, "first_check": "off", **DIGESTS}
    run = train(IMAGES, **flags).run_dir
    assert steps_of(run / NAME) == [3, 4, 6, 8, 9, 12]
    assert (run / NAME).read_bytes() == alone


@pytest.mark.slow
@pytest.mark.parametrize("elastic", ["", "1:3"])
def test_the_chain_goes_on_after_a_fault(train: Train, alone: bytes, elastic: str) -> None:
    """Also where the leader is lost, and another rank writes on."""
    flags = {"strategy": "ddp", "ranks": 3, "max_restarts": 1, "elastic": elastic, **DIGESTS}
    result = train(IMAGES, inject="kill@rank=0,step=7", **flags)
    assert result.summary["groups" if elastic else "restarts"] == 1
    assert (result.run_dir / NAME).read_bytes() == alone


def test_a_step_that_is_made_again_with_other_bits_is_named(train: Train) -> None:
    """A bit of a weight flips after the checkpoint of step 4, and is right after the restart."""
    inject = "corrupt@step=4 fail@step=7"
    result = train(IMAGES, inject=inject, max_restarts=1, **DIGESTS)
    events = [row for row in read_events(result.run_dir) if row["event"] == "digest_differs"]
    assert [row["step"] for row in events] == [6]
    assert {"weights", "gradients", "loss"} <= set(events[0]["now"])
    rows = read_digests(result.run_dir)
    assert list(rows) == [3, 4, 6, 8, 9, 12] and broken_link(rows.values()) is None


def test_without_digests_there_is_no_file(train: Train) -> None:
    assert not (train(IMAGES, steps=2, digest_every=0, checkpoint_every=1).run_dir / NAME).exists()
