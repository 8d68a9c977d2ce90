"""The loops that `strategies.py` runs side by side: ours, and DeepSpeed's stages of ZeRO.

    ddp, ddp-again      DistributedDataParallel, and the same loop a second time
    deepspeed zeroN     `deepspeed.initialize` with that stage, on the Gloo group of all contenders
    allranks NAME       our Trainer with that strategy

DeepSpeed is told to be on the CPU, computes in float32 and has the optimizer of the workload. It
keeps the mean loss over all ranks, as the others do. Accelerate is not here: its FSDP needs an
accelerator, and on the CPU it shards nothing (LOG.md).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch.distributed as dist
from contenders import Contender, DDPGlobal
from sharded_contenders import OURS, OfStrategy
from torch.nn import functional as F
from workloads import Workload

from allranks.launcher.world import World

os.environ["DS_ACCELERATOR"] = "cpu"  # read once, when it is imported
import deepspeed

# it logs a lot, and calls collectives by names that torch has renamed
logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
# an operation for shared memory would be compiled on first use, which takes a minute
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
BUCKET_NUMBERS = 25 * 2**18  # as many bytes as ours and those of DistributedDataParallel


class DeepSpeed(Contender):
    """As in its tutorial, with a stage of ZeRO."""

    def __init__(self, workload: Workload, world: World, stage: int) -> None:
        self.stage = stage
        super().__init__(workload, world)

    def prepare(self) -> None:
        model: Any = self.workload.model()
        zero = {
            "stage": self.stage,
            "reduce_bucket_size": BUCKET_NUMBERS,
            "allgather_bucket_size": BUCKET_NUMBERS,
            "overlap_comm": False,  # a stream of a GPU's
            "memory_efficient_linear": False,  # it would put its own in place of torch's, for all
        }
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=self.workload.optimizer(model),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": self.workload.batch,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": zero,
            },
        )

    def run(self, steps: int) -> None:
        for inputs, labels in islice(self.batches, steps):
            loss = F.cross_entropy(self.engine(inputs), labels)
            self.engine.backward(loss)
            self.engine.step()
            mean = loss.detach()
            dist.all_reduce(mean)
            self.losses.append(mean.item() / self.world.size)


STAGES = (1, 2, 3)
CONTENDERS: dict[str, Callable[[Workload, World], Contender]] = {
    "ddp": DDPGlobal,
    "ddp-again": DDPGlobal,
    **{f"deepspeed zero{stage}": partial(DeepSpeed, stage=stage) for stage in STAGES},
    **{f"allranks {name}": partial(OfStrategy, strategy=name) for name in OURS},
}
