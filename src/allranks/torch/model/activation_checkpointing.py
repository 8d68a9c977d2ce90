"""Activation checkpointing: activations of blocks are not stored, but recomputed in backward.

Torch's checkpoint does it, and restores its own random streams. The layers that belong to a shard
(`layers`) use a scope instead: in a recomputation, dropout must draw the same mask, and BatchNorm
must not count its moments twice. Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost,
arXiv 1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from allranks.errors import RequestError
from allranks.torch.model.layers import Scope
from allranks.torch.task import Task


def recompute_blocks(task: Task, model: nn.Module, scope: Scope) -> Callable[[], None]:
    """Let the blocks of `model` recompute their activations; returns a function that undoes it."""
    blocks = repeated_blocks(task, model)
    if not blocks:
        raise RequestError(
            asked="--activation-checkpointing",
            found=f"no blocks in {type(model).__name__}",
            why="what is computed again are members of an nn.ModuleList or nn.Sequential",
            do="give the task a method blocks(self, model) that yields the parts to compute again",
        )
    for block in blocks:
        block.forward = partial(_recomputed, block.forward, Recomputed(scope))

    def undo() -> None:
        for block in blocks:
            del block.forward

    return undo


def repeated_blocks(task: Task, model: nn.Module) -> list[nn.Module]:
    """The blocks that the task names, each once, and none that holds another one."""
    blocks = list(dict.fromkeys(task.blocks(model)))  # a shared block is named more than once
    return [b for b in blocks if not any(o in blocks for o in b.modules() if o is not b)]


@dataclass
class Recomputed:
    """What tells a block which samples go through it."""

    scope: Scope


def recomputed(block: nn.Module) -> Recomputed | None:
    """The recomputation of a block that recomputes its activations; `None` for other modules."""
    forward = block.forward
    if isinstance(forward, partial) and forward.func is _recomputed:
        recomputing: Recomputed = forward.args[1]
        return recomputing
    return None


def _recomputed(
    forward: Callable[..., Any], block: Recomputed, /, *arguments: Any, **keywords: Any
) -> Any:
    """`forward`, its activations computed again in backward, in the scope of its first time.

    A copy of the model (`dp`) takes forward and scope for its own along, as they are no closure.
    """
    scope = block.scope
    if not scope.pieces:  # no step is in progress: evaluation
        return forward(*arguments, **keywords)
    first = scope.moment()

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), scope.again(first)

    return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts, **keywords)
