"""What only a GPU can tell of allranks, in two calls: of at most ten minutes, and of four.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_session.py --out FOLDER
    PYTHONPATH=src:benchmarks python benchmarks/gpu_session.py --out FOLDER --minutes 4
    PYTHONPATH=src:benchmarks python benchmarks/gpu_session.py --device cpu --out FOLDER

The parts (`gpu_parts.py`) run one after the other, the most important first, each in a process
group of its own that is ended whole at its limit. Each row is printed, and is a line of
`FOLDER/results.jsonl`, when it ends; a second call goes on with those that have none. At the end
there is a record (`gpu-session-DATE`), and a page. With `--device cpu` it is a rehearsal, of small
models. Needs nothing but a checkout and what allranks imports; `--nccl FILE` loads a library
(`prune_nccl.py` makes one that can be carried) before torch's own.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import finish_record, say, start_record

from allranks.launcher.processes import leftovers
from allranks.tools.doctor.gpus import FAILED, NOT_SEEN, SEEN, table_of

SHARING = "sharing"  # the part that shows whether ranks share a device
ROWS = Path(__file__).with_name("gpu_parts.py")
RESULTS, PAGE = "results.jsonl", "gpu-session.md"
SLOWER_ON_A_CPU = 6  # than the limits of the parts say, which are those of a machine with a GPU
EMPTY = {"verdict": "no turn", "on": "", "promise": "", "why": "", "found": {}}
SHORTEST_S = 15.0  # with less time left no part is begun
SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Part:
    """Rows that one process makes, in `limit_s` at most."""

    limit_s: float
    rows: tuple[str, ...]


WORKLOADS = ("gpt2", "gpt2-dropout", "resnet50", "resnet50-8-shards")
PARTS: dict[str, Part] = {
    "library": Part(30, ("library", "nccl")),
    SHARING: Part(30, ("ddp",)),
    "bits": Part(60, ("bits", "kill")),
    "cut": Part(90, ("zero1", "fsdp", "tensor", "expert", "zero2", "hsdp", "context", "tree")),
    "stages": Part(60, ("1f1b", "gpipe", "zero-bubble", "mesh")),
    "faults": Part(60, ("hang", "corrupt", "memory")),
    "step": Part(40, ("waits", "launches", "pace")),
    "counts": Part(75, tuple(f"counts-{name}" for name in WORKLOADS)),
    "ratio-gpt2": Part(45, ("ratio-gpt2",)),
    "ratio-resnet50": Part(45, ("ratio-resnet50",)),
    "one": Part(40, ("host", "precisions", "norm")),
    "one-bitwise": Part(20, ("precisions-bitwise",)),
    "cost": Part(45, ("witness", "data")),
    "ratio-gpt2-compiled": Part(110, ("ratio-gpt2-compiled",)),
    "ratio-resnet50-compiled": Part(110, ("ratio-resnet50-compiled",)),
}


def add_row(out: Path, device: str, row: dict[str, Any]) -> None:
    """Write a row at once, and print it."""
    with (out / RESULTS).open("a") as file:
        file.write(json.dumps({**row, "device": device}, default=str) + "\n")
    found = json.dumps(row["found"], default=str, ensure_ascii=False)[:300]
    say(f"{row['verdict']:>8}  {row['name']}  {row['seconds']:.0f} s  {row['why'] or found}")


def rows_in(out: Path, device: str) -> dict[str, dict[str, Any]]:
    """The rows that were made in this folder, by name; the last of each."""
    path = out / RESULTS
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = [json.loads(line) for line in lines]
    return {row["name"]: row for row in rows if row["device"] == device}


def run_parts(names: list[str], device: str, out: Path, seconds: float, nccl: str) -> None:
    """Each part in its process; what hangs or crashes there is a row as well."""
    end, slower = time.monotonic() + seconds, 1 if device != "cpu" else SLOWER_ON_A_CPU
    for name in names:
        part, left_s = PARTS[name], end - time.monotonic()
        missing = [row for row in part.rows if row not in rows_in(out, device)]
        if not missing or left_s < SHORTEST_S:
            say(f"{name}: no time left" if missing else f"{name}: there already")
            continue
        command = [sys.executable, str(ROWS), str(out), device, ",".join(missing)]
        limit_s, begun = min(part.limit_s * slower, left_s), time.monotonic()
        code = run_whole(command, limit_s, nccl)
        if code is None and limit_s < part.limit_s * slower:
            say(f"{name}: cut off after {limit_s:.0f} s, no time left")
            continue  # that says nothing of it: the next call begins with what is missing
        why = f"ran past {limit_s:.0f} s" if code is None else f"the part ended with {code}"
        seconds_taken = round(time.monotonic() - begun, 1)
        there = rows_in(out, device)
        for number, row in enumerate(row for row in missing if row not in there):
            verdict = FAILED if number == 0 else NOT_SEEN  # those behind it had no turn
            about = {"name": row, "verdict": verdict, "why": why, "seconds": seconds_taken}
            add_row(out, device, {**EMPTY, **about})
        if nccl and name == SHARING and rows_in(out, device)["ddp"]["verdict"] != SEEN:
            say("ranks share no device over this NCCL: it goes on with torch's own")
            nccl = ""


def run_whole(command: list[str], limit_s: float, nccl: str = "") -> int | None:
    """The exit code, or `None` past the limit; its processes end with the call."""
    environment = {**SETTINGS, **os.environ, **({"LD_PRELOAD": nccl} if nccl else {})}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        leftovers.sweep()  # fork servers have sessions of their own


def page_of(rows: dict[str, dict[str, Any]], record: dict[str, Any], device: str) -> str:
    """The table of promises and what was seen, for people."""
    machine = record["machine"]
    what = "a GPU" if device != "cpu" else "a rehearsal on a CPU: it says nothing of a GPU"
    packages = f"torch {machine['packages']['torch']}, commit {machine['commit']}"
    lines = [
        f"# GPU session on `{device}`",
        "",
        f"This was {what}. {machine['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, "
        f"Python {machine['python']}, {packages}.",
        "",
    ]
    names = [row for part in PARTS.values() for row in part.rows]
    told = [{**EMPTY, "name": name, **rows.get(name, {})} for name in names]
    return "\n".join([*lines, *table_of(told), ""])


def unpacked(library: Path | None, out: Path) -> str:
    """The path of a library that the loader takes, which may have been packed."""
    if library is None or library.suffix != ".xz":
        return "" if library is None else str(library.resolve())
    path = out / library.stem
    path.write_bytes(lzma.decompress(library.read_bytes()))
    return str(path.resolve())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-session")))
    parser.add_argument("--minutes", type=float, default=9.3, help="for all parts (default 9.3)")
    parser.add_argument("--only", default="", help="names of parts, separated by commas")
    parser.add_argument("--again", action="store_true", help="those too that have an answer")
    parser.add_argument("--nccl", type=Path, help="a library of NCCL, or one packed by xz")
    given = parser.parse_args()
    device, out = given.device, given.out
    out.mkdir(parents=True, exist_ok=True)
    names = [name for name in given.only.split(",") if name] or list(PARTS)
    unknown = set(names) - PARTS.keys()
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if given.again:
        (out / RESULTS).unlink(missing_ok=True)
    record = start_record("gpu-session", {"device": device, "minutes": given.minutes})
    run_parts(names, device, out, given.minutes * 60, unpacked(given.nccl, out))
    rows = rows_in(out, device)
    record["rows"] = list(rows.values())
    (out / PAGE).write_text(page_of(rows, record, device))
    finish_record(record, [], out)
    return 0 if all(row["verdict"] != FAILED for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
