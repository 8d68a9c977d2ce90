"""The global batch: every sample once, the same whatever the ranks, whoever reads it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import batch_kinds
import contract_tasks
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.torch import Trainer
from allranks.torch.data.batch import Cutting
from allranks.torch.data.batches import GlobalBatches
from allranks.torch.data.evaluate import evaluate
from allranks.torch.data.open_data import open_data
from allranks.torch.model.precision import Precision
from allranks.torch.model.weights import weights_sha256
from allranks.training.progress import Progress

FP64 = Precision(torch.device("cpu"), torch.float64)


def batches(ranks: int, rank: int, data: Any = None, workers: int = 0, **changes: Any) -> list[Any]:
    task = contract_tasks.Pictures()
    data = task.train_data() if data is None else data
    opened = open_data(data, task, 5, workers, "train_data")
    fields = {
        "source": opened.source,
        "order": opened.order,
        "batch_size": 24,
        "last_batch": "keep",
        "seed": 5,
        "precision": FP64,
        **changes,
    }
    cutting = Cutting(8, rank, ranks, micro_batch=None, shard_alone=False)
    return list(GlobalBatches(cutting=cutting, **fields).after(Progress(), 2, None))


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_the_shards_of_all_ranks_are_the_data_once_in_each_epoch(ranks: int) -> None:
    parts = [batches(ranks, rank) for rank in range(ranks)]
    epochs: dict[int, list[int]] = {0: [], 1: []}
    for step in zip(*parts, strict=True):
        for batch in step:
            epochs[batch.epoch] += batch.ids.tolist()
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(101))
    assert epochs[0] != epochs[1]
    assert [b.sizes for b in parts[0]][4] == (1, 1, 1, 1, 1, 0, 0, 0)
    one = batches(1, 0)
    for step, whole in zip(zip(*parts, strict=True), one, strict=True):
        rows = [m.data[0] for batch in step for m in batch.micros]
        assert torch.equal(torch.cat(rows), whole.micros[0].data[0]), "augmentation follows ranks"


def test_loader_workers_change_nothing() -> None:
    alone, helped = batches(3, 1), batches(3, 1, workers=2)
    for ours, theirs in zip(alone, helped, strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist()
        for a, b in zip(ours.micros, theirs.micros, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a.data, b.data, strict=True))


def test_every_kind_of_data_gives_the_same_batches() -> None:
    inputs, targets = contract_tasks.Plain().train_data()

    class Plain:
        def __len__(self) -> int:
            return len(inputs)

        def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
            return inputs[number], targets[number]

    task = contract_tasks.Plain()
    kinds = [
        (inputs, targets),
        (inputs.numpy(), targets.numpy()),
        TensorDataset(inputs, targets),
        Plain(),
        batch_kinds.Named(inputs, targets),
        batch_kinds.Data(inputs, targets.numpy(), note=inputs),
    ]
    wanted = [(0, np.array([3, 1]))]
    for kind in kinds:
        (found,) = open_data(kind, task, 0, 0, "train_data").source.batches(wanted)  # type: ignore[union-attr]
        if type(kind).__module__ == "batch_kinds":
            assert type(found) is type(kind)
            found = found.x, found.y
        assert torch.equal(found[0], inputs[[3, 1]])
        assert torch.equal(found[1], targets[[3, 1]])


@pytest.mark.parametrize(
    "data",
    [3, [], (torch.ones(3), torch.ones(4)), (torch.ones(3), "label"), torch.ones(0, 2), iter([1])],
)
def test_data_that_cannot_be_read_is_refused(data: Any) -> None:
    with pytest.raises(RequestError):
        open_data(data, contract_tasks.Plain(), 0, 0, "train_data")


@pytest.mark.parametrize("length", [-1, 4.5, 8.0, "8", None, sys.maxsize + 1])
@pytest.mark.parametrize("name", ["train_data", "eval_data"])
def test_a_length_that_is_none_is_refused(length: Any, name: str) -> None:
    class Odd:
        def __len__(self) -> int:
            return length  # type: ignore[no-any-return]

        def __getitem__(self, number: int) -> int:
            return number

    with pytest.raises(RequestError) as refused:
        open_data(Odd(), contract_tasks.Plain(), 0, 0, name)
    assert refused.value.found == f"Odd, whose __len__ gives {length!r}"


def test_dropping_the_only_batch_is_refused() -> None:
    with pytest.raises(RequestError, match="keep"):
        batches(1, 0, batch_size=200, last_batch="drop")


def test_evaluation_counts_every_sample_once() -> None:
    """Ten samples on a chunk of three: the mean of per-sample values, nothing padded."""

    class Mean(contract_tasks.Plain):
        def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
            return {"target": (batch[1].sum(), len(batch[1]))}

    data = (contract_tasks.made(10, 4), torch.arange(10.0))
    task = Mean()
    with Trainer(task, Job(precision="fp64")) as trainer:
        source = open_data(data, task, 0, 0, "eval_data").source
        found = evaluate(task, trainer.strategy, source, 3)  # type: ignore[arg-type]
        with torch.no_grad():
            output = trainer.strategy.model(data[0])
    assert found["target"] == 4.5
    wanted = (output.squeeze(1) - data[1]).square().mean()
    assert found["loss"] == pytest.approx(float(wanted), rel=1e-12)


class Drawn(contract_tasks.UnevenStream):
    """Shard and number of each sample, and what it drew from torch's own generator."""

    def open(self, shard: int, epoch: int, seed: int, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(skip, 12):
            yield torch.tensor([shard, number]), torch.rand(())


def read_stream(rank: int, ranks: int, done: Progress | None = None) -> list[tuple[Tensor, Tensor]]:
    """The two parts of the batches of one epoch: 12 samples of each of 8 shards, by 24."""
    task = contract_tasks.Uneven()
    opened = open_data(Drawn(), task, 5, 0, "train_data")
    cutting = Cutting(8, rank, ranks, micro_batch=None, shard_alone=False)
    fields = {"batch_size": 24, "last_batch": "keep", "seed": 5, "precision": FP64}
    stream = GlobalBatches(source=opened.source, cutting=cutting, **fields)  # type: ignore[arg-type]
    found = []
    for batch in stream.after(done or Progress(), 1, 4):
        parts = [micro.data for micro in batch.micros]
        found.append((torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])))
    return found


def test_randomness_in_a_stream_belongs_to_its_shard() -> None:
    whole = read_stream(0, 1)
    ranks = [read_stream(rank, 3) for rank in range(3)]
    for step, (numbers, drawn) in enumerate(whole):
        assert torch.equal(numbers, torch.cat([own[step][0] for own in ranks]))
        assert torch.equal(drawn, torch.cat([own[step][1] for own in ranks]))
    everything = torch.cat([drawn for _, drawn in whole])
    assert len(everything.unique()) == len(everything) == 96, "no two draw the same"


def test_a_stream_goes_on_where_it_stood() -> None:
    whole = read_stream(0, 1)
    done = Progress(batch_index=2, step_in_epoch=2)
    for (numbers, drawn), (wanted, was_drawn) in zip(
        read_stream(0, 1, done), whole[2:], strict=True
    ):
        assert torch.equal(numbers, wanted) and torch.equal(drawn, was_drawn)


def test_the_digest_of_weights_is_what_the_documents_say() -> None:
    tensors = [("a", torch.tensor([1.0, -0.0])), ("b", torch.tensor(3))]
    content = b"a\0float32\0" + np.array([1, -0.0], "<f4").tobytes()
    content += b"b\0int64\0" + np.array([3], "<i8").tobytes()

    assert weights_sha256(iter(tensors)) == hashlib.sha256(content).hexdigest()
