"""A loop of one's own over the trainer of the TensorFlow engine; runs in ranks of the tests."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import keras
import pytest

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.tensorflow.trainer import Trainer
from tf_tasks import Convolutions, Dense


def loop(argument: dict[str, Any]) -> None:
    """Seven steps and an evaluation go into a file of this rank; the same steps are refused."""
    with Trainer(Dense(), Job(precision="fp64")) as trainer:
        losses = [trainer.step(batch).loss for batch in trainer.batches(steps=7)]
        given = {"losses": losses, "eval": trainer.evaluate(), "strategy": trainer.job.strategy}
        with pytest.raises(RequestError, match=r"batches\(steps=7\)"):
            next(trainer.batches(steps=7))
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


def without_evaluations(argument: dict[str, Any]) -> None:
    """A loop that never calls `evaluate_if_due` is told so; the usual loop hears nothing."""
    with (
        pytest.warns(UserWarning, match=r"eval_every='1'\) did nothing"),
        Trainer(Dense(), Job(eval_every="1")) as trainer,
    ):
        trainer.step(next(trainer.batches()))
    with warnings.catch_warnings(action="error"), Trainer(Dense(), Job(eval_every="1")) as trainer:
        trainer.step(next(trainer.batches()))
        trainer.evaluate_if_due()
