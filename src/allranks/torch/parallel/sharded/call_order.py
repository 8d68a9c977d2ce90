"""The order in which a rank calls the units of a model, compared over the ranks of a step.

The weights of a unit are gathered from all ranks when it is called. Ranks that call units of one
shape in another order mix their weights, and no collective would notice. So the digits of a digest
of the order ride on the tally, each with its square: sums of both tell whether all are alike
(Cauchy-Schwarz), and no message is added.
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


# --- call trail ----------------------------------------------------------------------------------
# What a rank has gathered and scattered in a step, for ranks that wait for each other in vain.
#
# Where some ranks call fewer units than others, a gathering on one rank meets another collective on
# the next one, and both wait. A wait that lasts (`meetings`) puts the trail of its rank into the
# store, and looks at those of the others: two trails of one step that go apart say where, and of
# which unit. Trails that only differ in length prove nothing. Nothing is sent while nothing lasts.


THE_SUM = "sums up the step"
PATIENCE_S, PAUSE_S = 1.0, 0.05  # for the trails of ranks whose waits end a moment later


class CallTrail:
    """The trail of one rank; without `meetings` nobody looks at it.

    `begun` counts the steps and evaluated batches, which are the same on every rank.
    """

    def __init__(self, asked: str, store_barrier: StoreBarrier | None) -> None:
        self.asked, self.store_barrier = asked, store_barrier
        self.begun, self._calls = 0, list[str]()
        if store_barrier is not None:
            store_barrier.looks.append(self.look)

    def begin(self) -> None:
        """The units are called anew: for a step, or for a batch that is evaluated."""
        self.begun += 1
        self._calls.clear()

    @contextmanager
    def at(self, what: str) -> Iterator[None]:
        """Within, this rank is in a collective, of which `what` says for which unit it is."""
        self._calls.append(what)
        try:
            yield
        except (RuntimeError, PeerLost):  # perhaps it met another one, of another size
            self.look(PATIENCE_S)
            raise

    def look(self, patience_s: float = 0.0) -> None:
        """Raise `RequestError` where another rank has gone another way; others wait so long."""
        if self.store_barrier is None or not self._calls:
            return
        with suppress(RuntimeError):  # without a store nothing is known
            if (apart := self._apart(self.store_barrier, patience_s)) is not None:
                raise self._other_calls(*apart)

    def _apart(
        self, store_barrier: StoreBarrier, patience_s: float
    ) -> tuple[int, dict[int, str]] | None:
        """The first call that is not the same on all ranks, and what it is on each."""
        own = [self.begun, *self._calls]
        store_barrier.store.set(f"trail/{store_barrier.rank}", json.dumps(own))
        until, found = time.monotonic() + patience_s, None
        while True:
            trails = self._trails(store_barrier)
            if (there := _first_apart(trails)) is not None:
                if found is None:  # for a moment, so that it says where all of them are
                    until = time.monotonic() + PATIENCE_S
                found = there
            if time.monotonic() >= until or (found and len(trails) == store_barrier.size):
                return found
            time.sleep(PAUSE_S)

    def _trails(self, store_barrier: StoreBarrier) -> dict[int, list[str]]:
        """The trails of this step that are in the store, by rank."""
        found = {}
        for rank in range(store_barrier.size):
            if store_barrier.store.check([f"trail/{rank}"]):
                begun, *calls = json.loads(store_barrier.store.get(f"trail/{rank}"))
                if begun == self.begun:
                    found[rank] = calls
        return found

    def _other_calls(self, call: int, there: dict[int, str]) -> RequestError:
        return RequestError(
            asked=self.asked,
            found="ranks that call other blocks of the model, or some of them less often: "
            + ", ".join(f"rank {rank} {what}" for rank, what in there.items())
            + f" ({call + 1}. exchange)",
            why="the weights of a block are gathered from all ranks when it is called, so all call "
            "the same blocks equally often",
            do="let fsdp_units(model) of the task return [], so that they are gathered as one",
        )


def _first_apart(trails: dict[int, list[str]]) -> tuple[int, dict[int, str]] | None:
    """The first call that is not the same on all, as far as the shortest of them goes."""
    for call, there in enumerate(zip(*trails.values(), strict=False)):
        if len(set(there)) > 1:
            return call, dict(zip(trails, there, strict=True))
    return None
