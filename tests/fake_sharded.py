"""A strategy that stands for all that cut their weights: every tensor is halved by hand,
on two ranks.

Before each pass the weights are gathered from the two ranks. With `data=each` (as FSDP) these read
different samples, and backward sums their gradients; with `data=same` (as tensor parallelism) they
read the same ones, and take their half of the gradient. More ranks are copies of such a pair.
It is written for the tests, lives beside them, and is slow: what it proves is that a strategy needs
a file, a card and a line of the catalog, and nothing else of the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from allranks.catalog import STRATEGIES, TORCH
from allranks.errors import RequestError
from allranks.strategies.card import Card, Exact, Option, Workload
from allranks.strategies.cards import CARDS
from allranks.strategies.mesh import REPLICATE, SHARD, Agreement, Mesh
from allranks.strategies.reduction_tree import Span
from allranks.torch.data.batch import Batch
from allranks.torch.step.gradients import Gradients, gradients_of
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.base import Strategy
from allranks.torch.strategies.layout import Cut, Layout, mesh_of

NAME, TENSOR = "fake-sharded", "tensor"
HALVES = 2


def halves_of(ranks: int, options: Mapping[str, Any]) -> Mesh:
    if ranks > 1 and ranks % HALVES:
        raise RequestError(
            asked=f"--strategy {NAME} --ranks {ranks}",
            found="a rank without a partner",
            why="two ranks hold the halves of every weight",
            do=f"--ranks {ranks + 1}",
        )
    halves = min(ranks, HALVES)
    axis = SHARD if options["data"] == "each" else TENSOR
    return Mesh(((REPLICATE, ranks // halves), (axis, halves)))


def _bytes(work: Workload, options: Mapping[str, Any]) -> int:
    """Weights gathered, gradients scattered, summed over the pairs; and the tally, all by ring."""
    if work.ranks == 1:
        return 0
    weights, gradients, tally = work.messages
    pairs = work.ranks // HALVES
    scattered = gradients / HALVES if options["data"] == "each" else 0
    summed = 2 * (pairs - 1) / pairs * gradients / HALVES
    return round(weights / HALVES + scattered + summed + 2 * (1 - 1 / work.ranks) * tally)


CARD = Card(
    name=NAME,
    summary="Every weight in two halves, gathered for each pass.",
    take_when="a test needs a strategy that cuts.",
    guarantee=Exact(),
    bytes_sent=_bytes,
    bytes_formula="weights/2 + gradients/2 + 2(P-1)/P gradients/2 + 2(N-1)/N tally, P = N/2",
    memory="half of weights, gradients and optimizer; all weights within a pass",
    many_ranks=True,
    options=(
        Option("data", "each", "what the two ranks read", ("each", "same")),
        Option(
            "forgets", False, "a fault on purpose: what the other rank adds to the first weight"
        ),
    ),
    agreement=Agreement("sharded"),
    mesh=halves_of,
)


def register() -> None:
    """The card, and the line of the catalog."""
    CARDS[NAME] = CARD
    STRATEGIES[TORCH][NAME] = "fake_sharded:FakeSharded"


class FakeSharded(Strategy):
    """Gather halves, pass, sum halves. Sends what the card says."""

    equal_passes = True
    tally_type = torch.float64
    can_be_compiled = False
    builds_in_turn = True

    def make_groups(self) -> None:
        self.both_read = self.context.options["data"] == "each"
        self.pair = self.axis(SHARD if self.both_read else TENSOR)
        axes = [(name, self.axis(name)) for name, _ in self.mesh.axes]
        self.device_mesh = mesh_of(self.comm, axes) if self.comm.size > 1 else None

    def parallelize(self, model: nn.Module) -> nn.Module:
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        cuts = {n: Cut(torch.empty(shape, device="meta")) for n, shape in self.shapes.items()}
        self.layout = Layout(self.pair, cuts, self.device_mesh)
        self.names_of = {
            alias: name
            for name, one in model.named_parameters()
            for alias, other in model.named_parameters(remove_duplicate=False)
            if other is one
        }
        self.slots: dict[str, list[tuple[nn.Module, str]]] = {}
        held = {
            name: nn.Parameter(self._half(p.detach()).clone(), requires_grad=p.requires_grad)
            for name, p in model.named_parameters()
        }
        for path, module in model.named_modules():
            for attribute, parameter in list(module._parameters.items()):
                if parameter is not None:
                    name = self.names_of[f"{path}.{attribute}" if path else attribute]
                    self.slots.setdefault(name, []).append((module, attribute))
                    module._parameters[attribute] = held[name]
        self.held = held
        return model

    def watch_gradients(
        self, parameters: list[nn.Parameter], mark: Callable[[int], None]
    ) -> list[RemovableHandle]:
        at = {id(parameter): position for position, parameter in enumerate(parameters)}
        self.mark = {
            name: partial(mark, at[id(half)]) for name, half in self.held.items() if id(half) in at
        }
        return []

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        self.comm.all_reduce(local.tensor).wait()
        for parameter in self.step.parameters:
            if parameter.grad is None:  # no rank had a sample
                parameter.grad = torch.zeros_like(parameter)
            self.axis(REPLICATE).all_reduce(parameter.grad).wait()
        return local, Halved(self)

    def sum_apart(self, leaves: list[tuple[Span, Tensor]]) -> Tensor:
        """The halves of the pair are sums already, wherever both read."""
        ((_, own),) = leaves
        self.axis(REPLICATE).all_reduce(own).wait()
        return own

    def workload(self) -> Workload:
        item = next(iter(self.held.values())).element_size()
        trained = [n for n, half in self.held.items() if half.requires_grad]
        sizes = {name: HALVES * self._rows_of(name) * _width(s) for name, s in self.shapes.items()}
        tally = self.step.layout.size * 8
        messages = item * sum(sizes.values()), item * sum(sizes[name] for name in trained), tally
        return Workload(messages, self.comm.size, self.task.shards)

    # --- whole weights --------------------------------------------------------------------

    def forward(self, data: Any) -> Any:
        with self.gathered(sums=self.both_read, kind="gradients"):
            return super().forward(data)

    def eval_step(self, data: Any, forward: Callable[[Callable[..., Any], Any], Any]) -> Any:
        with self.gathered(sums=False, kind="control"):
            return super().eval_step(data, forward)

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        with self.gathered(sums=False, kind="control"):
            yield

    @contextmanager
    def gathered(self, *, sums: bool, kind: str) -> Iterator[None]:
        """Within, the model has whole weights; backward adds to the halves,
        of both ranks if it sums."""
        apply: Any = Gather.apply
        whole = apply(self, sums, kind, *self.held.values())
        for name, tensor in zip(self.held, whole, strict=True):
            for module, attribute in self.slots[name]:
                module._parameters[attribute] = tensor
        try:
            yield
        finally:
            for name, half in self.held.items():
                for module, attribute in self.slots[name]:
                    module._parameters[attribute] = half

    def _half(self, tensor: Tensor) -> Tensor:
        """The rows of a whole tensor that this rank holds."""
        if not tensor.ndim:
            raise RequestError(
                asked=f"--strategy {NAME}",
                found="a weight that is one number",
                why="it has no rows to be cut",
                do="give it the shape (1,)",
            )
        rows = -(-tensor.shape[0] // self.pair.size)
        return tensor[self.pair.rank * rows : (self.pair.rank + 1) * rows]

    def _rows_of(self, name: str) -> int:
        return -(-self.shapes[name][0] // self.pair.size)

    def padded(self, name: str, half: Tensor) -> Tensor:
        """A half as flat numbers, as many as the larger half has."""
        flat = half.new_zeros(self._rows_of(name) * _width(self.shapes[name]))
        flat[: half.numel()] = half.detach().flatten()
        return flat


class Halved(Gradients):
    """The halves of the gradients that this rank holds."""

    def __init__(self, strategy: FakeSharded) -> None:
        super().__init__(strategy.step.parameters)
        self.pair = strategy.pair

    def norm(self, *, clips: bool, left_out: bool) -> float:
        squares = [g.double().square().sum() for g in gradients_of(self.parameters)]
        total = torch.stack(squares).sum()
        self.pair.all_reduce(total, "control").wait()
        return math.sqrt(total)


class Gather(torch.autograd.Function):
    """Halves of two ranks -> whole weights; of their gradients the half of this rank."""

    @staticmethod
    def forward(
        ctx: Any, strategy: FakeSharded, sums: bool, kind: str, *halves: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.strategy, ctx.sums = strategy, sums
        ctx.set_materialize_grads(False)
        names, pair = list(strategy.held), strategy.pair
        own = [strategy.padded(name, half) for name, half in zip(names, halves, strict=True)]
        both = [torch.cat(own)]
        if pair.size > 1:
            flat = torch.cat(own)
            whole = flat.new_empty(pair.size * flat.numel())
            pair.all_gather(whole, flat, kind).wait()
            both = list(whole.chunk(pair.size))
        parts = [flat.split([part.numel() for part in own]) for flat in both]
        shapes = [strategy.shapes[name] for name in names]
        return tuple(
            torch.cat(pieces)[: shape.numel()].view(shape)
            for shape, pieces in zip(shapes, zip(*parts, strict=True), strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        strategy, pair = ctx.strategy, ctx.strategy.pair
        wanted = ctx.needs_input_grad[3:]
        found: list[Tensor | None] = []
        for name, gradient, is_wanted in zip(strategy.held, gradients, wanted, strict=True):
            if not is_wanted:
                found.append(None)
                continue
            half = strategy.held[name]
            if gradient is not None and strategy.step.for_others.is_on:
                gradient = torch.zeros_like(gradient)
            if gradient is None:
                gradient = half.new_zeros(strategy.shapes[name])
            else:
                if name in strategy.mark:  # not one that is unfrozen now: it is summed here, too
                    strategy.mark[name]()
            if ctx.sums and pair.size > 1:
                found.append(_scattered(strategy, name, gradient))
            else:
                found.append(strategy._half(gradient).clone())
        return (None, None, None, *found)


def _scattered(strategy: FakeSharded, name: str, gradient: Tensor) -> Tensor:
    """This rank's half of the sum of two gradients."""
    pair, half = strategy.pair, strategy.held[name]
    size = strategy._rows_of(name) * _width(strategy.shapes[name])
    whole = gradient.new_zeros(pair.size * size)
    whole[: gradient.numel()] = gradient.flatten()
    part = whole.new_empty(size)
    pair.reduce_scatter(part, whole).wait()
    if strategy.context.options["forgets"] and name == next(iter(strategy.held)):
        return strategy._half(gradient).clone()
    return part[: half.numel()].view(half.shape).clone()


def _width(shape: torch.Size) -> int:
    return math.prod(shape[1:])
