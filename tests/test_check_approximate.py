"""Strategies that do not promise one process: their exact setting is checked, their drift told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import allranks
from allranks.errors import RequestError
from allranks.job.config import resolve
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.strategies.card import Approximate
from allranks.strategies.cards import CARDS
from allranks.strategies.resolve import at_setting, strategy_spec
from allranks.tools.check.against_single import DEEP_STEPS, STEPS, CheckPlan
from allranks.tools.check.check import check_approximate, is_approximate
from allranks.tools.check.verdict import Verdict

Check = Callable[..., Verdict]


@pytest.fixture
def check(server: ForkServer, tmp_path: Path) -> Check:
    def run(strategy: str, **flags: Any) -> Verdict:
        flags = {"strategy": strategy, "ranks": 2, "steps": 5, **flags}
        plan = CheckPlan((2,), 2, shards=8)
        resolved = resolve("check_tasks:Points", flags, ())
        assert is_approximate(resolved.job, 2)
        return check_approximate(resolved, tmp_path, server, plan)

    return run


@pytest.mark.slow
@pytest.mark.cases(
    ("strategy", "exact_at"),
    [
        ("diloco:every=4,fragments=2", "diloco:every=1,lr=1,momentum=0,bits=0,mix=0"),
        ("sparse-loco:every=3", "sparse-loco:every=1,keep=4096,chunk=4096,bits=0,decay=1,lr=1"),
        ("ddp:reduce=top-k(k=1)", "ddp:reduce=top-k(k=4096,chunk=4096,values=raw)"),
    ],
    exhaustive=[
        ("local-sgd:every=4", "local-sgd:every=1"),
        ("slowmo:every=3", "slowmo:every=1,alpha=1,beta=0"),
        ("block-momentum:every=3", "block-momentum:every=1,momentum=0,block_rate=1"),
        (
            "ddp:reduce=power-sgd(rank=1,min_rate=0)",
            "ddp:reduce=power-sgd(rank=2147483648,min_rate=0)",
        ),
    ],
)
def test_the_exact_setting_is_equal_and_the_drift_as_asked_decides_nothing(
    strategy: str, exact_at: str, check: Check
) -> None:
    verdict = check(strategy)
    assert verdict.equal is True, str(verdict)
    assert verdict.looks[0].comparison.steps == 5 and verdict.looks[0].tolerance.tensors == 1e-10
    drift = verdict.drift
    assert drift is not None and (drift.strategy, drift.exact_at) == (strategy, exact_at)
    assert [one.step for one in drift.steps] == [0, 1, 2, 3, 4]
    assert any("sgd:lr=0.01" in note for note in verdict.not_checked) == (":every" in exact_at)
    assert drift.steps[0].loss == pytest.approx(drift.steps[0].loss_of_one)  # from the same start
    assert max(one.weights for one in drift.steps) > 1e-3  # it is another training
    words = str(verdict)
    assert words.startswith(f"equal: check_tasks:Points under {exact_at}")
    assert f"drift of {strategy} on 2 ranks, fp64, which decides nothing" in words
    data = verdict.to_data()
    assert data["equal"] is True and data["drift"]["steps"][3]["weights_apart"] > 0


@pytest.mark.slow
def test_learners_that_hold_parts_are_checked_whole(server: ForkServer, tmp_path: Path) -> None:
    flags = {"strategy": "slowmo:every=3,learners=2,inner=zero2", "ranks": 4, "steps": 5}
    resolved = resolve("check_tasks:Points", flags, ())
    verdict = check_approximate(resolved, tmp_path, server, CheckPlan((4,), 4, shards=8))
    assert verdict.equal is True, str(verdict)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("strategy", ["independent", "ddp:late=1"])
def test_a_card_without_an_exact_setting_decides_nothing(strategy: str, check: Check) -> None:
    verdict = check(strategy)
    assert verdict.equal is None and verdict.first is None and verdict.looks == ()
    assert verdict.to_data()["equal"] is None
    assert str(verdict).startswith(f"not decided: check_tasks:Points under {strategy}\ndrift of")
    assert any("names no setting" in note for note in verdict.not_checked)


def test_what_has_no_steps_in_common_is_refused(check: Check) -> None:
    with pytest.raises(RequestError, match="at no step together"):
        check("ps:mode=async")


@pytest.mark.slow
def test_a_task_that_clips_is_not_at_the_exact_setting(server: ForkServer, tmp_path: Path) -> None:
    flags = {"strategy": "local-sgd:every=4", "ranks": 2, "steps": 3}
    resolved = resolve("tensor_tasks:Stack", flags, ())
    with pytest.raises(RequestError, match=r"clips gradients to 0\.3"):
        check_approximate(resolved, tmp_path, server, CheckPlan((2,), 2, shards=8))


def test_the_setting_of_every_card_is_one_that_it_takes() -> None:
    for name, card in CARDS.items():
        if isinstance(card.guarantee, Approximate):
            exact = at_setting(name, card.guarantee.setting)
            assert strategy_spec(exact, 2).guarantee == card.guarantee
            assert card.guarantee.setting and exact.startswith(f"{name}:every=1")


@pytest.mark.slow
def test_a_deep_check_compares_a_hundred_steps(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kept:
        def __init__(self, modules: object) -> None: ...
        def __enter__(self) -> ForkServer:
            return server

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr("allranks.tools.check.check.ForkServer", Kept)
    for deep, steps in ((True, DEEP_STEPS), (False, STEPS)):
        verdict = allranks.check("check_tasks:Points", ranks=2, deep=deep, precision="fp64")
        assert verdict.equal and verdict.looks[0].comparison.steps == steps
        assert f"fp64: {steps} steps" in str(verdict)
