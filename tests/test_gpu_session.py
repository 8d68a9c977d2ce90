"""The prepared run on a GPU: it goes on where it was, and says what it could not tell."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu_session.py"


@pytest.mark.slow
def test_a_rehearsal_leaves_a_line_for_each_check_and_a_table_and_goes_on(tmp_path: Path) -> None:
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT / "benchmarks")))

    def run(*names: str) -> list[str]:
        words = ("--device", "cpu", "--small", "--out", str(tmp_path), "--only", ",".join(names))
        environment = {**os.environ, "PYTHONPATH": path}
        subprocess.run(
            [sys.executable, str(SCRIPT), *words], env=environment, check=True, capture_output=True
        )
        rows = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
        return [f"{row['check']} {row['good']}" for row in rows]

    assert run("norm_of_a_view") == ["norm_of_a_view True"]
    assert run("nccl_of_one_rank") == ["norm_of_a_view True", "nccl_of_one_rank None"]
    page = (tmp_path / "gpu-session.md").read_text()
    assert "a rehearsal on a CPU: it says nothing of a GPU" in page
    seen = {ln.split(" | ")[0]: ln.split(" | ")[2] for ln in page.splitlines() if " | " in ln}
    assert seen["| norm_of_a_view"] == "yes" and seen["| nccl_of_one_rank"] == "cannot tell here"
    assert seen["| out_of_memory"] == "left out"
    assert len(list(tmp_path.glob("gpu-session-small-*.json"))) == 2


def test_a_check_that_hangs_is_ended_with_the_processes_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    run_whole = importlib.import_module("gpu_session").run_whole

    pid, log = tmp_path / "pid", tmp_path / "log"
    hangs = ["sh", "-c", f"sleep 600 & echo $! > {pid}; wait"]
    with log.open("w") as file:
        assert run_whole(hangs, file, limit=1.0) is None
    child = Path("/proc") / pid.read_text().strip() / "stat"

    def alive() -> bool:
        return child.exists() and child.read_text().rsplit(")", 1)[1].split()[0] != "Z"

    end = time.monotonic() + 5
    while alive() and time.monotonic() < end:
        time.sleep(0.01)
    assert not alive()
