"""A traceback as it is shown: the lines of the user, all others as how many they are."""

from __future__ import annotations

from pathlib import Path

import allranks
from allranks.launcher.fault_report import folded

OURS = Path(allranks.__file__).parent
TORCH = "/venv/lib/python3.11/site-packages/torch/nn"
WHOLE = f"""Traceback (most recent call last):
  File "{OURS}/torch/worker.py", line 76, in main
    run.train()
  File "{OURS}/torch/trainer.py", line 148, in step
    self.x()
    ~~~~~~^^
  File "/home/me/allranks/mytask.py", line 14, in loss
    return f(output)
  File "{TORCH}/functional.py", line 3, in f
    return g(x)
RuntimeError: boom
    with more of it
"""


def test_frames_that_are_not_the_users_are_counted() -> None:
    assert folded(WHOLE).splitlines() == [
        "Traceback (most recent call last):",
        "  … 2 frames of allranks",
        '  File "/home/me/allranks/mytask.py", line 14, in loss',
        "    return f(output)",
        "  … 1 frame of torch",
        "RuntimeError: boom",
        "    with more of it",
    ]


def test_without_a_line_of_the_user_all_of_it_is_shown() -> None:
    text = WHOLE.replace("/home/me/allranks/mytask.py", f"{OURS}/torch/step/step.py")
    assert folded(text) == text
