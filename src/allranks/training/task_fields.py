"""What every task has, whatever engine trains it, and what is checked of all of them.

A task is a dataclass, and its fields are the hyper-parameters of the job. Each engine derives its
own `Task` from `TaskFields`, with the methods that its framework needs.
"""

from __future__ import annotations

import dataclasses
import difflib
import dis
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from allranks.errors import RequestError
from allranks.job.job import Job, with_settings
from allranks.job.program import find_program
from allranks.training.schedules import Plateau

PLAIN = (bool, int, float, str, type(None))
NEAR = 0.8
"""How like a name of a task (`difflib`'s ratio) another one must be to be taken for it misspelt."""


@dataclass(kw_only=True)
class TaskFields:
    """A training, described for one device.

    `batch_size` is the number of samples of one optimizer step over *all* ranks; `shards` the
    number of fixed slices it is cut into, which ranks own whole; `last_batch` what happens with
    the rest of an epoch; `clip_norm` the largest norm of the whole gradient;
    `ema` the decay of an exponential moving average of the weights, which is then evaluated.
    Its methods are those that a task need not write, alike in all engines.
    """

    batch_size: int = 256
    epochs: int = 1
    shards: int = 8
    last_batch: Literal["keep", "drop"] = "keep"
    clip_norm: float | None = None
    ema: float | None = None

    loss_over: ClassVar[str] = "sample"
    """`"batch"`: `loss` couples samples, and gets the outputs and the batch of all ranks."""
    required: ClassVar[tuple[str, ...]] = ()
    """The methods that a task has to have."""

    def weight(self, batch: Any) -> Any:
        """The weight of each value that `loss` returns, in its shape. `None`: all 1."""
        return None

    def schedule(self, step: int) -> float:
        """The factor on the learning rate at update `step` of the job, from 0.

        Written as `schedule(self, step, total)` it also gets the number of steps of the job:
        `--steps`, or all of `epochs`. A stream that does not say its length needs `--steps` then.
        """
        return 1.0

    def plateau(self) -> Plateau | None:
        """When the learning rate falls because a metric gets no better; `None`: never.

        An `allranks.training.schedules.Plateau`, which counts the evaluations of `--eval-every`.
        """
        return None

    def augment(self, sample: Any, random: np.random.Generator) -> Any:
        """A changed sample. `random` belongs to (seed, epoch, sample): use no other source."""
        return sample

    def callbacks(self) -> Sequence[Any]:
        """What runs between the steps, each an `allranks.training.callback.Callback`."""
        return ()

    def metrics(self, output: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        """For each metric the (sum, count) over the samples of this batch."""
        return {}

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics to report, from sum / count over the whole evaluation data."""
        return metrics

    # --- what is asked of a task ---------------------------------------------------------------

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        bases = [base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]
        fields = {field.name for base in bases for field in dataclasses.fields(base)}
        annotated = inspect.get_annotations(cls)
        for name in sorted(fields):
            if name in cls.__dict__ and name not in annotated:
                value = cls.__dict__[name]
                kind = type(value).__name__ if isinstance(value, (int, float, str)) else "TYPE"
                raise TypeError(
                    f"{cls.__name__}.{name} = … has no annotation, so the dataclass would pass "
                    f"over it. Write `{name}: {kind} = …`."
                )

    @classmethod
    def engines_own(cls) -> type:
        """The `Task` of the engine that this class derives from."""
        mro = cls.__mro__
        return mro[mro.index(TaskFields) - 1]

    @property
    def as_written(self) -> TaskFields:
        """The task of the user, whose fields are recorded; another engine may wrap it."""
        return self

    def overrides(self, method: str) -> bool:
        """Whether this task has a `method` of its own."""
        is_set = method in vars(self)  # on this object, as a job does that names another one
        return is_set or getattr(type(self), method) is not getattr(self.engines_own(), method)


def metric_pairs(metrics: Mapping[str, Any], total: str) -> dict[str, tuple[Any, Any]]:
    """What `metrics(output, batch)` of a task gave; `total` is a sum in the engine's words."""
    for name, pair in metrics.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise RequestError(
                asked="metrics(output, batch) of the task",
                found=f"{name} = {pair!r}"[:200],
                why="a metric is a pair (sum, count) over the samples of the batch",
                do=f"return for example {{'accuracy': ({total}, len(hits))}}",
            )
    return dict(metrics)


def other_metrics(found: str) -> RequestError:
    """The error for metrics that are not the same for all batches."""
    return RequestError(
        asked="metrics(output, batch) of the task",
        found=found[:300],
        why="sums are kept by name, so every batch must give the same metrics in one order",
        do="return every metric for every batch, with (0, 0) where there is nothing",
    )


Kind = TypeVar("Kind", bound=TaskFields)


def task_of(job: Job, *kinds: type[Kind]) -> Kind:
    """The task of a job, one of `kinds`, with its fields set and checked; raises `RequestError`."""
    task_class = find_program(job.program, *kinds)
    try:
        task: Kind = with_settings(task_class, job.task, f"to train {job.program}")
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(
            asked=f"to train {job.program}",
            found=f"{type(error).__name__}: {error}",
            why=f"making a {task_class.__name__} of its fields fails",
            do="mend its __post_init__, or the values given with --set",
        ) from error
    check_task(task, job.program)
    return task


def plain_fields(task: TaskFields) -> dict[str, Any]:
    """The fields of a task that text can carry."""
    task = task.as_written
    return plain_values({f.name: getattr(task, f.name) for f in dataclasses.fields(task)})


def plain_values(values: dict[str, Any]) -> dict[str, Any]:
    """Those that text can carry."""
    return {name: value for name, value in values.items() if isinstance(value, PLAIN)}


def task_shape(task: TaskFields) -> dict[str, Any]:
    """What a place must know of a task (`launcher.plan.Shape`)."""
    return {"fields": plain_fields(task), "batch_size": task.batch_size, "shards": task.shards}


def check_task(task: TaskFields, program: str) -> None:
    """Raise `RequestError` unless the task has what every task needs."""
    _check_methods(task, program)
    _check_names(type(task), task.engines_own(), program)
    _check_dataclasses(task, program)
    _check_values(task)
    _check_loss(task)


def _check_methods(task: TaskFields, program: str) -> None:
    missing = [name for name in task.required if not task.overrides(name)]
    if missing:
        raise RequestError(
            asked=f"to train {program}",
            found=f"{type(task).__name__} has no {', '.join(missing)}",
            why=f"a task needs {', '.join(task.required)}",
            do=f"add `def {missing[0]}(self, …)` to it",
        )


def _check_dataclasses(task: TaskFields, program: str) -> None:
    """Raise `RequestError` for fields that no dataclass decorator would see."""
    for base in _written_by_users(type(task), task.engines_own()):
        annotated = [
            n for n, a in inspect.get_annotations(base).items() if "ClassVar" not in str(a)
        ]
        if annotated and "__dataclass_params__" not in vars(base):
            raise RequestError(
                asked=f"to train {program}",
                found=f"{base.__name__} has fields ({', '.join(annotated)}) but is no dataclass",
                why="without the decorator its fields cannot be set, "
                "and their values are passed over",
                do=f"write @dataclass(kw_only=True) above class {base.__name__}",
            )


def _check_values(task: TaskFields) -> None:
    if task.ema is not None and not 0 <= task.ema < 1:
        raise RequestError(
            asked=f"ema = {task.ema}",
            found=str(task.ema),
            why="the decay of a moving average is at least 0 and below 1",
            do="--set ema=0.999, or --set ema=none",
        )
    for name in ("batch_size", "epochs", "shards"):
        if getattr(task, name) < 1:
            raise RequestError(
                asked=f"{name} = {getattr(task, name)}",
                found=str(getattr(task, name)),
                why=f"{name} must be at least 1",
                do=f"--set {name}=…",
            )


def _check_loss(task: TaskFields) -> None:
    if task.loss_over not in ("sample", "batch"):
        raise RequestError(
            asked=f"loss_over = {task.loss_over!r}",
            found=repr(task.loss_over),
            why="a loss is over one sample, or over the batch",
            do='write loss_over = "sample" or "batch"',
        )
    if task.loss_over == "batch" and task.batch_size < task.shards:
        raise RequestError(
            asked=f'loss_over = "batch" with batch_size = {task.batch_size}',
            found=f"shards = {task.shards}",
            why="a shard without samples has no outputs to gather",
            do=f"--set shards={task.batch_size}",
        )


def _written_by_users(kind: type, engines_own: type) -> tuple[type, ...]:
    """`kind` and what it derives from, as far as the `Task` of the engine."""
    return kind.__mro__[: kind.__mro__.index(engines_own)]


def _check_names(kind: type, engines_own: type, program: str) -> None:
    """Raise `RequestError` for a name that is nearly one of a task, and that nothing uses.

    `shedule` would be passed over in silence; `weights`, which another method reads, is a name of
    the user's own.
    """
    known = [name for name in dir(engines_own) if not name.startswith("_")]
    for base in _written_by_users(kind, engines_own):
        for name in {**vars(base), **inspect.get_annotations(base)}:
            if name.startswith("_") or name in known or base.__module__.startswith("allranks."):
                continue
            near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
            if near and name not in _names_used(kind, engines_own, but=vars(base).get(name)):
                raise RequestError(
                    asked=f"to train {program}",
                    found=f"{name} in {base.__name__}, which nothing calls or reads",
                    why=f"no task has a {name}, so it would be passed over in silence",
                    do=f"did you mean {near[0]!r}? If it is your own, give it another name",
                )


def _names_used(kind: type, engines_own: type, but: Any) -> set[str]:
    """The names that the classes of a task use, `but` for one part, and the code in their files.

    Another task in the same file has names of its own, and does not count.
    """
    names: set[str] = set()
    for base in _written_by_users(kind, engines_own):
        module = vars(sys.modules.get(base.__module__, object)).values()
        neighbours = [v for v in module if isinstance(v, type) and _is_of(v, base)]
        classes = [base, *(v for v in neighbours if not issubclass(v, TaskFields))]
        parts = [part for c in classes for part in vars(c).values()]
        for part in (*parts, *(v for v in module if _is_of(v, base))):
            if part is not but:
                names.update(_names_in(part))
    return names


def _is_of(value: Any, base: type) -> bool:
    return getattr(value, "__module__", None) == base.__module__


def _names_in(part: Any) -> Iterator[str]:
    """The names that a function, method or property looks up."""
    functions = [part, *(getattr(part, way, None) for way in ("__func__", "func", "fget"))]
    waiting: list[Any] = [getattr(inspect.unwrap(f), "__code__", None) for f in functions if f]
    while waiting:
        code = waiting.pop()
        if isinstance(code, CodeType) and code.co_filename != "<string>":  # a dataclass's own
            loads = (i for i in dis.get_instructions(code) if i.opname.startswith("LOAD_"))
            yield from (str(i.argval) for i in loads if i.opname != "LOAD_CONST")
            waiting += code.co_consts
