"""What the gauges of a rank's device show while it trains: an event `gauges` every few seconds.

They are those that torch has for its device: how busy it is in percent, degrees Celsius, watts, and
bytes in use by all processes. For NVIDIA torch asks the driver (NVML), through a package that is
not always installed; what cannot be asked is `null`. A processor has none, and no event.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import allranks.torch.accelerator as accelerator
from allranks.training.callback import Callback
from allranks.training.progress import StepResult

EVERY_S = 10.0
GAUGES = {
    "busy_percent": ("utilization", 1.0),
    "celsius": ("temperature", 1.0),
    "watts": ("power_draw", 1e-3),  # torch says milliwatts
    "used_bytes": ("device_memory_used", 1.0),
}


def gauges_of(device: torch.device) -> dict[str, float | None]:
    """What each gauge shows now; `None` where it cannot be asked. Takes about a millisecond."""
    module = accelerator.module_of(device)
    found: dict[str, float | None] = {}
    for name, (function, factor) in GAUGES.items():
        try:
            found[name] = factor * float(getattr(module, function)(device))
        except Exception:  # who looks on ends no training, and NVML has errors of its own
            found[name] = None  # its backend has none, its package is missing, or it refuses
    return found


class RecordGauges(Callback):
    """Looks at the gauges after a step, if some seconds have passed; `tell` writes the event."""

    def __init__(self, tell: Callable[..., None], every_s: float = EVERY_S) -> None:
        self._tell, self._every_s, self._last = tell, every_s, 0.0
        self._shows_any = True

    def on_step(self, trainer: Any, batch: Any, result: StepResult) -> None:
        """A device whose gauges all say nothing is not asked again."""
        now = time.monotonic()
        if not self._shows_any or now - self._last < self._every_s:
            return
        self._last = now
        if not accelerator.is_accelerator(trainer.device):
            self._shows_any = False
            return
        found = gauges_of(trainer.device)
        self._shows_any = any(value is not None for value in found.values())
        self._tell("gauges", step=trainer.progress.batch_index, **found)
