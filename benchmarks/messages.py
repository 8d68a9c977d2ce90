"""Bytes per second of `launcher/messages` over loopback, beside a plain socket.

    python benchmarks/messages.py

Two processes; one sends `--mib` MiB, the other answers with a byte, `--turns` times. Both ways are
measured side by side in each round, in turn: the frames of a `Connection`, received into new memory
as the synchronizer does, and `sendall` with `recv_into` of memory that is there.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from typing import Any

from harness import RECORDS, finish_record, order_of, ratio, start_record

from allranks.launcher.messages import Connection


def main() -> None:
    """One record with the seconds of each turn and the ratio of each pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--turns", type=int, default=15)
    given = parser.parse_args()
    record = start_record("messages", vars(given))
    size = given.mib << 20
    ways = {"frames": _frames, "plain": _plain}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(given.turns):
        for name in order_of(list(ways), turn):
            samples[name].append(ways[name](size))
    record["mb_per_s"] = {
        name: round(sorted(size / s / 1e6 for s in found)[len(found) // 2])
        for name, found in samples.items()
    }
    record["samples"] = samples
    what = f"{given.mib} MiB over loopback"
    pairs = list(zip(samples["frames"], samples["plain"], strict=True))
    finish_record(record, [ratio(what, "seconds", "frames", "plain", pairs, bar=None)], RECORDS)


def _pair(child: Any) -> tuple[socket.socket, int]:
    """A socket to a process that runs `child` with the other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pid = os.fork()
        if not pid:
            child(socket.create_connection(listener.getsockname()))
            os._exit(0)
        mine, _ = listener.accept()
    return mine, pid


def _frames(size: int) -> float:
    def child(peer: socket.socket) -> None:
        connection = Connection(peer, size, 60.0)
        for _ in range(2):
            connection.receive()
            connection.send({"taken": True})

    mine, pid = _pair(child)
    with Connection(mine, size, 60.0) as connection:
        body = bytearray(size)
        connection.ask({}, body)
        begun = time.perf_counter()
        connection.ask({}, body)
        seconds = time.perf_counter() - begun
    os.waitpid(pid, 0)
    return seconds


def _plain(size: int) -> float:
    def child(peer: socket.socket) -> None:
        memory = memoryview(bytearray(size))
        for _ in range(2):
            at = 0
            while at < size:
                at += peer.recv_into(memory[at:])
            peer.sendall(b"1")

    mine, pid = _pair(child)
    body = bytearray(size)
    with mine:
        mine.sendall(body)
        mine.recv(1)
        begun = time.perf_counter()
        mine.sendall(body)
        mine.recv(1)
        seconds = time.perf_counter() - begun
    os.waitpid(pid, 0)
    return seconds


if __name__ == "__main__":
    main()
