"""Nodes that a user starts one by one, on loopback: together they are one job."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from allranks.cli.main import cli
from allranks.errors import RequestError
from allranks.job.config import resolve
from allranks.job.run_folder import read_events, read_rows
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.ports import Reservation
from allranks.launcher.start import run_job
from conftest import TASKS
from launch_host import Host, Launch, children_of

WAIT_S = 180
Nodes = Callable[..., Launch]


@pytest.fixture
def rendezvous() -> Iterator[str]:
    """A port that is this test's own."""
    with closing(Reservation(1)) as held:
        yield f"127.0.0.1:{held.ports[0]}"


@pytest.fixture
def node(host: Host, tmp_path: Path, rendezvous: str) -> Iterator[Nodes]:
    """`node(i, *words)`: start node i of a job of two nodes with these words; -1:
    without a number."""
    started: list[Launch] = []

    def start(number: int, *words: str, key: str = "a-long-id") -> Launch:
        own = ["--nodes", "2", "--node-rank", str(number), "--rendezvous", rendezvous, "--id", key]
        own = own if number >= 0 else [*own[:2], *own[4:]]
        started.append(host.launch(tmp_path, "train", *words, *own))
        return started[-1]

    yield start
    for launch in started:
        if launch.code is None:
            launch.signal(signal.SIGKILL)


DIGITS = ("digits", "--ranks", "4", "--bitwise", "--steps", "20", "--run-dir", "run")


def ended(launch: Launch) -> tuple[int, str, str]:
    return launch.wait(WAIT_S), launch.out, launch.err


@pytest.mark.slow
def test_two_nodes_are_one_job_with_the_bits_of_one_rank(
    node: Nodes, server: ForkServer, tmp_path: Path
) -> None:
    other, head = node(1, *DIGITS), node(0, *DIGITS, "--json")
    code, out, err = ended(head)
    assert code == 0, err
    assert ended(other)[:2] == (0, ""), "--json is the head's alone"
    summary = json.loads(out.splitlines()[-1])
    assert (summary["world_size"], summary["nodes"]) == (4, 2)
    flags = {"bitwise": True, "steps": 20, "run_dir": str(tmp_path / "one")}
    one = run_job(resolve("digits", flags), server)
    assert summary["weights_sha256"] == one.summary["weights_sha256"]


def listens(host: str, port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex((host, port)) == 0


@pytest.mark.slow
def test_without_numbers_the_first_that_can_listen_is_node_0(node: Nodes, rendezvous: str) -> None:
    host, _, port = rendezvous.rpartition(":")
    first, deadline = node(-1, *DIGITS), time.monotonic() + WAIT_S
    while not listens(host, int(port)):
        assert first.code is None and time.monotonic() < deadline
        time.sleep(0.05)
    assert [ended(node(-1, *DIGITS))[0], ended(first)[0]] == [0, 0]


@pytest.mark.slow
def test_a_stranger_is_refused_and_the_job_goes_on(node: Nodes) -> None:
    head = node(0, *DIGITS)
    stranger = node(1, *DIGITS, key="guessed")
    code, _, err = ended(stranger)
    assert code == 3 and "is refused at 127.0.0.1" in err
    assert ended(node(1, *DIGITS))[0] == 0
    assert ended(head)[0] == 0


@pytest.mark.slow
def test_an_interface_that_is_not_there_is_refused_on_node_0_as_well(node: Nodes) -> None:
    code, _, err = ended(node(0, *DIGITS, "--interface", "nowhere0"))
    assert code == 2
    assert "allranks: this cannot be done\nasked: --interface nowhere0\nfound: " in err
    assert err.count("asked: ") == 1


@pytest.mark.slow
def test_a_node_that_does_not_come_is_named(node: Nodes, tmp_path: Path) -> None:
    code, _, err = ended(node(0, *DIGITS, "--join-timeout", "4"))
    assert code == 3
    assert "node 1 of 2 nodes did not come within 4 s (--join-timeout); here: node 0 (" in err
    assert not (tmp_path / "run").exists()


def test_a_node_without_a_head_says_where_it_looked(node: Nodes, rendezvous: str) -> None:
    code, _, err = ended(node(1, *DIGITS, "--join-timeout", "1"))
    assert code == 3 and f"found nobody at {rendezvous} for 1 s" in err


@pytest.mark.slow
def test_a_run_is_gone_on_with_by_hand(node: Nodes, tmp_path: Path) -> None:
    """Only the head knows the program then: it stands in the run folder."""
    (tmp_path / "own.py").write_text(
        "from allranks.programs.digits import Digits\n\n\nclass Own(Digits):\n    pass\n"
    )
    first = ("own.py", "--ranks", "2", "--steps", "10", "--run-dir", "run")
    more = (*first[:3], "--checkpoint-every", "5", *first[3:])
    other, head = node(1, *more), node(0, *more)
    assert [ended(head)[0], ended(other)[0]] == [0, 0]
    again = ("--run-dir", "run", "--steps", "20", "--ranks", "2")
    other, head = node(1, *again), node(0, *again)
    code, _, err = ended(head)
    assert (code, ended(other)[0]) == (0, 0), err
    assert "resumes after step 10" in err


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; of SIGTERM Python has none by itself."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (caught,) = (line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_ctrl_c_ends_one_that_waits_for_others(
    node: Nodes, number: int, rendezvous: str, tmp_path: Path
) -> None:
    waits = node(number, *DIGITS)
    host, _, port = rendezvous.rpartition(":")
    deadline = time.monotonic() + WAIT_S
    while number == 0 and not listens(host, int(port)):
        assert waits.code is None and time.monotonic() < deadline
        time.sleep(0.05)
    while number == 1 and not catches(waits.pid, signal.SIGTERM):
        assert waits.code is None and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5 if number else 0.0)  # until it has begun to knock
    waits.signal(signal.SIGINT)
    assert ended(waits)[0] == 130
    assert not (tmp_path / "run").exists()


@pytest.mark.slow(most=1)
@pytest.mark.parametrize("number", [0, 1])
def test_a_signal_to_any_node_stops_the_job_after_a_checkpoint(
    node: Nodes, number: int, tmp_path: Path
) -> None:
    words = ("digits", "--ranks", "2", "--steps", "1000000", "--run-dir", "run")
    both = [node(0, *words), node(1, *words)]
    deadline = time.monotonic() + WAIT_S
    while not any(row["event"] == "training" for row in read_events(tmp_path / "run")):
        assert time.monotonic() < deadline and both[0].code is None
        time.sleep(0.1)
    both[number].signal(signal.SIGTERM)
    assert [ended(launch)[0] for launch in both] == [4, 4]
    (stopped,) = (
        row
        for row in read_events(tmp_path / "run")
        if row["event"] == "stopped" and row["rank"] is None
    )
    assert stopped["reason"] == "SIGTERM"


@pytest.mark.slow
def test_a_lost_node_comes_back_to_an_elastic_job(
    node: Nodes, server: ForkServer, tmp_path: Path
) -> None:
    """With the words of the others; its ranks join, and no step is made again for that.

    Then too few are left, and a restart is on both nodes.
    """
    run, hurry, program = tmp_path / "run", tmp_path / "hurry", tmp_path / "own.py"
    text = (TASKS / "scale_tasks.py").read_text()
    program.write_text(text)
    words = ("own.py", "--ranks", "4", "--elastic", "2:4", "--bitwise", "--steps", "300")
    words += ("--run-dir", "run", "--first-check", "off", "--set", f"hurry={hurry}")
    words += ("--max-restarts", "1")

    def wait_for(members: list[int]) -> None:
        wait_for_event("members", members)

    def wait_for_event(field: str, value: object) -> None:
        deadline = time.monotonic() + WAIT_S
        while not any(row.get(field) == value for row in read_events(run)):
            assert time.monotonic() < deadline and head.code is None, head.err
            time.sleep(0.1)

    lost, head = node(1, *words), node(0, *words, "--json")
    while len(list(read_rows(run / "metrics.jsonl"))) < 3:
        assert head.code is None, head.err
        time.sleep(0.1)
    lost.signal(signal.SIGKILL)
    wait_for([0, 1])
    code, _, err = ended(node(1, *words, "--seed", "3"))
    assert code == 2 and "every node is started with the same words" in err
    program.write_text(text + "# edited\n")
    code, _, err = ended(node(1, *words))
    assert code == 2 and "the nodes are not alike" in err and "the program (digest)" in err
    program.write_text(text)
    back = node(-1, *words)
    wait_for([0, 1, 2, 3])
    assert ended(node(1, *words))[0] == 2, "it is here already"
    (server_of_head,) = head.ranks
    for pid in [*back.ranks, children_of(server_of_head)[0]]:
        os.kill(pid, signal.SIGKILL)
    wait_for_event("event", "restart")
    hurry.touch()
    (code, out, err), (of_back, *_) = ended(head), ended(back)
    assert (code, of_back) == (0, 0), err
    assert "has come back, with seats for 2 ranks" in err
    flags = {"bitwise": True, "steps": 300, "run_dir": str(tmp_path / "one")}
    one = run_job(resolve(str(program), flags), server)
    assert json.loads(out.splitlines()[-1])["weights_sha256"] == one.summary["weights_sha256"]
    groups = [row for row in read_events(run) if row["event"] == "group"]
    assert [row["steps_again"] for row in groups if row["joined"]] == [0]
    assert not [row for row in read_events(run) if row["event"] == "fewer_ranks"]
    assert {row["rank"] for row in read_events(run) if row.get("attempt") == 1} >= {0, 1, 2, 3}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--node-rank", "0"), "no --rendezvous"),
        (("--rendezvous", "here:1"), "no --id"),
        (("--node-rank", "0", "--rendezvous", "here", "--id", "x"), "no HOST:PORT"),
        (("--node-rank", "0", "--rendezvous", "here:1"), "no --id"),
        (("--node-rank", "2", "--rendezvous", "here:1", "--id", "x"), "numbered 0 to 1"),
        (("--node-rank", "0", "--rendezvous", "203.0.113.9:1", "--id", "x"), "on "),
        (("--place", "simulated", "--hosts", "file"), "a place that knows its nodes"),
        (("--hosts", "nowhere"), "No such file"),
        ((), "--place local, which is one node"),
        (("--place", "slurm"), "SLURM_JOB_ID is not set"),
        (("--place", "simulated:link=fast"), "link=fast"),
        (("--place", "simulated:links=1gbit"), "no option 'links'"),
        (("--place", "local:link=1gbit"), "options of local"),
        (("--place", "cloud"), "no place of that name"),
        (("--place", "simulated", "--ranks", "1"), "1 ranks, over all nodes"),
        (("--place", "simulated", "--ranks-per-node", "2", "--ranks", "3"), "are 4"),
        (("--place", "simulated", "--device", "cuda"), "simulated nodes"),
        (("--place", "simulated", "--per-rank"), "no Slurm that would start the ranks"),
        (("--inject", "cut@node=0", "--ranks", "2"), "--place local"),
        (("--place", "simulated", "--ranks", "2", "--inject", "cut@node=5"), "--nodes 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_refused_in_four_parts(
    words: tuple[str, ...], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    with pytest.raises(RequestError) as refused:
        cli(["train", "digits", "--nodes", "2", *words], standalone_mode=False)
    assert refused.value.exit_code == 2
    for part in ("asked: ", "found: ", "why: ", "do: "):
        assert part in str(refused.value)
    assert found in str(refused.value)
    assert not list(tmp_path.iterdir())
