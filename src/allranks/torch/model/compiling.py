"""Compiles a model with `torch.compile`, including the layers that belong to a shard.

A compiled graph reads only the layout of the samples from the scope (`Scope.runs`), which is the
same in every step but the last of an epoch. BatchNorm stores its moments in the layer, and they are
added to the scope after the call: a graph that several blocks share has no number of a layer.
Layers that draw, communicate or look up rows depend on the step, so they break the graph: one
function for all of them keeps them outside.

If gradients are sent during backward, the model is compiled block by block. Compiled as a whole,
its backward is one function, which returns all gradients at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.torch.batchnorm.shard import NormOfShard
from allranks.torch.keras.shards import is_keras
from allranks.torch.model.activation_checkpointing import repeated_blocks
from allranks.torch.model.layers import OfShard, Scope
from allranks.torch.random.dropout import ShardDropout
from allranks.torch.strategies.base import Strategy
from allranks.torch.task import Task

LAYOUTS = 8  # how many each block may be compiled for, before what is new runs as it is written
GRAPHS_OF_INDUCTOR = "TORCHINDUCTOR_CUDAGRAPHS"


def compile_passes(task: Task, job: Job, strategy: Strategy) -> Callable[[], None]:
    """Compile the forward passes of a strategy as the job says; returns a function to undo it."""
    arguments = task, strategy.model, job.compile, strategy.context.scope, strategy.comm.size
    strategy.step.call, undo = compiled(*arguments)
    return undo


def compiled(
    task: Task, model: nn.Module, backend: str, scope: Scope, ranks: int
) -> tuple[Callable[..., Any], Callable[[], None]]:
    """The compiled forward of the model, and a function that undoes the changes for it.

    Compiles by blocks, if the task names some, for several `ranks`. No communication.
    """
    _check(model, backend)
    undo = ExitStack()
    modules: list[Any] = list(model.modules())
    is_inside = task.batchnorm != "whole"
    inside = [m for m in modules if is_inside and isinstance(m, NormOfShard)]
    for norm in inside:
        norm.moments = []
        undo.callback(vars(norm).pop, "moments", None)
    traced = *inside, *(m for m in modules if isinstance(m, ShardDropout))
    outside = [m for m in modules if isinstance(m, OfShard) and m not in traced]
    layer: Any
    for layer in outside:
        layer.forward = MethodType(_outside, layer)
        undo.callback(vars(layer).pop, "forward", None)
    blocks = repeated_blocks(task, model) if ranks > 1 else []
    undo.enter_context(_room_for(len(blocks)))
    if not blocks:
        return partial(_called, torch.compile(model, backend=backend), scope, inside), undo.close
    for block in blocks:
        before = vars(block).get("_compiled_call_impl")  # its owner may have compiled it
        undo.callback(_uncompile, block, before)
        within: set[Any] = set(block.modules())
        norms = [norm for norm in inside if norm in within]
        plain = block._call_impl
        call = partial(_called, torch.compile(plain, backend=backend), scope, norms)
        block._compiled_call_impl = partial(_in_step, scope, call, plain)
    return partial(_by_blocks, model, scope), undo.close


def _by_blocks(model: nn.Module, scope: Scope, /, *args: Any, **named: Any) -> Any:
    scope.by_compiler = True
    return model(*args, **named)


def _in_step(
    scope: Scope, call: Callable[..., Any], plain: Callable[..., Any], /, *args: Any, **named: Any
) -> Any:
    """Call a block: compiled in a pass of a step, plain in any other call of the model."""
    return (call if scope.by_compiler else plain)(*args, **named)


def _called(
    call: Callable[..., Any], scope: Scope, norms: list[NormOfShard], /, *args: Any, **named: Any
) -> Any:
    """Call compiled code in the current layout, and add its moments to the scope."""
    scope.lay_out()
    try:
        output = call(*args, **named)
        for norm in norms:
            for moments in norm.moments:
                scope.add_moments(norm.index, moments)
        return output
    finally:
        for norm in norms:
            norm.moments.clear()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside(layer: nn.Module, *args: Any, **named: Any) -> Any:
    return type(layer).forward(layer, *args, **named)


def _uncompile(block: nn.Module, before: Any) -> None:
    if before is None:
        del block._compiled_call_impl
    else:
        block._compiled_call_impl = before


def _room_for(blocks: int) -> Any:
    """Blocks of one class share their compiled code; each may need an entry for its own shape."""
    limit = max(torch._dynamo.config.recompile_limit, LAYOUTS * blocks)
    return torch._dynamo.config.patch(
        recompile_limit=limit,
        accumulated_recompile_limit=max(
            torch._dynamo.config.accumulated_recompile_limit, 8 * limit
        ),
    )


def _check(model: nn.Module, backend: str) -> None:
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise RequestError(
            asked=f"--compile {backend}",
            found="no backend of that name",
            why=f"torch knows {', '.join(sorted(known))}",
            do="--compile inductor",
        )
    if why := _records_graphs(backend):
        raise RequestError(
            asked=f"--compile {backend}",
            found=why,
            why="a graph that is recorded once draws the same numbers in every step: what keys "
            "them would be a copy from the step of the recording",
            do="--compile inductor, without CUDA graphs",
        )
    if any(is_keras(module) for module in model.modules()):
        raise RequestError(
            asked=f"--compile {backend}",
            found="a model with Keras layers",
            why="the compiler gives up on most of what Keras does around a layer, without a word",
            do="leave it out",
        )


def _records_graphs(backend: str) -> str:
    """What makes this backend record CUDA graphs; "" if nothing does."""
    if "cudagraphs" in backend:
        return "a backend that records CUDA graphs"
    if backend != "inductor":
        return ""
    if os.environ.get(GRAPHS_OF_INDUCTOR) == "1":
        return f"{GRAPHS_OF_INDUCTOR}=1 in the environment"
    config: Any = sys.modules.get("torch._inductor.config")  # who has set it has imported it
    if config is not None and config.triton.cudagraphs:
        return "torch._inductor.config.triton.cudagraphs"
    return ""
