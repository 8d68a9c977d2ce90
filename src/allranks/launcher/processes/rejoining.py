"""Processes that are started again while the others go on: learners that come back, a leader that
takes up its checkpoint while they wait.

Which roles do so stands on the card. One that said itself why it failed, and would again, does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from allranks.launcher.fault_report import events_of
from allranks.launcher.plan import Plan, RankPlan
from allranks.launcher.processes.process import Exit, Process


@dataclass
class Rejoining:
    """How often each process of an attempt was started again; `resumed` counts the leader's."""

    resumed: int = 0
    times: Counter[int] = field(default_factory=Counter)
    has_begun: bool = False
    """Whether the leader was started again: its heartbeat begins anew, the training does not."""
    plan: Plan | None = None
    make: Callable[..., Process] | None = None

    def begin(self, plan: Plan, make: Callable[..., Process]) -> None:
        """An attempt begins: `make(rank_plan, again=n)` is the process that comes back."""
        self.plan, self.make, self.has_begun = plan, make, False
        self.times.clear()

    def again(self, run_dir: Path, attempt: int, rank: int, exit_: Exit) -> Process | None:
        """What is started in the place of a process that failed; `None` where nothing is."""
        assert self.plan is not None and self.make is not None
        role = self.plan.process_set.members[rank].role
        if role.resumes:
            most = self.plan.job.max_restarts - self.resumed
        else:
            most = role.rejoins - self.times[rank]
        if most <= 0 or not self.may_pass(run_dir, rank, attempt):
            return None
        self.times[rank] += 1
        if role.resumes:
            self.resumed, self.has_begun = self.resumed + 1, True
        planned: RankPlan = self.plan.ranks[rank]
        return self.make(planned, again=self.times[rank])

    def may_pass(self, run_dir: Path, rank: int, attempt: int) -> bool:
        """Whether a process may do better another time, as far as it has said itself."""
        rows = [row for row in events_of(run_dir, rank, attempt) if row["event"] == "failed"]
        return all(row.get("passing", True) for row in rows[-1:])
