"""The optimizer of a task, made on a rank that holds parts of weights as one process makes it."""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim import optimizer as of_all
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # public: the docs name this path

from allranks.alive import instances_of
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.job.recipes import OPTIMIZERS, factor_of, read_recipe
from allranks.torch.checkpoint.state import local, random_streams, set_random_streams
from allranks.torch.data.collate import tensors_of_arguments
from allranks.torch.model.weights import digest_of
from allranks.torch.task import Task

SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]


def made_on_parts(
    make: Callable[[nn.Module], Optimizer],
    model: nn.Module,
    shapes: Mapping[int, torch.Size],
    option: str,
) -> Optimizer:
    """`make(model)`, where `shapes` are those of whole weights, by the `id` of what is held.

    A rate may follow from the shape of a weight. Raises `RequestError` where it writes weights or
    buffers: a draw for a part is another one than for the whole; and where it reads the numbers of
    a weight that another rank holds.
    """
    before = _digests(model)
    with _WholeShapes(shapes):
        try:
            optimizer = make(model)
        except (RuntimeError, TypeError) as error:  # .numpy() raises the latter
            if "meta" in str(error).lower() and any(p.is_meta for p in model.parameters()):
                raise _numbers_read(option, error) from error
            raise
    after = _digests(model)
    changed = sorted(name for name in before if before[name] != after.get(name))
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise RequestError(
            asked=f"{option} with this optimizer(self, model) of the task",
            found=f"other numbers in {changed[0]!r}{more} after it",
            why="the rank holds parts of the weights, or some, and draws others for them than for "
            "the whole",
            do="set the weights in model(self), or --strategy ddp",
        )
    return optimizer


def _numbers_read(option: str, error: Exception) -> RequestError:
    frames = traceback.extract_tb(error.__traceback__)
    line = ([f for f in frames if "/torch/" not in f.filename] or frames)[-1]  # of the task
    return RequestError(
        asked=f"{option} with this optimizer(self, model) of the task",
        found=f"line {line.lineno} of {line.filename} reads the numbers of a weight: {line.line}",
        why="a rank holds the weights of its own stages; of the others it has names and shapes",
        do="take rates from names or shapes, set them in a callback, or --strategy ddp",
    )


def _digests(model: nn.Module) -> dict[str, str]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {n: digest_of(local(t.detach())) for n, t in named if not t.is_meta}


class _WholeShapes(TorchFunctionMode):
    """Within, a part of a weight has the shape of the whole."""

    def __init__(self, shapes: Mapping[int, torch.Size]) -> None:
        super().__init__()
        self.shapes = shapes

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shape = self.shapes.get(id(args[0])) if args else None
        if shape is not None:
            if func in (SHAPE, Tensor.size):
                at = args[1:] or tuple((kwargs or {}).values())
                return shape[at[0]] if at and at[0] is not None else shape
            if func in (Tensor.numel, Tensor.nelement, torch.numel):
                return shape.numel()
            if func is Tensor.__len__:
                return shape[0]
        return func(*args, **(kwargs or {}))


# --- named ---------------------------------------------------------------------------------------
# Optimizers by name, where the job says one in place of the task's.


def with_recipe(task: Task, job: Job) -> Task:
    """The task with the optimizer and the schedule of the job, where that names them.

    Raises `RequestError` for a Keras task, and where the task plans its rate by the evaluations.
    """
    if not job.optimizer:
        return task
    option = f"--optimizer {job.optimizer}"
    if task.as_written is not task:
        raise RequestError(
            asked=option,
            found="a Keras task",
            why="its optimizer is one of Keras, which its model is compiled with",
            do="set it in the task, or write a torch task",
        )
    if job.schedule and task.overrides("plateau"):
        raise RequestError(
            asked=f"{option} --schedule {job.schedule}",
            found="a task with plateau()",
            why="the rate would follow from two plans at once",
            do="leave one of them out",
        )
    task = copy.copy(task)
    object.__setattr__(task, "optimizer", partial(make_optimizer, job.optimizer))
    schedule = partial(factor_of, job.schedule, job.optimizer) if job.schedule else None
    if schedule is not None:
        object.__setattr__(task, "schedule", schedule)
    return task


def make_optimizer(text: str, model: nn.Module) -> Optimizer:
    """The optimizer that a text names, for all parameters of a model that are trained."""
    picked = read_recipe("--optimizer", text, OPTIMIZERS)
    values = dict(picked.options)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if picked.name == "sgd":
        return SGD(parameters, **values)
    betas = values.pop("beta1"), values.pop("beta2")
    if picked.name == "adam":
        return Adam(parameters, betas=betas, **values)
    return AdamW(parameters, betas=betas, **values)


# --- asked ---------------------------------------------------------------------------------------
# When an optimizer is asked how it updates (`elementwise`): first, and when what decides changes.
#
# Some optimizers look at a whole tensor only with a weight decay, or a bound of a norm: a callback
# may set one on the way. Rates are not looked at, and of other numbers the sign, so that a schedule
# asks for nothing.


BY_NUMBER = frozenset(
    {ASGD, SGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop}
)


def is_by_number(optimizer: Optimizer) -> bool:
    """Whether each number is updated by itself, by the formula: of torch."""
    return type(optimizer) in BY_NUMBER


def hook_of(optimizer: Optimizer) -> str:
    """What a step of it calls that its class does not say; empty where there is no such thing.

    It may look at whole weights, of others too, and change them.
    """
    hooks = {
        "register_step_pre_hook": optimizer._optimizer_step_pre_hooks,
        "register_step_post_hook": optimizer._optimizer_step_post_hooks,
        "register_optimizer_step_pre_hook": of_all._global_optimizer_pre_hooks,
        "register_optimizer_step_post_hook": of_all._global_optimizer_post_hooks,
    }
    if "step" in vars(optimizer):
        return "a function in the place of its step()"
    return next((f"a hook on its step ({name})" for name, hook in hooks.items() if hook), "")


class OptimizerArguments:
    """The hyper-parameters with which an optimizer was asked."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._seen: set[str] = set()

    def is_new(self) -> bool:
        """Whether it is to be asked: never as it is now. The next answer is no."""
        groups = [] if is_by_number(self.optimizer) else self.optimizer.param_groups
        key = str([hook_of(self.optimizer), *map(_key, groups)])
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new


def _key(group: dict[str, Any]) -> dict[str, Any]:
    return {n: _kind(v) for n, v in group.items() if n not in ("params", "lr", "initial_lr")}


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _kind(value.item()) if value.numel() == 1 else tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return [_kind(item) for item in value]
    if isinstance(value, (bool, str)) or not isinstance(value, (int, float)):
        return value if isinstance(value, (bool, str)) else type(value).__name__
    return (value > 0) - (value < 0), math.isinf(value)


# --- side effects --------------------------------------------------------------------------------
# To ask an optimizer how it updates changes nothing but the copies that it is asked on.
#
# A copy of an optimizer may know more than its parameters: a function that it calls, a module, a
# global name. What it would write there, it would write into what is trained.


Refuse = Callable[[str, str], Exception]
WHY = "it is asked how it updates, by steps of a copy, and these would change what is trained"


@contextmanager
def no_side_effects(device: torch.device, refuse: Refuse) -> Iterator[None]:
    """Within, raise `refuse(found, why)` before a tensor is written that was there before.

    Generators of random numbers go on afterwards where they were. A thread is not seen, nor what
    NumPy writes.
    """
    streams, watch = random_streams(device), _TensorWatch(refuse)
    try:
        with watch:
            yield
    finally:
        set_random_streams(streams, device)
    if watch.problem or watch.moved():  # the program may have caught what was raised
        raise refuse(watch.problem or "another memory that it gave a tensor", WHY)


class _TensorWatch(TorchDispatchMode):
    """Knows all tensors that are there when it is made."""

    def __init__(self, refuse: Refuse) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refuse, self.problem = refuse, ""
        every = instances_of(Tensor)
        self._there = [(t, storage) for t in every if (storage := _storage(t)) is not None]
        self._addresses = {address_of(storage) for _, storage in self._there}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            storage = _storage(tensor)
            if storage is not None and address_of(storage) in self._addresses:
                text = f"a write into a tensor of shape {tuple(tensor.shape)}, which is none"
                self.problem = f"{text} of its parameters or of its state"
                raise self.refuse(self.problem, WHY)
        return func(*args, **(kwargs or {}))

    def moved(self) -> bool:
        """Whether one of them lies elsewhere now: `weight.data = …`."""
        return any(
            (now := _storage(tensor)) is None or address_of(now) != address_of(storage)
            for tensor, storage in self._there
        )


def address_of(storage: torch.UntypedStorage) -> int:
    """What makes a storage that one: on meta, all are at the same place in memory."""
    address: int = storage._cdata
    return address


def written_by(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors whose numbers the operator changes, as its schema says."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from tensors_of_arguments(value)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, or of a lazy layer
        return None
