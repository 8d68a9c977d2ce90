"""The model of a checkpoint as Keras saves it: a `.keras` file, or a SavedModel.

Runs in a process of its own (`launch.exporting` starts it): the task of the run builds its model
anew, the weights of the checkpoint go into it, and Keras writes it. Nothing of the training is in
it: layers are the user's own, with no strategy around them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from allranks.checkpoint.array_snapshot import read_arrays
from allranks.checkpoint.checkpointer import values_of
from allranks.checkpoint.export import MODEL, TensorFiles, put_in_place, refused
from allranks.checkpoint.format import read_manifest, unflatten
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.job.run_folder import JsonLines, rank_events_path
from allranks.launcher.processes.process import exit_code_of, failure_of
from allranks.tensorflow.build import set_weights
from allranks.tensorflow.machine import set_arithmetic
from allranks.training.keras_task import Task
from allranks.training.task_fields import task_of


def main(argument: dict[str, Any]) -> int:
    """Export, and write the event `exported` or `failed`; returns the exit code of the process.

    `argument` has the `job`, the `folder` of a checkpoint that was verified, the `target` and its
    `form`, "keras" or "saved-model"; what is `beside` the target is removed by whoever asked.
    """
    job = Job.from_data(argument["job"])
    with JsonLines(rank_events_path(Path(job.run_dir), 0)) as events:
        try:
            model = model_of(job, Path(argument["folder"]))
            write(model, Path(argument["target"]), Path(argument["beside"]), argument["form"])
        except BaseException as error:
            events.event("failed", **failure_of(error, 0, None))
            return exit_code_of(error)
        events.event("exported", tensors=len(model.weights))
    return 0


def model_of(job: Job, folder: Path) -> Any:
    """The model of a job with the weights of a checkpoint; raises `RequestError`."""
    set_arithmetic(job)
    keras.utils.set_random_seed(job.seed % 2**32)
    model = task_of(job, Task).model()
    manifest = read_manifest(folder)
    common, _ = values_of(manifest)
    with TensorFiles(folder) as files:
        arrays = read_arrays(files, manifest, MODEL.rstrip("/"))
    set_weights(model, unflatten(common["model"], arrays))
    return model


def write(model: Any, target: Path, temporary: Path, form: str) -> None:
    """Write a model to `temporary`, sync it, and rename it to `target`. Raises `RequestError`."""
    try:
        if form == "keras":
            model.save(str(temporary))
        else:
            model.export(str(temporary), format="tf_saved_model", verbose=False)
    except OSError as error:
        raise refused(target, str(error), "it cannot be written there") from None
    except Exception as error:  # what Keras says against a model is an answer to the user
        raise RequestError(
            asked=f"to export the model to {target}",
            found=f"{type(error).__name__}: {error}",
            why="Keras cannot write this model so",
            do="mend what it says (get_config of a layer, a model called once), "
            "or --format safetensors",
        ) from error
    put_in_place(temporary, target)
