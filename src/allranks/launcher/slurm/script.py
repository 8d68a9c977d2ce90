"""The batch script of a job, as text: readable, and a person can send it by hand. Pure.

Three readers take it apart, each in its own way: `sbatch` reads the lines that begin with `#SBATCH`
before any shell does, and cuts them by rules of its own (`directive` follows them); bash reads the
rest (`shlex.quote`); and a person reads the comments. No text of a user gets into it unquoted, and
none that has a line break or another control character gets into it at all.
"""

from __future__ import annotations

import re
import shlex

from allranks.errors import EXIT_STOPPED, RequestError
from allranks.launcher.slurm.limits import slurm_time
from allranks.launcher.slurm.request import DECIDED, SlurmRequest, full_name

PLAIN = re.compile(r"[A-Za-z0-9_./,:=@%+^-]+")
SPECIAL = re.compile(r"([\\\"'#`$])")
MANGLED = re.compile(r"(?i)(pack|het)(?=job)")  # sbatch blanks these words, or cuts the job in two
OPTION = re.compile(r"--[a-z][a-z-]*(=.*)?")
SCHEDULER_DIRECTIVE = re.compile(r"#(SBATCH|SLURM|PBS|BSUB)\b", re.IGNORECASE)
WIDTH, INDENT = 80, "    "
COMMITS, LEAVES = " and commits a checkpoint", "they commit a checkpoint and leave."
LONGEST_NAME = 200  # bytes; Slurm refuses names of 1024


def render(request: SlurmRequest) -> str:
    """The whole script; raises `RequestError` for texts that no line can hold."""
    _check_texts(request)
    parts = [
        _head(request),
        _directives(request),
        _environment(request),
        _program(request),
        _end(request),
    ]
    return "\n".join("\n".join(part) + "\n" for part in parts if part)


def directive(option: str, value: str = "") -> str:
    """A `#SBATCH` line that gives sbatch exactly this value, in every version.

    Inside double quotes a backslash takes the next letter as it is. A word in which sbatch looks
    for jobs of several parts is cut by one as well.
    """
    if not value:
        return f"#SBATCH {option}"
    escaped = MANGLED.sub(r"\1\\", SPECIAL.sub(r"\\\1", value))
    quoted = value if PLAIN.fullmatch(value) and escaped == value else f'"{escaped}"'
    return f"#SBATCH {option}={quoted}"


def _head(request: SlurmRequest) -> list[str]:
    return [
        "#!/bin/bash -l",
        "#",
        f"# A job for {request.site}, written by `allranks submit`. By hand:",
        "#   sbatch THIS-FILE",
        "# It needs allranks on the nodes only, not where it is sent from.",
    ]


def _directives(request: SlurmRequest) -> list[str]:
    lines = [
        "# Who asks, where it runs, and where its output goes (%j is the number of the job).",
        directive("--job-name", request.name),
        *([directive("--account", request.account)] if request.account else []),
        *([directive("--partition", request.partition)] if request.partition else []),
        directive("--chdir", request.folder),
        directive("--output", request.output),
        directive("--open-mode", "append"),
        "# It begins with a clean environment, not with that of the shell it is sent from.",
        "#SBATCH --export=NONE",
        "",
        "# A task for every rank, and its share of the node.",
        f"#SBATCH --nodes={request.nodes}",
        f"#SBATCH --ntasks-per-node={request.ranks_per_node}",
        f"#SBATCH --cpus-per-task={request.cpus_per_task}",
        *([f"#SBATCH {request.gpu_line}"] if request.gpu_line else []),
        *(
            [f"#SBATCH --{request.memory_flag}={request.memory_mb}"]
            if request.memory_flag != "none"
            else []
        ),
    ]
    lines += _ending_directives(request)
    if request.options:
        lines += ["", "# Asked for besides."]
        lines += [_option(option) for option in request.options]
    return lines


def _ending_directives(request: SlurmRequest) -> list[str]:
    """How long the job may take, and what becomes of it when it is stopped."""
    lines = ["", "# How long it may take, and what becomes of it when it is stopped."]
    if request.time_s is not None:
        lines.append(f"#SBATCH --time={slurm_time(request.time_s)}")
    if request.signal_s:
        lines += [
            f"# SIGUSR1 goes to the ranks {request.signal_s} s before the end: "
            + ("a script may save then." if _is_run(request) else LEAVES),
            f"#SBATCH --signal=USR1@{request.signal_s}",
        ]
    lines.append("#SBATCH --requeue" if request.requeue else "#SBATCH --no-requeue")
    if request.survives_nodes:
        lines += ["# The job goes on, on fewer nodes, when one of them dies.", "#SBATCH --no-kill"]
    return lines


def _is_run(request: SlurmRequest) -> bool:
    """Whether the job is a script of one's own, which commits no checkpoint of allranks."""
    return request.command[:2] == ("allranks", "run")


def _option(option: str) -> str:
    written, equals, value = option.partition("=")
    name = full_name(written) if OPTION.fullmatch(option) else written
    decided = DECIDED.get(name.removeprefix("--"))
    if decided or name == "--array":
        found = f"{name}, which the script decides itself" if decided else name
        raise RequestError(
            asked=f"--sbatch={option}",
            found=found if name == written else f"{found} ({written} is short for it)",
            why="what is checked and what is sent must be the same, and one job has one run folder",
            do=f"the option of `allranks submit` for it: {decided}" if decided else "leave it out",
        )
    if not OPTION.fullmatch(option) or name == "--wrap" or (equals and not value):
        raise RequestError(
            asked=f"a further option of sbatch: {option!r}",
            found="--wrap, which takes a script" if name == "--wrap" else "no long option",
            why="each becomes a line `#SBATCH --option=value` of the script",
            do="write it --option=value or --option",
        )
    return directive(name, value)


def _environment(request: SlurmRequest) -> list[str]:
    """The lines before the program: what Slurm hands on to it, and where it is found."""
    lines = [
        "# srun would hand a clean environment on as well, "
        "and newer versions forget the CPUs of a task.",
        "export SLURM_EXPORT_ENV=ALL",
        'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"',
    ]
    if request.environment:
        lines += ["", "# As this site advises."]
        lines += [f"export {name}={shlex.quote(v)}" for name, v in request.environment.items()]
    if request.setup or request.modules:
        lines += ["", "# What the program needs before it is found.", *request.setup]
        if request.modules:
            lines.append(f"module load {shlex.join(request.modules)}")
    if request.venv:
        lines += ["", "# The virtual environment with allranks in it."]
        lines.append(f"source {shlex.quote(request.venv.rstrip('/') + '/bin/activate')}")
    return lines


def _program(request: SlurmRequest) -> list[str]:
    *lines, last = _wrapped([*request.container, *request.command])
    inside, is_run = [], _is_run(request)
    if request.container:
        inside = [
            "# Each node's agent runs in the same container.",
            f"export ALLRANKS_INSIDE={shlex.quote(shlex.join(request.container))}",
        ]
    return [
        *inside,
        "# The job itself, on the first node; "
        "it starts the ranks on all of them with srun. Without",
        "# a trap the shell would die at once of a signal to the job, "
        "and with it all that is in it:",
        f"# it waits for the program, which gets the same signal{'' if is_run else COMMITS}.",
        "cancelled=no",
        "trap 'cancelled=yes' TERM",
        "trap : USR1 INT",
        "code=0",
        *lines,
        f"{last} || code=$?",
    ]


def _wrapped(words: list[str]) -> list[str]:
    """A command over as many lines as it takes, each but the last with a backslash at its end."""
    lines = [""]
    for word in map(shlex.quote, words):
        if lines[-1].strip() and len(lines[-1]) + len(word) > WIDTH:
            lines[-1] += " \\"
            lines.append(INDENT + word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines


def _end(request: SlurmRequest) -> list[str]:
    if not request.requeue:
        return ['exit "$code"']
    return [
        f"# {EXIT_STOPPED}: it stopped early, and its checkpoint is committed. The same job, "
        "put back",
        "# into the queue, goes on from there; but not one that somebody cancelled.",
        f'if [ "$code" -eq {EXIT_STOPPED} ] && [ "$cancelled" = no ]; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]


def _check_texts(request: SlurmRequest) -> None:
    name = request.name
    if not name.strip() or len(name.encode(errors="replace")) > LONGEST_NAME:
        raise _refused(f"--name {name!r}", f"{len(name)} characters", "1 to 200 bytes")
    texts = {
        "--name": (name,),
        "--account": (request.account,),
        "--partition": (request.partition,),
        "the folder of the job": (request.folder,),
        "--run-dir": (request.run_dir, request.output),
        "--module": request.modules,
        "--setup": request.setup,
        "--venv": (request.venv,),
        "--container": request.container,
        "an option of sbatch": request.options,
        "a variable of the site": (*request.environment, *request.environment.values()),
        "a word of the command": request.command,
        "the name of the site": (request.site,),
    }
    for field, values in texts.items():
        for value in values:
            if not value.isprintable():
                raise _refused(f"{field} {value!r}", "a character that is not printed", "one line")
    for line in request.setup:
        if SCHEDULER_DIRECTIVE.match(line.lstrip()):
            raise _refused(f"--setup {line!r}", "an option of sbatch", "shell")
    for variable in request.environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            raise _refused(f"the variable {variable!r} of the site", "no such name", "a name")
    if "\\" in request.output or request.output.count("%") != 1:
        raise _refused(f"--run-dir {request.run_dir}", "a % or a backslash in it", "an output path")


def _refused(asked: str, found: str, shape: str) -> RequestError:
    return RequestError(
        asked=asked,
        found=found,
        why=f"in a batch script it must be {shape}: "
        "lines of it are read by sbatch before the shell",
        do="write it without",
    )
