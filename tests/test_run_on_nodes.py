"""`allranks run` over several nodes: unchanged scripts on two simulated ones,
each in its right world.

One process of every role on each node where there are two; the torch ones are run on the real
Slurm too (`tests/cluster`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.launcher.processes.ports import Reservation
from launch_host import until
from script_table import ON_TWO_NODES, SCRIPTS, Script, check_output, params
from test_nodes_by_hand import listens

RUN = (sys.executable, "-m", "allranks.cli.main", "run")
ON_TWO = ("--nodes", "2", "--place", "simulated:link=1gbit", "--show", "all", "--json")


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *words], capture_output=True, text=True, cwd=cwd, check=False)


@pytest.mark.slow
@pytest.mark.cases(
    "script",
    params(one for one in SCRIPTS if one.name in ON_TWO_NODES),
    exhaustive=params(one for one in SCRIPTS if one.name not in ON_TWO_NODES and one.processes > 1),
)
def test_a_script_runs_unchanged_on_two_nodes(script: Script, tmp_path: Path) -> None:
    done = run(*ON_TWO, "--ranks", str(script.processes), *script.words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    first = -(-script.processes // 2)
    hosts = {rank: f"node{int(rank >= first)}" for rank in range(script.processes)}
    check_output(script, done.stdout, hosts)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["world_size"], summary["nodes"]) == (script.processes, 2)


@pytest.mark.slow
def test_the_first_to_fail_is_named_with_its_host(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '3': raise ValueError('this one')\n"
        "time.sleep(600)\n"
    )
    done = run(*ON_TWO, "--ranks", "4", "--", sys.executable, "bad.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "rank 3 on node1 failed first: exit code 1: ValueError: this one" in done.stderr
    assert "stopped because of it: rank 0, 1, 2" in done.stderr


@pytest.mark.slow
def test_nodes_by_hand_in_the_words_of_torchrun(tmp_path: Path) -> None:
    """Without numbers, as torchrun's c10d nodes are started; the stranger has another id."""
    (tmp_path / "where.py").write_text(
        "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
    )
    with Reservation(1) as held:
        words = ("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
        words += ("--rdzv-endpoint", f"127.0.0.1:{held.ports[0]}", "--show", "all")
        started = subprocess.Popen(
            [*RUN, *words, "--rdzv-id", "the-job", "where.py"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            until(lambda: listens("127.0.0.1", held.ports[0]), "the first to listen")
            stranger = run(*words, "--rdzv-id", "another", "where.py", cwd=tmp_path)
            second = run(*words, "--rdzv-id", "the-job", "where.py", cwd=tmp_path)
            out, err = started.communicate(timeout=120)
        finally:
            started.kill()  # where it has not ended by itself
    codes = [started.returncode, stranger.returncode, second.returncode]
    assert codes == [0, 3, 0], err
    assert sorted(line.partition("] ")[2] for line in out.splitlines()) == [
        f"rank {rank} of 4" for rank in range(4)
    ]
    assert "is refused at 127.0.0.1" in stranger.stderr


def test_a_dry_run_calls_no_node(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("first slots=3\nsecond slots=1\n")
    words = ("--hosts", "hosts", "--nodes", "2", "--ranks", "4", "--dry-run", "--json", "--")
    done = run(*words, "true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = json.loads(done.stdout)["ranks"]
    assert [rank["host"] for rank in ranks] == ["first", "first", "first", "second"]
    assert [rank["environment"]["LOCAL_RANK"] for rank in ranks] == ["0", "1", "2", "0"]
