"""The end of another process is heard at once, and not before what it has sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "heard_ends.py"
TICK_S = 0.1  # how long a rank that waits would sleep, if nobody woke it


def test_an_end_is_heard_at_once_and_after_all_that_was_sent() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # a process that forks has one thread
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["whole"] == {"left, and ended": True, "just ended": True}, done.stderr
    assert found["heard_after_s"] < 0.6 * TICK_S
