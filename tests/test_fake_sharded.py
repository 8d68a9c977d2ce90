"""A strategy that cuts weights keeps the contract, and is a file, a card and a line: all in tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from allranks.catalog import STRATEGIES
from allranks.strategies.torch_cards import CARDS
from conftest import Train
from fake_sharded import CARD, NAME
from test_every_strategy import STEPS, TASKS, difference, reference_for, references

__all__ = ["references"]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CARDS, NAME, CARD)
    monkeypatch.setitem(STRATEGIES, NAME, "fake_sharded:FakeSharded")


@pytest.mark.thinned(2, ("data", ["each", "same"]), ("ranks", [1, 2, 4, 8]), ("task", TASKS))
def test_exact(
    data: str, ranks: int, task: str, train: Train, references: dict[str, Any]
) -> None:
    wanted, weights = reference_for(task, train, references)
    result = train(
        f"sharded_tasks:{task}",
        strategy=f"{NAME}:data={data}",
        ranks=ranks,
        precision="fp64",
        steps=STEPS,
    )
    found = result.summary
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10
    assert found["steps"] == wanted["steps"]
    assert found["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-10)
    assert found["eval"] == pytest.approx(wanted["eval"], rel=1e-10)
    if task != "Uneven":
        sent = found["sent_bytes"]["gradients"] / found["steps"]
        assert found["card_bytes_per_step"] == pytest.approx(sent, abs=1)
