"""The tasks of the contract, for ranks that know `fake_sharded` and `fake_reducer` too."""

from __future__ import annotations

from typing import Any

import contract_workers
import fake_reducer
import fake_sharded
from contract_tasks import Experts, Images, Pairs, Pictures, Uneven, Words

__all__ = ["Experts", "Images", "Pairs", "Pictures", "Uneven", "Words"]

fake_sharded.register()
fake_reducer.register()


def go_on_from_a_state(argument: dict[str, Any]) -> None:
    """As in `contract_workers`."""
    contract_workers.go_on_from_a_state(argument)
