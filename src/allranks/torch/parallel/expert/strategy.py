"""Expert parallelism: data parallelism in which each rank holds some experts of every mixture.

    forward, backward     rows are sent to the ranks of their experts, and back   `mixture`
    reduce     gradients of experts over their copies, if there are several; others over all ranks
    norm       squares of all experts summed over the axis, others counted once

Every rank reads its own part of the global batch. All make the same number of passes, because each
pass communicates. An expert sees the rows of all ranks of the axis: its gradient is their sum.
Lepikhin et al. 2020, GShard, arXiv 2006.16668.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.strategies.card import Workload
from allranks.strategies.mesh import EXPERT, REPLICATE
from allranks.torch.data.batch import Batch
from allranks.torch.optimizers.elementwise import check_elementwise
from allranks.torch.optimizers.made import OptimizerArguments
from allranks.torch.parallel.data.buckets import Buckets
from allranks.torch.parallel.data.reducer import Mean
from allranks.torch.parallel.expert.mixture import ExpertExchange, ExpertLayer
from allranks.torch.parallel.sharded.gradients import SomeCut, check_no_hooks
from allranks.torch.parallel.tensor.cutting import local_parameter, no_whole_weights
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.base import Strategy
from allranks.torch.strategies.layout import ROWS, Cut, Layout, exchanged_at, mesh_of

NAME = "--strategy expert"


class Experts(Strategy):
    """Cut the experts over the axis `expert`. Sends rows of tokens, and what the card says."""

    equal_passes = can_run_ahead = True
    can_be_compiled = False

    def parallelize(self, model: nn.Module) -> nn.Module:
        axis = self.axis(EXPERT)
        self.exchange = ExpertExchange(axis, lambda: self.step.for_others.is_on)
        self.steps = 0
        self.cuts: dict[str, Cut] = {}
        self.slots: list[tuple[nn.Module, str, int]] = []
        if self.comm.size == 1:
            return model
        self.task.deal_experts(model)
        mixtures = {n: m for n, m in model.named_modules() if isinstance(m, ExpertLayer)}
        self._check(model, mixtures)
        if axis.size == 1:
            return model
        mesh = mesh_of(self.comm, [(name, self.axis(name)) for name in (REPLICATE, EXPERT)])
        self._cut(model, list(mixtures.values()))
        self.layout = Layout(axis, self.cuts, mesh)
        return model

    def _check(self, model: nn.Module, mixtures: dict[str, ExpertLayer]) -> None:
        """Raise `RequestError` for a model whose experts cannot be cut."""
        if not mixtures:
            raise _no_mixture()
        if self.task.overrides("initialise"):
            raise no_whole_weights(NAME)
        if self.context.scope.looked_up:
            raise _bounded_tables()
        check_no_hooks(model, NAME)
        ranks = self.axis(EXPERT).size
        for name, mixture in mixtures.items():
            if mixture.experts % ranks:
                raise _uneven(name, mixture.experts, ranks)
        slots = {(m, n) for m in mixtures.values() for n in m.of_experts}
        cut = {id(module._parameters.get(name)) for module, name in slots} - {id(None)}
        for where, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if id(parameter) in cut and (module, name) not in slots:
                    raise _used_elsewhere(f"{where}.{name}".strip("."))

    def _cut(self, model: nn.Module, mixtures: list[ExpertLayer]) -> None:
        """Cut each mixture to this rank's experts."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        done: dict[int, nn.Parameter] = {}
        for mixture in mixtures:
            mixture.exchange = self.exchange
            for name in mixture.of_experts:
                whole = mixture._parameters.get(name)
                if whole is None:
                    continue
                if id(whole) not in done:
                    done[id(whole)] = local_parameter(whole, 0, self.exchange)
                    self.cuts[names[id(whole)]] = Cut(torch.empty_like(whole, device="meta"))
                mixture._parameters[name] = done[id(whole)]
                self.slots.append((mixture, name, mixture.experts))
        self.cut = {id(part) for part in done.values()}
        self.exchange.room = max(mixture.experts for mixture in mixtures)

    def prepare(self) -> None:
        if self.cuts:
            self.optimizer_arguments = OptimizerArguments(self.step.optimizer)
            self._check_updates()

    def _check_updates(self) -> None:
        if self.cuts and self.optimizer_arguments.is_new():
            check_elementwise(self.step.optimizer, NAME, self.layout.weight_parts(self.model))

    def lay_out(self) -> None:
        """Gradients of experts are summed over their copies, others over all ranks."""
        cut = self.cut if self.cuts else set()
        named = list(zip(self.step.names, self.step.parameters, strict=True))
        others = [(name, p) for name, p in named if id(p) not in cut]
        experts = [(name, p) for name, p in named if id(p) in cut]
        layout, shards = self.step.layout, self.task.shards
        self.shared = self._buckets(others, Mean(self.comm, shards), layout.size)
        self.expert_buckets = self._buckets(experts, Mean(self.axis(REPLICATE), shards), 0)
        self.tally = layout.tally(None if self.shared is None else self.shared.tally)

    def _buckets(
        self, named: list[tuple[str, nn.Parameter]], reducer: Mean, tally_size: int
    ) -> Buckets | None:
        if not named:
            return None
        names, parameters = map(list, zip(*named, strict=True))
        size = int(self.context.options["bucket_mb"] * 2**20)
        return Buckets(names, parameters, tally_size=tally_size, bucket_bytes=size, reducer=reducer)

    # --- a step ---------------------------------------------------------------------------

    def forward_backward(self, batch: Batch) -> Tally:
        self.tally.tensor.zero_()
        for buckets in filter(None, (self.shared, self.expert_buckets)):
            buckets.begin()
        with self.exchange.opened("gradients"):
            self.step.accumulate(batch, self.tally)
        self.steps += 1
        return self.tally

    def passed(self, run: Callable[[], Any], stage: int = 0) -> Any:
        """All ranks call this equally often: rows are sent to the ranks of their experts."""
        output = run()
        if self.cuts:
            self.exchange.close_pass()
        return output

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        """Sum after the last pass: ranks finish a gradient in different passes."""
        self._check_updates()
        shards = batch.leaves[-1].shards
        for buckets in filter(None, (self.shared, self.expert_buckets)):
            buckets.finish(shards)
        if self.shared is None:
            self.comm.all_reduce(local.tensor).wait()
        cut = self.cut if self.cuts else ()
        return local, SomeCut(self.step.parameters, self.axis(EXPERT), cut, exact=False)

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Gathers the experts; differentiable to the parts."""
        gathered: dict[int, Tensor] = {}  # by the id of a part; tied ones are gathered once
        parts = [(module._parameters[name], experts) for module, name, experts in self.slots]
        for part, experts in parts:
            if part is not None and id(part) not in gathered:
                gathered[id(part)] = self.exchange.whole(part, ROWS, experts)
        places = [(module, name) for module, name, _ in self.slots]
        with exchanged_at(places, [gathered[id(part)] for part, _ in parts]):
            yield

    def workload(self) -> Workload:
        """Bytes of rows to other ranks, of sums over all ranks, and of sums over copies.

        Of all steps: the first depend on the choices of the router.
        """
        tally = self.tally.tensor.nbytes if self.shared is None else 0
        shared, experts = tally + _bytes_of(self.shared), _bytes_of(self.expert_buckets)
        sums = self.steps * shared, self.steps * experts
        return self.work(self.exchange.exchanged, *sums, steps=max(1, self.steps))


def _bytes_of(buckets: Buckets | None) -> int:
    return 0 if buckets is None else sum(flat.nbytes for flat in buckets.flats)


def _no_mixture() -> RequestError:
    return RequestError(
        asked=NAME,
        found="no allranks.torch.MixtureOfExperts in the model, nor experts of transformers that "
        "are two tensors (gate_up_proj, down_proj)",
        why="there are no experts to give to the ranks",
        do="make the layer one, or --strategy ddp",
    )


def _uneven(name: str, experts: int, ranks: int) -> RequestError:
    return RequestError(
        asked=f"{NAME} on {ranks} ranks for each copy of the experts",
        found=f"{experts} experts in {name!r}",
        why="each rank holds as many experts as any other",
        do=f"a number of ranks that divides {experts}, or replicas=… so that N/replicas does",
    )


def _used_elsewhere(name: str) -> RequestError:
    return RequestError(
        asked=NAME,
        found=f"{name!r}, which is a weight of the experts of a mixture, too",
        why="a rank holds the weights of its own experts only",
        do="let no other layer share them, or --strategy ddp",
    )


def _bounded_tables() -> RequestError:
    return RequestError(
        asked=NAME,
        found="a table with max_norm, whose rows are shortened where they are looked up",
        why="a rank without a sample goes through the model with those of others, for its experts",
        do="--strategy ddp, or no max_norm",
    )
