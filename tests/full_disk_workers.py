"""A job on a small disk, in a process of its own, which alone sees that disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from small_disk import small_disk


def a_job_on_a_small_disk(argument: dict[str, Any]) -> None:
    """Run the command there, and write what it said and left into a file elsewhere."""
    disk = Path(argument["disk"])
    disk.mkdir()
    small_disk(str(disk), "4m")
    run = disk / "run"
    variables = os.environ | argument["variables"]
    words = ["train", argument["program"], "--run-dir", str(run), *argument["words"]]
    done = _allranks(words, variables)
    told = {
        "code": done.returncode,
        "out": done.stdout,
        "err": done.stderr,
        "events": [path.read_text() for path in sorted(run.glob("events*.jsonl"))],
        "metrics": (run / "metrics.jsonl").read_text(),
        "left": sorted(path.name for path in run.iterdir()),
        "show": _allranks(["show", str(run)], variables).stdout,
    }
    Path(argument["told"]).write_text(json.dumps(told))


def _allranks(words: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = str(Path(sys.executable).parent / "allranks")
    return subprocess.run([command, *words], env=variables, capture_output=True, text=True)
