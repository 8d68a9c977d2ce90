"""What every place makes of a job: a plan, which can be printed, and then started as it is.

A plan is frozen data. `allranks train --dry-run` prints the very object that the launcher would
have been given.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from allranks.errors import RequestError, printable
from allranks.job.config import threads_per_rank
from allranks.job.job import Job, redacted
from allranks.job.limits import devices_of
from allranks.launcher.heartbeat import Beat
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.process import Processes
from allranks.launcher.supervisor import EVIDENCE_S
from allranks.launcher.world import Visible, World
from allranks.strategies.auto import Decision
from allranks.strategies.roles import RANKS, Member, ProcessSet
from allranks.strategies.shards import busy_fraction


@dataclass(frozen=True)
class Shape:
    """What a place must know of a task: its resolved fields, its global batch, its shards."""

    fields: dict[str, Any]
    batch_size: int
    shards: int


@dataclass(frozen=True)
class Seat:
    """Where one rank runs: on which node, counted from 0, and by which network it meets others.

    Seats with the same `machine` share its processors.
    """

    node: int = 0
    host: str = ""
    interface: str = "lo"
    machine: int = 0


@dataclass(frozen=True)
class RankPlan:
    """One process: its place in the world, what its environment gets, and where it runs.

    `defaults` is what it gets only where its node has no variable of that name.
    """

    world: World
    environment: dict[str, str]
    host: str = ""
    defaults: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LaunchPlan:
    """All processes of a job, the job they get, and what the user should know beforehand.

    `decision` is that of the dial, where it chose the strategy of the job.
    """

    job: Job
    shape: Shape
    ranks: tuple[RankPlan, ...]
    notes: tuple[str, ...]
    decision: Decision | None = None

    @property
    def process_set(self) -> ProcessSet:
        """What the processes are to each other."""
        return self.job.strategy_spec.process_set

    def moved_since(self, before: LaunchPlan) -> list[tuple[str, str, str]]:
        """Who had a node for itself, and is on another one now: its name, and both nodes."""
        both = zip(self.process_set.members, before.ranks, self.ranks, strict=False)
        return [
            (self.process_set.name_of(rank), was.host, now.host)
            for rank, (member, was, now) in enumerate(both)
            if member.role.apart and was.host != now.host
        ]

    def to_data(self) -> dict[str, Any]:
        """The plan as plain data, for `--dry-run --json`; without secrets."""
        data = dataclasses.asdict(self)
        data["job"]["task"] = redacted(self.job.task)
        data["shape"]["fields"] = redacted(self.shape.fields)
        return data

    def __str__(self) -> str:
        groups = {**self.job.grouped(), "Fields of the task": redacted(self.shape.fields)}
        lines: list[str] = []
        for title, values in groups.items():
            lines += [f"{title}:", *(f"  {name} = {value}" for name, value in values.items()), ""]
        for rank in self.ranks:
            variables = " ".join(
                f"{k}={v}" for k, v in {**rank.defaults, **rank.environment}.items()
            )
            where = f" on {rank.host}" if rank.host and self.job.nodes > 1 else ""
            lines += [f"{self.process_set.name_of(rank.world.rank)}{where}: {variables}", ""]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(printable(line) for line in lines)


STORE = ".store"
WORKSPACE_OF_CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # else its sums follow the stream


def plan_of(job: Job, shape: Shape, visible: Visible, seats: Sequence[Seat] = ()) -> LaunchPlan:
    """The processes of `job`; raises `RequestError` where there is no work for all.

    Without `seats` they are all on this machine: the ranks meet through a file in the run folder,
    and Gloo and NCCL are bound to `lo`: no socket of a local job can be reached from another
    machine. With them, where they meet is known only when an attempt begins. Of the devices that
    are `visible`, ranks see those that the job names; local rank r uses the r-th of them.
    """
    process_set = job.strategy_spec.process_set
    notes = _notes(job, shape)
    meets_in_file = (process_set.size > 1 or bool(job.elastic)) and not seats
    store = str(Path(job.run_dir) / STORE) if meets_in_file else ""
    seats = seats or [Seat()] * process_set.size
    devices = devices_seen(job, visible)
    if devices and len({seat.host for seat in seats}) > 1:
        _check_names_hold(job, visible)
    ranks = []
    for world, seat in zip(_worlds(process_set, seats, store), seats, strict=True):
        threads = str(threads_per_rank(job, world.on_machine))
        environment = {
            **world.variables(),
            "GLOO_SOCKET_IFNAME": seat.interface,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            **devices,
            **backend_of_keras(job),
        }
        defaults: dict[str, str] = {}
        if job.device == "cuda":
            local = seat.interface == "lo"  # elsewhere a site knows all of its cards
            (environment if local else defaults)["NCCL_SOCKET_IFNAME"] = seat.interface
            defaults |= WORKSPACE_OF_CUBLAS if job.bitwise else {}
        ranks.append(RankPlan(world, environment, seat.host, defaults))
    return LaunchPlan(job, shape, tuple(ranks), notes)


def _worlds(process_set: ProcessSet, seats: Sequence[Seat], store: str) -> Iterator[World]:
    """Each process among all, in their order."""
    counted = [member.role.name in RANKS for member in process_set.members]
    on_node, on_machine = Counter(s.node for s in seats), Counter(s.machine for s in seats)
    ranks_on_node = Counter(s.node for s, is_rank in zip(seats, counted, strict=True) if is_rank)
    before: Counter[int] = Counter()
    ranks_before: Counter[int] = Counter()
    for rank, (seat, member) in enumerate(zip(seats, process_set.members, strict=True)):
        yield World(
            rank,
            process_set.size,
            local_rank=before[seat.node],
            local_size=on_node[seat.node],
            node=seat.node,
            store=store,
            on_machine=on_machine[seat.machine],
            role=member.role.name,
            role_index=0 if process_set.are_all_trainers else member.index,
            local_index=ranks_before[seat.node] if counted[rank] else -1,
            local_ranks=ranks_on_node[seat.node],
        )
        before[seat.node] += 1
        ranks_before[seat.node] += counted[rank]


NOTHING_TO_GO_ON_FROM = (
    "--elastic without --checkpoint-every: a lost rank takes parts of the state with it, so a loss "
    "costs all steps since the last checkpoint, or the start"
)


def _notes(job: Job, shape: Shape) -> tuple[str, ...]:
    """Notes for the user; raises `RequestError` if a rank or a replica would have no shard."""
    process_set, replicas = job.strategy_spec.process_set, job.strategy_spec.replicas
    notes = () if process_set.are_all_trainers else (f"processes: {process_set}",)
    has_parts = job.strategy_spec.card.agreement.cuts_state
    if job.elastic and has_parts and job.checkpoint_every is None and not job.spare_state:
        notes = (*notes, NOTHING_TO_GO_ON_FROM)
    readers = job.strategy_spec.parts_of_a_batch
    each = job.ranks // readers
    workers, unit = (readers, "rank" if each == 1 else f"group of {each} ranks")
    if replicas > 1:
        workers, unit = replicas, "replica"
    if workers > shape.shards:
        words, fits = f"--ranks {job.ranks}", f"--ranks {shape.shards * each}"
        if replicas > 1:
            words = f"--strategy {job.strategy}"
            fits = f"--strategy {job.strategy_spec.name}:replicas={shape.shards}"
        raise RequestError(
            asked=words,
            found=f"the task cuts its batch into shards = {shape.shards}",
            why=f"a {unit} owns whole shards, so the {unit}s above that number would have none",
            do=f"{fits}, or --set shards={workers} (another job: it changes "
            "what BatchNorm and dropout see)",
        )
    if shape.shards % workers == 0 or job.share:
        return notes
    busy = busy_fraction(shape.shards, workers)
    return (
        *notes,
        f"{workers} {unit}s on {shape.shards} shards: {unit}s are busy {busy:.0%} of the time; "
        f"--set shards={workers * -(-shape.shards // workers)} would keep all busy, as another job",
    )


def backend_of_keras(job: Job) -> dict[str, str]:
    """The variable that selects Keras's backend; Keras reads it when it is imported."""
    return {"KERAS_BACKEND": job.engine}


def _check_names_hold(job: Job, visible: Visible) -> None:
    """Raise `RequestError` where the devices that all nodes would get are those of this machine."""
    names = [name for name in visible.numbers or () if not name.isdecimal()]
    if names:
        raise RequestError(
            asked=f"--devices {job.devices} on {job.nodes} nodes",
            found=f"{Visible.VARIABLE}={','.join(visible.numbers or ())} in the environment",
            why=f"every node would get these names, and {names[0]} is a device of one machine",
            do=f"unset {Visible.VARIABLE}, or name devices there by their numbers",
        )


def devices_seen(job: Job, visible: Visible) -> dict[str, str]:
    """What makes the processes of a job see the devices of `--devices` only; nothing without it.

    Raises `RequestError` for one that is not among those that are `visible`.
    """
    numbers = devices_of(job)
    return visible.chosen(numbers).variables() if numbers else {}


# --- resources -----------------------------------------------------------------------------------
# Resources of a job: what owns its ranks, and what a new attempt has to run on.
#
# `LocalMachine` is this machine; `cluster.Cluster` is several nodes. `attempts` does not know
# which.


T = TypeVar("T")


class Resources(ABC):
    """What every attempt of a job uses: processes, a plan, and the time that is left.

    What has a default is that of a machine that is there until the job ends.
    """

    server: Processes
    """The owner of the ranks."""
    ends_at: float = float("inf")
    """Monotonic time at which a scheduler takes all of it away; infinite if unknown."""

    @property
    def evidence_s(self) -> float:
        """Seconds by which the cause of a fault may be reported later than its victims."""
        return EVIDENCE_S

    def lost(self) -> str:
        """The nodes lost since the last call, in words; "" if none is."""
        return ""

    def shared(self, run_dir: Path) -> Path | None:
        """A folder that all ranks see; `None`: the folder of temporary files."""
        return None

    @abstractmethod
    def plan(self, job: Job, shape: Shape) -> LaunchPlan:
        """Every rank with its place and its environment; nothing is started."""

    def replan(self, plan: LaunchPlan) -> LaunchPlan:
        """The plan of the next attempt: on the nodes that are left, with a new rendezvous."""
        return plan

    @abstractmethod
    def plan_for(
        self, plan: LaunchPlan, ranks: Sequence[int], new: Collection[int]
    ) -> dict[int, RankPlan]:
        """Each of these ranks, of which the `new` ones join those that train as in `plan`."""

    def drained(self) -> tuple[str, frozenset[int]]:
        """The ranks on nodes that are to leave, and which signal says so; none: no such node."""
        return "", frozenset()

    def back(self) -> list[tuple[str, int]]:
        """What to say of the nodes that have come back, after they were lost, since the last call.

        Each text has the number of ranks for which the node has seats.
        """
        return []

    def inject_due_faults(self, beats: Sequence[Beat]) -> None:
        """Break the nodes whose fault is due. Called about ten times a second while ranks run."""


@dataclass(frozen=True)
class LocalMachine(Resources):
    """All ranks on this machine, where no fault of a node can be asked for.

    With `seats` the ranks would run on nodes that are not there: they are planned, and never
    started. The seats of nodes without ranks come last.
    """

    server: ForkServer
    seats: tuple[Seat, ...] = ()

    def plan(self, job: Job, shape: Shape) -> LaunchPlan:
        assert job.nodes == 1 or self.seats, "nodes are not planned for one machine"
        of_ranks, rankless = self.seats[: job.ranks], self.seats[job.ranks :]
        seats = for_all_processes(job, of_ranks, rankless) if self.seats else ()
        return plan_of(job, shape, Visible.from_environment(), seats)

    def plan_for(
        self, plan: LaunchPlan, ranks: Sequence[int], new: Collection[int]
    ) -> dict[int, RankPlan]:
        job = dataclasses.replace(plan.job, ranks=len(ranks))
        return dict(zip(ranks, self.plan(job, plan.shape).ranks, strict=True))


def for_all_processes(job: Job, of_ranks: Sequence[T], rankless: Sequence[T] = ()) -> list[T]:
    """The seat (or node) of each process of a job, from those of its ranks, `of_ranks`.

    With roles, the ranks are the workers. A role with nodes of its own takes the `rankless` nodes
    in turn; without any, it is spread over nodes. Of n processes that are spread, the i-th is with
    the first rank of the i-th of n parts of the ranks. All others are with rank 0.
    """
    ranks = iter(of_ranks)
    process_set = dataclasses.replace(job, ranks=len(of_ranks)).strategy_spec.process_set

    def one_of(member: Member) -> T:
        if member.role.name in RANKS:
            return next(ranks)
        if member.role.apart and rankless:
            return rankless[member.index % len(rankless)]
        lies_over = member.role.over_nodes or member.role.apart
        part = member.index / member.role.count if lies_over else 0
        return of_ranks[int(part * len(of_ranks))]

    return [one_of(member) for member in process_set.members]


def with_rendezvous(plan: LaunchPlan, address: str) -> LaunchPlan:
    """The same plan, with the address at which its ranks meet."""
    ranks = tuple(
        dataclasses.replace(rank, world=dataclasses.replace(rank.world, rendezvous=address))
        for rank in plan.ranks
    )
    return dataclasses.replace(plan, ranks=ranks)


def shares(ranks: int, nodes: int, slots: Sequence[int] = (), rankless: int = 0) -> tuple[int, ...]:
    """How many ranks each node gets: its slots if they add up, else as even as possible.

    The last `rankless` nodes get none.
    """
    if rankless:
        with_ranks = nodes - rankless
        return shares(ranks, with_ranks, slots[:with_ranks]) + (0,) * rankless
    if sum(slots) == ranks and len(slots) == nodes and all(slots):
        return tuple(slots)
    whole, over = divmod(ranks, nodes)
    return tuple(whole + (number < over) for number in range(nodes))


def seats_of(counts: Sequence[int], seats: Sequence[Seat]) -> list[Seat]:
    """One seat for every rank, where node i has `counts[i]` of them."""
    return [seat for count, seat in zip(counts, seats, strict=True) for _ in range(count)]
