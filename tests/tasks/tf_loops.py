"""A loop of one's own over the trainer of the TensorFlow engine; runs in ranks of the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras

from allranks.job.job import Job
from allranks.tensorflow.trainer import Trainer
from tf_tasks import Convolutions, Dense


def loop(argument: dict[str, Any]) -> None:
    """Seven steps and an evaluation; what they gave goes into a file of this rank."""
    with Trainer(Dense(), Job(precision="fp64")) as trainer:
        losses = [trainer.step(batch).loss for batch in trainer.batches(steps=7)]
        given = {"losses": losses, "eval": trainer.evaluate(), "strategy": trainer.job.strategy}
        path = Path(argument["out"]) / f"rank-{trainer.world.rank}.json"
        path.write_text(json.dumps(given))


def two_in_one_process(argument: dict[str, Any]) -> None:
    """Two models under `mirrored`, one after the other, and beside each other: each as if alone."""
    job = Job(strategy="mirrored:replicas=2", precision="fp64")
    with Trainer(Dense(), job) as one, Trainer(Convolutions(), job) as other:
        steps = zip(one.batches(steps=4), other.batches(steps=4), strict=True)
        found = [(one.step(a).loss, other.step(b).loss) for a, b in steps]
    wanted = []
    for kind in (Dense, Convolutions):
        with Trainer(kind(), Job(strategy="single", precision="fp64")) as trainer:
            wanted.append([trainer.step(batch).loss for batch in trainer.batches(steps=4)])
    for ours, theirs in zip(zip(*found, strict=True), wanted, strict=True):
        assert all(abs(a - b) < 1e-10 for a, b in zip(ours, theirs, strict=True))
    assert keras.config.floatx() == "float32"
