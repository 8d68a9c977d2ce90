"""`allranks submit -- train PROGRAM …`: the same job as a batch script, checked and queued."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from allranks.catalog import PROGRAMS, VERBS, load
from allranks.checkpoint.files import as_json
from allranks.cli.display.progress import say
from allranks.cli.options import Parsed, Verb, resolved_from, typed_options
from allranks.errors import PlaceError, RequestError, nearest, printable
from allranks.job.config import Resolved
from allranks.job.job import Job, read_job_file
from allranks.job.place import place_spec
from allranks.job.run_folder import is_in_use
from allranks.job.units import parse_slurm_time
from allranks.launcher.places.slurm import SlurmJob
from allranks.launcher.scripts.plan import script_position
from allranks.launcher.slurm.commands import NONE, SlurmScript, SlurmSubmitter
from allranks.launcher.slurm.request import SlurmOptions, parse_memory_mb
from allranks.launcher.slurm.site import Site
from allranks.launcher.start import new_run_dir
from allranks.strategies.resolve import strategy_spec

ACCOUNT_VARIABLES = ("SBATCH_ACCOUNT", "SLURM_ACCOUNT")
POSITIVE = click.IntRange(min=1)
MEMORY = Parsed("memory", parse_memory_mb, "no memory: write 64G, 512M or a number of MB above 0")
NO_TIME_LIMIT = "no time limit: write 20 (minutes), 2:00:00, 1-12, 90m or 2d"
TIME_LIMIT = Parsed("time limit", parse_slurm_time, NO_TIME_LIMIT)


@click.command(cls=Verb, context_settings={"allow_interspersed_args": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- train|run ...")
@click.option("--cluster", default="", help="Site to run on (default: this machine's Slurm).")
@click.option("--partition", default="", help="Partition (default: the site's usual one).")
@click.option("--account", default="", help="Project that pays (default: Slurm's own).")
@click.option(
    "--time", "time_s", type=TIME_LIMIT, help="20 (minutes), 2:00:00 or 2d (default: the site's)."
)
@click.option("--nodes", type=POSITIVE, help="Nodes (default 1).")
@click.option("--ranks-per-node", type=POSITIVE, help="Ranks on each node (default: one per GPU).")
@click.option("--gpus-per-node", type=click.IntRange(min=0), help="GPUs (default: one per rank).")
@click.option("--cpus-per-task", type=POSITIVE, help="CPUs of each rank (default: its share).")
@click.option("--mem", type=MEMORY, help="Memory of a node (default: the job's share).")
@click.option("--mem-per-cpu", type=MEMORY, help="Or per CPU, if the site wants it so.")
@click.option("--mem-per-gpu", type=MEMORY, help="Or per GPU.")
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
    submitter = SlurmSubmitter.of(cluster)
    script = plan_submission(words, submitter, flags)
    facts = script.facts()
    if dry_run:
        click.echo(as_json(facts | {"text": script.text}) if as_object else script.text)
        return
    job_id = submitter.submit(script)
    output = script.request.output.replace("%j", str(job_id))
    say(f"job {job_id}: sent; output in {output}")
    facts |= {"job_id": job_id, "output": output}
    code: int | None = 0
    if follow:
        state, code = _follow(submitter, job_id, Path(output))
        facts |= {"state": state, "exit_code": code}
    if as_object:
        click.echo(as_json(facts))
    elif not follow:
        click.echo(job_id)
    if code is None:
        raise PlaceError(f"job {job_id} is over, and Slurm has forgotten how; see {output}")
    sys.exit(code)


def plan_submission(
    words: tuple[str, ...], submitter: SlurmSubmitter, flags: dict[str, Any]
) -> SlurmScript:
    """Everything up to the script, which is not on disk yet; raises `RequestError`."""
    submitted = read_words(words)
    nodes, ranks_per_node = nodes_and_ranks(submitted, flags["nodes"], flags["ranks_per_node"])
    run_dir = os.path.abspath(
        flags["run_dir"] or submitted.run_dir or new_run_dir(submitted.program)
    )
    flags = flags | {"nodes": nodes, "ranks_per_node": ranks_per_node}
    options = _asked(submitted, submitter.site, flags)
    request = submitter.check(options, submitted.device, run_dir)
    where: dict[str, Any] = {"nodes": nodes, "ranks": request.ranks, "run_dir": run_dir}
    command = complete(submitted, **where, per_rank=flags["per_rank"])
    check_run_dir(run_dir)
    check_job(submitted, **where)
    return submitter.write(dataclasses.replace(request, command=command))


def _asked(submitted: Submitted, site: Site, flags: dict[str, Any]) -> SlurmOptions:
    """The user's options, with defaults from this environment."""
    account = flags["account"]
    for variable in ACCOUNT_VARIABLES:  # as sbatch would read it; the script says it
        account = account or os.environ.get(variable, "")
    names = {field.name for field in dataclasses.fields(SlurmOptions)}
    options = {name: value for name, value in flags.items() if name in names}
    options |= {
        "account": account,
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
    return () if names == (NONE,) else names or site.modules


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


def _follow(submitter: SlurmSubmitter, job_id: int, output: Path) -> tuple[str | None, int | None]:
    """Print the job's output, line by line; returns its last state and its exit code."""
    tail = b""

    def write(chunk: bytes) -> None:
        nonlocal tail
        *lines, tail = (tail + chunk).split(b"\n")
        for line in lines:
            click.echo(printable(line.decode(errors="replace")))

    try:
        return submitter.follow(job_id, output, write, say)
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
    options = frozenset(typed_options(context))
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
        says_ranks = name == "ranks" and "ranks_per_node" in submitted.options
        if name not in submitted.options and not says_ranks:
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
