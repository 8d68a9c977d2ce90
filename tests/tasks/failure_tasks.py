"""Tasks that go wrong in ways that no injected fault can: in C, in a loader, in the kernel."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bad_tasks import Good

FOREVER_S = 600
GUILTY = "1"  # the rank that does it


def is_guilty() -> bool:
    return os.environ.get("RANK") == GUILTY


@dataclass(kw_only=True)
class Small(Good):
    """A few steps of a linear model; the classes below go wrong in the third of one rank."""

    epochs: int = 1000000
    calls: int = 2

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        if torch.is_grad_enabled() and is_guilty():
            self.calls -= 1
            if self.calls < 0:
                self.go_wrong()
        return super().loss(output, batch)

    def go_wrong(self) -> None:
        """What happens on the guilty rank."""


class HoldsTheInterpreter(Small):
    """An endless loop in C: no other thread and no signal handler of Python runs meanwhile."""

    def go_wrong(self) -> None:
        sum(range(10**15))


class Eats(Small):
    """Takes memory without end."""

    def go_wrong(self) -> None:
        eaten = []
        while True:
            eaten.append(b"x" * 2**24 + os.urandom(1))


class IsRefusedMemory(Small):
    def go_wrong(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
        _ = b"x" * 2**40


class IsRefusedMemoryByTorch(Small):
    def go_wrong(self) -> None:
        torch.empty(2**50)


class Exits(Small):
    def go_wrong(self) -> None:
        sys.exit(0)


class Rows:
    """A data set that is read sample by sample, by loader workers if there are any."""

    def __init__(self, samples: int = 64) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(3, generator=generator), number % 2


class Stuck(Rows):
    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        if is_guilty():
            time.sleep(FOREVER_S)
        return super().__getitem__(number)


class ReadsRows(Good):
    def train_data(self) -> Any:
        return Rows()

    def eval_data(self) -> Any:
        return None


class StuckInData(ReadsRows):
    def train_data(self) -> Any:
        return Stuck()


class StartsSessions(ReadsRows):
    """Every rank starts a process in a session of its own, and writes down who it is."""

    def train_data(self) -> Any:
        if "RANK" in os.environ and "PIDS" in os.environ:
            child = subprocess.Popen(["sleep", str(FOREVER_S)], start_new_session=True)
            Path(os.environ["PIDS"], f"{child.pid}.pid").touch()
        return Rows()


@dataclass(kw_only=True)
class BreaksLater(Good):
    """Its file was edited while it ran: no attempt but the first can make it."""

    def __post_init__(self) -> None:
        if os.environ.get("ALLRANKS_ATTEMPT", "0") != "0":
            raise ValueError("this file was edited")


class OneMore(Good):
    """Rank 1 makes a collective of its own, once."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        LOSSES.append(0)
        if dist.is_initialized() and dist.get_rank() == 1 and len(LOSSES) == 12:
            dist.all_reduce(torch.ones(5000))
        return super().loss(output, batch)


LOSSES: list[int] = []
