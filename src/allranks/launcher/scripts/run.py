"""`allranks run` from request to result: reserve ports, start the command, try again, conclude.

Each attempt gets ports of its own, so that nothing of the last one answers there. What ran, and how
it ended, stays in the run folder. Which hosts there are comes from outside: `this_host` is the
table of one machine; several nodes hand in their own, with a `Processes` that owns theirs.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import (
    AllranksError,
    Interrupted,
    PlaceError,
    ProgramError,
    RequestError,
    Stopped,
)
from allranks.job.job_file import SCHEMA, write_toml
from allranks.job.run_folder import RunFolder, rank_log_path, read_rows
from allranks.launcher.log_tail import last_words
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.oom import Kills
from allranks.launcher.processes.ports import Reservation
from allranks.launcher.processes.process import Process, Processes
from allranks.launcher.scripts.connections import Connections
from allranks.launcher.scripts.plan import (
    CommandPlan,
    CommandRequest,
    plan_command,
    redacted_words,
    script_position,
)
from allranks.launcher.scripts.report import (
    find_fault,
    first_fault_report,
    name_of_signal,
    silence_report,
)
from allranks.launcher.scripts.supervise import (
    ForwardedSignals,
    ScriptsEnded,
    StopPolicy,
    supervise_script,
)
from allranks.launcher.scripts.topology import Host
from allranks.launcher.scripts.variables import step_variables
from allranks.launcher.scripts.warm import (
    OUTCOME,
    OUTCOME_IN,
    argument_of,
    check_start,
    modules_for,
    outcome_in,
)
from allranks.launcher.start import new_run_dir, recorded_environment
from allranks.launcher.supervisor import NEVER

LOCALHOST = "127.0.0.1"
LOOK_EVERY_S = 1.0
COMMAND, WARM_SCRIPT = (
    "allranks.launcher.scripts.exec_command:main",
    "allranks.launcher.scripts.warm_script:main",
)
SERVER_VARIABLES = ("OPENBLAS_NUM_THREADS",)

Hosts = Callable[[], AbstractContextManager[tuple[Host, ...]]]


@dataclass(frozen=True)
class CommandResult:
    """A command that ended well on all ranks that decide."""

    run_dir: Path
    summary: dict[str, Any]


@dataclass(frozen=True)
class CommandWatcher:
    """What a caller wants to see: each attempt's plan and run folder, every tick, and news."""

    started: Callable[[CommandPlan, Path], None] = lambda plan, run_dir: None
    tick: Callable[[], None] = lambda: None
    told: Callable[[str], None] = lambda line: None


def this_host(request: CommandRequest) -> Hosts:
    """The table of this machine alone: over the loopback interface, unless an address is asked."""

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
) -> CommandResult:
    """Run a command to its end on the hosts, and return what it came to.

    `server` owns the processes of all hosts; without it a fork server of this machine does.
    Raises `RequestError` and leaves no run folder if the request is wrong; `ProgramError` with the
    first-fault report; `Interrupted` if a signal or the time limit ended it. No process is left.
    """
    watcher, started_at = watcher or CommandWatcher(), time.monotonic()
    hosts = hosts or this_host(request)
    with ExitStack() as stack:
        signals = signals or stack.enter_context(ForwardedSignals())
        run_dir = Path(run_dir_of(request))
        with hosts() as found:  # raises for what cannot be, before there is a folder
            plan = plan_command(request, found, os.environ, run_dir.name)
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
        runs = _Runs(request, server, hosts, folder, watcher, signals, started_at)
        return CommandResult(folder.path, runs.run())


def run_dir_of(request: CommandRequest) -> str:
    """The whole path of the run folder; a new name where none is asked for."""
    return os.path.abspath(request.run_dir or new_run_dir(name_of(request.command)))


@dataclass
class _Runs:
    """The attempts of one command in its run folder."""

    request: CommandRequest
    server: Processes
    hosts: Hosts
    folder: RunFolder
    watcher: CommandWatcher
    signals: ForwardedSignals
    started_at: float

    def __post_init__(self) -> None:
        self._connections = Connections()
        self._looked_at = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Try until it ends well; returns the summary, or raises how it ended."""
        first = self.folder.attempts
        for attempt in range(first, first + self.request.max_restarts + 1):
            restarts = attempt - first
            try:
                plan, ended, logs, memory = self._try(attempt, restarts)
            except AllranksError as error:
                self.folder.events.event("failed", report=str(error), attempt=attempt)
                raise
            exits = {rank: one.code for rank, one in sorted(ended.exits.items())}
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
            told = f"starting again, {restarts + 1} of {self.request.max_restarts} times"
            self.watcher.told(f"{report.splitlines()[0]}\n{told}")
        raise AssertionError("the last attempt returns or raises")

    def _try(
        self, attempt: int, restarts: int
    ) -> tuple[CommandPlan, ScriptsEnded, dict[int, tuple[Path, int]], str]:
        """One attempt, with ports of its own: its plan, its end, and where its logs begin."""
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
            self._tell_collectives()
            return plan, ended, logs, Kills.now().since(kills)

    def _tell_collectives(self) -> None:
        """What became of `--shared-memory` in this attempt."""
        outcome = outcome_in(self.folder.path) if self.request.shared_memory else {}
        if outcome:
            self.folder.events.event("collectives", **outcome)
        if outcome.get("why"):
            self.watcher.told(f"collectives: {outcome['did']}, because {outcome['why']}")

    def _tick(self) -> None:
        if time.monotonic() - self._looked_at > LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            self.folder.look()
        if isinstance(self.server, ForkServer) and not self.request.roles:
            self._connections.look(self.server.pids(), self.request.processes)
        with suppress(OSError, ValueError):  # who only looks on ends no job
            self.watcher.tick()

    def _done(
        self, plan: CommandPlan, exits: dict[int, int], attempt: int, restarts: int
    ) -> dict[str, Any]:
        told = self._connections.told(plan.topology.world_size)
        self.folder.events.event("done", exits=exits, attempt=attempt, note=told or None)
        if told:
            self.watcher.told(told)
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
        """The error for a stop after which all that decide left with 0, their state saved."""
        self.folder.events.event("stopped", reason=reason, exits=exits, attempt=attempt)
        text = (
            f"stopped ({reason}), and left with exit code 0; the same command goes on in\n"
            f"run folder {self.folder.path}"
        )
        return Interrupted(text) if reason == "SIGINT" else Stopped(text)

    def _raise_if_stopped(
        self, ended: ScriptsEnded, exits: dict[int, int], attempt: int, number: int
    ) -> None:
        """Raise `Interrupted` if the job was asked to stop, or died of a signal passed on to it."""
        reason = ended.reason
        if not reason and number in ended.passed_on:
            reason = name_of_signal(number)
        if not reason:
            return
        self.folder.events.event("interrupted", reason=reason, exits=exits, attempt=attempt)
        codes = ", ".join(f"rank {rank}: {_told(code)}" for rank, code in exits.items())
        raise Interrupted(f"interrupted ({reason}); {codes}\nrun folder {self.folder.path}")


def _told(code: int) -> str:
    return name_of_signal(-code) if code < 0 else str(code)


def _process(
    request: CommandRequest, plan: CommandPlan, rank: int, log: Path, run_dir: Path
) -> Process:
    """What the fork server is asked for: the command, and how its environment is to be."""
    one = plan.ranks[rank]
    argument: dict[str, Any] = {
        "command": list(one.command),
        "defaults": one.defaults,
        "step": step_variables(plan.topology, rank),
        "own": [name for name in one.environment if name.startswith(("PMI_", "PMIX_"))],
        "restored": {name: os.environ.get(name) for name in SERVER_VARIABLES},
        "without_core": request.hang_timeout_s > 0,
        "hooks": request.shared_memory and not request.warm,
    }
    if not request.warm:
        environment = dict(one.environment)
        if request.shared_memory:
            environment[OUTCOME_IN] = str(run_dir / OUTCOME)
        return Process(rank, COMMAND, argument, environment, log)
    argument |= argument_of(request, one, run_dir)
    return Process(rank, WARM_SCRIPT, argument, one.environment, log)


def name_of(command: tuple[str, ...]) -> str:
    """What a run folder is called after: the script, or the program."""
    return redacted_words(command[script_position(command) :])[0].rpartition("/")[2]


def write_job(folder: RunFolder, plan: CommandPlan, hash_seed: str) -> None:
    """`job.toml` of a command, and the event that it was started."""
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
    """Whether a run folder is that of the same command, which is started once more in it."""
    try:
        job = tomllib.loads((run_dir / "job.toml").read_text())
    except (OSError, ValueError):
        return False
    ends = [row["event"] for row in read_rows(run_dir / "events.jsonl")]
    wanted = request.to_data()
    return "done" not in ends[-1:] and all(job.get(n) == wanted[n] for n in ("kind", "command"))
