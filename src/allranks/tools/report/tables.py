"""The tables of the page: differences between runs, placement, versions, and options."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import RequestError
from allranks.job.job import HIDDEN, write_toml
from allranks.job.run_folder import read_rows
from allranks.job.units import format_bytes
from allranks.launcher.scripts.plan import CommandRequest
from allranks.strategies.mesh import REPLICATE
from allranks.strategies.resolve import strategy_spec
from allranks.tools.report.numbers import (
    UNKNOWN,
    counted,
    evaluations,
    format_number,
    format_seconds,
)
from allranks.tools.report.plot import letter_of
from allranks.tools.report.records import REPLAYS, Event, RecordedRun
from allranks.tools.report.timeline import timeline_of
from allranks.training.record.digests import broken_link, read_digests

COMMAND_HEADING = ("program", "command", "processes")
COMMAND_DEFAULTS = {**CommandRequest(()).to_data(), "ranks": 1, "nodes": 1}
"""The values of a script's run that nobody gave."""
NOT_VALUES = ("schema", "source", "task", "run_dir", "kind")
DIGEST_SHOWN = 12
LEFT, RIGHT = "", "number"


@dataclass(frozen=True)
class Table:
    """Rows of cells under a head; `kinds` says of each column whether it holds numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    kinds: tuple[str, ...]


def values_of(job: dict[str, Any]) -> dict[str, Any]:
    """The values of a job and of its task by name, `task.lr` for a field."""
    task = {f"task.{name}": value for name, value in job.get("task", {}).items()}
    return {name: value for name, value in job.items() if name not in NOT_VALUES} | task


def differences(runs: Sequence[RecordedRun]) -> Table:
    """The values that differ between runs: a row for each value, a column for each run."""
    values = [values_of(run.job) for run in runs]
    names = dict.fromkeys(name for job in values for name in job)
    rows = []
    for name in names:
        cells = [_plain(job.get(name)) for job in values]
        if len(set(cells)) > 1:
            rows.append((name, *cells))
    return _by_run(runs, rows, LEFT)


def results(runs: Sequence[RecordedRun]) -> Table:
    """The results of the runs side by side; speeds with their ratio to the first."""
    lines: dict[str, list[str]] = {"state": [run.outcome.state for run in runs]}
    metrics = [evaluations(run) for run in runs]
    for name in dict.fromkeys(name for by_name in metrics for name in by_name):
        lines[f"{name}, last evaluation"] = [
            format_number(m[name].ys[-1]) if m.get(name) else UNKNOWN for m in metrics
        ]
    lines["training loss, last epoch"] = [_number(run.summary.get("train_loss")) for run in runs]
    lines["steps"] = [count_of_steps(run) for run in runs]
    speeds = [run.summary.get("samples_per_s") for run in runs]
    lines["samples/s"] = [
        _number(speed) + (f" (× {speed / speeds[0]:.2f})" if place and speed and speeds[0] else "")
        for place, speed in enumerate(speeds)
    ]
    lines["time"] = [format_seconds(timeline_of(run).seconds) for run in runs]
    lines["sent by rank 0 in a step"] = [sent_per_step(run) or UNKNOWN for run in runs]
    lines["restarts"] = [str(sum(1 for _ in run.of("restart"))) for run in runs]
    digests = [str(run.summary.get("weights_sha256") or UNKNOWN) for run in runs]
    lines["weights, sha256"] = [
        digest if digest == UNKNOWN else f"{digest[:DIGEST_SHOWN]}…" for digest in digests
    ]
    return _by_run(runs, [(name, *cells) for name, cells in lines.items()])


def same_weights(runs: Sequence[RecordedRun]) -> list[str]:
    """The runs that ended with the same bits, a sentence for each group."""
    letters: dict[str, list[str]] = {}
    for number, run in enumerate(runs):
        digest = run.summary.get("weights_sha256")
        if digest:
            letters.setdefault(str(digest), []).append(letter_of(number))
    same = [f"{', '.join(group)} ended with the same weights, bit for bit."
            for group in letters.values() if len(group) > 1]  # fmt: skip
    return same or (["No two ended with the same bits."] if len(letters) > 1 else [])


def _by_run(runs: Sequence[RecordedRun], rows: list[tuple[str, ...]], kind: str = RIGHT) -> Table:
    head = ("", *(f"{letter_of(number)} {run.label}" for number, run in enumerate(runs)))
    return Table(head, tuple(rows), (LEFT, *[kind] * len(runs)))


def count_of_steps(run: RecordedRun) -> str:
    """The number of steps, and the planned number if the run ended earlier."""
    done = run.rows.steps[-1] if run.rows else run.summary.get("steps")
    if done is None:
        return UNKNOWN
    starts = run.of("training", 0)
    total = starts[-1].get("total_steps") if starts else None
    return f"{done:,}" if total in (None, done) else f"{done:,} of {total:,}"


def sent_per_step(run: RecordedRun) -> str:
    """The bytes of gradients and weights that rank 0 sent per step; "" if unknown."""
    sent_bytes = run.summary.get("sent_bytes")
    if not isinstance(sent_bytes, dict):
        return ""
    steps = int(run.summary["steps"]) - int(run.summary.get("resumed_from_step") or 0)
    return format_bytes(sent_bytes.get("gradients", 0) / max(steps, 1))


def placement(run: RecordedRun) -> Table:
    """The placement of each rank: host, coordinates on the mesh, device, bytes that it holds."""
    placements = {entry.rank: entry for entry in run.placements}
    axes, places = _mesh(run)
    rows = []
    for rank in run.speakers:
        totals = placements[rank].totals if rank in placements else ()
        devices = ", ".join(dict.fromkeys(total.device for total in totals)) or UNKNOWN
        size = placements[rank].all_bytes if rank in placements else None
        node = run.nodes.index(run.hosts[rank]) if rank in run.hosts else None
        rows.append(
            (
                str(rank),
                role_of(run, rank),
                run.hosts.get(rank, UNKNOWN),
                UNKNOWN if node is None else str(node),
                *(places.get(rank) or ("–",) * len(axes)),
                devices,
                UNKNOWN if size is None else format_bytes(size),
            )
        )
    head = ("rank", "role", "host", "node", *axes, "device", "tensors held")
    kinds = (RIGHT, LEFT, LEFT, RIGHT, *[RIGHT] * len(axes), LEFT, RIGHT)
    return Table(head, tuple(rows), kinds)


def computed_again(path: Path, events: Iterable[Event], summary: Mapping[str, Any]) -> Table:
    """What was computed twice, and whether it agreed: digests, audits and replays of a run.

    Steps count from 1. The chain of the digests is computed anew.
    """
    rows, digests = [], read_digests(path)
    if digests:
        broken = broken_link(digests.values())
        chain = "the chain holds" if broken is None else f"the chain breaks at step {broken:,}"
        steps = f"{min(digests):,} to {max(digests):,}"
        rows.append(("digests", steps, "", f"{counted(len(digests), 'row')}, {chain}"))
    for event in (e for e in events if e["event"] == "digest_differs"):
        now = f"other {', '.join(event['now'])} than before"
        rows.append(("made again", f"{event['step']:,}", "", now))
    if audits := summary.get("audits"):
        result = f"{counted(audits['shards'], 'shard')} computed again, {audits['differed']} differ"
        every = audits.get("every")  # a run of an older version has none
        often = f"; one every {counted(every, 'step')}" if every else ""
        rows.append(("audits", "", "", f"{result}{often}"))
    for event in (e for e in events if e["event"] == "audit"):
        is_named = event["wrong"] is not None
        where = f"{event['wrong']} on {event['host']}" if is_named else UNKNOWN
        differs = f"other {event['differs']}, first in {event['tensor'] or 'no result'}"
        rows.append(("alarm", f"{event['step'] + 1:,}", where, differs))
    for row in read_rows(path / REPLAYS):
        ranks = f"on {counted(row['ranks'], 'rank')}"
        rows.append(("replay", f"{row['step']:,}", ranks, _replayed(row)))
    return Table(("", "step", "rank", "result"), tuple(rows), (LEFT, RIGHT, LEFT, LEFT))


def _replayed(row: Mapping[str, Any]) -> str:
    """The verdict of a replay, in words."""
    if not row["differs"]:
        return "equal" if row["equal"] else "nothing to compare"
    if row["losses"] and not row["bitwise"]:
        return f"equal to rounding: losses differ by {row['worst_loss']:.1e} at most"
    first = row["differs"][0]
    return f"differs from step {first['step']:,} on: {', '.join(first['what'])}"


def role_of(run: RecordedRun, rank: int) -> str:
    """The role that a rank has written; a rank without one trains."""
    roles = [event["role"] for event in run.of("ready", rank) if event.get("role")]
    return str(roles[-1]) if roles else "script" if run.is_command else "trains"


def _mesh(run: RecordedRun) -> tuple[tuple[str, ...], dict[int, tuple[str, ...]]]:
    """The axes of the strategy, and the coordinates of each rank.

    Empty if unknown, or if all ranks hold the same.
    """
    if run.is_command or not run.job.get("strategy"):
        return (), {}
    try:
        mesh = strategy_spec(str(run.job["strategy"]), run.ranks).mesh
        places = {rank: tuple(map(str, mesh.place(rank))) for rank in range(run.ranks)}
    except (RequestError, ValueError, IndexError):  # a strategy of another version
        return (), {}
    if [name for name, _ in mesh.axes] == [REPLICATE]:
        return (), {}  # its place is its rank
    return tuple(f"axis {name}" for name, _ in mesh.axes), places


def environment(run: RecordedRun) -> Table:
    """The variables that the job recorded, redacted as it did."""
    started = run.of("started")
    variables = started[-1].get("environment", {}) if started else {}
    rows = tuple((name, str(value)) for name, value in variables.items())
    return Table(("variable", "value"), rows, (LEFT, LEFT))


def machine(run: RecordedRun) -> Table:
    """Versions and threads as the ranks recorded them; one row where all agree."""
    facts: dict[str, dict[str, list[int]]] = {}
    for rank in run.speakers:
        for event in run.of("ready", rank)[-1:]:
            for name, value in event.get("machine", {}).items():
                if value is not None:
                    facts.setdefault(name, {}).setdefault(_plain(value), []).append(rank)
    rows = []
    for name, values in facts.items():
        for value, ranks in values.items():
            whose = "" if len(values) == 1 else f" (rank {', '.join(map(str, ranks))})"
            rows.append((name, value + whose))
    return Table(("fact", "value"), tuple(rows), (LEFT, LEFT))


def chosen_values(run: RecordedRun) -> Table:
    """Every value that is not a default, with its source."""
    sources = run.job.get("source", {})
    values = values_of(run.job).items()
    if run.is_command:
        chosen = [
            (name, _plain(value))
            for name, value in values
            if name not in COMMAND_HEADING and value != COMMAND_DEFAULTS.get(name, "")
        ]
        return Table(("value", "is"), tuple(chosen), (LEFT, LEFT))
    rows = [
        (name, _plain(value), str(sources.get(name, "")))
        for name, value in values
        if sources.get(name, "default") != "default"
    ]
    return Table(("value", "is", "from"), tuple(rows), (LEFT, LEFT, LEFT))


def job_toml(run: RecordedRun) -> str:
    """The resolved job, without the sources of its values."""
    return write_toml({name: value for name, value in run.job.items() if name != "source"})


def command_again(run: RecordedRun) -> str:
    """The command that repeats the run; it names the job file if options are not enough."""
    sources = run.job.get("source", {})
    path = shlex.quote(str(run.path / "job.toml"))
    if run.is_command:
        verb = "run" if run.watched is None else "check"
        return f"allranks {verb} --ranks {run.ranks} -- {run.job.get('command', '')}"
    words = [shlex.quote(str(run.job["program"]))]
    for name, value in values_of(run.job).items():
        if name == "program" or sources.get(name, "default") == "default":
            continue
        if sources[name] != "command line" or value is False or value == HIDDEN:
            return f"allranks train --job {path}"
        words.append(_option(name, value))
    return " ".join(["allranks train", *words])


def _option(name: str, value: Any) -> str:
    text = "" if value == "" else _plain(value)
    if name.startswith("task."):
        return shlex.join(["--set", f"{name.removeprefix('task.')}={text}"])
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else shlex.join([flag, text])


def _plain(value: Any) -> str:
    if value in (None, ""):
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: Any) -> str:
    return UNKNOWN if value is None else format_number(float(value))
