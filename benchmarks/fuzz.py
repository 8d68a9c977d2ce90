"""Random combinations, each held against one process in float64.

    python benchmarks/fuzz.py --combinations 1000 --seed 0

Model, strategy, options, ranks, optimizer, uneven batches, micro-batches, and a checkpoint that
another strategy takes up on other ranks are drawn (`fuzzing/draw.py`); the weights after six steps
are compared with those of `single`. A clear refusal is an answer: those are counted by their
reason. What differs or breaks is made smaller, and `--scripts FOLDER` gets a script that shows it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness import RECORDS, finish_record, say, start_record

ROOM = Path(__file__).resolve().parent / "fuzzing"
sys.path.insert(0, str(ROOM))

from draw import drawn  # noqa: E402
from hold import EQUAL, PROGRAM, REFUSED, held, script_of, shrunk  # noqa: E402

from allranks.catalog import preload_for  # noqa: E402
from allranks.launcher.processes.fork_server_client import ForkServer  # noqa: E402


def main() -> None:
    """Exit code 1 if anything differs or breaks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--combinations", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after that")
    parser.add_argument("--scripts", type=Path, help="a folder for scripts that show what fails")
    given = parser.parse_args()
    said = {
        name: value for name, value in vars(given).items() if name not in ("scripts", "seconds")
    }
    record = start_record("fuzz", said)
    with ForkServer(preload_for(PROGRAM, "torch")) as server:
        record |= fuzz(given, server)
    finish_record(record, [], RECORDS)
    sys.exit(1 if record["failed"] else 0)


def fuzz(given: argparse.Namespace, server: ForkServer) -> dict[str, Any]:
    """What became of all of them."""
    verdicts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    by_strategy: Counter[str] = Counter()
    failed: list[dict[str, Any]] = []
    largest, until = 0.0, time.monotonic() + given.seconds
    for number in range(given.first, given.first + given.combinations):
        if time.monotonic() > until:
            break
        one = drawn(given.seed, number)
        verdict = held(one, server)
        verdicts[verdict.what] += 1
        if verdict.what == EQUAL:
            largest = max(largest, verdict.difference)
            by_strategy.update({leg.strategy.partition(":")[0] for leg in one.legs})
        elif verdict.what == REFUSED:
            refusals[verdict.why] += 1
        else:
            say(f"{number}: {verdict.what}: {one}: {verdict.why}")
            least, found = shrunk(one, verdict, server)
            say(f"    {least}: {found.why} {found.difference:.3g}")
            failed.append({"number": number, "combination": str(least), "why": found.why})
            if given.scripts is not None:
                given.scripts.mkdir(parents=True, exist_ok=True)
                script = given.scripts / f"fuzz_{given.seed}_{number}.py"
                script.write_text(script_of(least, found))
        if sum(verdicts.values()) % 50 == 0:
            say(f"{sum(verdicts.values())}: {dict(verdicts)}")
    return {
        "verdicts": dict(verdicts),
        "equal_by_strategy": dict(by_strategy),
        "refusals": dict(refusals.most_common()),
        "largest_difference": largest,
        "failed": failed,
    }


if __name__ == "__main__":
    main()
