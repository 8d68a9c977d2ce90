"""Two processes of one thread beside one process of two threads, at an equal global batch.

    python benchmarks/two_processes.py
    python benchmarks/two_processes.py --workload GPT --rounds 5

Five models of `workloads.py`. The loops of a model take turns in blocks of steps (`turns.py`): our
Trainer with `ddp` on 2 ranks, over shared memory and over Gloo; torch's DistributedDataParallel on
both; our Trainer, and a loop written by hand, in one process with 2 threads. All log the mean loss
over the global batch; before anything is timed the first losses agree (those with BatchNorm need
not: its statistics are over a rank's samples).

`apart` are two processes that train the same without a word to each other: what no communication
can beat. After the timed rounds one block of each loop is taken apart: time of a step in forward
passes, in the update, and in the rest, which is backward with what is communicated.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import RECORDS, Comparison, finish_record, order_of, ratio, say, start_record
from ranks import start_ranks
from turns import Meeting, RankSet

BAR = 1 / 1.15  # of the time of one process
TURN_S = 0.2  # of steps, of each loop in each round
CHECKED_STEPS = 5
TOLERANCE = 1e-3  # of a loss, float32, after a few steps
GLOO, SHARED = "gloo", "shared_memory"
WORKLOADS = {  # name: has BatchNorm
    "small MLP": False,
    "wide MLP": False,
    "small CNN": True,
    "ResNet-20": True,
    "GPT": False,
}
OURS, ALONE = "allranks, 2 ranks", "allranks, 1 process"
BY_HAND, APART = "by hand, 1 process", "apart, 2 processes"
COMPARED = (
    (OURS, ALONE, BAR),
    (OURS, BY_HAND, None),
    ("allranks on Gloo, 2 ranks", ALONE, None),
    ("DDP on Gloo, 2 ranks", BY_HAND, None),
    (OURS, "DDP on Gloo, 2 ranks", None),
    ("DDP on shared memory, 2 ranks", BY_HAND, None),
    (OURS, APART, None),
    (APART, BY_HAND, None),
)


@dataclass(frozen=True)
class Processes:
    """A set of processes: how many, with how many threads each, and the loops they have."""

    ranks: int
    threads: int
    backend: str
    loops: dict[str, str]  # the name in the record: what the processes call it


SETS = (
    Processes(2, 1, SHARED, {OURS: "allranks", "DDP on shared memory, 2 ranks": "DDP"}),
    Processes(
        *(2, 1, GLOO),
        {
            "allranks on Gloo, 2 ranks": "allranks",
            "DDP on Gloo, 2 ranks": "DDP",
            APART: "apart",
        },
    ),
    Processes(1, 2, "", {ALONE: "allranks", BY_HAND: "by hand"}),
)


@dataclass
class Measured:
    """Of one loop: seconds of a step on the slowest rank, and processors in use, for each round."""

    step_s: list[float]
    processors: list[float]
    stages: list[dict[str, float]]  # of each rank


def start(meeting: Meeting, number: int, processes: Processes) -> RankSet:
    """The processes of one set, without loops."""
    store = str(meeting.folder / f"store-{number}")
    arguments = (processes.ranks, processes.threads, meeting.address, store, processes.backend)
    started = start_ranks(processes.ranks, _rank, arguments, ["two_processes_rank"])
    return meeting.wait_for(processes.backend or "one process", started, processes.ranks)


def _rank(rank: int, *arguments: Any) -> None:
    """In a rank's process: this imports torch, which the command itself never does."""
    from two_processes_rank import serve  # noqa: PLC0415

    serve(rank, *arguments)


def measure(sets: list[RankSet], workload: str, rounds: int) -> dict[str, Measured]:
    """Every loop's steps in `rounds` rounds."""
    places: dict[str, tuple[RankSet, str]] = {}
    for there, processes in zip(sets, SETS, strict=True):
        there.ask("make", workload, list(processes.loops.values()))
        places |= {name: (there, called) for name, called in processes.loops.items()}
    _check(places, workload)
    steps = {name: _steps(*place) for name, place in places.items()}
    found = {name: Measured([], [], []) for name in places}
    for turn in range(rounds):
        for name in order_of(list(places), turn):
            there, called = places[name]
            answers = there.ask("time", called, steps[name])
            step_s = max(seconds for seconds, _ in answers)
            found[name].step_s.append(step_s)
            found[name].processors.append(sum(busy for _, busy in answers) / step_s)
    for name, (there, called) in places.items():
        found[name].stages = there.ask("stages", called, steps[name])
    say(
        f"{workload}, ms of a step: "
        + "  ".join(f"{name} {statistics.median(found[name].step_s) * 1e3:.2f}" for name in found)
    )
    return found


def _steps(there: RankSet, called: str) -> int:
    """How many steps take about as long as a turn."""
    tries = [there.ask("time", called, 2) for _ in range(3)]
    least_s = min(max(seconds for seconds, _ in answers) for answers in tries)
    return max(1, round(TURN_S / least_s))


def _check(places: dict[str, tuple[RankSet, str]], workload: str) -> None:
    """The first losses of all agree, so all train the same thing; `apart` has a rank's own."""
    expected: list[float] = []
    for name, (there, called) in places.items():
        losses = there.ask("losses", called, CHECKED_STEPS)[0]
        if name == APART or WORKLOADS[workload]:
            continue
        expected = expected or losses
        if not all(
            math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(losses, expected, strict=True)
        ):
            raise SystemExit(f"{workload}: {name} logs {losses}, the first of all {expected}")


def compare(workload: str, found: dict[str, Measured]) -> list[Comparison]:
    """What `COMPARED` names, as ratios of the time of a step."""
    return [
        ratio(
            *(workload, "step_us", of, over),
            list(zip(found[of].step_s, found[over].step_s, strict=True)),
            bar,
        )
        for of, over, bar in COMPARED
    ]


def rows(workload: str, found: dict[str, Measured]) -> list[dict[str, Any]]:
    """For each loop the median step, processors in use, and the stages of its slower rank."""
    return [
        {
            "what": workload,
            "contender": name,
            "step_us": statistics.median(one.step_s) * 1e6,
            "processors": statistics.median(one.processors),
            **{
                f"{stage}_us": max(rank[f"{stage}_us"] for rank in one.stages)
                for stage in ("forward", "rest", "update")
            },
        }
        for name, one in found.items()
    ]


def main() -> None:
    """Measure, write the record, print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--workload", default="", help="only those whose name begins so")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    asked = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    record = start_record("two_processes", {"rounds": asked.rounds, "turn_s": TURN_S})
    record["rows"], record["samples"] = [], {}
    comparisons: list[Comparison] = []
    with Meeting() as meeting:
        sets = [start(meeting, number, processes) for number, processes in enumerate(SETS)]
        for workload in WORKLOADS:
            if workload.startswith(asked.workload):
                found = measure(sets, workload, asked.rounds)
                record["rows"] += rows(workload, found)
                record["samples"][workload] = {name: vars(one) for name, one in found.items()}
                comparisons += compare(workload, found)
    finish_record(record, comparisons, asked.records)


if __name__ == "__main__":
    main()
