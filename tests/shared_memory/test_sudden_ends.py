"""Ranks that end, stop or pause in the midst of random calls (`sudden_ends.py`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "sudden_ends.py"
ALONE = {"OPENBLAS_NUM_THREADS": "1"}  # a process that forks has one thread
PATIENCE_S = 60.0  # for each round
LOADED_S = 20.0  # a second is promised, and measured by the program alone on a machine


def disturbed(rounds: int, seed: int) -> None:
    command = [sys.executable, str(PROGRAM), "--rounds", str(rounds), "--seed", str(seed)]
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | ALONE, start_new_session=True, **said) as going:
        try:
            printed, complaints = going.communicate(timeout=PATIENCE_S * rounds)
        finally:  # its ranks, too, should they hang: one of them may be stopped
            with suppress(ProcessLookupError):
                os.killpg(going.pid, signal.SIGKILL)
    assert going.returncode == 0, printed + complaints
    slowest = json.loads(printed.splitlines()[-1])["slowest_report_s"]
    assert max(slowest["killed"], slowest["stopped"]) < LOADED_S


@pytest.mark.slow
def test_survivors_say_which_rank_is_lost_and_nothing_is_left() -> None:
    disturbed(3, seed=2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_so_they_do_at_any_moment(exhaustive: bool) -> None:
    disturbed(150 if exhaustive else 12, seed=3)
