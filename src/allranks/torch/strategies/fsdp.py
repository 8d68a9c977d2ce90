"""Fully sharded data parallelism: every rank holds a part of each weight, and gathers the rest
block by block when it is needed.

`fully_shard` of torch (FSDP2) does it: it cuts every weight along its first axis, gathers those of
a unit before its forward and its backward, and scatters the sums of their gradients. What is left
here: which blocks are units, that sums are sums (the engine divides), that every collective is one
of `Comm`, and a norm of parts. `hsdp` holds the model on K ranks together, and N/K times.
Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277. `reduce=tree` adds as `reducers.chunk_tree` says.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.hooks import RemovableHandle

from allranks.errors import RequestError
from allranks.strategies.card import Workload
from allranks.strategies.mesh import REPLICATE, SHARD
from allranks.strategies.reduction_tree import Span
from allranks.torch.data.batch import Batch, Leaf
from allranks.torch.optimizers.layerwise import Layerwise
from allranks.torch.reducers.base import Bucket, Reducer
from allranks.torch.reducers.chunk_tree import PassPlan
from allranks.torch.reducers.mean import Mean
from allranks.torch.reducers.tree import Tree
from allranks.torch.sharding.fsdp_collectives import Filling, Gather, Scatter, padded
from allranks.torch.sharding.fsdp_units import check_can_be_cut, units_of
from allranks.torch.sharding.gradient_parts import CutGradients
from allranks.torch.sharding.parameters import check_no_hooks
from allranks.torch.sharding.whole_updates import Divided, WholeUpdates
from allranks.torch.step.changes import unfrozen_on_the_way
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.context import StrategyContext
from allranks.torch.strategies.single import Single

DIGITS, BASE = 4, 256  # of the order in which units were called: each is sent with its square


class FSDP(Single):
    """Gather a unit, use it, let go of it; scatter sums of gradients. One rank cuts nothing."""

    name = "fsdp"
    equal_passes = True
    can_be_compiled = False

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        if not self.shard_alone:  # along the tree it is added up as in one process, in its type
            self.tally_type = torch.float64
        self.is_cut = self.builds_deferred = self.comm.size > 1
        self.kind = "control"
        self.units: list[Any] = []
        self.held: list[list[nn.Parameter]] = []  # by each unit, the root last
        self.most_passes, self.order = 1, 0
        self.fillings: list[Filling] = []  # for each unit, where torch has no such thing
        self._hooks: list[RemovableHandle] = []

    @property
    def shard_alone(self) -> bool:
        return bool(self.context.options.get("reduce") == "tree")

    def parallelize(self, model: nn.Module) -> nn.Module:
        check_can_be_cut(model, self.name)
        numbers = [p for p in model.parameters() if not p.ndim]  # they cannot be cut
        if not self.is_cut:
            self.held = [[p for p in model.parameters() if p.ndim]]
            return model
        check_no_hooks(model, f"--strategy {self.name}")
        self.slots = [
            (module, name)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.ndim
        ]
        kind: type[Reducer] = Tree if self.shard_alone else Mean
        self.reducer = kind(self.comm, self.task.shards)
        self.plan: PassPlan | None = None
        if self.shard_alone:
            axes = self.axis(SHARD), self.axis(REPLICATE)
            self.plan = PassPlan(self.comm, self.task.shards, *axes)
        told = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
        mesh, reshard = self._device_mesh(), self.context.options["reshard"]
        for unit in (*units_of(self.task, model), model):
            again = reshard and unit is not model  # backward begins with what forward ended with
            fully_shard(unit, mesh=mesh, reshard_after_forward=again, ignored_params=set(numbers))
            self._take_over(unit)
        for name, parameter in model.named_parameters():  # others than before
            vars(parameter).update(told[name])  # what a task has noted on them
        self._hooks.append(model.register_forward_hook(self._let_go))
        return model

    def _take_over(self, unit: Any) -> None:
        """Let a unit sum instead of average, through `Comm`."""
        known = {id(parameter) for held in self.held for parameter in held}
        own = [p for p in unit.parameters() if p.ndim and id(p) not in known]
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        shards, kind = self.axis(SHARD), lambda: self.kind
        unit.set_custom_all_gather(Gather(shards, kind))
        tree = None if self.plan is None else self.plan.tree()
        scatter = Scatter(shards, kind, own, tree, lambda: self.step.apart.is_on)
        unit.set_custom_reduce_scatter(scatter)
        if hasattr(unit, "set_reduce_scatter_unused_params"):
            unit.set_reduce_scatter_unused_params(True)
        else:
            self.fillings.append(Filling(unit))
            self._hooks.append(self.fillings[-1].hook)
        note = partial(self._note, len(self.units))
        self._hooks.append(unit.register_forward_pre_hook(note))
        self.units.append(unit)
        self.held.append(own)

    def _device_mesh(self) -> DeviceMesh:
        """What DTensors lie on. They gather when a state is saved or shown, so that is control."""
        axes = [(name, size) for name, size in self.mesh.axes if name == SHARD or size > 1]
        kinds = {SHARD: "control", REPLICATE: "gradients"}
        groups = [self.axis(name).counting_group(kinds[name]) for name, _ in axes]
        ranks = torch.arange(self.comm.size).view([size for _, size in axes])
        device, names = self.comm.device.type, tuple(name for name, _ in axes)
        if len(axes) == 1:
            return DeviceMesh.from_group(groups[0], device, mesh_dim_names=names)
        return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=names)

    def prepare(self) -> None:
        if not self.is_cut:
            return
        named = self.model.named_parameters()
        cut = {name: Divided(p, p.shape) for name, p in named if isinstance(p, DTensor)}
        asked = f"--strategy {self.name}"
        self.wholes = WholeUpdates(self.axis(SHARD), self.step.optimizer, cut, asked)
        if self.step.sparse.positions or self.context.scope.looked_up:
            raise RequestError(
                asked=f"--strategy {self.name}",
                found="a table whose rows are updated or shortened one by one",
                why="a rank holds some of the rows only",
                do="--strategy ddp, or a dense optimizer and no max_norm",
            )

    def lay_out(self) -> None:
        if not self.is_cut:
            return
        if self.shard_alone or not isinstance(self.step.optimizer, Layerwise):
            self.kept_whole = self.wholes.find()  # those see whole lengths, but not bit for bit
        layout, multiple = self.step.layout, self.reducer.multiple
        self.uncut = [p for p in self.step.parameters if not p.ndim]
        size = layout.size + len(self.uncut) + 2 * DIGITS
        self.flat = layout.like.new_zeros(-(-size // multiple) * multiple, requires_grad=False)
        self.tally = layout.tally(self.flat[: layout.size])
        self.numbers = self.flat[layout.size : layout.size + len(self.uncut)]
        self.digits = self.flat[size - 2 * DIGITS : size]
        self.reducer.prepare([Bucket(self.flat, self.flat)])

    def sum_apart(self, leaves: list[tuple[Span, Tensor]]) -> Tensor:
        if self.is_cut:
            raise unfrozen_on_the_way(self.name)
        return super().sum_apart(leaves)

    def watch_gradients(
        self, parameters: list[nn.Parameter], mark: Callable[[int], None]
    ) -> list[RemovableHandle]:
        """On the gathered weights, which stay the same objects: those of this rank's own pass."""
        if not self.is_cut:
            return super().watch_gradients(parameters, mark)
        slots = {id(module._parameters[name]): (module, name) for module, name in self.slots}
        places = {id(parameter): parameter for parameter in parameters if not parameter.ndim}
        for number, (unit, held) in enumerate(zip(self.units, self.held, strict=True)):
            unit.unshard()
            for parameter in held:
                module, name = slots[id(parameter)]
                places[id(parameter)] = module._parameters[name]  # type: ignore[assignment]
            if self.fillings:
                self.fillings[number].weights = [places[id(parameter)] for parameter in held]
            unit.reshard()
        return [
            places[id(parameter)].register_post_accumulate_grad_hook(
                partial(_see, partial(mark, position))
            )
            for position, parameter in enumerate(parameters)
        ]

    # --- a step ---------------------------------------------------------------------------

    def forward_backward(self, batch: Batch) -> Tally:
        if not self.is_cut:
            return super().forward_backward(batch)
        for parameter in self.step.parameters:
            parameter.grad = None
        self.flat.zero_()
        self.most_passes = max(self.most_passes, batch.passes)
        self.kind, self.order = "gradients", 0
        if self.plan is not None:
            self.plan.begin(batch)
        self.step.accumulate(batch, lambda leaf: self.tally, partial(self._leaf_done, batch))
        if self.plan is not None:
            self.plan.end()
        self.kind = "control"
        return self.tally

    def _note(self, number: int, *_: Any) -> None:
        """A unit is called. Ranks that call them in another order mix their weights."""
        self.order = zlib.crc32(number.to_bytes(4), self.order)

    def _leaf_done(self, batch: Batch, leaf: Leaf) -> None:
        for parameter, number in zip(self.uncut, self.numbers, strict=True):
            if parameter.grad is not None:
                number.copy_(parameter.grad)
                parameter.grad = None
        if leaf is not batch.leaves[-1]:
            self.reducer.launch(0, (leaf.shards.start, leaf.shards.stop), last=False)

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        if not self.is_cut:
            return super().reduce(batch, local)
        own = [float(digit) for digit in self.order.to_bytes(DIGITS)]
        self.digits.copy_(self.digits.new_tensor([*own, *(digit**2 for digit in own)]))
        last = batch.leaves[-1].shards
        self.reducer.launch(0, (last.start, last.stop), last=True)
        self.reducer.finish()
        sums = self.digits.tolist()
        for total, of_squares in zip(sums[:DIGITS], sums[DIGITS:], strict=True):
            if total**2 != of_squares * self.comm.size:  # Cauchy-Schwarz: equal where all are alike
                raise _another_order(self.name)
        for parameter, number in zip(self.uncut, self.numbers, strict=True):
            parameter.grad = number.to(parameter.dtype, copy=True)
        return local, CutGradients(self.step.parameters, self.axis(SHARD), exact=self.shard_alone)

    def updating(self, gradients: Gradients) -> AbstractContextManager[None]:
        return self.wholes.gathered() if self.is_cut else super().updating(gradients)

    def messages(self) -> tuple[int, ...]:
        """Of the root, of all other units, of what is trained of them, and what goes beside it;
        and what goes to owners and back.
        """
        parts = self.axis(SHARD).size
        *units, root = ([(padded(p, parts), p.requires_grad) for p in held] for held in self.held)
        rest = [row for rows in units for row in rows]
        trained = sum(size for size, is_trained in (*rest, *root) if is_trained)
        beside = self.flat.nbytes if self.is_cut else 0
        moved = self.wholes.most_sent() if self.is_cut else 0
        return sum(size for size, _ in root), sum(size for size, _ in rest), trained, beside, moved

    def promised_bytes(self) -> int:
        """For a step in which the rank with the most makes as many passes as in any until now."""
        ranks, shards = self.comm.size, self.task.shards
        work = Workload(self.messages(), ranks, shards, passes=self.most_passes)
        return self.card.bytes_sent(work, self.context.options)

    # --- whole weights --------------------------------------------------------------------

    def eval_step(self, data: Any, forward: Callable[[Callable[..., Any], Any], Any]) -> Any:
        """All ranks call this equally often: gathers every unit, and compares their order."""
        self.order = 0
        output = super().eval_step(data, forward)
        if self.is_cut:
            orders = torch.zeros(self.comm.size, dtype=torch.int64, device=self.comm.device)
            self.comm.all_gather(orders, orders.new_tensor([self.order]), "control").wait()
            if len(set(orders.tolist())) > 1:
                raise _another_order(self.name)
        return output

    def _let_go(self, *_: Any) -> None:
        """What was gathered without gradients, the root above all, is not looked at again."""
        if not torch.is_grad_enabled():
            for unit in self.units:
                unit.reshard()

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Gathers all of the model; autograd leads back to the parts."""
        if not self.is_cut:
            yield
            return
        held: list[Any] = [module._parameters[name] for module, name in self.slots]
        gathered = {id(one): one.full_tensor() for one in {id(one): one for one in held}.values()}
        for (module, name), parameter in zip(self.slots, held, strict=True):
            module._parameters[name] = gathered[id(parameter)]
        try:
            yield
        finally:
            for (module, name), parameter in zip(self.slots, held, strict=True):
                module._parameters[name] = parameter

    def as_held(self, name: str, saved: Tensor) -> Tensor:
        held = dict(self.model.named_parameters())[name]
        if not isinstance(held, DTensor) or isinstance(saved, DTensor):
            return saved
        return distribute_tensor(saved, held.device_mesh, held.placements, src_data_rank=None)

    def state(self) -> dict[str, Any]:
        return self.wholes.told(super().state()) if self.is_cut else super().state()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().close()


class HSDP(FSDP):
    """The same on K ranks; torch sums what they have over all groups of K."""

    name = "hsdp"


def _see(mark: Callable[[], None], parameter: Tensor) -> None:
    """A pass of this rank has finished the gradient of a gathered weight."""
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    mark()


def _another_order(name: str) -> RequestError:
    return RequestError(
        asked=f"--strategy {name}",
        found="ranks that call the blocks of the model in different orders, or other blocks",
        why="the weights of a block are gathered from all ranks when it is called: they were mixed",
        do="let fsdp_units(model) of the task return [], so that they are gathered as one",
    )
