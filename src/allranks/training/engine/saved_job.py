"""What the checkpoints of a training say of its job, and what of it must be as it was to go on.

Each engine saves and takes up its own state; here is what is said beside it, and to whom.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.checkpoint.about import About
from allranks.checkpoint.manifest import Reach
from allranks.checkpoint.newest import Loaded
from allranks.job.job import Job
from allranks.training.resume_checks import (
    Changes,
    about_of,
    changes_since,
    check_not_asked_for,
    sources_for,
)
from allranks.training.task_fields import TaskFields


@dataclass(frozen=True)
class SavedJob:
    """A job with a run folder, seen from one rank.

    `facts(job)` is what decides which bits come out beside it, and `deciding` names those of which
    the bits of a step follow. `attempt`, `reach` and `report` are those of its `Checkpointer`.
    """

    task: TaskFields
    job: Job
    facts: Callable[[Job], dict[str, Any]]
    deciding: tuple[str, ...]
    attempt: int
    reach: Reach
    report: Callable[..., None]

    @property
    def sources(self) -> list[Path]:
        """Where its checkpoint may lie, its own folder first."""
        return sources_for(self.job)

    @property
    def rules(self) -> dict[str, Any]:
        """What a `Checkpointer` is told of it."""
        kept = {"keep": self.job.keep, "best": self.job.best}
        return {**kept, "attempt": self.attempt, "reach": self.reach, "report": self.report}

    def about(self, rest: dict[str, Any], metrics: dict[str, float]) -> About:
        """What a checkpoint says beside the state, the `rest` of which has the progress."""
        return about_of(self.task, self.job, rest["progress"], self.facts(self.job), metrics)

    def check(self, loaded: Loaded) -> Changes:
        """What has changed since; raises `RequestError` for the checkpoint of another job."""
        return changes_since(loaded, self.task, self.job, self.facts(self.job), self.deciding)

    def check_not_asked_for(self) -> None:
        """No checkpoint holds: raise `RequestError` if the job says to start from one."""
        check_not_asked_for(self.job)

    def resumed(self, loaded: Loaded, *, random_streams_restored: bool) -> None:
        """Tell that the training goes on; the leader calls this."""
        changes = self.check(loaded)
        self.report(
            "resumed",
            step=loaded.step,
            path=str(loaded.path),
            ranks_were=loaded.manifest.ranks,
            changes=changes.job,
            differs=changes.facts,
            random_streams_restored=random_streams_restored,
        )
