"""Model FLOPs utilisation: the share of the devices' peak that the model's arithmetic takes.

    MFU = operations per sample * samples per second / (devices * peak of one device)

The operations are those of the products (matrices, convolutions, attention) of one real step,
forward and backward, counted by torch; a product of m x k by k x n counts 2mkn. They are counted
once, in the first step, and only where the peak of the device is known. What is computed twice
(activation checkpointing) would be counted twice, a compiled model cannot be looked into, nor the
threads of `dp`: there it stays unknown. Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.utils.flop_counter import FlopCounterMode

import allranks.torch.accelerator as accelerator
from allranks.job.job import Job

TERA = 1e12
NOT_COUNTED = nullcontext()
OTHERS = re.compile(r"\b(NVL|MIG)\b")  # of these names, with other numbers
# In the name of the device: 10^12 operations per second, dense, by the vendor's data sheets.
PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("H200", {"bf16": 989.5, "fp16": 989.5, "tf32": 494.7, "fp32": 66.9}),
    ("H100 80GB HBM3", {"bf16": 989.5, "fp16": 989.5, "tf32": 494.7, "fp32": 66.9}),
    ("GH200", {"bf16": 989.5, "fp16": 989.5, "tf32": 494.7, "fp32": 66.9}),
    ("B200", {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1125.0, "fp32": 75.0}),
    ("H100 PCIe", {"bf16": 756.5, "fp16": 756.5, "tf32": 378.0, "fp32": 51.2}),
    ("A100", {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5}),
    ("A40", {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    ("A30", {"bf16": 165.0, "fp16": 165.0, "tf32": 82.0, "fp32": 10.3}),
    ("L40S", {"bf16": 362.0, "fp16": 362.0, "tf32": 183.0, "fp32": 91.6}),
    ("L4", {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3}),
    ("T4", {"fp16": 65.0, "fp32": 8.1}),
    ("V100-SXM2", {"fp16": 125.0, "fp32": 15.7}),
    ("A10", {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2}),
)


def peak_flops(name: str, precision: str) -> float | None:
    """Peak operations per second of a device; `None` if it is not in the table."""
    if OTHERS.search(name):
        return None
    for known, peaks in PEAKS:
        if re.search(rf"\b{known}\b", name):
            peak = peaks.get(precision)
            return None if peak is None else peak * TERA
    return None


def peak_of(job: Job, device: torch.device) -> float | None:
    """The peak of the device of this rank for the precision of the job."""
    if not accelerator.is_accelerator(device):
        return None
    return peak_flops(accelerator.chip_name(device), job.precision)


class FlopsMeter:
    """Counts the first step of one rank, and says what came of its device."""

    def __init__(self, job: Job, peak: float | None) -> None:
        self.peak = peak
        self.flops_per_sample: float | None = None
        hidden = (
            job.compile or job.activation_checkpointing or job.strategy_spec.devices_of_a_rank > 1
        )
        self.waits = peak is not None and not hidden
        """Whether it counts the next step that has samples."""

    def watching(self, samples: int) -> AbstractContextManager[None]:
        """Around a step of this rank with so many samples; counts the first one that has any."""
        return self._counting(samples) if self.waits and samples else NOT_COUNTED

    @contextmanager
    def _counting(self, samples: int) -> Iterator[None]:
        self.waits = False
        with FlopCounterMode(display=False) as counter:
            yield
        self.flops_per_sample = counter.get_total_flops() / samples

    def utilisation(self, samples_per_s: float | None, devices: int) -> float | None:
        """The MFU at this rate of the whole job; `None` if the peak or the count is unknown."""
        if self.flops_per_sample is None or self.peak is None or samples_per_s is None:
            return None
        return self.flops_per_sample * samples_per_s / (devices * self.peak)
