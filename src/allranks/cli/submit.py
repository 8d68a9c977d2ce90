"""`allranks submit -- train PROGRAM …`: the same job as a batch script, checked and queued."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from allranks.checkpoint.files import as_json
from allranks.cli.display.progress import say
from allranks.cli.submitted import (
    Submitted,
    check_job,
    check_run_dir,
    complete,
    nodes_and_ranks,
    read_words,
)
from allranks.errors import PlaceError, RequestError, printable
from allranks.job.units import parse_slurm_time
from allranks.launcher.slurm import commands
from allranks.launcher.slurm.limits import check_device, check_request
from allranks.launcher.slurm.request import (
    SlurmOptions,
    SlurmRequest,
    make_request,
    parse_memory_mb,
)
from allranks.launcher.slurm.script import render
from allranks.launcher.slurm.site import Site, load_site
from allranks.launcher.start import new_run_dir

ACCOUNT_VARIABLES = ("SBATCH_ACCOUNT", "SLURM_ACCOUNT")
SCRIPT_MODE = 0o600  # the words of a command may hold what others should not read
NONE = "none"
POSITIVE = click.IntRange(min=1)


class Memory(click.ParamType):  # type: ignore[type-arg]
    """MB, as Slurm reads a plain number, or a text like 64G."""

    name = "memory"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        megabytes = parse_memory_mb(str(value))
        if megabytes is None:
            self.fail(f"{value!r} is no memory: write 64G, 512M or a number of MB above 0")
        return megabytes


class TimeLimit(click.ParamType):  # type: ignore[type-arg]
    """A time limit as sbatch reads it, where a plain number is minutes, or a text like 2h."""

    name = "time limit"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        seconds = parse_slurm_time(str(value))
        if seconds is None:
            self.fail(f"{value!r} is no time limit: write 20 (minutes), 2:00:00, 1-12, 90m or 2d")
        return seconds


@dataclass(frozen=True)
class Submission:
    """A request, its script, and where that will be written. Nothing of it exists yet."""

    site: Site
    request: SlurmRequest
    text: str
    script: Path


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- train|run ...")
@click.option("--cluster", default="", help="A site: NAME, or a .toml FILE (default: this one).")
@click.option("--partition", default="", help="Where it runs (default: the site's usual one).")
@click.option("--account", default="", help="The project that is charged.")
@click.option("--time", "time_s", type=TimeLimit(), help="Time limit: 20 (minutes), 2:00:00 or 2d.")
@click.option("--nodes", type=POSITIVE, help="Nodes (default 1).")
@click.option("--ranks-per-node", type=POSITIVE, help="Ranks on each node (default: one per GPU).")
@click.option("--gpus-per-node", type=click.IntRange(min=0), help="GPUs of each node.")
@click.option("--cpus-per-task", type=POSITIVE, help="CPUs of each rank (default: its share).")
@click.option("--mem", type=Memory(), help="Memory of a node (default: the job's share).")
@click.option("--mem-per-cpu", type=Memory(), help="... or of a CPU, where the site says so.")
@click.option("--mem-per-gpu", type=Memory(), help="... or of a GPU.")
@click.option(
    "--signal",
    "signal_s",
    type=click.IntRange(min=0),
    help="Seconds before its end in which the job saves and leaves (default 120).",
)
@click.option("--requeue", is_flag=True, help="Back into the queue when it stopped early.")
@click.option("--per-rank", is_flag=True, help="Slurm starts every rank, not one agent a node.")
@click.option("--module", "modules", multiple=True, help="Load these, not the site's; or none.")
@click.option("--venv", default="", help="Virtual environment (default: this one; or none).")
@click.option("--container", default="", help="Run in this image of Apptainer.")
@click.option("--setup", multiple=True, help="A line of shell before the program.")
@click.option("--sbatch", "options", multiple=True, help="A further option: --sbatch=--qos=debug.")
@click.option("--name", default="", help="The job's name (default: the program's).")
@click.option("--run-dir", default="", help="The run folder (default runs/PROGRAM-TIME).")
@click.option("--dry-run", is_flag=True, help="Print the script; write and send nothing.")
@click.option("--follow", is_flag=True, help="Show the job's output until it has ended.")
@click.option("--json", "as_object", is_flag=True, help="Last line of stdout: one JSON object.")
def submit(
    words: tuple[str, ...], cluster: str, dry_run: bool, follow: bool, as_object: bool, **flags: Any
) -> None:
    """Send a job to Slurm: a script is written, checked against the site, and sent.

    \b
    allranks submit --nodes 2 --ranks-per-node 4 --time 2:00:00 -- train digits
    allranks submit --cluster puhti --partition gpu --account project_1 --dry-run -- \\
        train mytask.py --device cuda
    allranks submit --requeue --follow -- run -- python train.py
    """
    submission = plan_submission(words, _site(cluster), flags)
    facts = _facts(submission)
    if dry_run:
        click.echo(as_json(facts | {"text": submission.text}) if as_object else submission.text)
        return
    _check_here(submission.request)
    job_id = _send(submission)
    output = submission.request.output.replace("%j", str(job_id))
    say(f"job {job_id}: sent; output in {output}")
    facts |= {"job_id": job_id, "output": output}
    state = _follow(job_id, Path(output)) if follow else None
    code = commands.exit_code_of(state) if follow else 0
    if follow:
        facts |= {"state": None if state is None else state.state, "exit_code": code}
    if as_object:
        click.echo(as_json(facts))
    elif not follow:
        click.echo(job_id)
    if code is None:
        raise PlaceError(f"job {job_id} is over, and Slurm has forgotten how; see {output}")
    sys.exit(code)


def plan_submission(words: tuple[str, ...], site: Site, flags: dict[str, Any]) -> Submission:
    """Everything up to the script, which is not written; raises `RequestError`."""
    submitted = read_words(words)
    nodes, ranks_per_node = nodes_and_ranks(submitted, flags["nodes"], flags["ranks_per_node"])
    run_dir = os.path.abspath(
        flags["run_dir"] or submitted.run_dir or new_run_dir(submitted.program)
    )
    options = _asked(submitted, site, flags)
    options = dataclasses.replace(options, nodes=nodes, ranks_per_node=ranks_per_node)
    request = make_request(site, options, command=(), folder=os.getcwd(), run_dir=run_dir)
    check_request(site, options, request)
    check_device(site, request, submitted.device)
    command = complete(
        submitted,
        nodes=nodes,
        ranks=request.ranks,
        run_dir=run_dir,
        per_rank=flags["per_rank"],
    )
    check_run_dir(run_dir)
    check_job(submitted, nodes=nodes, ranks=request.ranks, run_dir=run_dir)
    request = dataclasses.replace(request, command=command)
    return Submission(site, request, render(request), Path(f"{run_dir}.sbatch"))


def _asked(submitted: Submitted, site: Site, flags: dict[str, Any]) -> SlurmOptions:
    """The user's options, with defaults from this environment."""
    account = flags["account"]
    for variable in ACCOUNT_VARIABLES:  # as sbatch would read it; the script says it
        account = account or os.environ.get(variable, "")
    names = {field.name for field in dataclasses.fields(SlurmOptions)}
    options = {name: value for name, value in flags.items() if name in names}
    options |= {
        "account": account,
        "nodes": 1,
        "time_s": None if flags["time_s"] is None else int(flags["time_s"]),
        "modules": _modules(flags["modules"], site),
        "venv": _venv(flags["venv"], flags["container"]),
        "container": _path(flags["container"]),
        "name": flags["name"] or Path(submitted.program.partition(":")[0]).stem,
        "survives_nodes": submitted.survives_nodes,
        "devices_per_rank": submitted.devices_per_rank,
        "any_devices": submitted.verb == "run",
    }
    if submitted.verb == "run" and options["signal_s"] is None:
        options["signal_s"] = 0  # a script that does not know the signal would die of it
    if not (options["venv"] or options["container"] or options["modules"] or flags["venv"]):
        here = shlex.quote(str(Path(sys.executable).parent))
        options["setup"] = (*options["setup"], f"export PATH={here}:$PATH")
    return SlurmOptions(**options)


def _modules(names: tuple[str, ...], site: Site) -> tuple[str, ...]:
    if names == (NONE,):
        return ()
    return names or site.modules


def _venv(path: str, container: str) -> str:
    """The environment that was named, or the one that this very command runs in."""
    if path == NONE:
        return ""
    if not path and not container and sys.prefix != sys.base_prefix:
        return sys.prefix
    return _path(path)


def _path(path: str) -> str:
    """An absolute path; a container may also be an address like docker://…."""
    return path if not path or "://" in path else os.path.abspath(path)


def _site(cluster: str) -> Site:
    if cluster:
        return load_site(cluster)
    if commands.is_here():
        return commands.discover()
    raise RequestError(
        asked="allranks submit without --cluster",
        found="no Slurm on this machine",
        why="what may be asked for differs from site to site",
        do="type this on a login node, or add --cluster NAME --dry-run to see the script; "
        "`allranks cluster list` has the names",
    )


def _check_here(request: SlurmRequest) -> None:
    """Raise for files that the job would miss; they can be checked here where files are shared."""
    image = request.container[-1] if request.container else ""
    for option, path in (("--venv", request.venv), ("--container", image)):
        file = Path(path, "bin", "activate") if option == "--venv" else Path(path)
        if path and "://" not in path and not file.exists():
            raise RequestError(
                asked=f"{option} {path}",
                found=f"no {file}",
                why="the job would fail for want of it, after its time in the queue",
                do="check the path" + (f"; or {option} {NONE}" if option == "--venv" else ""),
            )


def _send(submission: Submission) -> int:
    """Write the script, readable by its owner alone, and send it; remove it if it is refused."""
    path = submission.script
    created = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_bytes() if path.exists() else None
        _write(path, submission.text.encode())
    except OSError as error:
        raise RequestError(
            asked=f"--run-dir {submission.request.run_dir}",
            found=str(error),
            why=f"the batch script is written beside it, as {path.name}",
            do="name a folder that can be written",
        ) from None
    try:
        return commands.send(path)
    except BaseException:
        path.unlink()
        if before is not None:
            _write(path, before)
        with suppress(OSError):  # another process may use them by now
            for parent in created:
                parent.rmdir()
        raise


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, SCRIPT_MODE)
    with os.fdopen(file, "wb") as script:
        script.write(content)
    os.replace(temporary, path)


def _facts(submission: Submission) -> dict[str, Any]:
    request = submission.request
    return {
        "cluster": submission.site.name,
        "partition": request.partition,
        "nodes": request.nodes,
        "ranks": request.ranks,
        "script": str(submission.script),
        "output": request.output,
        "run_dir": request.run_dir,
        "job_id": None,
    }


def _follow(job_id: int, output: Path) -> commands.JobState | None:
    tail = b""

    def write(chunk: bytes) -> None:
        nonlocal tail
        *lines, tail = (tail + chunk).split(b"\n")
        for line in lines:
            click.echo(printable(line.decode(errors="replace")))

    try:
        return commands.follow(job_id, output, write, say)
    except KeyboardInterrupt:
        say(f"job {job_id} goes on; scancel {job_id} ends it")
        raise
    finally:
        write(b"\n" if tail else b"")
