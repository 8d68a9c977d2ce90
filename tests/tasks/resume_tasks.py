"""Tasks and loops for the tests of going on: what a checkpoint may forget, each named."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import contract_tasks
from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch import Trainer
from allranks.torch.model.weights import weights_sha256
from allranks.training.callback import Callback
from allranks.training.schedules import Plateau
from contract_tasks import Images, Plain


class ModedSGD(Optimizer):
    """SGD without a schedule: its steps go on from a mixture of the last point and the average."""

    def __init__(self, parameters: Any, lr: float = 0.05, beta: float = 0.8) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "steps": 0, "training": False})

    @torch.no_grad()
    def _mode(self, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] is training:
                continue
            share = 1 - group["beta"] if training else 1 - 1 / group["beta"]
            for parameter in group["params"]:
                if "last" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["last"], share)
            group["training"] = training

    def train(self) -> None:
        self._mode(True)

    def eval(self) -> None:
        self._mode(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["training"], "call train() before step()"
            group["steps"] += 1
            share = 1 / group["steps"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                last = state.setdefault("last", parameter.clone())
                parameter.lerp_(last, share)
                forward = group["lr"] * (group["beta"] * (1 - share) - 1)
                parameter.add_(parameter.grad, alpha=forward)
                last.sub_(parameter.grad, alpha=group["lr"])


class KeepsAverage(Callback):
    """An average of the weights, the best loss, and how often it was called on its rank."""

    average: nn.Module | None = None
    best = math.inf

    def __init__(self, model: list[nn.Module], per_rank: bool, folder: str) -> None:
        self.model, self.per_rank, self.folder = model, per_rank, folder
        self.calls: list[int] = []

    def on_start(self, trainer: Any) -> None:
        self.average = AveragedModel(self.model[0], multi_avg_fn=get_ema_multi_avg_fn(0.8))
        self.rank = trainer.world.rank

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        assert isinstance(self.average, AveragedModel)
        self.average.update_parameters(self.model[0])
        self.best = min(self.best, result.loss)
        self.calls.append(batch.index)

    def on_end(self, trainer: Any) -> None:
        assert self.average is not None
        total = sum(p.sum().item() for p in self.average.parameters())
        told = {"average": total, "best": self.best, "calls": self.calls, "rank": self.rank}
        (Path(self.folder) / f"end-{trainer.world.rank}.json").write_text(json.dumps(told))


class Keeps(KeepsAverage):
    def state_dict(self) -> dict[str, Any]:
        assert self.average is not None
        own = {"rank": self.rank} if self.per_rank else {}
        return {**own, "average": self.average.state_dict(), "best": self.best, "calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.average is not None, "it is loaded after on_start"
        assert state.get("rank", self.rank) == self.rank
        self.average.load_state_dict(state["average"])
        self.best, self.calls = state["best"], state["calls"]


class Unsaveable(Keeps):
    def state_dict(self) -> dict[str, Any]:
        return {"fraction": Fraction(1, 3)}


@dataclass(kw_only=True)
class CalledBack(Plain):
    folder: str = ""
    kind: str = "Keeps"
    per_rank: bool = False

    def __post_init__(self) -> None:
        self._models: list[nn.Module] = []

    def model(self) -> nn.Module:
        self._models[:] = [super().model()]
        return self._models[0]

    def callbacks(self) -> Sequence[Callback]:
        return [globals()[self.kind](self._models, self.per_rank, self.folder)]


@dataclass(kw_only=True)
class ScheduleFree(Plain):
    epochs: int = 2
    whole: bool = False

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return (ModedByLength if self.whole else ModedSGD)(model.parameters())

    def eval_data(self) -> Any:
        return self.train_data()


class ModedByLength(ModedSGD):
    """Looks at a whole weight: each gradient has the length 1."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / parameter.grad.norm()
        super().step()


class Odd(Optimizer):
    """Keeps what torch's own optimizers do not: in its groups, beside them, and of other types.

    Float64 and whole-number tensors, a number, a text and a tuple for each parameter; a count in
    the group, as schedule-free optimizers have one; and a state that belongs to no parameter.
    """

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "seen": 0, "name": "odd"})
        self.state["all"] = {"steps": 0, "longest": torch.zeros((), dtype=torch.float64)}  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        shared = self.state["all"]  # type: ignore[index]
        shared["steps"] += 1
        for group in self.param_groups:
            group["seen"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["sum"] = torch.zeros_like(parameter, dtype=torch.float64)
                    state["count"] = torch.full((), 2**24, dtype=torch.int64)
                    state["last"], state["kind"], state["betas"] = 0.0, "first", (0.5, 0.25)
                    state["lately"] = [torch.zeros_like(parameter)]
                state["sum"] += parameter.grad.double() / 3
                state["count"] += 1
                state["kind"] = {"first": "second", "second": "third", "third": "first"}[
                    state["kind"]
                ]
                count = int(state["count"]) - 2**24
                sign = 1.0 if state["kind"] == "second" else 0.5
                move = sign * state["sum"] / (count + group["seen"] + shared["steps"])
                shared["longest"] = torch.maximum(shared["longest"], move.norm())
                move = move / (1 + shared["longest"] + state["last"] * state["betas"][1])
                state["last"] = float(move.norm())
                parameter.sub_((group["lr"] * move).to(parameter.dtype))


@dataclass(kw_only=True)
class OddImages(Images):
    lr: float = 0.5

    def optimizer(self, model: nn.Module) -> Optimizer:
        return Odd(model.parameters(), self.lr)


@dataclass(kw_only=True)
class Rates(Plain):
    """SGD with momentum whose rate is a field."""

    lr: float = 0.01
    momentum: float = 0.9
    hidden: int = 8
    api_key: str = ""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 1))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr, momentum=self.momentum)

    def eval_data(self) -> tuple[Tensor, Tensor]:
        return self.train_data()


class Scheduled(Rates):
    def schedule(self, step: int) -> float:
        return 1 / (1 + step)


class OnPlateau(Scheduled):
    """The rate falls with the first evaluation that is no better by a fifth."""

    def schedule(self, step: int) -> float:
        return 1 + step % 2

    def plateau(self) -> Plateau:
        return Plateau(rule="min:loss", factor=0.5, patience=0, threshold=0.2, cooldown=1)


class RatesAdam(Rates):
    """The same model with another optimizer."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.lr)


@dataclass(kw_only=True)
class Grouped(Plain):
    """A backbone at one rate and a head at another: the first group holds both, or the second."""

    swapped: bool = False

    def optimizer(self, model: nn.Module) -> Optimizer:
        head, tail = list(model[0].parameters()), list(model[2].parameters())
        groups = [{"params": head, "lr": 1e-2}, {"params": tail, "lr": 1e-3}]
        if self.swapped:
            groups[0]["params"], groups[1]["params"] = tail, head
        return SGD(groups, momentum=0.9)


class Draws(nn.Module):
    """Draws from every generator that a program may know of, in forward."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return inputs
        factor = 1 + random.random() + np.random.random() + np.random.standard_normal()
        return inputs * factor + random.gauss(0, 1) + torch.rand_like(inputs)


class Restless(Plain):
    """Random numbers in forward that the engine cannot key."""

    def model(self) -> nn.Module:
        return nn.Sequential(Draws(), *super().model())


class RestlessJudged(Restless):
    """Judged on a data set that draws while it is read, too."""

    def eval_data(self) -> Any:
        return contract_tasks.NoisyRows()


class Averaging(nn.Module):
    """A mean of its inputs that no `state_dict` has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(inputs.detach().mean(0), 0.1)
        return inputs - self.mean


class Averaged(Plain):
    def model(self) -> nn.Module:
        return nn.Sequential(Averaging(), *super().model())


@dataclass(kw_only=True)
class Hooked(Plain):
    """Writes into the file `seen` what is unpickled from here on;
    itself it unpickles a fraction."""

    seen: str = ""

    def train_data(self) -> Any:
        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "pickle.find_class":
                with open(self.seen, "a") as file:
                    file.write(f"{'.'.join(arguments)}\n")

        sys.addaudithook(hook)
        pickle.loads(pickle.dumps(Fraction(1, 2)))
        return super().train_data()


@dataclass(kw_only=True)
class Secretive(Plain):
    """Fields whose names say what they are, and some whose values do."""

    api_key: str = ""
    hfToken: str = ""
    db_password: str = ""
    source: str = ""
    aws: str = ""
    sort_by: str = "size"
    tokenizer: str = "words"


class Speaks(Plain):
    """Prints what would steer a terminal, and measures metrics of such names."""

    def train_data(self) -> Any:
        sys.stdout.buffer.write(HOSTILE.encode() + b"\xff\xfe\n")
        print("x" * 1_000_000, flush=True)
        return super().train_data()

    def eval_data(self) -> Any:
        return super().train_data()

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        return {HOSTILE: (output.sum(), len(output))}


class Fails(Plain):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        raise ValueError(HOSTILE)


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\x08\x7f\u202eevil"


class Counted(Plain):
    """A map-style data set, so that loader workers have something to do."""

    def train_data(self) -> Any:
        return contract_tasks.NoisyRows()


# --- loops of one's own, in the ranks ---------------------------------------------------------


def _trainer(argument: dict[str, Any], attempt: str) -> Trainer:
    torch.set_num_threads(1)
    world = World.from_environment()
    if world.store:
        world = replace(world, store=world.store + attempt)
    module = sys.modules[__name__] if argument["task"] in globals() else contract_tasks
    return Trainer(getattr(module, argument["task"])(), Job(**argument["job"]), world=world)


def _train(trainer: Trainer, steps: int) -> Iterator[float]:
    for batch in trainer.batches(steps=steps):
        yield trainer.step(batch).loss


def saved_and_resumed(argument: dict[str, Any]) -> None:
    """k steps, `save`; another trainer: `resume`, k more. Equal to 2k steps without a break."""
    k, job = argument["steps"], argument["job"]
    with _trainer({**argument, "job": {**job, "run_dir": ""}}, "-whole") as trainer:
        whole = list(_train(trainer, 2 * k))
        wanted = weights_sha256(trainer.weights())
    with _trainer(argument, "-first") as trainer:
        assert trainer.resume() is None
        losses = list(_train(trainer, k))
        assert trainer.save()
    with _trainer(argument, "-second") as trainer:
        assert trainer.resume() == k
        assert trainer.progress.batch_index == k
        losses += _train(trainer, 2 * k)
        assert losses == whole
        assert weights_sha256(trainer.weights()) == wanted


def state_and_load_state(argument: dict[str, Any]) -> None:
    """The same by `state` and `load_state`, twice: taking a state up does not use it up."""
    k = argument["steps"]
    with _trainer(argument, "-whole") as trainer:
        list(_train(trainer, k))
        state = trainer.state()
        list(_train(trainer, 2 * k))
        wanted = weights_sha256(trainer.weights())
    for attempt in ("-second", "-third"):
        with _trainer(argument, attempt) as trainer:
            trainer.load_state(state)
            list(_train(trainer, 2 * k))
            assert weights_sha256(trainer.weights()) == wanted


@dataclass(kw_only=True)
class Unjudged(contract_tasks.Sentences):
    """Without data to evaluate on, its first forward pass is that of a step."""

    def eval_data(self) -> None:  # type: ignore[override]
        return None


@dataclass(kw_only=True)
class Removing(Plain):
    """In the middle of the training somebody removes a file of the run folder, or all of it."""

    removes: str = ""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        if torch.is_grad_enabled() and os.environ["RANK"] == "0":
            time.sleep(0.02)
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 20:
                path = Path(self.removes)
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return super().loss(output, batch)
