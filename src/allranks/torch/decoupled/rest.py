"""What a learner has found in the fragments of the weights that it has not brought yet.

    found     a chunk: old minus new of all parameters, and its samples
    kept     += found;  shares += samples, of every fragment
    brought   kept of one fragment, and its share; both are zero there from now on
    lost      all of it, where the link or the synchronizer is lost: its chunks may be others' then

The fragment is the one whose turn it is, as the synchronizer says, so that learners bring the same
ones at a time; or the one that was not brought for longest, if that is twice as many chunks as
there are fragments: a slow learner might miss the turns of one for ever. With one fragment nothing
is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allranks.torch.decoupled.flat import FlatModel, Numbers


@dataclass(frozen=True)
class Brought:
    """What is brought of a chunk: `sent` has one fragment, of a `share` of samples, and buffers."""

    fragment: int
    share: int
    sent: Numbers


class Rest:
    """What is `kept`, (parameters,), of which each of the `parts` has a share of samples."""

    def __init__(self, flat: FlatModel, fragments: int) -> None:
        self._flat = flat
        self.parts = flat.fragments(min(fragments, max(1, flat.parameters)))
        self.turn = 0
        self.shares = [0] * len(self.parts)
        self.kept: Tensor | None = None
        if len(self.parts) > 1:
            self.kept = torch.zeros(flat.parameters, dtype=flat.type)
        self._waited = [0] * len(self.parts)

    def brings(self, found: Numbers, samples: int) -> Brought:
        """What is brought of the next chunk; the rest is kept."""
        if self.kept is None:
            return Brought(0, samples, found)
        own = self._flat.parameters
        self.kept.add_(found.weights[:own])
        self.shares = [share + samples for share in self.shares]
        fragment = self._next()
        part, share = self.parts[fragment], self.shares[fragment]
        sent = Numbers(torch.cat([self.kept[part], found.weights[own:]]), found.counts)
        self.kept[part] = 0
        self.shares[fragment] = 0
        return Brought(fragment, share, sent)

    def _next(self) -> int:
        self._waited = [chunks + 1 for chunks in self._waited]
        longest = max(range(len(self.parts)), key=lambda n: self._waited[n])
        is_late = self._waited[longest] > 2 * len(self.parts)
        fragment = longest if is_late else self.turn
        self._waited[fragment] = 0
        return fragment

    def all(self) -> tuple[list[int], Numbers]:
        """All that is kept, with the buffers of now; nothing is kept any more."""
        numbers = self._flat.read()
        shares = list(self.shares)
        if self.kept is not None:
            numbers.weights[: self._flat.parameters] = self.kept
        self.forget()
        return shares, numbers

    def forget(self) -> None:
        """Nothing is kept."""
        self.shares = [0] * len(self.parts)
        if self.kept is not None:
            self.kept.zero_()

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint has of it."""
        if self.kept is None:
            return None
        return {"kept": self.kept.clone(), "shares": [*self.shares], "waited": [*self._waited]}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take up what `state` returned, where the parts are as many as then."""
        if self.kept is None or state is None or len(state["shares"]) != len(self.shares):
            return
        self.kept.copy_(state["kept"])
        self.shares = [int(share) for share in state["shares"]]
        self._waited = [int(chunks) for chunks in state["waited"]]
