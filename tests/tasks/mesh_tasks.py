"""Tasks for a mesh: layers that can be cut, in stages; and what runs in its ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import contract_workers
import tensor_tasks
from allranks.torch import Trainer

__all__ = ["Letters", "Planned", "Stack"]


class Stack(tensor_tasks.Stack):
    """Two blocks, one in each of two stages."""


class Planned(tensor_tasks.Planned):
    """A plan by names of the model, of which stages are made; a penalty on all weights together."""


class Letters(tensor_tasks.Letters):
    """A GPT whose token embedding is in the first stage and in the last, which takes it whole."""

    def stages(self, model: Any, count: int) -> Sequence[nn.Module]:
        if count == 1:
            return [model]
        middle = [model.blocks[n] for n in range(1, count - 1)]
        first = _Embedding(model, model.blocks[:1])
        return [first, *middle, _Logits(model, model.blocks[max(1, count - 1) :])]


class _Embedding(nn.Module):
    def __init__(self, model: Any, blocks: nn.Module) -> None:
        super().__init__()
        self.tokens, self.positions = model.token_embedding, model.position_embedding
        self.drop, self.blocks = model.drop, blocks

    def forward(self, tokens: Tensor) -> Any:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.blocks(self.drop(x))


class _Logits(nn.Module):
    def __init__(self, model: Any, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.norm, self.tokens = blocks, model.norm, model.token_embedding

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


class NoSuchModule(Stack):
    """A plan that names nothing."""

    def tensor_plan(self, model: nn.Module) -> Mapping[str, Any]:
        return {"blocks.*": "column"}


def bytes_and_memory(argument: dict[str, Any]) -> None:
    """The busiest rank sends what the card says; ranks hold all weights, and none more than once.

    With `steps` that end on an uneven batch some replica has no sample in the last one.
    """
    with contract_workers._trainer({**argument, "module": __name__}) as trainer:
        steps = argument["job"]["steps"]
        for batch in trainer.batches():
            trainer.step(batch)
        _compare_bytes(trainer, steps)
        _compare_memory(trainer)


def _compare_bytes(trainer: Trainer, steps: int) -> None:
    comm, strategy = trainer.comm, trainer.strategy
    sent = max(map(float, comm.gather_texts(str(comm.sent_bytes["gradients"] / steps))))
    assert abs(sent - strategy.promised_bytes()) <= comm.size, (sent, strategy.promised_bytes())


def _compare_memory(trainer: Trainer) -> None:
    comm, strategy = trainer.comm, trainer.strategy
    mesh: Any = strategy.mesh
    rows = {r.name: r.shape for r in strategy.placement(updated=True) if r.kind == "parameter"}
    told = [json.loads(text) for text in comm.gather_texts(json.dumps(rows))]
    whole = dict(strategy.full_state())
    for name, parameter in strategy.model.named_parameters():
        del parameter
        holders = [rank for rank in range(comm.size) if name in told[rank]]
        stages = {mesh.group(rank, "pipeline").index(rank) for rank in holders}
        copies = mesh.size("replicate")
        held = sum(torch.Size(told[rank][name]).numel() for rank in holders)
        is_cut = told[holders[0]][name] != list(whole[name].shape)
        each = 1 if is_cut else mesh.size("tensor")
        assert held == len(stages) * copies * each * whole[name].numel(), name
    kept = sum(len(values) for values in strategy.step.optimizer.state.values())
    assert kept == 3 * len(rows)  # AdamW keeps three values for each, and none for the rest
