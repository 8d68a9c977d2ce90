"""Peers of a job come through, however many strangers knock, and whatever the kernel says."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from allranks.launcher.messages import Answering, Connection, connect_to
from allranks.launcher.nodes import channel as admission
from allranks.launcher.nodes.channel import (
    LARGEST_FROM_STRANGERS,
    Admission,
    Channel,
    Disconnected,
    Message,
    Refused,
)

SECRET = "the secret of this job"


class Echo(Answering):
    """It answers with what it was asked."""

    def admit(self, connection: Connection, hello: Message) -> int:
        connection.send(hello)
        return 0

    def answer(self, peer: int, connection: Connection, message: Message, body: memoryview) -> None:
        connection.send(message, body)

    def lost(self, peer: int, connection: Connection, error: Exception) -> None:
        pass


class Unreliable(socket.socket):
    """A listener whose `accept` fails in every way, one after the other, before it works."""

    errors = [errno.ECONNABORTED, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EPROTO]  # noqa: RUF012

    def accept(self) -> tuple[socket.socket, object]:
        if self.errors:
            number = self.errors.pop(0)
            raise OSError(number, os.strerror(number))
        return super().accept()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as made:
        yield made


@pytest.fixture
def server(listener: socket.socket) -> Iterator[Echo]:
    with closing(Echo(listener, SECRET, 1 << 20)) as running:
        running.start()
        yield running


def assert_admitted(listener: socket.socket) -> None:
    with connect_to(listener.getsockname(), SECRET, 1 << 20, 60.0) as made:
        assert made.ask({"hello": 1})[0] == {"hello": 1}
        answer, body = made.ask({"a": 2}, b"123")
        assert (answer, bytes(body)) == ({"a": 2}, b"123")


@pytest.mark.usefixtures("server")
def test_a_wrong_secret_is_refused(listener: socket.socket) -> None:
    with pytest.raises(Refused):
        connect_to(listener.getsockname(), "another", 1 << 20, 60.0)
    assert_admitted(listener)


@pytest.mark.usefixtures("server")
def test_strangers_that_come_and_go_cost_no_thread_and_keep_nobody_out(
    listener: socket.socket,
) -> None:
    threads = threading.active_count()
    for _ in range(2000):
        with socket.create_connection(listener.getsockname()):
            assert threading.active_count() == threads
    assert_admitted(listener)


def test_no_error_of_accept_ends_the_listening(listener: socket.socket) -> None:
    with (
        Unreliable(fileno=os.dup(listener.fileno())) as unreliable,
        closing(Echo(unreliable, SECRET, 1 << 20)) as running,
    ):
        running.start()
        assert_admitted(listener)
        assert not unreliable.errors


def test_strangers_that_stay_leave_descriptors_and_are_dropped_in_time(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then buys no time: the whole proof has one deadline."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (32, 4096))
    monkeypatch.setattr(admission, "PENDING_S", 1.0)
    with closing(Echo(listener, SECRET, 1 << 20)) as running:
        running.start()
        assert running._admission._most == 8
        strangers = [socket.create_connection(listener.getsockname()) for _ in range(20)]
        done = threading.Event()

        def drip() -> None:
            while not done.wait(0.05):
                for stranger in strangers:
                    with suppress(OSError):
                        stranger.send(b"\0")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            most = 0
            while running._admission._pending or not most:
                most = max(most, len(running._admission._pending))
                assert most <= 8
                time.sleep(0.001)
            assert_admitted(listener)
        finally:
            done.set()
            dripping.join()
            for stranger in strangers:
                stranger.close()


def test_a_full_admission_waits_for_nobody_new(listener: socket.socket) -> None:
    """Else whoever waits for it would be woken without end by those in the backlog."""
    with closing(Admission(listener, SECRET)) as full:
        full._most = 1
        with (
            socket.create_connection(listener.getsockname()),
            socket.create_connection(listener.getsockname()),
        ):
            while not full._pending:
                list(full.proved())
            assert listener not in full.ready


def test_of_a_stranger_no_more_is_kept_than_a_message_may_have() -> None:
    mine, theirs = socket.socketpair()
    with mine, closing(Channel(theirs)) as channel:
        mine.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                mine.send(b"\0\0\x0f\xff" + b"1" * (1 << 16))
        with pytest.raises(Disconnected):
            channel.receive()
        assert len(channel._in) <= LARGEST_FROM_STRANGERS + (1 << 16) + 4
