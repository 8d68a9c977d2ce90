"""Who writes a checkpoint while training goes on: a thread of every rank, or one of the leader's.

Where every rank writes its part (`EveryRank`), their threads exchange texts over a communicator of
their own. Where all ranks hold the same (`LeaderAlone`), the leader's thread writes for all and
sends nothing; the ranks hear how it fared from the thread that trains, when they wait.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol, Self

from allranks.checkpoint.commit import ALONE, Ranks, named
from allranks.errors import PeerLost


class BackgroundThread:
    """Does one thing at a time beside the training; nothing that it raises is lost."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, act: Callable[[], None]) -> None:
        """Begin `act` in a thread. The one before it is over: `wait` has returned."""
        assert self._thread is None
        self._thread = threading.Thread(
            target=self._guarded, args=(act,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when it is over; raises what it raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            self._error = error


class Writers(ABC):
    """Those of `ranks`, which train together, that write a checkpoint; seen from one of them."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.thread = ranks, BackgroundThread()
        self._stands = False

    @property
    @abstractmethod
    def writes(self) -> bool:
        """Whether this rank does."""

    @abstractmethod
    def ready(self, sweep: Callable[[], object]) -> Ranks:
        """The rank that plans a save and finds a checkpoint; its first call calls `sweep`."""

    @abstractmethod
    def begin(self, commit: Callable[[Ranks], bool]) -> None:
        """Start `commit` in the thread, for those that write; it says whether the save stands."""

    @abstractmethod
    def outcome(self, step: int) -> bool:
        """Whether the save of `step` is committed; every rank waits here, and hears the same.

        Raises what the thread raised, and `PeerLost` where another rank's did.
        """

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Wait for the thread, unless it may wait for others that this rank has `failed`.

        Raises what the thread raised.
        """

    def leave(self, *, failed: bool) -> None:
        """Give back what `ready` has made."""

    def _run(self, commit: Callable[[Ranks], bool], ranks: Ranks) -> None:
        def act() -> None:
            self._stands = commit(ranks)

        self.thread.start(act)

    def _taken(self) -> bool:
        """What the thread has found, once."""
        stands, self._stands = self._stands, False
        return stands


class Sides(Ranks, Protocol):
    """Ranks that can have a second communicator beside the one that trains."""

    def aside(self) -> Self:
        """The same ranks once more; every rank calls this."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called this."""
        ...

    def leave(self, *, failed: bool = False) -> None:
        """Leave the others."""
        ...


class EveryRank(Writers):
    """Each rank writes its part; their threads tell each other how it went."""

    writes = True

    def __init__(self, ranks: Sides) -> None:
        super().__init__(ranks)
        self._training = ranks
        self._aside: Sides | None = None

    def ready(self, sweep: Callable[[], object]) -> Ranks:
        if self._aside is None:
            aside = self._training.aside()
            if aside.rank == 0:
                sweep()
            aside.barrier()
            self._aside = aside
        return self._aside

    def begin(self, commit: Callable[[Ranks], bool]) -> None:
        assert self._aside is not None
        self._run(commit, self._aside)

    def outcome(self, step: int) -> bool:
        self.thread.wait()
        return self._taken()

    def close(self, *, failed: bool) -> None:
        if not failed or self._training.size == 1:
            self.thread.wait()

    def leave(self, *, failed: bool) -> None:
        if self._aside is not None:
            self._aside.leave(failed=failed)
            self._aside = None


class LeaderAlone(Writers):
    """The leader writes what all ranks hold; they tell each other texts where they train."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._is_swept = False

    @property
    def writes(self) -> bool:
        return self.ranks.rank == 0

    def ready(self, sweep: Callable[[], object]) -> Ranks:
        if self.writes and not self._is_swept:
            sweep()  # nobody looks before the leader has: a search begins with its list
            self._is_swept = True
        return self.ranks

    def begin(self, commit: Callable[[Ranks], bool]) -> None:
        self._run(commit, ALONE)

    def outcome(self, step: int) -> bool:
        error: Exception | None = None
        try:
            self.thread.wait()
        except Exception as raised:
            error = raised
        said = json.dumps([self._taken(), "" if error is None else named(error)])
        stands, failure = json.loads(self.ranks.gather_texts(said)[0])
        if error is not None:
            raise error
        if failure:
            raise PeerLost(f"the checkpoint of step {step} failed on rank 0: {failure}")
        return bool(stands)

    def close(self, *, failed: bool) -> None:
        self.thread.wait()
