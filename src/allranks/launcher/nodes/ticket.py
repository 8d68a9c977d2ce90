"""What an agent must know to come to its job: one line on its standard input."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass

ANY = -1


@dataclass(frozen=True)
class Ticket:
    """What a node must know to come to its job.

    The head listens at one of `addresses`. `node` is the number of this one (`None`: that of the
    task that a scheduler started it as; `ANY`: one that is free). `words` are
    those of the command line that describe the job, the same on every node. An agent of which
    `follows` is true dies with the process that started it.
    """

    addresses: tuple[str, ...]
    port: int
    key: str
    node: int | None
    words: tuple[str, ...] = ()
    program: str = ""
    interface: str = ""
    join_timeout_s: float = 300.0
    node_timeout_s: float = 15.0
    follows: bool = True

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Ticket:
        data = json.loads(line)
        words, addresses = tuple(data["words"]), tuple(data["addresses"])
        return cls(**{**data, "words": words, "addresses": addresses})

    def for_task(self) -> Ticket:
        """The same for all tasks of a scheduler."""
        return dataclasses.replace(self, node=None)
