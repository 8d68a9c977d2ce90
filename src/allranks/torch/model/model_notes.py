"""What a person should know of a model before it is trained: true, legal, and often not meant."""

from __future__ import annotations

from torch import nn

from allranks.strategies.shards import largest_shard
from allranks.torch.model.layers import normalising_layers, own_kind
from allranks.torch.task import Task

FEW_SAMPLES = 16  # in a shard: fewer make noisy statistics. A rule of thumb, not measured here


def notes_on(model: nn.Module, task: Task, why_whole: str = "") -> list[str]:
    """Sentences about the model as it is before the first step; the same on every rank."""
    return [*_built_whole(why_whole), *_modes(model), *_statistics(model, task)]


def _built_whole(why: str) -> list[str]:
    if not why:
        return []
    return [
        "every rank held the whole model while it was built: its initialisation could not be "
        f"recorded ({why})"
    ]


def _modes(model: nn.Module) -> list[str]:
    named = [(name, module) for name, module in model.named_modules()]
    still = [(name, module) for name, module in named if not module.training]
    if not still:
        return []
    name, module = next(((n, m) for n, m in still if n), still[0])
    what = f"{len(still)} of {len(named)} modules of the model"
    first = f"{name or 'the model'} ({own_kind(module).__name__}) first"
    return [
        f"{what} are trained in eval mode, {first}: dropout off, BatchNorm frozen; "
        "call model.train() in model() if that is not meant"
    ]


def _statistics(model: nn.Module, task: Task) -> list[str]:
    samples = largest_shard(task.batch_size, task.shards)
    norms = [norm for norm in normalising_layers(model) if norm.training]
    if not norms or samples >= FEW_SAMPLES or task.batchnorm == "whole":
        return []
    return [
        f"BatchNorm normalises every shard by itself, of {samples} samples "
        f"(batch_size {task.batch_size} in {task.shards} shards); --set shards=… for fewer and "
        "larger ones, --set batchnorm=whole for the statistics of the whole batch"
    ]
