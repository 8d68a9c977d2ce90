"""Gauges of a device: what torch has for it, at most every few seconds; none of a processor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import allranks.torch.accelerator as accelerator
from allranks.torch.worker import RecordGauges, gauges_of


class NVMLError(Exception):
    """As that of the package, which is an error of its own kind."""


def refuses(device: Any) -> int:
    raise ModuleNotFoundError("pynvml does not seem to be installed")


def is_not_supported(device: Any) -> int:
    raise NVMLError("Not Supported")


def trainer_on(device: str, step: int = 1) -> Any:
    where = torch.device(device)
    return SimpleNamespace(device=where, progress=SimpleNamespace(batch_index=step))


def test_what_cannot_be_asked_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = SimpleNamespace(
        utilization=lambda d: 80,
        power_draw=lambda d: 250_000,
        temperature=refuses,
        device_memory_used=is_not_supported,
    )
    monkeypatch.setattr(accelerator, "module_of", lambda device: shown)
    found = gauges_of(torch.device("cuda"))
    assert found == {"busy_percent": 80.0, "celsius": None, "watts": 250.0, "used_bytes": None}


def test_a_device_is_looked_at_now_and_then_and_a_processor_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[dict[str, Any]] = []
    tell = lambda name, **values: told.append({"event": name, **values})  # noqa: E731
    of_processor = RecordGauges(tell, every_s=0.0)
    for step in range(3):
        of_processor.on_step(trainer_on("cpu", step), None, None)  # type: ignore[arg-type]
    assert told == []
    monkeypatch.setattr(
        accelerator, "module_of", lambda device: SimpleNamespace(utilization=lambda d: 50)
    )
    often, rarely = RecordGauges(tell, every_s=0.0), RecordGauges(tell, every_s=60.0)
    for watching in (often, rarely):
        for step in range(3):
            watching.on_step(trainer_on("cuda", step), None, None)  # type: ignore[arg-type]
    assert [(one["event"], one["step"]) for one in told] == [("gauges", n) for n in (0, 1, 2, 0)]
    monkeypatch.setattr(accelerator, "module_of", lambda device: SimpleNamespace())
    silent = RecordGauges(tell, every_s=0.0)
    told.clear()
    for step in range(3):
        silent.on_step(trainer_on("cuda", step), None, None)  # type: ignore[arg-type]
    assert len(told) == 1, "one whose gauges say nothing is not asked again"
