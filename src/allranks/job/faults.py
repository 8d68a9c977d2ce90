"""Fault injection: fail rank r at step s, or in the middle of a save.

    allranks train mytask.py --ranks 4 --inject kill@rank=2,step=30
    allranks train mytask.py --inject disk-full@at=save:write --checkpoint-every 10

A fault is ACTION@NAME=VALUE,…: by default on rank 0, at the begin of every step, in the first
attempt, not after a restart. The engine calls `reach` at named points and does nothing else about
faults; `POINTS` lists them. What was injected is written into the job of the run folder.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, get_type_hints

from allranks.errors import RequestError, nearest
from allranks.job.job import read_value

POINTS = {
    "start": "the ranks have met, and nothing is trained yet",
    "step": "before a step",
    "stepped": "after a step",
    "evaluate": "before an evaluation",
    "regroup": "before a rank of an elastic job meets the others of another group",
    "done": "the training is over and recorded, the process is about to leave",
    "save:snapshot": "before the state is copied",
    "save:write": "before the first byte of a rank's file",
    "save:half": "half of a rank's file is written",
    "save:fsync": "before a rank's file is made to last",
    "save:written": "a rank's file is there, the others' perhaps not",
    "save:manifest": "before the manifest is written (leader)",
    "save:rename": "before the manifest gets its name (leader)",
    "save:committed": "the checkpoint is there (leader)",
    "save:prune": "before old ones are removed (leader)",
}


class Injected(RuntimeError):
    """The exception that `fail` raises."""


@dataclass(frozen=True)
class Fault:
    """One fault; `step` or `attempt` -1: every one. `slow` has `seconds`, `exit` a `code`.

    `slow` sleeps `per_sample` seconds more for each sample that the rank has in the step; `since`
    is the first step of a fault that happens again and again.

    `node` and `link` ("10mbit") are for those of `NODE_FAULTS`, which happen to a simulated node
    when all ranks have come to `step`; a `cut` with `seconds` is mended after them.

    `of` says what a `flip` makes wrong: see `FLIPPED`.

    `attempt` counts the restarts since the job was started by hand.
    """

    action: str
    rank: int = 0
    step: int = -1
    at: str = "step"
    attempt: int = 0
    seconds: float = 0.1
    code: int = 1
    node: int = 0
    link: str = ""
    per_sample: float = 0.0
    since: int = -1
    of: str = "weight"

    def __str__(self) -> str:
        """`kill@rank=1,step=9`: what is not as by default."""
        values = [(each.name, getattr(self, each.name), each.default) for each in fields(self)[1:]]
        pairs = [f"{name}={value}" for name, value, default in values if value != default]
        return f"{self.action}@{','.join(pairs)}" if pairs else self.action


def parse(text: str) -> tuple[Fault, ...]:
    """The faults that a text describes, separated by white space; raises `RequestError`."""
    return tuple(_parse_one(word) for word in text.split())


def on_no_rank(text: str, count: int) -> list[str]:
    """A sentence for each fault on a rank that a job of at most `count` processes never had."""
    faults = (f for f in parse(text) if f.action in ACTIONS and not 0 <= f.rank < count)
    return [f"the fault {f} was never due: there was no rank {f.rank}, of {count}" for f in faults]


def _parse_one(word: str) -> Fault:
    asked = f"--inject {word}"
    action, _, tail = word.partition("@")
    if action not in ACTIONS and action not in NODE_FAULTS:
        raise _unknown(asked, "action", action, (*ACTIONS, *NODE_FAULTS))
    values: dict[str, Any] = {}
    kinds = {name: kind for name, kind in get_type_hints(Fault).items() if name != "action"}
    for pair in filter(None, tail.split(",")):
        name, _, value = pair.partition("=")
        if name not in kinds:
            raise _unknown(asked, "value", name, kinds)
        values[name] = read_value(name, value, kinds[name], asked)
    if action in NODE_FAULTS or "per_sample" in values:
        values.setdefault("seconds", 0.0)
    fault = Fault(action, **values)
    if fault.at not in POINTS:
        raise _unknown(asked, "point", fault.at, POINTS)
    if fault.of not in FLIPPED:
        raise _unknown(asked, "value of `of`", fault.of, FLIPPED)
    return fault


def _unknown(asked: str, kind: str, found: str, known: Any) -> RequestError:
    return RequestError(
        asked=asked,
        found=f"no {kind} {found!r}",
        why="a fault is ACTION@NAME=VALUE,… and a misspelt one would never happen",
        do=nearest(found, known),
    )


@dataclass
class Faults:
    """The faults of one rank in one attempt.

    The engine gives what some of them need: `corrupt` (one bit of the first weight is flipped),
    `leave_out` (the next collective is not made), `poison` (the loss of the next step is NaN),
    `flip` (one bit of what `FLIPPED` names).
    """

    faults: tuple[Fault, ...] = ()
    corrupt: Callable[[], None] = lambda: None
    leave_out: Callable[[], None] = lambda: None
    poison: Callable[[], None] = lambda: None
    flip: Callable[[str], None] = lambda of: None
    wrong_samples: bool = False
    done: set[Fault] = field(default_factory=set)
    reached: set[Fault] = field(default_factory=set)
    samples: int = 0

    @classmethod
    def of(cls, text: str, rank: int, attempt: int) -> Faults:
        """The faults in `text` for this rank and attempt."""
        meant = [f for f in parse(text) if f.action in ACTIONS]
        of_rank = [f for f in meant if f.rank == rank and f.attempt in (attempt, -1)]
        return cls(tuple(of_rank))

    def reach(self, point: str, step: int = -1, samples: int = 0) -> None:
        """Inject the faults for `point` in global batch `step`, of which the rank has `samples`."""
        self.samples, self.wrong_samples = samples, False
        for fault in self.faults:
            is_now = fault.at == point and fault.step in (step, -1) and step >= fault.since
            if is_now and fault not in self.done:
                if fault.action not in REPEATED_KINDS:
                    self.done.add(fault)
                self.reached.add(fault)
                ACTIONS[fault.action](fault, self)

    def never_due(self) -> list[str]:
        """A sentence for each fault whose point did not come; called when the training is over."""
        never = [f for f in self.faults if f not in self.reached and f.at != "done"]
        at_step = {f: f" with step {f.step}" if f.step >= 0 else "" for f in never}
        return [
            f"the fault {f} was never due: the job did not come to point {f.at!r}{at_step[f]}"
            for f in never
        ]


# Functions, where the stack of a rank that stands still or ends by it shows their names.


def _fail(fault: Fault, faults: Faults) -> NoReturn:
    raise Injected(f"{fault.action} on rank {fault.rank} at {fault.at}, as asked")


def _hang(fault: Fault, faults: Faults) -> None:
    while True:
        pass


def _stop(fault: Fault, faults: Faults) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _slow(fault: Fault, faults: Faults) -> None:
    time.sleep(fault.seconds + fault.per_sample * faults.samples)


def _disk_full(fault: Fault, faults: Faults) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _out_of_memory(fault: Fault, faults: Faults) -> NoReturn:
    raise MemoryError(f"{fault.action} on rank {fault.rank} at {fault.at}, as asked")


def _flip(fault: Fault, faults: Faults) -> None:
    if fault.of == "sample":
        faults.wrong_samples = True
    else:
        faults.flip(fault.of)


ACTIONS: dict[str, Callable[[Fault, Faults], None]] = {
    "fail": _fail,
    "hang": _hang,
    "stop": _stop,
    "kill": lambda fault, faults: os.kill(os.getpid(), signal.SIGKILL),
    "slow": _slow,
    "exit": lambda fault, faults: os._exit(fault.code),
    "abort": lambda fault, faults: os.abort(),
    "disk-full": _disk_full,
    "out-of-memory": _out_of_memory,
    "corrupt": lambda fault, faults: faults.corrupt(),
    "flip": _flip,
    "skip-collective": lambda fault, faults: faults.leave_out(),
    "nan": lambda fault, faults: faults.poison(),
}
FLIPPED = {
    "weight": "the largest value of the first weight",
    "gradient": "that of its gradient, in each pass of the next step",
    "moment": "that of its first moment in the optimizer",
    "sample": "the largest number in each pass of the next step",
}
NODE_FAULTS = {
    "kill-node": "a simulated node is gone, with all its processes",
    "cut": "the link of a simulated node is cut, for so many `seconds` if they are given",
    "slow-link": "the link of a simulated node carries `link` from now on",
}
MEND = "mend"
"""What undoes a `cut`: nobody asks for it by name."""
REPEATED_KINDS = ("slow", "disk-full")
