"""A barrier through the store, which names the ranks that are at another place.

Ranks synchronise through the store, so a rank that arrives alone cannot be matched with an
unrelated collective of other ranks. A rank that waits in a collective for longer than `LASTS` reads
the store. All ranks make the same collectives and barriers in the same order, so a rank that waits
at the next barrier with fewer collectives begun will never take part. A slow rank is not reported.

    <n>/<rank>  the position of a rank at barrier n, and how many collectives it had begun
    <n>/came    how many ranks have arrived
    <n>/said    the verdict, the same for all: the ranks that differ, or none if all have arrived
    <n>/left    the first rank that left instead of arriving, and why if it has failed

Ranks with GPUs do not check the store: their waits return at once, and the device waits. A rank at
a barrier does not notice that another was killed; the launcher ends it.
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
from allranks.launcher.processes.process import shortened

EVALUATE = "evaluate()"
WHOLE_MODEL = "whole_model()"
AT_THE_END = "the end of the training"
LASTS = timedelta(seconds=5)  # a longer wait reads the store, which takes 0.1 ms
GLANCE = timedelta(seconds=0.02)  # the same for a change of the group, which takes 1 us
LONGEST_WHY = 4000  # characters of an error that other ranks get
LAST_WORDS_S = 1.0
SOONEST_S, LATEST_S = 0.0005, 0.05  # between two reads of a rank at a barrier


@dataclass(frozen=True)
class RankPosition:
    """The position of a rank: the `place` of a barrier ("" for none), and its text `words`."""

    rank: int
    place: str
    words: str

    def __str__(self) -> str:
        return f"rank {self.rank} {'at ' if self.place else ''}{self.words}"


@dataclass
class StoreBarrier:
    """The barriers of one rank in one training: `begun` collectives and `passed` barriers so far.

    `looks` are called when a wait in a collective lasts; each may raise an error. `glance` is
    called in every wait of an elastic job, at least every 20 ms, and raises `PeerLost` if another
    group trains now.
    """

    store: Any
    rank: int
    size: int
    timeout: timedelta
    begun: int = 0
    passed: int = 0
    looks: list[Callable[[], None]] = field(default_factory=list)
    glance: Callable[[], None] | None = None

    def wait(self, place: str, step: int) -> None:
        """Wait for all ranks at the same `place` after the same step; every rank calls this.

        Raises `RequestError` if a rank is elsewhere, and `PeerLost` if one has failed. Costs some
        round trips to the store.
        """
        try:
            mismatched = self._verdict(_here(self.rank, place, step))
            if not mismatched and self.passed:  # all arrived here: no rank reads the keys before
                for key in (self.rank, *(("came", "said") if self.rank == 0 else ())):
                    self.store.delete_key(f"{self.passed - 1}/{key}")
        except RuntimeError as error:
            raise PeerLost(f"the store in which the ranks meet is gone: {error}") from error
        if mismatched:
            raise ranks_apart_error(mismatched)
        self.passed += 1

    def look(self, where: str) -> None:
        """Check during a long wait in a collective; raises if another rank will never join it.

        `where` is the position of this rank, as text for the user.
        """
        with suppress(RuntimeError):  # without the store nothing is known, and the wait continues
            if (mismatched := self._contradiction(where)) is not None:
                raise ranks_apart_error(self._publish(mismatched))
        for look in self.looks:
            look()

    def leave(self, *, failed: bool) -> None:
        """Record that this rank has left; if it has `failed`, with the error being handled."""
        error = sys.exception() if failed else None
        why = "" if error is None else f"{type(error).__name__}: {error}"
        message = json.dumps([self.rank, failed, shortened(why, LONGEST_WHY)])
        with suppress(RuntimeError, PeerLost):
            self.store.compare_set(f"{self.passed}/left", "", message)

    def why_lost(self) -> str:
        """The reason that the first failed rank gave; "" if there is none within a second.

        For ranks that lost a peer: a rank leaves its groups before it writes the reason. Ranks of
        an elastic job that another group waits for do not wait.
        """
        until = time.monotonic() + LAST_WORDS_S
        # the rank that served the store has gone, or another group trains now
        with suppress(RuntimeError, PeerLost):
            while time.monotonic() < until:
                if self.glance is not None:
                    self.glance()
                if self.store.check([f"{self.passed}/left"]):
                    rank, failed, why = json.loads(self.store.get(f"{self.passed}/left"))
                    return f"rank {rank} left first: {why}" if failed and why else ""
                time.sleep(LATEST_S)
        return ""

    def _verdict(self, position: RankPosition) -> list[RankPosition]:
        """The ranks that differ at the next barrier, as decided first; empty if all arrived."""
        self.store.set(f"{self.passed}/{self.rank}", json.dumps([*astuple(position), self.begun]))
        if self.store.add(f"{self.passed}/came", 1) == self.size:
            first, *others = (self._of(rank)[0] for rank in range(self.size))
            other = next((at for at in others if at.words != first.words), None)
            return self._publish([] if other is None else [first, other])
        return self._wait_for_verdict(position)

    def _wait_for_verdict(self, position: RankPosition) -> list[RankPosition]:
        """Wait for the verdict of the next barrier."""
        until = time.monotonic() + self.timeout.total_seconds()
        verdict_key, left_key, pause = f"{self.passed}/said", f"{self.passed}/left", SOONEST_S
        while time.monotonic() < until:  # `store.wait` warns on stderr of each wait that ends
            time.sleep(pause)
            pause = min(1.5 * pause, LATEST_S)
            if self.glance is not None:
                self.glance()
            has_left = self.store.check([left_key])  # read first: a rank decides, then leaves
            if self.store.check([verdict_key]):
                return _read(self.store.get(verdict_key))
            if has_left:
                rank, failed, _ = json.loads(self.store.get(left_key))
                if failed:
                    raise PeerLost(f"rank {rank} has failed, and comes not to {position.words}")
                return self._publish([position, RankPosition(rank, "", "has left the trainer")])
        waited = f"{self.timeout.total_seconds():.0f} s"
        raise PeerLost(f"not all ranks came to {position.words} within {waited}")

    def _contradiction(self, where: str) -> list[RankPosition] | None:
        """A rank that waits at the next barrier, and has begun fewer collectives than this one."""
        if not self.store.check([f"{self.passed}/came"]):
            return None
        for rank in range(self.size):
            if rank != self.rank and self.store.check([f"{self.passed}/{rank}"]):
                other, begun = self._of(rank)
                if begun < self.begun:
                    return [other, RankPosition(self.rank, "", where)]
        return None

    def _of(self, rank: int) -> tuple[RankPosition, int]:
        """The position of a rank, and how many collectives it had begun."""
        *position, begun = json.loads(self.store.get(f"{self.passed}/{rank}"))
        return RankPosition(*position), begun

    def _publish(self, mismatched: list[RankPosition]) -> list[RankPosition]:
        """Write the verdict of the next barrier unless there is one; returns the first."""
        message = json.dumps([astuple(position) for position in mismatched])
        return _read(self.store.compare_set(f"{self.passed}/said", "", message))


def _read(message: bytes) -> list[RankPosition]:
    return [RankPosition(*fields) for fields in json.loads(message)]


def _here(rank: int, place: str, step: int) -> RankPosition:
    return RankPosition(rank, place, f"{place} after step {step}" if step >= 0 else place)


def ranks_apart_error(mismatched: Sequence[RankPosition]) -> RequestError:
    """The error for ranks that are at different places."""
    positions = ", ".join(map(str, mismatched))
    if any(position.place == EVALUATE for position in mismatched):
        return RequestError(
            asked="evaluate() on some ranks alone",
            found=positions,
            why="each rank evaluates a part of the data, and the sums are added over all of them",
            do="call evaluate() on every rank, and print what it returns on the leader alone",
        )
    return RequestError(
        asked="to end the training on some ranks alone",
        found=positions,
        why="all ranks make each step together, each with its part of the batch",
        do="ask batches() for the same steps on every rank, and leave the loop after the same one",
    )
