"""The model of a task, made ready to be trained: built, filled, placed, its layers swapped.

Every rank builds it from the seed of the job; the strategy makes all weights equal afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # the public base of 1d, 2d and 3d

from allranks.catalog import STRATEGIES, TORCH, load
from allranks.errors import RequestError
from allranks.job.engines import default_strategy
from allranks.job.job import AUTO, Job
from allranks.job.loss_scale import parse_loss_scale
from allranks.launcher.world import World
from allranks.strategies.audits import AUDIT_BYTES
from allranks.strategies.mesh import DATA, EXPERT
from allranks.strategies.resolve import fitted, resolved_strategy
from allranks.strategies.roles import TRAINER
from allranks.torch.accelerator import is_accelerator
from allranks.torch.batchnorm.shard import ShardBatchNorm
from allranks.torch.checkpoint.state import kept_random_streams, model_state
from allranks.torch.comm.comm import Comm
from allranks.torch.keras.shards import (
    check_keras,
    check_types,
    is_keras,
    of_keras_type,
    swap_keras_layers,
)
from allranks.torch.model.activation_checkpointing import recompute_blocks
from allranks.torch.model.deferred_init import (
    MetaModel,
    Place,
    build_turn,
    give_memory,
    within_memory,
)
from allranks.torch.model.layers import (
    OF_SWAPPED,
    Scope,
    Swapped,
    every_layer,
    own_kind,
    swapped_kind,
)
from allranks.torch.model.max_norm import swap_tables
from allranks.torch.model.precision import Precision
from allranks.torch.model.reals import TensorFile
from allranks.torch.model.weights import digest_of
from allranks.torch.parallel.expert.mixture import MixtureOfExperts, ShardMixture
from allranks.torch.random.dropout import DROPOUTS, ShardDropout
from allranks.torch.random.keyed_rng import seed_generators, slot_of
from allranks.torch.random.torch_functions import catch
from allranks.torch.strategies.base import Strategy, StrategyContext
from allranks.torch.task import Task
from allranks.torch.witness.same_model import check_same_model, check_same_weights, named_shapes

# --- swapping ------------------------------------------------------------------------------------
# The layers that the engine swaps for keyed ones, and how it swaps them back.


def swap_layers(model: nn.Module, scope: Scope) -> dict[str, list[str]]:
    """Swap the layers of `model` in place. Returns the names swapped, and those that cannot be.

    `user_randomness` names layers that draw from the framework's own generator, where these draws
    are not keyed (`torch_functions`): with them the result is equal on any number of ranks only
    where each shard runs alone.
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
                do="use the plain layer: --set batchnorm=whole does what SyncBatchNorm does"
                if isinstance(module, nn.SyncBatchNorm)
                else "use the plain layer, with its sizes given",
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


@dataclass(frozen=True)
class BuiltModel:
    """A model, and the one that it was made of; the names of its layers that were swapped, those of
    weights that `pretrained` does not name (`None` if there is no such thing), what takes changes
    of its methods back, and configs whose cache of keys and values is off while it trains."""

    model: nn.Module
    source: nn.Module
    swapped: dict[str, list[str]]
    not_pretrained: list[str] | None
    undo: Callable[[], None] = lambda: None
    caching: tuple[Any, ...] = ()


def build_model(
    task: Task,
    job: Job,
    scope: Scope,
    strategy: Strategy,
    world: World,
    on_close: Callable[[Callable[[], None]], object],
    before: BuiltModel | None = None,
) -> BuiltModel:
    """The model of `task` as this rank keeps it, with equal weights on all; every rank calls this.

    Compares names and shapes, and then broadcasts parameters and buffers from the leader, or where
    ranks build in turn compares their digests (32 bytes to each other rank), as those of files
    that each rank reads its parts of. `on_close` is given what puts the model back. With `before`
    it is that model again, for another group of ranks; its weights are equal, or will be. Raises
    `RequestError`.
    """
    comm = strategy.learner.comm
    strategy.make_groups()
    if not strategy.builds_in_turn:
        if before is None:
            built, unfilled = _built(task, job, scope, strategy)
        else:
            built, unfilled = _swapped(task, job, scope, before), lambda model, place: {}
        on_close(partial(restore_layers, built.model))
        on_close(built.undo)
        check_same_model(named_shapes(built.model), comm)
        tensors = (*built.model.parameters(), *built.model.buffers())
        with torch.no_grad():
            if before is None:  # else the ranks that have trained hold other weights by now
                comm.broadcast(*(tensor for tensor in tensors if not tensor.is_meta))
        built = dataclasses.replace(built, model=strategy.parallelize(built.model))
        if digests := unfilled(built.model, strategy.place):
            check_same_weights(digests, comm)
        return built
    with build_turn(world, comm.heartbeat):
        built, unfilled = _built(task, job, scope, strategy)
        on_close(partial(restore_layers, built.model))
        on_close(built.undo)
        shapes, digests = named_shapes(built.model), _digests(built.model, comm)
        built = dataclasses.replace(built, model=strategy.parallelize(built.model))
    check_same_model(shapes, comm)
    digests |= unfilled(built.model, strategy.place)
    check_same_weights(digests, comm)
    return built


def _digests(model: nn.Module, comm: Comm) -> dict[str, str]:
    """Of the tensors that are there, where others may have drawn other ones."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: digest_of(t) for name, t in named if not t.is_meta} if comm.size > 1 else {}


def _built(
    task: Task, job: Job, scope: Scope, strategy: Strategy
) -> tuple[BuiltModel, Callable[[nn.Module, Place], dict[str, str]]]:
    """The model, and what fills those of its tensors that are on meta still, when it is cut."""
    precision = strategy.built_with
    model = _made(task, job, precision)
    on_meta = MetaModel(model)
    model = precision.model(model)
    pretrained = _pretrained(task, model)
    device = strategy.comm.device if strategy.builds_in_turn else precision.device
    is_cut = strategy.fills_parts and not strategy.builds_in_turn

    def fill(model: nn.Module, place: Place) -> dict[str, str]:
        weights, local = pretrained or {}, strategy.is_local if is_cut else None
        return on_meta.fill(
            model, weights, task.init, place, seed=job.seed, device=device, is_local=local
        )

    missing = None if pretrained is None else _fill(model, pretrained)
    if not on_meta.modules:
        pretrained = None  # all of it is in the model: no rank keeps it beyond its turn
    if not (strategy.builds_in_turn or is_cut):
        fill(model, _copy)
        on_meta = MetaModel(nn.Module())
    return _swapped(task, job, scope, BuiltModel(model, model, {}, missing)), fill


def _swapped(task: Task, job: Job, scope: Scope, built: BuiltModel) -> BuiltModel:
    """The model with its layers swapped for those of `scope`."""
    model = built.source
    swapped = swap_layers(model, scope)
    swap_keras_layers(model, scope, swapped)
    swap_tables(model, scope, swapped)
    built = BuiltModel(model, model, swapped, built.not_pretrained)
    if job.activation_checkpointing:
        undo, caching = recompute_blocks(task, model, scope)
        built = dataclasses.replace(built, undo=undo, caching=caching)
    return built


_models_of_elastic: WeakSet[nn.Module] = WeakSet()


def _made(task: Task, job: Job, precision: Precision) -> nn.Module:
    """What `model()` of the task returns, with the generators as at the start of the job."""
    seed_generators(job.seed)
    torch.manual_seed(job.seed)
    floatx = "float64" if precision.parameters == torch.float64 else "float32"
    task.builds_on_meta = True
    try:
        with of_keras_type(floatx), within_memory():
            model = task.model()
    finally:
        del task.builds_on_meta
    if not isinstance(model, nn.Module):
        raise RequestError(
            asked="model() of the task",
            found=f"a {type(model).__name__}",
            why="the engine trains torch modules",
            do="return an nn.Module",
        )
    if job.elastic and model in _models_of_elastic:
        raise RequestError(
            asked=f"--elastic {job.elastic} under --strategy {job.strategy}",
            found="model() of the task, which returned the model that was trained before",
            why="parts of it were lost, and the next group of ranks begins with a model of its own",
            do="build the model within model() of the task",
        )
    if job.elastic:
        _models_of_elastic.add(model)
    check_keras(task, model)
    for module in filter(is_keras, model.modules()):
        check_types(module, floatx)
    return model


def whole_copy(
    task: Task, job: Job, built: BuiltModel, weights: Iterable[tuple[str, Tensor]], on: Precision
) -> nn.Module:
    """A second model of the task with these `weights`, of which tied ones have one name.

    Raises `RequestError` where `model()` of the task returns the first one again.
    """
    with kept_random_streams(on.device):
        model = _made(task, job, on)
    first = {id(parameter) for parameter in built.model.parameters()}
    if model is built.source or any(id(parameter) in first for parameter in model.parameters()):
        raise RequestError(
            asked=f"whole_model() under --strategy {job.strategy}",
            found="model() of the task, which returned the model that is being trained",
            why="ranks hold parts of that one, so each rank builds a second model",
            do="build the model within model() of the task (`Trainer.from_parts` does not), or "
            "take its tensors from trainer.weights()",
        )
    model = on.model(model)
    give_memory(model, on.device)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, tensor in weights:
            tensors[name].copy_(tensor)
    return model


def _copy(name: str, target: Tensor, whole: Tensor) -> None:
    target.copy_(whole)


def _pretrained(task: Task, model: nn.Module) -> Mapping[str, Tensor] | None:
    """The weights that the task gives, which go into the types of the job: numbers of 64 bits
    stay what they are. Raises `RequestError` for one that does not fit the model."""
    source: Any = task.pretrained()
    if source is None:
        return None
    weights = source if isinstance(source, Mapping) else _read(Path(source))
    state = model_state(model)
    wrong = [
        f"{name}: {_shape(value)}, in the model {_shape(state.get(name))}"
        for name, value in weights.items()
        if name not in state or _shape(value) != _shape(state[name])
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise RequestError(
            asked="pretrained() of the task",
            found="; ".join(wrong[:3]) + more,
            why="each weight goes to the one of its name, in its shape",
            do="leave those out that the model has not, as the head of another task",
        )
    return weights


def _fill(model: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    """Put weights into what has memory of the model; returns the names that they do not have."""
    state = model_state(model)
    with torch.no_grad():
        for name in weights:
            if not state[name].is_meta:
                state[name].copy_(weights[name])
    return sorted(state.keys() - weights.keys())


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    return "nothing" if value is None else f"a {type(value).__name__}"


def _read(path: Path) -> Mapping[str, Tensor]:
    try:
        return TensorFile(path)
    except (OSError, SafetensorError) as error:
        raise RequestError(
            asked=f"pretrained weights of {path}",
            found=f"{type(error).__name__}: {error}",
            why="weights are read from safetensors files: a pickle could run anything",
            do="make one: safetensors.torch.save_file(model.state_dict(), PATH)",
        ) from error


def job_for(job: Job, world: World) -> Job:
    """The job as the ranks of `world` run it, its strategy resolved."""
    if world.role != TRAINER:  # its launcher has resolved it
        return job
    name = job.strategy or default_strategy(TORCH, world.size)
    name = fitted(name, world.size) if job.elastic else name
    per_node = 0 if world.size % world.local_size else world.local_size
    spec = resolved_strategy(name, ranks=world.size, bitwise=job.bitwise, per_node=per_node)
    processes = spec.process_set
    if not processes.are_all_trainers and not processes.has(world.role):
        raise RequestError(
            asked=f"Trainer(task, Job(strategy={name!r}))",
            found="a process that was started alone",
            why=f"a job of it is {processes}, which its launcher starts",
            do=f"allranks train --strategy {name}, or allranks.launch(task, …)",
        )
    return dataclasses.replace(job, ranks=world.size, strategy=str(spec))


def build_strategy(task: Task, job: Job, comm: Comm, scope: Scope) -> Strategy:
    """The strategy that the job names, with the options of its card; it has no model yet."""
    spec = job.strategy_spec
    context = StrategyContext(
        spec.name,
        task,
        comm,
        scope,
        spec.options,
        Precision.of(job, comm.device),
        job.bitwise,
        parse_loss_scale(job.loss_scale) if job.precision == "fp16" else None,
        times_readers=job.share == AUTO,
        audit_bytes=AUDIT_BYTES if job.audit else 0,
    )
    strategy: Strategy = load(STRATEGIES[TORCH][spec.name])(context)
    if draws_by_function(job, strategy, comm.device):
        scope.keys.by_function = True
        catch()
    return strategy


def draws_by_function(job: Job, strategy: Strategy, device: torch.device) -> bool:
    """Whether what a forward pass draws without a layer of its own is keyed by its samples.

    It needs whole activations of whole passes, in one thread. Where each shard goes through alone,
    torch's own generator is keyed for it; compilers, and kernels of attention and recurrent layers
    on an accelerator, may draw within.
    """
    spec = job.strategy_spec
    if job.bitwise or job.compile or is_accelerator(device):
        return False
    if spec.name == "tensor":  # it says itself where activations are parts
        return not spec.options["sequence"]
    is_cut = spec.mesh.ranks != spec.mesh.size(DATA) or spec.mesh.size(EXPERT) > 1
    return strategy.has_whole_passes and not is_cut
