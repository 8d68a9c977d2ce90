"""`allranks run`: how a command is read, what is shown of it, and how the verb leaves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.options import words_of
from allranks.cli.run import _command
from allranks.errors import RequestError
from allranks.job.engines import is_only_a_task
from allranks.launcher.scripts.plan import (
    command_words,
    redacted_words,
    script_position,
    with_local_rank,
)
from allranks.launcher.scripts.supervise import LEAST_LOOKS, Connections
from allranks.launcher.scripts.torchrun import understand

PATIENCE_S = 120
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run(script, *words)`: `allranks run WORDS` beside a script `train.py` of these lines."""

    def call(script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text("import os, sys, time\n" + script)
        return subprocess.run(
            [sys.executable, "-m", "allranks.cli.main", "run", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **variables},
        )

    return call


# --- the words of a command -------------------------------------------------------------------


def runs(name: str) -> bool:
    return name in ("python", "./prog", "sh")


@pytest.mark.parametrize(
    ("words", "how", "expected"),
    [
        ("python train.py -x", {}, "python train.py -x"),
        ("train.py --lr 1", {}, "PY -u train.py --lr 1"),
        ("./train.py", {}, "PY -u ./train.py"),
        ("train", {}, "PY -u train"),
        ("./prog --help", {}, "./prog --help"),
        ("package.train --lr 1", {"is_module": True}, "PY -u -m package.train --lr 1"),
        ("./train.py", {"is_program": True}, "./train.py"),
        ("sh -c x", {}, "sh -c x"),
    ],
)
def test_what_is_started(words: str, how: dict[str, bool], expected: str) -> None:
    assert command_words(words.split(), "PY", runs, **how) == tuple(expected.split())


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py a", "train.py"),
        ("/usr/bin/python3.11 -u -X dev train.py a", "train.py"),
        ("python -u -m package.train a", "package.train"),
        ("./train a", "./train"),
        ("python", "python"),
    ],
)
def test_where_the_script_stands(command: str, expected: str) -> None:
    words = tuple(command.split())
    assert words[script_position(words)] == expected
    added = with_local_rank(words, "--local_rank", 3)
    assert added[added.index(expected) + 1] == "--local_rank=3" and len(added) == len(words) + 1


def test_secrets_among_the_words() -> None:
    words = ["train.py", "--token", "t0", "--password=p", "--lr", "1", "hf_abcdefghijk", "--key"]
    assert redacted_words(words) == [
        "train.py",
        "--token",
        "[redacted]",
        "--password=[redacted]",
        "--lr",
        "1",
        "[redacted]",
        "--key",
    ]


# --- the words of the verb --------------------------------------------------------------------

TELLS = "print(*sys.argv[1:], os.environ['RANK'], os.environ['WORLD_SIZE'])"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("--ranks", "2", "--", sys.executable, "train.py"),
        ("--ranks-per-node", "2", "train.py"),
        ("--nproc-per-node=2", "train.py"),
        ("--standalone", "--nnodes=1:1", "--nproc_per_node", "2", "--rdzv-id", "7", "train.py"),
        ("--nproc-per-node", "2", "-m", "train"),
        ("--nproc-per-node", "2", "--no-python", sys.executable, "train.py"),
    ],
)
def test_ways_to_ask_for_two_ranks(run: Run, words: tuple[str, ...]) -> None:
    done = run(TELLS, "--show", "all", *words, "--ranks", "9", "-m")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[rank 0] --ranks 9 -m 0 2",
        "[rank 1] --ranks 9 -m 1 2",
    ]


@pytest.mark.slow
def test_an_operator_sets_them_by_variables(run: Run) -> None:
    done = run(TELLS, "train.py", PET_NPROC_PER_NODE="3", PET_MAX_RESTARTS="1")
    assert done.stdout == "0 3\n"


@pytest.mark.slow
def test_the_output_of_rank_0_is_standard_output(run: Run) -> None:
    done = run("print('out'); print('err', file=sys.stderr)", "--ranks", "3", "train.py")
    assert sorted(done.stdout.splitlines()) == ["err", "out"]
    assert done.stderr.splitlines()[0].endswith("; rank 0 is shown, --show all shows every rank")
    assert done.stderr.splitlines()[-1].startswith("run folder ")


@pytest.mark.slow
def test_a_python_without_the_module_is_named_beside_that_of_allranks(
    run: Run, tmp_path: Path
) -> None:
    """By its name in the PATH, or by the first line of a script."""
    other, script = tmp_path / "python3", tmp_path / "script"
    other.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    script.write_text(f"#!{other}\nimport torch\n")
    for path in (other, script):
        path.chmod(0o755)
    for words in ((str(other), "train.py"), (str(script),)):
        done = run("import torch", "--ranks", "1", "--", *words)
        assert done.returncode == 1
        assert f"it runs {other}, which has no module 'torch'; " in done.stderr
        assert f"or name it: {sys.executable}" in done.stderr
    done = run("import nowhere_at_all", "--ranks", "1", "--", str(other), "train.py")
    assert "it runs" not in done.stderr


@pytest.mark.slow
def test_no_control_character_of_a_script_is_printed(run: Run) -> None:
    script = r"""
print("\x1b[31mred\x1b[0m \x1b]0;title\x07and \x07bell")
sys.stdout.write("10%\r50%\r100%\n")
sys.stdout.write("no end")
"""
    done = run(script, "train.py")
    assert done.stdout.splitlines() == [r"red and \x07bell", "100%", "no end"]


@pytest.mark.slow
def test_a_slow_reader_gets_every_line(run: Run, tmp_path: Path) -> None:
    """Who reads late holds up no rank, and loses nothing."""
    (tmp_path / "train.py").write_text("for i in range(100000): print('line', i)\n")
    command = [sys.executable, "-m", "allranks.cli.main", "run", "--run-dir", "r", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        deadline, log = time.monotonic() + PATIENCE_S, tmp_path / "r" / "logs" / "rank-000.log"
        while not log.exists() or "line 99999\n" not in log.read_text()[-20:]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        lines = running.stdout.read().splitlines()
    assert running.returncode == 0
    assert lines == [f"line {i}" for i in range(100000)]


@pytest.mark.slow
def test_nobody_who_reads_ends_no_job(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('x' * 100000); open('end', 'w')\n")
    command = [sys.executable, "-m", "allranks.cli.main", "run", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.close()
    assert running.returncode == 0 and (tmp_path / "end").exists()


@pytest.mark.slow
def test_a_job_needs_no_standard_output(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('said')\n")
    command = f"exec {sys.executable} -m allranks.cli.main run --run-dir r train.py >&-"
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "r" / "logs" / "rank-000.log").read_text() == "said\n"


@pytest.mark.slow
def test_the_last_line_is_one_object(run: Run, tmp_path: Path) -> None:
    done = run("print('noise')", "--ranks", "2", "--json", "--run-dir", "r", "train.py")
    *noise, last = done.stdout.splitlines()
    summary = json.loads(last)
    assert noise == ["noise"] and summary.pop("seconds") > 0
    assert summary == {
        "run_dir": str(tmp_path / "r"),
        "world_size": 2,
        "nodes": 1,
        "exits": {"0": 0, "1": 0},
        "restarts": 0,
    }


@pytest.mark.slow
def test_a_run_is_listed_and_shown(run: Run, tmp_path: Path) -> None:
    run("sys.exit(3)", "--run-dir", "runs/one", "train.py")
    told = [
        subprocess.run(
            [sys.executable, "-m", "allranks.cli.main", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for words in (("runs",), ("show", "runs/one"))
    ]
    assert "failed" in told[0] and "train.py × 1" in told[0]
    assert f"rank 0 on {socket.gethostname()} failed first: exit code 3" in told[1]


@pytest.mark.slow
def test_the_folder_of_the_logs(run: Run, tmp_path: Path) -> None:
    done = run("", "--log-dir", "elastic", "train.py")
    (made,) = (tmp_path / "elastic").iterdir()
    assert done.stderr.splitlines()[-1] == f"run folder {made}"
    assert (made / "logs" / "rank-000.log").exists()


@pytest.mark.slow
def test_a_dry_run_prints_what_would_run(run: Run, tmp_path: Path) -> None:
    words = ("--dry-run", "--ranks", "2", "--local-rank-argument=--local_rank")
    done = run("", *words, "--master-port", "0", sys.executable, "train.py", "--token", "abc")
    assert done.returncode == 0, done.stderr
    expected = f"  {sys.executable} train.py --local_rank=1 --token '[redacted]'"
    assert expected in done.stdout.splitlines()
    assert "  LOCAL_RANK=1" in done.stdout and "abc" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    data = json.loads(run("", *words, "--json", "train.py").stdout)
    assert data["ranks"][1]["environment"]["MASTER_ADDR"] == "127.0.0.1"


# --- how it leaves ----------------------------------------------------------------------------


@pytest.mark.slow
def test_exit_code_1_and_the_report(run: Run) -> None:
    done = run("raise ValueError('on purpose')", "--ranks", "2", "train.py")
    assert done.returncode == 1
    report = done.stderr.partition("allranks: ")[2].splitlines()
    assert report[0].endswith("failed first: exit code 1: ValueError: on purpose")


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("nothing.py",), "no such file in"),
        (("--", "no-such-program"), "no such file in"),
        ((), "no command"),
        (("--ranks", "2", "--nproc-per-node", "3", "train.py"), "--ranks makes 2"),
        (("--nnodes", "2", "train.py"), "--place local, which is one node"),
        (("--rdzv-backend", "etcd", "train.py"), "a flag of torchrun"),
        (("--show", "some", "train.py"), "'some'"),
        (("--warm", "train.py"), "'train.py'"),
        (("--local-rank-argument", "--rank", "train.py"), "'--rank'"),
        (("--roles", "chief=1,worker=1", "--ranks", "3", "train.py"), "3 processes in the job"),
        (("--variables", "horovod", "train.py"), "'horovod'"),
        (("--master-addr", "192.0.2.1", "train.py"), "Cannot assign requested address"),
        (("--warm", "torch", "--", "sh", "-c", "true"), "/"),
        (("--warm", "torch", "--", sys.executable, "-O", "train.py"), f"{sys.executable} -O"),
    ],
)
def test_exit_code_2_leaves_no_folder(
    run: Run, tmp_path: Path, words: tuple[str, ...], found: str
) -> None:
    done = run("", *words)
    assert done.returncode == 2 and f"found: {found}" in done.stderr.replace("[Errno 99] ", "")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_an_unknown_flag_is_a_wrong_request(run: Run) -> None:
    done = run("", "--nproc-per-nod", "2", "train.py")
    assert done.returncode == 2 and "--nproc-per-node" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_exit_code_130(run: Run, tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "train.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)")
    command = [sys.executable, "-m", "allranks.cli.main", "run", "--ranks", "2", "train.py"]
    running = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with running:
        assert running.stdout is not None and running.stdout.readline() == "ready\n"
        running.send_signal(number)
        _, told = running.communicate()
    assert running.returncode == 130
    assert f"allranks: interrupted ({number.name}); rank 0: " in told


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["supervisor", "its group"])
def test_no_process_outlives_a_supervisor_that_is_killed(
    run: Run, tmp_path: Path, ends: str
) -> None:
    script = (
        "import os, time\nopen(os.environ['RANK'], 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "allranks.cli.main", "run", "--ranks", "2", "train.py"]
    running = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    pids = [_read_pid(tmp_path / str(rank)) for rank in range(2)]
    kill: Any = os.kill if ends == "supervisor" else os.killpg
    kill(running.pid, signal.SIGKILL)
    running.wait()
    deadline = time.monotonic() + PATIENCE_S
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _read_pid(path: Path) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(path.read_text())


@pytest.mark.slow
def test_the_threads_of_a_warm_script_are_those_of_a_plain_one(run: Run) -> None:
    script = "import torch\nprint(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])"
    told = [
        run(
            script,
            "--ranks",
            "2",
            *words,
            "--",
            sys.executable,
            "train.py",
            OMP_WAIT_POLICY="passive",
        )
        for words in ((), ("--warm", "torch"))
    ]
    assert [done.stdout for done in told] == ["1 1\n", "1 1\n"], told[1].stderr


def test_what_a_node_shows_is_no_word_of_the_job() -> None:
    """With --show on one node only the others were refused, as if they had another command."""
    flags = {"ranks": 4, "show": "", "node_rank": 0}
    assert words_of({**flags, "show": "all", "node_rank": 1}, "run") == words_of(flags, "run")
    assert words_of({**flags, "ranks": 2}, "run") != words_of(flags, "run")


def test_a_task_names_the_verb_that_trains_it(tmp_path: Path) -> None:
    head = '"""A task."""\nfrom allranks.torch.task import Task\n\n\n'
    text = f"{head}class Mine(Task):\n    pass\n"
    (tmp_path / "mine.py").write_text(text)
    assert is_only_a_task(tmp_path / "mine.py")
    with pytest.raises(RequestError) as refused:
        _command(("python", str(tmp_path / "mine.py")), understand({}, {}))
    assert refused.value.do == f"allranks train {tmp_path / 'mine.py'}"
    for more in ("print(Mine)", "if __name__ == '__main__':\n    Mine()"):
        (tmp_path / "mine.py").write_text(f"{text}\n{more}\n")
        assert not is_only_a_task(tmp_path / "mine.py")


APART = """
import os, sys, time
import torch
import torch.distributed as dist

if "together" in sys.argv:
    dist.init_process_group("gloo")
time.sleep(12 if "apart" in sys.argv else 6)  # nothing is told of ranks that end soon
print("rank", os.environ["RANK"], "is done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("word", "is_told"), [("apart", True), ("together", False)])
def test_ranks_that_never_met_are_spoken_of(tmp_path: Path, word: str, is_told: bool) -> None:
    (tmp_path / "train.py").write_text(APART)
    command = [sys.executable, "-m", "allranks.cli.main", "run", "--ranks", "2", "--warm", "torch"]
    done = subprocess.run(
        [*command, "--run-dir", "run", "--", "python", "train.py", word],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stderr
    assert ("no rank was ever seen connected to another" in done.stderr) == is_told


@pytest.mark.parametrize(
    ("maps", "is_told"),
    [
        ("/lib/libtorch_cpu.so", True),
        ("/lib/libtensorflow_framework.so.2", True),
        ("/lib/libtensorflow_framework.so.2 /lib/libmpi.so", False),
        ("/lib/libc.so", False),
    ],
)
def test_copies_of_every_framework_are_spoken_of(
    monkeypatch: pytest.MonkeyPatch, maps: str, is_told: bool
) -> None:
    """Processes without sockets, of which `/proc` says that they have loaded this."""
    monkeypatch.setattr("allranks.launcher.scripts.supervise._text", lambda path: maps)
    monkeypatch.setattr("allranks.launcher.scripts.supervise._descendants", lambda pid: [])
    monkeypatch.setattr("allranks.launcher.scripts.supervise.EVERY_S", 0.0)
    seen = Connections()
    for _ in range(LEAST_LOOKS):
        seen.look([0, 2**22 + 1, 2**22 + 2], 2)
    assert bool(seen.note(2)) == is_told


def test_what_may_be_connected_otherwise_gets_no_note() -> None:
    seen = Connections(looks=LEAST_LOOKS)
    assert seen.note(2) and not seen.note(1)
    assert not Connections(looks=LEAST_LOOKS - 1).note(2)
    assert not Connections(has_met=True, looks=99).note(2)
