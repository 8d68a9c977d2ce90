"""Activation checkpointing: activations of blocks are not stored, but recomputed in backward.

Torch's checkpoint does it, and restores its own random streams. The layers that belong to a shard
(`layers`) use a scope instead: in a recomputation, dropout must draw the same mask, and BatchNorm
must not count its moments twice. Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost,
arXiv 1604.06174.

Language models of transformers keep keys and values unless `config.use_cache` is false. A block
that is computed again would find those of its first time, so the cache is off while they train.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from allranks.errors import Explained, RequestError
from allranks.torch.model.layers import Scope
from allranks.torch.task import Task

CACHE_IS_OFF = (
    "use_cache in the model's config is false while it trains: a block that is computed again "
    "would find the keys and values of its first time"
)


def recompute_blocks(
    task: Task, model: nn.Module, scope: Scope
) -> tuple[Callable[[], None], tuple[Any, ...]]:
    """Let the blocks of `model` recompute their activations.

    Returns what undoes it, and the configs whose cache is off from now on.
    """
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
    configs = {id(c): c for m in model.modules() if (c := vars(m).get("config")) is not None}
    caching = tuple(c for c in configs.values() if getattr(c, "use_cache", None) is True)
    _set_caches(caching, on=False)

    def undo() -> None:
        for block in blocks:
            del block.forward
        _set_caches(caching, on=True)

    return undo, caching


@contextmanager
def with_caches(configs: tuple[Any, ...]) -> Iterator[None]:
    """Within, the cache is on, as the task made it: for `generate` and `save_pretrained`."""
    _set_caches(configs, on=True)
    try:
        yield
    finally:
        _set_caches(configs, on=False)


def _set_caches(configs: tuple[Any, ...], *, on: bool) -> None:
    for config in configs:
        config.use_cache = on


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
        return nullcontext(), _computing_again(scope.again(first))

    return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts, **keywords)


@contextmanager
def _computing_again(scope: AbstractContextManager[Any]) -> Iterator[None]:
    """Within, a block that worked before and fails now has kept something of its first time."""
    try:
        with scope:
            yield
    except (torch.OutOfMemoryError, dist.DistError):
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        if "CUDA" in str(error) or "HIP" in str(error):  # the device failed, and not the block
            raise
        raise _differs_again(f"{type(error).__name__}: {error}".splitlines()[0]) from error


def _differs_again(text: str) -> RequestError:
    """The error for a block that computes something else in backward than in forward."""
    return RequestError(
        asked="to compute activations again in backward",
        found=f"a block that does not do the same then: {text}",
        why="its forward keeps something from call to call, as a cache of keys and values does",
        do="let forward keep nothing while the model trains, or name other blocks(self, model)",
    )


RECOMPUTING = Explained(
    re.compile("^torch.utils.checkpoint: (Recomputed|A different number)"), _differs_again
)
