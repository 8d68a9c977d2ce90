"""The prepared run on a GPU: it goes on where it was, and says what it could not tell."""

from __future__ import annotations

import importlib
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allranks.tools.doctor.gpus import ROWS
from conftest import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu_session.py"


@pytest.mark.slow
def test_a_rehearsal_leaves_a_line_for_each_row_and_a_table_and_goes_on(tmp_path: Path) -> None:
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT / "benchmarks")))

    def run() -> list[str]:
        words = ("--device", "cpu", "--out", str(tmp_path), "--only", "library")
        environment = {**os.environ, "PYTHONPATH": path}
        subprocess.run(
            [sys.executable, str(SCRIPT), *words], env=environment, check=True, capture_output=True
        )
        rows = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
        return [f"{row['name']} {row['verdict']}" for row in rows]

    assert run() == ["library seen", "nccl not seen"] == run()
    page = (tmp_path / "gpu-session.md").read_text()
    assert "a rehearsal on a CPU: it says nothing of a GPU" in page
    cells = [line.strip("| ").split("|") for line in page.splitlines() if line.startswith("|")]
    seen = {cell[0].strip(): cell[1].strip() for cell in cells}
    assert (seen["library"], seen["nccl"], seen["memory"]) == ("seen", "not seen", "no turn")
    assert len(list(tmp_path.glob("gpu-session-*.json"))) == 2


def test_a_part_that_hangs_is_ended_with_the_processes_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    run_whole = importlib.import_module("gpu_session").run_whole

    pid = tmp_path / "pid"
    hangs = ["sh", "-c", f"sleep 600 & echo $! > {pid}; wait"]
    assert run_whole(hangs, 1.0) is None
    child = Path("/proc") / pid.read_text().strip() / "stat"

    def alive() -> bool:
        return child.exists() and child.read_text().rsplit(")", 1)[1].split()[0] != "Z"

    end = time.monotonic() + 5
    while alive() and time.monotonic() < end:
        time.sleep(0.01)
    assert not alive()


def test_the_parts_have_every_promise_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    parts, own = importlib.import_module("gpu_session").PARTS, importlib.import_module("gpu_parts")
    rows = [row for part in parts.values() for row in part.rows]
    assert sorted(rows) == sorted({**ROWS, **own.OWN})


def test_a_library_is_left_with_the_code_of_one_architecture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    prune = importlib.import_module("prune_nccl")

    def entry(kind: int, architecture: int) -> bytes:
        head = struct.pack("<HHIQ12xI", kind, 0, 32, 4, architecture)
        return head + b"code"

    inner = entry(1, 90) + entry(2, 80) + entry(2, 90)
    library = b"before" + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(inner)) + inner + b"after"
    data, sizes = prune.pruned(library, 90)
    assert len(data) == len(library) and data.count(b"code") == 1
    assert data.endswith(b"codeafter") and sizes == {(1, 90): 4, (2, 80): 4, (2, 90): 4}
