"""`allranks run -- COMMAND`: any script of any framework, unchanged, on many ranks."""

from __future__ import annotations

import dataclasses
import os
import re
import select
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click

from allranks.checkpoint.files import as_json
from allranks.cli.display.following import FollowedFile
from allranks.cli.display.progress import say
from allranks.cli.options import (
    DURATION,
    PLACES,
    RENDEZVOUS_NAMES,
    Options,
    Verb,
    network_options,
    rendezvous_from,
    with_options,
    words_of,
)
from allranks.errors import RequestError, nearest, printable
from allranks.job.engines import is_only_a_task
from allranks.job.place import LOCAL
from allranks.job.run_folder import rank_log_path
from allranks.launcher.nodes.cluster import foreseen_hosts, gathered, take_part
from allranks.launcher.nodes.facts import gpus_of_driver
from allranks.launcher.places import AgentPlace, NodeRequest, check_request, find_place, is_head
from allranks.launcher.scripts.plan import (
    WARM,
    CommandPlan,
    CommandRequest,
    check_start,
    command_words,
    modules_for,
    plan_command,
    redacted_words,
)
from allranks.launcher.scripts.run import (
    CommandWatcher,
    name_of,
    run_command,
    run_dir_of,
    this_host,
)
from allranks.launcher.scripts.topology import (
    DEFAULT_FAMILIES,
    DEFAULT_ROLE,
    ON_REQUEST,
    parse_families,
    parse_roles,
)
from allranks.launcher.scripts.torchrun import FLAGS, TorchrunFlags, processes_from, understand
from allranks.launcher.start import Result, new_run_dir
from allranks.launcher.world import Visible

GRACE_S = 30.0
LOCAL_RANK_ARGUMENTS = ("--local_rank", "--local-rank")


FIRST = (
    *("--ranks", "--nodes", "--ranks-per-node", "--place", "--hosts", "--roles", "--max-restarts"),
    *("--hang-timeout", "--time-limit", "--show", "--warm", "--shared-memory", "--run-dir"),
    *("--module", "--nproc-per-node", "--dry-run", "--json", "--help", "--help-all"),
)


def run_groups() -> dict[str, tuple[str, ...]]:
    """The options of `run` by title: its own, then what it takes so that it replaces torchrun."""
    flags = [flag for flag in FLAGS if flag.word not in FIRST]
    return {
        "Options": FIRST,
        "Rarely needed": (
            *("--variables", "--local-rank-argument", "--grace", "--rendezvous", "--id"),
            *("--interface", "--join-timeout", "--node-timeout", "--per-rank"),
        ),
        "As in torchrun": tuple(flag.word for flag in flags if not flag.is_idle),
        "Of torchrun, without effect or refused": tuple(f.word for f in flags if f.is_idle),
    }


SECONDS = click.FloatRange(min=0)
SCRIPT_OPTIONS: Options = (
    click.option(
        "--variables",
        default="",
        help=f"Frameworks whose variables are set (default: all but {', '.join(ON_REQUEST)}).",
    ),
    click.option(
        "--local-rank-argument",
        default="",
        help="Put --local_rank=N or --local-rank=N behind the script's name (default: neither).",
    ),
    click.option(
        "--hang-timeout",
        type=SECONDS,
        default=0.0,
        help="Seconds without output that count as a hang; 0: never.",
    ),
    click.option("--time-limit", type=DURATION, help="Stop after 30m or 1:30:00 (default none)."),
    click.option("--show", default="", help="Print output of ranks 0,2, all or none (default 0)."),
    click.option("--run-dir", default="", help="The run folder (default runs/SCRIPT-TIME)."),
)
"""Of every verb that starts a script."""


def torchrun_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add torchrun's own flags, each in all its spellings."""
    for flag in reversed(FLAGS):
        kind: dict[str, Any] = {"is_flag": True, "default": None} if flag.kind.is_switch else {}
        command = click.option(*flag.spellings, flag.name, help=flag.help, **kind)(command)
    return command


@click.command(
    cls=Verb,
    context_settings={"allow_interspersed_args": False},
    groups=run_groups(),
    common=frozenset(FIRST),
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARGS]...")
@click.option("--ranks", type=click.IntRange(min=1), help="Processes (default: one per node).")
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes to use (default 1).")
@click.option("--place", help=PLACES)
@click.option(
    "--ranks-per-node",
    type=click.IntRange(min=1),
    help="Processes on each node, instead of --ranks.",
)
@click.option("--roles", default="", help="As chief=1,worker=2,ps=1 (default: all workers).")
@partial(with_options, SCRIPT_OPTIONS)
@click.option(
    "--warm",
    is_flag=False,
    flag_value="torch",
    default="",
    help="Fork from a process that has imported it (default: none).",
)
@click.option(
    "--shared-memory",
    is_flag=True,
    help="torch.distributed on one host over shared memory instead of Gloo.",
)
@click.option("--grace", type=SECONDS, help="From a signal to SIGKILL (default 30).")
@click.option("--dry-run", is_flag=True, help="Print exactly what would run; run nothing.")
@click.option("--json", "as_object", is_flag=True, help="Last line of stdout: one JSON object.")
@network_options
@torchrun_flags
def run(words: tuple[str, ...], dry_run: bool, as_object: bool, **flags: Any) -> None:
    """Run COMMAND on many ranks: any script of any framework, unchanged.

    \b
    allranks run --ranks 4 -- python train.py --lr 0.1
    allranks run --nproc-per-node 4 train.py --lr 0.1       (as torchrun)
    allranks run --ranks 4 --roles chief=1,worker=2,ps=1 -- python train.py
    allranks run --ranks 4 --nodes 2 --place simulated:link=1gbit -- python train.py
    """
    same = words_of(flags, "run", *redacted_words(words))
    options = {flag.name: flags.pop(flag.name) for flag in FLAGS}
    torchrun = understand(options, os.environ)
    wanted = _wanted(flags, torchrun, same)
    if not is_head(wanted.rendezvous):
        sys.exit(take_part(wanted.rendezvous, same))
    request = request_from(words, flags, torchrun, wanted)
    if dry_run:
        _print_plan(request, wanted, as_object)
        return
    output = RankOutput(request.shown)
    for note in request.notes:
        say(f"note: {note}")
    try:
        result = _run(request, wanted, command_watcher(output))
    finally:
        say(output.close())
    if as_object:
        click.echo(as_json(result.summary))
    else:
        say(f"run folder {result.run_dir}")


def _run(request: CommandRequest, wanted: NodeRequest, watcher: CommandWatcher) -> Result:
    """Run on this machine, or on nodes that join for it."""
    if not isinstance(find_place(wanted.place, wanted.rendezvous), AgentPlace):
        return run_command(request, watcher=watcher)
    request = dataclasses.replace(request, run_dir=run_dir_of(request))
    shared, modules = Path(request.run_dir).parent, modules_for(request)
    wanted = dataclasses.replace(wanted, shared=shared, modules=modules)
    with gathered(wanted) as cluster:
        return run_command(request, cluster.server, cluster.hosts, watcher)


def request_from(
    words: tuple[str, ...], flags: dict[str, Any], torchrun: TorchrunFlags, wanted: NodeRequest
) -> CommandRequest:
    """The request that a command line describes; raises `RequestError` for what cannot be."""
    roles = parse_roles(flags["roles"])
    # before the command: the flag may have taken its first word
    warm = _warm(flags["warm"], flags["shared_memory"])
    command = _command(words, torchrun)
    return CommandRequest(
        command=command,
        processes=-(-wanted.ranks // wanted.nodes),
        roles=roles,
        role_name=torchrun.role_name or DEFAULT_ROLE,
        families=parse_families(flags["variables"]) or DEFAULT_FAMILIES,
        local_rank_argument=_local_rank_argument(flags["local_rank_argument"]),
        warm=warm,
        shared_memory=flags["shared_memory"],
        max_restarts=torchrun.max_restarts or 0,
        hang_timeout_s=flags["hang_timeout"],
        time_limit_s=flags["time_limit"],
        grace_s=next((s for s in (flags["grace"], torchrun.grace_s) if s is not None), GRACE_S),
        shown=_shown(flags["show"]) or torchrun.shown or "0",
        run_dir=flags["run_dir"] or _in_log_dir(torchrun.log_dir, command),
        run_id=torchrun.run_id if wanted.nodes == 1 else "",  # among nodes it is the key of the job
        master_addr=torchrun.master_addr,
        master_port=torchrun.master_port or 0,
        notes=torchrun.notes,
    )


def _wanted(flags: dict[str, Any], torchrun: TorchrunFlags, same: tuple[str, ...]) -> NodeRequest:
    """The number of processes and nodes, from all options that may set it; they must agree."""
    nodes = flags["nodes"] or torchrun.least_nodes or 1
    _must_agree({"--nodes": flags["nodes"], "--nnodes": torchrun.least_nodes})
    endpoint = torchrun.endpoint
    if torchrun.master_addr and nodes > 1:
        endpoint = endpoint or f"{torchrun.master_addr}:{torchrun.master_port or 29500}"
    flags["rendezvous"] = flags["rendezvous"] or (endpoint if nodes > 1 else None)
    flags["key"] = flags["key"] or (torchrun.run_id if nodes > 1 else "") or None
    flags["join_timeout"] = flags["join_timeout"] or torchrun.join_timeout_s
    flags["node_rank"] = torchrun.node_rank if nodes > 1 else None
    rendezvous, implied = rendezvous_from({**flags, "ranks_per_node": None, "nodes": nodes})
    for name in RENDEZVOUS_NAMES:
        flags.pop(name, None)
    place = implied.get("place") or flags["place"] or LOCAL
    ranks = _ranks(flags, torchrun, nodes)
    wanted = NodeRequest(place, nodes, ranks, rendezvous, words=same)
    check_request(wanted)
    return wanted


def _ranks(flags: dict[str, Any], torchrun: TorchrunFlags, nodes: int) -> int:
    """The number of processes over all nodes; one per node by default."""
    counts: dict[str, int | None] = {"--ranks": flags["ranks"]}
    if flags["ranks_per_node"] is not None:
        counts["--ranks-per-node"] = flags["ranks_per_node"] * nodes
    if torchrun.processes_per_node:
        cpus = len(os.sched_getaffinity(0))
        each = processes_from(torchrun.processes_per_node, cpus, _gpus())
        counts["--nproc-per-node"] = each * nodes
    roles = parse_roles(flags["roles"])
    if roles and not any(counts.values()):
        return sum(count for _, count in roles)
    return _must_agree(counts) or nodes


def _must_agree(counts: dict[str, int | None]) -> int | None:
    """The one number that all given options mean, or `None`; raises `RequestError`."""
    named = {name: count for name, count in counts.items() if count is not None}
    if len(set(named.values())) > 1:
        raise RequestError(
            asked=" and ".join(named),
            found=", ".join(f"{name} makes {count}" for name, count in named.items()),
            why="they say one number, over all nodes",
            do="give one of them",
        )
    return next(iter(named.values()), None)


def _gpus() -> int:
    """The GPUs that this process sees."""
    there = len(gpus_of_driver())
    visible = Visible.from_environment().numbers
    return there if visible is None else min(there, len(visible))


def _command(words: tuple[str, ...], torchrun: TorchrunFlags) -> tuple[str, ...]:
    """The words of the command, which must be there to be started."""
    command = command_words(
        words,
        sys.executable,
        lambda word: shutil.which(word) is not None,
        is_module=torchrun.is_module,
        is_program=torchrun.is_program,
    )
    is_script = command[:2] == (sys.executable, "-u") and command[2] != "-m"
    executable = command[2] if is_script else command[0]
    if not (Path(executable).is_file() if is_script else shutil.which(executable)):
        raise RequestError(
            asked=f"to run {executable}",
            found=f"no such file in {Path.cwd()}, and no such program",
            why="a command is a program, or a script of Python",
            do="check the path; what belongs to the command stands behind it",
        )
    script = next((word for word in command[1:] if word.endswith(".py")), "")
    if script and is_only_a_task(Path(script)):
        raise RequestError(
            asked=f"to run {script}",
            found="a task, and nothing that trains it",
            why="every process would define a class and end; `run` is for scripts that do the work",
            do=f"allranks train {script}",
        )
    return command


def _local_rank_argument(text: str) -> str:
    if text and text not in LOCAL_RANK_ARGUMENTS:
        raise RequestError(
            asked=f"--local-rank-argument {text}",
            found=repr(text),
            why="scripts read their local rank from one of two arguments",
            do=f"--local-rank-argument={LOCAL_RANK_ARGUMENTS[0]}, or {LOCAL_RANK_ARGUMENTS[1]}",
        )
    return text


def _warm(text: str, shared_memory: bool) -> str:
    """The framework that is imported before the fork; shared memory is that of torch."""
    if text and text not in WARM:
        raise RequestError(
            asked=f"--warm {text}",
            found=repr(text),
            why="the fork server imports a framework that stands a fork after it",
            do=f"--warm torch -- COMMAND; {nearest(text, WARM)}",
        )
    if shared_memory and text not in ("", "torch"):
        raise RequestError(
            asked=f"--shared-memory with --warm {text}",
            found=f"scripts of {text}",
            why="it is torch whose collectives can go through shared memory",
            do="leave one of the two away",
        )
    return text


def _shown(text: str) -> str:
    if text in ("", "all", "none") or all(part.isdigit() for part in text.split(",")):
        return text
    raise RequestError(
        asked=f"--show {text}",
        found=repr(text),
        why="ranks are counted from 0 on each node",
        do="--show 0,1, --show all or --show none",
    )


def _in_log_dir(log_dir: str, command: tuple[str, ...]) -> str:
    """A new run folder in the folder of `--log-dir`; "" without it."""
    return str(Path(log_dir, Path(new_run_dir(name_of(command))).name)) if log_dir else ""


def command_watcher(output: RankOutput, side: str = "") -> CommandWatcher:
    """Shows the output of the ranks, the run folder, and reports of the launcher.

    `side` stands before the ranks of one of two commands.
    """

    def started(plan: CommandPlan, run_dir: Path) -> None:
        output.started(plan, run_dir, side)
        ranks = plan.topology.world_size
        others = ranks > 1 and plan.request.shown == CommandRequest.shown
        how = "; rank 0 is shown, --show all shows every rank" if others else ""
        say(f"{side}{ranks} rank{'s' if ranks > 1 else ''}: {run_dir}{how}")

    return CommandWatcher(started, output.tick, say)


def _print_plan(request: CommandRequest, wanted: NodeRequest, as_object: bool) -> None:
    """What would run; ports, and addresses of nodes still to come, are chosen at a start."""
    check_start(request)
    foreseen = foreseen_hosts(find_place(wanted.place, wanted.rendezvous).seats(wanted))
    with nullcontext(foreseen) if foreseen else this_host(request)() as hosts:
        plan = plan_command(request, hosts, os.environ, "RUN")
    click.echo(as_json(plan.to_data()) if as_object else str(plan))


# --- output --------------------------------------------------------------------------------------
# The output of running ranks, shown while they run: read from their logs, printed line by line.
#
# What is shown comes from files, so a slow reader or a halted terminal delays no rank. No control
# character of a script reaches the terminal; of a progress bar that is drawn over and over in one
# line, the last state is shown.


MOST_AT_ONCE = 1 << 16
MOST_OF_A_WRITE = select.PIPE_BUF  # so much a pipe takes without making anybody wait
LONGEST_LINE = 1 << 16
PATIENCE_S = 10.0
A_MOMENT_S = 0.05
_STYLE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?")


class RankOutput:
    """The output of some ranks on standard output, each line behind its rank if there are more."""

    def __init__(self, shown: str) -> None:
        """`shown` are local ranks: "0,2", "all" or "none"."""
        self._shown = shown
        self._tails: dict[str, FollowedFile] = {}
        self._are_over = False
        self._lock = threading.RLock()  # two commands may run side by side
        self._with_rank = False
        self._rest = b""
        self._is_open = sys.stdout is not None  # a job may be started without one

    def started(self, plan: CommandPlan, run_dir: Path, side: str = "") -> None:
        """An attempt is about to start: from here on its output is shown."""
        wanted = {int(part) for part in self._shown.split(",") if part.isdigit()}
        for member in plan.topology.members:
            if self._shown == "all" or member.local_rank in wanted:
                path = rank_log_path(run_dir, member.rank)
                log = FollowedFile(path, most_bytes=MOST_AT_ONCE)
                self._tails.setdefault(f"{side}rank {member.rank}", log)
        self._with_rank = bool(side) or len(self._tails) > 1

    def tick(self) -> None:
        """Show what is new, as far as the reader takes it now; does not go on for long."""
        until = time.monotonic() + A_MOMENT_S
        with self._lock:
            while self._write() and self._read() and time.monotonic() < until:
                pass
            self._write()

    def _read(self) -> bool:
        """Take what is new from the logs; whether there was any."""
        before = len(self._rest)
        for name, tail in list(self._tails.items()):
            self._add(name, tail.text(self._are_over))
        return len(self._rest) > before

    def close(self) -> str:
        """No rank is left: show the rest. Returns what to tell if the reader did not take it."""
        self._are_over = True
        deadline = time.monotonic() + PATIENCE_S
        while self._is_open and time.monotonic() < deadline:
            before = self._rest, [tail.place for tail in self._tails.values()]
            self.tick()
            if before != (self._rest, [tail.place for tail in self._tails.values()]):
                deadline = time.monotonic() + PATIENCE_S
            elif not self._rest:
                return ""
            else:
                select.select([], [sys.stdout], [], 0.1)
        return "" if not self._is_open else "nobody read all of the output: it stands in the logs"

    def _add(self, name: str, output: str) -> None:
        if not self._is_open or not output:
            return
        prefix = f"[{name}] " if self._with_rank else ""
        encoding = sys.stdout.encoding or "utf-8"
        lines = output.removesuffix("\n").split("\n")
        text = "".join(f"{prefix}{_cleaned(line)}\n" for line in lines)
        self._rest += text.encode(encoding, errors="replace")

    def _write(self) -> bool:
        """Write what is waiting, as long as the reader takes it; whether nothing waits any more."""
        try:
            while self._rest and self._is_open:
                if not select.select([], [sys.stdout], [], 0)[1]:
                    return False
                written = os.write(sys.stdout.fileno(), self._rest[:MOST_OF_A_WRITE])
                self._rest = self._rest[written:]
        except BlockingIOError:
            return False
        except (OSError, ValueError):  # nobody reads any more: the job goes on
            self._is_open, self._rest = False, b""
        return True


def _cleaned(line: str) -> str:
    """As it would stand there at the end: without styles, and drawn over up to the last time."""
    plain = _STYLE.sub("", line).rstrip("\r").rpartition("\r")[2]
    return printable(plain[:LONGEST_LINE])
