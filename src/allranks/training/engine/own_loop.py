"""What goes wrong in a loop of one's own over the batches of a trainer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Set
from typing import Any

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.training.progress import Progress


def warn_ignored(job: Job, called: Set[str], done: Progress) -> None:
    """Warn of options of a job that a custom training loop has ignored."""
    options: dict[str, dict[str, Any]] = {
        "evaluate_if_due": {
            "eval_every": job.eval_every,
            "early_stop": job.early_stop,
            "until": job.until,
        },
        "save_if_due": {"checkpoint_every": job.checkpoint_every},
    }
    for method, values in options.items():
        ignored = [f"{name}={value!r}" for name, value in values.items() if value]
        if ignored and method not in called and done.batch_index:
            warnings.warn(
                f"Job({', '.join(ignored)}) did nothing in this loop, which never called "
                f"trainer.{method}(…) after a step",
                stacklevel=3,
            )


def nothing_left(limits: Sequence[str], done: Progress) -> RequestError:
    """The error for batches that have been trained already."""
    return RequestError(
        asked=f"batches({', '.join(limits)})",
        found=f"a training that has made {done.batch_index} steps, and is in epoch {done.epoch}",
        why="epochs and steps count from the start of the job, so that one that was stopped ends "
        "where it would have",
        do="one loop over batches() for all of it, or batches(epochs=1), then batches(epochs=2), …",
    )
