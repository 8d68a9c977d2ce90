"""The bytes of 8 to 64 ranks, and the order of their collectives, without these ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

DATA_PARALLEL = ("ddp", "ddp:reduce=tree", "zero1", "zero2", "fsdp")
CUT = [("tensor", 8), ("mesh:data=4,tensor=2", 8), ("mesh:data=32,tensor=2", 64)]


@pytest.mark.slow
def test_many_ranks_send_what_their_cards_say(on_ranks: Callable[..., Any]) -> None:
    cases = [(strategy, ranks) for strategy in DATA_PARALLEL for ranks in (8, 64)]
    on_ranks(1, "pretended.shapes:are_those_of_the_card", [*cases, *CUT])
