"""The card of `decoupled`: learners that come and go, and a synchronizer. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allranks.strategies.card import Card, Option, Reference, Workload
from allranks.strategies.mesh import Agreement
from allranks.strategies.roles import LEARNER, Role, coming_and_going

SYNCHRONIZER = "synchronizer"


def _handed_out(work: Workload, options: Mapping[str, Any]) -> int:
    """The synchronizer sends a fragment to each learner, once for each chunk of it."""
    weights, *buffers = work.messages
    each = weights / int(options["fragments"]) + sum(buffers)
    return round(work.ranks * each / int(options["every"]))


def _roles(ranks: int, options: Mapping[str, Any]) -> tuple[Role, ...]:
    """The ranks are the learners."""
    return Role(SYNCHRONIZER, 1, resumes=True), coming_and_going(LEARNER, ranks, options)


DECOUPLED_CARD = Card(
    name="decoupled",
    summary="Learners train on their own; a synchronizer merges what a quorum of them has found.",
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
    roles=_roles,
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
