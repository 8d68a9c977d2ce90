"""Whether a job is proved: its first steps were compared with one process before it trains.

The comparison itself is a tool, `tools.check.first`, and is loaded only where a job needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from allranks.catalog import FIRST_CHECK, load
from allranks.job.config import Resolved
from allranks.launcher.plan import Plan
from allranks.launcher.resources import Resources
from allranks.launcher.signals import Signals

WHOLE_MODEL = ("single", "ddp")
"""Strategies under which every rank holds the model as one process does."""


@dataclass(frozen=True)
class Proof:
    """Whether the first steps of a job equal those of one process; `why` says how, or why not.

    A difference is no proof: it is the error `NotEqual`, and the job does not start.
    """

    proved: bool
    why: str

    def to_data(self) -> dict[str, Any]:
        return {"proved": self.proved, "why": self.why}

    def __str__(self) -> str:
        return f"proved: {self.why}" if self.proved else f"not proved, because {self.why}"


def first_check(
    resolved: Resolved,
    plan: Plan,
    resources: Resources,
    signals: Signals,
    announce: Callable[[str], None] = lambda text: None,
) -> Proof | None:
    """The proof of a planned job, before its run folder is there; `None` where it needs none.

    Raises `NotEqual` for a difference. `announce` hears when steps are compared.
    """
    if plan.job.strategy_spec.name in WHOLE_MODEL:
        return None
    if plan.job.first_check == "off":
        return Proof(False, "--first-check off left it out")
    proof: Proof = load(FIRST_CHECK)(resolved, plan, resources, signals, announce)
    return proof
