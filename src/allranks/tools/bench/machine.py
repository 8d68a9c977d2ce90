"""The measured machine, and its ceiling: rates that no strategy can exceed.

Copies run in threads without Python's lock, one on each core: a copied byte is read and written,
and counts once. The script `allranks.programs.all_reduce_rate` measures sums between ranks, over
the connection that the ranks of a job would use.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from allranks.job.job import Job
from allranks.job.units import format_bytes
from allranks.launcher.nodes.facts import processor
from allranks.tools.bench.peers import HERE
from allranks.tools.sweep import start_command

LEAST_BYTES, MOST_BYTES, ALL_BYTES = 8 * 2**20, 64 * 2**20, 512 * 2**20
COPIES = 5
CEILING_S = 60.0
SUMMED = "sums.json"


def machine_facts() -> dict[str, Any]:
    """Cores, memory, how busy it was already, and how fast it copies."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return {
        "host": os.uname().nodename,
        "processor": processor(),
        "cores": cores,
        "memory_bytes": pages,
        "load_1min": load,
        "copy_bytes_per_s": copy_bytes_per_s(1),
        "copy_all_cores_bytes_per_s": copy_bytes_per_s(cores),
        "all_reduce_bytes_per_s": None,
    }


def copy_bytes_per_s(threads: int) -> float:
    """Bytes per second that all threads copy together, in the best of a few rounds."""
    each = max(LEAST_BYTES, min(MOST_BYTES, ALL_BYTES // threads))  # more than a cache holds
    blocks = [
        (ctypes.create_string_buffer(each), ctypes.create_string_buffer(each))
        for _ in range(threads)
    ]

    def copy(pair: tuple[Any, Any]) -> None:
        ctypes.memmove(pair[0], pair[1], each)  # lets other threads run meanwhile

    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(COPIES):
            begun = time.perf_counter()
            list(pool.map(copy, blocks))
            best = min(best, time.perf_counter() - begun)
    return threads * each / best


def all_reduce_bytes_per_s(job: Job) -> float | None:
    """Bytes per second at which the ranks of this job all-reduce a tensor of 25 MB.

    `None` if that failed, for one rank, and for nodes outside of this machine.
    """
    if job.ranks == 1 or job.place_spec.name not in HERE:
        return None
    with tempfile.TemporaryDirectory(prefix="allranks-bench-") as scratch:
        out = Path(scratch, SUMMED)
        words = ["--ranks", str(job.ranks), "--nodes", str(job.nodes)]
        words += ["--place", job.place] if job.nodes > 1 else ["--shared-memory"]
        words += ["--run-dir", str(Path(scratch, "run")), "--time-limit", str(int(CEILING_S))]
        words += ["--", sys.executable, "-m", "allranks.programs.all_reduce_rate", str(out)]
        process = start_command(words, (), Path(scratch, "log"), "run")
        try:
            with suppress(subprocess.TimeoutExpired):  # it ends after CEILING_S by itself
                process.wait(2 * CEILING_S)
        finally:
            process.kill()
            process.wait()
        return float(json.loads(out.read_text())) if out.is_file() else None


def in_words(machine: dict[str, Any]) -> str:
    """The ceiling, before any figure."""
    copied = [machine["copy_bytes_per_s"], machine["copy_all_cores_bytes_per_s"]]
    words = [
        str(machine["processor"] or "an unnamed processor"),
        f"{machine['cores']} processors",
        format_bytes(machine["memory_bytes"]),
        f"copies {format_bytes(copied[0])}/s on one core, {format_bytes(copied[1])}/s on all",
    ]
    if machine["all_reduce_bytes_per_s"]:
        words.append(f"the ranks sum {format_bytes(machine['all_reduce_bytes_per_s'])}/s")
    return ", ".join([*words, f"a load of {machine['load_1min']:.1f} before"])
