"""What runs in the ranks of tests/test_sequence_parallel.py: the bytes that autograd keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from allranks.launcher.world import World
from allranks.programs.models.gpt import Block, GPTShape
from allranks.torch.comm.comm import CPU, Comm
from allranks.torch.comm.join import join
from allranks.torch.parallel.context.exchange import Span
from allranks.torch.parallel.tensor.cutting import cut_model
from allranks.torch.parallel.tensor.exchange import TensorExchange
from allranks.torch.parallel.tensor.plan import default_plan
from allranks.torch.parallel.tensor.scattered import ScatteredExchange

SAMPLES, POSITIONS, WIDTH, HEADS = 4, 32, 32, 4


def kept_by(block: nn.Module, hidden: Tensor) -> int:
    """The bytes of all tensors that backward of a block needs, beside its weights."""
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    alive: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(hidden).sum()
    return sum(kept.values())


def cut_block(exchange: TensorExchange) -> nn.Module:
    torch.manual_seed(0)
    shape = GPTShape(vocabulary=4, context=4, width=WIDTH, layers=1, heads=HEADS)
    block = Block(shape)
    if exchange.comm.size > 1:
        cut_model(block, default_plan(block, exchange.comm.size), exchange)
    return block


def kept_activations(argument: dict[str, Any]) -> None:
    """A rank of 4 keeps a quarter in parts of sequences, and without them more than half."""
    comm = join(World.from_environment(), CPU)
    hidden = torch.randn(SAMPLES, POSITIONS, WIDTH, requires_grad=True)
    alone = kept_by(cut_block(TensorExchange(Comm())), hidden)
    whole = kept_by(cut_block(TensorExchange(comm)), hidden)
    exchange = ScatteredExchange(comm, "--strategy tensor:sequence=yes")
    block, span = cut_block(exchange), Span.of(POSITIONS, comm)
    own = span.own_part(hidden, 1).detach().clone().requires_grad_()
    with exchange.within(span):
        part = kept_by(block, own)
    assert 0.25 * alone <= part <= 0.25 * 1.05 * alone, (alone, part)
    assert whole > 0.4 * alone, (alone, whole)
    comm.leave()
