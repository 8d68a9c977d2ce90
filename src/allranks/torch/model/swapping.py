"""The layers that the engine swaps for keyed ones, and how it swaps them back."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # the public base of 1d, 2d and 3d

from allranks.errors import RequestError
from allranks.torch.batchnorm.shard import ShardBatchNorm
from allranks.torch.model.layers import (
    OF_SWAPPED,
    Scope,
    Swapped,
    every_layer,
    own_kind,
    swapped_kind,
)
from allranks.torch.parallel.expert.mixture import MixtureOfExperts, ShardMixture
from allranks.torch.random.dropout import DROPOUTS, ShardDropout
from allranks.torch.random.keyed_rng import slot_of


def swap_layers(model: nn.Module, scope: Scope) -> dict[str, list[str]]:
    """Swap the layers of `model` in place. Returns the names swapped, and those that cannot be.

    `user_randomness` names layers that draw from the framework's own generator, where these draws
    are not keyed (`draws.caught`): with them the result is equal on any number of ranks only where
    each shard runs alone.
    """
    if any(isinstance(module, MixtureOfExperts) for module in model.modules()):
        scope.keys.by_function = False  # rows that were picked for an expert are no samples
    names: dict[str, list[str]] = {"batchnorm": [], "dropout": [], "user_randomness": []}
    for index, (name, module) in enumerate(model.named_modules()):
        kind = own_kind(module)  # swapped before, it may be, by another trainer
        if isinstance(module, (nn.SyncBatchNorm, nn.modules.lazy.LazyModuleMixin)):
            raise RequestError(
                asked=f"to train a model with {kind.__name__} at {name!r}",
                found=f"{kind.__name__}",
                why="it communicates or makes its weights inside forward, "
                "out of the engine's sight",
                do="use the plain layer, with its sizes given",
            )
        if kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            module.__class__ = swapped_kind(ShardBatchNorm, kind)
            names["batchnorm"].append(name)
        elif kind in DROPOUTS:
            module.__class__ = swapped_kind(ShardDropout, kind)
            module.shared_dims, module.slot = DROPOUTS[kind], slot_of(index)
            names["dropout"].append(name)
        elif isinstance(module, MixtureOfExperts):
            module.__class__ = swapped_kind(ShardMixture, kind)
        elif isinstance(module, _BatchNorm) and _stays_in_evaluation(module):
            continue  # it reads its statistics, and writes none
        elif isinstance(module, _BatchNorm) or (
            isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
        ):
            raise RequestError(
                asked=f"to train a model with {kind.__name__} at {name!r}",
                found=f"{kind.__module__}.{kind.__qualname__}",
                why="it updates its statistics inside forward, so each rank would have its own",
                do="use nn.BatchNorm1d, 2d or 3d itself, or a norm without running statistics",
            )
        else:
            if not scope.keys.by_function and _draws_by_itself(module):
                names["user_randomness"].append(name)
            continue
        module.scope, module.index = scope, index
    return names


def _stays_in_evaluation(norm: _BatchNorm) -> bool:
    """Whether a norm is frozen: `train()` of its class puts it into evaluation mode, where it is
    left."""
    was_training = norm.training
    norm.train()
    if not norm.training and norm.running_mean is not None:
        return True
    norm.training = was_training
    return False


def _draws_by_itself(module: nn.Module) -> bool:
    rate = getattr(module, "dropout", 0)
    draws = isinstance(module, (nn.RReLU, nn.modules.dropout._DropoutNd))
    return draws or (isinstance(rate, float) and rate > 0)


def restore_layers(model: nn.Module) -> None:
    """Undo every swap: the model is the user's own again, and can be pickled."""
    for module in every_layer(model):
        if isinstance(module, Swapped):
            module.__class__ = own_kind(module)
            for name in OF_SWAPPED:
                vars(module).pop(name, None)
