"""Context parallelism: the ranks of the axis have the same samples, and parts of each sequence.

    blocks     by default, or by the task (`blocks`); their forward is wrapped
    forward    the sequence is cut before the first block, and gathered after the last
    attention  over all positions, by all-to-all or round a ring    `attention`
    first pass compares every block, and the output, full and cut   `blocks`
    backward, reduce    as in `ddp` over all ranks: each adds 1/P of the gradient of its loss

Embeddings, positions, head, loss and the shift of labels see full sequences, the same on all ranks
of the axis. Passes outside of a step, except evaluation, use full sequences too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from allranks.strategies.card import Workload
from allranks.strategies.mesh import CONTEXT
from allranks.torch.comm.comm import Comm
from allranks.torch.data.batch import Batch
from allranks.torch.parallel.context.attention import Intercepted, attention_of
from allranks.torch.parallel.context.blocks import CutBlocks, blocks_of
from allranks.torch.parallel.context.exchange import ContextExchange, Span
from allranks.torch.parallel.data.ddp import DDP
from allranks.torch.step.tally import Tally


class ContextParallel(DDP):
    """Cut sequences over the axis `context`. Sends activations, and sums gradients as `ddp`."""

    can_be_compiled = computes_alone = has_whole_passes = False

    def parallelize(self, model: nn.Module) -> nn.Module:
        folds = self.context.options["attention"] == "zig-zag"
        self.steps, self.exchange = 0, ContextExchange(self._own_axis(), folds=folds)
        self.blocks: CutBlocks | None = None
        if self.exchange.comm.size > 1:
            blocks = blocks_of(self.task, model, self.exchange.asked)
            self.blocks = CutBlocks(self.exchange, self._attending, model, blocks)
        return model

    def _attending(self, span: Span) -> Intercepted:
        """Within, attention is over the positions of all ranks."""
        by = self.context.options["attention"]
        return Intercepted(attention_of(by, self.exchange, span))

    def _own_axis(self) -> Comm:
        """The ranks of the axis, on a separate group, as gradients are in flight meanwhile.

        Copies that read other samples make other numbers of passes, so no barrier counts them.
        """
        axis = self.axis(CONTEXT)
        if axis is self.comm:
            axis = axis.duplicate()
        elif axis.size > 1:
            axis = dataclasses.replace(axis, store_barrier=None)
        self._axes[CONTEXT] = axis
        return axis

    def prepare(self) -> None:
        super().prepare()
        if self.blocks is not None:
            self.step.share = 1 / self.exchange.comm.size

    def passed(self, run: Callable[[], Any], stage: int = 0) -> Any:
        if self.blocks is None:
            return run()
        return self.blocks.passed(run, self.context.precision, self.context.scope)

    def forward_backward(self, batch: Batch) -> Tally:
        with self.exchange.opened("gradients"):
            tally = super().forward_backward(batch)
        self.steps += 1
        return tally

    def workload(self) -> Workload:
        """Bytes swapped, gathered, all-reduced, passed on; of gradients, tally: of all steps."""
        exchange, steps = self.exchange, max(1, self.steps)
        nbytes = exchange.swapped, exchange.gathered, exchange.reduced, exchange.passed_on
        return self.work(*nbytes, steps * sum(super().workload().messages), steps=steps)

    def close(self) -> None:
        if self.blocks is not None:
            self.blocks.passes.restore()
        super().close()
