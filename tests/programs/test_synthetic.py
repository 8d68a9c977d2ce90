"""Made-up data: the same seed gives the same batches,
on any number of ranks and from any step on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from allranks.job.job import Job
from allranks.programs.synthetic import BLOCK, Synthetic
from allranks.torch import Trainer
from conftest import Train


def read(seed: int, shard: int = 0, epoch: int = 0, skip: int = 0) -> Iterator[tuple[Any, ...]]:
    task = Synthetic(features=4, classes=3, samples_per_shard=BLOCK + 44)
    yield from task.train_data().open(shard, epoch, seed, skip)


def stacked(samples: Iterator[tuple[Any, ...]]) -> tuple[Tensor, Tensor]:
    inputs, labels = zip(*samples, strict=True)
    return torch.stack(inputs), torch.stack(labels)


def test_the_same_seed_gives_the_same_samples_and_another_does_not() -> None:
    first, again = stacked(read(seed=5)), stacked(read(seed=5))
    assert len(first[0]) == BLOCK + 44
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for other in (read(seed=6), read(seed=5, shard=1), read(seed=5, epoch=1)):
        assert not torch.equal(first[0], stacked(other)[0])
    assert not torch.equal(first[0][:44], first[0][BLOCK:]), "no block is that of before"


@pytest.mark.parametrize("skip", [1, BLOCK - 1, BLOCK, BLOCK + 43])
def test_reading_goes_on_anywhere(skip: int) -> None:
    whole, rest = stacked(read(seed=5)), stacked(read(seed=5, skip=skip))
    assert torch.equal(rest[0], whole[0][skip:]) and torch.equal(rest[1], whole[1][skip:])


def test_batches_of_a_seed_are_the_same_and_new_in_each_step() -> None:
    def batches(seed: int) -> list[Tensor]:
        task = Synthetic(batch_size=16, features=4)
        with Trainer(task, Job(seed=seed, threads=1)) as trainer:
            rows = [[m.data[0] for m in batch.micros] for batch in trainer.batches(steps=3)]
        return [torch.cat(row) for row in rows]

    first, again, other = batches(1), batches(1), batches(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert len({tuple(batch.flatten().tolist()) for batch in first}) == 3


@pytest.mark.slow
def test_the_ranks_share_what_one_would_read(train: Train) -> None:
    settings = ("batch_size=24", "features=6", "width=8")
    digests = {
        train("synthetic", *settings, ranks=ranks, steps=3, bitwise=True).summary["weights_sha256"]
        for ranks in (1, 3)
    }
    assert len(digests) == 1
