"""The task: what a user writes. A dataclass whose fields are the hyper-parameters of the job.

Written as if for one device: no rank, no sampler, no mean. Five lines of it are needed (`model`,
`optimizer`, `train_data`, `loss`, and a field or two); everything else has a default. The engine
calls these methods; a task never communicates.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.errors import RequestError

REQUIRED = ("model", "optimizer", "train_data", "loss")


@dataclass(kw_only=True)
class Task:
    """A training, described for one device.

    `batch_size` is the number of samples of one optimizer step over *all* ranks; `shards` the
    number of fixed slices it is cut into, which ranks own whole; `last_batch` what happens with
    the rest of an epoch; `clip_norm` the largest norm of the whole gradient;
    `ema` the decay of an exponential moving average of the weights, which is then evaluated.
    """

    batch_size: int = 256
    epochs: int = 1
    shards: int = 8
    last_batch: Literal["keep", "drop"] = "keep"
    clip_norm: float | None = None
    ema: float | None = None

    loss_over: ClassVar[str] = "sample"
    """`"batch"`: `loss` couples samples, and gets the outputs and the batch of all ranks."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        fields = {name for base in cls.__mro__[1:-1] for name in inspect.get_annotations(base)}
        annotated = inspect.get_annotations(cls)
        for name in sorted(fields - {"loss_over"}):
            if name in cls.__dict__ and name not in annotated:
                raise TypeError(
                    f"{cls.__name__}.{name} = … has no annotation, so the dataclass would pass "
                    f"over it. Write `{name}: int = …` with its type."
                )

    def model(self) -> nn.Module:
        """The model, with its initial weights; called on every rank with the same random state."""
        raise NotImplementedError

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of `model`'s parameters. Leave frozen ones out."""
        raise NotImplementedError

    def train_data(self) -> Any:
        """A map-style data set, tensors (or a tuple or dict of them), or a stream.

        A stream has `open(shard, epoch, seed, skip)`, which returns an iterator over the samples
        of that shard, the first `skip` of them passed over.
        """
        raise NotImplementedError

    def loss(self, output: Any, batch: Any) -> Tensor:
        """The loss of each sample, (samples,), or of each token, (samples, tokens). Never a mean."""
        raise NotImplementedError

    def inputs(self, batch: Any) -> Any:
        """What goes into the model: a tensor, a tuple of arguments, or a dict of keywords."""
        return (batch[0],) if isinstance(batch, (tuple, list)) else batch

    def pretrained(self) -> Any:
        """Weights to start from: a path of a safetensors file, or a mapping from names to tensors.

        Every name in it must be one of the model, in its shape; weights that it does not name
        keep their initial values. `None`: all do.
        """
        return None

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """The parts whose activations `--activation-checkpointing` computes again in backward.

        The default: what the model says as `checkpointed_blocks`; else the members of
        every `nn.ModuleList`, and those of every `nn.Sequential` that have parts of their own.
        """
        offered: Any = getattr(model, "checkpointed_blocks", None)
        if offered is not None:
            yield from offered
            return
        for module in model.modules():
            if isinstance(module, nn.ModuleList):
                yield from module
            elif isinstance(module, nn.Sequential):
                yield from (part for part in module if any(True for _ in part.children()))

    def callbacks(self) -> Sequence[Any]:
        """What is to be done between the steps: some `allranks.on_torch.callback.Callback`s."""
        return ()

    def weight(self, batch: Any) -> Tensor | None:
        """The weight of each value that `loss` returns, in its shape. `None`: all 1."""
        return None

    def regularizer(self, model: nn.Module) -> Tensor | None:
        """A scalar that depends on the weights alone, added to the loss once per step."""
        return None

    def schedule(self, step: int) -> float:
        """The factor on the learning rate at update `step` of the job, from 0."""
        return 1.0

    def augment(self, sample: Any, random: np.random.Generator) -> Any:
        """A changed sample. `random` belongs to (seed, epoch, sample): use no other source."""
        return sample

    def collate(self, samples: list[Any]) -> Any:
        """A batch from a list of samples. The default stacks, as torch's `default_collate`."""
        raise NotImplementedError

    def eval_data(self) -> Any:
        """What the model is judged on: as `train_data`, but no stream. `None`: nothing."""
        return None

    def metrics(self, output: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        """For each metric the (sum, count) over the samples of this batch."""
        return {}

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics to report, from sum / count over the whole evaluation data."""
        return metrics

    def overrides(self, method: str) -> bool:
        """Whether this task has a `method` of its own."""
        return getattr(type(self), method) is not getattr(Task, method)


def check_task(task: Task, program: str) -> None:
    """Raise `RequestError` unless the task has what every task needs."""
    missing = [name for name in REQUIRED if not task.overrides(name)]
    if missing:
        raise RequestError(
            asked=f"to train {program}",
            found=f"{type(task).__name__} has no {', '.join(missing)}",
            why=f"a task needs {', '.join(REQUIRED)}",
            do=f"add `def {missing[0]}(self, …)` to it",
        )
    for base in type(task).__mro__[: type(task).__mro__.index(Task)]:
        annotated = [
            n for n, a in inspect.get_annotations(base).items() if "ClassVar" not in str(a)
        ]
        if annotated and "__dataclass_params__" not in vars(base):
            raise RequestError(
                asked=f"to train {program}",
                found=f"{base.__name__} has fields ({', '.join(annotated)}) but is no dataclass",
                why="without the decorator its fields cannot be set, and their values are passed over",
                do=f"write @dataclass(kw_only=True) above class {base.__name__}",
            )
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


def task_of_parts(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    loss: Callable[[Any, Any], Tensor],
    train_data: Any,
    fields: dict[str, Any],
) -> Task:
    """A task whose methods return what is there already; `fields` are those of `Task`."""

    class Parts(Task):
        def model(self) -> nn.Module:
            return model

        def optimizer(self, model: nn.Module) -> Optimizer:
            return make_optimizer(model)

        def train_data(self) -> Any:
            return train_data

        def loss(self, output: Any, batch: Any) -> Tensor:
            return loss(output, batch)

    return Parts(**fields)
