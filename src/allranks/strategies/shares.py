"""Unequal shares: how many shards of a batch each rank owns, and when they are dealt anew.

`--share 5,2,1` names a weight for each rank that reads data, `--share big=5,small=2` one for each
host or kind of device, and `--share auto` deals by the speed that the ranks measure. Who computes a
shard changes no result, so the shares may change from step to step. Pure arithmetic: every rank
computes the same shares from the same numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from statistics import median

from allranks.errors import RequestError
from allranks.strategies.mesh import DATA
from allranks.strategies.resolve import StrategySpec
from allranks.strategies.shards import Shares

AUTO = "auto"

# --- dealing -------------------------------------------------------------------------------------
# When shares by speed are dealt anew. The time of a rank counts as proportional to its shards, so a
# cost of each pass is part of it. A rank then seems slower per shard the fewer it owns, but never
# takes longer with fewer of them: each change makes the slowest rank faster, so none goes back and
# forth, and where shares stay, all ranks take the same time up to a shard.


FIRST_STEPS = (4, 8, 12)
EVERY_STEPS = 8
WINDOW_STEPS = 8
LEAST_GAIN = 0.05
OFTEN = 0.75  # simulated: noise of 10 % deals nothing; a rank 1.5 times as slow is seen in 11 steps
SHORTEST_S = 1e-6


@dataclass
class Dealing:
    """The shares in force, and what a shard took each rank in the last steps with them.

    They are looked at after `FIRST_STEPS` and then every `EVERY_STEPS` steps, and dealt anew where
    the slowest rank would take at least `LEAST_GAIN` less: by the median, and in `OFTEN` of the
    steps by themselves, so that noise deals nothing.
    """

    shares: Shares
    steps: int = 0
    seconds_dealt_by: list[float] = field(default_factory=list)
    """Of each rank for a shard, by which the shares in force were dealt."""
    _seconds: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))

    def seconds_of(self, rank: int) -> float:
        """What a shard took this rank lately; 0 if that was not measured."""
        times = [step[rank] for step in self._seconds] or self.seconds_dealt_by[rank : rank + 1]
        return median(times) if times else 0.0

    def after_step(self, seconds: tuple[float, ...]) -> Shares | None:
        """Take the seconds that each rank worked in a step; returns new shares, or `None`."""
        pairs = zip(seconds, self.shares.counts, strict=True)
        self._seconds.append(tuple(max(t, SHORTEST_S) / max(n, 1) for t, n in pairs))
        self.steps += 1
        if self.steps not in FIRST_STEPS and self.steps % EVERY_STEPS:
            return None
        each = [median(times) for times in zip(*self._seconds, strict=True)]
        dealt = Shares.by_speed(self.shares.shards, each)
        if dealt.seconds(each) > (1 - LEAST_GAIN) * self.shares.seconds(each):
            return None
        most = 1 - LEAST_GAIN
        gains = [dealt.seconds(step) <= most * self.shares.seconds(step) for step in self._seconds]
        if sum(gains) < OFTEN * len(gains):
            return None
        self.shares, self.seconds_dealt_by = dealt, each
        self._seconds.clear()
        return dealt


# --- requests ------------------------------------------------------------------------------------


def check_share(text: str, spec: StrategySpec) -> None:
    """Raise `RequestError` for shares that the strategy or its ranks cannot have."""
    request, readers = f"--share {text}", spec.mesh.size(DATA)
    if spec.ranks > 1 and (why := spec.card.even_shares(spec.options)):
        raise RequestError(
            asked=f"{request} --strategy {spec.text}",
            found=f"{spec.name!r}, under which shares are even",
            why=why,
            do="leave --share out, or --strategy ddp, zero1, zero2, fsdp, hsdp or mesh",
        )
    if text == AUTO:
        return
    if readers == 1:
        raise RequestError(
            asked=request,
            found="one rank that reads data",
            why="it owns all shards, so there is nothing to deal",
            do="leave --share out, or --ranks 2 --strategy ddp",
        )
    weights = _weights(text)
    numbers = [weight for name, weight in weights if not name]
    if numbers and len(numbers) != readers:
        right = [*text.split(","), *["1"] * readers][:readers]
        raise RequestError(
            asked=request,
            found=f"{len(numbers)} number{'s' * (len(numbers) > 1)} for {readers} ranks",
            why="each rank that reads data has one, in the order of the ranks",
            do=f"--share {','.join(right)}, or --share auto",
        )


def shares_for(text: str, shards: int, names: Sequence[Sequence[str]]) -> Shares:
    """The first shares of ranks with these `names`: of their host, and of their device.

    Raises `RequestError` for names of no rank, ranks of two names, and fewer shards than ranks.
    """
    request = f"--share {text}"
    if text == AUTO:
        return Shares.even(shards, len(names))
    if shards < len(names):
        raise RequestError(
            asked=request,
            found=f"shards = {shards} for {len(names)} ranks that read data",
            why="each rank owns at least one shard",
            do=f"--set shards={len(names)}, or more for finer shares",
        )
    weights = _weights(text)
    if not weights[0][0]:
        return Shares.by_weights(shards, [weight for _, weight in weights])
    fits = [[at for at, (name, _) in enumerate(weights) if _is(name, of_rank)] for of_rank in names]
    every = sorted({name for of_rank in names for name in of_rank})
    unused = [name for at, (name, _) in enumerate(weights) if not any(at in f for f in fits)]
    unclear = [rank for rank, fit in enumerate(fits) if len(fit) != 1]
    if unused or unclear:
        problem = f"no rank on {unused[0]!r}" if unused else ""
        for rank in unclear[:1]:
            fitting = f"{len(fits[rank])} names that fit rank {rank} ({', '.join(names[rank])})"
            problem = problem or fitting
        raise RequestError(
            asked=request,
            found=problem,
            why="each rank has the number of one name: that of its host or of its device",
            do=f"names of these, with * for any letters: {', '.join(every)}",
        )
    return Shares.by_weights(shards, [weights[fit[0]][1] for fit in fits])


def _is(name: str, names: Sequence[str]) -> bool:
    return any(fnmatchcase(known, name) for known in names)


def _weights(text: str) -> list[tuple[str, float]]:
    """Each name with its number; numbers alone have the name ""."""
    parts = [part.rpartition("=") for part in text.split(",")]
    weights = [(name.strip(), _positive(number)) for name, _, number in parts]
    named = {bool(name) for name, _ in weights}
    if len(named) == 2 or any(not w for _, w in weights) or _is_double(weights):
        raise RequestError(
            asked=f"--share {text}",
            found="neither positive numbers, nor names with positive numbers",
            why="they say in which proportion the shards of a batch are dealt to the ranks",
            do="--share 5,2,1 in the order of the ranks, --share HOST=5,DEVICE=2, or --share auto",
        )
    return weights


def _is_double(weights: list[tuple[str, float]]) -> bool:
    names = [name for name, _ in weights if name]
    return len(names) != len(set(names))


def _positive(text: str) -> float:
    """The number, or 0 for a text that is no positive number."""
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if 0 < number < math.inf else 0.0
