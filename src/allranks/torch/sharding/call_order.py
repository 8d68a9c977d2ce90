"""The order in which a rank calls the units of a model, compared over the ranks of a step.

The weights of a unit are gathered from all ranks when it is called. Ranks that call units of one
shape in another order mix their weights, and no collective would notice. So the digits of a digest
of the order ride on the tally, each with its square: sums of both tell whether all are alike
(Cauchy-Schwarz), and no message is added.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.torch.comm.comm import Comm

DIGITS = 4
NUMBERS = 2 * DIGITS
"""So many numbers ride on the tally."""


class CallOrder:
    """The calls of one rank in one step, or for one batch that is evaluated."""

    def __init__(self, asked: str) -> None:
        self.asked, self.digest = asked, 0

    def begin(self) -> None:
        """Nothing is called yet."""
        self.digest = 0

    def note(self, unit: int) -> None:
        """A unit is called."""
        self.digest = zlib.crc32(unit.to_bytes(4), self.digest)

    def numbers(self) -> list[float]:
        """What is summed over all ranks."""
        own = [float(digit) for digit in self.digest.to_bytes(DIGITS)]
        return [*own, *(digit**2 for digit in own)]

    def check_sums(self, sums: Sequence[float], ranks: int) -> None:
        """Raise `RequestError` unless the `numbers` of all ranks were the same."""
        for total, of_squares in zip(sums[:DIGITS], sums[DIGITS:], strict=True):
            if total**2 != of_squares * ranks:
                raise self.other()

    def sums_agree(self, sums: Tensor, ranks: int) -> Tensor:
        """Whether they were, which nobody waits for."""
        return sums[:DIGITS].square().eq(sums[DIGITS:] * ranks).all()

    def check_on_all(self, comm: Comm) -> None:
        """Raise `RequestError` unless all ranks called alike; every rank calls this.

        Sends 8 bytes to each other rank.
        """
        orders = torch.zeros(comm.size, dtype=torch.int64, device=comm.device)
        comm.all_gather(orders, orders.new_tensor([self.digest]), "control").wait()
        with comm.reading():
            differ = len(set(orders.tolist())) > 1
        if differ:
            raise self.other()

    def other(self) -> RequestError:
        """What to say of ranks that call units in different orders."""
        return RequestError(
            asked=self.asked,
            found="ranks that call the blocks of the model in different orders, or other blocks",
            why="the weights of a block are gathered from all ranks when it is called: they were "
            "mixed",
            do="let fsdp_units(model) of the task return [], so that they are gathered as one",
        )
