"""Passes through a model with cut layers and, optionally, cut sequences in its blocks.

Every strategy with a tensor axis constructs one `CutPasses` after its model is cut. With cut
sequences, uncut weights of blocks see this rank's positions. Their gradients are summed over the
tensor axis once, after the passes of a step, and so are those of uncut weights within a block of
columns and a row.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from allranks.torch.comm.comm import Comm
from allranks.torch.model.layers import Scope
from allranks.torch.model.precision import Precision
from allranks.torch.parallel.context.blocks import CutBlocks
from allranks.torch.parallel.tensor.cutting import CutModel
from allranks.torch.parallel.tensor.exchange import TensorExchange
from allranks.torch.parallel.tensor.scattered import ScatteredExchange


def exchange_of(axis: Comm, strategy: str, *, sequence: bool, leaves: int = 0) -> TensorExchange:
    """The collectives of the axis; a single rank cuts no positions."""
    if sequence and axis.size > 1:
        return ScatteredExchange(axis, f"--strategy {strategy}:sequence=yes")
    return TensorExchange(axis, leaves)


class CutPasses:
    """The passes of one rank. `blocks` are those that see its positions, by name.

    Every rank of the axis constructs one, and makes the same passes.
    """

    def __init__(
        self,
        cut: CutModel,
        exchange: TensorExchange,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        precision: Precision,
        scope: Scope,
    ) -> None:
        self.cut, self.exchange = cut, exchange
        self.precision, self.scope = precision, scope
        self.blocks: CutBlocks | None = None
        self.stages: Container[int] | None = None  # the stages with blocks, if there are stages
        self.summed = frozenset(cut.summed)  # the names of weights that see a part of activations
        scope.keys.is_part = cut.is_in_region
        if isinstance(exchange, ScatteredExchange) and blocks:
            exchange.cut = cut.ids
            self.blocks = CutBlocks(exchange, exchange.within, model, dict(blocks))
            self.blocks.check_own_weights(exchange.is_summed)
            uncut = {id(weight) for weight in self.blocks.weights()} - cut.ids()
            self.summed |= {n for n, p in model.named_parameters() if id(p) in uncut}

    def passed(self, run: Callable[[], Any], stage: int = 0) -> Any:
        """The output of the model, or of a stage, by a pass that begins with full activations.

        A stage without blocks cuts no sequences.
        """

        def begun() -> Any:
            self.cut.begin_pass()
            self.exchange.weights.clear()
            return run()

        if self.blocks is None or (self.stages is not None and stage not in self.stages):
            return begun()
        return self.blocks.passed(begun, self.precision, self.scope, stage)

    def entered(self, module: nn.Module) -> list[RemovableHandle]:
        """Call this after `fully_shard`, so that its hooks run inside of a block."""
        if self.blocks is None or module not in self.blocks.blocks.values():
            return []
        return [module.register_forward_pre_hook(self.blocks.passes.enter, prepend=True)]

    def sum_parts(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        """Sum gradients of uncut weights that see positions, or heads, of one rank.

        Call this once a step, while the exchange is open.
        """
        self.exchange.sum_gradients(self.see_parts(names, parameters))

    def see_parts(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter]
    ) -> list[nn.Parameter]:
        """The uncut parameters that see only this rank's part of activations."""
        pairs = zip(names, parameters, strict=True)
        return [parameter for name, parameter in pairs if name in self.summed]

    def close(self) -> None:
        """Restore the blocks of the model."""
        if self.blocks is not None:
            self.blocks.passes.restore()
