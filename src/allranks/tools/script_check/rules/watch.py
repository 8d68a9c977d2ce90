"""From the facts of a run to what it is found to do wrong: all faults that are looked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import RequestError
from allranks.tools.script_check.rules.data import (
    equal_draws_of_workers,
    orders_that_never_change,
    padded_evaluations,
    samplers_of_other_ranks,
    samples_of_several_ranks,
    unequal_batches,
)
from allranks.tools.script_check.rules.evaluations import means_of_batch_means, means_of_ranks
from allranks.tools.script_check.rules.facts import Finding, Rank, in_order, read_ranks
from allranks.tools.script_check.rules.files import (
    files_of_several_ranks,
    files_read_too_early,
    lines_of_all_ranks,
    lines_of_each_node,
)
from allranks.tools.script_check.rules.replicas import (
    equal_random_streams,
    parameters_outside,
    replicas_that_drift,
    weights_that_begin_unequal,
)
from allranks.tools.script_check.rules.stepping import (
    needless_reductions,
    schedules_ahead,
    schedules_too_fast,
    undivided_accumulation,
    unreduced_steps,
)

LOOKED_FOR = (
    orders_that_never_change,
    samples_of_several_ranks,
    samplers_of_other_ranks,
    padded_evaluations,
    unequal_batches,
    means_of_batch_means,
    means_of_ranks,
    replicas_that_drift,
    parameters_outside,
    weights_that_begin_unequal,
    equal_random_streams,
    equal_draws_of_workers,
    schedules_too_fast,
    schedules_ahead,
    undivided_accumulation,
    unreduced_steps,
    needless_reductions,
    files_of_several_ranks,
    files_read_too_early,
    lines_of_all_ranks,
    lines_of_each_node,
)
CAUSES = {"step-without-reduction": "replicas-drift"}
"""A finding that explains another, which is then left out."""


@dataclass(frozen=True)
class Watched:
    """What a run of a script was seen to do."""

    ranks: int
    findings: tuple[Finding, ...]
    unwatched: tuple[str, ...]

    def to_data(self) -> dict[str, Any]:
        """As a mapping that JSON can carry."""
        found = [finding.to_data() for finding in self.findings]
        return {"ranks": self.ranks, "findings": found, "unwatched": list(self.unwatched)}

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings]
        lines += [f"not watched: {one}" for one in self.unwatched]
        count = len(self.findings)
        told = f"{count or 'nothing'} found" if count != 1 else "1 finding"
        told = f"{count} findings" if count > 1 else told
        return "\n".join([*lines, f"{told} on {self.ranks} ranks"])


def watched_in(folder: Path) -> Watched:
    """What the facts in `folder` prove; raises `RequestError` where there are none."""
    ranks = read_ranks(folder)
    if not ranks:
        raise RequestError(
            asked="to watch a script",
            found="no process of it that imported torch in the Python of allranks",
            why="what is watched are torch's public functions, in the processes of the ranks",
            do="start it with the Python that has allranks and torch, without -I, -E or -S",
        )
    return Watched(len(ranks), findings_of(ranks), _unwatched(ranks))


def findings_of(ranks: tuple[Rank, ...]) -> tuple[Finding, ...]:
    """Every fault that the facts of all ranks prove, what touches the result first."""
    found = [finding for look in LOOKED_FOR for finding in look(ranks)]
    names = {finding.name for finding in found}
    explained = {effect for cause, effect in CAUSES.items() if cause in names}
    return in_order(finding for finding in found if finding.name not in explained)


def _unwatched(ranks: tuple[Rank, ...]) -> tuple[str, ...]:
    """What could not be looked at, each once."""
    told = [f"{one['what']}: {one['why']}" for rank in ranks for one in rank.all("unwatched")]
    return tuple(dict.fromkeys(told))
