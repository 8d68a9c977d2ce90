"""Local SGD: one wrapper for every outer optimizer, around any strategy.

    a step       a learner trains on its part of the global batch by its `inner` strategy
    an exchange  every H steps: the mean of the learners' deltas, weighted by what each has trained
                 on, updates the global weights (`global_weights`), and learners go on from
                 there; requests of a supervisor ride on it
    near         between two exchanges the learners of a node average their weights
    after        before this step gradients are summed over all learners in every step, as in `ddp`
    fragments    parts of the model are exchanged at different steps, and may overlap some steps

The global weights are the same on all learners; these are evaluated, saved and exported. Between
two exchanges a learner has local weights and optimizer state, which are saved too. On another
number of ranks, training resumes from the last exchange. Shards, rates and epochs are as in any
strategy: a step is a step of all. The length of a stream is unknown, so in each step of a stream
learners tell each other whether any has samples left, and end their epoch together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from allranks.catalog import STRATEGIES, TORCH, load
from allranks.errors import RequestError
from allranks.job.place import GLOBAL, Placed
from allranks.strategies.card import Workload
from allranks.strategies.cards.learners import learner_options, near_of
from allranks.strategies.mesh import LEARNER, Agreement
from allranks.torch.checkpoint.state import copied, local
from allranks.torch.compression.codecs import Codec, FourBit, TopK
from allranks.torch.data.batch import Batch
from allranks.torch.local_sgd.exchange import (
    REPORT_BYTES,
    WEIGHT_BYTES,
    LearnerExchange,
    LearnerReport,
    check_stream,
    of_all,
)
from allranks.torch.local_sgd.global_weights import (
    Average,
    BlockMomentum,
    GlobalWeights,
    Nesterov,
    OuterOptimizer,
    SlowMo,
    as_it_was,
    as_parts,
    by_type,
    in_fragments,
)
from allranks.torch.model.placement import row
from allranks.torch.model.reals import reals
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.tally import Tally
from allranks.torch.step.trainable import unfrozen_on_the_way
from allranks.torch.strategies.base import MakeOptimizer, Strategy, StrategyContext
from allranks.training.progress import NOTHING, PendingStep, RankRequests, StepResult

OF_THE_INNER = (
    *("built_with", "equal_passes", "passes_meet_readers", "counts_passes", "cuts_by_shard"),
    *("can_be_compiled", "builds_in_turn", "cuts_micro_batches", "has_one_model"),
)


class Outer(Strategy):
    """Train by `inner` in each learner, and average every so many steps."""

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self.options, within = context.options, learner_options(context.options)
        size = self.comm.size // self.mesh.size(LEARNER)
        first = self.comm.rank // size * size
        line = self.comm.subgroup(tuple(range(first, first + size)))
        self._line = line if line is self.comm else replace(line, store_barrier=None)
        self._groups = [] if line is self.comm else [self._line]
        kind, name = load(STRATEGIES[TORCH][within.name]), within.name
        of_inner = replace(context, name=name, comm=self._line, options=within.options)
        self.inner: Strategy = kind(of_inner)
        for name in OF_THE_INNER:
            setattr(self, name, getattr(self.inner, name))
        self.after, self.near = int(self.options["after"]), int(self.options.get("near", 0))
        self.fragments = int(self.options.get("fragments", 1))
        self._at = 0  # the last step, counted from the first in which learners train separately
        self._exchange: LearnerExchange | None = None
        self._are_global = False
        self._requests = NOTHING

    def build_outer_optimizer(self) -> OuterOptimizer:
        """The optimizer of one flat tensor of the global weights."""
        raise NotImplementedError

    def build_codec(self) -> Codec | None:
        """The codec that compresses deltas; `None` sends them uncompressed."""
        return None

    @cached_property
    def agreement(self) -> Agreement:
        return self.inner.agreement

    @property
    def learner(self) -> Strategy:
        return self.inner

    @cached_property
    def shard_alone(self) -> bool:
        return self.inner.shard_alone

    @property
    def can_run_ahead(self) -> bool:  # type: ignore[override]
        return self.inner.can_run_ahead

    def reads_at_once(self, batch: Batch) -> bool:
        if self._exchange is None:
            return batch.index >= self.after  # from this step on learners train separately
        at = batch.index + 1 - self.after
        return self._exchange.moves_after(at) or self._is_near(at)

    def _is_near(self, at: int) -> bool:
        """Whether learners of a node average after step `at`, if not all learners do."""
        return bool(self.near) and at % self.near == 0

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        sums, gradients = self.inner.reduce(batch, local)
        if self._exchange is None and self.learners.size > 1:
            for parameter in self.step.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, requires_grad=False)
                elif parameter.grad.is_sparse:  # summed dense, as in buckets
                    parameter.grad = parameter.grad.to_dense()
            self._add_up((sums.tensor, *gradients.tensors()))
        return sums, gradients

    def _add_up(self, tensors: Iterable[Tensor | None]) -> None:
        """Sum over the learners, in place; of a sharded tensor the local part."""
        for tensor in tensors:
            assert tensor is not None
            self.learners.all_reduce(local(tensor)).wait()

    def forward_backward(self, batch: Batch) -> Tally:
        if batch.sizes is None:
            check_stream(self.task, self)
        if batch.index >= self.after and self._exchange is None:
            self._exchange = self._build_exchange()
            self.step.layout.leaves = None  # from here on those of this learner alone
        return self.inner.forward_backward(batch)

    def after_update(self, batch: Batch, result: StepResult) -> StepResult:
        """Exchange if it is due. Sends what the card says, and for a stream 56 bytes per step."""
        if self._exchange is None:
            return result
        if self.step.names != self._names:
            raise unfrozen_on_the_way(self.name)
        self.step.user_buffers.write_into(self._buffers)
        if isinstance(result, PendingStep):
            self._at = batch.index + 1 - self.after
            result.then(partial(_of_all, batch, report=None, totals=None))
            return result
        self._merge_requests(result.asked)
        totals = of_all(self.learners, result) if batch.sizes is None else None
        if totals is not None and not totals.samples:
            return replace(result, asked=NOTHING)  # for all alike: an epoch is over
        self._at = at = batch.index + 1 - self.after
        sends = self._exchange.sends_after(at)
        self._exchange.count(result)
        report = self._exchange.meet(at, result, self._requests)
        if sends:
            self._requests = NOTHING
        elif self._is_near(at):
            self._average_near()
        return _of_all(batch, result, report=report, totals=totals)

    def after_read(self, result: StepResult, requests: RankRequests) -> RankRequests:
        """Requests stay with this learner until the next exchange."""
        if self._exchange is None:
            return requests
        self._exchange.count(result)
        self._merge_requests(requests)
        return NOTHING

    def _merge_requests(self, requests: RankRequests) -> None:
        self._requests = RankRequests.of(
            self._requests.stop or requests.stop, self._requests.save or requests.save
        )

    def finish(self) -> bool:
        if self._exchange is None:
            return False
        rate = float(self.step.optimizer.param_groups[0]["lr"])
        return self._exchange.meet_finally(self._at, rate)

    def _average_near(self) -> None:
        """The mean of the weights and buffers of the learners of a node; they all call this."""
        assert self._exchange is not None
        with torch.no_grad():
            for flat in self._exchange.weights.flats:
                torch.cat([live.flatten() for live in flat.live], out=flat.delta)
                self._neighbours.all_reduce(flat.delta.div_(self._neighbours.size)).wait()
                for live, mean in zip(flat.live, flat.views(flat.delta), strict=True):
                    live.copy_(mean)

    # --- the model ------------------------------------------------------------------------

    def make_groups(self) -> None:
        self.inner.make_groups()

    def parallelize(self, model: nn.Module) -> nn.Module:
        model = self.inner.parallelize(model)
        self.layout = self.inner.layout
        return model

    def setup(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        inner = self.inner
        inner.setup(model, make_optimizer)
        self.model, self.step, self.initial_set = inner.model, inner.step, inner.initial_set
        self.layout, self._names = inner.layout, list(inner.step.names)
        self.learners = self.axis(LEARNER)
        overlaps = int(self.options.get("overlap", 0)) and self.learners.size > 1
        self._meeting = self.learners.duplicate() if overlaps else self.learners
        group = near_of(self.comm.size, self.options)
        first = self.learners.rank // group * group
        self._neighbours = self.learners.subgroup(tuple(range(first, first + group)))
        groups = (self._meeting, self._neighbours)
        self._groups += [comm for comm in groups if comm is not self.learners]
        tensors = [local(t.detach()) for t in (*self.model.parameters(), *self.model.buffers())]
        with torch.no_grad():
            self.learners.broadcast(*(tensor for tensor in tensors if not tensor.is_meta))

    def _agreed(self) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
        """The parameters and buffers with global weights, as far as this rank holds them."""
        parameters = zip(self.step.names, self.step.parameters, strict=True)
        buffers = [(n, b) for n, b in self.model.named_buffers() if b.is_floating_point()]
        return (
            [(n, local(p.detach())) for n, p in parameters if not p.is_meta],
            [(n, b) for n, b in buffers if not b.is_meta],
        )

    def _build_exchange(self) -> LearnerExchange:
        """Begin to train separately; every rank calls this while all learners hold the same."""
        every, count = int(self.options["every"]), self.fragments
        parameters, buffers = self._agreed()
        self._buffers = dict(buffers)
        offsets = [at * every // count for at in range(count)]
        weights = GlobalWeights(
            parameters, buffers, self.build_outer_optimizer, offsets, self._meeting.zeros
        )
        codec = self.build_codec()
        return LearnerExchange(self._meeting, weights, self.options, codec, self._moved)

    def _moved(self) -> None:
        """An exchange has changed the weights of this learner."""
        if self.options.get("state") == "reset":
            self.step.optimizer.state.clear()
            self.step.layout.was_updated = False

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Within, the live weights and buffers are the global ones. Sends nothing.

        It may be entered again within: `full_state` does so.
        """
        if self._exchange is None or self._are_global:
            yield
            return
        weights = self._exchange.weights
        weights.swap()
        self._are_global = True
        try:
            yield
        finally:
            self._are_global = False
            weights.swap()

    def eval_step(self, data: Any, forward: Callable[[Callable[..., Any], Any], Any]) -> Any:
        return self.inner.eval_step(data, forward)

    def evaluation_pass(self) -> AbstractContextManager[None]:
        return self.inner.evaluation_pass()

    def placement(self, *, updated: bool) -> list[Placed]:
        """What `inner` has, and the global weights with their deltas and their momentum."""
        keeps = self.build_outer_optimizer().keeps
        rows = [row(GLOBAL, name, tensor) for named in self._agreed() for name, tensor in named]
        more = [
            replace(p, gradient_bytes=p.bytes, optimizer_bytes=keeps * (p.bytes or 0)) for p in rows
        ]
        return [*self.inner.placement(updated=updated), *more]

    def workload(self) -> Workload:
        """Bytes of a learner per step; of deltas, uncompressed and compressed; of reports."""
        parameters, buffers = (sum(t.nbytes for _, t in named) for named in self._agreed())
        within, report_bytes = self.inner.promised_bytes(), REPORT_BYTES * self.fragments
        codec = self.build_codec()
        if codec is None:
            messages = within, parameters + buffers, 0, report_bytes
            return Workload(messages, self.comm.size, self.task.shards)
        cut = in_fragments(self._agreed()[0], self.fragments)
        flats = [[reals(t) for _, t in same] for named in cut for same in by_type(named)]
        sizes = [(sum(t.numel() for t in flat), flat[0].itemsize) for flat in flats]
        coded = sum(codec.size_bytes(*size) + WEIGHT_BYTES for size in sizes)
        messages = within, buffers, coded, report_bytes
        return Workload(messages, self.comm.size, self.task.shards)

    # --- state ----------------------------------------------------------------------------

    def owned(self, *, writes: bool = False) -> AbstractContextManager[None]:
        return self.inner.owned(writes=writes)

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        with self.evaluated_weights():
            yield from self.inner.full_state()

    def state(self) -> dict[str, Any]:
        if self._exchange is None:
            return self.inner.state()
        weights = self._exchange.weights
        with self.evaluated_weights():
            state = self.inner.state()
            state["model"] = copied(state["model"])
        state["optimizer"] = self._of_every_learner(state["optimizer"])
        outer: dict[str, Any] = {"at": self._at, "under_way": self._exchange.state()}
        if weights.has_momentum:
            with weights.momentum_in_place():
                model = self.inner.state()["model"]
                outer["momentum"] = copied({n: t for n, t in model.items() if n in self._names})
        return {**state, "outer": outer}

    def _of_every_learner(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        """Without the state of parameters that some learners have not updated yet.

        All ranks write one state. `own_state` has what each of them holds beyond it.
        """
        of_ranks = self.comm.gather_texts(json.dumps(sorted(optimizer["state"])))
        names = set.intersection(*(set(json.loads(text)) for text in of_ranks))
        shared = {name: values for name, values in optimizer["state"].items() if name in names}
        return {**optimizer, "state": shared}

    def load_state(self, state: dict[str, Any]) -> None:
        """A state of another strategy counts as an exchange. Every rank calls this."""
        inner, outer = self.inner, state.get("outer")
        self._exchange = None if outer is None else self._build_exchange()
        if self._exchange is None or outer is None:
            inner.load_state(state)
            return
        weights, self._at = self._exchange.weights, int(outer["at"])
        if "momentum" in outer:
            inner.load_state({**state, "model": {**state["model"], **outer["momentum"]}})
            weights.load_momentum()
        inner.load_state(state)
        weights.restart()
        self._exchange.load_state(outer["under_way"])

    def own_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"inner": self.inner.own_state()}
        if self._exchange is not None:
            state["exchange"] = self._exchange.own_state()
            state["live"] = self._exchange.weights.live()
            state["optimizer"] = as_parts(self.inner.state()["optimizer"])
        return state

    def load_own_state(self, state: dict[str, Any]) -> None:
        if not state:
            return
        self.inner.load_own_state(state["inner"])
        if self._exchange is None or "live" not in state:
            return
        if self._exchange.weights.load_live(state["live"]):
            self._exchange.load_own_state(state["exchange"])
            now = self.inner.state()
            parameters = dict(zip(self.step.names, self.step.parameters, strict=True))
            of_optimizer = state["optimizer"]["state"]
            # what this learner alone has is cut as its parameter is
            like = {n: dict.fromkeys(of_optimizer[n], parameters[n]) for n in of_optimizer}
            like |= now["optimizer"]["state"]
            optimizer = as_it_was(state["optimizer"], {**now["optimizer"], "state": like})
            live = self._exchange.weights.live()
            self.inner.load_state({**now, "optimizer": optimizer})
            self._exchange.weights.load_live(live)

    def close(self) -> None:
        self.inner.close()

    def leave(self, *, failed: bool = False) -> None:
        self.inner.leave(failed=failed)
        for comm in self._groups:
            comm.leave(failed=failed)
        super().leave(failed=failed)


def _of_all(
    batch: Batch, result: StepResult, *, report: LearnerReport | None, totals: LearnerReport | None
) -> StepResult:
    """The result of a step of all learners; between exchanges its loss is this learner's."""
    requests = NOTHING if report is None else report.requests
    samples = int(totals.samples) if batch.sizes is None and totals else sum(batch.sizes or ())
    result = replace(result, asked=requests, samples=samples)
    if not result.taken:  # the others had samples
        result = replace(result, updated=True, loss=0.0, weight=0.0)
    latest = totals or report
    if latest is not None and latest.weight:
        result = replace(result, loss=latest.mean_loss, weight=latest.weight)
    return result


# --- local sgd -----------------------------------------------------------------------------------
# One class for each outer optimizer.


class LocalSGD(Outer):
    """Averages the weights of the learners."""

    def build_outer_optimizer(self) -> OuterOptimizer:
        return Average()


class SlowMomentum(Outer):
    """Updates the global weights by the mean delta, with slow momentum."""

    def build_outer_optimizer(self) -> OuterOptimizer:
        return SlowMo(self.options["alpha"], self.options["beta"])


class BlockMomentumFiltering(Outer):
    """Updates the global weights by the mean delta of each block, with momentum."""

    def build_outer_optimizer(self) -> OuterOptimizer:
        momentum = self.options["momentum"]
        if momentum < 0:
            momentum = 1 - 1 / self.learners.size
        return BlockMomentum(momentum, self.options["block_rate"], self.options["form"])


class DiLoCo(Outer):
    """Deltas are the gradients of an outer SGD with Nesterov momentum."""

    def build_outer_optimizer(self) -> OuterOptimizer:
        return Nesterov(self.options["lr"], self.options["momentum"])

    def build_codec(self) -> Codec | None:
        return FourBit() if self.options["bits"] == "4" else None


class SparseLoCo(Outer):
    """Sends the largest deltas of each chunk, in 2 bits; the others stay as a residual."""

    def build_outer_optimizer(self) -> OuterOptimizer:
        return Nesterov(self.options["lr"], 0.0)

    def build_codec(self) -> Codec:
        options = self.options
        values = "two-bit" if options["bits"] == "2" else "raw"
        return TopK(options["keep"], options["chunk"], values)


# --- independent ---------------------------------------------------------------------------------
# No exchange at all: each rank trains alone, on its own shards. The upper bound of throughput.
#
# Rank r does what `single` would do on a data set of the samples of its shards. The models of the
# ranks diverge on purpose: this is not training one model.


class Independent(Strategy):
    """Forward, backward and update on every rank separately. Sends nothing."""

    can_run_ahead = has_whole_passes = True

    def reads_at_once(self, batch: Batch) -> bool:
        return not batch.own_samples

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        return local, Gradients(self.step.parameters)


# --- whole steps ---------------------------------------------------------------------------------
# What is refused where no process sees a whole step: servers, and elastic learners.


def refuse_without_whole_steps(
    strategy: str, features: Mapping[str, bool], *, found: str, why: str
) -> None:
    """Raise `RequestError` for the first feature in use that needs all of a step."""
    for feature, is_asked in features.items():
        if is_asked:
            raise RequestError(
                asked=f"--strategy {strategy} with {feature}",
                found=found,
                why=why,
                do="leave it out, or --strategy ddp",
            )
