"""What each rank of a group tells the others of itself, so that all of them decide alike."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from allranks.torch.shared_memory.segment import host_identity


@dataclass(frozen=True)
class Card:
    """One process: its `host`, where others open its bell, and the memory that it was `given`.

    `cannot` says why it has no shared memory; empty if it has. `cores` are those it may run on.
    `given` is which file the launcher handed it ("device:inode"), empty if none.
    """

    host: str
    pid: int
    bell: str
    cores: tuple[int, ...]
    cannot: str = ""
    given: str = ""


def own_card(bell: str, cannot: str, given_fd: int) -> Card:
    host = host_identity()
    given = ""
    if given_fd >= 0:
        about = os.fstat(given_fd)
        given = f"{about.st_dev}:{about.st_ino}"
    cannot = cannot or ("" if host else "/proc does not say which host this is")
    return Card(host, os.getpid(), bell, tuple(os.sched_getaffinity(0)), cannot, given)


def exchanged(store: Any, rank: int, size: int, card: Card) -> list[Card]:
    """The cards of all ranks, in order; each rank calls this once per store."""
    said = told_to_all(store, "card", rank, size, json.dumps(asdict(card)))
    made = [json.loads(text) for text in said]
    return [Card(**{**values, "cores": tuple(values["cores"])}) for values in made]


def told_to_all(store: Any, key: str, rank: int, size: int, text: str) -> list[str]:
    """What each rank says, in order; returns when all have said it."""
    store.set(f"{key}/{rank}", text)
    return [store.get(f"{key}/{peer}").decode() for peer in range(size)]


def hosts_of(cards: Sequence[Card]) -> list[list[int]]:
    """The ranks of each host, in the order in which the hosts first appear."""
    hosts: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        hosts.setdefault(card.host, []).append(rank)
    return list(hosts.values())


def one_given(cards: Sequence[Card]) -> bool:
    """Whether all were handed the same memory by their launcher."""
    return bool(cards[0].given) and len({card.given for card in cards}) == 1
