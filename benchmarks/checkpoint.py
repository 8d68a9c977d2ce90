"""Checkpoints: how long a save holds training, how long it takes, and how long a load takes.

    python benchmarks/checkpoint.py              2 ranks on a disk and in memory, 1 rank on a disk
    python benchmarks/checkpoint.py --profile    where our own saves and loads spend their time

All ways to save (`savers.py` says what each promises) save one and the same training: an MLP of
17 M parameters with AdamW, 200 MB of state, trained by our Trainer with one thread for each rank.
A block is a few steps with one save after the first of them; a round gives each way one block, in
turns, and two blocks without any save. Times are those of the slowest rank:

    stall_s     how long the call of the save holds training
    cost_s      the whole block less that of the same steps without a save: it also has what a
                thread in the background takes from the steps, and what is left of the save at
                their end. It is as noisy as the steps are: `none-again` says how much
    commit_s    from the call to the checkpoint that stands, while training goes on beside it
    load_s      until model and optimizer hold the state again, files in the page cache; ours with
                all digests verified, and verifying alone
    cold_load_s the same with the files out of the page cache (only where they lie on a disk)

With as many ranks as cores nothing is free: what a thread computes in the background, the steps
wait for. With one rank on two cores there is a core for it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import RECORDS, Comparison, difference_us, finish_record, ratio, say, start_record
from ranks import start_ranks, wait_for

BAR = 0.1
SAVERS = ("none", "none-again", "allranks", "allranks-blocking", "torch-save", "torch-save-fsync")
DCP = ("dcp", "dcp-async", "dcp-async-kept")
LOADERS = ("allranks", "allranks-verify", "torch-save", "dcp")
OTHERS = ("torch-save", "torch-save-fsync", *DCP)
IN_MEMORY = Path("/dev/shm")
NEEDED_BYTES = 4 << 30


@dataclass(frozen=True)
class Plan:
    """What one set of processes does: `steps` in a block, `rounds` of all savers and loaders."""

    ranks: int
    place: str
    steps: int
    rounds: int
    workload: str = "17 M MLP"
    savers: tuple[str, ...] = (*SAVERS, *DCP)
    loaders: tuple[str, ...] = LOADERS
    is_cold: bool = False
    is_profile: bool = False


def run(plan: Plan, folder: Path) -> dict[str, Any]:
    """Run one fresh set of rank processes to its end; what their leader has found."""
    with tempfile.TemporaryDirectory(prefix="benchmark-checkpoint-", dir=folder) as scratch:
        arguments = (asdict(plan), scratch)
        ranks = start_ranks(plan.ranks, _rank, arguments, ["checkpoint_rank"])
        wait_for(plan.place, ranks)
        found: dict[str, Any] = json.loads((Path(scratch) / "found.json").read_text())
        return found


def _rank(rank: int, asked: dict[str, Any], folder: str) -> None:
    """In a rank's process: what follows imports torch, which the command itself never does."""
    from checkpoint_rank import measure_as_rank  # noqa: PLC0415

    measure_as_rank(rank, asked, folder)


def compare(plan: Plan, found: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Comparison]]:
    """The medians of every way to save and to load, and what is compared."""
    what, samples = f"{plan.ranks} ranks, {plan.place}", found["samples"]
    for name in plan.savers:
        saved, without = samples[f"save {name}"], samples["save none"]["block_s"]
        saved["cost_s"] = [a - b for a, b in zip(saved["block_s"], without, strict=True)]
    rows = [*_save_rows(what, plan, found), *_load_rows(what, plan, samples)]
    return rows, [*_save_comparisons(what, samples), *_load_comparisons(what, plan, samples)]


def _save_rows(what: str, plan: Plan, found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in plan.savers:
        saved = found["samples"][f"save {name}"]
        medians = {m: statistics.median(saved[m]) for m in ("stall_s", "cost_s", "commit_s")}
        speed = found["state_bytes"] / medians["commit_s"] / 1e6 if medians["commit_s"] else None
        yield {"what": what, "contender": f"save: {name}", **medians, "commit_mb_per_s": speed}


def _load_rows(what: str, plan: Plan, samples: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in plan.loaders:
        loaded = samples[f"load {name}"]
        medians = {
            m: statistics.median(loaded[m]) if m in loaded else None
            for m in ("load_s", "cold_load_s")
        }
        yield {"what": what, "contender": f"load: {name}", **medians}


def _save_comparisons(what: str, samples: dict[str, Any]) -> Iterator[Comparison]:
    def pairs(metric: str, of: str, over: str) -> list[tuple[float, float]]:
        of_, over_ = samples[f"save {of}"][metric], samples[f"save {over}"][metric]
        return list(zip(of_, over_, strict=True))

    blocking = "allranks-blocking"
    yield ratio(what, "stall_s", "allranks", blocking, pairs("stall_s", "allranks", blocking), BAR)
    for other in OTHERS:
        yield ratio(what, "stall_s", "allranks", other, pairs("stall_s", "allranks", other), None)
    for other in OTHERS[:3]:
        yield ratio(what, "stall_s", blocking, other, pairs("stall_s", blocking, other), None)
    for name in ("none-again", "allranks", blocking, *OTHERS):
        both = pairs("block_s", name, "none")
        yield difference_us(what, "block_s", name, "none", both, None)
    both = pairs("commit_s", "allranks", "dcp-async")
    yield ratio(what, "commit_s", "allranks", "dcp-async", both, None)


def _load_comparisons(what: str, plan: Plan, samples: dict[str, Any]) -> Iterator[Comparison]:
    for metric in ("load_s", "cold_load_s") if plan.is_cold else ("load_s",):
        ours = samples["load allranks"][metric]
        for other in ("torch-save", "dcp", "allranks-verify"):
            both = list(zip(ours, samples[f"load {other}"][metric], strict=True))
            yield ratio(what, metric, "allranks", other, both, None)


def show(found: dict[str, Any]) -> None:
    """A profile, for people."""
    for table in found["profile"]:
        say(f"\n{table['what']} {table['mean_s'] * 1e3:.1f} ms")
        say(f"    {'on the leader, mean of each':<34}{'calls':>7}{'wall ms':>10}{'cpu ms':>10}")
        for p in table["parts"]:
            row = f"{p['calls']:>7.1f}{p['wall_ms']:>10.2f}{p['cpu_ms']:>10.2f}"
            say(f"    {p['part']:<34}{row}")


def system_of(folder: Path) -> str:
    """The kind of file system that a folder lies on."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    path = str(folder.resolve())
    held = [
        (len(m), kind) for m, kind in mounts if path == m or path.startswith(m.rstrip("/") + "/")
    ]
    return max(held)[1]


def plans(asked: argparse.Namespace) -> list[tuple[Plan, Path]]:
    """What is measured, and where."""
    disk = system_of(asked.disk)
    if disk == "tmpfs":
        raise SystemExit(f"{asked.disk} is in memory: name a folder on a disk with --disk")
    wanted = [
        (Plan(2, disk, asked.steps, asked.pairs, is_cold=True), asked.disk),
        (Plan(1, disk, asked.steps, asked.pairs, is_cold=True), asked.disk),
    ]
    if IN_MEMORY.is_dir() and os.statvfs(IN_MEMORY).f_bavail * 4096 > NEEDED_BYTES:
        wanted.insert(1, (Plan(2, "tmpfs", asked.steps, asked.pairs), IN_MEMORY))
    chosen = [(p, f) for p, f in wanted if f"{p.ranks} ranks, {p.place}".startswith(asked.only)]
    return chosen


def main() -> None:
    """Measure, write the record, print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5, help="rounds of all contenders")
    parser.add_argument("--steps", type=int, default=6, help="steps of a block")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a folder on a disk")
    parser.add_argument("--only", default="", help='the plans that begin so, as "2 ranks, tmpfs"')
    parser.add_argument("--profile", action="store_true", help="no record: where the time goes")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    asked = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    if asked.profile:
        for plan, folder in plans(asked):
            say(f"\n=== {plan.ranks} ranks, {plan.place} ===")
            own = Plan(
                plan.ranks,
                plan.place,
                plan.steps,
                plan.rounds,
                is_profile=True,
                savers=("allranks", "allranks-blocking"),
                loaders=(),
            )
            show(run(own, folder))
        return
    settings = {"pairs": asked.pairs, "steps_per_block": asked.steps, "threads_per_rank": 1}
    record = start_record("checkpoint", settings)
    record["rows"], record["samples"], record["first_stall_s"], comparisons = [], {}, {}, []
    for plan, folder in plans(asked):
        found = run(plan, folder)
        rows, compared = compare(plan, found)
        what = rows[0]["what"]
        record["settings"]["state_bytes"] = found["state_bytes"]
        record["rows"] += rows
        record["samples"][what] = found["samples"]
        record["first_stall_s"][what] = found["first_stall_s"]
        comparisons += compared
        for row in rows:
            say(
                "  ".join(
                    f"{k} {v:.3f}" if isinstance(v, float) else str(v) for k, v in row.items()
                )
            )
    finish_record(record, comparisons, asked.records)


if __name__ == "__main__":
    main()
