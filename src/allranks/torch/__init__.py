"""The torch engine: tasks, the trainer, and one file per strategy and reducer.

What a user imports: `Task` to describe a training, `Trainer` for a loop of one's own,
`MixtureOfExperts` as a layer of a model, `cross_entropy` for one whose output layer is cut. All but
`Task` are loaded when they are first asked for: a program that describes a task needs no engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  first: a device's package that torch loads may import what is below

from allranks.torch.task import Task

if TYPE_CHECKING:
    from allranks.torch.parallel.expert.mixture import MixtureOfExperts
    from allranks.torch.parallel.tensor.layers import cross_entropy
    from allranks.torch.trainer import Trainer

__all__ = ["MixtureOfExperts", "Task", "Trainer", "cross_entropy"]

MODULES = {
    "MixtureOfExperts": "allranks.torch.parallel.expert.mixture",
    "Trainer": "allranks.torch.trainer",
    "cross_entropy": "allranks.torch.parallel.tensor.layers",
}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)
