"""Our schedules beside those of `torch.distributed.pipelining`, which takes a second to load."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import contract_workers
from allranks.torch.comm.comm import Comm
from allranks.torch.model.weights import weights_sha256


def as_torch_pipelining(argument: dict[str, Any]) -> None:
    """The gradient of a first step beside `torch.distributed.pipelining.ScheduleGPipe`."""
    with contract_workers._trainer(argument) as trainer:
        task, model = trainer.task, copy.deepcopy(trainer.task.model()).double()
        rank, strategy = trainer.world.rank, trainer.strategy
        ours = dict(strategy.model.named_parameters())
        whole = dict(strategy.full_state())
        model.load_state_dict(whole)
        size = len(strategy.stages.modules[0])
        part = model[:size] if rank == 0 else model[size:]
        batch = next(trainer.batches())
        data = [torch.cat([m.data[n] for m in batch.micros]) for n in (0, 1)]
        stage = PipelineStage(part, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(
            stage,
            len(batch.micros),
            loss_fn=lambda output, target: task.loss(output, [None, target]).mean(),
        )
        if rank == 0:
            schedule.step(data[0])
        else:
            schedule.step(target=data[1])
        theirs = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        strategy.forward_backward(batch)
        assert len(theirs) == 2
        for name, gradient in theirs.items():
            assert ours[name].grad is not None
            torch.testing.assert_close(ours[name].grad, gradient, rtol=1e-12, atol=1e-14)
        trainer.comm.leave_barrier()


def without_tags(argument: dict[str, Any]) -> None:
    """A training whose messages are told apart by their order alone, as those of NCCL are."""
    post = Comm._post

    def tagless(comm: Comm, way: Any, tensor: Any, tag: int, **peer: int) -> Any:
        return post(comm, way, tensor, 0, **peer)

    weights = []
    with pytest.MonkeyPatch.context() as patch:
        for sending in (post, tagless):
            patch.setattr(Comm, "_post", sending)
            with contract_workers._trainer(argument) as trainer:
                for batch in trainer.batches():
                    trainer.step(batch)
                weights.append(weights_sha256(trainer.weights()))
    assert weights[0] == weights[1]
