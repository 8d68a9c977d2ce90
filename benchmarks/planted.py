"""Thirty planted faults, and random correct combinations: is what `check` says of them right?

    python benchmarks/planted.py
    python benchmarks/planted.py --alarms 300

The faults are those of tests/planted_faults.py, most of them met in public issues; each is planted
in a copy of the engine, or is one of a task. Counted is how many are found, how many at the right
step and tensor, and how many with the right cause, confirmed. With `--alarms` combinations are
drawn as for fuzz.py, and of those that are not refused it counts which are not `equal`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness import RECORDS, finish_record, say, start_record

ROOT = Path(__file__).resolve().parents[1]
ROOMS = [str(ROOT / "tests" / "tasks"), str(Path(__file__).resolve().parent / "fuzzing")]
sys.path[:0] = ROOMS

from draw import Combination, drawn  # noqa: E402
from hold import PROGRAM, is_sound  # noqa: E402

from allranks.errors import AllranksError, Interrupted, RequestError, Stopped  # noqa: E402
from allranks.job.config import resolve  # noqa: E402
from allranks.job.engines import preload_for  # noqa: E402
from allranks.launcher.processes.fork_server_client import ForkServer  # noqa: E402
from allranks.tools.check.against_single import CheckPlan  # noqa: E402
from allranks.tools.check.check import checked_in  # noqa: E402
from launch_host import Host  # noqa: E402
from planted_faults import PLANTED, Planted  # noqa: E402
from test_planted_faults import check_in_a_copy  # noqa: E402

FOUND, PLACED, EXPLAINED = 28, 27, 25
"""The bars, of 30: found, at the right step and tensor, with the right cause."""
STEPS = 3
EQUAL, ALARM, REFUSED, BROKEN = "equal", "alarm", "refused", "broken"
UNDECIDED = "undecided"  # its card promises no setting at which it is exact: the drift is told


def main() -> None:
    """Exit code 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults with these words in their name")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--faults", type=int, default=len(PLANTED), help="so many of them")
    parser.add_argument("--alarms", type=int, default=0, help="so many combinations, no faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after that")
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([*ROOMS, *filter(None, [os.getenv("PYTHONPATH")])])
    if given.alarms:
        record = start_record("alarms", {"combinations": given.alarms, "seed": given.seed})
        record |= alarms(given)
        is_met = not record["alarms"]
    else:
        said = {"only": given.only, "first": given.first, "faults": given.faults}
        record = start_record("planted", said)
        record |= faults(given)
        is_met = all(record[name] >= bar for name, bar in record["bars"].items())
    finish_record(record, [], RECORDS)
    sys.exit(0 if is_met else 1)


# --- faults -----------------------------------------------------------------------------------


def faults(given: argparse.Namespace) -> dict[str, Any]:
    """What became of each, and how many there are of each kind."""
    host, rows = Host(), []
    chosen = [*PLANTED.items()][given.first : given.first + given.faults]
    try:
        for name, planted in chosen:
            if given.only in name:
                rows.append(row_of(name, planted, host))
                say(told(rows[-1]))
    finally:
        host.close()
    counts = {key: sum(row[key] for row in rows) for key in ("found", "placed", "explained")}
    bars = {"found": FOUND, "placed": PLACED, "explained": EXPLAINED}
    bars = bars if len(rows) == len(PLANTED) else {}
    sourced = sum(bool(row["source"]) for row in rows)
    return {**counts, "of": len(rows), "from_public_issues": sourced, "bars": bars, "faults": rows}


def row_of(name: str, planted: Planted, host: Host) -> dict[str, Any]:
    """One fault: what was to be said, and what was said."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            _, found, _ = check_in_a_copy(host, Path(folder), planted.fault)
        except AssertionError as error:  # the check ended without a verdict
            say(f"{name}: {error}")
            found = {"equal": True, "first_difference": None, "cause": None}
    first, cause = found["first_difference"], found["cause"]
    fault = planted.fault
    there = None if first is None else [first["step"], first["stage"], first["tensor"]]
    return {
        "name": name,
        "source": planted.source,
        "found": not found["equal"],
        "placed": there == [fault.step, fault.stage, fault.tensor],
        "explained": cause is not None and cause["name"] == planted.cause,
        "where": there,
        "cause": None if cause is None else cause["name"],
        "says": None if cause is None else cause["says"],
        "left_after_repair": None if cause is None else cause["evidence"]["left_after_repair"],
        "or_else": [] if cause is None else cause["or_else"],
        "wanted": {"where": [fault.step, fault.stage, fault.tensor], "cause": planted.cause},
        "seconds": round(time.monotonic() - begun, 1),
    }


def told(row: dict[str, Any]) -> str:
    """A row for people."""
    marks = "".join("x" if row[key] else "-" for key in ("found", "placed", "explained"))
    said = f"{row['where']}, {row['cause']}: {row['says']}"
    return f"{marks} {row['name']}: {said} ({row['seconds']} s)"


# --- false alarms -----------------------------------------------------------------------------


def alarms(given: argparse.Namespace) -> dict[str, Any]:
    """What `check` says of correct combinations; those that are refused do not count."""
    verdicts: Counter[str] = Counter()
    by_strategy: Counter[str] = Counter()
    wrong, largest, number = [], 0.0, given.first
    until = time.monotonic() + given.seconds
    with ForkServer(preload_for(PROGRAM, "torch")) as server:
        while verdicts[EQUAL] + verdicts[ALARM] < given.alarms and time.monotonic() < until:
            one = drawn(given.seed, number)
            number += 1
            if not is_sound(one):
                continue
            what, words, size = checked(one, server)
            verdicts[what] += 1
            if what in (ALARM, BROKEN):
                say(f"{number - 1}: {what}: {one}\n{words}")
                wrong.append({"number": number - 1, "combination": str(one), "says": words})
            elif what == EQUAL:
                largest = max(largest, size)
                by_strategy[one.legs[0].strategy.partition(":")[0]] += 1
            if number % 20 == 0:
                say(f"{number}: {dict(verdicts)}")
    return {
        "verdicts": dict(verdicts),
        "checked": verdicts[EQUAL] + verdicts[ALARM],
        "alarms": verdicts[ALARM],
        "largest_difference": largest,
        "equal_by_strategy": dict(by_strategy),
        "wrong": wrong,
    }


def checked(one: Combination, server: ForkServer) -> tuple[str, str, float]:
    """The verdict on the first leg of a combination, in words, and the largest difference."""
    leg = one.legs[0]
    flags = {"precision": "fp64", "threads": 1, **one.flags, "steps": STEPS}
    flags |= {"strategy": leg.strategy, "ranks": leg.ranks}
    settings = tuple(f"{name}={value}" for name, value in one.settings.items())
    shards = int(one.settings.get("shards", 8))
    plan = CheckPlan((leg.ranks,), leg.ranks, shards)
    with tempfile.TemporaryDirectory() as folder:
        try:
            verdict = checked_in(Path(folder), resolve(PROGRAM, flags, settings), server, plan)
        except RequestError as error:
            return REFUSED, error.why, 0.0
        except (Stopped, Interrupted):
            raise
        except AllranksError as error:
            return BROKEN, str(error).partition("\n")[0], 0.0
    if verdict.equal is None:
        return UNDECIDED, "", 0.0
    if verdict.equal:
        return EQUAL, "", verdict.deciding.comparison.largest
    return ALARM, str(verdict), 0.0


if __name__ == "__main__":
    main()
