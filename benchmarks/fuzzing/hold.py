"""Holds a combination against one process; makes what fails smaller, and a script of it.

All numbers must be equal within what their precision rounds; with `--bitwise`, to the bit. `Holder`
has warm ranks for most of them, and one process that trains each task once; the command,
`by_command`, decides where these say that something is wrong.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from draw import STEPS, Combination, Leg, simpler
from member import AVERAGE, REFUSED, TRAINED, Answer
from safetensors.numpy import load_file
from team import Teams
from traits import BY_PASSES

from allranks.errors import (
    AllranksError,
    FollowsRanks,
    Interrupted,
    NotEqual,
    ProgramError,
    ReplicasDiffer,
    RequestError,
    Stopped,
)
from allranks.job.config import Resolved, resolve
from allranks.job.run_folder import RunFolder
from allranks.launcher.describe import first_check
from allranks.launcher.plan import Shape, plan_of
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import run_job
from allranks.launcher.world import Visible

EQUAL, ROUNDED, DIFFERENT = "equal", "rounded", "different"
PROGRAM = f"{Path(__file__).resolve().parent}/drawn_task.py:Drawn"
BOUNDS = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 3e-2}
"""Of the largest norm-relative difference of a weight or buffer after `STEPS` steps."""
FLOORS = {"fp64": 1e-3, "fp32": 1e-3, "bf16": 1.0}
"""The least norm that a tensor is divided by: of one that is zero in truth, only what rounds."""
ROUNDINGS = 4
"""A model may enlarge what is rounded beyond the bound (two samples in a shard under BatchNorm, an
Adam): so much of what one process does."""
MOST_ROUNDED = 0.5
"""What is further apart, or no number, is not called rounded, whatever one process does."""
OF_NUMBERS = ("seed", "precision", "bitwise", "channels_last", "micro_batch")
"""Flags that one process is told, too; the last two under `--bitwise` alone."""
COMMANDED = ("ps",)
"""Strategies whose processes have roles: the command alone starts them."""


@dataclass(frozen=True)
class Trained:
    """The end of a training: weights, buffers and their average; the mean loss of all steps."""

    tensors: dict[str, Any]
    loss: float
    sha256: str


@dataclass(frozen=True)
class Verdict:
    """What became of a combination; `difference` from one process, `why` in a line."""

    what: str
    difference: float = 0.0
    why: str = ""

    @property
    def fails(self) -> bool:
        return self.what not in (EQUAL, ROUNDED, REFUSED, TOLD)


BROKEN, TOLD = "broken", "told"
"""`told`: the weights are others, and the job says so: its first check ends it, or the witness."""
OF_A_WITNESS = (FollowsRanks.__name__, ReplicasDiffer.__name__)
Train = Callable[[Resolved], Trained]
Reference = Callable[[Combination], Trained]


def held(one: Combination, server: ForkServer) -> Verdict:
    """Train it and `single` on the same data by the command, and compare all numbers."""

    def command(resolved: Resolved) -> Trained:
        return by_command(resolved, server)

    verdict = verdict_of(one, command, lambda one: trained(plainest(one), command))
    if verdict.what == DIFFERENT and "trait" in one.settings and (why := told_by(one, server)):
        return Verdict(TOLD, verdict.difference, why)
    return verdict


def told_by(one: Combination, server: ForkServer) -> str:
    """What the job says of its result, where a user would have started it; "" if nothing."""
    leg = one.legs[0]
    flags = {"threads": 1, **one.flags, "strategy": leg.strategy, "ranks": leg.ranks}
    settings = tuple(f"{name}={value}" for name, value in one.settings.items())
    with tempfile.TemporaryDirectory() as folder:
        more = {"witness": "stop", "steps": STEPS, "run_dir": f"{folder}/run"}
        try:
            run_job(resolve(PROGRAM, {**flags, **more}, settings), server, first_check=first_check)
        except RequestError as error:
            return error.why
        except ProgramError as error:
            return error.cause or str(error).partition("\n")[0] if _says_so(error) else ""
    return ""


def is_sound(one: Combination) -> bool:
    """Whether its task gives one process and many ranks the same numbers, if these are right."""
    return one.settings.get("trait") not in BY_PASSES


def _says_so(error: AllranksError) -> bool:
    """Whether a job ended because its result is not that of one process."""
    return isinstance(error, NotEqual) or getattr(error, "cause", "").startswith(OF_A_WITNESS)


def verdict_of(one: Combination, train: Train, reference: Reference) -> Verdict:
    """What a way to train makes of a combination, beside one process."""
    try:
        ours = trained(one, train)
    except RequestError as error:
        return Verdict(REFUSED, why=error.why)
    except (Stopped, Interrupted):
        raise
    except AllranksError as error:
        is_told = _says_so(error) and not is_sound(one)
        return Verdict(TOLD if is_told else BROKEN, why=str(error).partition("\n")[0])
    try:
        single = reference(one)
    except RequestError as error:
        return Verdict(BROKEN, why=f"one process is refused: {error.why}")
    if "bitwise" in one.flags:
        return compared(ours, single, None)
    precision = one.flags.get("precision", "fp64")
    if precision == "fp64" and one.settings.get("trait") == "float32_part":
        precision = "fp32"
    verdict = compared(ours, single, precision)
    if verdict.fails and verdict.difference < MOST_ROUNDED:
        rounded = ROUNDINGS * rounded_by_one(one, single, precision, reference)
        if verdict.difference <= rounded:
            return dataclasses.replace(verdict, what=ROUNDED)
    return verdict


def rounded_by_one(
    one: Combination, single: Trained, precision: str, reference: Reference
) -> float:
    """How far one process comes from itself: in float64, or there with a pass for each shard."""
    flags = {name: value for name, value in one.flags.items() if name != "precision"}
    flags |= {} if precision != "fp64" else {"bitwise": True}
    try:
        other = reference(dataclasses.replace(one, flags=flags))
    except RequestError:
        return 0.0
    return compared(single, other, precision).difference


def plainest(one: Combination) -> Combination:
    """The same task in one process, which is told what changes numbers, and no more."""
    # torch fills a weight in the order of its memory, so what is drawn there follows the layout
    draws_late = one.settings.get("trait") == "write_in_optimizer"
    told = OF_NUMBERS[: None if "bitwise" in one.flags else -1 if draws_late else -2]
    flags = {name: value for name, value in one.flags.items() if name in told}
    return Combination((Leg("single", 1),), one.settings, flags)


def trained(one: Combination, train: Train) -> Trained:
    """All legs, one after the other, each from the checkpoint of the one before."""
    flags: dict[str, Any] = {"precision": "fp64", "threads": 1, "witness": "off", **one.flags}
    settings = tuple(f"{name}={value}" for name, value in one.settings.items())
    with tempfile.TemporaryDirectory() as folder:
        for number, leg in enumerate(one.legs, 1):
            flags |= {"strategy": leg.strategy, "ranks": leg.ranks}
            flags |= {"steps": STEPS * number // len(one.legs)}
            flags["run_dir"] = f"{folder}/run-{number}"
            if len(one.legs) > 1:
                flags["checkpoint_every"] = STEPS // 2
            found = train(resolve(PROGRAM, flags, settings))
            flags["resume"] = flags["run_dir"]
    return found


def by_command(resolved: Resolved, server: ForkServer) -> Trained:
    """As `allranks train` does it: ranks of its own, under a supervisor."""
    result = run_job(resolved, server)
    tensors = load_file(result.run_dir / "weights.safetensors")
    if (average := result.run_dir / "average.safetensors").exists():
        tensors |= {f"{AVERAGE}{name}": tensor for name, tensor in load_file(average).items()}
    return Trained(tensors, result.summary["train_loss"] or 0.0, result.summary["weights_sha256"])


def by_team(resolved: Resolved, teams: Teams) -> Trained:
    """By warm ranks, after what the command looks at before it starts any."""
    job, task = resolved.job, resolved.job.task
    plan_of(job, Shape({}, int(task.get("batch_size", 8)), int(task.get("shards", 8))), Visible())
    if job.checkpoint_every is None:
        answers = teams.train(dataclasses.replace(job, run_dir=""))
    else:
        folder = RunFolder(Path(job.run_dir))
        try:
            folder.write_job(resolved)
            answers = teams.train(job)
        finally:
            folder.close()
    return _agreed(answers)


def _agreed(answers: list[Answer]) -> Trained:
    first = answers[0]
    if any(one.what != first.what for one in answers) or first.what not in (TRAINED, REFUSED):
        said = next(one for one in answers if one.what != TRAINED)
        raise ProgramError(said.why)
    if first.what == REFUSED:
        raise RequestError(asked="", found="", why=first.why, do="")
    if len({one.sha256 for one in answers}) > 1:
        raise ProgramError("the ranks end with weights that are not the same")
    assert first.tensors is not None
    return Trained(first.tensors, first.loss, first.sha256)


class Holder:
    """Holds one combination after the other, by warm ranks and, every so often, by the command."""

    def __init__(self, server: ForkServer, teams: Teams, *, command_every: int) -> None:
        self._server, self._teams, self._every = server, teams, command_every
        self._task, self._single = "", dict[str, Trained]()
        self.commanded, self.disagreements = 0, list[str]()

    def held(self, one: Combination, number: int) -> Verdict:
        """What became of it."""
        names = [leg.strategy.partition(":")[0] for leg in one.legs]
        if number % self._every == 0 or any(name in COMMANDED for name in names):
            self.commanded += 1
            verdict = verdict_of(one, self._by_command, self._reference)
            return held(one, self._server) if verdict.what == DIFFERENT else verdict
        verdict = verdict_of(one, self._by_team, self._reference)
        if verdict.fails:
            self.commanded += 1
            decided = held(one, self._server)
            if not decided.fails:
                self.disagreements.append(f"{number}: {one}: {verdict.what} {verdict.why}")
            return decided
        return verdict

    def _by_command(self, resolved: Resolved) -> Trained:
        return by_command(resolved, self._server)

    def _by_team(self, resolved: Resolved) -> Trained:
        return by_team(resolved, self._teams)

    def _reference(self, one: Combination) -> Trained:
        """One process, which has trained the last task that was asked for already."""
        plain = plainest(one)
        if self._task != str(plain.settings):
            self._task = str(plain.settings)
            self._single.clear()
        if str(plain) not in self._single:
            self._single[str(plain)] = trained(plain, self._by_team)
        return self._single[str(plain)]


def compared(ours: Trained, single: Trained, precision: str | None) -> Verdict:
    """Whether all numbers are those of one process, as `precision` rounds; None: all bits."""
    if ours.tensors.keys() != single.tensors.keys():
        names = sorted(ours.tensors.keys() ^ single.tensors.keys())
        return Verdict(DIFFERENT, np.inf, f"tensors {names}")
    floor = FLOORS[precision or "fp64"]
    losses = np.asarray(ours.loss), np.asarray(single.loss)
    apart = {"the loss in training": _difference(*losses, floor)}
    apart |= {n: _difference(ours.tensors[n], of, floor) for n, of in single.tensors.items()}
    worst = max(apart, key=lambda name: np.nan_to_num(apart[name], nan=np.inf))
    if precision is None:
        if ours.sha256 == single.sha256:
            return Verdict(EQUAL)
        return Verdict(DIFFERENT, apart[worst], f"the bits of the weights, {worst} most")
    return Verdict(EQUAL if apart[worst] <= BOUNDS[precision] else DIFFERENT, apart[worst], worst)


def _difference(ours: Any, single: Any, floor: float) -> float:
    a, b = ours.astype(np.float64), single.astype(np.float64)
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), floor))


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

from allranks.job.engines import preload_for
from allranks.launcher.processes.fork_server_client import ForkServer

one = Combination(
    legs={one.legs!r},
    settings={one.settings!r},
    flags={one.flags!r},
)
with ForkServer(preload_for(PROGRAM, "torch")) as server:
    print(held(one, server))
'''
