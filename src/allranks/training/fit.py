"""The loop of `allranks train`: what is done with a trainer from the first step to the last.

A loop of one's own may leave out what it does not need; every call here is a public one.
"""

from __future__ import annotations

from allranks.training.engine.trainer import Loop


def fit(trainer: Loop) -> bool:
    """The loop of `allranks train`; returns False if it was asked to stop before the end."""
    finished = _fit(trainer)
    for callback in trainer.callbacks:
        callback.on_end(trainer)
    return finished


def _fit(trainer: Loop) -> bool:
    callbacks = trainer.callbacks
    for callback in callbacks:
        callback.on_start(trainer)
    for batches in trainer.calls():
        results = trainer.steps(batches)
        for batch, result in zip(batches, results, strict=True):
            if result.taken:
                for callback in callbacks:
                    callback.on_step(trainer, batch, result)
        metrics = trainer.evaluate_if_due()
        if metrics is not None:
            for callback in callbacks:
                callback.on_evaluation(trainer, metrics)
        if trainer.save_if_due(results[-1]):
            return False
    return not trainer.finish()
