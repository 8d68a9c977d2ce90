"""A loop of one's own over the trainer of the TensorFlow engine; runs in ranks of the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from allranks.job import Job
from allranks.on_tf.trainer import Trainer
from tf_tasks import Dense


def loop(argument: dict[str, Any]) -> None:
    """Seven steps and an evaluation; what they gave goes into a file of this rank."""
    with Trainer(Dense(), Job(precision="fp64")) as trainer:
        losses = [trainer.step(batch).loss for batch in trainer.batches(steps=7)]
        given = {"losses": losses, "eval": trainer.evaluate(), "strategy": trainer.job.strategy}
        path = Path(argument["out"]) / f"rank-{trainer.world.rank}.json"
        path.write_text(json.dumps(given))
