"""Tensor parallelism: every rank of the axis computes a part of each layer, for the same samples.

    plan       which layers are cut, by the task (`tensor_plan`) or found     `tensor_parallel.plan`
    cut        weights cut in place, layers swapped                        `tensor_parallel.cutting`
    forward, backward     the layers exchange activations                   `tensor_parallel.layers`
    reduce     tally over all ranks; gradients over copies of the cut model, if there are several
    norm       squares of cut gradients summed over the axis, of others counted once

What is not cut is the same on every rank of the axis, computed alike from the same activations, and
its gradient too. Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from allranks.errors import RequestError
from allranks.job.placement import Placed
from allranks.strategies.activation_cards import LEAVES
from allranks.strategies.mesh import REPLICATE, TENSOR
from allranks.torch.comm import Comm
from allranks.torch.data.batch import Batch
from allranks.torch.reducers.exact_norm import exact_norm
from allranks.torch.sharding.parameters import check_no_hooks
from allranks.torch.sharding.whole_updates import Divided, WholeUpdates
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.losses import forward
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.base import Strategy
from allranks.torch.tensor_parallel.cutting import CutModel, cut_model
from allranks.torch.tensor_parallel.exchange import Exchange
from allranks.torch.tensor_parallel.layers import shown_whole
from allranks.torch.tensor_parallel.plan import default_plan, given_plan


class Tensors(Strategy):
    """Cut layers over the axis `tensor`. Sends activations, and what the card says."""

    name = "tensor"
    equal_passes = True
    tally_type = torch.float64
    can_be_compiled = False

    def parallelize(self, model: nn.Module) -> nn.Module:
        axis, exact = self.axis(TENSOR), self.context.options["exact"]
        self.exchange = Exchange(axis, LEAVES // axis.size if exact else 0)
        self.cut = CutModel()
        self.steps = 0
        self.device_mesh: Any = None
        if axis.size == 1 and not exact:
            return model
        if self.task.overrides("initialise"):
            raise _no_whole_weights()
        check_no_hooks(model, "--strategy tensor")
        given, parts = self.task.tensor_plan(model), LEAVES if exact else axis.size
        if given is None:
            plan = default_plan(model, parts, even=exact)
        else:
            plan = given_plan(model, parts, given, even=exact)
        if not plan.cuts:
            raise nothing_to_cut(parts)
        if axis.size > 1:
            self.device_mesh = self._device_mesh()
        self.cut = cut_model(model, plan, self.exchange)
        return model

    def _device_mesh(self) -> DeviceMesh:
        """For states alone: what a step exchanges goes through `exchange`."""
        names = [name for name, _ in self.mesh.axes]
        groups = [self.axis(name).counting_group("control") for name in names]
        grid = torch.arange(self.comm.size).view([size for _, size in self.mesh.axes])
        kind = self.comm.device.type
        return DeviceMesh.from_group(groups, kind, grid, mesh_dim_names=tuple(names))

    def prepare(self) -> None:
        self.step.forward = self._forward
        named = dict(self.model.named_parameters())
        cut = {n: Divided(named[n], self.cut.shapes[n], dim) for n, dim in self.cut.dims.items()}
        asked = "--strategy tensor"
        self.wholes = WholeUpdates(self.axis(TENSOR), self.step.optimizer, cut, asked)

    def lay_out(self) -> None:
        if self.axis(TENSOR).size > 1:
            self.kept_whole = self.wholes.find()

    def updating(self, gradients: Gradients) -> AbstractContextManager[None]:
        return self.wholes.gathered()

    def _forward(self, data: Any) -> Any:
        for region in self.cut.regions:
            region.close()
        return forward(self.task, self.step.call, data)

    def forward_backward(self, batch: Batch) -> Tally:
        with self.exchange.opened("gradients"):
            tally = super().forward_backward(batch)
        self.steps += 1
        return tally

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        self.comm.all_reduce(local.tensor).wait()
        sum_over_copies(self.step.parameters, self.axis(REPLICATE))
        return local, CutGradients(self)

    def eval_step(self, data: Any, forward: Callable[[Callable[..., Any], Any], Any]) -> Any:
        for region in self.cut.regions:
            region.close()
        with self.exchange.opened("control"):
            return super().eval_step(data, forward)

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        with shown_whole(self.cut.layers, self.exchange):
            yield

    def messages(self) -> tuple[int, ...]:
        """All-reduced and all-gathered along the tensor axis, gradients, tally, what goes to owners
        and back: of all steps.

        The first two follow the samples of each step.
        """
        exchange, steps = self.exchange, max(1, self.steps)
        gradients = sum(parameter.nbytes for parameter in self.step.parameters)
        tally = self.step.layout.size * torch.float64.itemsize
        moved = steps * self.wholes.most_sent()
        return exchange.reduced, exchange.gathered, steps * gradients, steps * tally, moved

    def promised_bytes(self) -> int:
        """The mean over the steps that were made."""
        return round(super().promised_bytes() / max(1, self.steps))

    def placement(self, *, updated: bool) -> list[Placed]:
        return self.cut.placed(super().placement(updated=updated))

    # --- what a state holds ---------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return self.wholes.told(super().state())

    def as_saved(self, name: str, tensor: Tensor) -> Tensor:
        dim = self.cut.dims.get(name)
        if dim is None or self.device_mesh is None:
            return tensor
        shape = self.cut.shapes[name]
        places = [Replicate()] * (len(self.mesh.axes) - 1) + [Shard(dim)]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            tensor, self.device_mesh, places, run_check=False, shape=shape, stride=stride
        )

    def as_held(self, name: str, saved: Tensor) -> Tensor:
        if isinstance(saved, DTensor):
            return saved.to_local()
        dim = self.cut.dims.get(name)
        return saved if dim is None else self.exchange.own(saved, dim).contiguous()


class CutGradients(Gradients):
    """The gradients of one rank: parts of those that are cut, all of the others."""

    def __init__(self, strategy: Tensors) -> None:
        exact = bool(strategy.context.options["exact"])
        super().__init__(strategy.step.parameters, exact=exact)
        self.comm, self.cut = strategy.exchange.comm, strategy.cut
        self.names = {id(p): name for name, p in strategy.model.named_parameters()}

    def norm(self, *, clips: bool, left_out: bool) -> float:
        """Parts from all ranks of the axis; what all hold from the first. Sends 8 bytes.

        With `exact=yes` it is a sum that no order changes, and sends 40 bytes to each rank.
        """
        counted = [
            parameter.grad.detach()
            for parameter in self.parameters
            if parameter.grad is not None
            and (self.names[id(parameter)] in self.cut.dims or self.comm.rank == 0)
        ]
        if self.exact:
            return exact_norm(counted, self._of_all_ranks)
        squares = [gradient.abs().double().square().sum() for gradient in counted]
        zero = torch.zeros((), dtype=torch.float64, device=self.comm.device)
        total = torch.stack([zero, *squares]).sum()
        self.comm.all_reduce(total, "control").wait()
        return math.sqrt(total)

    def _of_all_ranks(self, row: Tensor) -> Tensor:
        rows = row.new_empty(self.comm.size * row.numel())
        if self.comm.size == 1:
            return row[None]
        self.comm.all_gather(rows, row, "control").wait()
        return rows.view(self.comm.size, -1)


def sum_over_copies(parameters: list[nn.Parameter], copies: Comm) -> None:
    """Sum gradients over the copies of a model, or of a stage; every rank of `copies` calls this.

    A copy that has not used a parameter brings in zeros.
    """
    if copies.size == 1:
        return
    under_way = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter, requires_grad=False)
        parameter.grad = gradient.to_dense() if gradient.is_sparse else gradient
        under_way.append(copies.all_reduce(parameter.grad))
    for pending in under_way:
        pending.wait()


def nothing_to_cut(ranks: int) -> RequestError:
    return RequestError(
        asked=f"--strategy tensor on {ranks} ranks of the tensor axis",
        found="no layer of the model that can be cut into so many parts",
        why="every rank would hold all of it, and compute the same as all others",
        do="fewer ranks or data=…, a plan of your own (tensor_plan), or --strategy ddp",
    )


def _no_whole_weights() -> RequestError:
    return RequestError(
        asked="--strategy tensor with initialise(model, inputs) of the task",
        found="weights that are set from the first batch",
        why="each rank holds a part of them by then",
        do="set them in model(), or --strategy ddp",
    )
