"""The page: one HTML file that loads nothing, from what `records` has read of the runs.

jinja2 escapes all that runs have recorded; the style and the script of the page stand in it. Its
own policy forbids it every load, so a browser would refuse what slipped in.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from allranks import __version__
from allranks.tools.report import tables
from allranks.tools.report.bars import Bars, gauges, lanes_of, memory_bars, time_bars
from allranks.tools.report.charts import COLOURS, charts_of, constants_of, letter_of
from allranks.tools.report.closely import Closely, closely
from allranks.tools.report.headline import Headline, headline_of, missing
from allranks.tools.report.numbers import counted, format_seconds
from allranks.tools.report.outcome import RUNNING
from allranks.tools.report.plot import Chart, Tick, nice_ticks
from allranks.tools.report.records import Event, Run
from allranks.tools.report.tables import Table
from allranks.tools.report.timeline import PHASES, Timeline, timeline_of

MARKER = "<!-- made by allranks report -->"
TEMPLATES = ("frame.html", "page.html", "run.html", "parts.html", "benches.html", "checks.html")
MOST_NOTES = 40
NOT_NOTED = ("restart", "evaluated")
PROFILE = "profile/rank-000.json"

InWords = Callable[[Event], list[str]]
"""What a person should hear of an event; most events are for the record."""


@dataclass(frozen=True)
class Fault:
    """One fault: when, what became of it, and the report of who failed first."""

    at: str
    what: str
    report: str


@dataclass(frozen=True)
class RunView:
    """All that the page shows of one run."""

    run: Run
    letter: str
    colour: int
    headline: Headline
    timeline: Timeline
    ticks: tuple[Tick, ...]
    lanes: Sequence[int]
    closely: Closely | None
    times: Bars | None
    memory: Bars | None
    gauges: Table | None
    faults: tuple[Fault, ...]
    notes: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]
    profile: str


def page_of(runs: Sequence[Run], in_words: InWords) -> str:
    """The page of these runs, as text; `in_words` tells what happened in one."""
    several = len(runs) > 1
    views = [_view(number, run, several, in_words) for number, run in enumerate(runs)]
    charts = charts_of(runs)
    return rendered(
        "page.html",
        _title(runs),
        charts,
        source=f"the run folder{'s' if several else ''}",
        at=runs[0].read_at,
        views=views,
        several=several,
        constants=constants_of(runs),
        differences=tables.differences(runs),
        results=tables.results(runs),
        same_weights=tables.same_weights(runs),
        tables=tables,
        phases=PHASES,
        percent=_percent,
        seconds=format_seconds,
    )


def rendered(
    template: str,
    title: str,
    charts: Sequence[Chart],
    source: str = "their records",
    at: float | None = None,
    **values: Any,
) -> str:
    """A page as text: what is the same of all of them, and `values` for its own template."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=DictLoader({name: _text(name) for name in TEMPLATES}),
    )
    return environment.get_template(template).render(
        marker=Markup(MARKER),
        style=Markup(_text("style.css")),
        script=Markup(_text("hover.js")),
        data=_as_script([chart.data for chart in charts]),
        title=title,
        charts=charts,
        source=source,
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at)),
        **values,
    )


def _text(name: str) -> str:
    """A part of the page that lies beside this file."""
    return (files("allranks.tools.report") / "templates" / name).read_text(encoding="utf-8")


def _title(runs: Sequence[Run]) -> str:
    programs = dict.fromkeys(str(run.job["program"]) for run in runs)
    if len(runs) == 1:
        return next(iter(programs))
    return f"{counted(len(runs), 'run')} of {', '.join(programs)}"


def _as_script(value: object) -> Markup:
    """JSON that may stand in a script: no letter of it ends the element."""
    text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)


def _finite(value: Any) -> Any:
    """The same with `None` for each number that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if value != value or value in (float("inf"), float("-inf")) else value


def _view(number: int, run: Run, several: bool, in_words: InWords) -> RunView:
    timeline = timeline_of(run)
    return RunView(
        run=run,
        letter=letter_of(number) if several else "",
        colour=number % COLOURS,
        headline=headline_of(run, timeline),
        timeline=timeline,
        ticks=_ticks(timeline),
        lanes=lanes_of(run.speakers),
        closely=closely(run, timeline),
        times=time_bars(run),
        memory=memory_bars(run),
        gauges=gauges(run),
        faults=_faults(run, timeline),
        notes=_notes(run, timeline, in_words),
        missing=tuple(missing(run)),
        profile=PROFILE if (run.path / PROFILE).is_file() else "",
    )


def _ticks(timeline: Timeline) -> tuple[Tick, ...]:
    places = [t for t in nice_ticks(0, timeline.seconds, 5) if t <= timeline.seconds]
    return tuple(Tick(_percent(t, timeline), f"{t:g} s" if t else "0") for t in places)


def _percent(seconds: float, timeline: Timeline) -> float:
    return round(100 * min(max(seconds / timeline.seconds, 0.0), 1.0), 3)


def _faults(run: Run, timeline: Timeline) -> tuple[Fault, ...]:
    """Every restart with its report, and the fault that the run ended with."""
    found = []
    for event in run.of("restart"):
        what = "all ranks started again"
        if event.get("resumes_from") is not None:
            lost = counted(int(event["lost_steps"]), "step")
            what += f" from step {event['resumes_from']:,}; {lost} lost"
        at = format_seconds(timeline.at(event["time"]))
        found.append(Fault(at, what, str(event.get("report", ""))))
    if run.outcome.fault:
        at = format_seconds(timeline.seconds)
        what = "goes on" if run.outcome.state == RUNNING else f"the run {run.outcome.state}"
        found.append(Fault(at, what, run.outcome.fault))
    return tuple(found)


def _notes(run: Run, timeline: Timeline, in_words: InWords) -> tuple[tuple[str, str], ...]:
    told = [
        (format_seconds(max(timeline.at(event["time"]), 0.0)), line)
        for event in run.events
        if event["event"] not in NOT_NOTED
        for line in in_words(event)
    ]
    more = len(told) - MOST_NOTES
    return (
        (*told[:MOST_NOTES], ("", f"and {more} more: see events*.jsonl")) if more > 0 else (*told,)
    )
