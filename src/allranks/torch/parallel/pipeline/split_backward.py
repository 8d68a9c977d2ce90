"""A backward pass in two: first the gradients of what a stage was given, later those of weights.

The first pass goes from the outputs to the inputs and nowhere else. Where its way passes a branch
that leads to weights alone (the `weight` of a Linear), the gradient that arrives there is kept; the
second pass goes from these into their branches and nowhere else. So no product of matrices is
computed twice, and a weight gets the same terms in the same order as in one pass. A weight that
several functions of a stage use has its gradient from the outputs on, in a pass of its own.

The graph, and with it the activations, stay until the second pass has been made. A function with
weights is called twice, once for each part: a hook on its output runs twice with the same gradient.
A block that computes its activations again would do so for each such function in it.
Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from allranks.errors import RequestError
from allranks.torch.model.activation_checkpointing import recomputed
from allranks.torch.parallel.pipeline.links import Received
from allranks.torch.step.gradients import Backward

REENTRANT = "CheckpointFunctionBackward"
GROUP_NORM = "NativeGroupNormBackward0"
BY_CHANNELS = {4: torch.channels_last, 5: torch.channels_last_3d}
Pass = tuple[Sequence[GradientEdge], Sequence[Tensor], Sequence[GradientEdge]]
"""From these edges, with these gradients, to these leaves."""


def backward_to_inputs(backward: Backward) -> Callable[[], None]:
    """Give what was received its gradient; returns the rest of this backward pass.

    Without anything received all of it is the rest.
    """
    starts = [get_gradient_edge(end) for end in backward.ends]
    graph = _Graph(starts)
    if not graph.received:
        return backward
    own, shared = graph.leaves_by_branch()
    inputs = [GradientEdge(node, 0) for node in graph.received]
    kept = [GradientEdge(node, at) for node in own for at in sorted(graph.asked[node])]
    found = torch.autograd.grad(
        backward.ends, [*inputs, *kept], backward.gradients, retain_graph=True, allow_unused=True
    )
    for received, gradient in zip(graph.received.values(), found, strict=False):
        received.gradient = gradient
    passes: list[Pass] = [(starts, backward.gradients, shared)] if shared else []
    arrived = list(zip(kept, found[len(inputs) :], strict=True))
    for node, leaves in own.items():
        there = [(edge, g) for edge, g in arrived if edge.node is node and g is not None]
        passes.append(([edge for edge, _ in there], [g for _, g in there], leaves))
    return partial(_to_leaves, passes)


def _to_leaves(passes: Sequence[Pass]) -> None:
    """Add to the gradients of the leaves; the graph is freed with what holds its edges."""
    for edges, gradients, leaves in passes:
        if edges:
            torch.autograd.backward(edges, gradients, retain_graph=True, inputs=leaves)


@dataclass
class _Graph:
    """The functions behind the outputs of a stage, as far as it goes on this rank."""

    starts: Sequence[GradientEdge]
    callers: dict[Node, list[Node]] = field(default_factory=dict)
    """For each function those that give it a gradient."""
    asked: dict[Node, set[int]] = field(default_factory=dict)
    """Of which of its outputs these gradients are."""
    received: dict[Node, Received] = field(default_factory=dict)
    """Where the inputs of the stage enter."""

    def __post_init__(self) -> None:
        ahead: list[Any] = []
        for start in self.starts:
            self._see(start.node, start.output_nr, ahead)
        while ahead:
            node = ahead.pop()
            received = getattr(node, "received", None)
            if isinstance(received, Received):
                self.received[node] = received
                continue
            if node.name() == REENTRANT:
                raise _reentrant()
            if node.name() == GROUP_NORM and _lies_by_channels(node):
                raise _group_norm()
            for following, at in _after(node):
                self._see(following, at, ahead)
                self.callers[following].append(node)

    def _see(self, node: Node, at: int, ahead: list[Any]) -> None:
        if node not in self.callers:
            self.callers[node], self.asked[node] = [], set()
            ahead.append(node)
        self.asked[node].add(at)

    def leaves_by_branch(self) -> tuple[dict[Node, list[GradientEdge]], list[GradientEdge]]:
        """The leaves that one function alone leads to beside the way, and those of several."""
        onward = self._onward()
        owner: dict[Node, Node | None] = {}
        beside = [start.node for start in self.starts if start.node not in onward]
        for node in (*onward, *beside):
            if node in self.received:
                continue
            following = [f for f, _ in _after(node) if f not in onward]
            _own(owner, node, following if node in onward else [node])
        own: dict[Node, list[GradientEdge]] = {}
        shared: list[GradientEdge] = []
        for node, branch in owner.items():
            if _is_leaf(node):
                leaves = shared if branch is None else own.setdefault(branch, [])
                leaves.append(GradientEdge(node, 0))
        return own, shared

    def _onward(self) -> dict[Node, None]:
        """The functions on the way to what was received."""
        onward: dict[Node, None] = {}
        ahead = list(self.received)
        while ahead:
            node = ahead.pop()
            if node not in onward:
                onward[node] = None
                ahead += self.callers[node]
        return onward


def _own(owner: dict[Node, Node | None], branch: Node, ahead: list[Node]) -> None:
    """All from these functions on are of `branch`, or of nobody, if they are of another one too."""
    while ahead:
        node = ahead.pop()
        before = owner.get(node, branch)
        if node not in owner or before not in (branch, None):
            owner[node] = before if before is branch else None
            ahead += [following for following, _ in _after(node)]


def _after(node: Node) -> Iterable[tuple[Node, int]]:
    return [(following, at) for following, at in node.next_functions if following is not None]


def _is_leaf(node: Node) -> bool:
    return not node.next_functions and node.name().endswith("::AccumulateGrad")


def _lies_by_channels(node: Any) -> bool:
    inputs: Tensor = node._saved_input
    layout = BY_CHANNELS.get(inputs.ndim)
    if layout is None or inputs.device.type != "cpu" or inputs.is_contiguous():
        return False
    return inputs.is_contiguous(memory_format=layout)


def check_kept(model: nn.Module) -> None:
    """Raise `RequestError` where blocks do not keep their activations."""
    if any(recomputed(module) is not None for module in model.modules()):
        raise RequestError(
            asked="--strategy zero-bubble --activation-checkpointing",
            found="blocks that compute their activations again",
            why="they would do so once for the gradients of inputs, and for those of each weight",
            do="leave it out, or --strategy 1f1b",
        )


def _reentrant() -> RequestError:
    return RequestError(
        asked="--strategy zero-bubble",
        found="torch.utils.checkpoint with use_reentrant=True in forward",
        why="it computes the gradients of inputs and weights at once, or none",
        do="use_reentrant=False, or --strategy 1f1b",
    )


def _group_norm() -> RequestError:
    return RequestError(
        asked="--strategy zero-bubble --channels-last",
        found="a GroupNorm in a stage",
        why="torch ends the process where only the weights of one that lies so need a gradient",
        do="leave --channels-last out, or --strategy 1f1b",
    )
