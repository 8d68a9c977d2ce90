"""Random combinations beside one process: drawn again by number, held for real, made smaller."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from allranks.launcher.processes.fork_server_client import ForkServer
from conftest import ROOT

ROOM = ROOT / "benchmarks" / "fuzzing"


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOM))
    return importlib.import_module("draw")


@pytest.fixture
def hold(draw: ModuleType) -> ModuleType:
    return importlib.import_module("hold")


def test_a_number_is_the_same_combination_again(draw: ModuleType) -> None:
    found = [draw.drawn(7, number) for number in range(60)]
    assert found == [draw.drawn(7, number) for number in range(60)]
    assert len(set(map(str, found))) > 50
    assert {len(one.legs) for one in found} == {1, 2}


def test_what_one_process_gives_is_equal_and_what_cannot_be_is_refused(
    draw: ModuleType, hold: ModuleType, server: ForkServer
) -> None:
    settings = {"kind": "words", "samples": 13, "by": "adamw", "clip_norm": 0.05}
    legs = (draw.Leg("zero2:bucket_mb=0.001", 3), draw.Leg("ddp:reduce=tree", 2))
    found = hold.held(draw.Combination(legs, settings, {"micro_batch": 1}), server)
    assert found.what == hold.EQUAL and found.difference < 1e-12
    found = hold.held(draw.Combination((draw.Leg("1f1b", 2),), settings), server)
    assert found.what == hold.REFUSED and found.why


def test_a_weight_that_is_another_one_is_seen(hold: ModuleType) -> None:
    single = {"weight": np.ones(4), "zero": np.zeros(4)}
    assert not hold._compared((single, 0.0), (single, 0.0)).fails
    for name, by in (("weight", 1e-8), ("zero", 1e-8), ("weight", np.nan)):
        other = single | {name: single[name] + by}
        found = hold._compared((other, 0.0), (single, 0.0))
        assert found.fails and found.why == name
    assert hold._compared(({"weight": np.ones(4)}, 0.0), (single, 0.0)).fails


def test_what_fails_is_made_smaller(
    draw: ModuleType, hold: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only dropout on two ranks or more of zero1 fails: nothing else is left."""

    def held(one: Any, server: Any) -> Any:
        zero1 = any(leg.strategy.startswith("zero1") and leg.ranks > 1 for leg in one.legs)
        return hold.Verdict(hold.DIFFERENT if zero1 and "dropout" in one.settings else hold.EQUAL)

    monkeypatch.setattr(hold, "held", held)
    settings = {"kind": "images", "dropout": 0.5, "samples": 13}
    legs = (draw.Leg("ddp", 2), draw.Leg("zero1:reduce=tree,bucket_mb=1", 4))
    one = draw.Combination(legs, settings, {"seed": 3})
    least, found = hold.shrunk(one, held(one, None), None)
    assert least == draw.Combination((draw.Leg("zero1", 2),), {"dropout": 0.5}, {})
    compile(hold.script_of(least, found), "script", "exec")
