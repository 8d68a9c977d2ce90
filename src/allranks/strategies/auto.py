"""The candidates of `--strategy auto`, from the least loss of exactness to the most.

The order is a judgement: an exact sum before one that is rounded, a gradient that is rounded or
late before learners that train apart, short periods before long ones. `benchmarks/quality.py`
measures what each costs. No period is longer than the default on its card.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from allranks.errors import RequestError, nearest
from allranks.strategies.card import Exact, Workload
from allranks.strategies.choice import AUTO, TRUTH, parse_choice
from allranks.strategies.compressed import four_bit_bytes
from allranks.strategies.resolve import StrategySpec, strategy_spec

# --- link ----------------------------------------------------------------------------------------
# The link between two nodes, and its text: `100mbit`, `1ms`, in `--place` and `--strategy auto`.
#
# `--place simulated` creates such links; the dial predicts their cost.


_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")
_DELAY = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")


@dataclass(frozen=True)
class LinkSpeed:
    """What a node can send and receive at once, and how long a packet is under way between two.

    `bits_per_s` of 0 is as fast as this machine moves bytes; `source` says who told.
    """

    bits_per_s: float = 0.0
    one_way_s: float = 0.0
    source: str = "said"

    def __str__(self) -> str:
        if not self.bits_per_s:
            return "an unlimited link"
        for size, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
            if self.bits_per_s >= size:
                return f"{self.bits_per_s / size:g} {unit}"
        return f"{self.bits_per_s / 1e3:g} kbit/s"


def parse_rate(text: str, request: str) -> float:
    """Bits per second of a text like 100mbit, 0 (no bound) of none; raises `RequestError`."""
    if not text:
        return 0.0
    match = _RATE.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise RequestError(
            asked=request,
            found=f"link={text}",
            why="a link carries so many bits per second",
            do="for example link=1gbit, link=100mbit or link=2.5gbit",
        )
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def parse_delay(text: str, request: str) -> float:
    """Seconds of a text like 1ms; raises `RequestError`."""
    match = _DELAY.fullmatch(text)
    if match is None:
        raise RequestError(
            asked=request,
            found=f"delay={text}",
            why="a delay is added to every packet",
            do="for example delay=1ms or delay=500us",
        )
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


# --- facts ---------------------------------------------------------------------------------------
# The facts of a job for the dial: its model, its measured step, its ranks and the link. Pure data.


@dataclass(frozen=True)
class ModelFacts:
    """`parameters` of the model and the bytes of its buffers; `compute_s` of a step on one rank.

    `per_node` is how many ranks each of `nodes` nodes has, 0 where they differ. `busy` is by how
    much ranks that share the cores of a machine slow each other down. `steps` of the job, and
    `shapes` of its parameters, if known.
    """

    parameters: int
    compute_s: float
    ranks: int
    nodes: int
    link: LinkSpeed
    per_node: int = 1
    buffer_bytes: int = 0
    shards: int = 8
    busy: float = 1.0
    steps: int | None = None
    shapes: tuple[tuple[int, ...], ...] = ()


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
        """The steps of a period during which a message is being sent."""
        options = self.spec(ranks).options
        return float(options.get("fragments", 1) * options.get("overlap", 0))

    def sent_bytes(self, facts: ModelFacts) -> float:
        """The bytes that the busiest rank sends in a step on average, by its card."""
        spec = self.spec(facts.ranks)
        return float(spec.card.bytes_sent(self._work(facts), spec.options))

    def messages(self, facts: ModelFacts) -> int:
        """The number of messages of a step, or of a period."""
        if self.sends != "gradients":
            return int(self.spec(facts.ranks).options.get("fragments", 1))
        return max(1, -(-facts.parameters * FP32_BYTES // BUCKET_BYTES))

    def _work(self, facts: ModelFacts) -> Workload:
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


def candidates(facts: ModelFacts) -> list[Candidate]:
    """The candidates for this job, the least loss of exactness first."""
    several = 1 < facts.per_node < facts.ranks
    groups = f"ddp:reduce=hierarchical(group={facts.per_node})"
    able = [Candidate("ddp", "nothing: EXACT")]
    if several:
        able.append(Candidate(groups, "nothing: EXACT", route="hierarchical"))
    able += [
        Candidate(
            "ddp:reduce=bf16",
            "each gradient is rounded to 16 bit",
            route="all-to-all",
            arithmetic_s=3e-9,
        ),
        Candidate("ddp:late=1", "each gradient is applied one step late", is_late=True),
    ]
    if facts.shapes:
        able += COMPRESSED
    return able + [family.of(every) for family in LEARNERS for every in family.periods(facts)]


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

    def periods(self, facts: ModelFacts) -> list[int]:
        """The periods that give a job of a known length enough exchanges."""
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


# --- cost ----------------------------------------------------------------------------------------
# How long a step takes, predicted: compute, and what of the communication does not hide behind it.
#
#     step = compute + arithmetic + waiting for each other + communication - hidden
#     communication = messages · rounds · latency + max(bytes / link, bytes · copying)
#
# A ring of p ranks has 2(p-1) rounds of a one-way latency each. Bytes cross the link of a node:
# once for each node where a ring goes through the nodes in order, for every rank of it where each
# rank sends to each other one. `ddp` sends a bucket while backward computes the next, so all but
# the last bucket hides behind backward; `late=1` hides all behind the next step, and what learners
# have under way hides behind the steps that they train meanwhile. What hides is the waiting for the
# link alone: copying takes the processors that compute.
#
# The constants are estimates, from a few runs of `benchmarks/slow_link.py` on a loaded machine.


MESSAGE_S = 1.5e-4
"""What a round costs beside the delay of the link: system calls, and the ranks' waking up."""
COPYING_S = 2e-9
"""Processor time for each byte that goes through a socket: sent, received and added."""
MEMORY_MESSAGE_S = 5e-6
MEMORY_COPYING_S = 2e-10
"""The same between ranks of one machine, which talk through memory that they share."""
SKEW = 0.03
"""Of a step's compute, what ranks wait at an exchange for the one that comes last."""
OF_THE_LINK = 0.94
"""What is left of a link's bits for data: headers of TCP and IP, acknowledgements."""
BACKWARD = 2 / 3
"""The part of a step in which buckets leave."""


@dataclass(frozen=True)
class Prediction:
    """What a candidate sends in a step on average, and the seconds of its parts and of the step."""

    strategy: str
    sent_bytes: float
    communication_s: float
    hidden_s: float
    arithmetic_s: float
    step_s: float


def predicted(candidate: Candidate, facts: ModelFacts) -> Prediction:
    """The seconds of a step of `candidate`, on average over its period."""
    compute = facts.compute_s * facts.busy
    every, through_memory = candidate.period(facts.ranks), facts.nodes == 1
    sent_bytes = candidate.sent_bytes(facts)
    matrices = sum(len(shape) > 1 for shape in facts.shapes)
    codec_s = candidate.arithmetic_s * facts.parameters + candidate.matrix_s * matrices
    arithmetic = codec_s * facts.busy / every
    message = MEMORY_MESSAGE_S if through_memory else MESSAGE_S + facts.link.one_way_s
    latency = 2 * (facts.ranks - 1) * message
    copying = sent_bytes * (MEMORY_COPYING_S if through_memory else COPYING_S) * facts.busy
    moving = max(copying, _on_the_link(candidate, sent_bytes, facts))
    seconds = candidate.messages(facts) * latency / every + moving
    is_outer = candidate.sends != "gradients"
    hidden = _hidden(candidate, (seconds if is_outer else moving) - copying, compute, facts)
    step = compute * (1 + SKEW / every) + arithmetic + seconds - hidden
    return Prediction(candidate.text, sent_bytes, seconds, hidden, arithmetic, step)


def _on_the_link(candidate: Candidate, sent_bytes: float, facts: ModelFacts) -> float:
    """Seconds until the bytes of a step are through the link of a node."""
    if facts.nodes == 1 or not facts.link.bits_per_s:
        return 0.0
    bits = 8 * sent_bytes * crossings(candidate, facts)
    return bits / (facts.link.bits_per_s * OF_THE_LINK)


def crossings(candidate: Candidate, facts: ModelFacts) -> float:
    """How many times what the busiest rank sends crosses the link of its node."""
    ranks, nodes = facts.ranks, facts.nodes
    if candidate.route == "ring" or ranks == nodes:
        return 1.0
    each = facts.per_node or -(-ranks // nodes)
    if candidate.route == "all-to-all":
        return each * (ranks - each) / (ranks - 1)
    whole = 2 * (each - 1) / each + 2 * (nodes - 1) / nodes / each
    return 2 * (nodes - 1) / nodes / whole


def _hidden(candidate: Candidate, waiting: float, compute: float, facts: ModelFacts) -> float:
    """The part of the time of the link that overlaps with computation."""
    if candidate.sends != "gradients":
        under_way = candidate.steps_under_way(facts.ranks) / candidate.period(facts.ranks)
        return min(waiting, under_way * compute)
    if candidate.is_late:
        return min(waiting, compute)
    buckets = candidate.messages(facts)
    return (buckets - 1) / buckets * min(waiting, BACKWARD * compute)


# --- choosing ------------------------------------------------------------------------------------
# The dial: of all candidates the least loss of exactness that is nearly as fast as the fastest.
#
# Among those within `SLACK` of the fastest predicted step, the first of `candidates` is taken. So a
# period is no longer than pays, and where the link is fast the choice is `ddp`. Pure.


SLACK = 1.04
"""How much slower than the fastest a choice may be predicted to be, for less loss of exactness."""


@dataclass(frozen=True)
class Decision:
    """What was asked, what was chosen, and why, in a sentence; `predictions` of all that could be.

    `refused` are candidates that the job cannot have, each with the reason.
    """

    asked: str
    did: str
    why: str
    facts: ModelFacts
    predictions: tuple[Prediction, ...]
    refused: dict[str, str]

    def to_data(self) -> dict[str, Any]:
        """As plain data, for the run folder and `--dry-run --json`."""
        return asdict(self)


def choose(
    request: str, facts: ModelFacts, *, exact: bool = False, refusal: Allowed = lambda candidate: ""
) -> Decision:
    """The choice for a job; `refusal` says why it cannot have a candidate, "" where it can."""
    refused, able = {}, []
    for candidate in candidates(facts):
        inexact = exact and not candidate.is_exact(facts.ranks)
        why = "exact=yes was asked for" if inexact else refusal(candidate)
        if why:
            refused[candidate.text] = why
        else:
            able.append((candidate, predicted(candidate, facts)))
    assert able, "ddp is always there"
    fastest = min(prediction.step_s for _, prediction in able)
    chosen, its = next(pair for pair in able if pair[1].step_s <= SLACK * fastest)
    rows = tuple(prediction for _, prediction in able)
    why = _sentence(chosen, its, able[0][1], facts)
    return Decision(request, chosen.text, why, facts, rows, refused)


def _sentence(chosen: Candidate, its: Prediction, usual: Prediction, facts: ModelFacts) -> str:
    """The reason, with its arithmetic: what `ddp` would send, and what this does instead."""
    compute = f"{_seconds(facts.compute_s * facts.busy)} of compute"
    if facts.busy > 1:
        compute += (
            f" ({_seconds(facts.compute_s)} alone, {facts.busy:.2g} times that on busy cores)"
        )
    over = str(facts.link) if facts.nodes > 1 else "the memory of one machine"
    sends = f"{_bytes(usual.sent_bytes)} a step, {_seconds(usual.communication_s)} over {over}"
    if chosen.text == usual.strategy:
        return (
            f"{usual.strategy} sends {sends} beside {compute}, and nothing that loses exactness "
            f"saves more than {SLACK - 1:.0%} of a step"
        )
    return (
        f"{usual.strategy} would send {sends} beside {compute}: {_seconds(usual.step_s)} a step; "
        f"{chosen.text} sends {_bytes(its.sent_bytes)}, {_seconds(its.communication_s)}: "
        f"{_seconds(its.step_s)} a step; it costs: {chosen.costs} "
        f"({chosen.spec(facts.ranks).guarantee})"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _bytes(count: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


# --- request -------------------------------------------------------------------------------------
# `auto:link=100mbit,delay=1ms,exact=yes`: what is asked of the dial, checked. Pure.


OPTIONS = ("link", "delay", "exact")


@dataclass(frozen=True)
class DialRequest:
    """`--strategy auto` as asked: the link, where it is said; whether only EXACT ones will do."""

    text: str
    link: LinkSpeed | None = None
    exact: bool = False


def parse_dial(text: str) -> DialRequest:
    """What `auto:…` asks for; raises `RequestError` for options that the dial does not have."""
    options, request = parse_choice(text).options, f"--strategy {text}"
    for name in options:
        if name not in OPTIONS:
            raise RequestError(
                asked=request,
                found=f"no option {name!r} of auto",
                why="a misspelt one would be passed over, and another method be chosen",
                do=nearest(name, OPTIONS),
            )
    if "delay" in options and "link" not in options:
        raise RequestError(
            asked=request,
            found="a delay without a link",
            why="what a message takes is its delay and its bytes at the speed of the link",
            do=f"--strategy auto:link=100mbit,delay={options['delay']}",
        )
    exact = TRUTH.get(options.get("exact", "no").lower())
    if exact is None:
        raise RequestError(
            asked=request,
            found=f"exact={options['exact']}",
            why="it says whether only strategies that are EXACT will do: yes or no",
            do=f"--strategy {AUTO}:exact=yes",
        )
    link = None
    if "link" in options:
        rate = parse_rate(options["link"], request)
        one_way_s = parse_delay(options["delay"], request) if "delay" in options else 0.0
        link = LinkSpeed(rate, one_way_s, "said")
    return DialRequest(text, link, exact)


def check_dial(request: DialRequest, *, ranks: int, bitwise: bool, many_on_torch: bool) -> None:
    """Raise `RequestError` where there is nothing to choose among."""
    flag = f"--strategy {request.text}"
    if ranks == 1:
        raise RequestError(
            asked=f"{flag} --ranks 1",
            found="one rank",
            why="it sends nothing, so there is nothing to send less of",
            do="leave --strategy out, or --ranks 2 or more",
        )
    if bitwise:
        raise RequestError(
            asked=f"{flag} --bitwise",
            found="equal bits on any ranks",
            why="that is one tree of sums over all shards, which no way of sending less keeps",
            do="--strategy ddp --bitwise, or drop --bitwise",
        )
    if not many_on_torch:
        raise RequestError(
            asked=flag,
            found="another engine than torch",
            why="the methods that the dial chooses among are strategies of torch",
            do="--engine torch, or name a strategy: see `allranks strategies`",
        )
