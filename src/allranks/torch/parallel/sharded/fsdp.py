"""Fully sharded data parallelism: every rank holds a shard of each weight, and gathers full weights
unit by unit.

Torch's `fully_shard` (FSDP2) cuts every weight along its first axis, gathers those of a unit before
its forward and its backward, and reduce-scatters their gradients. This file adds: which blocks are
units, sums instead of means (the engine divides), collectives of `Comm`, and a norm over shards.
`hsdp` holds N/K copies of the model, each on K ranks.
Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277. `reduce=tree` adds as `data.tree` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from allranks.errors import RequestError
from allranks.strategies.card import Workload
from allranks.strategies.mesh import REPLICATE, SHARD, TENSOR
from allranks.strategies.reduction_tree import Span
from allranks.strategies.shards import Shares
from allranks.torch.accelerator import is_accelerator
from allranks.torch.data.batch import Batch
from allranks.torch.model.deferred_init import move
from allranks.torch.model.precision import Casts
from allranks.torch.optimizers.elementwise import (
    WeightParts,
    check_fused,
    check_no_step_hooks,
    groups_of_whole,
)
from allranks.torch.optimizers.layerwise import Layerwise
from allranks.torch.optimizers.made import OptimizerArguments
from allranks.torch.parallel.context.blocks import blocks_of
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
from allranks.torch.parallel.sharded.gradients import SideMessage, SomeCut, check_no_hooks
from allranks.torch.parallel.sharded.slots import Slots, WeightGuard, is_cut
from allranks.torch.parallel.sharded.whole_optimizers import WholeUpdates
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
from allranks.torch.step.tally import Tally
from allranks.torch.step.trainable import unfrozen_on_the_way
from allranks.torch.strategies.base import Strategy, StrategyContext
from allranks.torch.strategies.layout import Cut, TwoAxes, UnitLayout, mesh_of, ranks_of

CPU = torch.device("cpu")


def fsdp(context: StrategyContext) -> Strategy:
    """The strategy `fsdp` on the ranks of `context`."""
    return FSDP(context) if context.comm.size > 1 else OneRankFSDP(context)


class OneRankFSDP(Single):
    """`fsdp` on one rank, which cuts nothing."""

    equal_passes = True
    can_be_compiled = False

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        if not self.shard_alone:
            self.tally_type = torch.float64
        self.can_run_ahead = context.options["offload"] == "none"

    def parallelize(self, model: nn.Module) -> nn.Module:
        check_can_be_cut(model, self.name)
        return model


class FSDP(Strategy):
    """Gather a unit, use it, free it; reduce-scatter gradients."""

    equal_passes = has_whole_passes = builds_in_turn = can_run_ahead = True
    can_be_compiled = False

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        if not self.shard_alone:  # along the tree it is summed as in one process, in its dtype
            self.tally_type = torch.float64
        self.built_with = replace(context.precision, device=CPU)
        self.policy = OffloadPolicy()
        if context.options["offload"] == "cpu":
            on_gpu = is_accelerator(self.comm.device)
            self.can_run_ahead = False
            self.policy = CPUOffloadPolicy(pin_memory=on_gpu)
        self.most_passes, self.steps, self._evaluates = 1, 0, False
        self.units: list[Any] = []
        self.unit_params: list[list[nn.Parameter]] = []  # of each unit, the root last
        self.order = CallOrder(f"--strategy {self.name}")
        self.trail = CallTrail(f"--strategy {self.name}", self.comm.store_barrier)
        self.cut, self.two_axes = CutModel(), cast("TwoAxes | None", None)
        self.optimizer_arguments: OptimizerArguments | None = None
        self.fillings: list[Filling] = []  # for each unit, if torch is older than 2.13
        self._hooks: list[RemovableHandle] = []

    def make_groups(self) -> None:
        both, options = (self.axis(SHARD), self.axis(REPLICATE)), self.context.options
        across = self.name == "hsdp"
        self.sums = UnitSums(options["reduce"], self.comm, self.task.shards, both, across=across)
        shards, tensor = self.axis(SHARD), self.axis(TENSOR)
        self.device_mesh = self._device_mesh()
        if tensor.size > 1:  # the tensor axis varies fastest
            grid = ranks_of(self.comm).view(shards.size, -1).t().contiguous()
            axes = (TENSOR, tensor), (SHARD, shards)
            self.state_mesh = mesh_of(self.comm, axes, grid=grid)

    def parallelize(self, model: nn.Module) -> nn.Module:
        check_can_be_cut(model, self.name)
        self.can_run_ahead &= not self.sums.keeps_residuals  # a repeated step would change them
        check_no_hooks(model, f"--strategy {self.name}")
        units = [*units_of(self.task, model), model]
        self._cut_layers(model, units)
        self.slots, shards = Slots(model), self.axis(SHARD)
        self.guard = WeightGuard(model, self.name, shards.rank, shards.size)
        make_contiguous(model, f"--strategy {self.name}", bitwise=self.shard_alone)
        attributes = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
        reshard, how = self.context.options["reshard"], dict[str, Any](offload_policy=self.policy)
        how["mesh"] = self.device_mesh
        names = {id(module): name for name, module in model.named_modules()}
        casts = Casts(self.comm.device.type) if self.context.precision.compute is not None else None
        for unit in units:
            again = reshard and unit is not model  # backward begins where forward ended
            name = repr(names[id(unit)]) if unit is not model else "the rest of the model"
            outputs = Outputs(unit, name, f"--strategy {self.name}")
            self._hooks += [outputs.show(), self.guard.before_free(unit)]
            move(unit, self.comm.device)  # from the host, where it was built
            how["ignored_params"] = {p for p in model.parameters() if not is_cut(p)}
            fully_shard(unit, reshard_after_forward=again, **how)
            self._use_comm(unit, name)
            if casts is not None and again:
                self._hooks += casts.follow(unit, tensors_of)
                self.guard.casts[unit] = casts
            self._hooks += [outputs.restore(), *self.passes.entered(unit)]
            self._hooks.append(self.guard.before_gathering(unit))
        for name, parameter in model.named_parameters():  # others than before
            vars(parameter).update(attributes[name])  # attributes that a task has set on them
        self._hooks.append(model.register_forward_hook(self._free_after_forward))
        if casts is not None:
            self._hooks += casts.follow_passes(model)
        self.layout = UnitLayout(model, shards)
        if (axis := self.exchange.comm).size > 1:
            cuts, gather = self.cut.cuts, self.exchange.all
            self.layout = self.two_axes = TwoAxes(model, axis, cuts, self.state_mesh, gather)
        return model

    def _cut_layers(self, model: nn.Module, units: list[nn.Module]) -> None:
        """Cut layers over the tensor axis; `fully_shard` then cuts these parts by rows."""
        context, sequence = self.context, bool(self.context.options.get("sequence"))
        self.exchange = exchange_of(self.axis(TENSOR), self.name, sequence=sequence)
        self.exchange.gathers_at_once = True  # a unit may free its weights in between
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

    def _use_comm(self, unit: Any, name: str) -> None:
        """Let a unit sum instead of average, by collectives of `Comm`."""
        known = {id(parameter) for weights in self.unit_params for parameter in weights}
        local = [p for p in unit.parameters() if is_cut(p) and id(p) not in known]
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        shards, kind = self.axis(SHARD), lambda: self.exchange.kind
        gathers, sums = (partial(self.trail.at, f"{verb} {name}") for verb in ("gathers", "sums"))
        unit.set_custom_all_gather(Gather(shards, kind, gathers))
        scatter = Scatter(
            shards, kind, sums, local, self.sums, lambda: self.step.user_backward.is_on
        )
        unit.set_custom_reduce_scatter(scatter)
        if hasattr(unit, "set_reduce_scatter_unused_params"):
            unit.set_reduce_scatter_unused_params(True)
        else:
            self.fillings.append(Filling(unit))
            self._hooks.append(self.fillings[-1].hook)
        note = partial(self._note, len(self.units))
        self._hooks.append(unit.register_forward_pre_hook(note))
        self.units.append(unit)
        self.unit_params.append(local)

    def _device_mesh(self) -> DeviceMesh:
        """The mesh for `fully_shard`, without the tensor axis."""
        over_both = self.mesh.size(REPLICATE) > 1 and self.sums.replicas is None
        axes = [(n, self.axis(n)) for n in ((REPLICATE, SHARD) if over_both else (SHARD,))]
        return mesh_of(self.comm, axes, {REPLICATE: "gradients"})

    def prepare(self) -> None:
        self.reducer = (Tree if self.shard_alone else Mean)(self.comm, self.task.shards)
        optimizer, asked = self.step.optimizer, f"--strategy {self.name}"
        check_fused(optimizer, asked)
        if self.passes.blocks is None:  # their first check reads weights in a pass
            self.guard.is_on = self._is_task_on
        named = self.model.named_parameters()
        params = {name: p for name, p in named if isinstance(p, DTensor)}
        cuts = {name: Cut(torch.empty(p.shape, device="meta")) for name, p in params.items()}
        if self.two_axes is not None:
            cuts = {}
        self.wholes = WholeUpdates(self.axis(SHARD), optimizer, params, cuts, asked)
        self.layout.kept_whole = self.wholes.here
        if self.step.sparse.positions or self.context.scope.looked_up:
            raise rows_apart(self.name)

    def deal(self, shares: Shares) -> None:
        super().deal(shares)
        self.sums.deal(shares)
        self.reducer.deal(shares)

    def _is_task_on(self) -> bool:
        """Whether code of the task runs, for the guard."""
        over_batch = self.step.batch_loss
        is_on = over_batch is not None and over_batch.is_on
        return self._evaluates or self.step.user_backward.is_on or is_on

    def passed(self, run: Callable[[], Any], stage: int = 0) -> Any:
        return run() if self.two_axes is None else self.passes.passed(run)

    def lay_out(self) -> None:
        if self.two_axes is not None:
            self._check_updates()
        elif self.shard_alone or not isinstance(self.step.optimizer, Layerwise):
            self.wholes.find()  # `Layerwise` has full norms, but not bit for bit
        else:
            check_no_step_hooks(self.step.optimizer, f"--strategy {self.name}")
        if self.exchange.comm.rank > 0:
            names = zip(self.step.names, self.step.parameters, strict=True)
            self.copies = {id(p) for name, p in names if name not in self.cut.cuts}
        step = self.step
        self.sums.lay_out(step.names, step.parameters)
        scattered = {id(p) for p in self.passes.see_parts(step.names, step.parameters)}
        copies = self.copies - scattered
        self.side_message = SideMessage(self.reducer, step.layout, step.parameters, copies)

    def _check_updates(self) -> None:
        """Raise `RequestError` for an optimizer that needs parameters which are cut twice.

        It is examined at the first call, and when its hyper-parameters have changed.
        """
        optimizer, asked = self.step.optimizer, f"--strategy {self.name}:tensor"
        arguments = self.optimizer_arguments = self.optimizer_arguments or OptimizerArguments(
            optimizer
        )
        if arguments.is_new() and groups_of_whole(optimizer, asked, self._cut_twice()):
            raise RequestError(
                asked=f"{asked} with {type(optimizer).__name__}",
                found="the update of some rows is another one by themselves",
                why="a parameter is cut over two axes, and nobody gathers it over both",
                do="--strategy fsdp or tensor, or an optimizer that updates every number by itself",
            )

    def _cut_twice(self) -> dict[int, WeightParts]:
        """The cuts of every parameter: along the tensor axis, then each part by rows."""
        shards = self.axis(SHARD).size

        def by_rows(parts: Callable[[Tensor], list[Tensor]], whole: Tensor) -> list[Tensor]:
            return [rows for part in parts(whole) for rows in part.chunk(shards)]

        every = {
            id(p): WeightParts(tuple(p.shape), lambda whole: [whole])
            for p in self.model.parameters()
        }
        return {
            key: WeightParts(cut.shape, partial(by_rows, cut.parts))
            for key, cut in {**every, **self.layout.weight_parts(self.model)}.items()
            if cut.shape
        }

    def sum_apart(self, leaves: list[tuple[Span, Tensor]]) -> Tensor:
        raise unfrozen_on_the_way(self.name)

    def watch_gradients(
        self, parameters: list[nn.Parameter], mark: Callable[[int], None]
    ) -> list[RemovableHandle]:
        """Watch gathered weights, which stay the same objects, for passes of this rank."""
        places = self.slots.gathered(self.units, self.unit_params, self.fillings)
        self.guard.lay_out(self.slots, self.units, self.unit_params, places)
        tables = tables_of(self.model) if self.shard_alone else []
        self._in_passes = [places.get(id(parameter), parameter) for parameter in parameters]
        tables_there = {id(places[id(table)]) for table in tables}
        self._watching = watch(self._in_passes, mark, tables_there)
        return self._watching

    def in_passes(self) -> Sequence[nn.Parameter]:
        """The gathered weights: a gradient is there until backward has summed its unit."""
        return self._in_passes

    # --- a step ---------------------------------------------------------------------------

    def forward_backward(self, batch: Batch) -> Tally:
        if self.steps == 0:  # the optimizer, or a callback, may have added some
            engine = (*self._watching, *self.step.sparse.hooks)
            check_no_hooks(self.model, f"--strategy {self.name}", engine=engine)
        self.step.changes.begin()
        if self.step.changes.late:
            raise unfrozen_on_the_way(self.name)
        for parameter in self.step.parameters:
            parameter.grad = None
        self.side_message.begin()
        self.most_passes = max(self.most_passes, batch.passes)
        self.order.begin()
        self.trail.begin()
        self.sums.begin(batch)
        with self.exchange.opened("gradients"):
            tally = self.side_message.tally
            for leaf in self.step.leaves(batch, tally):
                self.side_message.move_gradients()
                if leaf is not batch.leaves[-1]:
                    self.side_message.leaf_done((leaf.shards.start, leaf.shards.stop))
            if self.passes.summed:
                self.passes.sum_parts(self.step.names, self.step.parameters)
        self.sums.end()
        self.guard.check()
        self.guard.compares = False
        self.steps += 1
        return tally

    def recompute(self, batch: Batch) -> Tally:
        self.order.begin()
        self.trail.begin()
        with self.exchange.opened("control"), self.sums.uncompressed():
            return super().recompute(batch)

    @contextmanager
    def apart_from_steps(self) -> Iterator[None]:
        """Every rank enters this, and makes as many passes."""
        self.order.begin()
        self.trail.begin()
        self.sums.are_dropped = True
        try:
            with self.exchange.opened("control"):
                yield
        finally:
            self.sums.are_dropped = False

    def _note(self, number: int, *_: Any) -> None:
        self.order.note(number)
        self.exchange.refuses_parts = True  # torch itself reads shards before its first pass

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        last = batch.leaves[-1].shards
        with self.trail.at(THE_SUM):
            deferred = self.step.deferred
            unread = deferred is not None and deferred.is_on
            span, ranks = (last.start, last.stop), self.comm.size
            self.side_message.sum_up(span, self.order, ranks, unread=unread)
        holders = self.axis(SHARD) if self.two_axes is None else self.comm
        counted = {id(p) for p in self.step.parameters if is_cut(p)} - self.copies
        return local, SomeCut(self.step.parameters, holders, counted, exact=self.shard_alone)

    def updating(self, gradients: Gradients) -> AbstractContextManager[None]:
        self.sums.before_update(gradients)
        if self.two_axes is not None:
            self._check_updates()
        return self.wholes.gathered()

    def workload(self) -> Workload:
        """Bytes of the root, of all other units, of trained weights, of the side message, and to
        owners and back; with a tensor axis also bytes all-reduced and all-gathered there, the mean
        of all steps. For a step with the largest number of passes so far.
        """
        sizes = sizes_of(self.unit_params, self.axis(SHARD).size)
        side_bytes, moved = self.side_message.flat.nbytes, self.wholes.most_sent()
        along = (self.exchange.reduced, self.exchange.gathered) if self.two_axes else ()
        per_step = [round(n / max(1, self.steps)) for n in along]
        units = ([p for p in unit if p.requires_grad] for unit in self.unit_params)
        shapes = tuple(tuple(tuple(p.shape) for p in unit) for unit in units)
        passes = self.most_passes
        return self.work(*sizes, side_bytes, moved, *per_step, passes=passes, shapes=shapes)

    # --- whole weights --------------------------------------------------------------------

    def eval_step(self, data: Any, forward: Callable[[Callable[..., Any], Any], Any]) -> Any:
        """All ranks call this equally often: gathers every unit, and compares the call order."""
        self.order.begin()
        self.trail.begin()
        output = super().eval_step(data, forward)
        self.order.check_on_all(self.comm)
        return output

    def held_weights(self) -> AbstractContextManager[None]:
        return self.exchange.closed()

    @contextmanager
    def evaluation_pass(self) -> Iterator[None]:
        self._evaluates = True
        try:
            with self.exchange.opened("control"):
                yield
            self.guard.check()
        finally:
            self._evaluates = False
            self._free()

    def _free_after_forward(self, *_: Any) -> None:
        """Free weights that were gathered without gradients, above all those of the root.

        In an evaluation loss and metrics may still read them.
        """
        if not (self._evaluates or torch.is_grad_enabled()):
            self._free()

    def _free(self) -> None:
        for unit in self.units:
            unit.reshard()

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Gathers the full model; differentiable to the shards."""
        with self.slots.whole(self.comm.device), self.exchange.opened("control"):
            yield

    def own_state(self) -> dict[str, Any]:
        return self.sums.own_state()

    def load_own_state(self, state: dict[str, Any]) -> None:
        self.sums.load_own_state(state)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.guard.close()
        self.passes.close()
        super().close()


class HSDP(FSDP):
    """The same within groups of K ranks; torch sums gradients over the groups."""

    def replica_state(self) -> tuple[int, int, dict[str, Any]] | None:
        """`None` also if an optimizer needs whole weights: ranks tell each other what they keep."""
        shards = self.axis(SHARD)
        if self.layout.kept_whole:
            return None
        self.guard.put_parts_back()
        return shards.rank, shards.size, self.state()
