"""From `kill -9` of a rank until all ranks train again: `allranks train` with --max-restarts.

    python benchmarks/restart.py

One run for each workload; in each a rank is killed `--kills` times, another one every time. The
times are of this host's monotonic clock, from the moment before the signal, and each part ends when
the last rank is through with it:

    others_gone_s  the death is seen, evidence is waited for, the other ranks are stopped and gone
    forked_s       new processes are forked and have the task
    joined_s       they have met
    built_s        the model is built
    broadcast_s    all have the weights of the leader
    optimizer_s    optimizer and buckets are made
    data_s         the data are open
    load_s         the newest good checkpoint is found, verified and taken up
    first_step_s   the first step is done; it is one that every training makes
    total_s        all of it

The bar is on `without_load_s`, all of it but the load. The steps that were done since the last
checkpoint are done again after that; how many these are is up to --checkpoint-every.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import RECORDS, Comparison, finish_record, say, start_record, value_s

from allranks.job.run_folder import read_events, read_rows

HERE = Path(__file__).resolve().parent
BAR_S = 2.0
LIMIT_S = 450
RANKS = 4
MARKS = ("task", "joined", "built", "broadcast", "ready", "data", "resumed", "training")
EVERY = {"tiny MLP": 40, "17 M MLP": 4}


@dataclass(frozen=True)
class Restart:
    """The parts of one restart, in seconds, in their order."""

    others_gone_s: float
    forked_s: float
    joined_s: float
    built_s: float
    broadcast_s: float
    optimizer_s: float
    data_s: float
    load_s: float
    first_step_s: float
    total_s: float
    without_load_s: float


def run(workload: str, ranks: int, kills: int, folder: Path) -> list[Restart]:
    """One command that is killed so often, and what each restart took."""
    with tempfile.TemporaryDirectory(prefix="benchmark-restart-", dir=folder) as name:
        scratch, every = Path(name), EVERY[workload]
        (scratch / "notes").mkdir()
        fields = {"workload": workload, "notes": scratch / "notes", "every": every, "kills": kills}
        settings = [word for n, v in fields.items() for word in ("--set", f"{n}={v}")]
        protection = ["--checkpoint-every", str(every), "--max-restarts", str(kills)]
        where = ["--ranks", str(ranks), "--run-dir", str(scratch / "run")]
        steps = ["--steps", str(every * (kills + 1) + 2)]
        task = str(HERE / "restart_task.py")
        command = [_tool("allranks"), "train", task, *where, *steps, *protection, *settings]
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        done = subprocess.run(
            command, cwd=scratch, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        marks = _marks(scratch)
    return [_restart(marks, attempt, ranks) for attempt in range(kills)]


def _marks(scratch: Path) -> dict[tuple[int, str], list[float]]:
    """When each rank came where: (attempt, what) -> a time for every rank."""
    marks: dict[tuple[int, str], list[float]] = {}
    rows = [row for path in (scratch / "notes").iterdir() for row in read_rows(path)]
    events = [{**row, "what": row["event"]} for row in read_events(scratch / "run")]
    for row in [*rows, *(row for row in events if "attempt" in row)]:
        marks.setdefault((row["attempt"], row["what"]), []).append(row["monotonic"])
    return marks


def _restart(marks: dict[tuple[int, str], list[float]], attempt: int, ranks: int) -> Restart:
    (killed,), (gone,) = marks[attempt, "killed"], marks[attempt, "restart"]
    at = [killed, gone]
    for what in MARKS:
        times = marks[attempt + 1, what]
        expected = 1 if what == "resumed" else ranks
        if len(times) != expected:
            raise SystemExit(f"attempt {attempt + 1}: {what} {len(times)} times, not {expected}")
        at.append(max(times))
    parts = [after - before for before, after in itertools.pairwise(at)]
    total, load = at[-1] - killed, parts[MARKS.index("resumed") + 1]
    values = [*parts, total, total - load]
    return Restart(*values)


def summed_up(
    workload: str, ranks: int, restarts: list[Restart]
) -> tuple[dict[str, Any], Comparison]:
    """The medians of the parts, and the bar."""
    what = f"{workload}, {ranks} ranks"
    table = [asdict(restart) for restart in restarts]
    medians = {part: statistics.median(row[part] for row in table) for part in table[0]}
    row = {"what": what, "contender": "allranks", **medians}
    values = [restart.without_load_s for restart in restarts]
    return row, value_s(what, "without_load_s", "allranks", values, BAR_S)


def show(workload: str, restarts: list[Restart]) -> None:
    """Every restart, for people."""
    table = [asdict(restart) for restart in restarts]
    say(f"{workload}:\n" + "  ".join(f"{part:>14}" for part in table[0]))
    for row in table:
        say("  ".join(f"{value:>14.3f}" for value in row.values()))


def _tool(name: str) -> str:
    """The command `name` of the environment that runs this script."""
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        raise SystemExit(f"no command {name!r} beside this python")
    return found


def main() -> None:
    """Measure, write the record, print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=8, help="in each run")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="of the run folders")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    asked = parser.parse_args()
    record = start_record("restart", {"kills": asked.kills, "ranks": asked.ranks, "every": EVERY})
    record["rows"], record["samples"], comparisons = [], {}, []
    for workload in EVERY:
        restarts = run(workload, asked.ranks, asked.kills, asked.folder)
        show(workload, restarts)
        row, comparison = summed_up(workload, asked.ranks, restarts)
        record["rows"].append(row)
        record["samples"][row["what"]] = [asdict(restart) for restart in restarts]
        comparisons.append(comparison)
    finish_record(record, comparisons, asked.records)


if __name__ == "__main__":
    main()
