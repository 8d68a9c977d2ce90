"""The cards of learners that train apart.

Under an outer optimizer they meet every so many steps. A learner is one rank, or several that train
by a strategy of their own (`inner`). What the meeting makes of the learners' weights is the outer
optimizer's. The learners of `decoupled` come and go, and a synchronizer merges what they found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allranks.errors import RequestError
from allranks.strategies.card import (
    Approximate,
    Card,
    Contents,
    Option,
    Picked,
    Reference,
    Stored,
    Workload,
)
from allranks.strategies.cards.data_parallel import DATA_PARALLEL_CARDS
from allranks.strategies.cards.model_parallel import TENSOR_CARD
from allranks.strategies.cards.sharded import FSDP_CARDS, ZERO_CARDS
from allranks.strategies.mesh import LEARNER, Agreement, Mesh
from allranks.strategies.roles import LEARNER as LEARNER_ROLE
from allranks.strategies.roles import Role, coming_and_going

ALONE = "single"
INNER = {
    name: card
    for card in (*DATA_PARALLEL_CARDS, *ZERO_CARDS, *FSDP_CARDS, TENSOR_CARD)
    if (name := card.name) in (ALONE, "ddp", "zero1", "zero2", "fsdp", "tensor")
}
"""The strategies of which a learner may train by one: of several ranks by one of the last five."""
PLAIN_SGD = "the task's optimizer is SGD without momentum, and clips nothing"


def learners_of(ranks: int, options: Mapping[str, Any]) -> int:
    """How many learners so many ranks are; raises `RequestError` where they do not fit."""
    inner: Picked = options["inner"]
    learners = int(options["learners"]) or ranks
    request = f"learners={options['learners']},inner={inner} on {ranks} ranks"
    if ranks % learners:
        raise RequestError(
            asked=request,
            found=f"{ranks} ranks for {learners} learners",
            why="each learner has as many ranks as any other",
            do=f"--ranks {-(-ranks // learners) * learners}",
        )
    if (ranks == learners) != (inner.name == ALONE) and ranks > 1:
        several = ranks // learners
        raise RequestError(
            asked=request,
            found=f"{several} rank{'s' * (several > 1)} in a learner",
            why="one rank trains alone (inner=single), and several by a strategy of their own",
            do=f"learners={ranks // 2},inner=ddp" if ranks > 2 else "leave learners and inner out",
        )
    return learners


def learner_options(options: Mapping[str, Any]) -> Picked:
    """The strategy of the ranks of one learner, with its options."""
    inner: Picked = options["inner"]
    return inner


def _check_periods(options: Mapping[str, Any]) -> None:
    every, near = int(options["every"]), int(options.get("near", 0))
    if near and (every % near or near == every):
        raise RequestError(
            asked=f"every={every},near={near}",
            found=f"{every} steps, which are no {near} several times",
            why="learners that are near each other meet so and so often between two meetings of "
            "all",
            do=f"every={max(2, -(-every // near)) * near}, or leave near out",
        )
    pieces, overlap = int(options.get("fragments", 1)), int(options.get("overlap", 0))
    if pieces > every or overlap >= every:
        raise RequestError(
            asked=f"every={every},fragments={pieces},overlap={overlap}",
            found=f"{pieces} fragments, each under way for {overlap} steps, in {every} steps",
            why="a fragment comes back before it is sent again, and one at most is sent in a step",
            do=f"at most {every} fragments, an overlap below {every}",
        )


def near_of(ranks: int, options: Mapping[str, Any]) -> int:
    """How many learners are near each other: 1 where all exchanges are of all."""
    learners = learners_of(ranks, options)
    if not int(options.get("near", 0)):
        return 1
    group = int(options["group"]) or learners
    if learners % group:
        raise RequestError(
            asked=f"near={options['near']},group={group} with {learners} learners",
            found=f"{learners} learners, which are no whole groups of {group}",
            why="each meets with as many as any other",
            do="a group that divides the learners, or leave near out",
        )
    return group


def of_nodes(options: Mapping[str, Any], per_node: int, ranks: int) -> dict[str, str]:
    """What learners leave open and follows from `per_node`, the ranks of each node (0: unlike).

    A learner of several ranks is a node, and learners of one node are near each other.
    """
    options_of_nodes: dict[str, str] = {}
    if per_node in (0, ranks):
        return options_of_nodes
    learners = int(options["learners"]) or ranks
    if learner_options(options).name != ALONE and not options["learners"]:
        learners = ranks // per_node
        options_of_nodes["learners"] = str(learners)
    if options.get("near") and not options["group"] and per_node % (ranks // learners) == 0:
        options_of_nodes["group"] = str(max(1, per_node // (ranks // learners)))
    return options_of_nodes


def _mesh(ranks: int, options: Mapping[str, Any]) -> Mesh:
    _check_periods(options)
    near_of(ranks, options)
    learners, inner_choice = learners_of(ranks, options), options["inner"]
    within = INNER[inner_choice.name].mesh(ranks // learners, inner_choice.options)
    return Mesh(((LEARNER, learners), *within.axes))


def _bytes(work: Workload, options: Mapping[str, Any]) -> int:
    """Those of the inner strategy in each step, and of all weights in each block."""
    within, weights, coded, notes = work.messages
    every, near = int(options["every"]), int(options.get("near", 0))
    learners = learners_of(work.ranks, options)
    per_step = within + 2 * (learners - 1) / learners * (weights + notes) / every
    per_step += (learners - 1) * coded / every
    if near:
        group = near_of(work.ranks, options)
        per_step += 2 * (group - 1) / group * weights * (1 / near - 1 / every)
    return round(per_step)


def _stored(keeps: int, coded: str = "") -> Stored:
    """What a learner of one rank has, the global weights, what is sent, and what moves them.

    With `bits` of `coded` also what was not sent.
    """

    def of(has: Contents, options: Mapping[str, Any]) -> float:
        left_out = int(bool(coded) and options["bits"] == coded)
        return (4 + keeps + left_out + has.optimizer) * (has.cut + has.uncut)

    more = f"; bits={coded}: ({5 + keeps} + k)" if coded else ""
    return Stored(f"({4 + keeps} + k)(C + R), learners of one rank{more}", of)


def _exact_at(words: str, setting: Mapping[str, str]) -> Approximate:
    return Approximate(f"{words}, and {PLAIN_SGD}", {"every": "1", **setting}, plain_sgd=True)


def _every(steps: int) -> Option:
    return Option("every", steps, "steps of a learner between two meetings", at_least=1)


STATE = Option(
    "state", "keep", "what a meeting makes of the inner optimizers' state", ("keep", "reset")
)
NEAR = (
    Option("near", 0, "steps between averages among learners of a group; 0: none", at_least=0),
    Option("group", 0, "learners in such a group; 0: those of a node", at_least=0),
)
FORMULA = (
    "those of `inner` + 2(L-1)/L · (weights + buffers + 56)/every; near: + "
    "2(g-1)/g · (weights + buffers) · (1/near - 1/every)"
)
COMMON = (
    Option("learners", 0, "how many learners; 0: every rank is one", at_least=0),
    Option(
        "inner",
        ALONE,
        "how the ranks of a learner train together",
        {name: card.options for name, card in INNER.items()},
    ),
    Option("after", 0, "steps in which gradients are summed over all first", at_least=0),
)
EVERY_OUTER: dict[str, Any] = {
    "bytes_sent": _bytes,
    "memory": "what `inner` has + the global weights + what is sent (+ momentum)",
    "many_ranks": True,
    "mesh": _mesh,
}

OUTER_CARDS = (
    Card(
        name="local-sgd",
        summary="Learners train apart, and take the mean of their weights every few steps.",
        take_when="the link is slow, and a result that depends on the ranks is accepted.",
        bytes_formula=FORMULA,
        guarantee=_exact_at("every=1", {}),
        stored=_stored(0),
        options=(_every(16), *COMMON, *NEAR, STATE),
        paper="Stich 2019, Local SGD, arXiv 1805.09767; Lin et al. 2020 (post-local: after=…), "
        "arXiv 1808.07217",
        **EVERY_OUTER,
    ),
    Card(
        name="slowmo",
        summary="local-sgd whose means move the global weights with a slow momentum.",
        take_when="the plain means of `local-sgd` lose accuracy.",
        bytes_formula=FORMULA,
        guarantee=_exact_at("every=1, alpha=1, beta=0", {"alpha": "1", "beta": "0"}),
        stored=_stored(1),
        options=(
            _every(12),
            Option("alpha", 1.0, "slow rate", above=0),
            Option("beta", 0.7, "slow momentum", at_least=0, below=1),
            *COMMON,
            *NEAR,
            STATE,
        ),
        paper="Wang et al. 2020, SlowMo, arXiv 1910.00643",
        **EVERY_OUTER,
    ),
    Card(
        name="block-momentum",
        summary="BMUF: the mean step of a block moves the global weights with momentum.",
        take_when="`local-sgd` on many ranks learns too slowly.",
        bytes_formula=FORMULA,
        guarantee=_exact_at(
            "every=1, momentum=0, block_rate=1", {"momentum": "0", "block_rate": "1"}
        ),
        stored=_stored(2),
        options=(
            _every(16),
            Option("momentum", -1.0, "of blocks; -1: 1 - 1/learners", at_least=-1, below=1),
            Option("block_rate", 1.0, "what a block's mean step is times", above=0),
            Option(
                "form",
                "paper",
                "paper: Nesterov; classical; cntk: as its code has it",
                ("paper", "classical", "cntk"),
            ),
            *COMMON,
            *NEAR,
            Option("state", "reset", STATE.meaning, ("keep", "reset")),
        ),
        paper="Chen and Huo 2016, BMUF, ICASSP",
        **EVERY_OUTER,
    ),
    Card(
        name="diloco",
        summary="Learners make many steps apart; SGD with Nesterov momentum joins what they found.",
        take_when="ranks are far apart: they meet every 50 steps.",
        bytes_formula=f"{FORMULA}; bits=4: instead of weights (L-1) times half a byte of each "
        "number, and a scale for each 512, every time",
        guarantee=_exact_at(
            "every=1, lr=1, momentum=0, bits=0, mix=0",
            {"lr": "1", "momentum": "0", "bits": "0", "mix": "0"},
        ),
        stored=_stored(1, coded="4"),
        options=(
            _every(50),
            Option("lr", 0.7, "outer rate", above=0),
            Option("momentum", 0.9, "outer momentum", at_least=0, below=1),
            Option("fragments", 1, "parts of the model, sent at times of their own", at_least=1),
            Option("overlap", 0, "steps that a fragment is under way", at_least=0),
            Option("mix", 0.0, "share of its own weights a learner keeps", at_least=0, below=1),
            Option("bits", "0", "of each number that is sent; 0: as many as it has", ("0", "4")),
            *COMMON,
            STATE,
        ),
        paper="Douillard et al. 2023, DiLoCo, arXiv 2311.08105; 2025, Streaming DiLoCo "
        "(fragments, overlap, mix, bits), arXiv 2501.18512",
        **EVERY_OUTER,
    ),
    Card(
        name="sparse-loco",
        summary="Of what learners found, the largest numbers in 2 bits; what was not sent is kept.",
        take_when="the link is too slow even for `diloco`.",
        bytes_formula="those of `inner` + ((L-1) · message + 2(L-1)/L · (buffers + 56))/every; a "
        "message has 1.5 bytes and `bits` for each number that is kept, and a scale for each chunk",
        guarantee=_exact_at(
            "every=1, keep=chunk, bits=0, decay=1",
            {"keep": "4096", "chunk": "4096", "bits": "0", "decay": "1", "lr": "1"},
        ),
        stored=_stored(1),
        options=(
            _every(30),
            Option("lr", 1.0, "outer rate", above=0),
            Option("keep", 64, "numbers that are kept of each chunk", at_least=1),
            Option("chunk", 4096, "numbers of a chunk, 4096 at most", at_least=1, below=4097),
            Option("bits", "2", "of each number; 0: as many as it has", ("2", "0")),
            Option("decay", 0.95, "what was not sent is times this", above=0),
            *COMMON,
            STATE,
        ),
        paper="Sarfi et al. 2025, SparseLoCo, arXiv 2508.15706",
        **EVERY_OUTER,
    ),
)


# --- decoupled ------------------------------------------------------------------------------------


SYNCHRONIZER = "synchronizer"


def _handed_out(work: Workload, options: Mapping[str, Any]) -> int:
    """The synchronizer sends a fragment to each learner, once for each chunk of it."""
    weights, *buffers = work.messages
    each = weights / int(options["fragments"]) + sum(buffers)
    return round(work.ranks * each / int(options["every"]))


def _learner_roles(ranks: int, options: Mapping[str, Any]) -> tuple[Role, ...]:
    """The ranks are the learners."""
    return Role(SYNCHRONIZER, 1, resumes=True), coming_and_going(LEARNER_ROLE, ranks, options)


DECOUPLED_CARD = Card(
    name="decoupled",
    summary="Learners train on their own; a synchronizer merges what a quorum of them has found.",
    take_when="learners are slow or come and go.",
    guarantee=Reference(
        "a loop in one process that takes the same chunks, pushes and merges in the same order; "
        "`single` when N = 1, every = 1, quorum = 1, lr = 1, momentum = 0 and the optimizer is SGD"
    ),
    bytes_sent=_handed_out,
    bytes_formula="N · (weights / fragments + buffers) / every, from the synchronizer; "
    "a learner sends (weights / fragments + buffers) / every",
    memory="a learner: weights + gradients + optimizer, and 2 more weights (5 with fragments), and "
    "with inner=kept 2 or more optimizers; the synchronizer: weights + momentum, as many weights "
    "as there are learners whose findings wait, and with inner=kept the optimizer of each learner",
    many_ranks=True,
    agreement=Agreement(lockstep=False),
    roles=_learner_roles,
    options=(
        Option("every", 16, "steps that a learner makes between two exchanges", at_least=1),
        Option(
            "fragments",
            1,
            "parts of the model, of which each exchange has one, in turns",
            at_least=1,
        ),
        Option(
            "quorum", 0, "learners of which something has come before a merge; 0: all", at_least=0
        ),
        Option(
            "grace_s", 2.0, "seconds after which a merge waits for the quorum no longer", at_least=0
        ),
        Option("lr", 1.0, "the rate of the outer optimizer", above=0),
        Option("momentum", 0.0, "its Nesterov momentum", at_least=0, below=1),
        Option(
            "overlap", "0", "1: a chunk is trained while what was found is on its way", ("0", "1")
        ),
        Option("least", 1, "learners that must be left", at_least=1),
        Option("rejoins", 3, "how often each learner that is lost is started again", at_least=0),
        Option(
            "inner",
            "kept",
            "the learners' optimizers: kept in checkpoints, or begun anew",
            ("kept", "anew"),
        ),
        Option(
            "patience_s",
            300.0,
            "seconds for which a learner waits for a synchronizer that is gone",
            above=0,
        ),
    ),
    paper="Douillard et al. 2023, DiLoCo, arXiv 2311.08105; Decoupled DiLoCo, arXiv 2604.21428",
)
