"""A task whose leader fills the disk of the run folder on the way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.programs.digits import Digits
from allranks.training.callback import Callback

FILLED_AFTER = 3


def fill(folder: Path) -> None:
    """Take what room is left on the disk of `folder`."""
    with open(folder / "filler", "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


class Filler(Callback):
    """Fills the disk after a step."""

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        if result.batch_index == FILLED_AFTER and trainer.world.is_leader:
            fill(Path(trainer.job.run_dir).parent)


@dataclass(kw_only=True)
class Filling(Digits):
    ema: float | None = 0.9

    def callbacks(self) -> list[Callback]:
        return [Filler()]
