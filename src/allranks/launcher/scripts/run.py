"""`allranks run` from request to result: reserve ports, start the command, restart, conclude.

Each attempt gets new ports, so that no process of the attempt before answers there. The run folder
records what ran and how it ended. The caller passes the hosts: `this_host` is the table of one
machine; several nodes bring their own, with a `Processes` that owns their processes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from allranks.errors import (
    AllranksError,
    Interrupted,
    PlaceError,
    ProgramError,
    RequestError,
    Stopped,
    stopped_by,
)
from allranks.job.job import SCHEMA, write_toml
from allranks.job.run_folder import RunFolder, rank_log_path, read_rows
from allranks.job.units import format_bytes
from allranks.launcher.fault_report import LastWords, last_words, listed, name_of_signal, stacks_in
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.linux import Kills
from allranks.launcher.processes.ports import Reservation
from allranks.launcher.processes.process import Exit, Process, Processes
from allranks.launcher.scripts.exec_command import NOT_FOUND, NOT_RUNNABLE, interpreter_of
from allranks.launcher.scripts.plan import (
    OUTCOME,
    OUTCOME_IN,
    CommandPlan,
    CommandRequest,
    argument_of,
    check_start,
    modules_for,
    plan_command,
    redacted_words,
    script_position,
)
from allranks.launcher.scripts.supervise import (
    Connections,
    ForwardedSignals,
    ScriptsEnded,
    StopPolicy,
    supervise_script,
)
from allranks.launcher.scripts.topology import Host, step_variables
from allranks.launcher.start import Result, new_run_dir, recorded_environment
from allranks.launcher.supervisor import NEVER

# --- report --------------------------------------------------------------------------------------
# Which process of `allranks run` failed first, and why, as text for users.
#
# The evidence is the order of exits, the exit codes, and the ends of the logs. A process that lost
# a peer is a victim; it is blamed only if no other process failed.


FEW_LINES = 20
_NO_MODULE = re.compile(r"No module named '(?P<name>[\w.]+)'")
_PYTHON = re.compile(r"(^|/)python[\d.]*$")


@dataclass(frozen=True)
class CommandFault:
    """The process that ended the job. `ended_before` are those that left before with code 0.

    A victim may notice the loss of such a peer before the peer's process has ended.
    """

    rank: int
    exit: Exit
    words: LastWords
    memory: str
    ended_before: tuple[int, ...] = ()

    @property
    def is_passing(self) -> bool:
        """Whether another attempt may succeed: false if the command cannot be started."""
        return self.exit.code not in (NOT_FOUND, NOT_RUNNABLE)


def find_fault(
    ended: ScriptsEnded, logs: Mapping[int, tuple[Path, int]], memory: str
) -> CommandFault | None:
    """The fault that ended the job; `None` if all deciding ranks ended well.

    `logs` are (file, offset of this attempt). `memory` is the kernel's evidence that it killed
    processes because memory ran out.
    """
    if ended.done:
        return None
    bad = {rank: exit_ for rank, exit_ in ended.exits.items() if exit_.code != 0}
    if not bad:
        return None
    words = {rank: last_words(*logs[rank]) for rank in bad}

    def order(rank: int) -> tuple[bool, bool, float]:
        """Causes first, then victims, then ranks that were stopped without a failure before."""
        last, code = words[rank], bad[rank].code
        is_victim = last.is_victim and (code > 0 or code == -signal.SIGABRT)
        had_failed = code > 0 and not is_victim and bool(last.error)
        return rank in ended.stopped and not had_failed, is_victim, bad[rank].monotonic

    first = min(bad, key=order)
    counted = memory if bad[first].memory is None else bad[first].memory or ""
    killed = counted if bad[first].code == -signal.SIGKILL else ""
    before = tuple(
        rank
        for rank, exit_ in ended.exits.items()
        if exit_.code == 0 and (words[first].is_victim or exit_.monotonic < bad[first].monotonic)
    )
    return CommandFault(first, bad[first], words[first], killed, before)


def first_fault_report(
    fault: CommandFault,
    ended: ScriptsEnded,
    logs: Mapping[int, tuple[Path, int]],
    command: Sequence[str] = (),
) -> str:
    """The first-fault report; `command` started the processes."""
    lines = [f"rank {fault.rank} on {fault.exit.host} failed first: {_cause(fault)}"]
    if fault.exit.lost:
        host = fault.exit.host
        on_it = [rank for rank, e in ended.exits.items() if e.lost and e.host == host]
        lines = [f"node {fault.exit.host} is lost, with rank {listed(*on_it)}: {fault.exit.lost}"]
    if fault.words.is_victim and fault.ended_before:
        lines[0] += f"; it lost rank {listed(*fault.ended_before)}, which had left with exit code 0"
        lines.append(
            f"rank {listed(*fault.ended_before)} ended its program while rank {fault.rank} went "
            "on: does it stop early by a number of its own, or have fewer batches?"
        )
    if fault.words.text:
        lines += ["", fault.words.text, ""]
    if other := _another_python(fault.words.text or fault.words.error, command):
        lines.append(other)
    others = {rank: exit_ for rank, exit_ in ended.exits.items() if rank != fault.rank}
    victims = [rank for rank, exit_ in others.items() if exit_.code != 0]
    if victims:
        lines.append(f"stopped because of it: rank {listed(*victims)}")
    lines.append(f"its output: {logs[fault.rank][0]}")
    return "\n".join(lines)


def _another_python(output: str, command: Sequence[str]) -> str:
    """A hint if a script lacks a module that is installed here: its Python, and what to do."""
    missing = _NO_MODULE.search(output)
    program = shutil.which(command[0]) if command else None
    if missing is None or program is None:
        return ""
    words = interpreter_of(program).split()
    used = program if _PYTHON.search(program) else next(filter(_PYTHON.search, words), "")
    used = shutil.which(used) or used
    name = missing["name"].partition(".")[0]
    if not used or used == sys.executable or find_spec(name) is None:
        return ""
    return (
        f"it runs {used}, which has no module {name!r}; the python of allranks has it: activate "
        f"that environment, or name it: {sys.executable}"
    )


def silence_report(
    ended: ScriptsEnded, logs: Mapping[int, tuple[Path, int]], silence_s: float, path: Path
) -> str:
    """The stack of every process after `silence_s` without output; all stacks go into a file."""
    first = f"no output of any process for {silence_s:g} s (--hang-timeout)"
    shown, whole = [first, ""], []
    for rank in sorted(ended.stopped):
        title = f"rank {rank} on {ended.exits[rank].host}:"
        stacks = stacks_in(*logs[rank]) or "it wrote no stack: it is no Python, or was stopped"
        whole += [title, stacks, ""]
        shown += [title, *stacks.splitlines()[:FEW_LINES], ""]
    with suppress(OSError):  # a full disk must not hide the report
        path.write_text("\n".join(whole))
    return "\n".join([*shown, f"all stacks: {path}"])


def _cause(fault: CommandFault) -> str:
    """How a process ended, and its error message."""
    how = _end_of(fault.exit)
    if fault.memory:
        how = fault.memory
    elif fault.words.is_out_of_memory:
        how = f"out of memory: {how}"
    if fault.exit.code == -signal.SIGKILL or not fault.words.error:
        return how
    return f"{how}: {fault.words.error}"


def _end_of(ended: Exit) -> str:
    if ended.lost:
        return ended.lost
    if ended.code == NOT_FOUND:
        return f"exit code {NOT_FOUND} (there is no such program)"
    if ended.code == NOT_RUNNABLE:
        return f"exit code {NOT_RUNNABLE} (the program cannot be run)"
    if ended.code >= 0:
        return f"exit code {ended.code}"
    peak = f"it held {format_bytes(ended.peak_bytes)} at most"
    return f"killed by {name_of_signal(-ended.code)} ({peak})"


LOCALHOST = "127.0.0.1"
COMMAND = "allranks.launcher.scripts.exec_command:main"
WARM_SCRIPT = "allranks.launcher.scripts.exec_command:run_script"
SERVER_VARIABLES = ("OPENBLAS_NUM_THREADS",)

Hosts = Callable[[], AbstractContextManager[tuple[Host, ...]]]


@dataclass(frozen=True)
class CommandWatcher:
    """Callbacks: each attempt's plan and run folder, every tick, and lines to report."""

    started: Callable[[CommandPlan, Path], None] = lambda plan, run_dir: None
    tick: Callable[[], None] = lambda: None
    report: Callable[[str], None] = lambda line: None


def this_host(request: CommandRequest) -> Hosts:
    """The table of this machine alone: on the loopback interface, unless an address is given."""

    @contextmanager
    def reserved() -> Iterator[tuple[Host, ...]]:
        address = LOCALHOST if request.master_addr in ("", "localhost") else request.master_addr
        count = request.processes + 1
        with Reservation(count, address, request.master_port) as reservation:
            interface = "lo" if address.startswith("127.") or address == "::1" else ""
            yield (
                Host(
                    socket.gethostname(), address, interface, request.processes, reservation.ports
                ),
            )

    return reserved


def run_command(
    request: CommandRequest,
    server: Processes | None = None,
    hosts: Hosts | None = None,
    watcher: CommandWatcher | None = None,
    signals: ForwardedSignals | None = None,
) -> Result:
    """Run a command to its end on the hosts, and return its result.

    `server` owns the processes of all hosts; without it a fork server of this machine does.
    Raises `RequestError` and leaves no run folder if the request is wrong; `ProgramError` with the
    first-fault report; `Interrupted` if a signal or the time limit ended it. No process is left.
    """
    watcher, started_at = watcher or CommandWatcher(), time.monotonic()
    hosts = hosts or this_host(request)
    with ExitStack() as stack:
        signals = signals or stack.enter_context(ForwardedSignals())
        run_dir = Path(run_dir_of(request))
        with hosts() as table:  # raises before a folder is created
            plan = plan_command(request, table, os.environ, run_dir.name)
            check_start(request)
        folder = RunFolder(run_dir, resumes=_is_of(request, run_dir))
        stack.callback(folder.close)
        if server is None:
            server = stack.enter_context(ForkServer(modules_for(request)))
        try:
            write_job(folder, plan, server.hash_seed)
        except RequestError:
            folder.remove()
            raise
        runs = _ScriptAttempts(request, server, hosts, folder, watcher, signals, started_at)
        return Result(folder.path, runs.run())


def run_side_by_side(sides: Sequence[tuple[CommandRequest, CommandWatcher]]) -> None:
    """Run commands at the same time to their ends; the first that fails stops the others.

    Raises its error. Each has its own fork server and run folder, and gets all signals.
    """
    errors: list[BaseException] = []
    with _RelayedSignals(len(sides)) as signals, ThreadPoolExecutor(len(sides)) as pool:
        running = [
            pool.submit(run_command, request, watcher=watcher, signals=relay)
            for (request, watcher), relay in zip(sides, signals.relays, strict=True)
        ]
        for future in as_completed(running):
            if error := future.exception():
                errors.append(error)
                signals._note(signal.SIGTERM, None)
    if errors:
        raise errors[0]


class _RelayedSignals(ForwardedSignals):
    """Signals to this process, which pass to the supervisors of several commands."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.relays = [ForwardedSignals() for _ in range(count)]

    def _note(self, number: int, frame: object) -> None:
        for relay in self.relays:
            relay._note(number, frame)


def run_dir_of(request: CommandRequest) -> str:
    """The absolute path of the run folder; a new one if none was given."""
    return os.path.abspath(request.run_dir or new_run_dir(name_of(request.command)))


@dataclass
class _ScriptAttempts:
    """The attempts of one command in its run folder."""

    request: CommandRequest
    server: Processes
    hosts: Hosts
    folder: RunFolder
    watcher: CommandWatcher
    signals: ForwardedSignals
    started_at: float
    _connections: Connections = field(default_factory=Connections, init=False)

    def run(self) -> dict[str, Any]:
        """Run attempts until one ends well; returns the summary, or raises the error."""
        first = self.folder.attempts
        for attempt in range(first, first + self.request.max_restarts + 1):
            restarts = attempt - first
            try:
                plan, ended, logs, memory = self._try(attempt, restarts)
            except AllranksError as error:
                self.folder.events.event("failed", report=str(error), attempt=attempt)
                raise
            exits = {rank: exit_.code for rank, exit_ in sorted(ended.exits.items())}
            fault = find_fault(ended, logs, memory)
            if fault is None and ended.done and ended.reason:
                raise self._stopped_well(ended.reason, exits, attempt)
            if fault is None and ended.done:
                return self._done(plan, exits, attempt, restarts)
            if ended.silent:
                path = self.folder.path / "logs" / f"hang-{attempt}.txt"
                report = silence_report(ended, logs, self.request.hang_timeout_s, path)
            else:
                assert fault is not None, exits
                self._raise_if_stopped(ended, exits, attempt, -fault.exit.code)
                report = first_fault_report(fault, ended, logs, self.request.command)
            values = {"report": report, "exits": exits, "attempt": attempt}
            last = restarts == self.request.max_restarts or self.signals.reason
            if last or (fault is not None and not fault.is_passing):
                self.folder.events.event("failed", **values)
                is_lost = fault is not None and fault.exit.lost
                raise PlaceError(report) if is_lost else ProgramError(report)
            self.folder.events.event("restart", **values, first_rank=fault and fault.rank)
            news = f"starting again, {restarts + 1} of {self.request.max_restarts} times"
            self.watcher.report(f"{report.splitlines()[0]}\n{news}")
        raise AssertionError("the last attempt returns or raises")

    def _try(
        self, attempt: int, restarts: int
    ) -> tuple[CommandPlan, ScriptsEnded, dict[int, tuple[Path, int]], str]:
        """One attempt, with new ports: its plan, its end, its logs, and evidence of memory."""
        request, path = self.request, self.folder.path
        self._connections = Connections()
        with self.hosts() as hosts:
            plan = plan_command(request, hosts, {}, path.name, restarts)
            logs = {}
            for rank in plan.ranks:
                log = rank_log_path(path, rank.rank)
                logs[rank.rank] = log, log.stat().st_size if log.exists() else 0
            self.folder.events.event(
                "attempt", attempt=attempt, hosts=[dataclasses.asdict(host) for host in hosts]
            )
            self.watcher.started(plan, path)
            limit = request.time_limit_s
            policy = StopPolicy(
                plan.deciding,
                plan.leaving,
                request.grace_s,
                NEVER if limit is None else self.started_at + limit,
                request.hang_timeout_s,
                is_victim=lambda rank: last_words(*logs[rank]).is_victim,
            )
            kills = Kills.now()
            processes = [
                _process(request, plan, rank.rank, logs[rank.rank][0], path) for rank in plan.ranks
            ]
            ended = supervise_script(self.server, processes, policy, self.signals, self._tick)
            self._record_collectives()
            return plan, ended, logs, Kills.now().since(kills)

    def _record_collectives(self) -> None:
        """Record whether `--shared-memory` took effect in this attempt."""
        outcome = outcome_in(self.folder.path) if self.request.shared_memory else {}
        if outcome:
            self.folder.events.event("collectives", **outcome)
        if outcome.get("why"):
            self.watcher.report(f"collectives: {outcome['did']}, because {outcome['why']}")

    def _tick(self) -> None:
        self.folder.look_if_due()
        if isinstance(self.server, ForkServer) and not self.request.roles:
            self._connections.look(self.server.pids(), self.request.processes)
        with suppress(OSError, ValueError):  # a display must not end the job
            self.watcher.tick()

    def _done(
        self, plan: CommandPlan, exits: dict[int, int], attempt: int, restarts: int
    ) -> dict[str, Any]:
        note = self._connections.note(plan.topology.world_size)
        self.folder.events.event("done", exits=exits, attempt=attempt, note=note or None)
        if note:
            self.watcher.report(note)
        return {
            "run_dir": str(self.folder.path),
            "world_size": plan.topology.world_size,
            "nodes": plan.topology.nodes,
            "exits": exits,
            "restarts": restarts,
            "seconds": round(time.monotonic() - self.started_at, 3),
        }

    def _stopped_well(
        self, reason: str, exits: dict[int, int], attempt: int
    ) -> Stopped | Interrupted:
        """The error for a stop after which all deciding ranks left with 0, their state saved."""
        self.folder.events.event("stopped", reason=reason, exits=exits, attempt=attempt)
        text = (
            f"stopped ({reason}), and left with exit code 0; the same command goes on in\n"
            f"run folder {self.folder.path}"
        )
        return stopped_by(reason, text)

    def _raise_if_stopped(
        self, ended: ScriptsEnded, exits: dict[int, int], attempt: int, number: int
    ) -> None:
        """Raise `Interrupted` if the job was asked to stop, or died of a forwarded signal."""
        reason = ended.reason
        if not reason and number in ended.passed_on:
            reason = name_of_signal(number)
        if not reason:
            return
        self.folder.events.event("interrupted", reason=reason, exits=exits, attempt=attempt)
        names = {rank: name_of_signal(-n) if n < 0 else n for rank, n in exits.items()}
        codes = ", ".join(f"rank {rank}: {name}" for rank, name in names.items())
        raise Interrupted(f"interrupted ({reason}); {codes}\nrun folder {self.folder.path}")


def outcome_in(run_dir: Path) -> dict[str, str]:
    """The outcome of `--shared-memory` by rank 0: asked, did, why. Read and removed."""
    path = run_dir / OUTCOME
    try:
        outcome: dict[str, str] = json.loads(path.read_text())
    except (OSError, ValueError):  # no process group was made, or making it failed
        return {}
    path.unlink()
    return outcome


def _process(
    request: CommandRequest, plan: CommandPlan, rank: int, log: Path, run_dir: Path
) -> Process:
    """The process that the fork server starts: the command and its environment."""
    planned = plan.ranks[rank]
    argument: dict[str, Any] = {
        "command": list(planned.command),
        "defaults": planned.defaults,
        "step": step_variables(plan.topology, rank),
        "own": [name for name in planned.environment if name.startswith(("PMI_", "PMIX_"))],
        "restored": {name: os.environ.get(name) for name in SERVER_VARIABLES},
        "without_core": request.hang_timeout_s > 0,
        "hooks": request.shared_memory and not request.warm,
    }
    if not request.warm:
        environment = dict(planned.environment)
        if request.shared_memory:
            environment[OUTCOME_IN] = str(run_dir / OUTCOME)
        return Process(rank, COMMAND, argument, environment, log)
    argument |= argument_of(request, planned, run_dir)
    return Process(rank, WARM_SCRIPT, argument, planned.environment, log)


def name_of(command: tuple[str, ...]) -> str:
    """The name for a run folder: that of the script, or of the program."""
    return redacted_words(command[script_position(command) :])[0].rpartition("/")[2]


def write_job(folder: RunFolder, plan: CommandPlan, hash_seed: str) -> None:
    """Write `job.toml` of a command, and the event `started`."""
    values = {
        "schema": SCHEMA,
        **plan.request.to_data(),
        "ranks": plan.topology.world_size,
        "nodes": plan.topology.nodes,
    }
    folder.take_room((rank.rank for rank in plan.ranks), with_events=False)
    folder.write_job_file(write_toml(values).encode())
    folder.events.event(
        "started",
        ranks=plan.topology.world_size,
        notes=list(plan.request.notes),
        environment=recorded_environment(hash_seed),
    )


def _is_of(request: CommandRequest, run_dir: Path) -> bool:
    """Whether a run folder belongs to the same command and is not done: it runs in it again."""
    try:
        job = tomllib.loads((run_dir / "job.toml").read_text())
    except (OSError, ValueError):
        return False
    ends = [row["event"] for row in read_rows(run_dir / "events.jsonl")]
    wanted = request.to_data()
    return "done" not in ends[-1:] and all(job.get(n) == wanted[n] for n in ("kind", "command"))
