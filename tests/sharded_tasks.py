"""The tasks of the contract, for ranks that know the strategy of `fake_sharded` too."""

from __future__ import annotations

from typing import Any

import contract_workers
import fake_sharded
from contract_tasks import Experts, Images, Pairs, Pictures, Uneven, Words

__all__ = ["Experts", "Images", "Pairs", "Pictures", "Uneven", "Words"]

fake_sharded.register()


def go_on_from_a_state(argument: dict[str, Any]) -> None:
    """As in `contract_workers`."""
    contract_workers.go_on_from_a_state(argument)
