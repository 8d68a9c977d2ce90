"""An evaluation counts every sample once: ten of them on four ranks,
of which some may have none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import allranks.torch.accelerator as accelerator
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.torch import Trainer
from decoupled_tasks import Plain
from evaluation_workers import SAMPLES, Words


def wanted() -> dict[str, float]:
    """All samples at once, in plain torch."""
    task = Words()
    data = task.eval_data()
    with Trainer(task, Job(precision="fp64", threads=1)) as trainer, torch.no_grad():
        output = trainer.strategy.model(**task.inputs(data))
    counts = task.weight(data)
    right = (output.argmax(2) == data["text"][:, 1:]) & counts
    losses = task.loss(output, data) * counts
    accuracy = int(right.sum()) / int(counts.sum())
    return {"loss": float(losses.sum() / counts.sum()), "accuracy": accuracy}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("batch_size", "chunk", "chunks"), [(8, 1, 10), (24, 3, 4), (32, 4, 3), (160, 20, 1)]
)
def test_ten_samples_on_four_ranks(
    batch_size: int, chunk: int, chunks: int, on_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """The same to the bit on one rank and on four; exact, though the last chunk is a short one."""
    assert -(-SAMPLES // chunk) == chunks
    for ranks in (1, 4):
        argument = {"out": str(tmp_path), "batch_size": batch_size}
        on_ranks(ranks, "evaluation_workers:ten_samples", argument)
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*-*.json"))]
    assert len(found) == 5 and all(one == found[0] for one in found)
    samples = found[0].pop("samples")
    assert samples * chunks == SAMPLES, "each is in one chunk"
    assert found[0] == pytest.approx(wanted(), rel=1e-12)


def test_the_host_waits_for_a_device_once_and_not_in_each_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums and counts stay where they are until all chunks are over, and are the same numbers."""
    with Trainer(Words(batch_size=8), Job(precision="fp64", threads=1)) as trainer:
        there = trainer.evaluate()
        item = torch.Tensor.item
        asked = list[str]()
        monkeypatch.setattr(accelerator, "holds", lambda tensor: True)
        monkeypatch.setattr(
            torch.Tensor, "item", lambda tensor: (asked.append("item"), item(tensor))[1]
        )
        assert trainer.evaluate() == there and asked == []


def test_a_metric_of_a_negative_count_is_refused_before_the_first_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Words, "metrics", lambda *given: {"hits": (1.0, -5)})
    with (
        Trainer(Words(batch_size=8), Job(threads=1)) as trainer,
        pytest.raises(RequestError, match="hits with a count of -5"),
    ):
        trainer.rehearse()


class Writes(nn.Linear):
    """A layer that writes whatever can be written, in evaluations too; not all of it is counted."""

    def __init__(self) -> None:
        super().__init__(6, 1)
        self.passes = 0
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        self.passes += 1
        self.mean = self.mean + input.mean()
        self.weight.data.clamp_(-1e-3, 1e-3)
        return super().forward(input)


class WritesAnywhere(Plain):
    """Its metrics count, too."""

    evaluations = 0

    def model(self) -> nn.Module:
        return Writes()

    def metrics(self, output: Any, batch: Any) -> dict[str, Any]:
        self.evaluations += 1
        return {"size": (output.sum(), len(output))}


@pytest.mark.parametrize("strategy", ["single", "zero1", "fsdp"])
def test_a_rehearsal_leaves_no_trace(strategy: str) -> None:
    """What trains would begin elsewhere for having been looked at."""
    with Trainer(WritesAnywhere(), Job(threads=1, strategy=strategy)) as trainer:

        def state() -> Any:
            layer = next(m for m in trainer.strategy.model.modules() if isinstance(m, Writes))
            counted = layer.passes, vars(trainer.task).get("evaluations")
            return counted, {name: w.tolist() for name, w in trainer.weights()}

        before = state()
        trainer.rehearse()
        assert state() == before
