"""A backward pass in two parts: first the gradients of the inputs of a stage, later of weights.

The first part runs only from the outputs to the inputs. Where it passes a branch that leads only to
weights (the `weight` of a Linear), it stores the gradient that arrives there. The second part runs
only from these gradients into their branches. So no matrix product is computed twice, and a weight
gets the same terms in the same order as in one pass. A weight that several functions of a stage use
gets its gradient from the outputs, in a separate pass.

The graph, and with it the activations, is kept until the second part. A function with weights is
called twice, once for each part: a hook on its output runs twice with the same gradient. A block
with activation checkpointing would recompute once for each such function in it.
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
    """Compute the gradients of received tensors; returns the second part of the pass.

    If the graph has no received tensors, the second part is the whole pass.
    """
    starts = [get_gradient_edge(end) for end in backward.ends]
    graph = _Graph(starts)
    if not graph.received:
        return backward
    by_branch, shared = graph.leaves_by_branch()
    inputs = [GradientEdge(node, 0) for node in graph.received]
    edges = [GradientEdge(node, at) for node in by_branch for at in sorted(graph.outputs[node])]
    gradients = torch.autograd.grad(
        backward.ends, [*inputs, *edges], backward.gradients, retain_graph=True, allow_unused=True
    )
    for received, gradient in zip(graph.received.values(), gradients, strict=False):
        received.gradient = gradient
    passes: list[Pass] = [(starts, backward.gradients, shared)] if shared else []
    arrived = list(zip(edges, gradients[len(inputs) :], strict=True))
    for node, leaves in by_branch.items():
        there = [(edge, g) for edge, g in arrived if edge.node is node and g is not None]
        passes.append(([edge for edge, _ in there], [g for _, g in there], leaves))
    return partial(_to_leaves, passes)


def _to_leaves(passes: Sequence[Pass]) -> None:
    """Accumulate the gradients of the leaves; the graph is freed with its edges."""
    for edges, gradients, leaves in passes:
        if edges:
            torch.autograd.backward(edges, gradients, retain_graph=True, inputs=leaves)


@dataclass
class _Graph:
    """The autograd graph of the outputs of a stage on this rank."""

    starts: Sequence[GradientEdge]
    callers: dict[Node, list[Node]] = field(default_factory=dict)
    """For each function, those that send it a gradient."""
    outputs: dict[Node, set[int]] = field(default_factory=dict)
    """For each function, the outputs that get a gradient."""
    received: dict[Node, Received] = field(default_factory=dict)
    """The functions at which inputs of the stage enter."""

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
            self.callers[node], self.outputs[node] = [], set()
            ahead.append(node)
        self.outputs[node].add(at)

    def leaves_by_branch(self) -> tuple[dict[Node, list[GradientEdge]], list[GradientEdge]]:
        """Leaves that only one function off the way to inputs leads to, and other leaves."""
        onward = self._onward()
        owner: dict[Node, Node | None] = {}
        outside = [start.node for start in self.starts if start.node not in onward]
        for node in (*onward, *outside):
            if node in self.received:
                continue
            following = [f for f, _ in _after(node) if f not in onward]
            _claim(owner, node, following if node in onward else [node])
        by_branch: dict[Node, list[GradientEdge]] = {}
        shared: list[GradientEdge] = []
        for node, branch in owner.items():
            if _is_leaf(node):
                leaves = shared if branch is None else by_branch.setdefault(branch, [])
                leaves.append(GradientEdge(node, 0))
        return by_branch, shared

    def _onward(self) -> dict[Node, None]:
        """The functions on the way to received tensors."""
        onward: dict[Node, None] = {}
        ahead = list(self.received)
        while ahead:
            node = ahead.pop()
            if node not in onward:
                onward[node] = None
                ahead += self.callers[node]
        return onward


def _claim(owner: dict[Node, Node | None], branch: Node, ahead: list[Node]) -> None:
    """Assign all functions from here on to `branch`; to None if they are of another one too."""
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
    """Raise `RequestError` if blocks use activation checkpointing."""
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
