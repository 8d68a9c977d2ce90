"""What a rank stores between two steps, counted at torch's storages, is what its card says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.strategies.cards import CARDS
from allranks.strategies.choice import parse_choice

DOCS = Path(__file__).parent.parent / "docs" / "strategies_memory.md"
CASES = [
    ("single", 1, "Rows"),
    ("dp:replicas=3", 1, "Rows"),
    ("model-parallel:by=size", 1, "Rows"),
    ("ddp-plain", 2, "Rows"),
    ("ddp:reduce=ring", 2, "Rows"),
    ("ddp:reduce=fp16,late=1", 3, "Rows"),
    ("ddp:reduce=top-k", 2, "Rows"),
    ("ddp:reduce=power-sgd", 2, "Rows"),
    ("ddp:reduce=one-bit", 2, "Rows"),
    ("independent", 2, "Rows"),
    ("zero1", 2, "Rows"),
    ("zero1:reduce=tree", 2, "Rows"),
    ("zero2", 3, "Rows"),
    ("fsdp", 2, "Sentences"),
    ("fsdp:reduce=tree", 2, "Rows"),
    ("fsdp:tensor=2", 4, "Sentences"),
    ("hsdp:shard=2", 4, "Rows"),
    ("gpipe", 2, "Rows"),
    ("1f1b", 2, "Rows"),
    ("interleaved", 2, "Rows"),
    ("zero-bubble", 2, "Rows"),
    ("tensor", 2, "Sentences"),
    ("tensor", 4, "Encoder"),
    ("tensor:sequence=yes", 2, "Sentences"),
    ("context", 2, "Sentences"),
    ("mesh:tensor=2,pipeline=2", 4, "Rows"),
    ("expert", 2, "Mixed"),
    ("branches", 2, "Towers"),
    ("local-sgd:every=2", 2, "Rows"),
    ("slowmo:every=2", 2, "Rows"),
    ("block-momentum:every=2,state=keep", 2, "Rows"),
    ("diloco:every=2", 2, "Rows"),
    ("diloco:every=2,bits=4", 2, "Rows"),
    ("sparse-loco:every=2", 2, "Rows"),
]


@pytest.mark.slow(most=9)
@pytest.mark.parametrize(("strategy", "ranks", "task"), CASES)
def test_a_rank_stores_what_its_card_says(
    strategy: str, ranks: int, task: str, on_ranks: Callable[..., Any]
) -> None:
    job = {"strategy": strategy, "ranks": ranks, "steps": 3}
    on_ranks(ranks, "stored_tasks:stores_what_the_card_says", {"task": task, "job": job})


@pytest.mark.slow
def test_whole_weights_that_somebody_keeps_are_too_much(on_ranks: Callable[..., Any]) -> None:
    job = {"strategy": "fsdp", "ranks": 2, "steps": 2}
    argument = {"task": "Rows", "job": job, "keeps": True}
    on_ranks(2, "stored_tasks:stores_what_the_card_says", argument)


def test_every_card_says_what_is_stored_and_so_do_the_docs() -> None:
    cards = [card for card in CARDS.values() if "torch" in card.engines]
    cards = [card for card in cards if len(card.roles(2, card.read_options({}))) == 1]
    assert {parse_choice(strategy).name for strategy, _, _ in CASES} == {c.name for c in cards}
    lines: dict[str, list[str]] = {}
    for card in cards:
        assert card.stored is not None
        lines.setdefault(card.stored.formula, []).append(f"`{card.name}`")
    rows = [f"| {', '.join(names)} | {formula} |" for formula, names in lines.items()]
    assert "\n".join(rows) in DOCS.read_text(encoding="utf-8")
