"""The cards of strategies that place parts of one model: on devices of a process, on ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allranks.strategies.card import (
    Card,
    Contents,
    Exact,
    Option,
    Stored,
    Workload,
    parts_of,
)
from allranks.strategies.cards.bytes_sent import EVERYTHING, no_bytes
from allranks.strategies.mesh import BRANCH, Agreement, Mesh


def _branches(work: Workload, options: Mapping[str, Any]) -> int:
    """What branches return is broadcast; the gradients of their inputs and the tally are summed."""
    returned, given, tally = work.messages
    return round((work.ranks - 1) / work.ranks * (returned + 2 * given + 2 * tally))


def _own_branches(has: Contents, options: Mapping[str, Any]) -> float:
    """Branches are what is cut."""
    return (2 + has.kept) * (has.cut / has.ranks + has.rest)


PLACED_CARDS = (
    Card(
        name="model-parallel",
        summary="One process, layers of one model on several devices, inputs in flight.",
        guarantee=Exact(),
        bytes_sent=no_bytes,
        bytes_formula="0 (between the devices: what goes from part to part, and its gradient)",
        memory="every weight, its gradient and what the optimizer keeps of it on one device; "
        "activations on the device of their part",
        stored=EVERYTHING,
        many_ranks=False,
        bitwise_options={},
        devices_of_a_rank=parts_of,
        on_a_device="part",
        options=(
            Option("parts", 2, "how many: on cuda:0, cuda:1, …, or all on the CPU", at_least=1),
            Option(
                "by",
                "cost",
                "what is balanced, where the task has no device_map: seconds that are "
                "measured, or bytes",
                ("cost", "size"),
            ),
            Option("split", 1, "pieces of a micro-batch that are in flight at once", at_least=1),
        ),
        paper="Huang et al. 2019, GPipe, arXiv 1811.06965",
    ),
    Card(
        name="branches",
        summary="Towers, paths or heads of one model on different ranks at the same time.",
        guarantee=Exact(),
        bytes_sent=_branches,
        bytes_formula="(N-1)/N · outputs of all branches + 2(N-1)/N · (gradients of what they are "
        "given, each tensor once, + tally)",
        memory="of each branch weights, gradients, optimizer and activations on one rank; all else "
        "of the model on every rank",
        stored=Stored("(2 + k)(C/N + R), C: branches of equal size", _own_branches),
        many_ranks=True,
        agreement=Agreement("staged"),
        mesh=lambda ranks, _: Mesh(((BRANCH, ranks),)),
        paper="Krizhevsky 2014, One weird trick for parallelizing convolutional neural networks, "
        "arXiv 1404.5997",
    ),
)
