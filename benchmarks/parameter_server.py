"""Steps per second of a parameter server: ours beside TensorFlow's and a plain one on torch.

    python benchmarks/parameter_server.py
    python benchmarks/parameter_server.py --part peers --size "25 M" --rounds 3
    python benchmarks/parameter_server.py --part growth

`peers`: 2 workers and 1 server on this host, `--strategy ps` in shared memory and on sockets, in
step and out of it, beside a server on torch.distributed (`on_servers/torch_server.py`) and, out of
step, which is all that it has, beside TensorFlow's ParameterServerStrategy
(`on_servers/tensorflow_server.py`). A step is one pull, one batch and one push of each worker that
takes part: in step of both, out of step of one. All have the same layers, batches and threads (one
for each process). Each turn is a training of its own; of its steps the first quarter, in which
processes still start, is not counted. What is compared is the time of a step, and `better peer` is
in every round the faster of the two.

`growth`: ours with 1, 2 and 4 servers and 1 to 8 workers, one turn each; it says how little is
lost where processes outnumber cores, and on two cores nothing about how far a server goes.

`tables`: rows per second that are looked up and updated, of a table of 1 GB that lies on one server
and is trained by 1 and by 2 workers out of step, beside `nn.EmbeddingBag` with sparse gradients in
one process (`on_servers/table_by_hand.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from harness import RECORDS, Comparison, finish_record, order_of, ratio, say, start_record

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "on_servers"
sys.path.append(str(SCRIPTS))
from sizes import LOOKED_UP, SIZES, TABLE_BATCH, TABLE_ROWS, TABLE_STEPS  # noqa: E402

STEP = "step_us"
SHARED, SOCKETS = "allranks, shared memory", "allranks, sockets"
TORCH, TENSORFLOW, BETTER = "torch.distributed", "TensorFlow", "better peer"
LARGE = 1_000_000  # weights, from which on the bar in shared memory is lower
LARGE_BAR, BAR = 0.7, 1.0  # of the time of a step of the better peer
WORKERS = 2
SERVERS_GROWN, WORKERS_GROWN = (1, 2, 4), (1, 2, 4, 8)
COUNTED = 0.75  # of the steps of a turn, the last ones
LIMIT_S = 300
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
TENSORFLOW_ALONE = {
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "KERAS_BACKEND": "tensorflow",
    "CUDA_VISIBLE_DEVICES": "",
}
Rows = list[dict[str, Any]]
Started = tuple[subprocess.Popen[str], Path]


# --- contenders: each returns the microseconds of a step --------------------------------------


def ours(mode: str, size: str, transport: str, workers: int = WORKERS, servers: int = 1) -> float:
    """Of `--strategy ps` with a model of this size."""
    plan, parts = SIZES[size], workers if mode == "sync" else 1
    strategy = f"ps:mode={mode},servers={servers},transport={transport}"
    settings = ["--set", f"size={size}", "--set", f"batch_size={plan.batch * parts}"]
    return _trained("Dense", strategy, workers, plan.steps, settings)


def _trained(
    task: str, strategy: str, workers: int, steps: int, settings: list[str] | None = None
) -> float:
    """A training of ours, from the times that the scheduler notes of every step."""
    with tempfile.TemporaryDirectory(prefix="benchmark-servers-") as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "allranks.cli.main", "train"]
        command += [f"{SCRIPTS / 'task.py'}:{task}", "--strategy", strategy]
        command += ["--ranks", str(workers), "--steps", str(steps), "--witness", "off"]
        command += ["--run-dir", str(run), *(settings or [])]
        _ended([_started(command, {}, folder)])
        lines = (run / "metrics.jsonl").read_text().splitlines()
    return _step_us([float(json.loads(line)["monotonic"]) for line in lines])


def plain_torch(mode: str, size: str) -> float:
    """Of the server on torch.distributed."""
    with tempfile.TemporaryDirectory(prefix="benchmark-servers-") as folder:
        script = [sys.executable, str(SCRIPTS / "torch_server.py")]
        more = [str(WORKERS), str(Path(folder) / "store"), mode, size]
        processes = [
            _started([*script, str(rank), *more], {}, folder) for rank in range(WORKERS + 1)
        ]
        said = _ended(processes)
    return _step_us(json.loads(said[0]))


def plain_tensorflow(size: str) -> float:
    """Of ParameterServerStrategy: the steps after the first quarter, which are scheduled alone."""
    kinds = ["ps", *["worker"] * WORKERS, "chief"]
    addresses = [f"127.0.0.1:{port}" for port in _ports(len(kinds))]
    cluster: dict[str, list[str]] = {}
    tasks = []
    for kind, address in zip(kinds, addresses, strict=True):
        cluster.setdefault(kind, []).append(address)
        tasks.append({"type": kind, "index": len(cluster[kind]) - 1})
    script = [sys.executable, str(SCRIPTS / "tensorflow_server.py"), size]
    with tempfile.TemporaryDirectory(prefix="benchmark-servers-") as folder:
        processes = []
        for task in tasks:
            config = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}
            processes.append(_started(script, {**TENSORFLOW_ALONE, **config}, folder))
        begun, ended = json.loads(_ended([processes[-1]], serve=processes[:-1])[0])
    steps = SIZES[size].steps
    return float((ended - begun) / (steps - steps // 4) * 1e6)


def _step_us(times: list[float]) -> float:
    """Of the last steps."""
    counted = round(COUNTED * len(times))
    return (times[-1] - times[-1 - counted]) / counted * 1e6


def _started(command: list[str], more: dict[str, str], folder: str) -> Started:
    """What it says on stderr goes to a file, for whoever asks why."""
    path = Path(folder) / f"{len(list(Path(folder).glob('*.log')))}.log"
    with path.open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **ONE_THREAD, **more},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    return process, path


def _ended(started: list[Started], serve: list[Started] | None = None) -> list[str]:
    """The last line that each has said, once all have ended well; then who serves is killed."""
    try:
        said = [process.communicate(timeout=LIMIT_S)[0] for process, _ in started]
        for process, log in started:
            if process.returncode:
                why = log.read_text()[-2000:]
                raise SystemExit(f"{process.args!r} ended with {process.returncode}:\n{why}")
        return [(words.splitlines() or [""])[-1] for words in said]
    finally:
        for process, _ in [*started, *(serve or [])]:
            process.kill()
            process.communicate()


def _ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


# --- what is measured -------------------------------------------------------------------------


def contenders(mode: str, size: str) -> dict[str, Callable[[], float]]:
    """Who takes part; TensorFlow has no mode in which workers wait for each other."""
    found: dict[str, Callable[[], float]] = {
        SHARED: partial(ours, mode, size, "auto"),
        SOCKETS: partial(ours, mode, size, "sockets"),
        TORCH: partial(plain_torch, mode, size),
    }
    if mode == "async":
        found[TENSORFLOW] = partial(plain_tensorflow, size)
    return found


def measure(what: str, turns: dict[str, Callable[[], float]], rounds: int) -> dict[str, Any]:
    """The value of every contender, one for each round."""
    samples: dict[str, list[float]] = {name: [] for name in turns}
    for turn in range(rounds):
        for name in order_of(list(turns), turn):
            samples[name].append(turns[name]())
        shown = "  ".join(f"{name} {values[-1]:.0f}" for name, values in samples.items())
        say(f"{what}, round {turn + 1}/{rounds}: {shown}")
    return samples


def compare(
    what: str, weights: int, samples: dict[str, list[float]]
) -> tuple[Rows, list[Comparison]]:
    """The medians; ours beside every peer, and beside the faster one of each round."""
    peers = [name for name in samples if name in (TORCH, TENSORFLOW)]
    better = [min(values) for values in zip(*(samples[name] for name in peers), strict=True)]
    rows = []
    for name, values in samples.items():
        step_us = statistics.median(values)
        rows.append({"what": what, "contender": name, STEP: step_us, "steps_per_s": 1e6 / step_us})
    found = []
    for name, bar in ((SHARED, LARGE_BAR if weights >= LARGE else BAR), (SOCKETS, BAR)):
        beside = {peer: (samples[peer], None) for peer in peers} | {BETTER: (better, bar)}
        for over, (values, own_bar) in beside.items():
            pairs = list(zip(samples[name], values, strict=True))
            found.append(ratio(what, STEP, name, over, pairs, own_bar))
    return rows, found


def growth(sizes: list[str]) -> Rows:
    """Ours in shared memory and out of step, one turn for each number of processes."""
    rows: Rows = []
    for size in sizes:
        for servers in SERVERS_GROWN:
            for workers in WORKERS_GROWN:
                step_us = ours("async", size, "auto", workers, servers)
                what, who = f"growth, {size}", f"{servers} servers, {workers} workers"
                rows.append(
                    {"what": what, "contender": who, STEP: step_us, "steps_per_s": 1e6 / step_us}
                )
                say(f"{what}: {who} {step_us:.0f} us")
    return rows


def by_hand() -> float:
    """Of a step with the table in one process."""
    with tempfile.TemporaryDirectory(prefix="benchmark-servers-") as folder:
        script = [sys.executable, str(SCRIPTS / "table_by_hand.py")]
        return _step_us(json.loads(_ended([_started(script, {}, folder)])[0]))


def tables(rounds: int) -> tuple[Rows, list[Comparison], dict[str, Any]]:
    """A table of 1 GB on a server, beside one in the process."""
    what, alone = f"table of {TABLE_ROWS:,} rows", "nn.EmbeddingBag, 1 process"
    asked = {f"allranks, {workers} workers": workers for workers in (1, 2)}
    turns = {
        who: partial(_trained, "Table", "ps:mode=async", workers, TABLE_STEPS)
        for who, workers in asked.items()
    }
    samples = measure(what, {**turns, alone: by_hand}, rounds)
    looked_up = TABLE_BATCH * LOOKED_UP
    rows: Rows = []
    for name, values in samples.items():
        per_s = looked_up / statistics.median(values) * 1e6
        rows.append({"what": what, "contender": name, "rows_per_s": per_s})
    pairs = {name: list(zip(samples[name], samples[alone], strict=True)) for name in asked}
    found = [ratio(what, STEP, name, alone, both, None) for name, both in pairs.items()]
    return rows, found, samples


def main() -> None:
    """Measure, write the record, print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parts = ("peers", "growth", "tables")
    parser.add_argument("--part", choices=parts, action="append", help="only this")
    parser.add_argument("--size", action="append", help="only these, by the start of the name")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    asked = parser.parse_args()
    chosen = asked.part or parts
    sizes = [size for size in SIZES if size.startswith(tuple(asked.size or [""]))]
    record = start_record("parameter_server", {"rounds": asked.rounds, "parts": list(chosen)})
    record["rows"], record["samples"], comparisons = [], {}, []
    cases = [(mode, size) for size in sizes for mode in ("sync", "async")]
    for mode, size in cases if "peers" in chosen else ():
        what = f"{size}, {mode}"
        samples = measure(what, contenders(mode, size), asked.rounds)
        rows, compared = compare(what, SIZES[size].weights, samples)
        record["rows"] += rows
        record["samples"][what] = {STEP: samples}
        comparisons += compared
    if "growth" in chosen:
        record["rows"] += growth(sizes)
    if "tables" in chosen:
        rows, compared, samples = tables(asked.rounds)
        record["rows"] += rows
        record["samples"]["tables"] = {STEP: samples}
        comparisons += compared
    finish_record(record, comparisons, asked.records.resolve())


if __name__ == "__main__":
    main()
