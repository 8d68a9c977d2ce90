"""`allranks.check`, for scripts and notebooks: is a task's result the same as in one process?

It does what `allranks check` does, in the same words, and returns the verdict.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allranks.cli.notebook.launch import (
    RUNS,
    check_that_this_is_no_rank,
    flags_of,
    with_fields,
)
from allranks.cli.notebook.program import prepare_program
from allranks.job.config import resolve
from allranks.tools.check.against_single import DEEP_STEPS, STEPS, default_ranks, usual_strategy
from allranks.tools.check.scratch import checked_in_scratch
from allranks.tools.check.verdict import Verdict


def check(
    task: Any,
    *,
    settings: Mapping[str, Any] | None = None,
    deep: bool = False,
    keep_runs: str | os.PathLike[str] | None = None,
    **job: Any,
) -> Verdict:
    """Train `task` in one process and on many, and compare every step; returns the verdict.

    `task`, `settings` and the keywords are those of `allranks.launch`; what they leave out is as in
    `allranks check`: the strategy that its engine has for many ranks, float64 on 2 and 3 ranks and
    then `precision`, 20 steps, or 100 if `deep`.
    `keep_runs` is a folder for the runs and their traces. `verdict.equal` says whether there was no
    difference, `print(verdict)` what was found, `verdict.to_data()` the same as data.

    Raises what `allranks.launch` raises.
    """
    check_that_this_is_no_rank(task)
    flags = flags_of(task, job, "check")
    given, bounded = "ranks" in flags or "nodes" in flags, "steps" not in flags
    program, fields = prepare_program(task, Path(RUNS))
    strategy = flags.get("strategy") or usual_strategy(flags.get("engine") or "", program)
    defaults = {"steps": DEEP_STEPS if deep else STEPS, "strategy": strategy}
    if not given:
        defaults["ranks"] = default_ranks(strategy)
    resolved = resolve(program, {**flags, **defaults, **flags})
    resolved = with_fields(resolved, {**fields, **(settings or {})})
    kept = None if keep_runs is None else os.fspath(keep_runs)
    return checked_in_scratch(resolved, kept, given=given, bounded=bounded)
