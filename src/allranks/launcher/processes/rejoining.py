"""Processes that are started again while the others go on: learners that come back, a leader that
takes up its checkpoint while they wait.

Which roles do so stands on the card. One that said itself why it failed, and would again, does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.launcher.fault_report import events_of
from allranks.launcher.plan import Plan, RankPlan
from allranks.launcher.processes.process import Exit, Process


@dataclass
class Rejoining:
    """How often each process of an attempt was started again."""

    faults: int = 0
    """Of processes that resume: those that failed by themselves."""
    victims: int = 0
    """Of processes that resume: those that lost a peer."""
    times: Counter[int] = field(default_factory=Counter)
    has_begun: bool = False
    """Whether the leader was started again: its heartbeat begins anew, the training does not."""
    plan: Plan | None = None
    make: Callable[..., Process] | None = None

    @property
    def resumed(self) -> int:
        """How many faults it took: a process that falls with another one is not another fault."""
        return max(self.faults, self.victims)

    def begin(self, plan: Plan, make: Callable[..., Process]) -> None:
        """An attempt begins: `make(rank_plan, again=n)` is the process that comes back."""
        self.plan, self.make, self.has_begun = plan, make, False
        self.times.clear()

    def again(self, run_dir: Path, attempt: int, rank: int, exit_: Exit) -> Process | None:
        """What is started in the place of a process that failed; `None` where nothing is."""
        assert self.plan is not None and self.make is not None
        role = self.plan.process_set.members[rank].role
        said = self._said(run_dir, rank, attempt)
        is_victim = bool(said.get("peer_lost"))
        if role.resumes:
            most = self.plan.job.max_restarts - (self.victims if is_victim else self.faults)
        else:
            most = role.rejoins - self.times[rank]
        if most <= 0 or not said.get("passing", True):
            return None
        self.times[rank] += 1
        if role.resumes:
            self.has_begun = True
            self.victims += is_victim
            self.faults += not is_victim
        planned: RankPlan = self.plan.ranks[rank]
        return self.make(planned, again=self.times[rank])

    def may_pass(self, run_dir: Path, rank: int, attempt: int) -> bool:
        """Whether a process may do better another time, as far as it has said itself."""
        return bool(self._said(run_dir, rank, attempt).get("passing", True))

    def _said(self, run_dir: Path, rank: int, attempt: int) -> dict[str, Any]:
        """What it told when it failed; nothing, where it could not."""
        rows = [row for row in events_of(run_dir, rank, attempt) if row["event"] == "failed"]
        return rows[-1] if rows else {}
