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
from click.core import ParameterSource

from allranks.catalog import PROGRAMS, VERBS, load
from allranks.checkpoint.files import as_json
from allranks.cli.display.progress import say
from allranks.cli.options import Verb, resolved_from
from allranks.errors import PlaceError, RequestError, nearest, printable
from allranks.job.config import Resolved
from allranks.job.job import Job
from allranks.job.job_file import read_job_file
from allranks.job.place import place_spec
from allranks.job.run_folder import is_in_use
from allranks.job.units import parse_slurm_time
from allranks.launcher.places.slurm import SlurmJob
from allranks.launcher.scripts.plan import script_position
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
from allranks.strategies.resolve import strategy_spec

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


@click.command(cls=Verb, context_settings={"allow_interspersed_args": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- train|run ...")
@click.option("--cluster", default="", help="Site to run on (default: this machine's Slurm).")
@click.option("--partition", default="", help="Partition (default: the site's usual one).")
@click.option("--account", default="", help="Project that pays (default: Slurm's own).")
@click.option(
    "--time", "time_s", type=TimeLimit(), help="20 (minutes), 2:00:00 or 2d (default: the site's)."
)
@click.option("--nodes", type=POSITIVE, help="Nodes (default 1).")
@click.option("--ranks-per-node", type=POSITIVE, help="Ranks on each node (default: one per GPU).")
@click.option("--gpus-per-node", type=click.IntRange(min=0), help="GPUs (default: one per rank).")
@click.option("--cpus-per-task", type=POSITIVE, help="CPUs of each rank (default: its share).")
@click.option("--mem", type=Memory(), help="Memory of a node (default: the job's share).")
@click.option("--mem-per-cpu", type=Memory(), help="Or per CPU, if the site wants it so.")
@click.option("--mem-per-gpu", type=Memory(), help="Or per GPU.")
@click.option(
    "--signal",
    "signal_s",
    type=click.IntRange(min=0),
    help="Time before the limit to save and stop (default 120).",
)
@click.option("--requeue", is_flag=True, help="Queue it again if it stopped early.")
@click.option("--per-rank", is_flag=True, help="Slurm starts each rank, not one agent per node.")
@click.option(
    "--module", "modules", multiple=True, help="Modules to load, or none (default: the site's)."
)
@click.option("--venv", default="", help="Virtual environment, or none (default: this one).")
@click.option("--container", default="", help="Apptainer image to run in (default: none).")
@click.option("--setup", multiple=True, help="A shell line before the program; may be repeated.")
@click.option(
    "--sbatch", "options", multiple=True, help="Another option of sbatch, as --sbatch=--qos=debug."
)
@click.option("--name", default="", help="Name of the job (default: the program's).")
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


# --- words ---------------------------------------------------------------------------------------
# The words after `allranks submit --`: a `train` or `run` command line, checked and completed.
#
# They are taken apart by the very commands that will read them in the job, so a misspelt option is
# found here and not after a night in the queue. What the batch script decides (place, nodes, ranks,
# run folder) is added to them, and refused where they say otherwise.


SUBMITTED = ("train", "run")
PLACE = SlurmJob.name
OPTIONS_OF_SUBMIT = ("dry_run", "placement")
OPTIONS_OF_OTHER_PLACES = (
    "hosts",
    "node_rank",
    "rendezvous",
    "nnodes",
    "nproc_per_node",
    "master_addr",
)
OTHER_OPTIONS = ("settings", "job_file", "epochs", "inject")  # `resolved_from` takes them out


@dataclass(frozen=True)
class Submitted:
    """A command line, taken apart; `None` or "" for what it does not set.

    `options` are the names of given options; `values` has their values, and those of its job file.
    """

    verb: str
    words: tuple[str, ...]
    program: str
    options: frozenset[str]
    parameters: dict[str, Any]
    values: dict[str, Any]

    @property
    def run_dir(self) -> str:
        return str(self.values.get("run_dir") or "")

    @property
    def survives_nodes(self) -> bool:
        """Whether it starts again after a fault, and so can lose a node."""
        return int(self.values.get("max_restarts") or 0) > 0

    @property
    def devices_per_rank(self) -> int:
        strategy = self.values.get("strategy") if self.verb == "train" else None
        return strategy_spec(strategy, 1).devices_of_a_rank if strategy else 1

    @property
    def device(self) -> str:
        """The device of a task; "" for a command, whose device is unknown."""
        return str(self.values.get("device") or "cpu") if self.verb == "train" else ""


def read_words(words: tuple[str, ...]) -> Submitted:
    """Take the words apart; raises `RequestError` or click's own errors."""
    words = words[1:] if words[:1] == ("--",) else words
    if not words or words[0] not in SUBMITTED:
        raise RequestError(
            asked=f"allranks submit -- {' '.join(words)}".rstrip(),
            found="no `train` or `run` after the --" if not words else repr(words[0]),
            why="the words after the -- are what the job runs",
            do="allranks submit [options] -- train PROGRAM …, or -- run -- COMMAND …",
        )
    verb = words[0]
    command: click.Command = load(VERBS[verb][0])
    context = command.make_context(verb, list(words[1:]))
    options = frozenset(
        name
        for name in context.params
        if context.get_parameter_source(name) == ParameterSource.COMMANDLINE
    )
    parameters = dict(context.params)
    _refuse(options, verb)
    program = parameters.get("program") if verb == "train" else _script(parameters.get("words", ()))
    layers = _layers(parameters)
    values = {**layers, **{name: parameters[name] for name in options}}
    program = program or str(layers.get("program", ""))
    if verb == "train":
        _check_program(program)
    else:
        _check_script(parameters.get("words", ()))
    return Submitted(verb, words, program, options, parameters, values)


def _layers(parameters: dict[str, Any]) -> dict[str, Any]:
    """The values of the resumed run, overridden by those of the job file."""
    values: dict[str, Any] = {}
    before = Path(parameters.get("run_dir") or ".") / "job.toml"
    if parameters.get("run_dir") and before.is_file():
        values |= read_job_file(str(before))[0]
    if parameters.get("job_file"):
        values |= read_job_file(parameters["job_file"])[0]
    values.pop("place", None)  # where it ran before says nothing of where it runs now
    return values


def _refuse(options: frozenset[str], verb: str) -> None:
    for name in (*OPTIONS_OF_SUBMIT, *OPTIONS_OF_OTHER_PLACES):
        if name in options:
            option = f"--{name.replace('_', '-')}"
            is_own = name in OPTIONS_OF_SUBMIT
            raise RequestError(
                asked=f"{option} after `submit -- {verb}`",
                found="a job of Slurm",
                why="the batch script runs one job once" if is_own else "Slurm says which nodes",
                do=f"leave {option} out; allranks submit --dry-run prints the script"
                if is_own
                else f"leave {option} out; allranks submit --nodes N --ranks-per-node K says it",
            )


def _script(words: tuple[str, ...]) -> str:
    """What a command is called: its script, or its first word."""
    words = words[1:] if words[:1] == ("--",) else words
    return next((word for word in words if word.endswith(".py")), next(iter(words), ""))


def _check_script(words: tuple[str, ...]) -> None:
    """Raise for a script that is not here, where it is the first word or that behind a Python.

    One with an absolute path may be in a container, or on the site alone.
    """
    words = words[1:] if words[:1] == ("--",) else words
    script = words[script_position(words)] if words else ""
    path = Path(script)
    if path.suffix == ".py" and not path.is_absolute() and not path.is_file():
        raise RequestError(
            asked=f"allranks submit -- run -- {' '.join(words)}",
            found=f"no file {script} in {Path.cwd()}",
            why="the job starts in this folder, and would fail after its time in the queue",
            do="check the path, or type this in the folder of the script",
        )


def _check_program(program: str) -> None:
    """A built-in name, a file that is here, or module:Class, which cannot be looked for."""
    if not program:
        raise RequestError(
            asked="allranks submit -- train",
            found="no PROGRAM, and no job file that names one",
            why="there is nothing to train",
            do="name a task: allranks submit -- train digits",
        )
    file = program if program.endswith(".py") else program.rpartition(":")[0]
    if file.endswith(".py") and not Path(file).is_file():
        raise RequestError(
            asked=f"PROGRAM {program!r}",
            found=f"no file {file} in {Path.cwd()}",
            why="the job starts in this folder, and reads the task from there",
            do="check the path; built-in programs are: " + ", ".join(PROGRAMS),
        )
    if ":" not in program and not program.endswith(".py") and program not in PROGRAMS:
        raise RequestError(
            asked=f"PROGRAM {program!r}",
            found="neither a built-in program nor a .py file nor module:Class",
            why="a program is a task: its class must be somewhere to import it from",
            do=nearest(program, PROGRAMS),
        )


def nodes_and_ranks(
    submitted: Submitted, nodes: int | None, per_node: int | None
) -> tuple[int, int | None]:
    """Nodes, and ranks per node (`None`: not given), from all options that may set them."""
    named = submitted.values.get("nodes") if "nodes" in submitted.options or nodes is None else None
    if nodes is not None and named is not None and int(named) != nodes:
        raise _disagree(f"--nodes {nodes}", f"--nodes {named}", submitted.verb, "--nodes")
    count = nodes or int(named or 1)
    its_ranks = submitted.values.get("ranks_per_node")
    if its_ranks is not None and per_node is not None and int(its_ranks) != per_node:
        option = "--ranks-per-node"
        raise _disagree(f"{option} {per_node}", f"{option} {its_ranks}", submitted.verb, option)
    each = per_node if its_ranks is None else int(its_ranks)
    total = submitted.values.get("ranks")
    if total is None or ("ranks" not in submitted.options and each is not None):
        return count, each
    if each is not None and each * count != int(total):
        words = f"--nodes {count} --ranks-per-node {each}"
        raise _disagree(words, f"--ranks {total}", submitted.verb, "--ranks")
    if int(total) % count:
        raise RequestError(
            asked=f"--nodes {count} -- {submitted.verb} … --ranks {total}",
            found=f"{total} ranks do not share out evenly over {count} nodes",
            why="Slurm is asked for the same number of tasks on every node",
            do=f"--ranks {count * max(1, int(total) // count)}, or another number of --nodes",
        )
    return count, int(total) // count


def complete(
    submitted: Submitted, *, nodes: int, ranks: int, run_dir: str, per_rank: bool
) -> tuple[str, ...]:
    """The words that the batch script runs: the user's, and those that `submit` adds."""
    if "place" in submitted.options and place_spec(submitted.values["place"]).name != PLACE:
        found = f"--place {submitted.values['place']}"
        raise _disagree("a job of Slurm", found, submitted.verb, "--place")
    added = ["--place", PLACE]
    values = {"nodes": str(nodes), "ranks": str(ranks)}
    for name, value in values.items():
        if name not in submitted.options and not (name == "ranks" and _says_per_node(submitted)):
            added += [f"--{name}", value]
    if "run_dir" not in submitted.options:
        added += ["--run-dir", run_dir]
    elif os.path.abspath(submitted.run_dir) != run_dir:
        path_words, option = f"--run-dir {run_dir}", "--run-dir"
        raise _disagree(path_words, f"--run-dir {submitted.run_dir}", submitted.verb, option)
    if per_rank and "per_rank" not in submitted.options:
        added.append("--per-rank")
    if "place" in submitted.options:
        added = added[2:]
    verb, *tail = submitted.words
    # behind the COMMAND of `run` they would be its own
    words = [verb, *added, *tail] if verb == "run" else [verb, *tail, *added]
    return ("allranks", *words)


def _says_per_node(submitted: Submitted) -> bool:
    return "ranks_per_node" in submitted.options


def check_job(submitted: Submitted, *, nodes: int, ranks: int, run_dir: str) -> Resolved | None:
    """The job that `train` will resolve, checked without its program; `None` for `run`."""
    if submitted.verb != "train":
        return None
    known = {field.name for field in dataclasses.fields(Job)} | set(OTHER_OPTIONS)
    flags = {n: v for n, v in submitted.parameters.items() if n in known and n != "program"}
    flags |= {"place": PLACE, "nodes": nodes, "ranks": ranks, "run_dir": run_dir}
    return resolved_from(submitted.parameters.get("program"), flags)


def check_run_dir(run_dir: str) -> None:
    """Raise now if the job, hours from now, could not use this run folder."""
    path = Path(run_dir)
    if is_in_use(path):
        problem = "a run folder in use by a running job"
    elif path.exists() and not (path / "job.toml").is_file() and _is_filled(path):
        problem = "something is there already, which is no run folder"
    else:
        return
    raise RequestError(
        asked=f"--run-dir {run_dir}",
        found=problem,
        why="a job never writes over what another one left",
        do="name a folder that does not exist yet, or one of a job to resume",
    )


def _is_filled(path: Path) -> bool:
    return not path.is_dir() or any(path.iterdir())


def _disagree(asked: str, found: str, verb: str, option: str) -> RequestError:
    return RequestError(
        asked=f"allranks submit: {asked}",
        found=f"{found} in the words of `{verb}`",
        why="they say two things about one job",
        do=f"leave {option} out after the --, and say it once, before",
    )
