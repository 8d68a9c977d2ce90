"""The tasks that `allranks doctor --gpus` trains on devices, and its measurements there."""

from __future__ import annotations

import faulthandler
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import allranks.torch.accelerator as accelerator
from allranks.job.job import Job
from allranks.job.run_folder import JsonLines, rank_events_path
from allranks.programs.models.gpt import GPTShape, gpt
from allranks.torch import MixtureOfExperts, Task, Trainer
from allranks.training.progress import StepResult

LAUNCH = re.compile(r"(cuda|cu|hip)\w*Launch")
STEPS_LIMIT = 10**9
STEADY = 20  # steps after which one-time transfers are over
BLOCKS, STEPS = 6, 8


class Net(nn.Module):
    """Two convolutions. With 10 classes, all tensors after the last bias are misaligned."""

    def __init__(self, classes: int, dropout: float) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.second, self.norm2 = nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.first(x)))
        x = F.relu(self.norm2(self.second(x))).mean((2, 3))
        out: Tensor = self.last(self.drop(x))
        return out


@dataclass(kw_only=True)
class Pictures(Task):
    """520 images by 64: the last batch of an epoch has 8."""

    batch_size: int = 64
    classes: int = 10
    dropout: float = 0.2
    epochs: int = 99

    def model(self) -> nn.Module:
        return Net(self.classes, self.dropout)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def train_data(self) -> tuple[Tensor, Tensor]:
        return self._pictures(520)

    def eval_data(self) -> tuple[Tensor, Tensor]:
        return self._pictures(200)

    def _pictures(self, count: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(5)
        labels = torch.randint(self.classes, (count,), generator=drawn)
        return torch.randn(count, 3, 16, 16, generator=drawn), labels

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Any]:
        return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(output))}


class TooLarge(Pictures):
    """Allocates more memory than there is."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        blocks = [torch.empty(2**34, device=output.device) for _ in range(99)]
        return super().loss(output, batch) * len(blocks)


@dataclass(kw_only=True)
class Words(Task):
    """A GPT of 8 layers and 8 heads, so that up to 8 ranks can cut it along either."""

    batch_size: int = 32
    dropout: float = 0.1
    epochs: int = 99

    def model(self) -> nn.Module:
        shape = {"vocabulary": 96, "context": 32, "width": 64, "layers": 8, "heads": 8}
        return gpt(GPTShape(dropout=self.dropout, **shape))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-3)

    def train_data(self) -> tuple[Tensor, Tensor]:
        return tokens(32, 96)(256, torch.Generator().manual_seed(5))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        losses = F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="none")
        return losses.view(batch[1].shape)


class Mixture(nn.Module):
    """A mixture of 8 experts between an embedding and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(96, 32), nn.Linear(32, 96)
        self.experts = MixtureOfExperts(32, 64, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        out: Tensor = self.last(hidden + self.experts(hidden).output)
        return out


class ExpertWords(Words):
    """The same words for a mixture of experts."""

    def model(self) -> nn.Module:
        return Mixture()


class Layers(Words):
    """The same words for a sequence of layers, which pipeline stages can share."""

    def model(self) -> nn.Module:
        inner = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU())]
        return nn.Sequential(nn.Embedding(96, 64), *inner, nn.Linear(64, 96))


# --- a step beside one of a loop by hand ----------------------------------------------------------

Sample = Callable[[int, torch.Generator | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class GpuWorkload:
    """`sample` makes one batch of inputs and targets on the CPU; `units` count in one sample."""

    name: str
    unit: str
    units: int
    batch: int
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module, bool], Optimizer]
    sample: Sample
    channels_last: bool = False
    shards: int = 1

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make_model()

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """One for each image, or (sample, token)."""
        return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none").view(
            target.shape
        )


def tokens(context: int, vocabulary: int) -> Sample:
    """A function that returns windows of random tokens, and their next tokens."""

    def windows(count: int, drawn: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        text = torch.randint(vocabulary, (count, context + 1), generator=drawn)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return windows


def adamw(model: nn.Module, fused: bool) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-4, fused=fused)


SMALL_GPT = GPTShape(vocabulary=96, context=32, width=32, layers=2, heads=2)
SMALL = GpuWorkload("GPT, small", "tokens", 32, 8, lambda: gpt(SMALL_GPT), adamw, tokens(32, 96))
WORDS = GPTShape(vocabulary=8192, context=512, width=512, layers=12, heads=8, dropout=0.1)
LARGE = GpuWorkload("GPT 42M", "tokens", 512, 16, lambda: gpt(WORDS), adamw, tokens(512, 8192))


def by_hand(workload: GpuWorkload, device: torch.device, compiled: bool) -> Iterator[float]:
    """A hand-tuned loop; yields after each step, with the loss of the step before."""
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


def data_of(workload: GpuWorkload) -> tuple[Tensor, Tensor]:
    """Four batches, the same for all."""
    torch.manual_seed(1)
    return workload.sample(4 * workload.batch, None)


def task_of(workload: GpuWorkload, device: torch.device) -> Task:
    """The same training as a task, its data on the device."""

    class MeasuredTask(Task):
        def model(self) -> nn.Module:
            return workload.model()

        def optimizer(self, model: nn.Module) -> Optimizer:
            return workload.make_optimizer(model, device.type == "cuda")

        def train_data(self) -> tuple[Tensor, Tensor]:
            inputs, targets = data_of(workload)
            return inputs.to(device), targets.to(device)

        def loss(self, output: Tensor, batch: Any) -> Tensor:
            return workload.losses(output, batch[1])

    return MeasuredTask(batch_size=workload.batch, shards=workload.shards)


def by_trainer(workload: GpuWorkload, device: torch.device, compiled: bool) -> Iterator[float]:
    """Our trainer in one process; the losses as late as by hand."""
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
    workload: GpuWorkload, device: torch.device, compiled: bool, blocks: int, steps: int
) -> dict[str, Any]:
    """For each contender: `seconds` per step in each of `blocks` rounds, in turns. On cuda also the
    `waits` of the host in a step, its `launches`, and the device time."""
    loops = {name: make(workload, device, compiled) for name, make in CONTENDERS.items()}
    measured: dict[str, Any] = {name: {"seconds": []} for name in loops}
    for name, loop in loops.items():
        for _ in islice(loop, STEADY if device.type == "cuda" else 2):
            pass
        if device.type == "cuda":
            measured[name] |= {"waits": waits_of(loop), **launches_of(loop)}
    for turn in range(blocks):
        for name in list(loops)[:: -1 if turn % 2 else 1]:
            accelerator.synchronize([device])
            start = time.perf_counter()
            for _ in islice(loops[name], steps):
                pass
            accelerator.synchronize([device])
            measured[name]["seconds"].append((time.perf_counter() - start) / steps)
    for loop in loops.values():
        loop.close()  # type: ignore[attr-defined]
    return measured


def waits_of(loop: Iterator[Any]) -> int:
    """How often a step synchronises with the device, as torch counts it."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        next(loop)
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def launches_of(loop: Iterator[Any]) -> dict[str, float]:
    """The kernels that a step launches, and its device time."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        next(loop)
        torch.cuda.synchronize()
    rows = profile.key_averages()
    launches = sum(row.count for row in rows if LAUNCH.match(row.key))
    busy_ms = sum(row.self_device_time_total for row in rows) / 1e3
    return {"launches": launches, "device_ms": round(busy_ms, 2)}


# --- probes, which run in a process and answer by an event ----------------------------------------


def devices(device: str) -> dict[str, Any]:
    """The accelerators that this torch can use, or `device`: their kind, and how many."""
    facts = {"torch": torch.__version__, "is_built_in": accelerator.is_built_in()}
    kind = torch.accelerator.current_accelerator(check_available=True)
    name = device or ("" if kind is None else kind.type)
    if not name:
        return {"device": "", "count": 0, **facts}
    facts |= accelerator.decides_bits(name) | accelerator.chip(torch.device(name))
    return {"device": name, "count": 1 if name == "cpu" else accelerator.count(name), **facts}


def host(device: str) -> dict[str, Any]:
    """The relative distance of 4 losses from those of the CPU, in fp64 without dropout."""
    losses = {}
    for kind in (device, "cpu"):
        job = Job(device=kind, precision="fp64", steps=4)
        with Trainer(Pictures(dropout=0.0), job) as trainer:
            losses[kind] = [trainer.step(batch).loss for batch in trainer.batches()]
    pairs = zip(losses[device], losses["cpu"], strict=True)
    return {"largest": max(abs(a / b - 1) for a, b in pairs)}


def step(device: str) -> dict[str, Any]:
    """A step of a GPT, compared with a hand-written loop: `measure`, and the ratio of times."""
    is_large = device in accelerator.ALWAYS_KNOWN
    workload, steps = (LARGE, STEPS) if is_large else (SMALL, 1)
    measured = measure(workload, torch.device(device), False, BLOCKS, steps)
    pairs = zip(measured["allranks"]["seconds"], measured["hand"]["seconds"], strict=True)
    ratio = median(ours / hand for ours, hand in pairs)
    return {"workload": workload.name, "ratio": round(ratio, 4), **measured}


PROBES = {"devices": devices, "host": host, "step": step}


def probe(argument: dict[str, Any]) -> int:
    """Runs in a process of its own: writes the result of a probe as the event `found`."""
    faulthandler.dump_traceback_later(argument["limit_s"], exit=True)
    torch.set_num_threads(1)
    with JsonLines(rank_events_path(Path(argument["run_dir"]), 0)) as events:
        events.event("found", found=PROBES[argument["probe"]](argument["device"]))
    faulthandler.cancel_dump_traceback_later()
    return 0
