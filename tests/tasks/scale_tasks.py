"""A task with BatchNorm and dropout whose steps take a while, until a file says that they need not.

A change of the ranks then comes in the middle of the training, on a fast and on a slow machine:
the longer a process waits for that file, the longer its passes take.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from allranks.errors import RequestError
from allranks.launcher.world import World
from allranks.torch import Task, state_stream
from allranks.torch.data.batch import Batch

PASS_S, LATER_S, LATER = 0.005, 0.1, 2.0  # in the first two seconds, and after


class Counts(torch.optim.AdamW):
    """Counts its steps where no state dict has them."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


class OfAll(torch.optim.AdamW):
    """Updates by the norm of all gradients, so not of some parameters alone."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        return super().step(closure)


def dies_in_a_stream(part: str) -> None:
    """Let this rank be killed when it sends, or receives, the third part of a state, the last."""
    kind: Any
    kind, name = {
        "sends": (state_stream.Sending, "after_step"),
        "receives": (state_stream.StateReceiver, "_take"),
    }[part]
    original, calls = getattr(kind, name), [0]

    def call(self: Any, *arguments: Any, **more: Any) -> Any:
        calls[0] += part == "receives" or self._is_connected
        if calls[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *arguments, **more)

    setattr(kind, name, call)


@dataclass
class Unhurried(Task):
    """Eight shards in a batch, each a pass of its own under `--bitwise`."""

    batch_size: int = 32
    epochs: int = 1000
    hurry: str = ""
    """The file with which a pass takes no longer than it must."""
    fault: str = ""
    """What goes wrong in a rank that joins, once it has taken up its state (`_go_wrong`)."""
    odd: int = 2
    """The number of that rank."""
    _began_at: float = field(init=False, default=0)

    def model(self) -> nn.Module:
        self._began_at = time.monotonic()
        state_stream.LEAST_BYTES = 1  # a part is one tensor
        state_stream.MOST_WAITING = state_stream.MOST_STEPS = 1000  # however slow this machine is
        world, fault = World.from_environment(), self.fault
        if (fault, world.number, world.group) in (("sends", 0, 0), ("receives", self.odd, -1)):
            dies_in_a_stream(fault)
        return nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        kinds = {"counts": Counts, "of all": OfAll}
        optimizer = kinds.get(self.fault, torch.optim.AdamW)(model.parameters(), lr=1e-2)
        world = World.from_environment()
        if self.fault and world.group < 0 and world.number == self.odd:
            optimizer.register_load_state_dict_post_hook(
                lambda loaded: self._go_wrong(loaded, model)
            )
        return optimizer

    @torch.no_grad()
    def _go_wrong(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        if self.fault == "moment":
            optimizer.state[next(model.parameters())]["exp_avg"].add_(1)
        elif self.fault == "buffer":
            dict(model.named_buffers())["1.running_mean"].add_(1)
        elif self.fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == "raises":
            raise ValueError("no such state")
        elif self.fault == "refuses":
            raise RequestError(asked="a state", found="another one", why="it is", do="nothing")

    def train_data(self) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
        return inputs, inputs[:, :3].argmax(1)

    def eval_data(self) -> tuple[Tensor, Tensor]:
        inputs, classes = self.train_data()
        return inputs[:40], classes[:40]

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(output))}

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        if self.hurry and not os.path.exists(self.hurry):
            time.sleep(PASS_S if time.monotonic() < self._began_at + LATER else LATER_S)
        return functional.cross_entropy(output, batch[1], reduction="none")
