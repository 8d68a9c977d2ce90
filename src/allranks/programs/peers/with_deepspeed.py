"""The same training with DeepSpeed on the processor, as in its guide; `--stage 1` for ZeRO 1."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

import torch.distributed as dist

from allranks.programs.peers.given import Notes, asked, leave, main
from allranks.programs.peers.torch_task import TorchTask

os.environ["DS_ACCELERATOR"] = "cpu"  # read once, when it is imported
warnings.filterwarnings("ignore")
import deepspeed  # noqa: E402

logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
# an operation for shared memory would be compiled on first use, which takes a minute
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def train() -> None:
    """From the first step to the last."""
    job, folder = asked()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    given, notes = TorchTask(job), Notes(folder, rank)
    plain = given.model()
    stage = int(sys.argv[sys.argv.index("--stage") + 1]) if "--stage" in sys.argv else 0
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": max(1, given.task.batch_size // ranks),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # without a word, 0.19 clips at a norm of 1
        # a stream of a GPU's; and it would put its own in place of torch's, for all
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "memory_efficient_linear": False,
        },
    }
    engine, *_ = deepspeed.initialize(
        model=plain, optimizer=given.optimizer(plain), dist_init_required=False, config=config
    )
    for batch in given.batches(rank, ranks):
        loss = given.loss(engine, batch, ranks)
        engine.backward(loss)
        engine.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        notes.step(mean.item() / ranks, batch[1])
    notes.close()
    dist.barrier()
    leave()


if __name__ == "__main__":
    main(train)
