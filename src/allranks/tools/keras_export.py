"""The model of a run, exported by the engine that trained it, in a process of its own.

Keras writes its own formats, and only the task can build the model: so a process loads both, and
the command line loads neither.
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
    TensorFlow Serving). Raises `BadCheckpoint` if not all of the checkpoint holds, and
    `RequestError` for a run of another engine, or if `target` is there or cannot be written. The
    program is found under the name by which the run was started.
    """
    check_free(target)
    if form == "keras" and target.suffix != ENDING:
        raise refused(target, f"a name without {ENDING}", "Keras knows its files by that ending")
    verified(folder)
    job = _job_of(folder, target, form)
    check_installed(job.engine)
    beside = target.with_name(f".{os.getpid()}.{target.name}")  # Keras looks at how a name ends
    with ExitStack() as stack:
        stack.callback(_remove, beside)
        server = server or stack.enter_context(ForkServer(()))
        return _exported(server, job, folder, target, beside, form)


def _remove(path: Path) -> None:
    """Remove what an export that failed, or was killed, has begun."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _job_of(folder: Path, target: Path, form: str) -> Job:
    """The job that made a checkpoint. What was hidden in its task is left at its default."""
    base = find_base(folder, resumes=False)
    task = {name: value for name, value in base.task.items() if value != HIDDEN}
    job = Job(**base.values, task=task)
    if not ENGINES[job.engine].export or not job.program:
        what = f"a run of the {job.engine} engine"
        raise RequestError(
            asked=f"to export to {target} with --format {form}",
            found=what if job.program else "a loop of one's own, which names no program",
            why="that format holds a Keras model, built by the task and filled by TensorFlow",
            do="--format safetensors, which has the weights by their names",
        )
    return job


def _exported(
    server: ForkServer, job: Job, folder: Path, target: Path, beside: Path, form: str
) -> int:
    paths = {"folder": folder, "target": target, "beside": beside}
    said = {name: str(path.absolute()) for name, path in paths.items()}
    answer = answer_of_process(
        server,
        ENGINES[job.engine].export,
        lambda scratch: {
            "job": dataclasses.replace(job, run_dir=scratch).to_data(),
            "form": form,
            **said,
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
