"""Four ranks of unequal speed: what `--share auto` makes of them.

    python benchmarks/share.py

Ranks sleep so long for each sample (`--inject slow`) that their speeds are as 1 : 1 : 1/2 : 1/4,
and two cores are enough for four ranks. The ideal is the sum of their speeds, as if samples could
be dealt in any fraction and nothing else took time. Contenders, in turn:

    equal       even shares
    auto        `--share auto`; after how many steps the last new table came (`settled`)
    becomes     the same, and rank 1 becomes four times slower at step `SINCE`
    was slow    `auto`, and rank 1 is so slow from the first step on

Of a run the median step counts: of `equal` after the first few, of `auto` and `was slow` after
20 steps, of `becomes` from 20 steps after the change. Then, in one process, a step with 64 shards
beside one with 8: an MLP, and a CNN with BatchNorm and dropout.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import RECORDS, Comparison, finish_record, order_of, ratio, say, start_record

from allranks.job.run_folder import read_events

HERE = Path(__file__).resolve().parent
LIMIT_S = 300
PER_SAMPLE_S = 0.001
SLOWNESS = (1, 1, 2, 4)
SLOW = 4  # how much slower rank 1 becomes
BATCH = 256
SINCE, SETTLES = 24, 20
STEPS = {"equal": 16, "auto": 60, "becomes": SINCE + SETTLES + 20, "was slow": SETTLES + 20}
COUNTED_FROM = {"equal": 4, "auto": SETTLES, "becomes": SINCE + SETTLES, "was slow": SETTLES}
BAR_OF_IDEAL, BAR_AFTER_CHANGE, BAR_FINE = 1 / 0.9, 1.05, 1.02


@dataclass(frozen=True)
class Run:
    """One training: the median step, when its shares last changed, and the shares at the end."""

    contender: str
    step_s: float
    settled: int
    shares: tuple[int, ...] | None


def ideal_s(slowness: tuple[int, ...]) -> float:
    """The seconds of a step if all ranks worked all the time, at the sum of their speeds."""
    return BATCH * PER_SAMPLE_S / sum(1 / times for times in slowness)


def run(contender: str, folder: Path) -> Run:
    """One training of a contender."""
    faults = [
        f"slow@rank={rank},per_sample={PER_SAMPLE_S * times}" for rank, times in enumerate(SLOWNESS)
    ]
    more = f"slow@rank=1,per_sample={PER_SAMPLE_S * (SLOW - 1)}"
    faults += {"becomes": [f"{more},since={SINCE}"], "was slow": [more]}.get(contender, [])
    with tempfile.TemporaryDirectory(prefix="benchmark-share-", dir=folder) as name:
        notes, run_dir = Path(name, "times.json"), Path(name, "run")
        command = [_tool("allranks"), "train", str(HERE / "share_task.py"), "--strategy", "ddp"]
        command += ["--ranks", str(len(SLOWNESS)), "--steps", str(STEPS[contender])]
        command += ["--set", f"notes={notes}", "--run-dir", str(run_dir), "--threads", "1"]
        command += [word for fault in faults for word in ("--inject", fault)]
        command += [] if contender == "equal" else ["--share", "auto"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        times = json.loads(notes.read_text())
        tables = [event for event in read_events(run_dir) if event["event"] == "shares"]
    steps = [after - before for before, after in pairwise(times)]
    last = tables[-1] if tables else {"step": 0, "shares": None}
    shares = None if last["shares"] is None else tuple(last["shares"])
    step_s = statistics.median(steps[COUNTED_FROM[contender] :])
    return Run(contender, step_s, last["step"], shares)


def fine(model: str, pairs: int) -> list[tuple[float, float]]:
    """Seconds of a step with 64 shards and with 8, in one process."""
    command = [sys.executable, str(HERE / "share_task.py"), model, str(pairs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    return [(first, second) for first, second in json.loads(done.stdout.splitlines()[-1])]


def _tool(name: str) -> str:
    """The command `name` of the environment that runs this script."""
    path = shutil.which(name, path=str(Path(sys.executable).parent))
    if path is None:
        raise SystemExit(f"no command {name!r} beside this python")
    return path


def compared(rounds: list[dict[str, Run]]) -> list[Comparison]:
    """The contenders beside the ideal, and beside each other."""
    what = f"4 ranks, speeds as {' : '.join(f'1/{times}' for times in SLOWNESS)}"
    slow = (1, SLOW, *SLOWNESS[2:])
    ideal, after = ideal_s(SLOWNESS), ideal_s(slow)

    def beside(of: str, over: str, bar: float | None) -> Comparison:
        pairs = [(runs[of].step_s, runs[over].step_s) for runs in rounds]
        return ratio(what, "step_s", of, over, pairs, bar)

    settled = [(float(runs["auto"].settled), 1.0) for runs in rounds]
    again = [(float(runs["becomes"].settled - SINCE), 1.0) for runs in rounds]
    of_ideal = [(runs["auto"].step_s, ideal) for runs in rounds]
    of_after = [(runs["becomes"].step_s, after) for runs in rounds]
    even = [(runs["equal"].step_s, ideal) for runs in rounds]
    return [
        ratio(what, "step_s", "auto", "ideal", of_ideal, BAR_OF_IDEAL),
        ratio(what, "step_s", "equal", "ideal", even, None),
        beside("auto", "equal", None),
        ratio(what, "steps until settled", "auto", "1", settled, SETTLES),
        beside("becomes", "was slow", BAR_AFTER_CHANGE),
        ratio(f"{what}, then rank 1 as 1/{SLOW}", "step_s", "becomes", "ideal", of_after, None),
        ratio(what, "steps until settled after the change", "becomes", "1", again, SETTLES),
    ]


def main() -> None:
    """Measure, write the record, print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=400, help="of steps with 64 and 8 shards")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="of the run folders")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    asked = parser.parse_args()
    settings: dict[str, Any] = {"per_sample_s": PER_SAMPLE_S, "slowness": SLOWNESS, "slow": SLOW}
    settings |= {"batch": BATCH, "since": SINCE, "steps": STEPS, "ideal_s": ideal_s(SLOWNESS)}
    record = start_record("share", {**settings, "rounds": asked.rounds, "pairs": asked.pairs})
    rounds: list[dict[str, Run]] = []
    for turn in range(asked.rounds):
        runs = [run(contender, asked.folder) for contender in order_of(list(STEPS), turn)]
        rounds.append({each.contender: each for each in runs})
        for each in runs:
            say(f"{each.contender:>9} {each.step_s * 1e3:7.1f} ms  {each.settled:3} {each.shares}")
    comparisons = compared(rounds)
    pairs = {model: fine(model, asked.pairs) for model in ("MLP", "CNN")}
    comparisons += [
        ratio(f"{model}, one process", "step_s", "64 shards", "8 shards", of_model, BAR_FINE)
        for model, of_model in pairs.items()
    ]
    by_contender = {name: [runs[name] for runs in rounds] for name in STEPS}
    record["rows"] = [
        {"what": "4 ranks", "contender": name, "step_s": statistics.median(r.step_s for r in each)}
        for name, each in by_contender.items()
    ]
    record["samples"] = {name: [asdict(r) for r in each] for name, each in by_contender.items()}
    finish_record(record, comparisons, asked.records)


if __name__ == "__main__":
    main()
