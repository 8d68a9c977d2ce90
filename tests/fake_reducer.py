"""A reducer that stands for all with error feedback: it sends coarse gradients, and keeps the rest.

Each number is rounded to a multiple of `GRAIN`; what that leaves is added in the next step. So a
step depends on what the rank has not sent yet, which a checkpoint must hold. Written for the tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from allranks.catalog import REDUCERS
from allranks.strategies.card import Card
from allranks.strategies.cards import CARDS
from allranks.torch.comm.comm import Pending
from allranks.torch.parallel.data.reducer import Bucket, Reducer

NAME, GRAIN = "fake-coarse", 1 / 64


def card() -> Card:
    """That of `ddp`, with this reducer among its choices."""
    ddp = CARDS["ddp"]
    reduce, *rest = ddp.options
    assert isinstance(reduce.choices, Mapping)
    choices = {**reduce.choices, NAME: ()}
    options = (dataclasses.replace(reduce, choices=choices), *rest)
    return dataclasses.replace(ddp, options=options, bytes_sent=lambda work, options: 0)


def register() -> None:
    CARDS["ddp"] = card()
    REDUCERS[NAME] = "fake_reducer:Coarse"


class Coarse(Reducer):
    """Rounds what is sent, and keeps what was not."""

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        super().prepare(buckets)
        self.rest = {
            name: view.new_zeros(view.shape)
            for bucket in buckets
            for name, view in bucket.views.items()
        }

    def exchange(self, bucket: int) -> Iterator[Pending]:
        for name, view in self.buckets[bucket].views.items():
            view += self.rest[name]
            sent = (view / GRAIN).round() * GRAIN
            self.rest[name].copy_(view - sent)
            view.copy_(sent)
        yield self.comm.all_reduce(self.buckets[bucket].flat)

    def state(self) -> dict[str, Any]:
        return {"rest": self.rest}

    def load_state(self, state: dict[str, Any]) -> None:
        for name, tensor in state.get("rest", {}).items():
            if name in self.rest:
                self.rest[name].copy_(tensor)
