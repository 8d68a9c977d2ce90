"""The page: one HTML file that loads nothing, from what `records` has read of the runs.

jinja2 escapes all records; style and script are inline. The page's Content-Security-Policy forbids
every load, so a browser would refuse an injected one.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup, escape

from allranks import __version__
from allranks.checkpoint.files import write_whole
from allranks.errors import RequestError
from allranks.job.units import format_bytes
from allranks.tools.report import bars, tables
from allranks.tools.report.numbers import (
    UNKNOWN,
    counted,
    evaluations,
    format_number,
    format_seconds,
)
from allranks.tools.report.plot import (
    COLOURS,
    Chart,
    Tick,
    charts_of,
    constants_of,
    letter_of,
    ticks_over,
)
from allranks.tools.report.records import (
    BENCH_RECORD,
    CHECK_RECORD,
    KILLED,
    RUNNING,
    Event,
    RecordedRun,
)
from allranks.tools.report.timeline import (
    PHASES,
    Timeline,
    seconds_per_step,
    timed_steps,
    timeline_of,
)
from allranks.tools.script_check.rules.facts import place_of

# --- headline ------------------------------------------------------------------------------------
# The top of a run: its job, how it ended, and its figures.


STATES = {
    "done": "done",
    "stopped": "stopped after a checkpoint",
    "failed": "failed",
    "interrupted": "interrupted",
    RUNNING: "running",
    KILLED: "killed: its supervisor ended without a word",
}
GOOD = ("done", "stopped")
BAD = ("failed", KILLED)


@dataclass(frozen=True)
class Figure:
    """One labelled number, with a `note` below it."""

    label: str
    value: str
    note: str = ""


def _words(run: RecordedRun) -> list[str]:
    job = run.job
    words = [counted(run.ranks, "rank")]
    nodes = int(job.get("nodes", 1))
    if nodes > 1:
        words[0] += f" on {nodes:,} nodes"
    words += [str(job[n]) for n in ("strategy", "place", "device", "precision") if n in job]
    if job.get("bitwise"):
        words.append("bitwise")
    return words


def _figures(run: RecordedRun, timeline: Timeline) -> list[Figure]:
    figures = []
    for name, series in evaluations(run).items():
        at = f"after step {series.xs[-1]:,.0f}"
        figures.append(Figure(f"{name}, evaluated", format_number(series.ys[-1]), at))
    if "train_loss" in run.summary and run.summary["train_loss"] is not None:
        loss = format_number(float(run.summary["train_loss"]))
        figures.append(Figure("training loss", loss, "mean of the last epoch"))
    elif run.rows:
        figures.append(Figure("training loss", format_number(run.rows.loss[-1]), "last step"))
    speed = run.summary.get("samples_per_s")
    if speed:
        figures.append(Figure("samples/s", f"{speed:,.0f}", "of all ranks, since the last start"))
    if not run.is_command:
        steps = tables.count_of_steps(run)
        is_known = steps != UNKNOWN
        figures.append(Figure("steps", steps if is_known else "–", "" if is_known else UNKNOWN))
    note = "so far" if run.outcome.state == RUNNING else "with start and end"
    figures.append(Figure("time", format_seconds(timeline.seconds), note))
    restarts = len(run.of("restart"))
    lost = [int(event["lost_steps"]) for event in run.of("restart") if "lost_steps" in event]
    note = f"{counted(sum(lost), 'step')} made again" if lost else ""
    figures.append(Figure("restarts", str(restarts), note))
    for event in [e for e in run.of("restart") if "micro_batch" in e][-1:]:
        figures.append(Figure("micro-batch", str(event["micro_batch"]), "found by trial"))
    for event in run.of("proof")[-1:]:
        figure = "proved" if event["proved"] else "not proved"
        figures.append(Figure("equal to one process", figure, str(event["why"])))
    sent_bytes, promised = tables.sent_per_step(run), run.summary.get("card_bytes_per_step")
    if sent_bytes:
        note = f"; its card says {format_bytes(promised)}" if promised else ""
        figures.append(Figure("sent in a step", sent_bytes, f"by rank 0{note}"))
    return figures


def missing(run: RecordedRun) -> list[str]:
    """What the page of this run cannot show, and why: one sentence each."""
    sentences = []
    if run.is_command:
        sentences.append(
            "A script writes no steps, metrics or phases into the run folder: only when it began, "
            "and how each rank left."
        )
        return sentences
    if not run.rows:
        sentences.append("No step was written down: there are no curves.")
    if run.rows and not evaluations(run):
        sentences.append("No evaluation was made so far.")
    seconds = [
        rank for rank in range(run.ranks) if any("seconds" in e for e in run.of("done", rank))
    ]
    if len(seconds) < run.ranks:
        sentences.append(
            "The seconds of each phase are written by a rank when it is done; "
            f"{len(seconds)} of {counted(run.ranks, 'rank')} did."
        )
    if not run.placements:
        sentences.append("No rank has written what it holds; it does so after its first update.")
    return sentences


MARKER = "<!-- made by allranks report -->"
TEMPLATES = ("frame.html", "page.html", "run.html", "parts.html", "benches.html", "checks.html")
MOST_NOTES = 40
NOT_NOTED = ("restart", "evaluated")
PROFILE = "profile/rank-000.json"

InWords = Callable[[Event], list[str]]
"""The lines that the page shows for an event; none for most events."""


@dataclass(frozen=True)
class FaultRow:
    """One fault: when it was, what followed, and the report of the rank that failed first."""

    at: str
    text: str
    report: str


@dataclass(frozen=True)
class RunView:
    """All that the page shows of one run."""

    run: RecordedRun
    letter: str
    colour: int
    title: str
    words: tuple[str, ...]
    state: str
    tone: str
    """`good`, `bad` or `open`."""
    figures: tuple[Figure, ...]
    weights: str
    timeline: Timeline
    ticks: tuple[Tick, ...]
    lanes: Sequence[int]
    closely: bars.Closely | None
    times: bars.Bars | None
    memory: bars.Bars | None
    gauges: tables.Table | None
    findings: tuple[Mapping[str, Any], ...]
    faults: tuple[FaultRow, ...]
    notes: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]
    profile: str


def page_of(runs: Sequence[RecordedRun], in_words: InWords) -> str:
    """The page of these runs, as text; `in_words` puts an event into words."""
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
    """A page as text: the parts that all pages share, and `values` for its own template."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=DictLoader({name: _text(name) for name in TEMPLATES}),
    )
    environment.filters["coded"] = _coded
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


def _coded(text: str) -> Markup:
    """The text, escaped, with what stands between backticks as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _text(name: str) -> str:
    """A file of the folder `templates`."""
    return (files("allranks.tools.report") / "templates" / name).read_text(encoding="utf-8")


def _title(runs: Sequence[RecordedRun]) -> str:
    programs = dict.fromkeys(str(run.job["program"]) for run in runs)
    if len(runs) == 1:
        return next(iter(programs))
    return f"{counted(len(runs), 'run')} of {', '.join(programs)}"


def _as_script(value: object) -> Markup:
    """JSON that is safe inside a <script> element: nothing in it can end the element."""
    text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)


def _finite(value: Any) -> Any:
    """A copy in which `None` replaces each number that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if value != value or value in (float("inf"), float("-inf")) else value


def _view(number: int, run: RecordedRun, several: bool, in_words: InWords) -> RunView:
    timeline, state = timeline_of(run), run.outcome.state
    tone = "good" if state in GOOD else "bad" if state in BAD else "open"
    words, watched = STATES[state], run.watched
    if watched is not None:
        words += f", {watched.summary}"
        tone = "bad" if watched.findings or watched.unwatched or watched.doubt else tone
    return RunView(
        run=run,
        letter=letter_of(number) if several else "",
        colour=number % COLOURS,
        title=str(run.job["program"]),
        words=tuple(_words(run)),
        state=words,
        tone=tone,
        figures=tuple(_figures(run, timeline)),
        weights=str(run.summary.get("weights_sha256") or ""),
        timeline=timeline,
        ticks=ticks_over(timeline.seconds, "s"),
        lanes=run.speakers[: bars.MOST_LANES],
        closely=bars.closely(run, timeline),
        times=bars.time_bars(run),
        memory=bars.memory_bars(run),
        gauges=bars.gauges(run),
        findings=() if watched is None else tuple(findings_of(watched.to_data())),
        faults=_faults(run, timeline),
        notes=_notes(run, timeline, in_words),
        missing=tuple(missing(run)),
        profile=PROFILE if (run.path / PROFILE).is_file() else "",
    )


def findings_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The findings and notes of a record of `check -- COMMAND`, each with its `place`."""
    return [
        {**finding, "place": place_of((finding["file"], finding["line"]))}
        if finding["file"] is not None
        else {**finding, "place": place_of(None)}
        for finding in (*record["findings"], *record.get("notes", ()))
    ]


def _percent(seconds: float, timeline: Timeline) -> float:
    return round(100 * min(max(seconds / timeline.seconds, 0.0), 1.0), 3)


def _faults(run: RecordedRun, timeline: Timeline) -> tuple[FaultRow, ...]:
    """Every restart with its report, and the fault that ended the run."""
    rows = []
    for event in run.of("restart"):
        text = "all ranks started again"
        if event.get("resumes_from") is not None:
            lost = counted(int(event["lost_steps"]), "step")
            text += f" from step {event['resumes_from']:,}; {lost} lost"
        at = format_seconds(timeline.at(event["time"]))
        rows.append(FaultRow(at, text, str(event.get("report", ""))))
    if run.outcome.fault:
        at = format_seconds(timeline.seconds)
        text = "goes on" if run.outcome.state == RUNNING else f"the run {run.outcome.state}"
        rows.append(FaultRow(at, text, run.outcome.fault))
    return tuple(rows)


def _notes(run: RecordedRun, timeline: Timeline, in_words: InWords) -> tuple[tuple[str, str], ...]:
    lines = [
        (format_seconds(max(timeline.at(event["time"]), 0.0)), line)
        for event in run.events
        if event["event"] not in NOT_NOTED
        for line in in_words(event)
    ]
    more = len(lines) - MOST_NOTES
    if more > 0:
        lines = [*lines[:MOST_NOTES], ("", f"and {more} more: see events*.jsonl")]
    return tuple(lines)


# --- writing -------------------------------------------------------------------------------------
# The folders that a report reads, and its files: written whole, and never over a foreign file.


PAGE = "report.html"
LOOKED_AT_BYTES = 200
RUNS, BENCHES, CHECKS = "runs", "benches", "checks"


def kind_of(names: Sequence[str]) -> str:
    """The kind of these folders: runs, benches or checks. Raises `RequestError` for a mixture."""
    kinds = dict.fromkeys(map(_kind, names))
    if len(kinds) > 1:
        raise RequestError(
            asked=f"report {' '.join(names)}",
            found=f"{' and '.join(kinds)}",
            why="a page is of runs, of benches, or of checks",
            do="report each kind by itself",
        )
    return next(iter(kinds))


def _kind(name: str) -> str:
    path = Path(name)
    if (path / BENCH_RECORD).is_file():
        return BENCHES
    if path.suffix == ".json" or (path / CHECK_RECORD).is_file():
        return CHECKS
    return RUNS


def run_folders(names: Sequence[str]) -> list[Path]:
    """The run folders of these names, without duplicates; the folder of a sweep means its runs."""
    folders: dict[Path, Path] = {}
    for name in names:
        path = Path(name)
        if not path.is_dir():
            raise RequestError(
                asked=f"report {name}",
                found="a file" if path.exists() else "nothing there",
                why="a report is of a run folder",
                do="see `allranks runs` for those there are",
            )
        inside = [] if (path / "job.toml").is_file() else sorted(path.glob("*/job.toml"))
        for folder in [job.parent for job in inside] or [path]:
            folders.setdefault(folder.resolve(), folder)
    return list(folders.values())


def page_path(paths: Sequence[Path], out: str | None) -> Path:
    """The path of the page. Raises `RequestError` if a file that is no report is there."""
    folder = paths[0] if paths[0].is_dir() else paths[0].parent
    path = Path(out) if out else folder / PAGE if len(paths) == 1 else Path(PAGE)
    return _checked(path, "--out", "report", MARKER)


def trace_path(name: str | None) -> Path | None:
    """The path of the trace, if any. Raises `RequestError` if a file that is no trace is there."""
    return None if name is None else _checked(Path(name), "--trace", "trace", '"traceEvents"')


def write_file(path: Path, text: str, option: str) -> None:
    """Write one file atomically; raises `RequestError` if that fails."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise RequestError(
            asked=f"{option} {path}",
            found=str(error),
            why="the file cannot be written there",
            do=f"name another with {option} FILE",
        ) from None


def _checked(path: Path, option: str, kind: str, mark: str) -> Path:
    """The path, in whose folder there is no such file, or an earlier one with `mark` in it."""
    if path.is_dir() or not path.parent.is_dir():
        raise RequestError(
            asked=f"{option} {path}",
            found="a folder" if path.is_dir() else f"no folder {path.parent}",
            why="a file is written there",
            do="name a file in a folder that is there",
        )
    if path.exists() and not (path.is_file() and mark.encode() in _beginning(path)):
        raise RequestError(
            asked=f"{option} {path}",
            found=f"a file that is no {kind}",
            why=f"only an earlier {kind} is written over",
            do="name another file, or remove that one",
        )
    return path


def _beginning(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(LOOKED_AT_BYTES)
    except OSError as error:
        raise RequestError(
            asked=f"to write {path}",
            found=str(error),
            why="the file that is there cannot be looked at",
            do="name another file",
        ) from None


# --- data ----------------------------------------------------------------------------------------
# A run as plain data, for `--json`: its result, its curves as drawn, its phases, its bytes.


def run_to_data(run: RecordedRun) -> dict[str, Any]:
    """The numbers of one run. Spans are in seconds since its start."""
    timeline = timeline_of(run)
    mean = seconds_per_step(timed_steps(run, timeline))
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
        "computed_again": tables.computed_again(run.path, run.events, run.summary).rows,
        "seconds_per_step": {str(rank): seconds for rank, seconds in mean.items()},
        **bars.bars_to_data(run),
    }
