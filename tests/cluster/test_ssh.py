"""`--hosts FILE`: the nodes are reached by a real ssh,
each with a network and a host name of its own."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from allranks.job.config import resolve
from allranks.job.run_folder import read_events, read_rows
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import run_job
from slurm_here import SlurmHere

TASKS = Path(__file__).parents[1] / "tasks"


@pytest.fixture
def hosts(slurm: SlurmHere) -> SlurmHere:
    """A cluster in which `ssh n1` works, and a file of hosts."""
    slurm.start_sshd()
    (slurm.work / "hosts").write_text("n1 slots=1\nn2 slots=3\n")
    return slurm


def ask(slurm: SlurmHere, *words: str) -> tuple[int, str, str]:
    path = f"{slurm.work / 'bin'}:{slurm.environment()['PATH']}"
    done = slurm.run("allranks", *words, timeout_s=120, env={"PATH": path})
    return done.returncode, done.stdout, done.stderr


def test_a_training_on_hosts_has_the_bits_of_one_rank(
    hosts: SlurmHere, server: ForkServer, tmp_path: Path
) -> None:
    words = ("--hosts", "hosts", "--nodes", "2", "--ranks", "4", "--bitwise", "--steps", "30")
    code, out, err = ask(hosts, "train", "digits", *words, "--run-dir", "run", "--json")
    assert code == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert (summary["world_size"], summary["nodes"]) == (4, 2)
    flags = {"bitwise": True, "steps": 30, "run_dir": str(tmp_path / "one")}
    one = run_job(resolve("digits", flags), server)
    assert summary["weights_sha256"] == one.summary["weights_sha256"]
    assert not any(
        "allranks.launcher" in command
        for name in ("n1", "n2")
        for command in hosts.processes_on(name).values()
    )


def test_a_host_leaves_when_its_agent_gets_a_signal(
    hosts: SlurmHere, server: ForkServer, tmp_path: Path
) -> None:
    """The head runs on none of the hosts."""
    (hosts.work / "slow.py").write_text((TASKS / "scale_tasks.py").read_text())
    hurry, metrics = hosts.work / "hurry", hosts.work / "run" / "metrics.jsonl"
    words = ("--hosts", "hosts", "--nodes", "2", "--ranks", "4", "--bitwise", "--steps", "400")
    words += ("--elastic", "1:4", "--first-check", "off", "--set", f"hurry={hurry}")
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(ask, hosts, "train", "slow.py", *words, "--run-dir", "run", "--json")
        hosts.wait_for(lambda: job.done() or metrics.exists(), 60, "it trains")
        for agent in hosts.agents_on("n2"):
            hosts.on_node("n2", "kill", "-TERM", str(agent))
        hosts.wait_for(lambda: job.done() or not hosts.agents_on("n2"), 60, "n2 empty")
        assert not job.done(), job.result()
        hurry.touch()
        code, out, err = job.result()
    assert code == 0, err
    assert "1 rank trains from step" in err and "1, 2, 3 left (their node got SIGTERM)" in err
    flags = {"bitwise": True, "steps": 400, "run_dir": str(tmp_path / "one")}
    one = run_job(resolve(str(hosts.work / "slow.py"), flags), server)
    assert json.loads(out.splitlines()[-1])["weights_sha256"] == one.summary["weights_sha256"]


def test_a_host_whose_agent_dies_is_tried_again(
    hosts: SlurmHere, server: ForkServer, tmp_path: Path
) -> None:
    """Its ranks join again; all the while the others train."""
    (hosts.work / "slow.py").write_text((TASKS / "scale_tasks.py").read_text())
    hurry, run = hosts.work / "hurry", hosts.work / "run"
    words = ("--hosts", "hosts", "--nodes", "2", "--ranks", "4", "--bitwise", "--steps", "400")
    words += ("--elastic", "1:4", "--first-check", "off", "--set", f"hurry={hurry}")

    def steps() -> int:
        return len(list(read_rows(run / "metrics.jsonl")))

    def members() -> list[list[int]]:
        return [row["members"] for row in read_events(run) if row["event"] == "group"]

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(ask, hosts, "train", "slow.py", *words, "--run-dir", "run", "--json")
        hosts.wait_for(lambda: job.done() or steps() > 3, 60, "it trains")
        for agent in hosts.agents_on("n2"):
            hosts.on_node("n2", "kill", "-KILL", str(agent))
        hosts.wait_for(lambda: job.done() or members()[1:], 60, "n2 is back")
        assert not job.done(), job.result()
        hurry.touch()
        code, out, err = job.result()
    assert code == 0, err
    assert members() == [[0], [0, 1, 2, 3]] and "has come back, with seats for 3 ranks" in err
    flags = {"bitwise": True, "steps": 400, "run_dir": str(tmp_path / "one")}
    one = run_job(resolve(str(hosts.work / "slow.py"), flags), server)
    assert json.loads(out.splitlines()[-1])["weights_sha256"] == one.summary["weights_sha256"]


def test_a_script_runs_where_the_slots_are(hosts: SlurmHere) -> None:
    script = hosts.work / "where.py"
    script.write_text("import os, socket\nprint(os.environ['RANK'], socket.gethostname())\n")
    words = ("--hosts", "hosts", "--nodes", "2", "--ranks", "4", "--show", "all")
    code, out, err = ask(hosts, "run", *words, "--", "python", str(script))
    assert code == 0, err
    said = sorted(line.partition("] ")[2] for line in out.splitlines())
    assert said == ["0 n1", "1 n2", "2 n2", "3 n2"]


def test_a_host_that_ssh_does_not_reach_is_named(hosts: SlurmHere) -> None:
    (hosts.work / "hosts").write_text("n1\nn9\n")
    before = set(os.listdir(hosts.work))
    words = ("--hosts", "hosts", "--nodes", "2", "--ranks", "2")
    code, _, err = ask(hosts, "train", "digits", *words)
    assert code == 3, err
    assert "n9 could not be started" in err and "Could not resolve hostname n9" in err
    assert set(os.listdir(hosts.work)) == before
