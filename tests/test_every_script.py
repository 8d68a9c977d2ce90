"""Scripts of every framework run unchanged, each in its right world, and learn.

The table is in `script_table.py`. What a script needs is in the extra `scripts`.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.job.run_folder import read_events
from script_table import ON_TWO_NODES, SCRIPTS, SCRIPTS_FOLDER, Script, check_output, params

COMMAND = (sys.executable, "-m", "allranks.cli.main", "run", "--show", "all", "--json")
ELSEWHERE = (*ON_TWO_NODES, "ddp", "convnet_torchrun", "tf_keras_fit")
"""They run below, or on two nodes, or read the same variables as one that does."""


def test_the_table_holds_every_script() -> None:
    assert {script.path for script in SCRIPTS} == set(SCRIPTS_FOLDER.glob("*.py"))


@pytest.mark.slow
@pytest.mark.cases(
    "script",
    params(one for one in SCRIPTS if one.name not in ELSEWHERE),
    exhaustive=params(one for one in SCRIPTS if one.name in ELSEWHERE),
)
def test_a_script_runs_unchanged(script: Script, tmp_path: Path) -> None:
    ranks = ("--ranks", str(script.processes))
    command = [*COMMAND, *ranks, *script.words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    if script.has_died_at_exit(done.stdout + done.stderr):
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    hosts = dict.fromkeys(range(script.processes), socket.gethostname())
    check_output(script, done.stdout, hosts)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["world_size"], summary["restarts"]) == (script.processes, 0)


@pytest.mark.slow
def test_the_other_spelling_of_the_local_rank_in_torchruns_words(tmp_path: Path) -> None:
    script = next(one for one in SCRIPTS if one.name == "local_rank_argument")
    argument = "--local-rank-argument=--local-rank"
    words = ("--nproc_per_node=2", argument, str(script.path), "--steps", "10")
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_output(script, done.stdout, dict.fromkeys(range(2), socket.gethostname()))


@pytest.mark.slow
def test_two_jobs_at_once_do_not_meet(tmp_path: Path) -> None:
    """Two of the same script at the same time: each has its own world, and its own ports."""
    script = next(one for one in SCRIPTS if one.name == "ddp")
    running = [
        subprocess.Popen(
            [*COMMAND, "--ranks", "2", "--run-dir", str(tmp_path / name), *script.words],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "other")
    ]
    outputs = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    ports = []
    for name, output in zip(("one", "other"), outputs, strict=True):
        check_output(script, output, dict.fromkeys(range(2), socket.gethostname()))
        attempt = next(row for row in read_events(tmp_path / name) if row["event"] == "attempt")
        ports += attempt["hosts"][0]["ports"]
    assert len(set(ports)) == 6


@pytest.mark.slow
def test_a_warm_script_learns_the_same(tmp_path: Path) -> None:
    """The fork of a server that has imported torch: the same losses as in a process of its own."""
    script = next(one for one in SCRIPTS if one.name == "mpi_style")
    outputs = []
    for options in ((), ("--warm", "torch")):
        done = subprocess.run(
            [*COMMAND, "--ranks", "2", *options, *script.words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(sorted(done.stdout.splitlines()[:-1]))
        check_output(script, done.stdout, dict.fromkeys(range(2), socket.gethostname()))
    assert outputs[0] == outputs[1]
