"""How long a step takes in one process, and what the model holds: what `--strategy auto` asks.

The job is one rank with the share of the batch that each rank of the real job will have. It trains
a few steps as any job does, and nothing of them is kept.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from itertools import pairwise
from typing import Any

from allranks.job.job import Job
from allranks.torch.accelerator import synchronize
from allranks.torch.task import Task
from allranks.torch.trainer import Trainer

WARM_STEPS = 2
LEAST_STEPS = 5
ENOUGH_S = 1.5


def measure_step(task: Task, job: Job) -> dict[str, Any]:
    """Seconds of the median step, what is trained, bytes of buffers, cores. Alone."""
    with Trainer(task, job) as trainer:
        model = trainer.strategy.model
        shapes = [list(p.shape) for p in model.parameters() if p.requires_grad]
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        times = [time.perf_counter()]
        for batch in trainer.batches():
            trainer.step(batch)
            trainer.settle()
            synchronize({trainer.device})
            times.append(time.perf_counter())
            measured = len(times) - 1 - WARM_STEPS
            if measured >= LEAST_STEPS and times[-1] - times[WARM_STEPS] >= ENOUGH_S:
                break
    steps = [after - before for before, after in pairwise(times)]
    kept = steps[WARM_STEPS:] or steps
    return {
        "step_s": statistics.median(kept),
        "steps": len(kept),
        "parameters": sum(map(math.prod, shapes)),
        "shapes": shapes,
        "buffer_bytes": buffers,
        "cores": len(os.sched_getaffinity(0)),
    }
