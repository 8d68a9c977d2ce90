"""A step of one device, of two parts of a model on two, and of two parts with a split micro-batch.

    python benchmarks/split_sweep.py

What the PyTorch tutorial "Single-Machine Model Parallel" sweeps, on two workloads:

* `stages that wait`: a part waits FIXED_S + rows * ROW_S in forward, and as long in backward, so a
  step of m pieces through p parts takes at least 2 (m + p - 1) (FIXED_S + rows / m * ROW_S). Few
  pieces leave one part idle, many pay the fixed time again and again: the sweep has the form of a
  U, and its distance from the formula is what the strategy itself costs.
* `ResNet-20`: real arithmetic, one thread for each part, on as many cores as there are. Parts that
  share the cores with others show less than the machine could.

Contenders take turns in one process; a round times a few steps of each. Beside the record, a plot
of each workload goes to `records/` as SVG.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import RECORDS, finish_record, median_interval, order_of, ratio, say, start_record
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from allranks.job.job import Job
from allranks.programs.models import resnet20
from allranks.tools.bench.figure import Curve, plot
from allranks.torch import Task, Trainer

FIXED_S, ROW_S = 0.002, 0.001
ROWS, SHARDS, PARTS = 32, 32, 2
SPLITS = (1, 2, 4, 8, 16, 32)
STEPS, WARM_UP = 3, 2
WAITING, RESNET = "stages that wait", "ResNet-20"


class _Wait(torch.autograd.Function):
    """Takes as long as the rows that go through ask for, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        time.sleep(FIXED_S + len(inputs) * ROW_S)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        time.sleep(FIXED_S + len(gradient) * ROW_S)
        return gradient


class _Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        apply: Any = _Wait.apply
        return self.linear(apply(self.linear(inputs)))


@dataclass(kw_only=True)
class Waiting(Task):
    """Stages of equal waiting."""

    batch_size: int = ROWS
    shards: int = SHARDS
    epochs: int = 10**6

    def model(self) -> nn.Module:
        return nn.Sequential(*(_Stage() for _ in range(PARTS)))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=1e-3)

    def train_data(self) -> tuple[Tensor, Tensor]:
        return torch.randn(ROWS * 4, 4), torch.randn(ROWS * 4, 4)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).square().mean(1)


@dataclass(kw_only=True)
class Pictures(Waiting):
    """A ResNet for CIFAR; two rows to a shard, as BatchNorm needs more than one."""

    batch_size: int = 2 * ROWS

    def model(self) -> nn.Module:
        return resnet20()

    def train_data(self) -> tuple[Tensor, Tensor]:
        return torch.randn(ROWS * 8, 3, 32, 32), torch.randint(10, (ROWS * 8,))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")


WORKLOADS: dict[str, type[Task]] = {WAITING: Waiting, RESNET: Pictures}


def jobs(rows: int) -> dict[str, Job]:
    """What is compared, by its name; `rows` are those of a batch.

    Pieces are smaller than a batch, which a cache likes: so does one device in micro-batches.
    """
    asked = {"one device": ("single", None)}
    asked |= {f"one device, {m} micro-batches": ("single", rows // m) for m in (4, 16)}
    asked |= {f"split {m}": (f"model-parallel:parts={PARTS},split={m}", None) for m in SPLITS}
    return {
        name: Job(strategy=strategy, micro_batch=limit, witness="off", steps=10**9)
        for name, (strategy, limit) in asked.items()
    }


def floor_s(pieces: int, parts: int = PARTS) -> float:
    """What a step of stages that wait takes at least."""
    return 2 * (pieces + parts - 1) * (FIXED_S + ROWS / pieces * ROW_S)


def _floor_of(name: str) -> float:
    """The same of a contender, by its name."""
    if name.startswith("split "):
        return floor_s(int(name.removeprefix("split ")))
    pieces = 1 if name == "one device" else int(name.split()[2])
    return 2 * PARTS * pieces * (FIXED_S + ROWS / pieces * ROW_S)


class Contender:
    """A training that takes some steps when it is asked to."""

    def __init__(self, task: Task, job: Job) -> None:
        self.trainer = Trainer(task, job)
        self.batches = self.trainer.batches()
        self.losses = [self.trainer.step(next(self.batches)).loss for _ in range(WARM_UP)]

    def step_s(self) -> float:
        """The mean seconds of a step."""
        start = time.perf_counter()
        for _ in range(STEPS):
            self.trainer.step(next(self.batches))
        return (time.perf_counter() - start) / STEPS


def measured(workload: str, rounds: int) -> dict[str, list[float]]:
    """The seconds of a step of each contender, round by round."""
    make = WORKLOADS[workload]
    contenders = {name: Contender(make(), job) for name, job in jobs(make().batch_size).items()}
    first = [contender.losses for contender in contenders.values()]
    if any(abs(a - b) > 1e-3 * abs(b) for own in first for a, b in zip(own, first[0], strict=True)):
        raise SystemExit(f"the contenders do not compute the same: {first}")
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name in order_of(list(contenders), turn):
            found[name].append(contenders[name].step_s())
        say(f"{workload}: round {turn + 1} of {rounds}")
    for contender in contenders.values():
        contender.trainer.close()
    return found


def drawn(workload: str, found: dict[str, list[float]], path: Path) -> None:
    """The plot of one workload."""
    points = {m: median_interval(found[f"split {m}"]) for m in SPLITS}
    one = median_interval(found["one device"])
    curves = [
        Curve("pieces in flight", [(m, i.median, i.low, i.high) for m, i in points.items()]),
        Curve("one device", [(m, one.median, one.low, one.high) for m in SPLITS]),
    ]
    if workload == WAITING:
        least = [(m, floor_s(m)) for m in SPLITS]
        curves.append(Curve("2 (m + p - 1) (fixed + rows / m)", [(m, s, s, s) for m, s in least]))
    title = f"{workload}: seconds of a step, {PARTS} parts"
    path.write_text(plot(title, "pieces of a micro-batch", "seconds", curves))


def main() -> None:
    """Measure, and write the record and the plots."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=15, help="rounds for each workload")
    rounds = parser.parse_args().pairs
    torch.set_num_threads(1)
    settings = {"rows": ROWS, "parts": PARTS, "fixed_s": FIXED_S, "row_s": ROW_S, "pairs": rounds}
    record = start_record("split-sweep", settings)
    comparisons, rows, samples = [], [], {}
    for workload in WORKLOADS:
        found = samples[workload] = measured(workload, rounds)
        for name in list(found)[1:]:
            pairs = list(zip(found[name], found["one device"], strict=True))
            comparisons.append(ratio(workload, "step_s", name, "one device", pairs, None))
        for name, values in found.items():
            row = {"what": workload, "contender": name, "step_s": median_interval(values).median}
            if workload == WAITING:
                row["floor_s"] = _floor_of(name)
            rows.append(row)
        file = f"split-sweep-{'waiting' if workload == WAITING else 'resnet20'}.svg"
        RECORDS.mkdir(exist_ok=True)
        drawn(workload, found, RECORDS / file)
    record["rows"], record["samples"] = rows, samples
    finish_record(record, comparisons, RECORDS)


if __name__ == "__main__":
    main()
