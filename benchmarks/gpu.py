"""One GPU: ResNet-50 (images/s) and GPT-2 124M (tokens/s, MFU)
beside the best loop written by hand.

    python benchmarks/gpu.py                 on a machine with a GPU
    python benchmarks/gpu.py --small         the same in small on the CPU: does it run, not how fast

Contenders train the same model in bf16 on the same batches, which lie on the device before anything
is timed, with the same fused optimizer; each keeps the loss of every step as a Python number:

    hand, hand-compiled           a loop as a person would tune it: autocast, channels-last images,
                                  `zero_grad(set_to_none)`, cuDNN's own search for kernels; the loss
                                  is fetched one step late, so that the device never waits
    allranks, allranks-compiled   our Trainer in one process

They take turns in blocks of steps; the ratio of their rates is compared pair by pair (`harness`).
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from harness import Comparison, finish_record, order_of, ratio, say, start_record
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from allranks.job.job import Job
from allranks.programs.models.gpt import GPTShape, gpt, gpt2_124m
from allranks.programs.models.resnet import resnet20, resnet50
from allranks.torch import Task, Trainer
from allranks.torch.model.flops import TERA, peak_flops
from allranks.training.progress import StepResult

BAR = 1 / 0.99  # time of ours over the time by hand
STEPS_LIMIT = 10**9
NO_DEVICE = 3
STEADY = 20  # steps after which nothing is sent any more that only the first ones need


@dataclass(frozen=True)
class Workload:
    """`sample` makes one batch of inputs and targets on the CPU; `units` count in one sample."""

    name: str
    unit: str
    units: int
    batch: int
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module, bool], Optimizer]
    sample: Callable[[int], tuple[Tensor, Tensor]]
    channels_last: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make_model()

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """One for each image, or (sample, token)."""
        return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none").view(
            target.shape
        )


def images(size: int, classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda count: (torch.randn(count, 3, size, size), torch.randint(classes, (count,)))


def tokens(context: int, vocabulary: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def made(count: int) -> tuple[Tensor, Tensor]:
        text = torch.randint(vocabulary, (count, context + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return made


def sgd(model: nn.Module, fused: bool) -> Optimizer:
    return SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)


def adamw(model: nn.Module, fused: bool) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-4, fused=fused)


SMALL_GPT = GPTShape(vocabulary=96, context=32, width=32, layers=2, heads=2)
LARGE = (
    Workload("ResNet-50", "images", 1, 256, resnet50, sgd, images(224, 1000), True),
    Workload("GPT-2 124M", "tokens", 1024, 32, gpt2_124m, adamw, tokens(1024, 50257)),
)
SMALL = (
    Workload("ResNet-20, small", "images", 1, 16, resnet20, sgd, images(32, 10), True),
    Workload("GPT, small", "tokens", 32, 8, lambda: gpt(SMALL_GPT), adamw, tokens(32, 96)),
)


def by_hand(workload: Workload, device: torch.device, compiled: bool) -> Iterator[float]:
    """A loop as a person would tune it; yields after each step, the loss of the step before."""
    model = workload.model().to(device)
    if workload.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = workload.make_optimizer(model, device.type == "cuda")
    call = torch.compile(model) if compiled else model
    inputs, targets = (tensor.to(device) for tensor in data_of(workload))
    if workload.channels_last:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    before: Tensor | None = None
    while True:
        for start in range(0, len(inputs), workload.batch):
            rows = slice(start, start + workload.batch)
            with torch.autocast(device.type, torch.bfloat16):
                loss = workload.losses(call(inputs[rows]), targets[rows]).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            late, before = before, loss.detach()
            yield float("nan") if late is None else float(late)


def data_of(workload: Workload) -> tuple[Tensor, Tensor]:
    """Four batches, the same for all."""
    torch.manual_seed(1)
    return workload.sample(4 * workload.batch)


def task_of(workload: Workload, device: torch.device) -> Task:
    """The same training as a task, its data on the device."""

    class Measured(Task):
        def model(self) -> nn.Module:
            return workload.model()

        def optimizer(self, model: nn.Module) -> Optimizer:
            return workload.make_optimizer(model, device.type == "cuda")

        def train_data(self) -> tuple[Tensor, Tensor]:
            inputs, targets = data_of(workload)
            return inputs.to(device), targets.to(device)

        def loss(self, output: Tensor, batch: Any) -> Tensor:
            return workload.losses(output, batch[1])

    return Measured(batch_size=workload.batch, shards=1)


def by_trainer(workload: Workload, device: torch.device, compiled: bool) -> Iterator[float]:
    """Our trainer in one process, the whole batch one shard; the losses as late as by hand."""
    job = Job(
        device=device.type,
        precision="bf16",
        channels_last=workload.channels_last,
        compile="inductor" if compiled else "",
        steps=STEPS_LIMIT,
    )
    before: StepResult | None = None
    with Trainer(task_of(workload, device), job) as trainer:
        for batch in trainer.batches():
            late, before = before, trainer.step(batch)
            yield float("nan") if late is None else late.loss


CONTENDERS = {"hand": by_hand, "allranks": by_trainer}


def measure(
    workload: Workload, device: torch.device, compiled: bool, blocks: int, steps: int
) -> dict[str, list[float]]:
    """Seconds per step of each contender in each of `blocks` rounds; the first blocks warm up."""
    loops = {name: make(workload, device, compiled) for name, make in CONTENDERS.items()}
    taken: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        for _ in islice(loop, steps):
            pass
    for turn in range(blocks):
        for name in order_of(list(loops), turn):
            _wait(device)
            start = time.perf_counter()
            for _ in islice(loops[name], steps):
                pass
            _wait(device)
            taken[name].append((time.perf_counter() - start) / steps)
    for loop in loops.values():
        loop.close()  # type: ignore[attr-defined]
    return taken


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def waits_in_a_step(workload: Workload, device: torch.device) -> int | None:
    """How often our step makes the processor wait for the device; `None` where there is none."""
    if device.type != "cuda":
        return None
    loop = by_trainer(workload, device, compiled=False)
    for _ in islice(loop, STEADY):
        pass
    found = waits_of(lambda: next(loop))
    loop.close()  # type: ignore[attr-defined]
    return found


def waits_of(step: Callable[[], object]) -> int:
    """How often a step makes the processor wait for the device, as torch counts it."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def flops_per_sample(workload: Workload, device: torch.device) -> float | None:
    """Counted by our trainer in its first step, where the device's peak is known."""
    job = Job(device=device.type, precision="bf16", channels_last=workload.channels_last)
    with Trainer(task_of(workload, device), job) as trainer:
        trainer.step(next(trainer.batches()))
        return trainer.meter.flops_per_sample


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--small", action="store_true", help="on the CPU, to see that it runs")
    parser.add_argument("--blocks", type=int, default=20, help="pairs of blocks (default 20)")
    parser.add_argument("--steps", type=int, default=20, help="steps in a block (default 20)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--records", type=Path, default=Path(__file__).parent / "records")
    given = parser.parse_args()
    if not (given.small or torch.cuda.is_available()):
        say("no GPU here: run it where there is one, or with --small to see that it runs")
        return NO_DEVICE
    device = torch.device("cpu" if given.small else "cuda")
    name = "cpu" if given.small else torch.cuda.get_device_name()
    torch.backends.cudnn.benchmark = True
    peak = None if given.small else peak_flops(name, "bf16")
    say(f"{name}: peak {'unknown' if peak is None else f'{peak / TERA:.0f} Tflop/s in bf16'}")
    record = start_record("gpu-small" if given.small else "gpu", vars(given) | {"records": None})
    record["device"], record["peak_flops"] = name, peak
    record["samples"], record["rates"] = {}, {}
    comparisons: list[Comparison] = []
    for workload in SMALL if given.small else LARGE:
        flops = None if peak is None else flops_per_sample(workload, device)
        if flops is not None and peak is not None:
            say(f"{workload.name}: at most {peak / flops * workload.units:.0f} {workload.unit}/s")
        for compiled in (False,) if given.no_compile else (False, True):
            what = f"{workload.name}{', compiled' if compiled else ''}"
            taken = measure(workload, device, compiled, given.blocks, given.steps)
            record["samples"][what] = taken
            pairs = list(zip(taken["allranks"], taken["hand"], strict=True))
            comparisons.append(
                ratio(
                    what, "time per step", "allranks", "hand", pairs, None if given.small else BAR
                )
            )
            for who, seconds in taken.items():
                rate = workload.batch / sorted(seconds)[len(seconds) // 2]
                record["rates"][f"{what}, {who}"] = {
                    f"{workload.unit}_per_s": rate * workload.units,
                    "mfu": None if flops is None or peak is None else flops * rate / peak,
                }
                say(f"{what}, {who}: {rate * workload.units:.0f} {workload.unit}/s")
        record.setdefault("waits_per_step", {})[workload.name] = waits_in_a_step(workload, device)
    finish_record(record, comparisons, given.records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
