"""What it costs a script to be watched by `allranks check -- …`: a step of it, and without.

    python benchmarks/watched.py
    python benchmarks/watched.py --against    two scripts side by side, and the slower one alone

One rank trains a small and a middling model by DistributedDataParallel: watching sends no message
and costs work of each rank, which is not lost in waiting here. The same script, started in
the same way from one warm fork server, runs watched and not, in turns; the median step of a run
counts. The first steps, in which rows and generators are digested, are warm-up in both.

With `--against`, whole runs are timed, from one process to the next and with the start of their
fork servers: `check --against` of a script with itself, on one rank each and on one and two ranks,
and each of the two commands alone, as by `allranks run`; the slower one counts. On two cores, two
processes are fair to the comparison; three share what two had.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from harness import (
    RECORDS,
    Comparison,
    difference_us,
    finish_record,
    order_of,
    ratio,
    say,
    start_record,
)

from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.scripts.plan import WARM, CommandRequest
from allranks.launcher.scripts.run import CommandWatcher, run_command, run_side_by_side
from allranks.tools.check.against_single import STEPS
from allranks.tools.script_check.rules.against import RecordedScript, StepComparison
from allranks.tools.script_check.rules.facts import FACTS, watched_request

SCRIPT = Path(__file__).with_name("watched_script.py")
WIDTHS = {"small": 32, "middling": 512}
WAYS = ("watched", "plain")
LARGE = 1536
SIDES = {"1 rank and 1": (1, 1), "2 ranks and 1": (2, 1)}


def seconds_of_a_step(server: ForkServer, way: str, width: int) -> float:
    """The median step of one run."""
    with tempfile.TemporaryDirectory(prefix="benchmark-watched-") as folder:
        steps = os.path.join(folder, "steps.json")
        command = (sys.executable, "-u", str(SCRIPT), str(width), steps)
        run_dir = os.path.join(folder, "run")
        request = CommandRequest(command, 1, warm="torch", shown="none", run_dir=run_dir)
        if way == "watched":
            request = watched_request(request, run_dir, os.environ)
        run_command(request, server)
        seconds: list[float] = json.loads(Path(steps).read_text())
    return statistics.median(seconds)


def seconds_of_runs(ranks: tuple[int, ...], *, is_against: bool) -> float:
    """The wall time of two commands side by side, recorded and compared; or of one alone."""
    with tempfile.TemporaryDirectory(prefix="benchmark-against-") as folder:
        sides = []
        for at, count in enumerate(ranks):
            command = (sys.executable, "-u", str(SCRIPT), str(LARGE), os.path.join(folder, "steps"))
            run_dir = os.path.join(folder, f"run-{at}")
            request = CommandRequest(command, count, warm="torch", shown="none", run_dir=run_dir)
            if is_against:
                request = watched_request(request, run_dir, os.environ, STEPS)
            sides.append((request, CommandWatcher()))
        begun = time.perf_counter()
        run_side_by_side(sides)
        if is_against:
            scripts = [RecordedScript(Path(r.run_dir, FACTS), "") for r, _ in sides]
            StepComparison(scripts[1], scripts[0])
        return time.perf_counter() - begun


def measure_against(rounds: int) -> None:
    """Measure `check --against`, and write the record."""
    record = start_record("side-by-side", {"sides": SIDES, "width": LARGE, "rounds": rounds})
    comparisons = []
    record["samples"] = {}
    for name, ranks in SIDES.items():
        both: list[float] = []
        slower: list[float] = []
        for turn in range(rounds):
            for way in order_of(["both", "alone"], turn):
                if way == "both":
                    both.append(seconds_of_runs(ranks, is_against=True))
                else:
                    alone = [seconds_of_runs((count,), is_against=False) for count in {*ranks}]
                    slower.append(max(alone))
            say(f"{name}: round {turn + 1} of {rounds}")
        record["samples"][name] = {"against": both, "slower alone": slower}
        pairs = list(zip(both, slower, strict=True))
        comparisons.append(ratio(name, "run_s", "against", "slower alone", pairs, 1.3))
    finish_record(record, comparisons, RECORDS)


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="pairs of runs of each model")
    parser.add_argument("--against", action="store_true", help="two scripts side by side")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    if arguments.against:
        measure_against(rounds)
        return
    record = start_record("watched", {"ranks": 1, "widths": WIDTHS, "rounds": rounds})
    found: dict[str, list[float]] = {f"{way} {model}": [] for model in WIDTHS for way in WAYS}
    with ForkServer(WARM["torch"]) as server:
        for turn in range(rounds):
            for model, width in WIDTHS.items():
                for way in order_of(list(WAYS), turn):
                    found[f"{way} {model}"].append(seconds_of_a_step(server, way, width))
            say(f"round {turn + 1} of {rounds}")
    comparisons: list[Comparison] = []
    for model in WIDTHS:
        watched, plain = (f"{way} {model}" for way in WAYS)
        pairs = list(zip(found[watched], found[plain], strict=True))
        comparisons.append(ratio(model, "step_s", watched, plain, pairs, None))
        comparisons.append(difference_us(model, "step_s", watched, plain, pairs, None))
    record["samples"] = found
    finish_record(record, comparisons, RECORDS)


if __name__ == "__main__":
    main()
