"""The most memory that a rank has in use, from the build of a model to its checkpoint.

    python benchmarks/memory.py

A transformer of 305 MB of weights (24 blocks of a width of 512), AdamW, three steps and one
checkpoint, on 4 ranks of this machine. What counts is what the process has asked of its allocator
and not given back, every 2 ms, beyond what a training of a tiny model by the same strategy had
left. The worst rank of a strategy is compared with the best one of `ddp`; the bar: 0.45 for `fsdp`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import RECORDS, Comparison, finish_record, ratio, say, start_record
from ranks import start_ranks, wait_for

HERE = Path(__file__).resolve().parent
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "fsdp:reshard=false", "hsdp:shard=2")
RANKS = 4
METRIC = "peak_mb"
BARS = {"fsdp": 0.45}


def peaks_of(strategy: str, task: dict[str, int]) -> list[dict[str, int]]:
    """The peaks of every rank, phase by phase."""
    with tempfile.TemporaryDirectory(prefix="benchmark-memory-") as folder:
        arguments = (RANKS, strategy, task, folder)
        wait_for(strategy, start_ranks(RANKS, _rank, arguments, ["memory_rank"]))
        return [json.loads((Path(folder) / f"rank-{r}.json").read_text()) for r in range(RANKS)]


def _rank(rank: int, ranks: int, strategy: str, task: dict[str, int], folder: str) -> None:
    sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]
    from memory_rank import measure_as_rank  # noqa: PLC0415

    measure_as_rank(rank, ranks, strategy, task, folder)


def main() -> None:
    """Measure, write the record, print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=24, help="blocks of the transformer")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    asked = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    sys.path[:0] = [str(HERE)]
    record = start_record("memory", {"ranks": RANKS, "layers": asked.layers})
    record["rows"] = []
    most: dict[str, float] = {}
    for strategy in STRATEGIES:
        ranks = peaks_of(strategy, {"layers": asked.layers})
        in_mb: dict[str, Any] = {
            phase: [round(rank[phase] / 1e6) for rank in ranks] for phase in ranks[0]
        }
        phases = [values for phase, values in in_mb.items() if phase != "weights"]
        peaks = [max(values) for values in zip(*phases, strict=True)]
        most[strategy] = max(peaks)
        row = {"contender": strategy, METRIC: max(peaks), "peak_of_rank_mb": peaks}
        record["rows"].append({**row, **in_mb})
        say(f"{strategy}: {in_mb}")
    least = min(record["rows"][0]["peak_of_rank_mb"])
    comparisons: list[Comparison] = [
        ratio("transformer, 4 ranks", METRIC, name, "ddp", [(most[name], least)], BARS.get(name))
        for name in STRATEGIES[1:]
    ]
    finish_record(record, comparisons, asked.records)


if __name__ == "__main__":
    main()
