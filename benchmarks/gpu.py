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
from collections.abc import Callable
from pathlib import Path

import torch
from harness import Comparison, finish_record, ratio, say, start_record
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from allranks.job.job import Job
from allranks.programs.gpus import SMALL as SMALL_GPT
from allranks.programs.gpus import GpuWorkload, adamw, measure, task_of, tokens
from allranks.programs.models.gpt import gpt2_124m
from allranks.programs.models.vision import resnet20, resnet50
from allranks.torch import Trainer
from allranks.torch.model.flops import TERA, peak_flops

BAR = 1 / 0.99  # time of ours over the time by hand
NO_DEVICE = 3


def images(size: int, classes: int) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda count, drawn: (
        torch.randn(count, 3, size, size, generator=drawn),
        torch.randint(classes, (count,), generator=drawn),
    )


def sgd(model: nn.Module, fused: bool) -> Optimizer:
    return SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)


LARGE = (
    GpuWorkload("ResNet-50", "images", 1, 256, resnet50, sgd, images(224, 1000), True),
    GpuWorkload("GPT-2 124M", "tokens", 1024, 32, gpt2_124m, adamw, tokens(1024, 50257)),
)
SMALL = (
    GpuWorkload("ResNet-20, small", "images", 1, 16, resnet20, sgd, images(32, 10), True),
    SMALL_GPT,
)


def flops_per_sample(workload: GpuWorkload, device: torch.device) -> float | None:
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
            found = measure(workload, device, compiled, given.blocks, given.steps)
            taken = {who: one["seconds"] for who, one in found.items()}
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
            waits = record.setdefault("waits_per_step", {})
            waits[what] = found["allranks"].get("waits")
    finish_record(record, comparisons, given.records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
