"""A job on a small disk, in a process of its own, which alone sees that disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from allranks.errors import RequestError
from allranks.job.run_folder import RunFolder
from small_disk import small_disk


def a_job_on_a_small_disk(argument: dict[str, Any]) -> None:
    """Run the command there, and write what it said and left into a file elsewhere."""
    disk = Path(argument["disk"])
    disk.mkdir()
    small_disk(str(disk), argument["options"])
    run = disk / "run"
    variables = os.environ | argument["variables"]
    words = ["train", argument["program"], "--run-dir", str(run), *argument["words"]]
    done = _allranks(words, variables)
    told = {
        "code": done.returncode,
        "out": done.stdout,
        "err": done.stderr,
        "left": sorted(path.name for path in run.iterdir()) if run.exists() else None,
    }
    if told["left"] is not None:
        told["metrics"] = (run / "metrics.jsonl").read_text()
        told["show"] = _allranks(["show", str(run)], variables).stdout
    Path(argument["told"]).write_text(json.dumps(told))


def run_folders_on_full_disks(argument: dict[str, Any]) -> None:
    """What a run folder of two ranks is refused with, disk by disk, and what it leaves there."""
    told = []
    for number, options in enumerate(argument["disks"]):
        disk = Path(argument["folder"]) / str(number)
        disk.mkdir()
        small_disk(str(disk), options)
        try:
            folder = RunFolder(disk / "runs" / "run")
            try:
                folder.take_room(range(2), with_events=argument["with_events"])
                folder.write_job_file(bytes(2000))
            finally:
                folder.remove()
        except RequestError as error:
            told.append([error.found, [path.name for path in disk.iterdir()]])
        else:
            told.append(["", [path.name for path in disk.iterdir()]])
    Path(argument["told"]).write_text(json.dumps(told))


def _allranks(words: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = str(Path(sys.executable).parent / "allranks")
    return subprocess.run([command, *words], env=variables, capture_output=True, text=True)
