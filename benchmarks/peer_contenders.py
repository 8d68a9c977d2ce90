"""The loops that `strategies.py` runs side by side: ours, and DeepSpeed's stages of ZeRO.

    ddp, ddp-again      DistributedDataParallel, and the same loop a second time
    deepspeed zeroN     `deepspeed.initialize` with that stage, on the Gloo group of all contenders
    allranks NAME       our Trainer with that strategy

DeepSpeed is told to be on the CPU, computes in float32 and has the optimizer of the workload. It
keeps the mean loss over all ranks, as the others do. Accelerate is not here: its FSDP needs an
accelerator, and on the CPU it shards nothing (LOG.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from contenders import DDP_GLOBAL, Contender, OfPeer
from sharded_contenders import OURS, OfStrategy
from with_deepspeed import DeepSpeedLoop
from workloads import Workload

from allranks.launcher.world import World

BUCKET_NUMBERS = 25 * 2**18  # as many bytes as ours and those of DistributedDataParallel


class DeepSpeedOfStage(DeepSpeedLoop):
    """As in its tutorial, with a stage of ZeRO."""

    zero: ClassVar[dict[str, Any]] = {
        "reduce_bucket_size": BUCKET_NUMBERS,
        "allgather_bucket_size": BUCKET_NUMBERS,
    }
    more: ClassVar[dict[str, Any]] = {}

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage


STAGES = (1, 2, 3)
CONTENDERS: dict[str, Callable[[Workload, World], Contender]] = {
    "ddp": DDP_GLOBAL,
    "ddp-again": DDP_GLOBAL,
    **{
        f"deepspeed zero{stage}": partial(OfPeer, make=partial(DeepSpeedOfStage, stage))
        for stage in STAGES
    },
    **{f"allranks {name}": partial(OfStrategy, strategy=name) for name in OURS},
}
