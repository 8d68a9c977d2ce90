"""Every rank has the same data, and what is divided by is what was counted: else it is refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from allranks.errors import ProgramError, RequestError
from allranks.torch.witness.probing import digest_of, digest_of_rows
from allranks.training.same_data import DIGEST_BYTES
from conftest import TASKS, Train
from contract_tasks import made

TASK_FILE = TASKS / "data_tasks.py"


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("shorter", "36 samples on rank 0, 35 on rank 1"),
        ("cut", r"other samples on rank 1 than on rank 0 \(36 on each\)"),
        ("drawn", "other samples on rank 1"),
        ("kind", "Rows on rank 0, tensors on rank 1"),
        ("evaluation", "12 samples on rank 0, 11 on rank 1"),
    ],
)
def test_ranks_with_other_data_are_refused(train: Train, how: str, found: str) -> None:
    with pytest.raises(RequestError, match=found) as raised:
        train(f"{TASK_FILE}:Differs", f"how={how}", ranks=2, steps=2)
    assert "do not cut it by rank" in raised.value.do


@pytest.mark.slow
def test_ranks_with_the_same_data_train(train: Train) -> None:
    assert train(f"{TASK_FILE}:Differs", "how=alike", ranks=3, steps=2).summary["steps"] == 2


def test_large_tensors_are_told_apart_by_rows_that_are_evenly_apart() -> None:
    one = made(DIGEST_BYTES // 2000, 500).half()
    other = one.clone()
    assert one.nbytes < DIGEST_BYTES < 4 * one.nbytes
    many = one.repeat(4, 1), other.repeat(4, 1)
    assert digest_of_rows(many[0]) == digest_of_rows(many[1]) != digest_of(many[0])
    many[1][-1] += 1
    assert digest_of_rows(many[0]) != digest_of_rows(many[1])


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_padding_without_weights_is_refused(train: Train, ranks: int) -> None:
    """On one rank too, where no two batches have the same width."""
    with pytest.raises((RequestError, ProgramError), match=r"and no weight\(batch\)"):
        train(f"{TASK_FILE}:Padded", ranks=ranks, steps=5)


@pytest.mark.slow
def test_padding_with_weights_and_one_width_without_train(train: Train) -> None:
    padded = f"{TASK_FILE}:Padded"
    results = [
        train(padded, "weighted=true", ranks=n, steps=5, precision="fp64") for n in (1, 2, 4)
    ]
    losses = [result.summary["train_loss"] for result in results]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)
    assert train(padded, "width=12", ranks=2, steps=5).summary["steps"] == 5


def test_what_cross_entropy_ignores_is_not_divided_by_in_silence(train: Train) -> None:
    with pytest.raises(RequestError, match="targets of -100"):
        train(f"{TASK_FILE}:Padded", "width=12", "ignored=-100", ranks=1, steps=2)
    settings = ("width=12", "ignored=-100", "weighted=true")
    assert train(f"{TASK_FILE}:Padded", *settings, ranks=2, steps=2).summary["steps"] == 2


@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize("weighs", [False, True])
def test_the_weights_of_the_docs_give_the_mean_of_torch(ignore: bool, weighs: bool) -> None:
    """What docs/tasks.md says to write for `ignore_index`, class weights, and both."""
    output, scale = made(12, 5), made(5, seed=8).abs()
    target = torch.arange(12).remainder(5)
    target[::3] = -100 if ignore else target[::3]
    losses = F.cross_entropy(output, target, reduction="none")
    weight = (target != -100).to(losses.dtype)
    if weighs:
        weight = weight * scale[target.clamp(min=0)]
    wanted = F.cross_entropy(output, target, weight=scale if weighs else None)
    torch.testing.assert_close((losses * weight).sum() / weight.sum(), wanted)
