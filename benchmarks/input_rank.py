"""The process of `input.py`: makes the pipelines that are compared, and times blocks of batches.

All JPEG contenders read the same files with the same functions and key
what is random by the sample.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import order_of
from PIL import Image
from torch.utils.data import DataLoader

from allranks.programs.readers.images import ImageFolder
from allranks.torch.data.batch import Cutting
from allranks.torch.data.batches import GlobalBatches
from allranks.torch.data.open_data import open_data
from allranks.torch.model.precision import Precision
from allranks.torch.task import Task
from allranks.training.order import random_key
from allranks.training.progress import Progress

SIZE, WIDTH, HEIGHT, BYTES = 224, 500, 375, 100_000
SETTLE_S = 0.3  # so that what a pipeline makes ahead is made before another one is timed
FOREVER = 10**6
PRECISION = Precision(torch.device("cpu"))

Samples = dict[str, list[float]]


def make_images(folder: Path, images: int) -> float:
    """JPEGs of about 100 kB in ten classes; returns their mean size in bytes."""
    random = np.random.Generator(np.random.Philox(1))
    sizes = []
    for number in range(images):
        coarse = random.integers(0, 256, (HEIGHT // 6, WIDTH // 6, 3), np.uint8)
        image = np.array(Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))
        noisy = image + random.normal(0, 12, image.shape)
        path = folder / f"class-{number % 10}" / f"{number:05}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)
        sizes.append(path.stat().st_size)
    return sum(sizes) / len(sizes)


def measure_images(rank: int, asked: dict[str, Any], folder: str) -> None:
    """Images per second of each contender, with each number of workers; into `found.json`."""
    torch.set_num_threads(1)
    images = Path(folder) / "images"
    images.mkdir()
    mean_bytes = make_images(images, asked["images"])
    found: dict[str, Samples] = {}
    for workers in asked["workers"]:
        pipelines = {
            "allranks": _ours(ImageFolder(images, SIZE), asked["batch"], workers),
            "DataLoader": _plain(ImageFolder(images, SIZE), asked["batch"], workers),
            "DataLoader-again": _plain(ImageFolder(images, SIZE), asked["batch"], workers),
        }
        samples: Samples = {name: [] for name in pipelines}
        for turn in range(asked["pairs"]):
            for name in order_of(list(pipelines), turn):
                samples[name].append(_images_per_s(pipelines[name], asked["batch"], asked["block"]))
        found[f"JPEG, {workers} workers"] = samples
        for pipeline in pipelines.values():
            pipeline.close()  # type: ignore[attr-defined]
    Path(folder, "found.json").write_text(json.dumps({"bytes": mean_bytes, "samples": found}))


def _images_per_s(pipeline: Iterator[int], batch: int, block: int) -> float:
    """Over `block` batches, once what was made ahead is used up."""
    for _ in range(AHEAD_AT_MOST):
        next(pipeline)
    start = time.perf_counter()
    images = sum(next(pipeline) for _ in range(block))
    seconds = time.perf_counter() - start
    time.sleep(SETTLE_S)
    return images / seconds


AHEAD_AT_MOST = 4  # 2 workers with 2 batches each


def _ours(dataset: ImageFolder, batch: int, workers: int) -> Iterator[int]:
    """The samples of each batch of the engine's own pipeline."""
    batches = _batches(dataset, batch, workers)
    for made in batches.after(Progress(), FOREVER, None):
        yield made.own_samples


def _batches(dataset: Any, batch: int, workers: int) -> GlobalBatches:
    opened = open_data(dataset, Task(), 0, workers, "train_data")
    return GlobalBatches(
        source=opened.source,
        cutting=Cutting(8, rank=0, ranks=1, micro_batch=None, shard_alone=False),
        batch_size=batch,
        last_batch="drop",
        seed=0,
        precision=PRECISION,
    )


class _Keyed:
    """A plain map-style data set over the same files and functions, random by the sample."""

    def __init__(self, images: ImageFolder) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> Any:
        random = np.random.Generator(np.random.Philox(random_key(0, 0, number)))
        return self.images.decode(self.images.read(number), random)


def _plain(dataset: ImageFolder, batch: int, workers: int) -> Iterator[int]:
    """The samples of each batch of a loader as one writes it; its workers stay for all epochs."""
    loader = DataLoader(
        _Keyed(dataset),  # type: ignore[arg-type]
        batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    for _ in range(FOREVER):
        for images, _ in loader:
            yield len(PRECISION.to_device(images))


# --- stages of known length ---------------------------------------------------------------------


class Sleeping:
    """Samples that take a known time to read and to decode."""

    def __init__(self, samples: int, read_s: float, decode_s: float) -> None:
        self.samples, self.read_s, self.decode_s = samples, read_s, decode_s

    def __len__(self) -> int:
        return self.samples

    def read(self, number: int) -> int:
        time.sleep(self.read_s)
        return number

    def decode(self, raw: int, random: Any) -> Any:
        time.sleep(self.decode_s)
        return torch.tensor(raw)

    def __getitem__(self, number: int) -> Any:
        return self.decode(self.read(number), None)


def measure_stages(rank: int, asked: dict[str, Any], folder: str) -> None:
    """Seconds of a steady step, staged and in the step, and of each stage alone, as it is slept."""
    torch.set_num_threads(1)
    found: dict[str, Samples] = {}
    batch = asked["batch"]
    for name, (read_s, decode_s, compute_s) in asked["stages"].items():
        data = Sleeping(batch * 1000, read_s / batch, decode_s / batch)
        staged = _batches(data, batch, 1).after(Progress(), FOREVER, None)
        in_step = _batches(data, batch, 0).after(Progress(), FOREVER, None)
        timed: dict[str, Callable[[], float]] = {
            "allranks": lambda: _step_s(staged, compute_s, asked["block"]),  # noqa: B023  used now
            "in the step": lambda: _step_s(in_step, compute_s, 2),  # noqa: B023
            "longest stage": lambda: _longest_s(data, batch, compute_s, asked["block"]),  # noqa: B023
        }
        samples: Samples = {contender: [] for contender in timed}
        for turn in range(asked["pairs"]):
            for contender in order_of(list(timed), turn):
                samples[contender].append(timed[contender]())
        found[name] = samples
        staged.close()  # type: ignore[attr-defined]
    Path(folder, "found.json").write_text(json.dumps({"samples": found}))


def _step_s(batches: Iterator[Any], compute_s: float, steps: int) -> float:
    """Seconds of a step, once the pipeline runs steadily."""
    for _ in range(min(steps, 4)):
        next(batches)
        time.sleep(compute_s)
    start = time.perf_counter()
    for _ in range(steps):
        next(batches)
        time.sleep(compute_s)
    return (time.perf_counter() - start) / steps


def _longest_s(data: Sleeping, batch: int, compute_s: float, steps: int) -> float:
    """Seconds that the longest of the three takes for a batch, alone: a sleep is never exact."""
    stages: tuple[Callable[[], Any], ...] = (
        lambda: [data.read(number) for number in range(batch)],
        lambda: [data.decode(number, None) for number in range(batch)],
        lambda: time.sleep(compute_s),
    )
    seconds = []
    for stage in stages:
        start = time.perf_counter()
        for _ in range(steps):
            stage()
        seconds.append((time.perf_counter() - start) / steps)
    return max(seconds)
