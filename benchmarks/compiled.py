"""A step of a compiled model: ours with the default of 8 shards beside a loop compiled by hand.

Four loops in one process, on one rank with one thread, take blocks of steps in turns:

    hand               forward, backward, update and the loss as a number, as in torch's tutorial
    hand-compiled      the same with `torch.compile(model)`
    allranks           our Trainer with 8 shards
    allranks-compiled  the same with `--compile`

ResNet-20 has BatchNorm, which in ours is that of each shard; the small GPT has none. Only time of
the processor is compared. Before anything is timed every loop takes its first steps, in which it is
compiled, and losses of the compiled and the plain loop must be equal up to rounding. A compiler
leaves processes behind it, so this is not a test.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from harness import RECORDS, finish_record, order_of, ratio, say, start_record
from torch import Tensor, nn
from torch.nn import functional as F

from allranks.job.job import Job
from allranks.programs.models.gpt import GPTShape, gpt
from allranks.programs.models.vision import resnet20
from allranks.torch import Task, Trainer

BAR = 1.05
SHARDS = 8
FIRST_STEPS = 3
STEPS_LIMIT = 10**9
LOSSES_APART = 1e-3  # of the loss, after the first steps of two ways to add
SMALL = GPTShape(vocabulary=256, context=64, width=128, layers=4, heads=4)


@dataclass
class Images(Task):
    """ResNet-20 on random images of CIFAR's size."""

    batch_size: int = 64
    shards: int = SHARDS
    epochs: int = 10**6

    def model(self) -> nn.Module:
        return resnet20()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train_data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(4 * self.batch_size, 3, 32, 32, generator=generator)
        return images, torch.randint(10, (len(images),), generator=generator)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")


@dataclass
class Words(Images):
    """A GPT of 4 layers on random bytes."""

    batch_size: int = 16

    def model(self) -> nn.Module:
        return gpt(SMALL)

    def train_data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = (4 * self.batch_size, SMALL.context + 1)
        text = torch.randint(SMALL.vocabulary, shape, generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        losses = F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="none")
        return losses.view(len(output), -1).mean(1)


@dataclass
class Loop:
    """A loop that goes on where its last block of steps ended."""

    step: Callable[[], float]
    losses: list[float] = field(default_factory=list)

    def seconds(self, steps: int) -> float:
        """Processor time of a step, over the next `steps`."""
        before = time.process_time()
        self.losses += [self.step() for _ in range(steps)]
        return (time.process_time() - before) / steps


def by_hand(task: Images, backend: str) -> Loop:
    """A loop over the same samples in their first order."""
    torch.manual_seed(0)
    model = task.model().train()
    optimizer = task.optimizer(model)
    data = task.train_data()
    call = torch.compile(model, backend=backend) if backend else model
    at = iter(range(STEPS_LIMIT))

    def step() -> float:
        start = next(at) * task.batch_size % len(data[0])
        batch = tuple(tensor[start : start + task.batch_size] for tensor in data)
        optimizer.zero_grad()
        loss = task.loss(call(batch[0]), batch).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Loop(step)


def ours(task: Images, backend: str, stack: ExitStack) -> Loop:
    """The Trainer on one rank; without a witness, which looks at the first steps alone."""
    job = Job(strategy="single", threads=1, compile=backend, witness="off")
    trainer = stack.enter_context(Trainer(task, job))
    batches = trainer.batches(steps=STEPS_LIMIT)
    return Loop(lambda: float(trainer.step(next(iter(islice(batches, 1)))).loss))


def check(name: str, loops: dict[str, Loop]) -> None:
    """Compiled or not, a loop computes the same."""
    for plain in ("hand", "allranks"):
        pairs = zip(loops[plain].losses, loops[f"{plain}-compiled"].losses, strict=True)
        if any(abs(a - b) > LOSSES_APART * abs(a) for a, b in pairs):
            raise SystemExit(f"{name}: {plain} and {plain}-compiled do not compute the same")


def measured(task: Images, backend: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step of each loop in each round."""
    with ExitStack() as stack:
        loops = {
            "hand": by_hand(task, ""),
            "hand-compiled": by_hand(task, backend),
            "allranks": ours(task, "", stack),
            "allranks-compiled": ours(task, backend, stack),
        }
        for name, loop in loops.items():
            say(
                f"{type(task).__name__}, {name}: first steps {loop.seconds(FIRST_STEPS):.2f} s each"
            )
        check(type(task).__name__, loops)
        found: dict[str, list[float]] = {name: [] for name in loops}
        for turn in range(rounds):
            for name in order_of(list(loops), turn):
                found[name].append(loops[name].seconds(steps))
            say(f"round {turn + 1} of {rounds}")
    return found


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5, help="of each loop in a round")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    record = start_record("compiled", {**vars(asked), "shards": SHARDS, "threads": 1})
    record["samples"], comparisons = {}, []
    for task in (Images(), Words()):
        name = "ResNet-20" if type(task) is Images else "small GPT"
        found = measured(task, asked.backend, asked.rounds, asked.steps)
        record["samples"][name] = found
        for of, over, bar in (
            ("allranks-compiled", "hand-compiled", BAR),
            ("allranks", "hand", BAR),
            ("hand-compiled", "hand", None),
            ("allranks-compiled", "allranks", None),
        ):
            pairs = list(zip(found[of], found[over], strict=True))
            comparisons.append(ratio(f"{name}, a step", "cpu_s", of, over, pairs, bar))
    finish_record(record, comparisons, RECORDS)


if __name__ == "__main__":
    main()
