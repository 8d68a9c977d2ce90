"""Ports that a job owns: its servers can listen there, and nobody else is given them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from allranks.errors import RequestError
from allranks.launcher.processes.ports import Reservation

TENSORFLOW = """
import sys, tensorflow as tf
cluster = tf.train.ClusterSpec({"worker": [f"127.0.0.1:{sys.argv[1]}"]})
server = tf.distribute.Server(cluster, job_name="worker", task_index=0)
assert server.target == f"grpc://127.0.0.1:{sys.argv[1]}", server.target
with tf.device("/job:worker/task:0"):
    pass
print("listens")
"""
JAX = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_COORDINATOR_BIND_ADDRESS"] = sys.argv[2].format(sys.argv[1])
import jax
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 1, 0)
assert jax.process_count() == 1
jax.distributed.shutdown()
print("listens")
"""


def output_of(script: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_store_of_torch_listens_at_a_port_that_is_held(use_libuv: bool) -> None:
    with Reservation(1) as reservation:
        (port,) = reservation.ports
        store = dist.TCPStore("127.0.0.1", port, is_master=True, use_libuv=use_libuv)
        other = dist.TCPStore("127.0.0.1", port, is_master=False, use_libuv=use_libuv)
        store.set("word", "heard")
        assert other.get("word") == b"heard" and store.port == port
        del store, other


@pytest.mark.slow
def test_a_server_of_tensorflow_listens_at_a_port_that_is_held() -> None:
    with Reservation(1) as reservation:
        assert "listens" in output_of(TENSORFLOW, str(reservation.ports[0]))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["127.0.0.1:{}", "[::]:{}"])
def test_a_coordinator_of_jax_listens_at_a_port_that_is_held(where: str) -> None:
    with Reservation(1) as reservation:
        assert "listens" in output_of(JAX, str(reservation.ports[0]), where)


def test_nothing_answers_at_a_port_that_is_only_held() -> None:
    with Reservation(1) as reservation, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", reservation.ports[0]))


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_the_kernel_gives_a_held_port_to_nobody(address: str) -> None:
    """All ports that are left are asked for: those that are held are not among them."""
    with Reservation(5) as reservation:
        given, taken = set(), []
        try:
            for _ in range(2000):
                one = socket.socket()
                taken.append(one)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.bind((address, 0))
                given.add(one.getsockname()[1])
        finally:
            for one in taken:
                one.close()
        assert len(given) == 2000
        assert not given & set(reservation.ports)


def test_two_jobs_never_share_a_port() -> None:
    with Reservation(200) as one, Reservation(200) as other:
        assert len({*one.ports, *other.ports}) == 400
    with Reservation(1, first=one.ports[0]) as again:
        assert again.ports == one.ports[:1]


def test_a_port_that_was_asked_for_comes_first() -> None:
    with Reservation(1) as free:
        port = free.ports[0]
    with Reservation(3, first=port) as reservation:
        assert reservation.ports[0] == port and len(set(reservation.ports)) == 3


@pytest.mark.parametrize(
    "occupy",
    [lambda port: Reservation(1, first=port), lambda port: socket.create_server(("", port))],
    ids=["by another job", "by a server"],
)
def test_a_port_that_is_taken_is_refused(occupy: Callable[[int], Reservation]) -> None:
    with Reservation(1) as free:
        port = free.ports[0]
    with occupy(port), pytest.raises(RequestError, match=f"asked: port {port}\nfound: .*in use"):
        Reservation(1, first=port)


@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-host.invalid", "a" * 300])
def test_an_address_of_another_machine_is_refused(address: str) -> None:
    with pytest.raises(RequestError, match="rank 0 listens there"):
        Reservation(1, address)


def test_ports_are_free_when_their_owner_is_killed() -> None:
    script = (
        "from allranks.launcher.processes.ports import Reservation\nimport time\n"
        "held = Reservation(1)\nprint(held.ports[0], flush=True)\ntime.sleep(600)"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        port = int(owner.stdout.readline())
        with pytest.raises(RequestError):
            Reservation(1, first=port)
        os.kill(owner.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while True:
        try:
            Reservation(1, first=port).close()
            return
        except RequestError:
            assert time.monotonic() < deadline
