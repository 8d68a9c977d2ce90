"""What every place makes of a job: a plan, which can be printed, and then started as it is.

A plan is frozen data. `allranks train --dry-run` prints the very object that the launcher would
have been given.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from allranks.errors import printable
from allranks.job.job import Job
from allranks.job.job_file import redacted
from allranks.strategies.resolve import crew_of
from allranks.strategies.roles import Crew
from allranks.world import World


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
    """One process: who it is, the variables that are added to its environment, and where it runs."""

    world: World
    environment: dict[str, str]
    host: str = ""


@dataclass(frozen=True)
class Plan:
    """All processes of a job, the job they get, and what the user should know beforehand."""

    job: Job
    shape: Shape
    ranks: tuple[RankPlan, ...]
    notes: tuple[str, ...]

    @property
    def crew(self) -> Crew:
        """What the processes are to each other."""
        return crew_of(self.job.strategy, self.job.ranks)

    def to_data(self) -> dict[str, Any]:
        """The plan as plain data, for `--dry-run --json`; without secrets."""
        data = dataclasses.asdict(self)
        data["job"]["task"] = redacted(self.job.task)
        data["shape"]["fields"] = redacted(self.shape.fields)
        return data

    def __str__(self) -> str:
        lines = [f"{key} = {value}" for key, value in self.job.to_data().items() if key != "task"]
        lines += ["", "task:"] + [f"  {k} = {v}" for k, v in redacted(self.shape.fields).items()]
        for rank in self.ranks:
            variables = " ".join(f"{k}={v}" for k, v in rank.environment.items())
            where = f" on {rank.host}" if rank.host and self.job.nodes > 1 else ""
            lines += ["", f"{self.crew.name_of(rank.world.rank)}{where}: {variables}"]
        lines += ["", *(f"note: {note}" for note in self.notes)]
        return "\n".join(printable(line) for line in lines)
