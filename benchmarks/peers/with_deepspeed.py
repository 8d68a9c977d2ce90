"""The training of a peer with DeepSpeed on the processor, as in its guide, and its settings."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch_loop import PeerLoop

os.environ["DS_ACCELERATOR"] = "cpu"  # read once, when it is imported
import deepspeed as ds

# it logs a lot, and calls collectives by names that torch has renamed
logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
# an operation for shared memory would be compiled on first use, which takes a minute
ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def engine_of(
    model: nn.Module,
    optimizer: Optimizer,
    batch: int,
    stage: int,
    zero: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> Any:
    """The engine for `batch` samples of each rank in a pass, on the group that is there."""
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,  # a stream of a GPU's
            "memory_efficient_linear": False,  # it would put its own in place of torch's, for all
            **zero,
        },
        **more,
    }
    engine, *_ = ds.initialize(
        model=model, optimizer=optimizer, dist_init_required=False, config=config
    )
    return engine


class DeepSpeedLoop(PeerLoop):
    """`backward` and `step` are those of its engine, which also clears the gradients."""

    stage = 0
    zero: ClassVar[dict[str, Any]] = {}
    more: ClassVar[dict[str, Any]] = {"gradient_clipping": 0.0}  # left out, 0.19 clips at 1

    def prepare(self, model: nn.Module, optimizer_of: Callable[[Any], Optimizer]) -> None:
        optimizer = optimizer_of(model)
        self.model = engine_of(model, optimizer, self.batch, self.stage, self.zero, **self.more)

    def train(
        self,
        batches: Iterable[Any],
        loss_of: Callable[[Any, Any], Tensor],
        note: Callable[[Tensor, Any], None],
    ) -> None:
        for batch in batches:
            loss = loss_of(self.model, batch)
            self.model.backward(loss)
            self.model.step()
            note(loss, batch)


class DeepSpeedZero1(DeepSpeedLoop):
    """With ZeRO 1."""

    stage = 1
