"""Exports the model of a run with the engine that trained it, in a process of its own.

Keras writes its own formats, and only the task can build the model. So a process imports both, and
the command line imports neither.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

from allranks.catalog import ENGINES
from allranks.checkpoint.export import check_free, refused, verified
from allranks.errors import RequestError
from allranks.job.engines import check_installed
from allranks.job.job import Job
from allranks.job.job_file import HIDDEN
from allranks.job.resume import find_base
from allranks.launcher.describe import answer_of_process
from allranks.launcher.plan import backend_of_keras
from allranks.launcher.processes.fork_server_client import ForkServer

FORMATS = ("keras", "saved-model")
ENDING = ".keras"


def export_model(folder: Path, target: Path, form: str, server: ForkServer | None = None) -> int:
    """Write the model of the checkpoint `folder` to `target`; returns how many tensors are in it.

    `form` is "keras" (a file that `keras.models.load_model` reads) or "saved-model" (a folder for
    TensorFlow Serving). Raises `BadCheckpoint` if the checkpoint is damaged, and `RequestError` for
    a run of another engine, or if `target` exists or cannot be written. The program is imported by
    the name with which the run was started.
    """
    check_free(target)
    if form == "keras" and target.suffix != ENDING:
        raise refused(target, f"a name without {ENDING}", "Keras knows its files by that ending")
    verified(folder)
    job = _job_of(folder, target, form)
    check_installed(job.engine)
    unfinished = target.with_name(f".{os.getpid()}.{target.name}")  # Keras checks the ending
    with ExitStack() as stack:
        stack.callback(_remove, unfinished)
        server = server or stack.enter_context(ForkServer(()))
        return _exported(server, job, folder, target, unfinished, form)


def _remove(path: Path) -> None:
    """Remove the incomplete file or folder of a failed export."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _job_of(folder: Path, target: Path, form: str) -> Job:
    """The job of a checkpoint. Redacted fields of its task keep their defaults."""
    base = find_base(folder, resumes=False)
    task = {name: value for name, value in base.task.items() if value != HIDDEN}
    job = Job(**base.values, task=task)
    if not ENGINES[job.engine].export or not job.program:
        subject = f"a run of the {job.engine} engine"
        raise RequestError(
            asked=f"to export to {target} with --format {form}",
            found=subject if job.program else "a hand-written loop, which names no program",
            why="that format holds a Keras model, built by the task and filled by TensorFlow",
            do="--format safetensors, which has the weights by their names",
        )
    return job


def _exported(
    server: ForkServer, job: Job, folder: Path, target: Path, unfinished: Path, form: str
) -> int:
    paths = {"folder": folder, "target": target, "beside": unfinished}
    paths_of_job = {name: str(path.absolute()) for name, path in paths.items()}
    answer = answer_of_process(
        server,
        ENGINES[job.engine].export,
        lambda scratch: {
            "job": dataclasses.replace(job, run_dir=scratch).to_data(),
            "form": form,
            **paths_of_job,
        },
        "exported",
        {
            **backend_of_keras(job),
            "CUDA_VISIBLE_DEVICES": "-1",  # the GPUs may be at work, and one takes all their memory
            "TF_CPP_MIN_LOG_LEVEL": "2",
        },
        process_name=f"the process that exports to {target}",
        if_interrupted=f"nothing was written to {target}",
    )
    return int(answer["tensors"])
