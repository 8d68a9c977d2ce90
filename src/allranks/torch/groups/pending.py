"""A collective under way, and what its error means."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from allranks.errors import FaultKind, PeerLost
from allranks.launcher.heartbeat import Heartbeat, SaveThreadHeartbeat
from allranks.launcher.processes.foreign import is_said
from allranks.torch.meetings import LASTS, Meetings

TIMEOUT = timedelta(minutes=40)  # longer than --hang-timeout usually is: it names who is missing


@contextmanager
def in_exchange(
    heartbeat: Heartbeat | SaveThreadHeartbeat | None, computed: Any = None
) -> Iterator[None]:
    """Around a read of sums of all ranks: in `exchange`, once the own part is `computed`."""
    if computed is not None:
        computed.synchronize()
    before = "" if heartbeat is None else heartbeat.enter("exchange")
    try:
        yield
    finally:
        if heartbeat is not None:
            heartbeat.enter(before)


def translated(error: RuntimeError) -> RuntimeError | PeerLost:
    """The error that says what a broken collective means; Gloo names neither rank nor reason."""
    message = str(error)
    if is_said(FaultKind.TIMED_OUT, message):
        waited = f"{TIMEOUT.total_seconds():.0f} s"
        return PeerLost(
            f"another rank did not take part in a collective within {waited}: {message}"
        )
    return PeerLost(message) if is_said(FaultKind.PEER_LOST, message) else error


@dataclass
class Pending:
    """A collective under way; `wait` returns when its result is there.

    With `meetings` a wait that lasts asks there whether all ranks will come. `then` makes the
    result of what has arrived.
    """

    work: Any = None
    heartbeat: Heartbeat | SaveThreadHeartbeat | None = None
    meetings: Meetings | None = None
    then: Callable[[], object] | None = None

    def wait(self) -> None:
        if self.work is None:
            return
        before = self.heartbeat.enter("exchange") if self.heartbeat is not None else ""
        try:
            if self.meetings is None:
                self.work.wait()
            else:
                self._wait_and_look(self.meetings, before)
        except RuntimeError as error:
            raise translated(error) from error
        if self.then is not None:
            self.then()
        if self.heartbeat is not None:
            self.heartbeat.enter(before)

    def _wait_and_look(self, meetings: Meetings, phase: str) -> None:
        while not self.work.is_completed():
            begun = time.monotonic()
            try:
                self.work.wait(LASTS)
                return
            except RuntimeError as error:  # it lasts, unless the collective itself has failed
                if self.work.is_completed():
                    break
                is_early = time.monotonic() - begun < LASTS.total_seconds() / 2
                if is_early and isinstance(translated(error), PeerLost):
                    raise  # Gloo's reduce-scatter fails without being completed
            step = self.heartbeat.step if isinstance(self.heartbeat, Heartbeat) else -1
            meetings.look(f"in `{phase or 'exchange'}` of step {step}")
        self.work.wait()
