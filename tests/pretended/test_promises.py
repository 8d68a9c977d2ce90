"""`allranks doctor --gpus` where torch has the pretended device, as any that is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT
from pretended.plug import installed_in


@pytest.mark.slow
def test_promises_are_seen_to_hold_on_one_device_that_ranks_share(tmp_path: Path) -> None:
    path = os.pathsep.join((str(installed_in(tmp_path / "packages")), str(ROOT / "tests")))
    words = ("doctor", "--gpus=zero1,memory,waits", "--run-dir", "found", "--json")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "allranks.cli.main", *words],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record == json.loads((tmp_path / "found" / "gpus.json").read_text())
    assert (record["devices"]["device"], record["devices"]["count"]) == ("pretended", 1)
    shared = "2 ranks share 1 pretended"
    assert [(row["name"], row["on"], row["verdict"]) for row in record["rows"]] == [
        ("zero1", shared, "seen"),
        ("memory", "1 rank, pretended", "not seen"),
        ("waits", "1 rank, pretended", "not seen"),
    ]
    assert record["rows"][0]["found"]["steps"] == 4
    assert "torch counts no waits here" in record["rows"][2]["why"]
    assert "1 seen, 2 not seen, 0 failed" in (tmp_path / "found" / "gpus.md").read_text()
    assert {path.name for path in (tmp_path / "found").iterdir()} == {"gpus.json", "gpus.md"}
