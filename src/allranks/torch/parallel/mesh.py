"""Three axes at once: layers cut over `tensor`, stages along `pipeline`, copies along `data`.

    cut        the weights of every stage, over the tensor axis                    `tensor.cutting`
    stages     along the pipeline axis, where each line runs the schedule     `pipeline.strategy`
    passes     only of the samples of the line; a line with fewer micro-batches makes fewer;
               `sequence=yes` cuts positions in the blocks of a stage              `tensor.passes`
    reduce     gradients over the copies of a stage, tied weights over stages, the tally over all;
               with `reduce=tree` along one tree over all shards, and nothing may be cut
    norm       parts of cut weights on each rank of the tensor axis, others counted once

Ranks are numbered pipeline x data x tensor, the last varies fastest: ranks that communicate most
are neighbours. The ranks of a tensor axis make the same passes of the same samples. Narayanan et
al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters, arXiv 2104.04473.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from allranks.strategies.card import Workload
from allranks.strategies.mesh import REPLICATE, TENSOR
from allranks.strategies.shards import Shares
from allranks.torch.data.batch import Batch
from allranks.torch.optimizers.elementwise import check_elementwise
from allranks.torch.parallel.context.blocks import blocks_of
from allranks.torch.parallel.context.sequence import refused as not_cut
from allranks.torch.parallel.data.tree import Tree, TreeSum
from allranks.torch.parallel.pipeline.staged import not_alike
from allranks.torch.parallel.pipeline.strategy import Pipeline
from allranks.torch.parallel.sharded.gradients import StagedGradients
from allranks.torch.parallel.tensor.cutting import CutModel, cut_layers
from allranks.torch.parallel.tensor.passes import CutPasses, exchange_of
from allranks.torch.parallel.tensor.strategy import sum_over_copies
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.base import StrategyContext
from allranks.torch.strategies.layout import Layout, mesh_of

ASKED = "--strategy mesh"


class ThreeAxes(Pipeline):
    """Pipelines of cut stages, in copies. Sends what pipelines and tensor parallelism send."""

    has_whole_passes = True

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        if not self.shard_alone:  # along the tree it is summed as in one process, in its dtype
            self.tally_type = torch.float64

    def chosen_schedule(self) -> tuple[str, int]:
        schedule = self.context.options["schedule"]
        return schedule.name, int(schedule.options.get("chunks", 1))

    def parallelize(self, model: nn.Module) -> nn.Module:
        self.copies = not_alike(self.axis(REPLICATE), self.comm)
        axis, sequence = not_alike(self.axis(TENSOR), self.comm), self.context.options["sequence"]
        self.exchange = exchange_of(axis, self.name, sequence=sequence)
        self.cut, self.blocks = CutModel(), dict[str, nn.Module]()
        self.tree = Tree(self.copies, self.task.shards)
        return super().parallelize(model)

    def cut_stages(self, model: nn.Module) -> Layout:
        """Every rank cuts all stages, so that all know the shapes of other ranks' parts."""
        layout = self._cut_layers(model) if self.exchange.comm.size > 1 else self.layout
        how = self.context.precision, self.context.scope
        self.cut_passes = CutPasses(self.cut, self.exchange, model, self.blocks, *how)
        inside = [set(stage.modules()) for stage in self.stages.modules]
        blocks = set(self.blocks.values())
        self.cut_passes.stages = [at for at, modules in enumerate(inside) if blocks & modules]
        return layout

    def _cut_layers(self, model: nn.Module) -> Layout:
        if self.context.options["sequence"]:
            self.blocks = self._blocks_in_stages(model)
        stages = nn.ModuleList(self.stages.modules)
        self.cut = cut_layers(self.task, model, self.exchange, ASKED, inside=stages)
        mesh = mesh_of(self.exchange.comm, [(TENSOR, self.exchange.comm)])
        return Layout(self.exchange.comm, self.cut.cuts, mesh, self.exchange.all)

    def _blocks_in_stages(self, model: nn.Module) -> dict[str, nn.Module]:
        """The blocks that are completely in one stage."""
        asked = f"{ASKED}:sequence=yes"
        whole = {module for stage in self.stages.modules for module in stage.modules()}
        in_model = blocks_of(self.task, model, asked)
        blocks = {name: block for name, block in in_model.items() if block in whole}
        if not blocks:
            found = f"no block of {type(model).__name__} in one stage"
            raise not_cut(asked, "nothing to cut", found=found)
        return blocks

    def deal(self, shares: Shares) -> None:
        super().deal(shares)
        self.tree.deal(shares)

    def check_updates(self) -> None:
        super().check_updates()
        if self.cut.cuts:
            parts = self.layout.weight_parts(self.model)
            check_elementwise(self.step.optimizer, ASKED, parts)

    # --- a step ---------------------------------------------------------------------------

    def forward_backward(self, batch: Batch) -> Tally:
        with self.exchange.opened("gradients"):
            tally = super().forward_backward(batch)
            names = [name for name in self.step.names if name in self.local_names]
            self.cut_passes.sum_parts(names, self.local_params)
        return tally

    def recompute(self, batch: Batch) -> Tally:
        with self.exchange.opened("control"):
            return super().recompute(batch)

    def passed(self, run: Callable[[], Any], stage: int = 0) -> Any:
        return self.cut_passes.passed(run, stage)

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        if self.shard_alone:  # copies are summed already, shard by shard
            return super().reduce(batch, local)
        sum_over_copies(self.local_params, self.copies)
        self.sum_tied()
        if self.exchange.comm.rank:
            local.leave_samples()
        self.comm.all_reduce(local.tensor).wait()
        return local, self.gradients()

    def gradients(self) -> StagedGradients:
        cut = [at for at, name in enumerate(self.step.names) if name in self.cut.cuts]
        return StagedGradients(
            self.local_params,
            self._counted,
            self.step.parameters,
            self.line,
            exact=self.shard_alone,
            parts=self.exchange.comm,
            cut=cut,
        )

    def total_of(self, tree: TreeSum) -> list[Tensor]:
        """The tree over the shards of all copies, one message for each dtype."""
        if self.copies.size == 1:
            return super().total_of(tree)
        total = list(tree.roots[0][1])
        for kind in dict.fromkeys(tensor.dtype for tensor in total):
            of_kind = [at for at, tensor in enumerate(total) if tensor.dtype == kind]
            leaves = [
                (span, torch.cat([tensors[at].flatten() for at in of_kind]))
                for span, tensors in tree.roots
            ]
            parts = self.tree.sum_apart(leaves).split([total[at].numel() for at in of_kind])
            for at, part in zip(of_kind, parts, strict=True):
                total[at] = part.view_as(total[at])
        return total

    def held_weights(self) -> AbstractContextManager[None]:
        return self.exchange.closed()

    def evaluation_pass(self) -> AbstractContextManager[None]:
        return self.exchange.opened("control")

    def close(self) -> None:
        self.cut_passes.close()
        super().close()

    def whole_weight(self, name: str, parameter: nn.Parameter) -> Tensor:
        weight, cut = super().whole_weight(name, parameter), self.layout.cuts.get(name)
        if cut is None or name not in self.local_names:
            return weight
        return self.exchange.whole(parameter, cut.along, cut.shape[cut.along.dim])

    # --- bytes ----------------------------------------------------------------------------

    def workload(self) -> Workload:
        """Bytes that each rank sends in a step, by axis; then those of the tally, for copies and
        for a line; every rank calls this."""
        crossed, steps = self.crossed(), max(1, self.steps)
        local_bytes = [
            sum(crossed[2 * stage] for stage in self.own_stages if stage < self.last)
            + sum(crossed[2 * stage - 1] for stage in self.own_stages if stage),
            self.exchange.reduced / steps,
            self.exchange.gathered / steps,
            sum(parameter.nbytes for parameter in self.local_params),
            sum(2 * (1 - 1 / comm.size) * p.nbytes for p, comm in self._summed),
        ]
        rows = map(json.loads, self.comm.gather_texts(json.dumps(local_bytes)))
        tally = self.step.layout.size * self.step.layout.like.element_size()
        along = self.tally_bytes() if self.shard_alone else tally
        return self.work(*(round(nbytes) for row in rows for nbytes in row), tally, along)
