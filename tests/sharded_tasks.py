"""The tasks of the contract, for ranks that know the strategy of `fake_sharded` too."""

from __future__ import annotations

import fake_sharded
from contract_tasks import Experts, Images, Pairs, Pictures, Uneven, Words

__all__ = ["Experts", "Images", "Pairs", "Pictures", "Uneven", "Words"]

fake_sharded.register()
