"""Strategies on 4 ranks of this machine: over memory that they share beside Gloo.

    python benchmarks/backends.py
    python benchmarks/backends.py --strategy fsdp --rounds 5

Our Trainer in two sets of processes, one for each backend, whose loops take turns in blocks of
steps (`turns.py`): the same tasks, and the same losses before anything is timed. Equal bits on any
number of ranks (`ddp:reduce=tree`) stand beside the plain sum, too, each over shared memory.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from pathlib import Path
from typing import Any

from harness import RECORDS, Comparison, finish_record, order_of, ratio, say, start_record
from ranks import start_ranks
from turns import Meeting, RankSet, slowest

RANKS = 4
TURN_S = 0.3  # of steps, of each loop in each round
CHECKED_STEPS, TOLERANCE = 4, 1e-3
BAR = 1 / 1.3  # of the time over Gloo
BITS_BAR = 1.05  # of the time of a plain sum
SHARED, GLOO = "shared_memory", "gloo"
SETTINGS = (  # (workload, strategy), and whether the bar is its own
    ("small CNN", "ddp", False),
    ("small CNN", "ddp:reduce=tree", False),
    ("gradient-heavy AdamW", "ddp", False),
    ("gradient-heavy AdamW", "zero2", False),
    ("gradient-heavy AdamW", "fsdp", True),
    ("gradient-heavy AdamW", "tensor", True),
    ("17 M MLP", "1f1b", True),
)


def _rank(rank: int, *arguments: Any) -> None:
    """In a rank's process: this imports torch, which the command itself never does."""
    from backends_rank import serve  # noqa: PLC0415

    serve(rank, *arguments)


def start(meeting: Meeting, backend: str) -> RankSet:
    """The ranks that talk over one backend."""
    arguments = (RANKS, meeting.address, str(meeting.folder / f"store-{backend}"), backend)
    started = start_ranks(RANKS, _rank, arguments, ["backends_rank"])
    return meeting.wait_for(backend, started, RANKS)


def measure(sets: dict[str, RankSet], number: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of one setting over each backend, for each round."""
    workload, strategy, _ = SETTINGS[number]
    first: list[list[float]] = []
    for there in sets.values():
        there.ask("make", number, workload, strategy)
        first.append(there.ask("losses", number, CHECKED_STEPS)[0])
    if not all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(*first, strict=True)):
        raise SystemExit(f"{strategy}: the losses over the backends differ: {first}")
    steps = {name: _steps(there, number) for name, there in sets.items()}
    found: dict[str, list[float]] = {name: [] for name in sets}
    for turn in range(rounds):
        for name in order_of(list(sets), turn):
            found[name] += slowest(sets[name].ask("time", number, steps[name]))
    medians = "  ".join(f"{name} {statistics.median(s) * 1e3:.2f}" for name, s in found.items())
    say(f"{workload}, {strategy}, ms of a step: {medians}")
    return found


def _steps(there: RankSet, number: int) -> int:
    """How many steps take about as long as a turn."""
    return max(1, round(TURN_S / min(slowest(there.ask("time", number, 2))[0] for _ in range(3))))


def main() -> None:
    """Measure, write the record, print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--strategy", default="", help="only those whose name begins so")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    asked = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    record = start_record("backends", {"rounds": asked.rounds, "turn_s": TURN_S, "ranks": RANKS})
    samples: dict[str, dict[str, list[float]]] = {}
    comparisons: list[Comparison] = []
    with Meeting() as meeting:
        sets = {backend: start(meeting, backend) for backend in (SHARED, GLOO)}
        for number, (workload, strategy, has_bar) in enumerate(SETTINGS):
            if not strategy.startswith(asked.strategy):
                continue
            what = f"{workload}, {strategy}"
            found = samples[what] = measure(sets, number, asked.rounds)
            pairs = list(zip(found[SHARED], found[GLOO], strict=True))
            bar = BAR if has_bar else None
            comparisons.append(ratio(what, "step_us", SHARED, GLOO, pairs, bar))
    plain, tree = (samples.get(f"small CNN, {name}") for name in ("ddp", "ddp:reduce=tree"))
    if plain and tree:
        pairs = list(zip(tree[SHARED], plain[SHARED], strict=True))
        comparisons.append(ratio("small CNN", "step_us", "equal bits", "ddp", pairs, BITS_BAR))
    record["samples"] = samples
    finish_record(record, comparisons, asked.records)


if __name__ == "__main__":
    main()
