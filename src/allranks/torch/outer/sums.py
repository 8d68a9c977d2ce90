"""How what learners found is summed, weighted by what each has trained on.

as it is     an all-reduce of all numbers
by messages  every learner encodes what it found and what it has kept, and all decode the
             messages of all, in the order of the learners: the same numbers on each of them
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from allranks.torch.comm.comm import Comm
from allranks.torch.comm.subgroups import Pending
from allranks.torch.compression.base import Codec
from allranks.torch.compression.error_feedback import ErrorFeedback
from allranks.torch.outer.global_weights import Flat, GlobalWeights

WEIGHT_BYTES = 8


class Sums:
    """Sums `found` of a flat over the learners of `comm`. Sends 2(L-1)/L of its bytes."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def begin(self, flat: Flat, trained: float) -> Pending:
        """Begin the sum of `trained` times what this learner found; each of them calls this."""
        return self.comm.all_reduce(flat.find(trained))

    def own_state(self) -> dict[str, Any]:
        """What of it is this learner's alone."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Take up what `own_state` returned, of flats of the same tensors."""


class CodedSums(Sums):
    """Parameters by messages of `codec`, buffers as they are. Sends L-1 times a message."""

    def __init__(self, comm: Comm, weights: GlobalWeights, codec: Codec, decay: float) -> None:
        super().__init__(comm)
        flats = [flat for one in weights.fragments for flat in one.flats]
        self.feedback = {id(f): ErrorFeedback(codec, f.weights, decay) for f in flats}
        self._named = {", ".join(flat.names): id(flat) for flat in flats}

    def begin(self, flat: Flat, trained: float) -> Pending:
        feedback = self.feedback.get(id(flat))
        if feedback is None:
            return super().begin(flat, trained)
        count = flat.weights.numel()
        if trained:
            message = feedback.encode(flat.find(1.0)[:count])
        else:  # a learner that found nothing keeps what it has for the next meeting
            message = feedback.codec.encode(torch.zeros_like(flat.weights))
        weight = torch.tensor([trained], dtype=torch.float64, device=message.device)
        own = torch.cat([weight.view(torch.uint8), message])
        whole = own.new_empty(self.comm.size * own.numel())
        if self.comm.size == 1:
            whole.copy_(own)
            pending = Pending()
            self._add_up(feedback.codec, flat.found[:count], whole)
            return pending
        pending = self.comm.all_gather(whole, own)
        pending.then = partial(self._add_up, feedback.codec, flat.found[:count], whole)
        return pending

    def _add_up(self, codec: Codec, found: Tensor, messages: Tensor) -> None:
        found.zero_()
        for message in messages.view(self.comm.size, -1):
            weight = message[:WEIGHT_BYTES].clone().view(torch.float64).item()
            if weight:
                codec.add_decoded(message[WEIGHT_BYTES:], found, weight)

    def own_state(self) -> dict[str, Any]:
        return {names: self.feedback[flat].residual for names, flat in self._named.items()}

    def load_own_state(self, state: dict[str, Any]) -> None:
        for names, flat in self._named.items():
            kept = state.get(names)
            if kept is not None and kept.shape == self.feedback[flat].residual.shape:
                self.feedback[flat].residual.copy_(kept)
