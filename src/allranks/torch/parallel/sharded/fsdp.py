"""Fully sharded data parallelism: every rank holds a part of each weight, and gathers the rest
block by block when it is needed.

`fully_shard` of torch (FSDP2) does it: it cuts every weight along its first axis, gathers those of
a unit before its forward and its backward, and scatters the sums of their gradients. What is left
here: which blocks are units, that sums are sums (the engine divides), that every collective is one
of `Comm`, and a norm of parts. `hsdp` holds the model on K ranks together, and N/K times.
Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277. `reduce=tree` adds as `data.tree` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.hooks import RemovableHandle

from allranks.strategies.card import Workload
from allranks.strategies.mesh import REPLICATE, SHARD, TENSOR
from allranks.strategies.reduction_tree import Span
from allranks.torch.accelerator import is_accelerator
from allranks.torch.checkpoint.state import put_whole
from allranks.torch.context_parallel.blocks import blocks_of
from allranks.torch.data.batch import Batch, Leaf
from allranks.torch.deferred_init.meta_model import move
from allranks.torch.model.precision import Casts
from allranks.torch.optimizers.elementwise import check_fused, check_no_step_hooks
from allranks.torch.optimizers.layerwise import Layerwise
from allranks.torch.parallel.data.reducer import Mean
from allranks.torch.parallel.data.single import Single
from allranks.torch.parallel.data.tree import Tree
from allranks.torch.parallel.sharded.call_order import THE_SUM, CallOrder, CallTrail
from allranks.torch.parallel.sharded.collectives import (
    Filling,
    Gather,
    Scatter,
    UnitSums,
    sizes_of,
    watch,
)
from allranks.torch.parallel.sharded.gradients import Beside, SomeCut, check_no_hooks
from allranks.torch.parallel.sharded.slots import Slots, WeightGuard, is_cut
from allranks.torch.parallel.sharded.state import TwoAxes, device_mesh, mesh_of
from allranks.torch.parallel.sharded.whole_optimizers import Divided, WholeUpdates
from allranks.torch.parallel.sharded.wrap import (
    Outputs,
    check_can_be_cut,
    check_units,
    make_contiguous,
    rows_apart,
    tensors_of,
    units_of,
)
from allranks.torch.parallel.tensor.cutting import CutModel, cut_layers
from allranks.torch.parallel.tensor.passes import CutPasses, exchange_of
from allranks.torch.step.gradients import Gradients, tables_of
from allranks.torch.step.losses import forward
from allranks.torch.step.tally import Tally
from allranks.torch.step.trainable import unfrozen_on_the_way
from allranks.torch.strategies.base import StrategyContext

CPU = torch.device("cpu")


class FSDP(Single):
    """Gather a unit, use it, let go of it; scatter sums of gradients. One rank cuts nothing."""

    name = "fsdp"
    equal_passes = True
    can_be_compiled = False

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        if not self.shard_alone:  # along the tree it is added up as in one process, in its type
            self.tally_type = torch.float64
        self.is_cut = self.builds_in_turn = self.comm.size > 1
        if self.is_cut:
            self.built_with = replace(context.precision, device=CPU)
        self.policy = OffloadPolicy()
        if context.options["offload"] == "cpu":
            on_gpu = is_accelerator(self.comm.device)
            self.can_run_ahead = False
            self.policy = CPUOffloadPolicy(pin_memory=on_gpu)
        self.most_passes, self.steps, self._evaluates = 1, 0, False
        self.units: list[Any] = []
        self.held: list[list[nn.Parameter]] = []  # by each unit, the root last
        self.order = CallOrder(f"--strategy {self.name}")
        self.trail = CallTrail(f"--strategy {self.name}", self.comm.store_barrier)
        self.cut, self.two_axes = CutModel(), cast("TwoAxes | None", None)
        self.fillings: list[Filling] = []  # for each unit, where torch has no such thing
        self._hooks: list[RemovableHandle] = []

    @property
    def shard_alone(self) -> bool:
        return str(self.context.options.get("reduce")) == "tree"

    def make_groups(self) -> None:
        axes, options = (self.axis(SHARD), self.axis(REPLICATE)), self.context.options
        across = self.name == HSDP.name
        self.sums = UnitSums(options["reduce"], self.comm, self.task.shards, axes, across=across)
        if self.is_cut:
            self.axis(TENSOR)
            self.device_mesh = self._device_mesh()

    def parallelize(self, model: nn.Module) -> nn.Module:
        check_can_be_cut(model, self.name)
        self.can_run_ahead &= not self.sums.keeps_residuals  # a step that is made again has others
        if not self.is_cut:
            self.held = [[p for p in model.parameters() if is_cut(p)]]
            return model
        check_no_hooks(model, f"--strategy {self.name}")
        units = [*units_of(self.task, model), model]
        self._cut_layers(model, units)
        self.slots, shards = Slots(model), self.axis(SHARD)
        self.guard = WeightGuard(model, self.name, shards.rank, shards.size)
        make_contiguous(model, f"--strategy {self.name}", bitwise=self.shard_alone)
        told = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
        reshard, how = self.context.options["reshard"], dict[str, Any](offload_policy=self.policy)
        how["mesh"] = self.device_mesh
        names = {id(module): name for name, module in model.named_modules()}
        casts = Casts(self.comm.device.type) if self.context.precision.compute is not None else None
        for unit in units:
            again = reshard and unit is not model  # backward begins with what forward ended with
            name = repr(names[id(unit)]) if unit is not model else "the rest of the model"
            outputs = Outputs(unit, name, f"--strategy {self.name}")
            self._hooks += [outputs.show(), self.guard.before_free(unit)]
            move(unit, self.comm.device)  # from the host, where it was built
            how["ignored_params"] = {p for p in model.parameters() if not is_cut(p)}
            fully_shard(unit, reshard_after_forward=again, **how)
            self._take_over(unit, name)
            if casts is not None and again:
                self._hooks += casts.follow(unit, tensors_of)
                self.guard.casts[unit] = casts
            self._hooks += [outputs.give_back(), *self.passes.entered(unit)]
            self._hooks.append(self.guard.before_gathering(unit))
        for name, parameter in model.named_parameters():  # others than before
            vars(parameter).update(told[name])  # what a task has noted on them
        self._hooks.append(model.register_forward_hook(self._let_go))
        if casts is not None:
            self._hooks += casts.follow_passes(model)
        return model

    def _cut_layers(self, model: nn.Module, units: list[nn.Module]) -> None:
        """Leave this rank with its part of each layer; what is cut by rows is that part."""
        context, sequence = self.context, bool(self.context.options.get("sequence"))
        self.exchange = exchange_of(self.axis(TENSOR), self.name, sequence=sequence)
        self.exchange.gathers_at_once = True  # a unit may let go of its weights in between
        self.copies: set[int] = set()  # what the first rank of the axis counts in a norm
        blocks: dict[str, nn.Module] = {}
        if self.exchange.comm.size > 1:
            asked = f"--strategy {self.name}:tensor={self.exchange.comm.size}"
            if sequence:
                blocks = blocks_of(self.task, model, asked := f"{asked},sequence=yes")
                check_units(units[:-1], blocks, asked)
            self.cut = cut_layers(self.task, model, self.exchange, asked)
        how = context.precision, context.scope
        self.passes = CutPasses(self.cut, self.exchange, model, blocks, *how)

    def _take_over(self, unit: Any, name: str) -> None:
        """Let a unit sum instead of average, through `Comm`."""
        known = {id(parameter) for held in self.held for parameter in held}
        own = [p for p in unit.parameters() if is_cut(p) and id(p) not in known]
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        shards, kind = self.axis(SHARD), lambda: self.exchange.kind
        gathers, sums = (partial(self.trail.at, f"{what} {name}") for what in ("gathers", "sums"))
        unit.set_custom_all_gather(Gather(shards, kind, gathers))
        unit_sum, apart = self.sums.of(own), lambda: self.step.apart.is_on
        scatter = Scatter(shards, kind, sums, own, unit_sum, apart)
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
        """What DTensors lie on: without the tensor axis, of which `fully_shard` knows nothing."""
        over_both = self.mesh.size(REPLICATE) > 1 and self.sums.replicas is None
        axes = [(n, self.axis(n)) for n in ((REPLICATE, SHARD) if over_both else (SHARD,))]
        if len(axes) == 1:
            return device_mesh(axes[0][1], SHARD)
        return mesh_of(axes, self.comm.size, {REPLICATE: "gradients"})

    def whole_shapes(self) -> dict[int, torch.Size]:
        return self.cut.whole_shapes(self.model)

    def prepare(self) -> None:
        if not self.is_cut:
            return
        self.reducer = (Tree if self.shard_alone else Mean)(self.comm, self.task.shards)
        if self.exchange.comm.size > 1:
            self.two_axes = TwoAxes(self.cut, self.exchange, self.axis(SHARD))
        optimizer, asked = self.step.optimizer, f"--strategy {self.name}"
        check_fused(optimizer, asked)
        if self.passes.blocks is None:  # their proofs look at weights in a pass
            self.guard.is_on = self._is_task_on
        named = self.model.named_parameters()
        cut = {name: Divided(p, p.shape) for name, p in named if isinstance(p, DTensor)}
        if self.two_axes is not None:
            self.step.forward, cut = self._forward, {}
        self.wholes = WholeUpdates(self.axis(SHARD), optimizer, cut, asked)
        if self.step.sparse.positions or self.context.scope.looked_up:
            raise rows_apart(self.name)

    def _is_task_on(self) -> bool:
        """Whether code of the task runs, which is guarded."""
        over_batch = self.step.batch_loss
        is_on = over_batch is not None and over_batch.is_on
        return self._evaluates or self.step.apart.is_on or is_on

    def _forward(self, data: Any) -> Any:
        return self.passes.passed(partial(forward, self.task, self.step.call, data))

    def lay_out(self) -> None:
        if not self.is_cut:
            return
        if self.two_axes is not None:
            self._check_updates(self.two_axes)
        elif self.shard_alone or not isinstance(self.step.optimizer, Layerwise):
            self.kept_whole = self.wholes.find()  # those see whole lengths, but not bit for bit
        else:
            check_no_step_hooks(self.step.optimizer, f"--strategy {self.name}")
        if self.exchange.comm.rank > 0:
            names = zip(self.step.names, self.step.parameters, strict=True)
            self.copies = {id(p) for name, p in names if name not in self.cut.dims}
        step = self.step
        self.sums.lay_out(step.names, step.parameters)
        apart = {id(p) for p in self.passes.see_positions(step.names, step.parameters)}
        self.beside = Beside(self.reducer, step.layout, step.parameters, self.copies - apart)

    def _check_updates(self, two_axes: TwoAxes) -> None:
        two_axes.check_updates(self.step.optimizer, self.model, f"--strategy {self.name}:tensor")

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
        places = self.slots.gathered(self.units, self.held, self.fillings)
        self.guard.lay_out(self.slots, self.units, self.held, places)
        tables = tables_of(self.model) if self.shard_alone else []
        seen = [places.get(id(parameter), parameter) for parameter in parameters]
        self._watching = watch(seen, mark, {id(places[id(table)]) for table in tables})
        return self._watching

    # --- a step ---------------------------------------------------------------------------

    def forward_backward(self, batch: Batch) -> Tally:
        if not self.is_cut:
            return super().forward_backward(batch)
        if self.steps == 0:  # the optimizer, or a callback, may have put some there
            engine = (*self._watching, *self.step.sparse.hooks)
            check_no_hooks(self.model, f"--strategy {self.name}", engine=engine)
        self.step.changes.begin()
        if self.step.changes.late:
            raise unfrozen_on_the_way(self.name)
        for parameter in self.step.parameters:
            parameter.grad = None
        self.beside.begin()
        self.most_passes = max(self.most_passes, batch.passes)
        self.order.begin()
        self.trail.begin()
        self.sums.begin(batch)
        with self.exchange.opened("gradients"):
            tally = self.beside.tally
            self.step.accumulate(batch, lambda leaf: tally, partial(self._leaf_done, batch))
            self.passes.sum_over_positions(self.step.names, self.step.parameters)
        self.sums.end()
        self.guard.check()
        self.guard.compares = False
        self.steps += 1
        return tally

    def recompute(self, batch: Batch) -> Tally:
        if not self.is_cut:
            return super().recompute(batch)
        self.order.begin()
        self.trail.begin()
        with self.exchange.opened("control"), self.sums.uncompressed():
            return super().recompute(batch)

    def _note(self, number: int, *_: Any) -> None:
        self.order.note(number)
        self.exchange.refuses_parts = True  # torch itself looks at parts before its first pass

    def _leaf_done(self, batch: Batch, leaf: Leaf) -> None:
        self.beside.take_gradients()
        if leaf is not batch.leaves[-1]:
            self.beside.leaf_done((leaf.shards.start, leaf.shards.stop))

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        if not self.is_cut:
            return super().reduce(batch, local)
        last = batch.leaves[-1].shards
        with self.trail.at(THE_SUM):
            unread = self.step.rows is not None and self.step.rows.is_on
            self.beside.sum_up((last.start, last.stop), self.order, self.comm.size, unread=unread)
        holders = self.axis(SHARD) if self.two_axes is None else self.comm
        own = {id(p) for p in self.step.parameters if is_cut(p)} - self.copies
        return local, SomeCut(self.step.parameters, holders, own, exact=self.shard_alone)

    def updating(self, gradients: Gradients) -> AbstractContextManager[None]:
        self.sums.before_update(gradients)
        if self.two_axes is not None:
            self._check_updates(self.two_axes)
        return self.wholes.gathered() if self.is_cut else super().updating(gradients)

    def messages(self) -> tuple[int, ...]:
        """Of the root, of all other units, of what is trained of them, and what goes beside it;
        and what goes to owners and back.

        With a tensor axis also what is all-reduced and all-gathered there: the mean of all steps.
        """
        sizes = sizes_of(self.held, self.axis(SHARD).size)
        beside = self.beside.flat.nbytes if self.is_cut else 0
        moved = self.wholes.most_sent() if self.is_cut else 0
        if self.two_axes is None:
            return *sizes, beside, moved
        along = self.exchange.reduced, self.exchange.gathered
        return *sizes, beside, moved, *(round(size / max(1, self.steps)) for size in along)

    def promised_bytes(self) -> int:
        """For a step in which the rank with the most makes as many passes as in any until now."""
        ranks, shards = self.comm.size, self.task.shards
        shapes = tuple(tuple(tuple(p.shape) for p in h if p.requires_grad) for h in self.held)
        work = Workload(self.messages(), ranks, shards, passes=self.most_passes, shapes=shapes)
        return self.card.bytes_sent(work, self.context.options)

    # --- whole weights --------------------------------------------------------------------

    def eval_step(self, data: Any, forward: Callable[[Callable[..., Any], Any], Any]) -> Any:
        """All ranks call this equally often: gathers every unit, and compares their order."""
        if not self.is_cut:
            return super().eval_step(data, forward)
        self.order.begin()
        self.trail.begin()
        output = self.passes.passed(partial(super().eval_step, data, forward))
        self.order.check_on_all(self.comm)
        return output

    def held_weights(self) -> AbstractContextManager[None]:
        return self.exchange.closed() if self.is_cut else super().held_weights()

    @contextmanager
    def evaluation_pass(self) -> Iterator[None]:
        if not self.is_cut:
            yield
            return
        self._evaluates = True
        try:
            with self.exchange.opened("control"):
                yield
            self.guard.check()
        finally:
            self._evaluates = False
            self._free()

    def _let_go(self, *_: Any) -> None:
        """What was gathered without gradients, the root above all, is not looked at again.

        But by loss and metrics in an evaluation.
        """
        if not (self._evaluates or torch.is_grad_enabled()):
            self._free()

    def _free(self) -> None:
        for unit in self.units:
            unit.reshard()

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Gathers all of the model; autograd leads back to the parts."""
        if not self.is_cut:
            yield
            return
        with self.slots.whole(self.comm.device), self.exchange.opened("control"):
            yield

    def place(self, name: str, part: Tensor, whole: Tensor) -> None:
        put_whole(part, self.cut.part_of(name, whole, self.exchange))

    def as_saved(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if self.two_axes is None else self.two_axes.saved(name, tensor)

    def full(self, name: str, tensor: Tensor) -> Tensor:
        whole = super().full if self.two_axes is None else self.two_axes.full
        return whole(name, tensor.to(self.comm.device))  # where ranks exchange it

    def as_held(self, name: str, saved: Tensor) -> Tensor:
        held = dict(self.model.named_parameters())[name]
        if isinstance(held, DTensor) and self.two_axes is not None:
            return self.two_axes.held(name, saved, held)
        if not isinstance(held, DTensor) or isinstance(saved, DTensor):
            return saved
        return distribute_tensor(saved, held.device_mesh, held.placements, src_data_rank=None)

    def state(self) -> dict[str, Any]:
        return self.wholes.told(super().state()) if self.is_cut else super().state()

    def own_state(self) -> dict[str, Any]:
        return self.sums.own_state()

    def load_own_state(self, state: dict[str, Any]) -> None:
        self.sums.load_own_state(state)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self.is_cut:
            self.guard.close()
            self.passes.close()
        super().close()


class HSDP(FSDP):
    """The same on K ranks; torch sums what they have over all groups of K."""

    name = "hsdp"
