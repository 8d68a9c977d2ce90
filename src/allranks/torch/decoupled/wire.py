"""A learner's connection to the synchronizer, made again when it breaks.

A synchronizer that is gone is waited for, `patience_s` at most. One that has come in its place is
told which chunks the learner holds; what it does not know of it has handed out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from allranks.errors import RequestError
from allranks.launcher.messages.answering import ANSWER_S
from allranks.launcher.messages.connection import Connection, Place
from allranks.launcher.messages.meeting_point import connect
from allranks.launcher.nodes.channel import Disconnected, Message, Refused
from allranks.launcher.world import World
from allranks.torch.decoupled.flat import Numbers
from allranks.torch.decoupled.inner_state import largest, unpacked


@dataclass(frozen=True)
class Heard:
    """One answer, with the weights where they are newer; `anew`: of a synchronizer just joined."""

    answer: Message
    body: memoryview
    anew: bool = False
    inner: Any = None
    """The inner optimizer to begin with, if there is one."""


class Wire:
    """One exchange at a time, from any thread. Bodies go where `place` says."""

    def __init__(
        self, world: World, digest: str, weight_bytes: int, patience_s: float, place: Place
    ) -> None:
        self.world, self._digest, self._patience_s = world, digest, patience_s
        self._most, self._place = largest(weight_bytes), place
        self._connection: Connection | None = None
        self._joined = self._closed = False

    def exchange(
        self, message: Message, found: Numbers | None, holds: Sequence[int]
    ) -> list[Heard]:
        """The answer to a message; before it those of each synchronizer that had to be joined.

        Where there is nothing to bring, the answer to a hello is enough.
        """
        heard: list[Heard] = []
        while True:
            try:
                if self._connection is None:
                    heard.append(self._join(holds))
                    if found is None:
                        return heard
                connection = self._connection
                assert connection is not None
                body = () if found is None else found.buffers
                heard.append(Heard(*connection.ask(message, *body, place=self._place)))
                return heard
            except Disconnected:
                if self._closed:
                    raise
                self._leave()

    def say(self, message: Message, pieces: Sequence[Any]) -> None:
        """Send what has no answer; it is lost where the connection is."""
        try:
            if self._connection is not None:
                self._connection.send(message, *pieces)
        except Disconnected:
            self._leave()

    def _join(self, holds: Sequence[int]) -> Heard:
        connection = connect(self.world, self._most, ANSWER_S, self._patience_s)
        self._connection = connection
        hello = {"learner": self.world.role_index, "digest": self._digest, "holds": list(holds)}
        hello["fresh"] = not self._joined
        try:
            answer, numbers = connection.ask(hello, place=self._place)
            inner = unpacked(connection.receive()[1]) if answer["inner"] else None
        except Refused as error:
            raise RequestError(
                asked="--strategy decoupled",
                found=str(error),
                why="learners and the synchronizer exchange the weights of one model",
                do="let model() of the task return the same model in every process",
            ) from error
        self._joined = True
        return Heard(answer, numbers, anew=True, inner=inner)

    def _leave(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def close(self) -> None:
        """For good; an exchange under way in another thread ends with it."""
        self._closed = True
        if self._connection is not None:
            self._connection.shut()
            self._connection.close()
