"""A task with a fault that is planted on one rank, from step `at` on or there alone.

`weight`, `moment`: a bit flips after step `at` (counted from 1). `gradient`: in the backward passes
of that step. `sample`: of sample number `at` of the data, whenever it is read. `generator`: torch's
is in another state when the callback draws after that step. `function`: the activation is off by a
bit from that step on. After each step the callback adds noise to the last bias.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from allranks.training.callback import Callback
from contract_tasks import Images

BIT = 12  # of a float32, a change of at most 0.1 %: nobody sees it in a curve
STATE: dict[str, Any] = {"step": 0, "lies": False}


def flip(tensor: Tensor, place: int = 0) -> None:
    """Flip a bit of one number in place."""
    words = tensor.detach().view(-1).view(torch.int32)
    words[place % len(words)] ^= 1 << BIT


@torch.library.custom_op("planted::activation", mutates_args=())
def activation(x: Tensor) -> Tensor:
    """A rectifier that may lie."""
    y = x.relu().contiguous()
    if STATE["lies"]:
        flip(y, int(y.argmax()))
    return y


def backward(ctx: Any, gradient: Tensor) -> Tensor:
    """Of the rectifier."""
    return gradient * (ctx.saved_tensors[0] > 0)


def save(ctx: Any, inputs: Any, output: Tensor) -> None:
    """For backward."""
    ctx.save_for_backward(inputs[0])


activation.register_autograd(backward, setup_context=save)


class Activation(nn.Module):
    """The module of the function."""

    def forward(self, x: Tensor) -> Tensor:
        return activation(x)


class Samples(torch.utils.data.Dataset[Any]):
    """The data, of which a bit of one sample may be wrong."""

    def __init__(self, data: tuple[Tensor, Tensor], wrong: int) -> None:
        self.data, self.wrong = data, wrong

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = (tensor[index].clone() for tensor in self.data)
        if index == self.wrong:
            words = x.view(-1).view(torch.int64)
            words[0] ^= 1 << 40
        return x, y


@dataclass(kw_only=True)
class Planted(Images):
    """`Images`, with one fault."""

    fault: str = ""
    at: int = 0
    rank: int = 0
    of: int = 0

    def model(self) -> nn.Module:
        model = super().model()
        model[7] = Activation()
        return model

    def train_data(self) -> Any:
        return Samples(super().train_data(), self.at if self.fault == "sample" else -1)

    def eval_data(self) -> Any:
        return tuple(tensor[:10] for tensor in super().train_data())

    def callbacks(self) -> list[Callback]:
        return [Plant(self)]


class Plant(Callback):
    """Plants the fault of its task."""

    def __init__(self, task: Planted) -> None:
        self.task = task

    def on_start(self, trainer: Any) -> None:
        task, model = self.task, trainer.model
        self.is_here = trainer.comm.rank == task.rank % trainer.comm.size
        self.is_here = self.is_here and trainer.comm.size > 1
        self._set(trainer.progress.batch_index)
        if task.fault == "gradient" and self.is_here:
            name = self._name(trainer)
            dict(model.named_parameters())[name].register_hook(self._gradient)

    def _set(self, done: int) -> None:
        STATE["step"] = done + 1
        STATE["lies"] = self.is_here and self.task.fault == "function" and done + 1 >= self.task.at

    def _name(self, trainer: Any) -> str:
        names = [name for name, _ in trainer.model.named_parameters()]
        return names[self.task.of % len(names)]

    def _gradient(self, gradient: Tensor) -> Tensor:
        if STATE["step"] != self.task.at:
            return gradient
        wrong = gradient.clone()
        flip(wrong, int(wrong.abs().argmax()))
        return wrong

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        task, row = self.task, {"step": batch.index + 1, "ids": batch.ids.tolist()}
        with Path(trainer.job.run_dir, "samples.jsonl").open("a") as file:
            file.write(f"{json.dumps(row)}\n")
        if self.is_here and batch.index + 1 == task.at:
            parameter = dict(trainer.model.named_parameters())[self._name(trainer)]
            tensor = parameter
            if task.fault == "moment":
                tensor = trainer.strategy.step.optimizer.state[parameter]["exp_avg"]
            if task.fault in ("weight", "moment"):
                flip(tensor, int(tensor.abs().argmax()))
            if task.fault == "generator":
                torch.manual_seed(task.of)
        with torch.no_grad():
            trainer.model[9].bias.add_(1e-3 * torch.rand(()))
        self._set(trainer.progress.batch_index)
