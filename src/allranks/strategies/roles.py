"""The roles of the processes of a job: all trainers, or different ones. Pure data.

Most strategies have only trainers, as many as `--ranks` says. A parameter server has more: a chief
that distributes the work, workers (counted by `--ranks`), servers that hold the weights, and
perhaps an evaluator. Elastic learners have a synchronizer. A card defines the roles; the plan, the
supervisor and the reports read them here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

TRAINER, WORKER, LEARNER, EVALUATOR = "trainer", "worker", "learner", "evaluator"
RANKS = (TRAINER, WORKER, LEARNER)
"""The roles that `--ranks` counts."""
LEADER = 0


@dataclass(frozen=True)
class Role:
    """`count` processes that do the same work.

    The job goes on while `least` of them are left (`None`: all must be). With `serves` they have no
    end of their own: they are ended when the leader, process 0, is done. One that is lost is
    started again up to `rejoins` times while the others go on; one that `resumes` as often as
    --max-restarts says, while they wait for it. With `outlives_nodes` the loss of its node is
    no more than its own. Those that lie `over_nodes` are beside the ranks of all nodes, in turn;
    those that lie `apart` are each on a node of its own, which has no rank; others that are no
    ranks are where the first rank is.
    """

    name: str
    count: int
    least: int | None = None
    serves: bool = False
    rejoins: int = 0
    resumes: bool = False
    outlives_nodes: bool = False
    over_nodes: bool = False
    apart: bool = False

    @property
    def may_be_lost(self) -> bool:
        """Whether the job may go on without a process of this role, or start it again alone."""
        return self.least is not None or self.resumes or self.rejoins > 0


def coming_and_going(name: str, ranks: int, options: Mapping[str, Any]) -> Role:
    """The ranks of a job where any of them may be lost, and come again, by its strategy's options.

    The job goes on while `least` are left; each is started again up to `rejoins` times.
    """
    return Role(
        name,
        ranks,
        least=min(ranks, options["least"]),
        serves=True,
        rejoins=options["rejoins"],
        outlives_nodes=True,
    )


@dataclass(frozen=True)
class Member:
    """One process of a job: its role, and which of that role it is."""

    role: Role
    index: int


@dataclass(frozen=True)
class ProcessSet:
    """All processes of a job by their roles, in the order in which they are numbered."""

    roles: tuple[Role, ...]

    @property
    def members(self) -> tuple[Member, ...]:
        """Process by process."""
        return tuple(Member(role, index) for role in self.roles for index in range(role.count))

    @property
    def size(self) -> int:
        """How many processes there are."""
        return sum(role.count for role in self.roles)

    @property
    def are_all_trainers(self) -> bool:
        return all(role.name == TRAINER for role in self.roles)

    def has(self, role: str) -> bool:
        return any(role_here.name == role for role_here in self.roles)

    @property
    def nodes_apart(self) -> int:
        """How many nodes have no rank, because of what lies on nodes of its own."""
        return sum(role.count for role in self.roles if role.apart)

    @property
    def helpers(self) -> frozenset[int]:
        """The processes that the launcher ends when the leader is done."""
        return frozenset(rank for rank, member in enumerate(self.members) if member.role.serves)

    def name_of(self, rank: int) -> str:
        """`rank 3`, or `server 0 (rank 3)` where there are roles."""
        if self.are_all_trainers:
            return f"rank {rank}"
        member = self.members[rank]
        which = "" if member.role.count == 1 else f" {member.index}"
        return f"{member.role.name}{which} (rank {rank})"

    @property
    def outlive_nodes(self) -> frozenset[int]:
        """The processes that the job can lose together with their whole node."""
        numbered = enumerate(self.members)
        return frozenset(rank for rank, member in numbered if member.role.outlives_nodes)

    def survives_loss_of(self, rank: int, remaining: Collection[int]) -> bool:
        """Whether the job goes on without `rank`, with only the processes `remaining`."""
        role = self.members[rank].role
        if role.least is None:
            return False
        return sum(self.members[other].role == role for other in remaining) >= role.least

    def __str__(self) -> str:
        """`1 chief, 2 workers, 1 server`."""
        return ", ".join(f"{r.count} {r.name}{'s' if r.count > 1 else ''}" for r in self.roles)


def trainers(ranks: int) -> tuple[Role, ...]:
    """The roles of a job where all processes are alike."""
    return (Role(TRAINER, ranks),)
