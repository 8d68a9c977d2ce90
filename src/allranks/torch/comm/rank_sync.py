"""Where all ranks must come to the same place: they meet in the store, beside the collectives.

A rank that comes alone thus waits in no collective that another rank could take for its own. The
others wait for it in one, and a wait that lasts (`LASTS`) looks into the store: a rank that came to
the next meeting with fewer collectives begun than this one will never take part, for all ranks make
the same collectives and meetings in the same order. Being slow proves nothing, and is not told.

    <n>/<rank>  where a rank came to meeting n, and how many collectives it had begun
    <n>/came    how many came
    <n>/said    the verdict, one for all: who is apart, and nobody where all came
    <n>/left    the first rank that left in place of coming, and why if it has failed

Ranks with GPUs do not look: their waits return at once, and what lasts is the device's. Nor does a
rank that meets hear of one that was killed; whoever started them ends the others.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from typing import Any

from allranks.errors import PeerLost, RequestError
from allranks.training.record.failure import shortened

EVALUATE = "evaluate()"
AT_THE_END = "the end of the training"
LASTS = timedelta(seconds=5)  # a wait that is longer looks into the store, which takes 0.1 ms
LONGEST_WHY = 4000  # characters of an error that others hear of
LAST_WORDS_S = 1.0
SOONEST_S, LATEST_S = 0.0005, 0.05  # between two looks of a rank that meets


@dataclass(frozen=True)
class RankPosition:
    """Where a rank is: a `place` to which all must come ("" for none), and that in `words`."""

    rank: int
    place: str
    words: str

    def __str__(self) -> str:
        return f"rank {self.rank} {'at ' if self.place else ''}{self.words}"


@dataclass
class Meetings:
    """One rank's end, for one training: `begun` collectives so far, and `held` meetings.

    `looks` are called, too, where a wait lasts: each raises what it finds.
    """

    store: Any
    rank: int
    size: int
    timeout: timedelta
    begun: int = 0
    held: int = 0
    looks: list[Callable[[], None]] = field(default_factory=list)

    def come(self, place: str, step: int) -> None:
        """Wait for all ranks at the same `place` after the same step; every rank calls this.

        Raises `RequestError` if they did not, and `PeerLost` if one left. Costs some round trips
        to the store.
        """
        try:
            apart = self._verdict(_here(self.rank, place, step))
            if not apart and self.held:  # all came to this one: none reads of the last
                for key in (self.rank, *(("came", "said") if self.rank == 0 else ())):
                    self.store.delete_key(f"{self.held - 1}/{key}")
        except RuntimeError as error:
            raise PeerLost(f"the store in which the ranks meet is gone: {error}") from error
        if apart:
            raise not_together(apart)
        self.held += 1

    def look(self, where: str) -> None:
        """A collective lasts, in which this rank waits: raise if another will never come to it.

        `where` says for a person where this rank is.
        """
        with suppress(RuntimeError):  # without a store nothing is known, and the wait goes on
            if (found := self._contradiction(where)) is not None:
                raise not_together(self._say(found))
        for look in self.looks:
            look()

    def leave(self, *, failed: bool) -> None:
        """This rank comes to no meeting any more; the error that is handled just now says why."""
        error = sys.exception() if failed else None
        why = "" if error is None else f"{type(error).__name__}: {error}"
        told = json.dumps([self.rank, failed, shortened(why, LONGEST_WHY)])
        with suppress(RuntimeError):
            self.store.compare_set(f"{self.held}/left", "", told)

    def why_lost(self) -> str:
        """What the rank that failed first said as it left; "" where none has within a second.

        For who has lost a peer: groups are left before a rank says why.
        """
        until = time.monotonic() + LAST_WORDS_S
        with suppress(RuntimeError):  # the store has gone with the rank that had it
            while time.monotonic() < until:
                if self.store.check([f"{self.held}/left"]):
                    rank, failed, why = json.loads(self.store.get(f"{self.held}/left"))
                    return f"rank {rank} left first: {why}" if failed and why else ""
                time.sleep(LATEST_S)
        return ""

    def _verdict(self, own: RankPosition) -> list[RankPosition]:
        """Who is apart at the next meeting, by whoever can say it first; nobody if all came."""
        self.store.set(f"{self.held}/{self.rank}", json.dumps([*astuple(own), self.begun]))
        if self.store.add(f"{self.held}/came", 1) == self.size:
            first, *others = (self._of(rank)[0] for rank in range(self.size))
            other = next((one for one in others if one.words != first.words), None)
            return self._say([] if other is None else [first, other])
        return self._heard(own)

    def _heard(self, own: RankPosition) -> list[RankPosition]:
        """What others say of the next meeting."""
        until = time.monotonic() + self.timeout.total_seconds()
        said, left, pause = f"{self.held}/said", f"{self.held}/left", SOONEST_S
        while time.monotonic() < until:  # `store.wait` warns on stderr of each wait that ends
            time.sleep(pause)
            pause = min(1.5 * pause, LATEST_S)
            if self.store.check([said]):
                return _read(self.store.get(said))
            if self.store.check([left]):
                rank, failed, _ = json.loads(self.store.get(left))
                if failed:
                    raise PeerLost(f"rank {rank} has failed, and comes not to {own.words}")
                return self._say([own, RankPosition(rank, "", "has left the trainer")])
        waited = f"{self.timeout.total_seconds():.0f} s"
        raise PeerLost(f"not all ranks came to {own.words} within {waited}")

    def _contradiction(self, where: str) -> list[RankPosition] | None:
        """A rank that waits at the next meeting, before what this rank has begun."""
        if not self.store.check([f"{self.held}/came"]):
            return None
        for rank in range(self.size):
            if rank != self.rank and self.store.check([f"{self.held}/{rank}"]):
                other, begun = self._of(rank)
                if begun < self.begun:
                    return [other, RankPosition(self.rank, "", where)]
        return None

    def _of(self, rank: int) -> tuple[RankPosition, int]:
        """Where a rank has come to, and how many collectives it had begun."""
        *stand, begun = json.loads(self.store.get(f"{self.held}/{rank}"))
        return RankPosition(*stand), begun

    def _say(self, apart: list[RankPosition]) -> list[RankPosition]:
        """The verdict of the next meeting is what was said first; returns it."""
        told = json.dumps([astuple(one) for one in apart])
        return _read(self.store.compare_set(f"{self.held}/said", "", told))


def _read(told: bytes) -> list[RankPosition]:
    return [RankPosition(*one) for one in json.loads(told)]


def _here(rank: int, place: str, step: int) -> RankPosition:
    return RankPosition(rank, place, f"{place} after step {step}" if step >= 0 else place)


def not_together(apart: Sequence[RankPosition]) -> RequestError:
    """What to say where some ranks are at a place to which all must come."""
    found = ", ".join(map(str, apart))
    if any(one.place == EVALUATE for one in apart):
        return RequestError(
            asked="evaluate() on some ranks alone",
            found=found,
            why="each rank evaluates a part of the data, and the sums are added over all of them",
            do="call evaluate() on every rank, and print what it returns on the leader alone",
        )
    return RequestError(
        asked="to end the training on some ranks alone",
        found=found,
        why="all ranks make each step together, each with its part of the batch",
        do="ask batches() for the same steps on every rank, and leave the loop after the same one",
    )
