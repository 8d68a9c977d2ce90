"""`--profile`: where a few steps of rank 0 spend their time, as a Chrome trace in the run folder.

torch's profiler sees the operators of this process, and the kernels of its GPU. The first steps are
left out: they allocate, and choose kernels. What is written is read by https://ui.perfetto.dev, or
by chrome://tracing. It changes no result; while it looks on, steps are slower.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import profile

import allranks.torch.accelerator as accelerator
from allranks.training.callback import Callback
from allranks.training.progress import StepResult

AFTER, STEPS = 2, 3
PLACE = "profile/rank-000.json"


class Profiling(Callback):
    """Profiles `STEPS` steps after the first `AFTER` of this start; `tell` hears where it is."""

    def __init__(self, run_dir: Path, tell: Callable[..., None]) -> None:
        self.path, self.tell = run_dir / PLACE, tell
        self._steps = self._first = self._last = 0
        self._profile: profile | None = None

    def on_step(self, trainer: Any, batch: Any, result: StepResult) -> None:
        """A step is done, and the next one follows."""
        self._steps += 1
        self._last = trainer.progress.batch_index
        if self._steps == AFTER:
            self._profile = profile(activities=accelerator.activities(trainer.device))
            self._profile.start()
            self._first = self._last + 1
        elif self._steps == AFTER + STEPS:
            self._write()

    def on_end(self, trainer: Any) -> None:
        """A training that is shorter is profiled as far as it came."""
        self._write()

    def _write(self) -> None:
        if self._profile is None:
            return
        done, self._profile = self._profile, None
        done.stop()
        if self._last >= self._first:
            self.path.parent.mkdir(exist_ok=True)
            done.export_chrome_trace(str(self.path))
            self.tell("profiled", path=str(self.path), first=self._first, last=self._last)
