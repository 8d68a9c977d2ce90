"""A task whose leader fills the disk of the run folder on the way."""

from __future__ import annotations

from dataclasses import dataclass

from allranks.programs.digits import Digits
from small_disk import Filler


@dataclass(kw_only=True)
class Filling(Digits):
    ema: float | None = 0.9

    def callbacks(self) -> list[Filler]:
        return [Filler()]
