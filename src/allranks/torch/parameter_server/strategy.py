"""`ps`: servers that hold the weights, workers that pull and push, and a scheduler that leads.

The processes of a job are in no process group: they exchange framed messages (`launcher/messages`),
so no worker blocks when another one dies.

    scheduler (leads)        server, of its pieces           worker
    hands out a part     ->                                  pulls weights; forward, backward
    adds the tallies     <-  adds the parts in order     <-  pushes its gradient; sends its tally
    norm, rates, guard   ->  updates; the next version   ->  pulls …                  (mode=sync)
    counts the steps     <-  applies it at once          <->  divides, clips, pushes, pulls
                                                                                    (mode=async)

`flat` assigns weights to servers and lays them out; `shard` is the arithmetic of a server, with
its part of the optimizer state, `server` its communication and process. `service` assigns chunks to
workers and sends them. `scheduler` leads: each step is a step of the job, so record, evaluation and
checkpoints are those of every strategy. `worker` is a worker's loop, `exchange` what it pulls and
pushes. Tables of rows: `row_table` has their updates, `served_tables` the rows of a server, and
`pulled_tables` the layers of a worker.

A lost worker is no failure while `least` are left, and is restarted. If a server or the scheduler
is lost, workers wait until all weights are loaded again from the checkpoint (`Role`).

This class is the strategy of all three kinds of processes: the layout of the weights, and a `side`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from allranks.strategies.card import Workload
from allranks.strategies.cards.parameter_server import (
    CHANGES,
    IN_STEP,
    ON_WORKER,
    ROWS,
    parts_of_a_step,
)
from allranks.strategies.reduction_tree import Span
from allranks.torch.data.batch import Batch
from allranks.torch.local_sgd.strategies import refuse_without_whole_steps
from allranks.torch.model.layers import normalising_layers
from allranks.torch.optimizers.elementwise import (
    MOST,
    WeightParts,
    check_no_step_hooks,
    groups_of_whole,
)
from allranks.torch.parameter_server.flat import FlatLayout, cut_evenly, placed
from allranks.torch.parameter_server.pulled_tables import find_tables
from allranks.torch.parameter_server.served_tables import (
    PlacedTable,
    ServedTables,
    leave_rows,
    most_bytes,
    placed_tables,
)
from allranks.torch.parameter_server.shard import Shard
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.tally import Tally
from allranks.torch.step.trainable import unfrozen_on_the_way
from allranks.torch.strategies.base import Strategy, StrategyContext
from allranks.training.progress import StepResult


class Side:
    """The part of the strategy that depends on the kind of process; here nothing is communicated.

    A server, and a worker in step, which only computes gradients, keep this one.
    """

    tally: Tally | None = None
    """That of the last passes of this process."""

    def __init__(self, strategy: ParameterServer) -> None:
        self.strategy = strategy

    def forward_backward(self, batch: Batch) -> Tally:
        tally = self.tally = self.compute(batch)
        return tally

    def compute(self, batch: Batch) -> Tally:
        """Forward and backward of a part of a batch, here."""
        return self.strategy.compute(batch)

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        return local, Gradients(self.strategy.parameters)

    def updating(self, gradients: Gradients) -> AbstractContextManager[None]:
        return nullcontext()

    def after_update(self, result: StepResult) -> None:
        """Called after the update of a step."""

    def take_weights(self, *, optimizer: bool = False) -> None:
        """Load the newest weights into the model, and the optimizer state if asked."""

    def put_weights(self) -> None:
        """Send the weights of the model to the servers."""


class ParameterServer(Strategy):
    """The layout of the weights on the servers. Each process sets `workers` at its start."""

    workers = 1
    tables: Sequence[PlacedTable] = ()
    """The tables of which only rows are communicated."""
    handed: dict[str, Any] | None = None
    """The scheduler's state besides weights and optimizer; set by its trainer."""

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self.side, options = Side(self), context.options
        self.in_step = options["mode"] == IN_STEP
        self.updates_on_worker = options["update"] == ON_WORKER
        """Whether workers pull gradients, and update weights of their own."""
        self.pushes_changes = options["mode"] == CHANGES
        """Whether workers train alone, and push the change of their weights."""
        self.rows_travel = options["tables"] == ROWS
        """Whether tables are on servers only."""

    def parallelize(self, model: nn.Module) -> nn.Module:
        if self.rows_travel:
            weights = dict(model.named_parameters())
            tables = [weights[name] for name in find_tables(model)]
            self.context.scope.served = frozenset(map(id, tables))
            self.can_be_compiled = not tables  # rows come by messages, in the middle of forward
            if self.builds_in_turn:
                leave_rows(tables)
        return model

    def prepare(self) -> None:
        step, options = self.step, self.context.options
        if self.rows_travel:
            self.tables = placed_tables(self.model, step.names, step.optimizer)
        self._check()
        groups = step.optimizer.param_groups
        in_rows = {table.position for table in self.tables}
        dense = [at for at in range(len(step.parameters)) if at not in in_rows]
        seen_whole = self._seen_whole(dense)
        uncut = {id(p) for number in seen_whole for p in groups[number]["params"]}
        uncut |= {id(p) for p in step.parameters if not p.is_contiguous()}
        params = [step.parameters[at] for at in dense]
        whole = {n for n, p in enumerate(params) if id(p) in uncut}
        pieces_of_params = placed(params, options["servers"], options["bound"], whole)
        pieces = [replace(piece, position=dense[piece.position]) for piece in pieces_of_params]
        self.layouts = [
            FlatLayout([p for p in pieces if p.server == server], step.parameters)
            for server in range(options["servers"])
        ]
        shapes = [
            (step.names[at], tuple(p.shape), str(p.dtype))
            for at, p in zip(dense, params, strict=True)
        ]
        layout = repr((shapes, pieces, self.tables, type(step.optimizer).__qualname__))
        self.digest = hashlib.sha256(layout.encode()).hexdigest()
        self._placed = list(step.names)

    def _seen_whole(self, dense: Collection[int]) -> Collection[int]:
        """The optimizer's groups which need whole weights of these `dense` positions."""
        optimizer, options, asked = self.step.optimizer, self.context.options, "--strategy ps"
        servers, cuts = options["servers"], dict[int, WeightParts]()
        for parameter in (self.step.parameters[at] for at in dense):
            shape = tuple(parameter.shape)
            if parameter.numel() > MOST:  # a smaller shape shows as well whether it needs wholes
                shape = tuple(min(size, 64) for size in shape)
            if parameter.numel() >= max(options["bound"], servers) and servers > 1:
                cuts[id(parameter)] = WeightParts(shape, partial(_flat_pieces, servers))
        if dense:
            return groups_of_whole(optimizer, asked, cuts)
        check_no_step_hooks(optimizer, asked)
        return ()

    def lay_out(self) -> None:
        """Raises `RequestError` if parameters are trained that are not on the servers."""
        if self.step.names != self._placed:
            raise unfrozen_on_the_way(self.name)

    def _check(self) -> None:
        """Raise `RequestError` for features that need a process which sees a whole step."""
        task, step, options = self.task, self.step, self.context.options
        out_of_step = f"mode={options['mode']}"
        whole_norm = task.batchnorm == "whole" and bool(normalising_layers(self.model))
        asked = {
            "ema of the task": task.ema is not None,
            'loss_over = "batch"': task.loss_over == "batch",
            'batchnorm = "whole"': whole_norm,
            "initialise() of the task": task.overrides("initialise"),
            "tables with sparse gradients, or a max_norm": bool(
                step.sparse.positions or self.context.scope.looked_up
            ),
            "tables=rows and update=worker": bool(self.tables) and self.updates_on_worker,
            "tables=rows and mode=delta": bool(self.tables) and self.pushes_changes,
            f"{out_of_step} and plateau() of the task": not self.in_step
            and task.plateau() is not None,
            f"{out_of_step} and fp16": not self.in_step and self.context.loss_scale is not None,
        }
        found = "workers that each see a part of a step, and servers that see no sample"
        why = "it needs all of a step in one process, or in a process group"
        refuse_without_whole_steps(self.name, asked, found=found, why=why)

    def shard(self, server: int) -> Shard:
        """The shard of a server; afterwards this process has no optimizer of the whole model."""
        layout, step = self.layouts[server], self.step
        return Shard(
            layout,
            step.optimizer,
            step.parameters,
            self.parts,
            self.context.options["rate"],
            hands_on=self.updates_on_worker,
        )

    def served_tables(self, server: int) -> ServedTables:
        """The rows of a server; afterwards this process has no whole table."""
        step, servers = self.step, self.context.options["servers"]
        tables = ServedTables(self.tables, step.optimizer, server, servers)
        leave_rows([step.parameters[table.position] for table in self.tables], step.optimizer)
        return tables

    # --- the step -------------------------------------------------------------------------

    def forward_backward(self, batch: Batch) -> Tally:
        return self.side.forward_backward(batch)

    def compute(self, batch: Batch) -> Tally:
        """Forward and backward of a part of a batch, here."""
        return super().forward_backward(batch)

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        if self.step.changes.have_come():
            raise unfrozen_on_the_way(self.name)
        return self.side.reduce(batch, local)

    def updating(self, gradients: Gradients) -> AbstractContextManager[None]:
        return self.side.updating(gradients)

    def after_update(self, batch: Batch, result: StepResult) -> StepResult:
        self.side.after_update(result)
        return result

    def sum_apart(self, leaves: list[tuple[Span, Tensor]]) -> Tensor:
        raise unfrozen_on_the_way(self.name)

    # --- what it costs --------------------------------------------------------------------

    def workload(self) -> Workload:
        messages = tuple(layout.nbytes for layout in self.layouts)
        return Workload(messages, self.workers, self.task.shards)

    def most(self) -> tuple[int, ...]:
        """The largest message to or from each server, without the optimizer state."""
        rows = most_bytes(self.tables, len(self.layouts)) if self.tables else 0
        return tuple(layout.nbytes + rows for layout in self.layouts)

    @property
    def parts(self) -> int:
        """Into how many parts a batch is cut."""
        return parts_of_a_step(self.workers, self.context.options)

    # --- weights and state ----------------------------------------------------------------

    def whole_weights(self) -> AbstractContextManager[None]:
        self.side.take_weights()
        return nullcontext()

    @contextmanager
    def owned(self, *, writes: bool = False) -> Iterator[None]:
        """Within, the model has the servers' weights; with `writes` they are sent back after."""
        self.side.take_weights()
        yield
        if writes:
            self.side.put_weights()

    def evaluated_weights(self) -> AbstractContextManager[None]:
        self.side.take_weights()
        return super().evaluated_weights()

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        self.side.take_weights()
        return super().full_state()

    def state(self) -> dict[str, Any]:
        self.side.take_weights(optimizer=True)
        state = super().state()
        return state if self.handed is None else {**state, "handed": self.handed}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.handed = state.get("handed")

    def statistics(self) -> bytes:
        """The running statistics of all BatchNorm layers, in the order of the model.

        Workers get them with their work: a shard of one sample is normalised by them.
        """
        return b"".join(tensor.cpu().numpy().tobytes() for tensor in self._statistics())

    def apply_settings(self, settings: Mapping[str, Any], statistics: memoryview) -> None:
        """Apply the scheduler's settings, which must be the same in all workers of a step."""
        step = self.step
        if step.loss_scale is not None and settings.get("loss_scale") is not None:
            step.loss_scale.value = float(settings["loss_scale"])
        if (was := settings.get("regularizer")) is not None:
            step.regularizers.was = step.layout.like.new_tensor(float(was))
        if len(statistics):
            self.load_statistics(statistics)

    def load_statistics(self, statistics: memoryview) -> None:
        """Load running statistics which `statistics` returned in another process."""
        at = 0
        for tensor in self._statistics():
            values = torch.frombuffer(statistics[at : at + tensor.nbytes], dtype=tensor.dtype)
            tensor.copy_(values.view(tensor.shape))
            at += tensor.nbytes

    def _statistics(self) -> list[Tensor]:
        norms = self.step.layout.norms
        return [tensor for norm in norms for tensor in norm.running_statistics()[:2]]

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters on the servers, in the order of the model."""
        return self.step.parameters

    @property
    def weights(self) -> list[Tensor]:
        """Their numbers, in place."""
        return [parameter.detach() for parameter in self.parameters]


def _flat_pieces(servers: int, whole: Tensor) -> list[Tensor]:
    flat = whole.reshape(-1)
    return [flat[piece.start : piece.stop] for piece in cut_evenly(0, flat.numel(), servers)]
