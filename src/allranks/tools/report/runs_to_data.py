"""A run as plain data, for `--json`: its result, its curves as drawn, its phases, its bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

from allranks.tools.report.bars import bars_to_data
from allranks.tools.report.plot import charts_of
from allranks.tools.report.records import RecordedRun
from allranks.tools.report.timeline import seconds_per_step, steps_of, timeline_of


def run_to_data(run: RecordedRun) -> dict[str, Any]:
    """The numbers of one run. Spans are in seconds since its start."""
    timeline = timeline_of(run)
    mean = seconds_per_step(steps_of(run, timeline))
    curves = {
        chart.title: {
            line.label: {"step": line.series.xs, "value": line.series.ys} for line in chart.lines
        }
        for chart in charts_of([run])
    }
    return {
        "run_dir": str(run.path),
        "program": run.job["program"],
        "ranks": run.ranks,
        "state": run.outcome.state,
        "seconds": timeline.seconds,
        "restarts": len(run.of("restart")),
        "summary": run.outcome.summary,
        "fault": run.outcome.fault,
        "hosts": {str(rank): host for rank, host in run.hosts.items()},
        "checkpoints": run.checkpoints,
        "curves": curves,
        "spans": [dataclasses.asdict(span) for span in timeline.spans],
        "seconds_per_step": {str(rank): seconds for rank, seconds in mean.items()},
        **bars_to_data(run),
    }
