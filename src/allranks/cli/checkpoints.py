"""`allranks checkpoints list|verify|export RUN`: what can be resumed, and is it whole?"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from allranks.catalog import ENGINES
from allranks.checkpoint.export import check_free, export_weights, refused, verified
from allranks.checkpoint.files import as_json
from allranks.checkpoint.folder import (
    FOLDER,
    bad,
    best_of,
    committed,
    step_of,
    uncommitted,
    verify_files,
)
from allranks.checkpoint.format import NAME, BadCheckpoint, read_manifest
from allranks.cli.options import Verb
from allranks.errors import EXIT_DIFFERENCE_FOUND, RequestError, printable
from allranks.job.engines import check_installed
from allranks.job.job import HIDDEN, Job
from allranks.job.program import file_sha256
from allranks.job.resume import find_base
from allranks.job.units import format_bytes, parse_bytes
from allranks.launcher.describe import answer_of_process
from allranks.launcher.plan import backend_of_keras
from allranks.launcher.processes.fork_server_client import ForkServer

SAFETENSORS = "safetensors"
HUGGINGFACE = "huggingface"
FORMATS = {form: engine for engine, row in ENGINES.items() for form in row.exports}
"""Of whole models: the engine that writes each."""
DTYPES = ("bfloat16", "float16", "float32")
SHARD_SIZE = "5GB"
ENDING = ".keras"
as_object_option = click.option("--json", "as_object", is_flag=True, help="Print JSON.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def checkpoints() -> None:
    """The checkpoints of a run. RUN is a run folder, or a single checkpoint in it."""


@checkpoints.command("list")
@click.argument("run")
@as_object_option
def list_(run: str, as_object: bool) -> None:
    """List the checkpoints of RUN, the newest first, and what is there but cannot be loaded."""
    good, others = _there(run)
    best = _best(good)
    rows = [_row(folder, folder in best) for folder in good]
    rows += [{"path": str(folder), "state": state} for folder, state in others]
    if as_object:
        click.echo(as_json(rows))
        return
    for row in rows:
        click.echo(printable(_line(row)))
    if not rows:
        click.echo(printable(f"no checkpoint in {run}"), err=True)


@checkpoints.command()
@click.argument("run")
@as_object_option
def verify(run: str, as_object: bool) -> None:
    """Read every file of every committed checkpoint of RUN. Exit code 5: a digest does not hold."""
    good, _ = _there(run)
    if not good:
        raise _none(run)
    problems_of = {str(folder): _problems(folder) for folder in good}
    if as_object:
        rows = [{"path": path, "problems": problems} for path, problems in problems_of.items()]
        click.echo(as_json(rows))
    else:
        for path, problems in problems_of.items():
            click.echo(printable(f"{path}  {'; '.join(problems) or 'holds'}"))
    if any(problems_of.values()):
        sys.exit(EXIT_DIFFERENCE_FOUND)


@checkpoints.command(cls=Verb)
@click.argument("run")
@click.option("--to", "target", required=True, help="The file to write.")
@click.option("--step", type=int, help="Which checkpoint (default: the newest).")
@click.option("--best", is_flag=True, help="The best one, by the --best of the job.")
@click.option(
    "--format",
    "form",
    type=click.Choice((SAFETENSORS, *FORMATS)),
    default=SAFETENSORS,
    help="safetensors: weights by name. keras, saved-model: the whole model, for a run of the "
    "TensorFlow engine. huggingface: a folder for from_pretrained of transformers or peft.",
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Of huggingface (default: as saved).")
@click.option("--shard-size", help=f"Of huggingface: bytes of a file (default: {SHARD_SIZE}).")
@as_object_option
def export(
    run: str,
    target: str,
    step: int | None,
    best: bool,
    form: str,
    dtype: str | None,
    shard_size: str | None,
    as_object: bool,
) -> None:
    """Write the weights of RUN's model to one safetensors file, or a whole model of Keras or
    Hugging Face.

    Exit code 5: the checkpoint does not hold.
    """
    options = _export_options(form, dtype, shard_size)
    good, _ = _there(run)
    wanted = _asked_best(run, good, step) if best else good
    chosen = [folder for folder in wanted if step in (None, step_of(folder))]
    if not chosen:
        raise _none(run if step is None else f"{run} at step {step}")
    try:
        tensors = _exported(chosen[0], Path(target), form, options)
    except BadCheckpoint as error:
        click.echo(printable(f"{chosen[0]}: {error}"), err=True)
        click.echo("nothing was written; --step N takes an older one", err=True)
        sys.exit(EXIT_DIFFERENCE_FOUND)
    size = _size(Path(target))
    if as_object:
        record = {"from": str(chosen[0]), "to": target, "tensors": tensors, "bytes": size}
        click.echo(as_json(record))
    else:
        click.echo(printable(f"{target}: {tensors} tensors, {format_bytes(size)}"))


def _export_options(form: str, dtype: str | None, shard_size: str | None) -> dict[str, Any]:
    """What the process that exports gets beside the files."""
    if form != HUGGINGFACE and (dtype or shard_size):
        raise RequestError(
            asked=f"--dtype {dtype}" if dtype else f"--shard-size {shard_size}",
            found=f"--format {form}",
            why="it has the types of the checkpoint, and the files that its readers know",
            do=f"--format {HUGGINGFACE}, or leave it out",
        )
    size = parse_bytes(shard_size or SHARD_SIZE)
    if not size:
        raise RequestError(
            asked=f"--shard-size {shard_size}",
            found=repr(shard_size),
            why="it is a number with a unit: KB, MB, GB, or KiB, MiB, GiB",
            do=f"for example --shard-size {SHARD_SIZE}",
        )
    return {"dtype": dtype or "", "shard_bytes": size}


def _exported(folder: Path, target: Path, form: str, options: dict[str, Any]) -> int:
    """Export one checkpoint; returns how many tensors were written."""
    if form == SAFETENSORS:
        return len(export_weights(folder, target))
    tensors = export_model(folder, target, form, options=options)
    manifest = read_manifest(folder)
    was, now = manifest.facts.get("program_sha256"), file_sha256(manifest.job["program"])
    if was != now:
        note = f"note: {manifest.job['program']} has changed since; the model is that of today's"
        click.echo(printable(note), err=True)
    return tensors


def _size(target: Path) -> int:
    """The bytes of a file, or of all files in a folder."""
    files = [target] if target.is_file() else [p for p in target.rglob("*") if p.is_file()]
    return sum(path.stat().st_size for path in files)


def _there(run: str) -> tuple[list[Path], list[tuple[Path, str]]]:
    """The committed checkpoints of a run, and the folders that are none, with their state."""
    path = Path(run)
    if (path / NAME).exists() or step_of(path) >= 0:
        return [path], []
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    others = [(f, "not committed") for f in uncommitted(folder)]
    others += [(f, "set aside") for f in bad(folder)]
    good = committed(folder)
    if folder == path and not good and not others:
        raise _none(run)
    return good, others


def _none(run: str) -> RequestError:
    return RequestError(
        asked=f"the checkpoints of {run}",
        found="none that is committed" if Path(run).exists() else "no such run",
        why="a checkpoint is a folder with a manifest.json, in the run's folder `checkpoints`",
        do="train with --checkpoint-every N; `allranks runs` lists the runs"
        if Path(run).exists()
        else "see `allranks runs` for the runs",
    )


def _problems(folder: Path) -> list[str]:
    try:
        manifest = read_manifest(folder)
        return verify_files(folder, manifest, manifest.files)
    except BadCheckpoint as error:
        return [str(error)]


def _best(good: list[Path]) -> list[Path]:
    """The best of these, by what the job of the newest goes by; [] if it goes by nothing."""
    try:
        rule = str(read_manifest(good[0]).job.get("best", "")) if good else ""
    except BadCheckpoint:
        return []
    return best_of(good, rule)


def _asked_best(run: str, good: list[Path], step: int | None) -> list[Path]:
    best = _best(good)
    if step is not None or not best:
        raise RequestError(
            asked="--best" if step is None else f"--best --step {step}",
            found=f"no checkpoint of {run} that is marked best" if step is None else "both",
            why="which is best is judged by the job's --best max:METRIC or min:METRIC",
            do="train with --best, or take one with --step N" if step is None else "give one",
        )
    return best


def _row(folder: Path, is_best: bool) -> dict[str, Any]:
    try:
        manifest = read_manifest(folder)
    except BadCheckpoint as error:
        return {"path": str(folder), "state": f"bad: {error}"}
    return {
        "path": str(folder),
        "state": "committed",
        "step": manifest.step,
        "created": manifest.created,
        "bytes": manifest.bytes,
        "ranks": manifest.ranks,
        "metrics": manifest.metrics,
        "best": is_best,
    }


def _line(row: dict[str, Any]) -> str:
    if row["state"] != "committed":
        return f"{row['path']}  {row['state']}"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["created"]))
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in row["metrics"].items())
    size = format_bytes(row["bytes"])
    mark = "  (best)" if row["best"] else ""
    return f"{row['path']}  {when}  {size}  × {row['ranks']}  {metrics}".rstrip() + mark


# --- whole models --------------------------------------------------------------------------------
# The model of a run is exported by the engine that trained it, in a process of its own.
#
# A library writes its own formats, and only the task can build the model. So a process imports
# both, and the command line imports neither.


def export_model(
    folder: Path,
    target: Path,
    form: str,
    server: ForkServer | None = None,
    options: dict[str, Any] | None = None,
) -> int:
    """Write the model of the checkpoint `folder` to `target`; returns how many tensors are in it.

    `form` is "keras" (a file that `keras.models.load_model` reads), "saved-model" (a folder for
    TensorFlow Serving) or "huggingface" (a folder for `from_pretrained`), which alone has `options`
    (`dtype` and `shard_bytes`). Raises `BadCheckpoint` if the checkpoint is damaged, and
    `RequestError` for a run of another engine, or if `target` exists or cannot be written. The
    program is imported by the name with which the run was started.
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
        paths = {"folder": folder, "target": target, "beside": unfinished}
        argument = {name: str(path.absolute()) for name, path in paths.items()}
        return _run_export(server, job, form, {**argument, **(options or {})})


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
    if form not in ENGINES[job.engine].exports or not job.program:
        subject = f"a run of the {job.engine} engine"
        raise RequestError(
            asked=f"to export to {target} with --format {form}",
            found=subject if job.program else "a hand-written loop, which names no program",
            why=f"that format holds a whole model, which a task of {FORMATS[form]} builds",
            do="--format safetensors, which has the weights by their names",
        )
    return job


def _run_export(server: ForkServer, job: Job, form: str, argument: dict[str, Any]) -> int:
    answer = answer_of_process(
        server,
        ENGINES[job.engine].exports[form],
        lambda scratch: {
            "job": dataclasses.replace(job, run_dir=scratch).to_data(),
            "form": form,
            **argument,
        },
        "exported",
        {
            **backend_of_keras(job),
            "CUDA_VISIBLE_DEVICES": "-1",  # the GPUs may be at work, and one takes all their memory
            "TF_CPP_MIN_LOG_LEVEL": "2",
        },
        process_name=f"the process that exports to {argument['target']}",
        if_interrupted=f"nothing was written to {argument['target']}",
    )
    return int(answer["tensors"])
