"""The order in which a rank calls the units of a model, compared over the ranks in each step.

The weights of a unit are gathered from all ranks when it is called. Ranks that call units of one
shape in different orders mix their weights, and no collective notices. So the digits of a digest of
the order are sent with the tally, each with its square. The sums of both tell whether all ranks
agree (Cauchy-Schwarz), without another message.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from allranks.errors import PeerLost, RequestError
from allranks.torch.comm.comm import Comm
from allranks.torch.comm.rank_sync import StoreBarrier

DIGITS = 4
NUMBERS = 2 * DIGITS
"""How many numbers are sent with the tally."""


class CallOrder:
    """The calls of one rank in one step, or for one batch that is evaluated."""

    def __init__(self, request: str) -> None:
        self.request, self.digest = request, 0

    def begin(self) -> None:
        """Begin a step: no unit is called yet."""
        self.digest = 0

    def note(self, unit: int) -> None:
        """Record a call of a unit."""
        self.digest = zlib.crc32(unit.to_bytes(4), self.digest)

    def numbers(self) -> list[float]:
        """The numbers that are summed over all ranks."""
        digits = [float(digit) for digit in self.digest.to_bytes(DIGITS)]
        return [*digits, *(digit**2 for digit in digits)]

    def check_sums(self, sums: Sequence[float], ranks: int) -> None:
        """Raise `RequestError` unless the `numbers` of all ranks were the same."""
        for total, of_squares in zip(sums[:DIGITS], sums[DIGITS:], strict=True):
            if total**2 != of_squares * ranks:
                raise self.other()

    def sums_agree(self, sums: Tensor, ranks: int) -> Tensor:
        """Whether they were the same, as a tensor; the host does not wait."""
        return sums[:DIGITS].square().eq(sums[DIGITS:] * ranks).all()

    def check_on_all(self, comm: Comm) -> None:
        """Raise `RequestError` unless all ranks called the same units; every rank calls this.

        Sends 8 bytes to each other rank.
        """
        orders = torch.zeros(comm.size, dtype=torch.int64, device=comm.device)
        comm.all_gather(orders, orders.new_tensor([self.digest]), "control").wait()
        with comm.reading():
            differ = len(set(orders.tolist())) > 1
        if differ:
            raise self.other()

    def other(self) -> RequestError:
        """The error for ranks that call units in different orders."""
        return RequestError(
            asked=self.request,
            found="ranks that call the blocks of the model in different orders, or other blocks",
            why="the weights of a block are gathered from all ranks when it is called: they were "
            "mixed",
            do="let fsdp_units(model) of the task return [], so that they are gathered as one",
        )


# --- call trail ----------------------------------------------------------------------------------
# The collectives of a rank in a step, to explain ranks that deadlock.
#
# If some ranks call fewer units than others, an all-gather on one rank is matched with another
# collective on the next, and both hang. A long wait (`StoreBarrier.looks`) writes the trail of its
# rank to the store and reads those of the others. The first difference of two trails of one step
# names the call and the unit. Different lengths prove nothing. Without long waits nothing is sent.


THE_SUM = "sums up the step"
Mismatch = tuple[int, dict[int, str]]  # the number of a call, and what it is on each rank
PATIENCE_S, PAUSE_S = 1.0, 0.05  # for trails of ranks whose waits end a moment later


class CallTrail:
    """The trail of one rank; without a barrier it is not compared.

    `begun` counts the steps and evaluated batches, which are the same on every rank.
    """

    def __init__(self, request: str, barrier: StoreBarrier | None) -> None:
        self.request, self.barrier = request, barrier
        self.begun, self._calls = 0, list[str]()
        if barrier is not None:
            barrier.looks.append(self.look)

    def begin(self) -> None:
        """Begin a step, or a batch that is evaluated."""
        self.begun += 1
        self._calls.clear()

    @contextmanager
    def at(self, action: str) -> Iterator[None]:
        """Within, this rank is in a collective; `action` names it and its unit."""
        self._calls.append(action)
        try:
            yield
        except (RuntimeError, PeerLost):  # perhaps it was matched with a collective of another size
            self.look(PATIENCE_S)
            raise

    def look(self, patience_s: float = 0.0) -> None:
        """Raise `RequestError` if trails of other ranks differ; waits so long for them."""
        if self.barrier is None or not self._calls:
            return
        with suppress(RuntimeError):  # without the store nothing is known
            if (mismatch := self._mismatch(self.barrier, patience_s)) is not None:
                raise self._other_calls(*mismatch)

    def _mismatch(self, barrier: StoreBarrier, patience_s: float) -> Mismatch | None:
        """The first call that differs between ranks."""
        trail = [self.begun, *self._calls]
        barrier.store.set(f"trail/{barrier.rank}", json.dumps(trail))
        until, mismatch = time.monotonic() + patience_s, None
        while True:
            trails = self._trails(barrier)
            if (there := _first_mismatch(trails)) is not None:
                if mismatch is None:  # wait a moment for the trails of all ranks
                    until = time.monotonic() + PATIENCE_S
                mismatch = there
            if time.monotonic() >= until or (mismatch and len(trails) == barrier.size):
                return mismatch
            time.sleep(PAUSE_S)

    def _trails(self, barrier: StoreBarrier) -> dict[int, list[str]]:
        """The trails of this step that are in the store, by rank."""
        trails = {}
        for rank in range(barrier.size):
            if barrier.store.check([f"trail/{rank}"]):
                begun, *calls = json.loads(barrier.store.get(f"trail/{rank}"))
                if begun == self.begun:
                    trails[rank] = calls
        return trails

    def _other_calls(self, call: int, there: dict[int, str]) -> RequestError:
        return RequestError(
            asked=self.request,
            found="ranks that call other blocks of the model, or some of them less often: "
            + ", ".join(f"rank {rank} {action}" for rank, action in there.items())
            + f" ({call + 1}. exchange)",
            why="the weights of a block are gathered from all ranks when it is called, so all call "
            "the same blocks equally often",
            do="let fsdp_units(model) of the task return [], so that they are gathered as one",
        )


def _first_mismatch(trails: dict[int, list[str]]) -> Mismatch | None:
    """The first call that differs, up to the length of the shortest trail."""
    for call, there in enumerate(zip(*trails.values(), strict=False)):
        if len(set(there)) > 1:
            return call, dict(zip(trails, there, strict=True))
    return None
