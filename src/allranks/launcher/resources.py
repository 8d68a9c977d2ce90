"""Resources of a job: what owns its ranks, and what a new attempt has to run on.

`LocalMachine` is this machine; `cluster.Cluster` is several nodes. `attempts` does not know which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from allranks.job.job import Job
from allranks.launcher.heartbeat import Beat
from allranks.launcher.plan import Plan, Seat, Shape, plan_of
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.process import Processes
from allranks.launcher.supervisor import EVIDENCE_S
from allranks.launcher.world import Visible
from allranks.strategies.roles import RANKS, Member

T = TypeVar("T")


class Resources(Protocol):
    """What every attempt of a job uses: processes, a plan, and the time that is left."""

    @property
    def server(self) -> Processes:
        """The owner of the ranks."""
        ...

    @property
    def evidence_s(self) -> float:
        """Seconds by which the cause of a fault may be reported later than its victims."""
        ...

    def lost(self) -> str:
        """The nodes lost since the last call, in words; "" if none is."""
        ...

    @property
    def ends_at(self) -> float:
        """Monotonic time at which a scheduler takes all of it away; infinite if unknown."""
        ...

    def shared(self, run_dir: Path) -> Path | None:
        """A folder that all ranks see; `None`: the folder of temporary files."""
        ...

    def plan(self, job: Job, shape: Shape) -> Plan:
        """Every rank with its place and its environment; nothing is started."""
        ...

    def replan(self, plan: Plan) -> Plan:
        """The plan of the next attempt: on the nodes that are left, with a new rendezvous."""
        ...

    def inject_due_faults(self, beats: Sequence[Beat]) -> None:
        """Break the nodes whose fault is due. Called about ten times a second while ranks run."""
        ...


@dataclass(frozen=True)
class LocalMachine:
    """All ranks on this machine."""

    server: ForkServer

    @property
    def evidence_s(self) -> float:
        return EVIDENCE_S

    def lost(self) -> str:
        return ""

    @property
    def ends_at(self) -> float:
        return float("inf")

    def shared(self, run_dir: Path) -> Path | None:
        return None

    def plan(self, job: Job, shape: Shape) -> Plan:
        assert job.nodes == 1, "what is to run on nodes is not planned for one machine"
        return plan_of(job, shape, Visible.from_environment())

    def replan(self, plan: Plan) -> Plan:
        return plan

    def inject_due_faults(self, beats: Sequence[Beat]) -> None:
        """No fault of a node can be asked for on one machine."""


@dataclass(frozen=True)
class PlannedNodes(LocalMachine):
    """What would run on nodes that are not there: it is planned, and never started.

    Without `seats` it would run on this machine; behind those of the ranks stand those apart."""

    seats: tuple[Seat, ...] = ()

    def plan(self, job: Job, shape: Shape) -> Plan:
        of_ranks, apart = self.seats[: job.ranks], self.seats[job.ranks :]
        seats = for_all_processes(job, of_ranks, apart) if self.seats else ()
        return plan_of(job, shape, Visible.from_environment(), seats)


def for_all_processes(job: Job, of_ranks: Sequence[T], apart: Sequence[T] = ()) -> list[T]:
    """What each process of a job has, where each of its ranks has something (a seat, a node).

    Where there are roles the ranks are the workers. What lies apart has what nodes without ranks
    have, in turn; where none of these is left, it lies over nodes. Of those that do, the i-th of n
    is beside the first rank of the i-th of n parts of the ranks; all others are where rank 0 is.
    """
    ranks = iter(of_ranks)
    process_set = dataclasses.replace(job, ranks=len(of_ranks)).strategy_spec.process_set

    def one_of(member: Member) -> T:
        if member.role.name in RANKS:
            return next(ranks)
        if member.role.apart and apart:
            return apart[member.index % len(apart)]
        lies_over = member.role.over_nodes or member.role.apart
        part = member.index / member.role.count if lies_over else 0
        return of_ranks[int(part * len(of_ranks))]

    return [one_of(member) for member in process_set.members]


def with_rendezvous(plan: Plan, address: str) -> Plan:
    """The same plan, with the address at which its ranks meet."""
    ranks = tuple(
        dataclasses.replace(rank, world=dataclasses.replace(rank.world, rendezvous=address))
        for rank in plan.ranks
    )
    return dataclasses.replace(plan, ranks=ranks)


def shares(ranks: int, nodes: int, slots: Sequence[int] = (), apart: int = 0) -> tuple[int, ...]:
    """How many ranks each node gets: its slots if they add up, else as even as it goes.

    The last nodes, those `apart`, get none.
    """
    if apart:
        with_ranks = nodes - apart
        return shares(ranks, with_ranks, slots[:with_ranks]) + (0,) * apart
    if sum(slots) == ranks and len(slots) == nodes and all(slots):
        return tuple(slots)
    whole, over = divmod(ranks, nodes)
    return tuple(whole + (number < over) for number in range(nodes))


def seats_of(counts: Sequence[int], seats: Sequence[Seat]) -> list[Seat]:
    """One seat for every rank, where node i has `counts[i]` of them."""
    return [seat for count, seat in zip(counts, seats, strict=True) for _ in range(count)]
