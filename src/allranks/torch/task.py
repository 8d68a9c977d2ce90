"""The task: what a user writes. A dataclass whose fields are the hyper-parameters of the job.

Written as if for one device: no rank, no sampler, no mean. Five lines of it are needed (`model`,
`optimizer`, `train_data`, `loss`, and a field or two); everything else has a default. The engine
calls these methods; a task never communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.training.task_fields import TaskFields


@dataclass(kw_only=True)
class Task(TaskFields):
    """A training with torch, described for one device. It has all that `TaskFields` has.

    `batchnorm` says what BatchNorm normalises over: each `shard` by itself, or the `whole` batch.
    """

    batchnorm: Literal["shard", "whole"] = "shard"

    training: ClassVar[bool] = True
    """False while an evaluation calls `inputs`, `weight` and `loss`, which serve both."""

    builds_on_meta = False
    """True while the engine calls `model()`: it fills what `model()` leaves on the meta device."""

    notes = cast("Sequence[str]", ())
    """What a run reports about the model that `model()` returned."""

    required = ("model", "optimizer", "train_data", "loss")

    def model(self) -> nn.Module:
        """The model, with its initial weights; called on every rank with the same random state."""
        raise NotImplementedError

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of `model`'s parameters. Leave frozen ones out."""
        raise NotImplementedError

    def train_data(self) -> Any:
        """A map-style data set, tensors (or a tuple or dict of them), or a stream.

        A stream has `open(shard, epoch, seed, skip)`, which returns an iterator over the samples
        of that shard, the first `skip` of them passed over. If that iterator has `state_dict` and
        `load_state_dict`, checkpoints have its state, and a resume loads it instead of skipping.
        """
        raise NotImplementedError

    def loss(self, output: Any, batch: Any) -> Tensor:
        """The loss of each sample, (samples,), or token, (samples, tokens); never a mean."""
        raise NotImplementedError

    def inputs(self, batch: Any) -> Any:
        """What goes into the model: a tensor, a tuple of arguments, or a dict of keywords."""
        return (batch[0],) if isinstance(batch, (tuple, list)) else batch

    def initialise(self, model: nn.Module, inputs: Any) -> None:
        """Set weights from the whole first batch, before the first step; write them in place.

        `inputs` is what `inputs(batch)` makes of that batch. Called on every rank alike, without
        gradients; the weights of one are sent to all.
        """

    def init(self, module: nn.Module) -> None:
        """Set the parameters and buffers of one module that `model()` built on the meta device.

        Called for each such module once it has memory, whole, without gradients, and with
        generators that depend on the seed of the job and the position of the module alone. It is
        called twice, on zeros and on ones, and has to set the same numbers both times. Set the
        module's own tensors, not those of its children. The default: its `reset_parameters()`.
        """
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is None:
            raise RequestError(
                asked=f"the first weights of a {type(module).__name__} on the meta device",
                found="no reset_parameters() in its class, and no init(module) in the task",
                why="a tensor on the meta device has no numbers of its own",
                do="write init(self, module) in the task, or name its weights in pretrained()",
            )
        reset()

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

    def device_map(self, model: nn.Module) -> Mapping[str, int] | None:
        """Which part of the model is on which device of `model-parallel`, counted from 0.

        The names are those of modules of the model, or of single parameters and buffers; each one
        belongs to one of them. `None`: the strategy balances its parts itself.
        """
        return None

    def branches(self, model: nn.Module) -> Sequence[str] | Mapping[str, int] | None:
        """The modules that `--strategy branches` runs at the same time, on different ranks.

        Names of modules of the model, which none calls within another: dealt out by the bytes of
        their weights, or with the rank of each. The rest of the model is on every rank.
        """
        return None

    def tensor_plan(self, model: nn.Module) -> Mapping[str, Any] | None:
        """Which layers `--strategy tensor` cuts: names of modules (`*` for any) -> how.

        `"column"` cuts the rows of an `nn.Linear`, which are features of its output; `"row"` its
        columns; `"vocabulary"` the rows of an `nn.Embedding`. `("column", 64)` keeps runs of 64
        features together, as those of a head. Columns and a row directly below one module are a
        block, in which activations stay cut. What is not named is on every rank. The default,
        `None`: all that can be cut.
        """
        return None

    def deal_experts(self, model: nn.Module) -> None:
        """Make layers of `model` such as `--strategy expert` can deal out, in place.

        The default: those that are `MixtureOfExperts` can be.
        """

    def stages(self, model: nn.Module, count: int) -> Sequence[nn.Module] | None:
        """The model cut into `count` stages for a pipeline, in order; made of its own modules.

        The first is called with `inputs(batch)`, each other with what the one before returns (a
        tuple becomes its arguments); the last returns what the model does. Together they hold all
        weights. `None`, the default: an `nn.Sequential` is cut by the bytes of its weights.
        """
        return None

    def regularizer(self, model: nn.Module) -> Tensor | None:
        """A scalar that depends on the weights alone, added to the loss once per step."""
        return None

    def fsdp_units(self, model: nn.Module) -> Iterable[nn.Module] | None:
        """The modules whose weights `fsdp` and `hsdp` gather, use and let go of one at a time.

        No unit is part of another; the rest of the model is one more. `None`: the repeated blocks.
        """
        return None

    def collate(self, samples: list[Any]) -> Any:
        """A batch from a list of samples. The default stacks, as torch's `default_collate`."""
        raise NotImplementedError

    def eval_collate(self, samples: list[Any]) -> Any:
        """As `collate`, for an evaluation. The default is `collate`, which serves both."""
        raise NotImplementedError

    def eval_output(self, output: Any, batch: Any, forward: Callable[[Any], Any]) -> Any:
        """What `metrics` gets as the output of a batch of an evaluation; the default: `output`.

        `forward(batch)` makes one more pass. Make as many for every batch: passes may communicate.
        """
        return output

    def eval_data(self) -> Any:
        """What the model is judged on: as `train_data`, but no stream. `None`: nothing.

        Or a dict from names to several such sets: their metrics are called NAME/METRIC.
        """
        return None


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
