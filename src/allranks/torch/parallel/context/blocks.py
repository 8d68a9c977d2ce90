"""The blocks of a model whose sequences are cut: their checks and their passes.

A strategy creates one `CutBlocks` before its first pass; all ranks of its axis make the same
passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.torch.model.layers import Scope, normalising_layers
from allranks.torch.model.precision import Precision
from allranks.torch.parallel.context.exchange import SequenceExchange, Span
from allranks.torch.parallel.context.proof import Proof
from allranks.torch.parallel.context.refusals import nothing_to_cut
from allranks.torch.parallel.context.sequence import BlockPasses, Call, CutPass
from allranks.torch.parallel.expert.mixture import MixtureOfExperts
from allranks.torch.random.dropout import ShardDropout, TensorPart
from allranks.torch.task import Task


def blocks_of(task: Task, model: nn.Module, asked: str) -> dict[str, nn.Module]:
    """The blocks of a task by name, none within another; raises `RequestError` for those that
    cannot work on a part of a sequence."""
    candidates = dict.fromkeys(task.blocks(model))
    inside = {m for block in candidates for m in block.modules() if m is not block}
    names = {module: name for name, module in model.named_modules()}
    blocks = {names[m]: m for m in candidates if m in names and m not in inside}
    if not blocks:
        raise nothing_to_cut(asked, f"no blocks in {type(model).__name__}")
    norms = normalising_layers(model)
    for name, block in blocks.items():
        if any(module in norms for module in block.modules()):
            raise _batch_norm(asked, f"BatchNorm in the block {name!r}")
        if any(_has_capacity(module) for module in block.modules()):
            raise RequestError(
                asked=asked,
                found=f"a MixtureOfExperts with capacity_factor in the block {name!r}",
                why="which tokens an expert drops depends on all positions of a sequence",
                do="capacity_factor=None, or --strategy ddp",
            )
    if norms and task.batchnorm == "whole":
        raise _batch_norm(asked, 'batchnorm = "whole"')
    return blocks


class CutBlocks:
    """The blocks which compute parts of sequences, in the way that the first pass has proved.

    Blocks run in the context of `inside`. Dropout in them draws for the whole sequence.
    """

    def __init__(
        self,
        exchange: SequenceExchange,
        inside: Callable[[Span], AbstractContextManager[Any]],
        model: nn.Module,
        blocks: dict[str, nn.Module],
    ) -> None:
        self.exchange, self.model = exchange, model
        self.blocks, self.passes = blocks, BlockPasses(exchange, inside, blocks)
        self.calls: dict[tuple[int, tuple[bool, ...]], list[Call]] = {}
        for layer in {layer for block in blocks.values() for layer in block.modules()}:
            if isinstance(layer, ShardDropout):
                layer.part_of = partial(_part_of, layer.part_of, self.passes.part_of)

    def weights(self) -> Iterator[nn.Parameter]:
        """All weights of the blocks, repeated if blocks share them."""
        with self.exchange.closed():
            yield from (w for block in self.blocks.values() for w in block.parameters())

    def check_own_weights(self, is_summed: Callable[[nn.Parameter], bool]) -> None:
        """Raise `RequestError` for a summed weight that is used in blocks and elsewhere: only the
        part of its gradient from the blocks may be summed over the ranks."""
        within = {module for block in self.blocks.values() for module in block.modules()}
        in_blocks = {id(weight): weight for weight in self.weights()}
        for name, module in self.model.named_modules():
            for attr, weight in module.named_parameters(recurse=False):
                if module not in within and id(weight) in in_blocks and is_summed(weight):
                    raise RequestError(
                        asked=self.exchange.asked,
                        found=f"the weight {f'{name}.{attr}'.strip('.')!r}, which a block has, too",
                        why="its gradient is that of some positions in the block, to be summed "
                        "over the ranks, and elsewhere that of all",
                        do="a weight of their own for the blocks, or leave sequence=yes out",
                    )

    def passed(
        self, run: Callable[[], Any], precision: Precision, scope: Scope, stage: int = 0
    ) -> Any:
        """The output of the model, or of a stage, by a pass in which sequences are cut.

        A proof holds for one set of trained weights; it is repeated when that changes.
        """
        with self.exchange.closed():
            trained = [weight.requires_grad for weight in self.model.parameters()]
        mode = stage, (self.model.training, *trained)
        calls = self.calls.get(mode)
        if calls is None:
            rounds = torch.get_float32_matmul_precision() != "highest"
            is_half = precision.compute is not None or rounds
            proof = Proof(self.passes, self.model, scope, is_half=is_half)
            output, self.calls[mode] = proof.first_pass(run)
            return output
        cut = CutPass(self.exchange, calls)
        with self.passes.passing(cut):
            output = run()
        cut.close()
        return output

    def restore(self) -> None:
        """Restore the forwards of the blocks."""
        self.passes.restore()


Which = Callable[[Tensor], TensorPart | None]


def _part_of(features: Which | None, positions: Which, tensor: Tensor) -> TensorPart | None:
    """The part of the whole in `tensor`: some features, or else some positions."""
    part = None if features is None else features(tensor)
    return positions(tensor) if part is None else part


def _has_capacity(module: nn.Module) -> bool:
    return isinstance(module, MixtureOfExperts) and module.capacity_factor is not None


def _batch_norm(asked: str, found: str) -> RequestError:
    return RequestError(
        asked=asked,
        found=found,
        why="its statistics would be those of some positions, or of another pass",
        do="LayerNorm, or --strategy ddp",
    )
