"""Context parallelism: the ranks of the axis have the same samples, and parts of each sequence.

    blocks     found, or said by the task (`blocks`); their forward is wrapped
    forward    the sequence is cut before the first block, and gathered after the last
    attention  over all positions, by all-to-all or round a ring    `context_parallel.attention`
    first pass every block, and the output, whole and cut           `context_parallel.proof`
    backward, reduce    that of `ddp` over all ranks: each brings in 1/P of the gradient of its loss

Embeddings, positions, head, loss and the shift of labels see whole sequences, alike on all ranks of
the axis. What goes through the model beside a step (evaluation excepted) goes through it whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from allranks.errors import RequestError
from allranks.strategies.card import Workload
from allranks.strategies.mesh import CONTEXT
from allranks.torch.comm import Comm
from allranks.torch.context_parallel.exchange import SequenceExchange
from allranks.torch.context_parallel.proof import Proof, nothing_to_cut
from allranks.torch.context_parallel.sequence import BlockPasses, Call, CutPass
from allranks.torch.data.batch import Batch
from allranks.torch.expert_parallel.mixture import MixtureOfExperts
from allranks.torch.model.layers import normalising_layers
from allranks.torch.model.shard_dropout import ShardDropout
from allranks.torch.step.losses import forward
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.ddp import DDP


class ContextParallel(DDP):
    """Cut sequences over the axis `context`. Sends activations, and sums gradients as `ddp`."""

    name = "context"
    can_be_compiled = False

    def parallelize(self, model: nn.Module) -> nn.Module:
        self.steps, self.exchange = 0, SequenceExchange(self._own_axis())
        self.calls: dict[tuple[bool, ...], list[Call]] = {}
        self.passes = BlockPasses(self.exchange, self.context.options["attention"], {})
        if self.exchange.comm.size == 1:
            return model
        given = dict.fromkeys(self.task.blocks(model))
        inside = {m for block in given for m in block.modules() if m is not block}
        names = {module: name for name, module in model.named_modules()}
        blocks = {names[m]: m for m in given if m in names and m not in inside}
        if not blocks:
            raise nothing_to_cut(f"no blocks in {type(model).__name__}")
        self._check(model, blocks)
        self.passes = BlockPasses(self.exchange, self.context.options["attention"], blocks)
        for block in blocks.values():
            for layer in block.modules():
                if isinstance(layer, ShardDropout):
                    layer.part_of = self.passes.part_of
        return model

    def _own_axis(self) -> Comm:
        """The ranks of the axis, on a group of their own: gradients are under way meanwhile.

        Copies that read other samples make other numbers of passes, so no meeting counts them.
        """
        axis = self.axis(CONTEXT)
        if axis is self.comm:
            axis = axis.beside()
        elif axis.size > 1:
            axis = dataclasses.replace(axis, meetings=None)
        self._axes[CONTEXT] = axis
        return axis

    def _check(self, model: nn.Module, blocks: dict[str, nn.Module]) -> None:
        norms = normalising_layers(model)
        for name, block in blocks.items():
            if any(module in norms for module in block.modules()):
                raise _batch_norm(f"BatchNorm in the block {name!r}")
            if any(_has_capacity(module) for module in block.modules()):
                raise RequestError(
                    asked="--strategy context",
                    found=f"a MixtureOfExperts with capacity_factor in the block {name!r}",
                    why="which tokens an expert drops depends on all positions of a sequence",
                    do="capacity_factor=None, or --strategy ddp",
                )
        if norms and self.task.batchnorm == "whole":
            raise _batch_norm('batchnorm = "whole"')

    def prepare(self) -> None:
        super().prepare()
        if self.exchange.comm.size > 1:
            self.step.share = 1 / self.exchange.comm.size
            self.step.forward = self._forward

    def _forward(self, data: Any) -> Any:
        return self._passed(partial(forward, self.task, self.step.call, data))

    def _passed(self, run: Callable[[], Any]) -> Any:
        """The output of the model, by a pass in which sequences are cut.

        What is proved holds for the weights that are trained: others may be let in later.
        """
        trained = (weight.requires_grad for weight in self.model.parameters())
        mode = (self.model.training, *trained)
        calls = self.calls.get(mode)
        if calls is None:
            precision = self.context.precision
            rounds = torch.get_float32_matmul_precision() != "highest"
            is_half = precision.compute is not None or rounds
            proof = Proof(self.passes, self.model, self.context.scope, is_half=is_half)
            output, self.calls[mode] = proof.first_pass(run)
            return output
        cut = CutPass(self.exchange, calls)
        with self.passes.passing(cut):
            output = run()
        cut.close()
        return output

    def forward_backward(self, batch: Batch) -> Tally:
        with self.exchange.opened("gradients"):
            tally = super().forward_backward(batch)
        self.steps += 1
        return tally

    def eval_step(self, data: Any, forward: Callable[[Callable[..., Any], Any], Any]) -> Any:
        run = partial(super().eval_step, data, forward)
        return run() if self.exchange.comm.size == 1 else self._passed(run)

    def messages(self) -> tuple[int, ...]:
        """Activations swapped, gathered, all-reduced, passed on; gradients, tally: of all steps."""
        exchange, flats = self.exchange, max(1, self.steps) * sum(super().messages())
        return exchange.swapped, exchange.gathered, exchange.reduced, exchange.passed_on, flats

    def promised_bytes(self) -> int:
        """The mean over the steps that were made."""
        work = Workload(self.messages(), self.comm.size, self.task.shards)
        return round(self.card.bytes_sent(work, self.context.options) / max(1, self.steps))

    def close(self) -> None:
        self.passes.restore()
        super().close()


def _has_capacity(module: nn.Module) -> bool:
    return isinstance(module, MixtureOfExperts) and module.capacity_factor is not None


def _batch_norm(found: str) -> RequestError:
    return RequestError(
        asked="--strategy context",
        found=found,
        why="its statistics would be those of some positions, or of another pass",
        do="LayerNorm, or --strategy ddp",
    )
