"""Samples per second of a Keras training, and the start of four workers: ours beside others.

    python benchmarks/tensorflow.py            both
    python benchmarks/tensorflow.py --part loops
    python benchmarks/tensorflow.py --part start

`loops`: our Trainer beside `fit` of Keras and a loop written by hand (`on_keras/loops.py` says what
each does) on one device and on two under MirroredStrategy, with 1 and with 10 steps per call of
TensorFlow: a tiny MLP, the CNN of `digits-keras`, and a larger CNN. Where there is one processor
the two devices are logical ones that share its cores. Every loop is a process of its own, forked
from one that has imported TensorFlow: two MirroredStrategies in one process disturb each other's
sums. They take turns, so only one computes at a time. Before anything is timed their first losses
must agree. `fit` with 10 steps per call fails under MirroredStrategy on CPUs,
so it is not in that row.

`start`: cold, from the command to the end of the first step, and to the end of the command, of four
workers under MultiWorkerMirroredStrategy: `allranks train` beside four plain processes, each with a
TF_CONFIG, whose loop is written by hand. Both train the same small model for two steps.

The name of this file is that of a package, so it is out of the way of whoever imports that: as a
module it raises ImportError.
"""

from __future__ import annotations

if __name__ == "tensorflow":
    raise ImportError("benchmarks/tensorflow.py is a script, not the package tensorflow")

import argparse
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from harness import RECORDS, Comparison, finish_record, order_of, ratio, say, start_record
from ranks import start_ranks

HERE = Path(__file__).resolve().parent
LOOPS = HERE / "on_keras"
BAR = 1 / 0.98  # of the time of a step: 0.98 of the samples per second
STEP, METRICS = "step_us", ("first_step_s", "exit_s")
STARTS = ("allranks", "by hand")
OTHERS = ("hand", "fit", "fit-no-xla")
THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}  # as ours sets them
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"}
CHECKED_STEPS = 10
WORKERS = 4
LIMIT_S = 300
Samples = dict[str, list[float]]
Started = tuple[subprocess.Popen[bytes], TextIO]


@dataclass(frozen=True)
class Plan:
    """What is measured: loops that train `workload`, in blocks of `block` steps."""

    workload: str
    batch: int
    replicas: int
    per_call: int
    block: int
    bar: float | None = None

    @property
    def what(self) -> str:
        devices = "1 device" if self.replicas == 1 else f"{self.replicas} devices"
        calls = "" if self.per_call == 1 else f", {self.per_call} steps per call"
        return f"{self.workload}, {devices}{calls}"

    @property
    def loops(self) -> list[str]:
        mirrored_calls = self.replicas > 1 and self.per_call > 1
        fits = [] if mirrored_calls else ["fit", "fit-no-xla"]
        return ["hand", "hand-again", *fits, "allranks", "allranks-8"]


PLANS = (
    *(Plan("tiny MLP", 64, replicas, 1, 100) for replicas in (1, 2)),
    *(Plan("tiny MLP", 64, replicas, 10, 200) for replicas in (1, 2)),
    *(Plan("digits CNN", 256, replicas, 1, 10, BAR) for replicas in (1, 2)),
    *(Plan("digits CNN", 256, replicas, 10, 50, BAR) for replicas in (1, 2)),
    *(Plan("larger CNN", 64, replicas, 1, 2, BAR) for replicas in (1, 2)),
)


# --- loops ------------------------------------------------------------------------------------


def measure(plan: Plan, pairs: int) -> Samples:
    """Microseconds per step of every loop, one value for each round."""
    with loops_of(plan) as loops:
        check(plan, {name: loop.recv() for name, loop in loops.items()})
        for turn in range(pairs + 1):
            found = {name: timed(loops[name], plan) for name in order_of(plan.loops, turn)}
            if turn == 0:  # not counted
                samples: Samples = {name: [] for name in plan.loops}
                continue
            for name, step_us in found.items():
                samples[name].append(step_us)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    say(f"{plan.what}: " + "  ".join(f"{name} {us:.0f}" for name, us in medians.items()))
    return samples


@contextmanager
def loops_of(plan: Plan) -> Iterator[dict[str, Connection]]:
    """A process for each loop of a plan, on the other end of a connection."""
    ours, theirs = zip(*(Pipe() for _ in plan.loops), strict=True)
    settings = (plan.workload, plan.batch, plan.replicas, plan.per_call, CHECKED_STEPS)
    arguments = (str(LOOPS), plan.loops, theirs, settings)
    processes = start_ranks(len(plan.loops), be_loop, arguments, ["allranks.tensorflow.preload"])
    for end in theirs:
        end.close()
    try:
        yield dict(zip(plan.loops, ours, strict=True))
    finally:
        for end in ours:
            end.close()
        for process in processes:
            process.join()


def be_loop(
    number: int, folder: str, names: list[str], ends: list[Connection], settings: tuple[Any, ...]
) -> None:
    """In the process of a loop: what follows imports TensorFlow,
    which the script itself never does."""
    sys.path[:] = [folder, *(path for path in sys.path if Path(path).resolve() != HERE)]
    from turns import take_turns  # noqa: PLC0415

    take_turns(names[number], ends[number], *settings)


def timed(loop: Connection, plan: Plan) -> float:
    loop.send(plan.block)
    seconds: float = loop.recv()
    return seconds / plan.block * 1e6


def check(plan: Plan, first: dict[str, tuple[float, float]]) -> None:
    """The first losses of all loops agree, so all train the same thing."""
    wanted, tolerance = first["hand"]
    for name, (loss, _) in first.items():
        if name == "allranks-8" and "CNN" in plan.workload:
            continue  # its BatchNormalization is over other samples
        if not math.isclose(loss, wanted, rel_tol=tolerance):
            raise SystemExit(f"{plan.what}: {name} has a loss of {loss}, hand of {wanted}")


def compare(plan: Plan, samples: Samples) -> tuple[list[dict[str, Any]], list[Comparison]]:
    """The medians of every loop; ours beside each of the others."""
    rows = []
    for name, values in samples.items():
        step_us = statistics.median(values)
        per_s = plan.batch / step_us * 1e6
        rows.append({"what": plan.what, "contender": name, STEP: step_us, "samples_per_s": per_s})
    beside = [("allranks", other, plan.bar) for other in plan.loops if other in OTHERS]
    beside += [("allranks-8", "hand", None), ("hand-again", "hand", None)]
    comparisons = [
        ratio(plan.what, STEP, of, over, list(zip(samples[of], samples[over], strict=True)), bar)
        for of, over, bar in beside
    ]
    return rows, comparisons


# --- start ------------------------------------------------------------------------------------


def start_once(name: str) -> dict[str, float]:
    """One cold start of `WORKERS` workers; the two times, from the moment before the command."""
    with tempfile.TemporaryDirectory(prefix="benchmark-tensorflow-") as folder:
        first = Path(folder) / "first"
        start = time.monotonic()
        (_start_ours if name == "allranks" else _start_by_hand)(Path(folder), first)
        exit_ = time.monotonic()
        seen, workers = first.read_text().split()
    if int(workers) != WORKERS:
        raise SystemExit(f"{name} started {workers} workers, not {WORKERS}")
    return {"first_step_s": float(seen) - start, "exit_s": exit_ - start}


def _start_ours(folder: Path, first: Path) -> None:
    tool = shutil.which("allranks", path=str(Path(sys.executable).parent))
    if tool is None:
        raise SystemExit("no command 'allranks' beside this python")
    options = ["--strategy", "multi-worker-mirrored", "--ranks", str(WORKERS), "--steps", "2"]
    files = ["--set", f"first={first}", "--run-dir", str(folder / "run")]
    task = str(LOOPS / "first_step_task.py")
    _wait([_started([tool, "train", task, *options, *files], folder, dict(os.environ))])


def _start_by_hand(folder: Path, first: Path) -> None:
    """What a person does who has no launcher: a command for each worker, with its TF_CONFIG."""
    addresses = [f"127.0.0.1:{port}" for port in _ports(WORKERS)]
    command = [sys.executable, str(LOOPS / "first_step_script.py"), str(first)]
    processes = []
    for worker in range(WORKERS):
        task = {"type": "worker", "index": worker}
        config = json.dumps({"cluster": {"worker": addresses}, "task": task})
        environment = {**os.environ, **THREADS, "TF_CONFIG": config}
        processes.append(_started(command, folder, environment))
    _wait(processes)


def _started(command: list[str], folder: Path, environment: dict[str, str]) -> Started:
    with tempfile.TemporaryFile("w+", dir=folder) as said:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=said, stderr=subprocess.STDOUT
        )
        return process, open(os.dup(said.fileno()), "r+")


def _wait(started: list[Started]) -> None:
    """Until all have ended well; one that does not ends the others."""
    try:
        for process, said in started:
            if process.wait(LIMIT_S):
                said.seek(0)
                raise SystemExit(f"{process.args} ended with {process.returncode}:\n{said.read()}")
    finally:
        for process, said in started:
            process.kill()
            process.wait()
            said.close()


def _ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def measure_start(pairs: int) -> dict[str, list[dict[str, float]]]:
    """Both in turns; a start of each goes before, for the page cache, and is not counted."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in STARTS}
    for turn in range(pairs + 1):
        for name in order_of(list(STARTS), turn):
            times = start_once(name)
            if turn:
                samples[name].append(times)
            shown = "  ".join(f"{metric} {times[metric]:6.2f}" for metric in METRICS)
            say(f"start, round {turn}/{pairs}  {name:<10} {shown}")
    return samples


def compare_start(
    samples: dict[str, list[dict[str, float]]],
) -> tuple[list[dict[str, Any]], list[Comparison]]:
    """The medians of both, and ours beside the other."""
    what = f"{WORKERS} workers, cold"
    rows = [
        {"what": what, "contender": name}
        | {metric: statistics.median(run[metric] for run in runs) for metric in METRICS}
        for name, runs in samples.items()
    ]
    both = list(zip(*(samples[name] for name in STARTS), strict=True))
    comparisons = [
        ratio(what, metric, *STARTS, [(a[metric], b[metric]) for a, b in both], None)
        for metric in METRICS
    ]
    return rows, comparisons


def main() -> None:
    """Measure, write the record, print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", choices=("loops", "start"), help="only this")
    parser.add_argument("--pairs", type=int, default=40, help="rounds of the loops")
    parser.add_argument("--starts", type=int, default=5, help="rounds of the start")
    parser.add_argument("--workload", default="", help="only these, by the start of the name")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    asked = parser.parse_args()
    os.environ.update(QUIET)
    os.chdir(tempfile.gettempdir())  # nobody imports this file for the package of its name
    plans = [p for p in PLANS if p.workload.startswith(asked.workload) and asked.part != "start"]
    record = start_record("tensorflow", {"pairs": asked.pairs, "starts": asked.starts})
    record["rows"], record["samples"], comparisons = [], {}, []
    for plan in plans:
        samples = measure(plan, asked.pairs)
        rows, compared = compare(plan, samples)
        record["rows"] += rows
        record["samples"][plan.what] = {STEP: samples}
        comparisons += compared
    if asked.part != "loops":
        starts = measure_start(asked.starts)
        rows, compared = compare_start(starts)
        record["rows"] += rows
        record["samples"]["start"] = starts
        comparisons += compared
    finish_record(record, comparisons, asked.records.resolve())


if __name__ == "__main__":
    main()
