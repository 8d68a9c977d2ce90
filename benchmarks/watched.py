"""What it costs a script to be watched by `allranks check -- …`: a step of it, and without.

    python benchmarks/watched.py

One rank trains a small and a middling model by DistributedDataParallel: watching sends no message
and costs work of each rank, which is not lost in waiting here. The same script, started in
the same way from one warm fork server, runs watched and not, in turns; the median step of a run
counts. The first steps, in which rows and generators are digested, are warm-up in both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
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
from allranks.launcher.scripts.run import run_command
from allranks.tools.script_check.rules.facts import watched_request

SCRIPT = Path(__file__).with_name("watched_script.py")
WIDTHS = {"small": 32, "middling": 512}
WAYS = ("watched", "plain")


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


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="pairs of runs of each model")
    rounds = parser.parse_args().rounds
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
