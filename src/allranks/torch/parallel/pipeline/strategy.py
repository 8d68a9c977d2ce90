"""Pipeline parallelism: each rank holds some layers, and micro-batches go through them in turn.

    for each action of the schedule of this rank:
        F    receive what the stage before returned; forward; send what this stage returns
        B    receive the gradient of that; backward; send the gradient of what was received
        W    the gradients of weights, if B computes only those of inputs
    then sum the tally, and the gradients of weights that several stages hold

Schedules are data (`allranks.strategies.pipeline_schedules`), and this loop runs any of them. Every
rank knows the whole model by name, with the weights of other stages on the meta device: tally,
norm, state and checkpoints have the names of one process. All ranks read the whole global batch. A
micro-batch is a shard, unless `--micro-batch` sets its samples. Huang et al. 2019,
GPipe, arXiv 1811.06965; Narayanan et al. 2021, Megatron-LM, arXiv 2104.04473; Qi et al. 2023, Zero
Bubble Pipeline Parallelism, arXiv 2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.strategies.mesh import PIPELINE
from allranks.strategies.pipeline_schedules import SCHEDULES, Action, places
from allranks.strategies.reduction_tree import Span
from allranks.torch.data.batch import Batch
from allranks.torch.data.collate import tensors_in
from allranks.torch.data.sources import drawn_from
from allranks.torch.model.layers import Moment, computed_again
from allranks.torch.parallel.data.tree import TreeSum
from allranks.torch.parallel.pipeline.links import Received, StageLinks, lanes_of
from allranks.torch.parallel.pipeline.split_backward import backward_to_inputs, check_kept
from allranks.torch.parallel.pipeline.staged import Staged
from allranks.torch.parallel.sharded.gradients import summed_with_tally
from allranks.torch.step.gradients import Backward, Gradients, all_gradients
from allranks.torch.step.losses import forward
from allranks.torch.step.tally import Tally
from allranks.torch.step.trainable import unfrozen_on_the_way
from allranks.torch.strategies.base import StrategyContext


class Pipeline(Staged):
    """Run the schedule of its name. Sends activations, their gradients, and the tally."""

    equal_passes = can_run_ahead = True
    passes_meet_readers = False
    can_be_compiled = False
    cuts_by_shard = True
    last_pass: ClassVar[str] = "B"
    """The kind of the pass that computes the gradients of the weights of a stage."""

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self.fills_parts = context.options["by"] != "cost"  # which runs the whole model

    def parallelize(self, model: nn.Module) -> nn.Module:
        self.line = self.axis(PIPELINE)
        alone = self.line.size == 1
        schedule, chunks = self.chosen_schedule()
        self.chunks = 1 if alone else chunks
        self.last = self.line.size * self.chunks - 1
        self.own_stages = range(self.line.rank, self.last + 1, self.line.size)
        forwards, backwards, groups = lanes_of(self.line, is_ring=self.chunks > 1)
        control = self.line.on_host()  # before groups that only some ranks of the line make
        groups += [control] if control is not self.line else []
        self._axes |= {f"of messages {n}": comm for n, comm in enumerate(groups)}
        model = super().parallelize(model)
        self.links = StageLinks(self.line, forwards, backwards, control)
        self.schedule = lru_cache(maxsize=64)(
            lambda micros: SCHEDULES[schedule](self.line.size, micros, self.chunks)
        )
        self.places = lru_cache(maxsize=64)(lambda micros: places(self.schedule(micros)))
        return model

    def chosen_schedule(self) -> tuple[str, int]:
        """The name of the schedule, and the number of stages of each rank."""
        return self.name, int(self.context.options.get("chunks", 1))

    def prepare(self) -> None:
        self.step.has_loss = self.last in self.own_stages

    def lay_out(self) -> None:
        super().lay_out()
        self.of_stage = {
            stage: [p for p in self.stages.modules[stage].parameters() if id(p) in self.trained]
            for stage in self.own_stages
        }

    def sum_apart(self, leaves: list[tuple[Span, Tensor]]) -> Tensor:
        raise unfrozen_on_the_way(self.name)

    # --- a step ---------------------------------------------------------------------------

    def forward_backward(self, batch: Batch) -> Tally:
        self.steps += 1
        tally = self._make_passes(batch)
        self.refuse_written_buffers()
        return tally

    def recompute(self, batch: Batch) -> Tally:
        crossed, self._crossed = self._crossed, {}
        try:
            return self._make_passes(batch)
        finally:
            self._crossed = crossed

    def _make_passes(self, batch: Batch) -> Tally:
        """Run the schedule for the micro-batches of a batch."""
        for parameter in self.local_params:
            parameter.grad = None
        self.step.prepare(batch)
        self.passes = _Passes(self, batch)
        actions = self.schedule(len(batch.micros))[self.line.rank]
        # the first messages of a pair may block the host until both ranks have begun them
        ahead_of = 2 if self.steps > 1 else 1
        for number, action in enumerate(actions):
            for ahead in actions[number : number + ahead_of]:
                if not self.passes.expect(ahead):
                    break
            self.passes.act(action)
        self.links.finish()
        tally = self.passes.finished()
        self.step.end(batch)
        return tally

    def forward(self, data: Any) -> Any:
        """Run a stage in place of the model; `Passes.output` calls it."""
        return self.passes.through(data)

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        self.sum_tied()
        gradients = self.gradients()
        tally, gradients.known_norms = summed_with_tally(local, gradients.local_norms(), self.line)
        return tally, gradients

    def total_of(self, tree: TreeSum) -> list[Tensor]:
        """The sum over all shards, after this rank has added its own."""
        return tree.total()

    def eval_step(self, data: Any, forward: Callable[[Callable[..., Any], Any], Any]) -> Any:
        """The output for data that all ranks have, on all ranks; runs all stages."""
        return forward(self._evaluate, data)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        key: Hashable = ("evaluation", _looks_of((args, kwargs)))
        output: Any = None
        for stage in self.own_stages:
            run = partial(self.stages.modules[0], *args, **kwargs)
            if stage > 0:
                received, _ = self.links.receive(stage, 0, key)
                run = partial(self.stages.call, stage, received)
            output = self.passed(run, stage)
            if stage < self.last:
                self.links.send(stage, 0, key, output, "control")
        self.links.finish()
        return self.links.share(output, self.last % self.line.size, key)


class ZeroBubble(Pipeline):
    """`1f1b` with later gradients of weights: a smaller bubble, the same messages."""

    last_pass = "W"

    def parallelize(self, model: nn.Module) -> nn.Module:
        check_kept(model)
        return super().parallelize(model)


class _Passes:
    """The passes of one rank in one step."""

    def __init__(self, strategy: Pipeline, batch: Batch) -> None:
        self.strategy, self.batch, self.step = strategy, batch, strategy.step
        self.micros = batch.micros
        self.keys = [_looks_of(micro.data) for micro in batch.micros]
        self.leaf_of = [n for n, leaf in enumerate(batch.leaves) for _ in leaf.micros]
        self.take = self.step.take(batch)
        self.tallies = [self.step.layout.tally() for _ in batch.leaves]
        self.used = [[False] * len(self.step.parameters) for _ in batch.leaves]
        self.trees = {s: TreeSum(strategy.task.shards) for s in strategy.own_stages}
        self.next_leaf = dict.fromkeys(strategy.own_stages, 0)
        self._at, self._drawn = Action("F", 0, 0), b""
        self._received: dict[tuple[int, int], tuple[Any, list[Received]]] = {}
        self._ends: dict[tuple[int, int], Callable[[], None] | list[Tensor]] = {}
        self._later: dict[tuple[int, int], Callable[[], None]] = {}
        self._moments: dict[tuple[int, int], Moment] = {}

    def expect(self, action: Action) -> bool:
        """Post what this pass receives; returns whether more may be posted after it.

        Messages of a group arrive in the order in which they are posted, so no message is posted
        after one of unknown size.
        """
        links, at = self.strategy.links, (action.stage, action.micro)
        if action.kind == "F" and action.stage > 0:
            return links.expect(*at, self.keys[action.micro])
        ends = self._ends.get(at)
        if action.kind == "B" and isinstance(ends, list):
            links.expect_gradients(*at, ends)
        return True

    def act(self, action: Action) -> None:
        """Make one pass of one micro-batch through one stage."""
        at = action.stage, action.micro
        if action.kind == "F":
            self._forward(action)
        elif action.kind == "B":
            self._backward(*at)
        else:
            self._to_weights(*at, self._later.pop(at))
        if action.kind == self.strategy.last_pass and self.strategy.shard_alone:
            self._end_leaf(*at)

    def through(self, data: Any) -> Any:
        """The output of the current stage."""
        stage, micro = self._at.stage, self._at.micro
        run = partial(forward, self.strategy.task, self.strategy.stages.modules[0], data)
        if stage > 0:
            self._drawn = drawn_from() if self.strategy.shard_alone else b""
            run = partial(self.strategy.stages.call, stage, self._received[stage, micro][0])
        return self.strategy.passed(run, stage)

    def _forward(self, action: Action) -> None:
        strategy, links = self.strategy, self.strategy.links
        stage, number = action.stage, action.micro
        micro, key = self.micros[number], self.keys[number]
        self._at, self._drawn = action, b""
        if stage > 0:
            self._received[stage, number] = links.receive(stage, number, key)
            links.gradients_arrived(stage, partial(self._came_before, action))
        tally, scope = self.tallies[self.leaf_of[number]], self.step.scope
        self.step.stage = stage
        if stage == strategy.last:
            loss, weight, backward = self.take(micro)
            self._check_drawn(stage)
            self._moments[stage, number] = scope.moment()
            tally.add(loss, weight, micro.samples, scope)
            self._ends[stage, number] = backward
            return
        with self.step.user_backward:
            output = self.step.output(self.batch, micro)
        self._check_drawn(stage)
        self._moments[stage, number] = scope.moment()
        tally.add_moments(scope)
        links.send(stage, number, key, output, "gradients")
        tensors = list(tensors_in(output))
        strategy.count_crossing(stage, tensors)
        self._ends[stage, number] = [t for t in tensors if t.requires_grad]

    def _came_before(self, action: Action, micro: int) -> bool:
        """Whether the stage before used a gradient before it sent what `action` received."""
        stage = action.stage - 1
        place = self.strategy.places(len(self.micros))
        return place["B", stage, micro] < place["F", stage, action.micro]

    def _check_drawn(self, stage: int) -> None:
        """With `--bitwise`, raise if a stage draws from the process's generator."""
        if self._drawn and drawn_from() != self._drawn:
            raise RequestError(
                asked=f"--strategy {self.strategy.name} --bitwise",
                found=f"random numbers that stage {stage} or the loss draws by itself",
                why="in one process they come after those that the stages before have drawn",
                do="use nn.Dropout, or leave --bitwise out",
            )

    def _backward(self, stage: int, number: int) -> None:
        links, ends = self.strategy.links, self._ends.pop((stage, number))
        if isinstance(ends, list):
            gradients = links.receive_gradients(stage, number, ends)
            pairs = [(e, g) for e, g in zip(ends, gradients, strict=True) if g is not None]
            ends = Backward([end for end, _ in pairs], [gradient for _, gradient in pairs])
        if self.strategy.last_pass == "W":
            assert isinstance(ends, Backward)  # losses of samples
            with self._again(stage, number):
                self._later[stage, number] = backward_to_inputs(ends)
        else:
            self._to_weights(stage, number, ends)
        if stage > 0:
            _, received = self._received.pop((stage, number))
            links.send_gradients(stage, number, received)

    def _to_weights(self, stage: int, number: int, backward: Callable[[], None]) -> None:
        """The part of a backward pass that computes gradients of weights, perhaps all of it."""
        self._begin_leaf(stage, number)
        self.step.used = self.used[self.leaf_of[number]]
        with self._again(stage, number):
            backward()

    @contextmanager
    def _again(self, stage: int, number: int) -> Iterator[None]:
        """Within, the scope is that of this forward pass; no counting layer may run again."""
        scope, moment = self.step.scope, self._moments[stage, number]
        with scope.again(moment):
            yield
            if scope.moments or scope.calls != moment.calls:
                raise computed_again()

    # --- sums in the order of the tree ----------------------------------------------------

    def _end_leaf(self, stage: int, number: int) -> None:
        """Add the gradients of a leaf after its last micro-batch."""
        leaf = self.leaf_of[number]
        if self.leaf_of[number + 1 : number + 2] != [leaf]:
            self._add_leaves(stage, leaf + 1)

    def _begin_leaf(self, stage: int, number: int) -> None:
        """With `--bitwise` the gradients of a leaf begin with zeros, as in one process."""
        is_first = number == 0 or self.leaf_of[number - 1] != self.leaf_of[number]
        if self.strategy.shard_alone and is_first:
            self._add_leaves(stage, self.leaf_of[number])
            self._to_zeros(stage)

    def _to_zeros(self, stage: int) -> None:
        for parameter in self.strategy.of_stage[stage]:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)

    def _add_leaves(self, stage: int, end: int) -> None:
        """Add the gradients of this stage up to leaf `end`; leaves without a sample add zeros."""
        for number in range(self.next_leaf[stage], end):
            leaf = self.batch.leaves[number]
            if not leaf.micros:
                self._to_zeros(stage)
            gradients = all_gradients(self.strategy.of_stage[stage])
            self.trees[stage].add((leaf.shards.start, leaf.shards.stop), gradients)
        self.next_leaf[stage] = max(end, self.next_leaf[stage])

    def finished(self) -> Tally:
        """The sum of the tallies of all leaves; leaves gradients in `.grad`."""
        step, leaves = self.step, self.batch.leaves
        for leaf, tally, used in zip(leaves, self.tallies, self.used, strict=True):
            step.used = used
            step.end_leaf(self.batch, leaf, tally)
        if not self.strategy.shard_alone:
            (tally,) = self.tallies
            return tally
        for stage, parameters in self.strategy.of_stage.items():
            self._add_leaves(stage, len(leaves))
            gradients = self.strategy.total_of(self.trees[stage])
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        total = TreeSum(self.strategy.task.shards)
        for leaf, tally in zip(leaves, self.tallies, strict=True):
            total.add((leaf.shards.start, leaf.shards.stop), [tally.tensor])
        return step.layout.tally(self.strategy.total_of(total)[0])


def _looks_of(data: Any) -> Hashable:
    """The shapes and dtypes of an input, which are the same on all ranks."""
    return tuple([(t.shape, t.dtype) for t in tensors_in(data)])
