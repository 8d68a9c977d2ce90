"""From the command to the first all-reduce: `allranks train`, torchrun, and accelerate launch.

Every run is a fresh command, so every launcher pays for its own start; nothing is kept warm. Files
are in the page cache and bytecode is compiled for all: one run of each goes before, and is not
counted. All bind Gloo to the loopback interface and give each rank one thread. Two times for each
run, both from the moment before the command is started, on this host's monotonic clock:

    first_all_reduce_s  until the leader has the first sum (allranks: until its second step begins)
    exit_s              until the command has returned

allranks does more in that time: it reads and checks the task, writes a run folder, broadcasts the
model, and at the end saves the weights and digests them. The others run a script without any of it.

`accelerate launch --cpu --num_processes N` starts one process unless mpirun is there (seen with
1.15); `--multi_gpu` really starts N, with Gloo, also where there is no GPU. Every run checks the
world size that its leader saw.

The ceiling is what cannot be beaten by a launcher that imports torch in the ranks themselves: one
process that imports torch, and one that also makes its first optimizer (which imports more).
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import RECORDS, Comparison, finish_record, order_of, ratio, say, start_record

HERE = Path(__file__).resolve().parent
METRICS = ("first_all_reduce_s", "exit_s")
BAR, BAR_RANKS = 0.5, 8
LIMIT_S = 300
CEILING = {
    "import_torch_s": "import torch",
    "import_torch_and_optimizer_s": (
        "import torch; torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)"
    ),
}


def command_of(name: str, ranks: int, scratch: Path) -> list[str]:
    """The command that a person would type for `name`."""
    first, script = str(scratch / "first"), str(HERE / "first_reduce_script.py")
    if name == "allranks":
        task = str(HERE / "first_reduce_task.py")
        run_dir = str(scratch / "run")
        options = ["--steps", "2", "--set", f"first={first}", "--run-dir", run_dir]
        return [_tool("allranks"), "train", task, "--ranks", str(ranks), *options]
    if name == "torchrun":
        where = ["--nproc-per-node", str(ranks), "--master-port", str(_port())]
        return [_tool("torchrun"), *where, script, first]
    where = ["--multi_gpu", "--num_processes", str(ranks), "--num_machines", "1"]
    quiet = ["--mixed_precision", "no", "--dynamo_backend", "no"]
    port = ["--main_process_port", str(_port())]
    return [_tool("accelerate"), "launch", *where, *quiet, *port, script, first]


def run_once(name: str, ranks: int) -> dict[str, float]:
    """One cold start; the two times. Fails if the command does,
    or starts another number of ranks."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="benchmark-launch-") as folder:
        scratch = Path(folder)
        command = command_of(name, ranks, scratch)
        start = time.monotonic()
        done = subprocess.run(
            command, cwd=scratch, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        exit_ = time.monotonic()
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        first, world_size = (scratch / "first").read_text().split()
    if int(world_size) != ranks:
        raise SystemExit(f"{' '.join(command)} started {world_size} ranks, not {ranks}")
    return {"first_all_reduce_s": float(first) - start, "exit_s": exit_ - start}


def ceiling(times: int = 3) -> dict[str, float]:
    """Seconds of the cheapest process that could be a rank, medians."""
    found = {}
    for name, code in CEILING.items():
        seconds = []
        for _ in range(times):
            start = time.monotonic()
            subprocess.run([sys.executable, "-c", code], check=True)
            seconds.append(time.monotonic() - start)
        found[name] = statistics.median(seconds)
        say(f"ceiling: {name} {found[name]:.2f}")
    return found


def measure(ranks: int, names: list[str], pairs: int) -> dict[str, list[dict[str, float]]]:
    """`pairs` rounds of all contenders on `ranks` ranks: for each the times of its runs."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(pairs):
        for name in order_of(names, turn):
            times = run_once(name, ranks)
            samples[name].append(times)
            shown = "  ".join(f"{metric} {times[metric]:6.2f}" for metric in METRICS)
            say(f"{ranks} ranks  round {turn + 1}/{pairs}  {name:<10} {shown}")
    return samples


def compare(
    ranks: int, samples: dict[str, list[dict[str, float]]]
) -> tuple[list[dict[str, Any]], list[Comparison]]:
    """The medians of every contender, and allranks beside each of the others."""
    what, rows, comparisons = f"{ranks} ranks", [], []
    for name, runs in samples.items():
        medians = {metric: statistics.median(run[metric] for run in runs) for metric in METRICS}
        rows.append({"what": what, "contender": name, **medians})
    for other in samples:
        if other == "allranks":
            continue
        for metric in METRICS:
            barred = other == "torchrun" and ranks == BAR_RANKS and metric == METRICS[0]
            both = zip(samples["allranks"], samples[other], strict=True)
            pairs = [(ours[metric], theirs[metric]) for ours, theirs in both]
            bar = BAR if barred else None
            comparisons.append(ratio(what, metric, "allranks", other, pairs, bar))
    return rows, comparisons


def _tool(name: str) -> str:
    """The command `name` of the environment that runs this script."""
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        raise SystemExit(f"no command {name!r} beside this python. Install the extra: '.[bench]'")
    return found


def _port() -> int:
    """A port for a launcher that cannot choose its own; free a moment ago."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port: int = asked.getsockname()[1]
        return port


def main() -> None:
    """Measure, write the record, print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5, help="rounds of all contenders")
    parser.add_argument("--ranks", default="2,4,8", help="numbers of ranks, with commas")
    parser.add_argument("--contenders", default="allranks,torchrun,accelerate")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    asked = parser.parse_args()
    names, sizes = asked.contenders.split(","), [int(n) for n in asked.ranks.split(",")]
    record = start_record("launch", {"pairs": asked.pairs, "ranks": sizes, "contenders": names})
    record["ceiling"] = ceiling()
    for name in names:  # not counted: bytecode and the page cache
        run_once(name, 2)
    record["rows"], comparisons = [], []
    record["samples"] = {}
    for ranks in sizes:
        samples = measure(ranks, names, asked.pairs)
        rows, compared = compare(ranks, samples)
        record["rows"] += rows
        record["samples"][f"{ranks} ranks"] = samples
        comparisons += compared
    finish_record(record, comparisons, asked.records)


if __name__ == "__main__":
    main()
