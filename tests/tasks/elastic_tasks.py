"""A small task with BatchNorm and dropout for elastic jobs, and what ranks do to it on purpose."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

import allranks.torch.regroup as regroup
import allranks.torch.worker as worker
from allranks.errors import PeerLost
from allranks.job.run_folder import JsonLines
from allranks.launcher import heartbeat
from allranks.torch import Task
from allranks.torch.checkpoint.state import copied
from allranks.torch.regroup import hand_over
from allranks.training.callback import Callback
from allranks.training.engine.regroup import Handover


class NotePid(Callback):
    """Writes down which process makes which step, and how many of its trainers are in memory."""

    def on_start(self, trainer: Any) -> None:
        self.trainers = WeakSet[Any]()
        path = trainer.saving.sources[0].parent / f"pids-{os.environ['RANK']}.jsonl"
        self.file = JsonLines(path)

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        self.trainers.add(trainer)
        row = {"step": result.batch_index, "pid": os.getpid(), "trainers": len(self.trainers)}
        self.file.row(row)
        self.file.flush()

    def on_end(self, trainer: Any) -> None:
        self.file.close()


@dataclass(kw_only=True)
class Elastic(Task):
    batch_size: int = 64
    shards: int = 8
    epochs: int = 10
    notes: str = ""

    def model(self) -> nn.Module:
        first = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2))
        return nn.Sequential(first, nn.Linear(32, 2))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def train_data(self) -> Any:
        x = torch.randn(640, 10, generator=torch.Generator().manual_seed(0))
        return x, (x.sum(1) > 0).long()

    def eval_data(self) -> Any:
        return self.train_data()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")

    def inputs(self, batch: Any) -> Any:
        return (batch[0],)

    def callbacks(self) -> list[Callback]:
        return [NotePid()]


class Plain(Elastic):
    """Without statistics of a shard, which may then be cut."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))


class Unlike(Elastic):
    """Ranks have unequally many threads, so that their bits might differ."""

    def model(self) -> nn.Module:
        torch.set_num_threads(1 + int(os.environ["RANK"]) % 2)
        return super().model()


@dataclass
class FallBehind(Callback):
    """Rank 2 hands over what it held after step 3, and has lost its weights.

    If it `lies`, it goes on with other weights than it receives.
    """

    lies: bool = False

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        if trainer.world.number == 2 and result.batch_index == 3:
            old = hand_over(trainer)
            state = copied(old.state)

            def late(trainer: Any) -> Handover:
                now = hand_over(trainer)
                with torch.no_grad():
                    for weight in trainer.model.parameters():
                        weight.zero_()
                return dataclasses.replace(now, state=state, row=old.row, unheard=None)

            worker.hand_over = late  # type: ignore[assignment]
            if self.lies:
                received = regroup.unflatten
                regroup.unflatten = lambda skeleton, tensors: received(
                    skeleton,
                    {path: t * 2 if t.is_floating_point() else t for path, t in tensors.items()},
                )


class Plan(Callback):
    """Rank 0 writes after step 3, as a supervisor does, that another group begins with step 6."""

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        if trainer.world.number == 0 and result.batch_index == 3:
            memory = trainer.heartbeat._all
            memory[heartbeat._FROM_STEP] = 6
            for rank in range(trainer.world.size):
                memory[heartbeat._MEMBERS + rank] = 1
            memory[heartbeat._GROUP] = 1


BEATS: list[Any] = []


class KeepHeartbeat(Callback):
    def on_start(self, trainer: Any) -> None:
        BEATS.append(trainer.heartbeat)


class Interrupted(Elastic):
    """Rank 0 notes its passes of step 5. In the first it waits until rank 1 is lost.

    Rank 1 kills itself once rank 0 is in that pass.
    """

    def callbacks(self) -> list[Callback]:
        return [NotePid(), KeepHeartbeat()]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        until, passes = monotonic() + 60, Path(self.notes, "passes")
        for beat in BEATS:
            if beat.step == 5 and torch.is_grad_enabled():
                if os.environ["RANK"] == "1":
                    while not passes.exists() and monotonic() < until:
                        sleep(0.001)
                    os.kill(os.getpid(), signal.SIGKILL)
                with passes.open("a") as file:
                    file.write(f"{beat.group_number}\n")
                while beat.group_number == 0 and monotonic() < until:
                    sleep(0.001)
        return super().loss(output, batch)


class Late(Elastic):
    def callbacks(self) -> list[Callback]:
        return [FallBehind()]


class Lies(Elastic):
    def callbacks(self) -> list[Callback]:
        return [FallBehind(lies=True)]


class Planned(Elastic):
    def callbacks(self) -> list[Callback]:
        return [Plan()]


class BrokenOff(torch.optim.AdamW):
    """Once, in its update after step 4, rank 2 dies and the others lose it half-way."""

    is_due = False

    def step(self, closure: Any = None) -> Any:
        if BrokenOff.is_due:
            BrokenOff.is_due = False
            if os.environ["RANK"] == "2":
                os.kill(os.getpid(), signal.SIGKILL)
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(2.0)
            raise PeerLost("rank 2")
        return super().step(closure)


class AfterStepFour(Callback):
    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        BrokenOff.is_due = result.batch_index == 4 and trainer.world.group == 0


class BreaksOff(Elastic):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return BrokenOff(model.parameters(), lr=0.01)

    def callbacks(self) -> list[Callback]:
        return [AfterStepFour()]


class Unplug(Callback):
    """Rank 1 breaks all its connections after step 4, and no process ends."""

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        if os.environ["RANK"] == "1" and result.batch_index == 4:
            for fd in os.listdir("/proc/self/fd"):
                with suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as connection:
                    if connection.family == socket.AF_INET and connection.getpeername():
                        connection.shutdown(socket.SHUT_RDWR)


class Unplugged(Elastic):
    def callbacks(self) -> list[Callback]:
        return [*super().callbacks(), Unplug()]


class LastRows(Callback):
    """Keeps a tensor whose shape is another one on each rank."""

    rows = torch.zeros(0)

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        self.rows = torch.zeros(1 + trainer.world.number)

    def state_dict(self) -> dict[str, Tensor]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.rows = state["rows"]


class KeepsRows(Elastic):
    def callbacks(self) -> list[Callback]:
        return [LastRows()]


class NormalisedSGD(torch.optim.SGD):
    """Steps of one length: it needs whole weights."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad = parameter.grad / (parameter.grad.norm() + 1e-6)
        return super().step(closure)


class NeedsWhole(Elastic):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return NormalisedSGD(model.parameters(), lr=0.02, momentum=0.9)


class EvaluateAlways(Callback):
    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        trainer.evaluate()


class Evaluated(Elastic):
    def callbacks(self) -> list[Callback]:
        return [EvaluateAlways()]


class DieEvaluated(Callback):
    """Rank 0 dies after the evaluation of step 6, of which it has written nothing yet."""

    def on_evaluation_end(self, trainer: Any) -> None:
        if trainer.world.number == 0 and trainer.progress.batch_index == 6:
            sleep(0.3)  # so that the others have its metrics, and wait for it in the next step
            os.kill(os.getpid(), signal.SIGKILL)


class DiesEvaluated(Elastic):
    def callbacks(self) -> list[Callback]:
        return [DieEvaluated()]


class Counting(Sampler[int]):
    """Counts its epochs itself."""

    epoch = 0

    def __len__(self) -> int:
        return 640

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(640, generator=torch.Generator().manual_seed(self.epoch)))


class Rows(IterableDataset[Any]):
    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter([self.samples[number] for number in range(640)])


class Skipping:
    """A stream of 8 shards."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def open(self, shard: int, epoch: int, seed: int, skip: int) -> Any:
        return iter([self.samples[number] for number in range(shard + 8 * skip, 640, 8)])


class Placed(Skipping):
    """A stream that knows its place."""

    def open(self, shard: int, epoch: int, seed: int, skip: int) -> Any:
        return Place(super().open(shard, epoch, seed, skip))


class PlacedAndSkipping(Placed):
    skips = True


class Place:
    def __init__(self, samples: Iterator[Any]) -> None:
        self.samples, self.at = samples, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.at += 1
        return next(self.samples)

    def state_dict(self) -> Any:
        return self.at

    def load_state_dict(self, state: Any) -> None:
        self.at = state


@dataclass(kw_only=True)
class Read(Elastic):
    """The same samples, read in other ways."""

    data: str = ""

    def train_data(self) -> Any:
        samples = TensorDataset(*super().train_data())
        weighted = WeightedRandomSampler([1.0] * 640, 640)
        ways: dict[str, Callable[[], Any]] = {
            "own": lambda: DataLoader(samples, batch_size=64, sampler=Counting()),
            "whole": lambda: DataLoader(Rows(samples), batch_size=64),
            "placed": lambda: Placed(samples),
            "shuffled": lambda: DataLoader(samples, batch_size=64, shuffle=True),
            "weighted": lambda: DataLoader(samples, batch_size=64, sampler=weighted),
            "skips": lambda: Skipping(samples),
            "both": lambda: PlacedAndSkipping(samples),
        }
        return ways[self.data]()

    def eval_data(self) -> Any:
        return None


MODEL = Elastic().model()


class Same(Elastic):
    def model(self) -> nn.Module:
        return MODEL
