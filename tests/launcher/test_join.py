"""Who may come in: the key, the number, the words; and who is missing, by name."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import PlaceError, RequestError
from allranks.launcher.nodes.agent import serve
from allranks.launcher.nodes.channel import (
    LARGEST_FROM_STRANGERS,
    Channel,
    Disconnected,
    Refused,
    authenticate,
)
from allranks.launcher.nodes.facts import (
    Doorbell,
    NodeFacts,
    Ringing,
    candidates,
    differences,
    facts,
)
from allranks.launcher.nodes.join import JoinServer, Ticket, preflight
from allranks.launcher.nodes.nodes import Node, Nodes

KEY = "the key of this job"
HERE = "127.0.0.1"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with closing(socket.create_server((HERE, 0))) as made:
        yield made


class Comer(threading.Thread):
    """A node that comes to a job from a thread, and what became of it."""

    def __init__(self, listener: socket.socket, number: int, key: str = KEY, **more: Any) -> None:
        super().__init__()
        port = listener.getsockname()[1]
        self.ticket = Ticket((HERE,), port, key, number, join_timeout_s=60.0, **more)
        self.code: int | None = None
        self.problem = ""
        self.start()

    def run(self) -> None:
        try:
            self.code = serve(self.ticket)
        except PlaceError as error:
            self.problem = str(error)


def gather(listener: socket.socket, nodes: int, seconds: float = 20.0, words: Any = ()) -> Any:
    names = tuple(f"node {number}" for number in range(nodes))
    return JoinServer(names, KEY, listener, words, seconds).wait_for_all()


def test_all_come_in_order_of_their_numbers(listener: socket.socket) -> None:
    comers = [Comer(listener, number) for number in (2, 0, 1)]
    nodes = Nodes(gather(listener, 3), 20.0)
    assert [node.number for node in nodes.nodes] == [0, 1, 2]
    preflight(nodes, None, ".")
    assert {node.address for node in nodes.nodes} == {HERE}
    nodes.leave(4)
    for comer in comers:
        comer.join()
    assert [comer.code for comer in comers] == [4, 4, 4], "they leave as the job does"


@pytest.mark.slow
def test_who_waits_for_a_late_one_does_not_lose_patience(listener: socket.socket) -> None:
    """The head is silent for long only if it is gone: while nodes come it is there."""
    first = Comer(listener, 0, node_timeout_s=3.0)
    late: list[Comer] = []
    timer = threading.Timer(6.0, lambda: late.append(Comer(listener, 1, node_timeout_s=3.0)))
    timer.start()
    nodes = Nodes(gather(listener, 2, seconds=60), 20.0)
    nodes.leave(0)
    timer.join()
    for comer in (first, *late):
        comer.join()
    assert [comer.code for comer in (first, *late)] == [0, 0], first.problem


@pytest.mark.slow
def test_a_node_of_another_version_is_turned_away_by_name(listener: socket.socket) -> None:
    with closing(Channel(socket.create_connection(listener.getsockname()))) as other:
        thread = threading.Thread(target=lambda: authenticate(other, KEY.encode()))
        thread.start()
        names = ("node 0",)
        server = JoinServer(names, KEY, listener, join_timeout_s=5.0)
        sender = threading.Timer(1.0, lambda: other.send({"joins": 0, "facts": {"host": "old"}}))
        sender.start()
        with pytest.raises(PlaceError, match="turned away: a node: it runs another version"):
            server.wait_for_all()
        thread.join()
        sender.join()


def test_one_with_another_key_is_refused_and_learns_nothing(listener: socket.socket) -> None:
    stranger, own = Comer(listener, 1, key="another key"), Comer(listener, 0)
    with pytest.raises(PlaceError, match=r"node 1 of 2 nodes did not come within") as missing:
        gather(listener, 2, seconds=2)
    assert "here: node 0 (" in str(missing.value)
    assert "turned away: one that does not know the id of this job" in str(missing.value)
    stranger.join()
    own.join()
    assert "is refused at 127.0.0.1" in stranger.problem and "the id is another" in stranger.problem
    assert own.code == 3, "it hears that the job came to nothing"


def test_a_node_does_not_trust_whoever_listens(listener: socket.socket) -> None:
    """A listener that does not know the key gets an answer to its number, and no more."""
    problems = []

    def come() -> None:
        with closing(Channel(socket.create_connection(listener.getsockname()))) as channel:
            try:
                authenticate(channel, KEY.encode())
            except Refused as error:
                problems.append(str(error))

    thread = threading.Thread(target=come)
    thread.start()
    with closing(Channel(listener.accept()[0])) as false_head:
        false_head.send({"nonce": "1"})
        answer = false_head.wait_for_one(20)
        assert set(answer) == {"nonce", "proof"} and KEY not in str(answer)
        false_head.send({"proof": answer["proof"]})  # sent back: it proves nothing
        thread.join()
    assert problems == ["whoever listens there does not know the id of this job"]


@pytest.mark.slow
def test_of_two_nodes_with_one_number_one_is_refused(listener: socket.socket) -> None:
    comers = [Comer(listener, 0), Comer(listener, 0)]
    with pytest.raises(PlaceError, match=r"turned away: node 0 from .*: node 0 is here already"):
        gather(listener, 2, seconds=5)
    for comer in comers:
        comer.join()
    assert sorted(comer.code or 0 for comer in comers) == [2, 3]


@pytest.mark.slow
def test_a_number_that_is_too_large_is_refused(listener: socket.socket) -> None:
    comer = Comer(listener, 7)
    with pytest.raises(PlaceError, match="there are 2 nodes, numbered from 0"):
        gather(listener, 2, seconds=5)
    comer.join()
    assert comer.code == 2


def test_other_words_are_shown_on_both_sides(listener: socket.socket) -> None:
    comer = Comer(listener, 0, words=("train", "digits", "steps=5"))
    with pytest.raises(RequestError) as refused:
        gather(listener, 1, words=("train", "digits", "steps=6"))
    comer.join()
    assert "there: train digits steps=5; here: train digits steps=6" in refused.value.found
    assert comer.code == 2


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "big") + message


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0\0\0\4junk",
        b"\0\0\0\2[]",
        b"\xff\xff\xff\xff",
        (LARGEST_FROM_STRANGERS + 1).to_bytes(4, "big"),
        b"",
        framed(b"[" * 4000),
        framed(b'{"proof": "\\ud800", "nonce": "\\ud800"}'),
        framed(b'{"proof": 1}') * 3,
    ],
    ids=["http", "junk", "list", "gigabytes", "too long", "nothing", "deep", "no text", "thrice"],
)
def test_strangers_disturb_nobody(listener: socket.socket, words: bytes) -> None:
    with closing(socket.create_connection(listener.getsockname())) as stranger:
        stranger.send(words)
        comer = Comer(listener, 0)
        nodes = Nodes(gather(listener, 1), 20.0)
        nodes.leave(0)
        comer.join()
    assert comer.code == 0


def test_a_place_is_free_again_when_its_node_has_gone(listener: socket.socket) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(gather(listener, 2)))
    thread.start()
    with closing(Channel(socket.create_connection(listener.getsockname()))) as first:
        authenticate(first, KEY.encode())
        told = {"joins": 0, "facts": facts().to_data(), "interfaces": [], "words": []}
        first.send({**told, "doorbell": [1, ""], "clock": time.monotonic()})
        time.sleep(0.5)
    comers = [Comer(listener, 0), Comer(listener, 1)]
    thread.join()
    Nodes(found[0], 20.0).leave(0)
    for comer in comers:
        comer.join()
    assert [comer.code for comer in comers] == [0, 0]


# --- what has to be the same, and what has to be reached ----------------------------------------


def like(**other: Any) -> NodeFacts:
    return NodeFacts.from_data({**facts().to_data(), **other})


def test_what_differs_is_listed_with_who_has_what() -> None:
    assert differences({"a": like(), "b": like(host="b", cores=1, clock_s=0.0)}) == []
    packages = {**like().packages, "torch": "2.12.0"}
    found = differences({"a": like(), "b": like(packages=packages, program="123")})
    torch = like().packages["torch"]
    assert found == [
        "the program (digest): a has none, b has 123",
        f"torch: a has {torch}, b has 2.12.0",
    ]


def test_a_node_that_answers_is_told_from_one_that_does_not() -> None:
    with closing(Doorbell("its token")) as bell, closing(Doorbell("another")) as other:
        ringing = Ringing(
            {
                "one": ([HERE, "127.0.0.2"], bell.port, "its token"),
                "another": ([HERE], other.port, "its token"),
            },
            20.0,
        )
        while not ringing.is_over():
            bell.answer()
            other.answer()
            time.sleep(0.01)
    assert ringing.reached == {"one": [HERE, "127.0.0.2"], "another": []}


def test_an_interface_that_is_not_there_is_refused() -> None:
    with pytest.raises(RequestError, match="--interface nowhere0"):
        candidates("", "nowhere0")


def test_a_program_that_is_another_on_one_node_is_refused(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each asked for the file that the head names, at the same path."""
    digests = iter(["aaaa", "bbbb"])
    monkeypatch.setattr("allranks.launcher.nodes.agent.digest_of", lambda program: next(digests))
    comers = [Comer(listener, number) for number in range(2)]
    nodes = Nodes(gather(listener, 2), 20.0)
    with pytest.raises(
        PlaceError, match=r"the program \(digest\): node 0 .* has aaaa, node 1 .* has bbbb"
    ):
        preflight(nodes, tmp_path, os.getcwd(), "mytask.py")
    nodes.leave(3)
    for comer in comers:
        comer.join()


def test_nodes_that_do_not_see_the_folder_are_named(
    listener: socket.socket, tmp_path: Path
) -> None:
    comer = Comer(listener, 0)
    nodes = Nodes(gather(listener, 1), 20.0)
    with pytest.raises(PlaceError, match=r"not every node sees .*\n  node 0 .*No such file"):
        preflight(nodes, tmp_path, str(tmp_path / "not there"))
    assert not list(tmp_path.iterdir()), "the probe is gone"
    nodes.leave(3)
    comer.join()


@pytest.mark.slow
def test_an_address_that_nobody_reaches_is_named(listener: socket.socket) -> None:
    """The first address is closed: the second is taken; with none left, all are named."""
    comers = [Comer(listener, number) for number in range(2)]
    nodes = Nodes(gather(listener, 2), 20.0)
    first, second = nodes.nodes
    blocked = type(first.interfaces[0])("eth9", "127.0.0.1")
    first.interfaces = (type(blocked)("eth8", "255.255.255.255"), blocked)
    preflight(nodes, None, ".")
    assert first.chosen == blocked
    second.interfaces = (type(blocked)("eth8", "255.255.255.255"),)
    with pytest.raises(PlaceError) as unreachable:
        preflight(nodes, None, ".")
    assert "node 1" in str(unreachable.value)
    assert "tried 255.255.255.255 (eth8)" in str(unreachable.value)
    assert "from node 0" in str(unreachable.value)
    nodes.leave(3)
    for comer in comers:
        comer.join()


def test_a_node_that_breaks_off_is_lost_and_says_why(listener: socket.socket) -> None:
    ends = socket.socketpair()
    node = Node(0, Channel(ends[0]), facts(), (), (0, ""), (), 0.0)
    nodes = Nodes([node], 20.0)
    node.tickets = {5: 1, 6: 2}
    ends[1].close()
    exits = nodes.exits(5.0)
    assert [(one.ticket, one.host, one.lost) for one in exits] == [
        (ticket, node.name, "it closed its connection") for ticket in (5, 6)
    ]
    with pytest.raises(PlaceError, match="is lost: it closed its connection"):
        nodes.ask(node, {"do": "listen"})
    with pytest.raises(Disconnected):
        node.channel.send({})
