"""Loops of one's own that leave something out, as each rank runs them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import SGD

import contract_tasks
from allranks.errors import PeerLost, RequestError
from allranks.job.job import Job
from allranks.torch import Trainer
from allranks.torch.comm import comm


def _leader_evaluates_alone() -> None:
    with Trainer(contract_tasks.Images()) as trainer:
        for batch in trainer.batches(steps=2):
            trainer.step(batch)
        if trainer.world.is_leader:
            trainer.evaluate()


def alone(_: Any) -> int:
    """In a rank: the leader evaluates alone, after the loop."""
    with pytest.raises(RequestError, match="on every rank") as raised:
        _leader_evaluates_alone()
    assert "rank 1 at the end of the training" in raised.value.found
    return 0


def _leader_looks_alone() -> None:
    with Trainer(contract_tasks.Images()) as trainer:
        for batch in trainer.batches(steps=1):
            trainer.step(batch)
        if trainer.world.is_leader:
            trainer.whole_model().__enter__()


def whole_alone(_: Any) -> int:
    """In a rank: the leader looks at the whole model alone, after the loop."""
    with pytest.raises(RequestError, match="on every rank") as raised:
        _leader_looks_alone()
    assert "rank 0 at whole_model()" in raised.value.found
    return 0


def whole_of_parts(_: Any) -> int:
    """In a rank: no second model can be built of one that is given."""
    data = contract_tasks.made(64, 4), contract_tasks.made(64, 1)
    with Trainer.from_parts(
        nn.Linear(4, 1),
        lambda model: SGD(model.parameters(), lr=0.1),
        loss=lambda output, batch: (output - batch[1]).square().mean(1),
        train_data=data,
        job=Job(strategy="fsdp"),
    ) as trainer:
        with pytest.raises(RequestError, match=r"trainer\.weights"):
            trainer.whole_model().__enter__()
        assert {name: w.shape for name, w in trainer.weights()}["weight"] == (1, 4)
        for batch in trainer.batches(epochs=1):
            trainer.step(batch)
    return 0


def _late_then_alone() -> None:
    with Trainer(contract_tasks.Images()) as trainer:
        for batch in trainer.batches():
            if not trainer.world.is_leader:
                time.sleep(0.5)  # slow in a step and before a meeting, which proves nothing
            trainer.step(batch)
            if batch.index == 0 or trainer.world.is_leader:
                trainer.evaluate()


def alone_on_the_way(environment: dict[str, str]) -> int:
    """In a rank: the leader evaluates alone, and the other one is in the next step."""
    comm.LASTS = timedelta(seconds=0.1)
    if environment:
        os.environ.pop("ALLRANKS_STORE")
        os.environ.update(environment)
    with pytest.raises(RequestError, match="on every rank") as raised:
        _late_then_alone()
    assert raised.value.found == "rank 0 at evaluate() after step 1, rank 1 in `compute` of step 2"
    return 0


@dataclass(kw_only=True)
class Refused(contract_tasks.Plain):
    """A model, or a loss, that rank 1 does not compute."""

    where: str = "loss"

    def _refuse(self, where: str) -> None:
        if where == self.where and os.environ["RANK"] == "1":
            raise ValueError(f"no {where} here")

    def model(self) -> nn.Module:
        self._refuse("model")
        return super().model()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        self._refuse("loss")
        return super().loss(output, batch)


def one_fails(argument: dict[str, str]) -> int:
    """In a rank: rank 1 leaves with an error, and the other one hears which."""
    where, job = argument["where"], Job(strategy=argument["strategy"])
    with pytest.raises((ValueError, PeerLost)) as raised, Trainer(Refused(where=where), job) as one:
        one.step(next(one.batches()))
    if os.environ["RANK"] == "0":
        assert raised.value.__notes__ == [f"rank 1 left first: ValueError: no {where} here"]
    return 0


def others_have_left(_: Any) -> int:
    """In a rank: the leader evaluates, where the other one has left the loop and the trainer."""
    with Trainer(contract_tasks.Images()) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
            break
        if trainer.world.is_leader:
            with pytest.raises(RequestError, match="rank 1 has left the trainer"):
                trainer.evaluate()
    return 0
