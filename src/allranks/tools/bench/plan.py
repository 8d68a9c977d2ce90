"""What is measured: combinations of a strategy and a number of ranks, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allranks.errors import RequestError

STRONG, WEAK = "strong", "weak"


@dataclass(frozen=True)
class Combination:
    """A strategy on so many ranks."""

    strategy: str
    ranks: int

    @property
    def name(self) -> str:
        """For a folder."""
        safe = "".join(c if c.isalnum() or c in "-=" else "_" for c in self.strategy)
        return f"{safe}-{self.ranks}"


@dataclass(frozen=True)
class Plan:
    """`combinations` are measured once in each of `repeats` turns, over `steps` after a `warm_up`.

    With `scaling` weak a batch has `batch_size` samples for each rank, with strong for all of them
    together; 0 is what the program has. `words` go to every job as they are.
    """

    program: str
    combinations: tuple[Combination, ...]
    steps: int
    warm_up: int
    repeats: int
    scaling: str = STRONG
    batch_size: int = 0
    words: tuple[str, ...] = ()

    def words_of(self, combination: Combination) -> list[str]:
        """The words after `allranks train` for one job, but its run folder."""
        words = [self.program, "--strategy", combination.strategy]
        words += ["--ranks", str(combination.ranks), "--steps", str(self.warm_up + self.steps)]
        if self.batch_size:
            parts = combination.ranks if self.scaling == WEAK else 1
            words += ["--set", f"batch_size={self.batch_size * parts}"]
        return [*words, *self.words]

    def turn(self, number: int) -> list[Combination]:
        """In which order: every second turn backwards, and begun one further each time."""
        found = list(self.combinations)
        shift = number // 2 % len(found)
        found = found[shift:] + found[:shift]
        return found if number % 2 == 0 else found[::-1]


def checked_plan(plan: Plan, strategies: Sequence[str]) -> Plan:
    """The plan, if it can be measured; raises `RequestError`."""
    if plan.scaling == WEAK and not plan.batch_size:
        raise RequestError(
            asked="--scaling weak",
            found="no --batch-size",
            why="the samples of one rank stay as many, so the batch is so many times the ranks",
            do="--batch-size 32, or what one rank is to compute in a step",
        )
    if len(set(strategies)) < len(strategies):
        raise RequestError(
            asked="--strategy " + " --strategy ".join(strategies),
            found="one of them twice",
            why="a row of the table is a strategy on a number of ranks",
            do="name each once; --repeats says how often it is measured",
        )
    return plan
