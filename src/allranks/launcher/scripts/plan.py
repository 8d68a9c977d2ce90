"""A command to run on many ranks, as data: what was asked for, and what exactly would be started.

`allranks run` makes a `CommandRequest`; `plan_command` makes of it and of the hosts a
`CommandPlan`, which `--dry-run` prints and the launcher carries out. Pure: nothing is started here.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import RequestError, printable
from allranks.job.job import HIDDEN, redacted
from allranks.launcher.scripts.topology import (
    DEFAULT_FAMILIES,
    DEFAULT_ROLE,
    Host,
    Topology,
    defaults_for,
    roles_as_text,
    variables_for,
)

MOST_SHOWN = 80
OPTIONS_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
WARM = {"torch": ("torch", "torch.distributed"), "tensorflow": ("tensorflow",)}
RUN_IDS = ("TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE")
LEAVING = ("server", "scheduler", "evaluator")


@dataclass(frozen=True)
class CommandRequest:
    """A command and how to run it.

    `command` is what each process becomes, word by word. `processes` are those of one node;
    `local_rank_argument` ("--local_rank") is put behind the script, with the local rank. `warm`
    names the framework that the fork server imports beforehand; `shared_memory` asks for torch's
    collectives in memory where they would go over Gloo. After a signal the processes have
    `grace_s` to leave. No output of any of them for `hang_timeout_s` (0: for ever) is a hang.
    `shown` are the local ranks whose output is shown: "0,2", "all" or "none". `environment` are
    variables that each process gets besides those that say who it is. `run_id` is the name of the
    job, which among nodes is its secret: the processes get it, and nothing shows it.
    """

    command: tuple[str, ...]
    processes: int = 1
    roles: tuple[tuple[str, int], ...] = ()
    role_name: str = DEFAULT_ROLE
    families: tuple[str, ...] = DEFAULT_FAMILIES
    local_rank_argument: str = ""
    warm: str = ""
    shared_memory: bool = False
    max_restarts: int = 0
    hang_timeout_s: float = 0.0
    time_limit_s: float | None = None
    grace_s: float = 30.0
    shown: str = "0"
    run_dir: str = ""
    run_id: str = ""
    master_addr: str = ""
    master_port: int = 0
    notes: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def to_data(self) -> dict[str, Any]:
        """As plain values for `job.toml`, without secrets; `program` is short, for lists."""
        values = dataclasses.asdict(self)
        values |= {
            "command": shlex.join(redacted_words(self.command)),
            "program": self._short_command(),
            "roles": roles_as_text(self.roles),
            "families": ",".join(self.families),
        }
        for name in ("notes", "run_dir", "run_id", "environment"):
            values.pop(name)
        return {"kind": "run", **values}

    def _short_command(self) -> str:
        """The command in one line of a list: a long one without the folder of its script."""
        words = redacted_words(self.command)
        if len(shlex.join(words)) > MOST_SHOWN:
            at = script_position(self.command)
            words[at] = words[at].rpartition("/")[2]
        text = shlex.join(words)
        return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 2]} …"


@dataclass(frozen=True)
class RankCommand:
    """One process: its command, the variables that identify it, and defaults it may override."""

    rank: int
    host: str
    command: tuple[str, ...]
    environment: dict[str, str]
    defaults: dict[str, str]


@dataclass(frozen=True)
class CommandPlan:
    """All processes of one attempt."""

    request: CommandRequest
    topology: Topology
    ranks: tuple[RankCommand, ...]

    @property
    def deciding(self) -> frozenset[int]:
        """The ranks whose end is the end of the job; the others serve them.

        A chief with parameter servers drives its workers, which never end by themselves.
        """
        serving: tuple[str, ...] = (*LEAVING, "ps")
        if self.topology.count("chief") and self.topology.count("ps"):
            serving = (*serving, "worker")
        members = self.topology.members
        ranks = frozenset(member.rank for member in members if member.role not in serving)
        return ranks or frozenset(member.rank for member in members)

    @property
    def leaving(self) -> frozenset[int]:
        """The ranks that do not decide, but end by themselves when the job is done."""
        members = self.topology.members
        ranks = frozenset(member.rank for member in members if member.role in LEAVING)
        return ranks - self.deciding

    def to_data(self) -> dict[str, Any]:
        """As plain data, for `--dry-run --json`; without secrets."""
        return {
            "request": self.request.to_data(),
            "world_size": self.topology.world_size,
            "ranks": [
                {
                    **dataclasses.asdict(rank),
                    "command": redacted_words(rank.command),
                    "environment": self._shown_environment(rank),
                }
                for rank in self.ranks
            ],
            "notes": list(self.request.notes),
        }

    def __str__(self) -> str:
        lines = []
        for rank in self.ranks:
            lines.append(f"rank {rank.rank} on {rank.host}:")
            lines += [f"  {name}={value}" for name, value in self._shown_environment(rank).items()]
            lines += [f"  {shlex.join(redacted_words(rank.command))}", ""]
        lines += [f"note: {note}" for note in self.request.notes]
        return "\n".join(printable(line) for line in lines).rstrip()

    def _shown_environment(self, rank: RankCommand) -> dict[str, str]:
        """The variables without secrets; a job name that the user chose is a secret."""
        shown = redacted({**rank.defaults, **rank.environment})
        chosen = RUN_IDS if self.request.run_id else ()
        return shown | {name: HIDDEN for name in chosen if name in shown}


def plan_command(
    request: CommandRequest,
    hosts: tuple[Host, ...],
    inherited: Mapping[str, str],
    run_id: str = "",
    restart_count: int = 0,
) -> CommandPlan:
    """The processes of all hosts; raises `RequestError` for roles and hosts that do not fit.

    `inherited` are the variables that the processes inherit: they override defaults.
    """
    topology = Topology(hosts, request.roles, request.role_name)
    ranks = []
    for member in topology.members:
        environment = variables_for(
            topology,
            member.rank,
            run_id=request.run_id or run_id,
            restart_count=restart_count,
            max_restarts=request.max_restarts,
            families=request.families,
        )
        environment |= dict(request.environment)
        command = with_local_rank(request.command, request.local_rank_argument, member.local_rank)
        defaults = defaults_for(topology, member.rank, inherited)
        ranks.append(RankCommand(member.rank, member.host.name, command, environment, defaults))
    return CommandPlan(request, topology, tuple(ranks))


def command_words(
    words: Iterable[str],
    python: str,
    can_be_run: Callable[[str], bool],
    *,
    is_module: bool = False,
    is_program: bool = False,
) -> tuple[str, ...]:
    """The command for `words`: unchanged, or a script of Python as torchrun starts it.

    `train.py --lr 1` is run by `python`, and so is a file that is not executable; everything else
    is started unchanged. With `is_program` a `.py` is started unchanged too.
    """
    command = tuple(words)
    if not command:
        raise RequestError(
            asked="run",
            found="no command",
            why="there is nothing to start",
            do="allranks run --ranks 2 -- python train.py",
        )
    if is_module:
        return (python, "-u", "-m", *command)
    if not is_program and (command[0].endswith(".py") or not can_be_run(command[0])):
        return (python, "-u", *command)
    return command


def script_position(command: tuple[str, ...]) -> int:
    """The index of the script or module among the words, after Python and its own options."""
    name = command[0].rpartition("/")[2]
    if not name.startswith("python"):
        return 0
    position = 1
    while position < len(command) and command[position].startswith("-"):
        if command[position] == "-m":
            return min(position + 1, len(command) - 1)
        position += 2 if command[position] in OPTIONS_WITH_VALUE else 1
    return min(position, len(command) - 1)


def with_local_rank(command: tuple[str, ...], argument: str, local_rank: int) -> tuple[str, ...]:
    """The words with `--local_rank=N` after the script, as `torch.distributed.launch` adds it."""
    if not argument:
        return command
    behind = script_position(command) + 1
    return (*command[:behind], f"{argument}={local_rank}", *command[behind:])


def redacted_words(words: Iterable[str]) -> list[str]:
    """The words of a command without the keys, tokens and passwords among them."""
    shown: list[str] = []
    flag = ""
    for word in words:
        name, equals, value = word.partition("=")
        of = "" if word.startswith("-") else flag  # a word with a dash is no value of a flag
        if equals and redacted({name: value})[name] != value:
            shown.append(f"{name}={HIDDEN}")
        elif redacted({of: word})[of] != word:
            shown.append(HIDDEN)
        else:
            shown.append(word)
        flag = word.lstrip("-") if word.startswith("-") and not equals else ""
    return shown


# --- warm ----------------------------------------------------------------------------------------
# `--warm` and `--shared-memory`: start a script in a fork of a server, or with a hook.
#
# With `--warm` the fork server has imported the framework, so a script starts in milliseconds. With
# `--shared-memory` a hook patches the framework, with the script unchanged: in a fork before its
# first line, else after the script has imported the framework.


IN_SCRIPTS = "allranks.torch.shared_memory.backend"
IN_PLACE_OF_GLOO = f"{IN_SCRIPTS}:in_place_of_gloo"
WATCHER, WATCHED_IN = "allranks.tools.script_check.record.install:watch_here", "ALLRANKS_WATCHED"
OUTCOME, OUTCOME_IN = "collectives.json", "ALLRANKS_IN_PLACE_OF_GLOO"
WITHOUT_HOOKS = "IES"  # options of Python with which it reads no PYTHONPATH, or no sitecustomize


def modules_for(request: CommandRequest) -> tuple[str, ...]:
    """The modules that the fork server imports before it starts the first rank."""
    hooks = (IN_SCRIPTS,) if request.shared_memory and request.warm else ()
    return WARM.get(request.warm, ()) + hooks


def check_start(request: CommandRequest) -> None:
    """Raise `RequestError` for a command that cannot be started as requested.

    With `--warm` it must be a script for this Python, because the fork server runs it.
    """
    if not request.warm:
        _check_hooks(request)
        return
    python = shutil.which(request.command[0]) or request.command[0]
    is_ours = os.path.dirname(os.path.abspath(python)) == os.path.dirname(sys.executable)
    name = request.command[0].rpartition("/")[2]
    options = request.command[1 : script_position(request.command)]
    odd = [word for word in options if word not in ("-u", "-m")]
    if not name.startswith("python") or not is_ours or odd or len(request.command) < 2:
        raise RequestError(
            asked=f"--warm {request.warm}",
            found=" ".join([python, *odd]),
            why=f"a script that runs in a fork of {sys.executable} is started by it, "
            "with no options",
            do="allranks run --warm torch … -- train.py, or leave the option away",
        )


def _check_hooks(request: CommandRequest) -> None:
    """Refuse options with which Python reads no `sitecustomize`: it would silently use Gloo."""
    options = request.command[1 : script_position(request.command)]
    letters = {word: word[1:] for word in options if word[:1] == "-" and word[:2] != "--"}
    odd = [word for word, of in letters.items() if set(of) & set(WITHOUT_HOOKS)]
    if request.shared_memory and odd:
        raise RequestError(
            asked="--shared-memory",
            found=" ".join([request.command[0], *odd]),
            why="a Python that is started so imports no sitecustomize, which puts the process "
            "group there",
            do=f"leave {' and '.join(odd)} away",
        )


def argument_of(request: CommandRequest, planned: RankCommand, run_dir: Path) -> dict[str, Any]:
    """The argument of `exec_command.run_script`: a script, its words, and hooks to call before."""
    position = script_position(planned.command)
    before = {IN_PLACE_OF_GLOO: str(run_dir / OUTCOME)} if request.shared_memory else {}
    if WATCHED_IN in planned.environment:
        before[WATCHER] = planned.environment[WATCHED_IN]
    return {
        "script": planned.command[position],
        "words": list(planned.command[position + 1 :]),
        "is_module": "-m" in planned.command[1:position],
        "before": before,
    }
