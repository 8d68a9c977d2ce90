"""A loop of one's own is as many ranks as its launcher says, and gives what one rank gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.ports import Reservation
from allranks.launcher.processes.process import Process
from allranks.launcher.supervisor import supervise

pytestmark = pytest.mark.slow


def losses_on(server: ForkServer, ranks: int, out: Path) -> list[dict[str, Any]]:
    """What every rank wrote; each knows of the others what torch's launcher tells."""
    out.mkdir()
    with Reservation(1) as reserved:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved.ports[0])}
        processes = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            argument, log = {"out": str(out)}, out / f"{rank}.log"
            processes.append(Process(rank, "tf_loops:loop", argument, {**own, **where}, log))
        ended = supervise(server, processes)
    logs = "".join((out / f"{rank}.log").read_text() for rank in range(ranks))
    assert {exit_.code for exit_ in ended.exits.values()} == {0}, logs
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def test_a_loop_gives_the_same_on_two_ranks(tf_server: ForkServer, tmp_path: Path) -> None:
    (alone,) = losses_on(tf_server, 1, tmp_path / "one")
    both = losses_on(tf_server, 2, tmp_path / "two")
    assert alone["strategy"] == "single"
    for one in both:
        assert one["strategy"] == "multi-worker-mirrored"
        assert one["losses"] == pytest.approx(alone["losses"], rel=1e-12)
        assert one["eval"] == pytest.approx(alone["eval"], rel=1e-12)


@pytest.mark.parametrize("worker", ["two_in_one_process", "without_evaluations"])
def test_a_loop_of_one_process(worker: str, tf_server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = Process(0, f"tf_loops:{worker}", {}, {}, log)
    assert supervise(tf_server, [process]).exits[0].code == 0, log.read_text()
