"""The card of the strategy that places parts of one model on the devices of one process."""

from __future__ import annotations

from allranks.strategies.card import Card, Exact, Option, parts_of
from allranks.strategies.card_bytes import no_bytes

PLACED_CARDS = (
    Card(
        name="model-parallel",
        summary="One process, layers of one model on several devices, inputs in flight.",
        guarantee=Exact(),
        bytes_sent=no_bytes,
        bytes_formula="0 (between the devices: what goes from part to part, and its gradient)",
        memory="every weight, its gradient and what the optimizer keeps of it on one device; "
        "activations on the device of their part",
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
)
