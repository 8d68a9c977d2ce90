"""What is measured: combinations of a strategy, or a peer, and a number of ranks, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allranks.errors import RequestError
from allranks.strategies.choice import split_outside_brackets
from allranks.strategies.resolve import card_of

STRONG, WEAK = "strong", "weak"
EVEN = "even"


@dataclass(frozen=True)
class Combination:
    """A strategy on a number of ranks; for a peer, `strategy` is its name.

    Where shares are compared, ` --share SHARE` follows the strategy, unless they are even.
    """

    strategy: str
    ranks: int
    is_peer: bool = False

    @property
    def name(self) -> str:
        """For a folder."""
        safe = "".join(c if c.isalnum() or c in "-=" else "_" for c in self.strategy)
        return f"{'peer-' if self.is_peer else ''}{safe}-{self.ranks}"


@dataclass(frozen=True)
class BenchPlan:
    """`combinations` are measured once in each of `repeats` turns, over `steps` after a `warm_up`.

    With weak `scaling` a batch has `batch_size` samples per rank, with strong scaling in all (0:
    the program's). With `until` a run ends when its evaluation reaches that metric, or after
    `steps` (0: the epochs of the program). `swept` is the option in which the strategies differ. A
    run of a peer or a script ends after `peer_limit_s`. `words` are passed to every job. `command`
    starts a script, which is measured in place of a task.
    """

    program: str
    combinations: tuple[Combination, ...]
    steps: int
    warm_up: int
    repeats: int
    scaling: str = STRONG
    batch_size: int = 0
    words: tuple[str, ...] = ()
    until: str = ""
    swept: str = ""
    peer_limit_s: float = 1800.0
    command: tuple[str, ...] = ()

    def words_of(self, combination: Combination) -> list[str]:
        """The arguments of `allranks train` for one job, without its run folder.

        For a peer they describe the same job, with the default strategy of its engine.
        """
        words = [self.program]
        words += [] if combination.is_peer else ["--strategy", *combination.strategy.split(" ")]
        words += ["--ranks", str(combination.ranks)]
        if self.steps:
            words += ["--steps", str(self.warm_up + self.steps)]
        if self.batch_size:
            parts = combination.ranks if self.scaling == WEAK else 1
            words += ["--set", f"batch_size={self.batch_size * parts}"]
        if self.until and not combination.is_peer:
            words += ["--until", self.until]
        return [*words, *self.words]

    def turn(self, number: int) -> list[Combination]:
        """The order of a turn: every second one is reversed, and each pair starts one further."""
        order = list(self.combinations)
        shift = number // 2 % len(order)
        order = order[shift:] + order[:shift]
        return order if number % 2 == 0 else order[::-1]


def with_shares(strategies: Sequence[str], shares: Sequence[str]) -> list[str]:
    """Each strategy with each of the shares; EVEN for those of a job that names none."""
    words = ["" if share == EVEN else f" --share {share}" for share in shares or (EVEN,)]
    return [f"{strategy}{each}" for strategy in strategies for each in words]


def checked_plan(plan: BenchPlan, strategies: Sequence[str]) -> BenchPlan:
    """The plan, if it can be measured; raises `RequestError`."""
    if plan.scaling == WEAK and not plan.batch_size:
        raise RequestError(
            asked="--scaling weak",
            found="no --batch-size",
            why="each rank keeps its samples, so the batch is that number times the ranks",
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


def swept(strategies: Sequence[str], sweep: str) -> tuple[list[str], str]:
    """The strategies with each value of `option=value,…`, and the option; raises `RequestError`.

    A strategy without this option stays as it is, for comparison. A value may be a choice with
    options of its own in brackets.
    """
    option, _, values = sweep.partition("=")
    try:
        texts = [text for text in split_outside_brackets(values) if text]
    except ValueError as error:
        raise RequestError(
            asked=f"--sweep {sweep}",
            found=str(error),
            why="values stand between commas, with options of their own in brackets",
            do="--sweep 'reduce=mean,top-k(k=1,chunk=64)'",
        ) from None
    options = {strategy: {o.name for o in card_of(strategy).options} for strategy in strategies}
    having = [strategy for strategy, names in options.items() if option in names]
    if not having or len(texts) < 2 or len(set(texts)) < len(texts):
        known = sorted(set().union(*options.values()))
        raise RequestError(
            asked=f"--sweep {sweep}",
            found="no strategy with that option" if not having else "fewer than two values",
            why="a sweep measures a strategy with each of some values of one option",
            do=f"--sweep OPTION=1,2,4 with one of {', '.join(known)}"
            if known
            else "a --strategy with options: see `allranks strategies NAME`",
        )
    variants = list[str]()
    for name in strategies:
        mark = "," if ":" in name else ":"
        variants += [f"{name}{mark}{option}={text}" for text in texts] if name in having else [name]
    return variants, option


def value_of(strategy: str, option: str) -> float | None:
    """The value of the swept option in a strategy; `None` if it has none."""
    _, _, text = strategy.partition(":")
    try:
        options = dict(part.partition("=")[::2] for part in split_outside_brackets(text))
        return float(options[option])
    except (KeyError, ValueError):
        return None
