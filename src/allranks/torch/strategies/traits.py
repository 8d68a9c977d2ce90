"""What others must know of a strategy: how it passes through the model, and what it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch


class Traits:
    """Set by the class of a strategy, or by itself when it is made."""

    name: ClassVar[str]
    can_be_compiled: bool = True
    """Whether forward passes may go through what a compiler made of the model."""
    has_one_model: bool = True
    """Whether a rank has one model: copies in threads meet in no forward."""
    can_run_ahead: bool = False
    """Whether a step that updates nothing leaves nothing behind, and no host reads its norm."""
    cuts_micro_batches: bool = False  # whether they go through the model piece by piece
    equal_passes: bool = False
    """Whether all ranks make the same number of passes, because a pass communicates.

    A strategy that sums gradients within a pass brings in zeros while `step.for_others.is_on`.
    """
    computes_alone: bool = False
    """Whether forward and backward wait for nothing that other ranks send in them, or before."""
    passes_meet_readers: bool = True
    """Whether such a pass communicates with ranks that read other samples."""
    counts_passes: bool = False
    """Whether batches say how many passes the rank with the most makes, though not all make so
    many."""
    cuts_by_shard: bool = False
    """Whether each shard is a micro-batch of its own, where nobody says `--micro-batch`."""
    tally_type: torch.dtype | None = None
    """The type of the tally, where it is a message of its own; else it rides on gradients."""
    kept_whole: Mapping[str, bool] = MappingProxyType({})
    """The parameters that one rank each updates whole: whether this one does."""
    builds_deferred: bool = False
    """Whether `parallelize` may be given a model on meta, whose weights come one by one."""
