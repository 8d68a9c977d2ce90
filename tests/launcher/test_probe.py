"""Probes: what they measure is what came, they serve only who brings the token,
and they try a folder."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from allranks.launcher.nodes.channel import Channel, Disconnected, Refused, authenticate
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.tools.doctor import folder as folders
from allranks.tools.doctor import probes as links
from allranks.tools.doctor.folder import LOCK, SEEN, WORKS, WRITE, Mark, examine, marked
from allranks.tools.doctor.probes import (
    MOST_IN_FULL,
    Door,
    Endpoint,
    Lost,
    Probes,
    measure,
    measure_links,
    pairs_to_measure,
    serve,
)

HERE = "127.0.0.1"
KEY = "the key of this test"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection over the loopback interface."""
    with socket.create_server((HERE, 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with one, other:
        yield one, other


@pytest.fixture
def probes(server: ForkServer) -> Iterator[Probes]:
    """Two probes that run, ranks 0 and 1."""
    with (
        socket.create_server((HERE, 0)) as listener,
        Probes(server, listener, KEY) as running,
    ):
        door = Door(*listener.getsockname())
        running.start({0: door, 1: door})
        assert running.there == [0, 1], running.lost
        yield running


# --- measuring ----------------------------------------------------------------------------------


def test_both_ends_measure_the_way_between_them() -> None:
    served: dict[str, float] = {}

    def answer() -> None:
        for _ in range(2):
            with listener.accept()[0] as connection:
                served.update(serve(connection))

    with socket.create_server((HERE, 0)) as listener:
        serving = threading.Thread(target=answer)
        serving.start()
        way = measure(lambda: socket.create_connection(listener.getsockname()))
        serving.join()
    assert {*way, *served} == {"round_trip_us", "back_mb_s", "there_mb_s"}
    assert all(value > 0 for value in (*way.values(), *served.values()))


def test_a_rate_is_that_of_what_came_after_the_first_eighth(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """10^6 bytes in 0.01 s, after a burst of them at once."""
    clock = itertools.count(0.0, 0.01)
    came = iter([10**8, *[10**6] * 100])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(links, "_receive", lambda connection, space: next(came))
    assert links._rate(pair[0]) == pytest.approx(1e8)
    assert 35 < 100 - len([*came]) < 45, "0.4 s"


def test_a_connection_that_breaks_is_no_number(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].close()
    with pytest.raises(ConnectionError):
        links._rate(pair[1])


# --- probes that run ----------------------------------------------------------------------------


def test_probes_measure_the_way_between_them(probes: Probes) -> None:
    ends = [Endpoint(rank, "here", HERE) for rank in (0, 1)]
    broken: list[str] = []
    matrix = measure_links(probes, ends, broken, lambda text: None)
    assert matrix is not None and not broken
    assert matrix.round_trip_us[0][1] == matrix.round_trip_us[1][0]
    rates = matrix.mb_per_s[0][1], matrix.mb_per_s[1][0]
    assert all(rate is not None and rate > 1 for rate in rates)
    assert matrix.mb_per_s[0][0] is None and matrix.round_trip_us[1][1] is None


def test_a_way_that_is_closed_is_named_and_the_probes_go_on(probes: Probes) -> None:
    broken: list[str] = []
    elsewhere = [Endpoint(0, "here", HERE), Endpoint(1, "there", "192.0.2.77")]
    matrix = measure_links(probes, elsewhere, broken, lambda text: None)
    assert matrix is not None and matrix.mb_per_s == [[None, None]] * 2
    (line,) = broken
    assert line.startswith(f"rank 0 on here ({HERE}) to rank 1 on there (192.0.2.77): ")
    assert measure_links(
        probes, [Endpoint(0, "", HERE), Endpoint(1, "", HERE)], [], lambda text: None
    )


def test_nobody_who_listens_is_a_problem_and_no_number(probes: Probes) -> None:
    with socket.create_server((HERE, 0)) as closed:
        port = closed.getsockname()[1]
    order = {"do": "measure", "address": HERE, "port": port, "token": "x"}
    assert "refused" in probes.ask(0, order)["problem"]
    assert probes.there == [0, 1]


def test_a_probe_serves_only_who_brings_its_token(probes: Probes) -> None:
    door = probes.ask(0, {"do": "listen", "address": HERE})
    for said in (b"x" * 32, b""):
        with socket.create_connection((HERE, door["port"])) as stranger:
            stranger.settimeout(60)
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.makefile("rb").read().endswith(b'"}'), "a number to answer, and no more"
    found = probes.ask(1, {"do": "measure", "address": HERE, **door})
    assert found["back_mb_s"] > 0 and probes.ask(0, {"do": "stop"})["there_mb_s"] > 0


def test_nobody_connects_who_waits_for_one_that_is_told_to_stop(probes: Probes) -> None:
    probes.ask(0, {"do": "listen", "address": HERE})
    assert probes.ask(0, {"do": "stop"}, 5.0) == {}


def test_a_stranger_is_no_probe(server: ForkServer) -> None:
    with socket.create_server((HERE, 0)) as listener, Probes(server, listener, KEY) as probes:
        door = Door(*listener.getsockname())
        with socket.create_connection(listener.getsockname()) as connection:
            stranger = Channel(connection)
            refused: list[BaseException] = []

            def come() -> None:
                try:
                    authenticate(stranger, b"another key")
                except Disconnected as error:
                    refused.append(error)

            coming = threading.Thread(target=come)
            coming.start()
            probes.start({0: door})
            while coming.is_alive():
                probes._admit()
            coming.join()
        assert isinstance(refused[0], Refused)
        assert probes.there == [0]


def test_a_probe_that_dies_is_lost_and_named(server: ForkServer) -> None:
    with socket.create_server((HERE, 0)) as listener, Probes(server, listener, KEY) as probes:
        probes.start({0: Door(*listener.getsockname()), 1: Door(*listener.getsockname())})
        (ticket,) = (ticket for ticket, rank in probes._tickets.items() if rank == 1)
        server.signal(ticket, signal.SIGKILL)
        while 1 in probes.there:
            probes._note_exits()
        with pytest.raises(Lost):
            probes.ask(1, {"do": "stop"})
        assert probes.there == [0] and 1 in probes.lost
        ends = [Endpoint(rank, "here", HERE) for rank in (0, 1)]
        matrix = measure_links(probes, ends, [], lambda text: None)
        assert matrix is not None and matrix.mb_per_s[0][1] is None


def test_a_probe_that_finds_nobody_is_lost_with_its_exit_code(server: ForkServer) -> None:
    with socket.create_server((HERE, 0)) as closed:
        port = closed.getsockname()[1]
    with socket.create_server((HERE, 0)) as listener, Probes(server, listener, KEY) as probes:
        probes.start({0: Door(HERE, port)})
        assert probes.there == [] and "ended with code 1" in probes.lost[0]


@pytest.mark.parametrize("count", [2, 3, MOST_IN_FULL, MOST_IN_FULL + 1, 40])
def test_of_a_few_ends_all_pairs_are_measured_of_many_each_with_two(count: int) -> None:
    pairs = pairs_to_measure(count)
    assert len(set(pairs)) == len(pairs) and all(one < other for one, other in pairs)
    if count <= MOST_IN_FULL:
        assert len(pairs) == count * (count - 1) // 2
    else:
        assert len(pairs) <= 2 * count
        assert {rank for pair in pairs for rank in pair} == set(range(count))


# --- the folder of runs -------------------------------------------------------------------------


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Mark]:
    with marked(tmp_path) as mark:
        yield mark


def test_a_folder_where_all_works(mark: Mark) -> None:
    folder = examine(mark)
    assert folder.tried == dict.fromkeys((SEEN, WRITE, LOCK), WORKS)
    assert folder.kind and folder.free_bytes
    assert os.listdir(mark.folder) == [mark.name], "nothing of it is left"


def test_a_node_that_has_another_folder_there_is_found_out(mark: Mark, tmp_path: Path) -> None:
    other = tmp_path / "other"
    missing = examine(Mark(str(other), mark.name, mark.content))
    assert missing.tried == dict.fromkeys((SEEN, WRITE), "No such file or directory")
    assert missing.free_bytes is None
    other.mkdir()
    assert "No such file" in examine(Mark(str(other), "mark", "x")).tried[SEEN]
    (other / "mark").write_text("something else")
    tried = examine(Mark(str(other), "mark", "x")).tried
    assert tried == {SEEN: "it holds something else here", WRITE: WORKS, LOCK: WORKS}


def test_a_lock_that_is_not_seen_from_another_node_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "mark").write_text("free")
    tried = examine(Mark(str(tmp_path), "mark", "free")).tried
    assert tried == {SEEN: WORKS, WRITE: WORKS, LOCK: "a lock holds on its own node only"}


def test_what_the_file_system_refuses_is_told(mark: Mark, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert examine(mark).tried == {SEEN: WORKS, WRITE: WORKS, LOCK: "Function not implemented"}
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: None)
    assert examine(mark).tried[LOCK] == "a lock does not exclude another process"
    assert os.listdir(mark.folder) == [mark.name]


def test_what_cannot_be_marked_is_only_tried(tmp_path: Path) -> None:
    with marked(tmp_path / "none") as mark:
        assert mark.name == ""
    assert examine(Mark(str(tmp_path), "", "")).tried == {WRITE: WORKS, LOCK: WORKS}


def test_the_kind_of_a_file_system_is_that_of_the_nearest_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = tmp_path / "a b"
    space.mkdir()
    escaped = str(space).replace(" ", r"\040")
    (tmp_path / "self").mkdir()
    lines = ["/dev/x / ext4 rw 0 0", f"y {escaped} ext4 rw 0 0", f"x {escaped} lustre rw 0 0"]
    (tmp_path / "self" / "mounts").write_text("\n".join(lines))
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert folders._kind(space) == "lustre"
    assert folders._kind(tmp_path) == "ext4"
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "none"))
    assert folders._kind(space) is None
