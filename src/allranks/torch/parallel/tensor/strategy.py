"""Tensor parallelism: every rank of the axis computes a part of each layer, for the same samples.

    plan       which layers are cut, by the task (`tensor_plan`) or default   `plan`
    cut        weights cut in place, layers swapped                        `cutting`
    forward, backward     the layers exchange activations                   `layers`
    sequence   with `sequence=yes` positions are cut between regions     `scattered`
    reduce     gradients over copies of the cut model, if there are several; tally over all ranks
    norm       squares of cut gradients, of others counted once: summed with the tally

Layers that are not cut are the same on every rank of the axis: all compute them, and their
gradients, from the same activations. Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from allranks.strategies.card import Workload
from allranks.strategies.cards.model_parallel import LEAVES
from allranks.strategies.mesh import REPLICATE, TENSOR
from allranks.torch.comm.comm import Comm
from allranks.torch.data.batch import Batch
from allranks.torch.model.reals import reals
from allranks.torch.parallel.context.blocks import blocks_of
from allranks.torch.parallel.data.buckets import grouped
from allranks.torch.parallel.sharded.gradients import SomeCut, squares_of, summed_with_tally
from allranks.torch.parallel.sharded.whole_optimizers import WholeUpdates
from allranks.torch.parallel.tensor.cutting import CutModel, cut_layers
from allranks.torch.parallel.tensor.passes import CutPasses, exchange_of
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.base import Strategy
from allranks.torch.strategies.layout import Layout, mesh_of

BUCKET_BYTES = 25 * 2**20  # of gradients that copies of the model sum in one message


class Tensors(Strategy):
    """Cut layers over the axis `tensor`. Sends activations, and what the card says."""

    equal_passes = fills_parts = True
    tally_type = torch.float64
    can_be_compiled = False

    def parallelize(self, model: nn.Module) -> nn.Module:
        axis, context, exact = self.axis(TENSOR), self.context, self.context.options["exact"]
        sequence, leaves = context.options["sequence"], LEAVES // axis.size if exact else 0
        self.exchange = exchange_of(axis, self.name, sequence=sequence, leaves=leaves)
        self.can_run_ahead = not exact  # its norm is summed on the host
        self.cut = CutModel()
        self.steps = 0
        blocks: dict[str, nn.Module] = {}
        if axis.size > 1 or exact:
            asked = "--strategy tensor" + (":sequence=yes" if sequence else "")
            blocks = blocks_of(self.task, model, asked) if sequence else {}
            self.cut = cut_layers(self.task, model, self.exchange, asked, LEAVES if exact else 0)
        how = context.precision, context.scope
        self.passes = CutPasses(self.cut, self.exchange, model, blocks, *how)
        axes = [(name, self.axis(name)) for name, _ in self.mesh.axes]
        mesh = mesh_of(self.comm, axes) if axis.size > 1 else None
        self.layout = Layout(axis, self.cut.cuts, mesh, self.exchange.all)
        return model

    def prepare(self) -> None:
        named = dict(self.model.named_parameters())
        axis, cuts, optimizer = self.axis(TENSOR), self.cut.cuts, self.step.optimizer
        self.wholes = WholeUpdates(axis, optimizer, named, cuts, "--strategy tensor")
        self.layout.kept_whole = self.wholes.here

    def lay_out(self) -> None:
        if self.axis(TENSOR).size > 1:
            self.wholes.find()

    def updating(self, gradients: Gradients) -> AbstractContextManager[None]:
        return self.wholes.gathered()

    def passed(self, run: Callable[[], Any], stage: int = 0) -> Any:
        return self.passes.passed(run)

    def forward_backward(self, batch: Batch) -> Tally:
        with self.exchange.opened("gradients"):
            tally = super().forward_backward(batch)
            self.passes.sum_parts(self.step.names, self.step.parameters)
        self.steps += 1
        return tally

    def recompute(self, batch: Batch) -> Tally:
        with self.exchange.opened("control"):
            return super().recompute(batch)

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        copies, axis = self.axis(REPLICATE), self.axis(TENSOR)
        sum_over_copies(self.step.parameters, copies)
        names = dict(self.model.named_parameters())
        cut = {id(names[name]) for name in self.cut.cuts}
        exact = bool(self.context.options["exact"])
        gradients = CutGradients(self.step.parameters, axis, cut, exact=exact)
        if exact:
            self.comm.all_reduce(local.tensor).wait()
            return local, gradients
        counted = gradients.counted() if copies.rank == 0 else []
        squares = squares_of(counted, local.tensor.device)
        tally, gradients.known_norms = summed_with_tally(local, squares, self.comm)
        return tally, gradients

    def held_weights(self) -> AbstractContextManager[None]:
        return self.exchange.closed()

    def evaluation_pass(self) -> AbstractContextManager[None]:
        return self.exchange.opened("control")

    def whole_weights(self) -> AbstractContextManager[None]:
        return self.exchange.opened("control")

    def workload(self) -> Workload:
        """Bytes all-reduced and all-gathered along the tensor axis, of gradients, of the tally, and
        to owners and back: of all steps.

        The first two depend on the samples of each step.
        """
        exchange, steps = self.exchange, max(1, self.steps)
        gradients = sum(parameter.nbytes for parameter in self.step.parameters)
        norm = not self.context.options["exact"]  # sent with the tally
        tally = (self.step.layout.size + norm) * torch.float64.itemsize
        moved = steps * self.wholes.most_sent()
        along = exchange.reduced, exchange.gathered
        return self.work(*along, steps * gradients, steps * tally, moved, steps=steps)

    def close(self) -> None:
        self.passes.close()
        super().close()


class CutGradients(SomeCut):
    """The gradients of one rank: parts of those that are cut, all of the others."""

    def norm(self, *, clips: bool, left_out: bool) -> float:
        """With `exact=yes` it is a sum that does not depend on the order."""
        return super().norm(clips=clips or self.exact, left_out=left_out)


def sum_over_copies(parameters: list[nn.Parameter], copies: Comm) -> None:
    """Sum gradients over the copies of a model, or of a stage; every rank of `copies` calls this.

    A copy that has not used a parameter adds zeros. Messages have up to `BUCKET_BYTES`. Gradients
    keep their own memory: results of kernels depend on alignment.
    """
    if copies.size == 1:
        return
    under_way = []
    for positions in grouped(parameters, BUCKET_BYTES):
        gradients = [_dense_gradient(parameters[position]) for position in positions]
        if len(gradients) == 1:
            under_way.append((copies.all_reduce(gradients[0]), gradients, gradients))
            continue
        numbers = [reals(gradient) for gradient in gradients]
        flat = torch.cat([some.reshape(-1) for some in numbers])
        parts = flat.split([some.numel() for some in numbers])
        sums = [part.view(some.shape) for part, some in zip(parts, numbers, strict=True)]
        under_way.append((copies.all_reduce(flat), numbers, sums))
    for pending, numbers, sums in under_way:
        pending.wait()
        if sums is not numbers:
            torch._foreach_copy_(numbers, sums)


def _dense_gradient(parameter: nn.Parameter) -> Tensor:
    """The dense gradient of a parameter; sets zeros if there is none."""
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter, requires_grad=False)
    gradient = gradient.to_dense() if gradient.is_sparse else gradient.resolve_conj()
    parameter.grad = gradient
    return gradient
