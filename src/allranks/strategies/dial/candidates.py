"""What the dial chooses among: ways to sum, from the least loss of exactness to the most.

The order is a judgement: an exact sum before one that is rounded, a gradient that is rounded or
late before learners that train apart, short periods before long ones. `benchmarks/quality.py`
measures what each costs. No period is longer than the default on its card.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from allranks.strategies.card import Exact, Workload
from allranks.strategies.dial.facts import Facts
from allranks.strategies.reductions.compressed import four_bit_bytes
from allranks.strategies.resolve import StrategySpec, strategy_spec

BUCKET_BYTES = 25 * 2**20
TALLY_BYTES = 64
FP32_BYTES = 4
INDEX_BITS = 12
LEAST_MEETINGS = 8
Route = Literal["ring", "hierarchical", "all-to-all"]


@dataclass(frozen=True)
class Candidate:
    """A strategy as it is written, and what the clock sees of it.

    `sends` is what a message holds: the `gradients` of a step; all `weights` of a meeting, `codes`
    of four bits of what has become of them, or the `largest` numbers of that.
    `arithmetic_s` is the time of its own arithmetic for each parameter and exchange, in seconds, of
    codecs with their loops in C (`torch.compression.native`), and `matrix_s` that of the calls for
    each matrix, however small; `route` is how its bytes come to the
    links of nodes with several ranks.
    """

    text: str
    costs: str
    sends: Literal["gradients", "weights", "codes", "largest"] = "gradients"
    route: Route = "ring"
    arithmetic_s: float = 0.0
    matrix_s: float = 0.0
    is_late: bool = False

    def spec(self, ranks: int) -> StrategySpec:
        """The strategy with its options; raises `RequestError` where it cannot be."""
        return strategy_spec(self.text, ranks)

    def is_exact(self, ranks: int) -> bool:
        return isinstance(self.spec(ranks).guarantee, Exact)

    def period(self, ranks: int) -> int:
        """Steps between two exchanges."""
        return int(self.spec(ranks).options.get("every", 1))

    def steps_under_way(self, ranks: int) -> float:
        """While how many steps of a period a part of what is sent is on its way."""
        options = self.spec(ranks).options
        return float(options.get("fragments", 1) * options.get("overlap", 0))

    def sent_bytes(self, facts: Facts) -> float:
        """What its card says that the busiest rank sends, on average in a step."""
        spec = self.spec(facts.ranks)
        return float(spec.card.bytes_sent(self._work(facts), spec.options))

    def messages(self, facts: Facts) -> int:
        """How many messages a step, or a period, has."""
        if self.sends != "gradients":
            return int(self.spec(facts.ranks).options.get("fragments", 1))
        return max(1, -(-facts.parameters * FP32_BYTES // BUCKET_BYTES))

    def _work(self, facts: Facts) -> Workload:
        size = facts.parameters * FP32_BYTES
        if self.sends == "weights":
            messages: tuple[int, ...] = (0, size + facts.buffer_bytes, 0, TALLY_BYTES)
        elif self.sends == "codes":
            messages = (0, facts.buffer_bytes, four_bit_bytes(facts.parameters), TALLY_BYTES)
        elif self.sends == "largest":
            coded = _coded_bytes(facts.parameters, self.spec(facts.ranks).options)
            messages = (0, facts.buffer_bytes, coded, TALLY_BYTES)
        elif self.is_late:
            messages = (size, TALLY_BYTES)
        else:
            messages = (size + TALLY_BYTES,)
        gradients, shapes = facts.parameters, (facts.shapes,)
        return Workload(messages, facts.ranks, facts.shards, gradients, TALLY_BYTES, shapes=shapes)


COMPRESSED = [
    Candidate(
        "ddp:reduce=power-sgd",
        "each matrix of gradients is a product of two thin ones; what that leaves out comes later",
        arithmetic_s=3e-9,
        matrix_s=4e-4,
    ),
    Candidate(
        "ddp:reduce=one-bit",
        "each gradient is rounded to one of two numbers; what that leaves out comes later",
        route="all-to-all",
        arithmetic_s=7e-9,
        matrix_s=3e-4,
    ),
]
"""What follows the shapes of the parameters."""


def _coded_bytes(numbers: int, options: Mapping[str, Any]) -> int:
    """Of each chunk the numbers that are kept: where, what, and one scale for all of them."""
    chunks = -(-numbers // int(options["chunk"]))
    bits = int(options["bits"]) or 8 * FP32_BYTES
    return round(chunks * (int(options["keep"]) * (INDEX_BITS + bits) / 8 + FP32_BYTES))


def candidates(facts: Facts) -> list[Candidate]:
    """All that may be chosen for this job, the least loss of exactness first."""
    several = 1 < facts.per_node < facts.ranks
    groups = f"ddp:reduce=hierarchical(group={facts.per_node})"
    found = [Candidate("ddp", "nothing: EXACT")]
    if several:
        found.append(Candidate(groups, "nothing: EXACT", route="hierarchical"))
    found += [
        Candidate(
            "ddp:reduce=bf16",
            "each gradient is rounded to 16 bit",
            route="all-to-all",
            arithmetic_s=3e-9,
        ),
        Candidate("ddp:late=1", "each gradient is applied one step late", is_late=True),
    ]
    if facts.shapes:
        found += COMPRESSED
    return found + [family.of(every) for family in LEARNERS for every in family.periods(facts)]


@dataclass(frozen=True)
class Learners:
    """Learners that train apart for so many steps, up to the default of the card, and then what."""

    name: str
    every: tuple[int, ...]
    then: str
    sends: Literal["weights", "codes", "largest"] = "weights"
    arithmetic_s: float = 1e-8
    more: str = ""

    def of(self, every: int) -> Candidate:
        """The candidate of this period."""
        costs = f"learners train apart for {every} steps, and {self.then}"
        text = f"{self.name}:every={every}{self.more}"
        return Candidate(text, costs, self.sends, arithmetic_s=self.arithmetic_s)

    def periods(self, facts: Facts) -> list[int]:
        """Those which leave a job of a known length enough meetings."""
        longest = float("inf") if facts.steps is None else facts.steps / LEAST_MEETINGS
        return [every for every in self.every if every <= longest]


LEARNERS = (
    Learners("local-sgd", (2, 4, 8, 16), "then take the mean of their weights"),
    Learners("diloco", (50,), "an outer optimizer with momentum joins them"),
    Learners(
        "diloco",
        (50,),
        "an outer optimizer with momentum joins them, a quarter of the model at a time, in 4 bits "
        "and 4 steps late",
        "codes",
        arithmetic_s=2e-8,
        more=",bits=4,fragments=4,overlap=4",
    ),
    Learners(
        "sparse-loco",
        (30,),
        "64 of each 4,096 numbers that they found are sent, in 2 bits",
        "largest",
        arithmetic_s=1.7e-8,
    ),
)


Allowed = Callable[[Candidate], str]
"""Why a job cannot have a candidate; "" where it can."""
