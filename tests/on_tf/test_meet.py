"""Ranks find each other by file and by socket, in whatever order they come, and part together."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.errors import PeerLost, RequestError
from allranks.launcher.nodes.channel import Channel, authenticate
from allranks.launcher.processes.ports import Reservation
from allranks.launcher.world import World
from allranks.tensorflow.rendezvous import ReservedPorts, meet

SECRET = "ab" * 32
RANKS = 3
Worlds = Callable[[int], World]


def all_meet(world_of: Worlds) -> list[ReservedPorts]:
    """Every rank in a thread of its own, the leader last."""
    with ThreadPoolExecutor(RANKS) as threads:

        def one(rank: int) -> ReservedPorts:
            time.sleep(0.05 * (RANKS - rank))
            return meet(world_of(rank))

        return list(threads.map(one, range(RANKS)))


@pytest.fixture(params=["file", "socket", "another launcher"])
def world_of(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Worlds]:
    if request.param == "file":
        yield lambda rank: World(rank, RANKS, store=str(tmp_path / ".store-0"))
    elif request.param == "another launcher":
        with Reservation(1) as reserved:
            monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
            monkeypatch.setenv("MASTER_PORT", str(reserved.ports[0]))
            yield lambda rank: World(rank, RANKS)
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address, fd = f"127.0.0.1:{listener.getsockname()[1]}", listener.fileno()
            yield lambda rank: World(
                *(rank, RANKS), rendezvous=address, listener=fd if rank == 0 else -1, secret=SECRET
            )


@pytest.mark.slow
def test_all_hear_the_addresses_of_all_and_leave_together(world_of: Worlds) -> None:
    found = all_meet(world_of)
    addresses = found[0].addresses
    assert [held.addresses for held in found] == [addresses] * RANKS
    assert len(set(addresses)) == RANKS
    for held in found:  # a server binds the port that was held for it
        held.close()
    for address in addresses:
        host, _, port = address.rpartition(":")
        with closing(socket.socket()) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((host, int(port)))
    gone: list[int] = []

    def part(rank: int) -> None:
        found[rank].part()
        gone.append(rank)

    threads = [threading.Thread(target=part, args=[rank]) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert gone == [], "somebody left while the leader was still there"
    part(0)
    for thread in threads:
        thread.join()
    assert sorted(gone) == [0, 1, 2]


def test_who_does_not_know_the_secret_or_is_no_rank_has_no_place() -> None:
    """Nobody else hears the addresses, and nobody ends the leader."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as threads:
        where = listener.getsockname()
        world = World(0, 2, rendezvous=f"127.0.0.1:{where[1]}", secret=SECRET)
        leader = threads.submit(meet, replace(world, listener=listener.fileno()))
        with socket.create_connection(where) as stranger:
            stranger.sendall(b'1\n"an address of a stranger"\n')
            assert b"127.0.0.1" not in stranger.makefile("rb").read()
        for rank, secret in ((1, "another"), (77, SECRET), (-1, SECRET)):
            with pytest.raises(PeerLost, match="does not let"):
                meet(World(rank, 78, rendezvous=world.rendezvous, secret=secret))
        with closing(Channel(socket.create_connection(where))) as odd:
            authenticate(odd, SECRET.encode())
            odd.send({"rank": "1"})
            assert "refused" in odd.wait_for_one(60.0)
        found = threads.submit(meet, replace(world, rank=1)), leader
        addresses = [held.result().addresses for held in found]
        assert addresses[0] == addresses[1]
        for held in found:
            held.result().close()
        for ending in [threads.submit(held.result().part) for held in found]:
            ending.result()


def test_one_alone_asks_nobody() -> None:
    held = meet(World())
    assert len(held.addresses) == 1
    held.close()
    held.part()


def test_nowhere_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RequestError, match="start them with"):
        meet(World(1, 2))
