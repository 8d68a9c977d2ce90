"""What the witness costs: `allranks train` with `--witness warn` beside `--witness off`.

    python benchmarks/witness.py

Runs of 1,000 steps in turns, each a command of its own: `digits` (a step of less than a
millisecond, of which the witness takes the largest share) and a small GPT, on one rank and on two.
The time is that of the loop, from its first step to its last: the two steps that are looked at
closely and the shards that are computed again are in it. Samples per second are what a run itself
reports. The bar is 1 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import RECORDS, finish_record, order_of, ratio, say, start_record

HERE = Path(__file__).resolve().parent
BAR = 1.01
STEPS = 1000
LIMIT_S = 300
WORKLOADS = {
    "digits": ["digits"],
    "small GPT": [
        "text",
        *("--set", f"path={HERE.parent / 'README.md'}"),
        *("--set", "width=64", "--set", "layers=2", "--set", "heads=2", "--set", "context=64"),
        *("--set", "batch_size=16"),
    ],
}
KINDS = ("warn", "off")


def seconds_per_sample(workload: str, ranks: int, witness: str) -> float:
    """One run, and what it says of its speed."""
    with tempfile.TemporaryDirectory(prefix="benchmark-witness-") as folder:
        words = ["--ranks", str(ranks), "--steps", str(STEPS), "--witness", witness, "--json"]
        command = [sys.executable, "-m", "allranks.cli.main", "train", *WORKLOADS[workload]]
        done = subprocess.run(
            [*command, *words, "--run-dir", f"{folder}/run"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(done.args)} ended with {done.returncode}:\n{done.stderr}")
    return 1.0 / float(json.loads(done.stdout.splitlines()[-1])["samples_per_s"])


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=15, help="pairs of runs for each case")
    parser.add_argument("--workload", default="", help="only this one, by the start of its name")
    asked = parser.parse_args()
    pairs = asked.pairs
    record = start_record("witness", {"steps": STEPS, "pairs": pairs})
    comparisons, samples = [], {}
    for workload in (name for name in WORKLOADS if name.startswith(asked.workload)):
        for ranks in (1, 2):
            what = f"{workload}, {ranks} rank{'s' * (ranks > 1)}"
            found: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for turn in range(pairs):
                for kind in order_of(list(KINDS), turn):
                    found[kind].append(seconds_per_sample(workload, ranks, kind))
                say(f"{what}: pair {turn + 1} of {pairs}")
            samples[what] = found
            both = list(zip(found["warn"], found["off"], strict=True))
            comparisons.append(ratio(what, "seconds_per_sample", "warn", "off", both, BAR))
    record["samples"] = samples
    finish_record(record, comparisons, RECORDS)


if __name__ == "__main__":
    main()
