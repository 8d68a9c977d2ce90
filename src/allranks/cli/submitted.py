"""The words after `allranks submit --`: a `train` or `run` command line, checked and completed.

They are taken apart by the very commands that will read them in the job, so a misspelt option is
found here and not after a night in the queue. What the batch script decides (place, nodes, ranks,
run folder) is added to them, and refused where they say otherwise.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from allranks.catalog import PROGRAMS, VERBS, load
from allranks.cli.options import resolved_from
from allranks.errors import RequestError, nearest
from allranks.job.config import Resolved
from allranks.job.job import Job
from allranks.job.job_file import read_job_file
from allranks.job.place import place_spec
from allranks.job.run_folder import is_in_use
from allranks.launcher.places.slurm import SlurmJob
from allranks.strategies.resolve import strategy_spec

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
