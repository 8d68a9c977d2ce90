"""Holds a combination against one process, in float64; makes what fails smaller, and a script."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from draw import STEPS, Combination, Leg, simpler
from safetensors.numpy import load_file

from allranks.errors import AllranksError, Interrupted, RequestError, Stopped
from allranks.job.config import resolve
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import run_job

EQUAL, REFUSED, DIFFERENT, BROKEN = "equal", "refused", "different", "broken"
PROGRAM = f"{Path(__file__).resolve().parent}/drawn_task.py:Drawn"
BOUND = 1e-9
"""Of the largest norm-relative difference of a weight or buffer after `STEPS` steps."""
FLOOR = 1e-3
"""The least norm that a tensor is divided by: of one that is zero in truth, only what rounds."""


@dataclass(frozen=True)
class Verdict:
    """What became of a combination; `difference` from one process, `why` in a line."""

    what: str
    difference: float = 0.0
    why: str = ""

    @property
    def fails(self) -> bool:
        return self.what in (DIFFERENT, BROKEN)


def held(one: Combination, server: ForkServer) -> Verdict:
    """Train it and `single` on the same data, and compare weights, buffers and the mean loss."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            ours = _trained(one, one.legs, Path(folder), server)
        except RequestError as error:
            return Verdict(REFUSED, why=error.why)
        except (Stopped, Interrupted):
            raise
        except AllranksError as error:
            return Verdict(BROKEN, why=str(error).partition("\n")[0])
        try:
            single = _trained(one, (Leg("single", 1),), Path(folder) / "single", server)
        except RequestError as error:
            return Verdict(BROKEN, why=f"one process is refused: {error.why}")
        return _compared(ours, single)


def _trained(
    one: Combination, legs: tuple[Leg, ...], folder: Path, server: ForkServer
) -> tuple[dict[str, Any], float]:
    """Weights and buffers at the end, and the mean loss of all steps."""
    flags: dict[str, Any] = {"precision": "fp64", "threads": 1, "witness": "off", **one.flags}
    settings = tuple(f"{name}={value}" for name, value in one.settings.items())
    for number, leg in enumerate(legs, 1):
        flags |= {"strategy": leg.strategy, "ranks": leg.ranks}
        flags |= {"steps": STEPS * number // len(legs), "run_dir": str(folder / f"run-{number}")}
        result = run_job(resolve(PROGRAM, {**flags, "checkpoint_every": 3}, settings), server)
        flags["resume"] = flags["run_dir"]
    return load_file(result.run_dir / "weights.safetensors"), result.summary["train_loss"]


def _compared(ours: tuple[dict[str, Any], float], single: tuple[dict[str, Any], float]) -> Verdict:
    if ours[0].keys() != single[0].keys():
        return Verdict(DIFFERENT, np.inf, f"tensors {sorted(ours[0].keys() ^ single[0].keys())}")
    losses = [np.asarray(loss) for _, loss in (ours, single)]
    if not (off := _difference(*losses)) <= BOUND:
        return Verdict(DIFFERENT, off, "the loss in training")
    apart = {name: _difference(ours[0][name], of) for name, of in single[0].items()}
    worst = max(apart, key=lambda name: apart[name])
    if not apart[worst] <= BOUND:
        return Verdict(DIFFERENT, apart[worst], worst)
    return Verdict(EQUAL, apart[worst])


def _difference(ours: Any, single: Any) -> float:
    a, b = ours.astype(np.float64), single.astype(np.float64)
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), FLOOR))


def shrunk(one: Combination, verdict: Verdict, server: ForkServer) -> tuple[Combination, Verdict]:
    """The plainest combination that fails in the same way: nothing can be left out of it."""
    for less in simpler(one):
        found = held(less, server)
        if found.what == verdict.what:
            return shrunk(less, found, server)
    return one, verdict


def script_of(one: Combination, verdict: Verdict) -> str:
    """A script that shows it again; it runs from the root of a checkout."""
    return f'''"""{one}: {verdict.what}, {verdict.why} {verdict.difference:.3g}"""

import sys

sys.path.insert(0, "benchmarks/fuzzing")
from draw import Combination, Leg
from hold import PROGRAM, held

from allranks.catalog import preload_for
from allranks.launcher.processes.fork_server_client import ForkServer

one = Combination(
    legs={one.legs!r},
    settings={one.settings!r},
    flags={one.flags!r},
)
with ForkServer(preload_for(PROGRAM, "torch")) as server:
    print(held(one, server))
'''
