"""`allranks doctor`: what it shows and measures, how it leaves,
and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.doctor import show
from allranks.cli.main import main
from allranks.errors import PlaceError
from allranks.launcher.nodes.facts import NodeFacts
from allranks.launcher.nodes.facts import facts as real_facts
from allranks.launcher.places.simulated import Simulated
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.ports import Reservation
from allranks.tools.doctor import doctor, gpus
from allranks.tools.doctor.folder import Folder
from allranks.tools.doctor.probes import Endpoint, Matrix, Probes
from allranks.tools.doctor.rules import STOP, Diagnosis, Finding, NodeReport

Door = Callable[..., tuple[int, str, str]]
LIMITS = ("shared memory", "open files", "little space")
FRAMEWORKS = {"torch", "tensorflow", "jax", "numpy", "sklearn", "safetensors"}


@pytest.fixture
def door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Door:
    """`door(*words)`: exit code, standard output and error of `allranks doctor WORDS`."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["allranks", "doctor", *words])
        code: Any = 0
        try:
            main()
        except SystemExit as left:
            code = left.code
        out, err = capsys.readouterr()
        return int(code or 0), out, err

    return call


def as_object(out: str) -> dict[str, Any]:
    data = json.loads(out.splitlines()[-1])
    assert isinstance(data, dict)
    return data


def names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def unexpected(data: dict[str, Any]) -> list[dict[str, Any]]:
    """What is found, but for limits that the machine of this test may really have."""
    return [one for one in data["findings"] if one["subject"] not in LIMITS]


def stops(data: dict[str, Any]) -> list[str]:
    return [f"{one['subject']}: {one['found']}" for one in data["findings"] if one["level"] == STOP]


# --- this machine -------------------------------------------------------------------------------


@pytest.mark.slow
def test_of_this_machine_all_is_told_in_one_object(door: Door, tmp_path: Path) -> None:
    code, out, err = door("--ranks", "3", "--json")
    data = as_object(out)
    assert unexpected(data) == []
    assert (code == 0) == (stops(data) == []) == (not data["would_stop_a_run"])
    assert set(data) == {
        *("place", "ranks", "asked_nodes", "nodes", "matrix", "differences", "findings"),
        "would_stop_a_run",
    }
    assert (data["place"], data["ranks"], data["asked_nodes"]) == ("local", 3, 1)
    (node,) = data["nodes"]
    assert set(node) == names(NodeReport) and set(node["facts"]) == names(NodeFacts)
    assert set(node["folder"]) == names(Folder)
    assert (node["address"], node["facts"]["host"]) == ("127.0.0.1", socket.gethostname())
    assert node["folder"]["path"] == str(tmp_path)
    matrix = data["matrix"]
    assert [end["rank"] for end in matrix["ends"]] == [0, 1, 2]
    for row, numbers in enumerate(matrix["mb_per_s"]):
        assert [number is None for number in numbers] == [row == at for at in range(3)]
    assert set(matrix["method"]) == {"round_trip_us", "mb_per_s"}
    assert data["differences"] == {"must_be_equal": [], "may_differ": []}
    assert "measuring 3 pairs" in err
    assert list(tmp_path.iterdir()) == [], "a doctor leaves nothing"


def test_for_people_it_is_a_table_that_ends_in_a_verdict(door: Door) -> None:
    _, out, _ = door()
    lines = out.splitlines()
    assert lines[0] == "2 ranks on 1 node, local"
    heads = {line.split("  ")[0] for line in lines}
    assert {"host", "torch", "cores", "shared memory", "open files", "folder of runs"} <= heads
    assert any(line.startswith("round trip in µs") for line in lines)
    assert "would stop a run" in lines[-1]
    assert "\x1b" not in out and all(line == line.rstrip() for line in lines)


def test_a_probe_that_is_lost_while_links_are_measured_stops_a_run(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(probes: Probes, *_: object) -> None:
        probes.lost[1] = "it did not answer for 60 s"

    monkeypatch.setattr(doctor, "measure_links", lose)
    code, out, _ = door("--ranks", "2", "--json")
    assert code == 3
    assert any("it did not answer for 60 s" in text for text in stops(as_object(out)))


def test_one_rank_has_no_way_to_measure(door: Door) -> None:
    _, out, err = door("--ranks", "1", "--json")
    assert as_object(out)["matrix"] is None and "measuring" not in err


@pytest.mark.slow
def test_of_many_ranks_on_one_machine_one_way_is_measured(door: Door) -> None:
    _, out, err = door("--ranks", "9", "--json")
    assert len(as_object(out)["matrix"]["ends"]) == 2 and "measuring 1 pair " in err


@pytest.mark.slow
def test_the_command_imports_no_framework(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom allranks.cli.main import cli\n"
        "try:\n    cli(['doctor', '--json'], standalone_mode=False)\n"
        "except SystemExit:\n    pass\n"
        f"found = {FRAMEWORKS!r} & {{m.partition('.')[0] for m in sys.modules}}\n"
        "assert not found, found"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert as_object(done.stdout)["place"] == "local"


@pytest.mark.slow
def test_what_would_stop_a_run_leaves_with_three(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_torch(program: str = "") -> NodeFacts:
        found = real_facts(program)
        return replace(found, packages={"numpy": "2.4.6"})

    monkeypatch.setattr(doctor, "facts", without_torch)
    code, out, _ = door()
    assert code == 3
    assert "stop: torch on" in out and "do: python -m pip install torch" in out
    assert re.search(r"\d+ things? would stop a run", out.splitlines()[-1])


def test_a_run_folder_below_one_that_is_not_there_is_looked_at_from_above(
    door: Door, tmp_path: Path
) -> None:
    _, out, _ = door("--ranks", "1", "--run-dir", "some/where/run-1", "--json")
    folder = as_object(out)["nodes"][0]["folder"]
    assert folder["path"] == str(tmp_path) and folder["tried"]["write"] == "works"


# --- several nodes ------------------------------------------------------------------------------


@pytest.mark.slow
def test_on_simulated_nodes_the_matrix_shows_the_link(door: Door, tmp_path: Path) -> None:
    words = ("--nodes", "2", "--ranks-per-node", "2", "--place", "simulated:link=100mbit")
    code, out, _ = door(*words, "--json")
    data = as_object(out)
    assert unexpected(data) == []
    assert (code == 0) == (stops(data) == [])
    assert [node["name"] for node in data["nodes"]] == ["node0", "node1"]
    assert {node["interface"] for node in data["nodes"]} == {"eth0"}
    assert data["differences"] == {"must_be_equal": [], "may_differ": []}
    for node in data["nodes"]:
        assert node["folder"]["tried"] == dict.fromkeys(("seen", "write", "lock"), "works")
    rates, ends = data["matrix"]["mb_per_s"], data["matrix"]["ends"]
    assert [end["node"] for end in ends] == ["node0", "node0", "node1", "node1"]
    for row in range(4):
        for column in range(4):
            if ends[row]["node"] != ends[column]["node"]:
                assert 50 <= 8 * rates[row][column] <= 110, "Mbit/s"
            elif row != column:
                assert 8 * rates[row][column] > 200, "what stays on a node crosses no link"
    assert list(tmp_path.iterdir()) == []


def test_nodes_that_cannot_be_had_are_a_finding_and_this_machine_is_looked_at(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(place: Simulated, request: object) -> None:
        raise PlaceError(
            "this machine cannot simulate nodes: there is no command 'tc' on this machine: "
            "install iproute2"
        )

    monkeypatch.setattr(Simulated, "start", refuse)
    code, out, _ = door("--nodes", "3", "--place", "simulated", "--json")
    data = as_object(out)
    assert code == 3 and data["asked_nodes"] == 3 and data["matrix"] is None
    assert [node["facts"]["host"] for node in data["nodes"]] == [socket.gethostname()]
    assert any("install iproute2" in text for text in stops(data))
    assert data["nodes"][0]["folder"]["tried"]["write"] == "works"


def test_a_place_in_slurm_outside_of_slurm_is_a_finding(door: Door) -> None:
    code, out, _ = door("--nodes", "2", "--place", "slurm")
    assert code == 3
    assert "SLURM_JOB_ID is not set" in out and "do: allranks submit" in out
    assert "of this machine only" in out.splitlines()[0]


def test_hosts_without_ssh_are_a_finding(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("one\ntwo\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, _ = door("--nodes", "2", "--hosts", "hosts")
    assert code == 3 and "needs the command ssh" in out


@pytest.mark.slow
def test_nodes_started_by_hand_are_compared(door: Door, tmp_path: Path) -> None:
    """Two agents on this machine; the second belongs to a command of its own."""
    shared = tmp_path / "shared"
    shared.mkdir()
    command = [sys.executable, "-P", "-m", "allranks.cli.main", "doctor"]
    with Reservation(1) as held:
        words = ["--nodes", "2", "--rendezvous", f"127.0.0.1:{held.ports[0]}", "--id", "of-a-test"]
        words += ["--run-dir", str(shared / "run")]
        other = [*command, *words, "--node-rank", "1"]
        with subprocess.Popen(other, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as second:
            code, out, _ = door(*words, "--node-rank", "0", "--json")
            said, _ = second.communicate(timeout=120)
    data = as_object(out)
    assert unexpected(data) == []
    assert second.returncode == code, said.decode()
    host = socket.gethostname()
    assert [node["name"] for node in data["nodes"]] == [f"{host} (node 0)", f"{host} (node 1)"]
    assert data["matrix"]["mb_per_s"][0][1] > 1 and data["differences"]["must_be_equal"] == []
    assert os.listdir(shared) == []


# --- what is shown ------------------------------------------------------------------------------


def shown(capsys: pytest.CaptureFixture[str], diagnosis: Diagnosis) -> str:
    show(diagnosis)
    return capsys.readouterr().out


def two_nodes() -> Diagnosis:
    own = real_facts()
    nodes = tuple(
        NodeReport(n, f"node{n}", f"10.0.0.{n}", "ib0", {"ib0": f"10.0.0.{n}"}, own)
        for n in range(2)
    )
    ends = [Endpoint(n, f"node{n}", f"10.0.0.{n}") for n in range(2)]
    matrix = Matrix(tuple(ends), [[None] * 2] * 2, [[None, 1234.5], [None, None]])
    return Diagnosis("hosts", 2, 2, nodes, matrix, ())


def test_a_value_that_differs_is_shown_for_each_and_an_unknown_as_such(
    capsys: pytest.CaptureFixture[str],
) -> None:
    diagnosis = two_nodes()
    other = replace(diagnosis.nodes[1].facts, python="3.99.0")
    nodes = (diagnosis.nodes[0], replace(diagnosis.nodes[1], facts=other))
    out = shown(capsys, replace(diagnosis, nodes=nodes))
    rows = [line.split("  ")[0] for line in out.splitlines()]
    at = rows.index("python")
    assert out.splitlines()[at].endswith("node0")
    assert "3.99.0" in out.splitlines()[at + 1] and out.splitlines()[at + 1].endswith("node1")
    assert re.search(r"^tried there +unknown +all$", out, re.M)
    assert re.search(r"^rank 0 node0 +· +1,234.5$", out, re.M)
    assert re.search(r"^rank 1 node1 +\? +·$", out, re.M), "not measured is not zero"


def test_what_a_node_says_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    finding = Finding(
        STOP, "torch", "evil\x1b[2J", "line one\nline [red]two\x07", "do \x1b]0;x\x07"
    )
    out = shown(capsys, replace(two_nodes(), findings=(finding,)))
    assert "\x1b" not in out and "\x07" not in out
    assert "  line one\n  line [red]two" in out
    assert out.splitlines()[-1] == "1 thing would stop a run"


def test_nothing_in_the_way_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, two_nodes()).splitlines()[-1] == "nothing would stop a run"


# --- what cannot be asked -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--nodes", "2"), "--place local"),
        (("--nodes", "3", "--ranks", "2", "--place", "simulated"), "--ranks"),
        (("--place", "simulated:lonk=1gbit", "--nodes", "2"), "lonk"),
        (("--program", "nothing.py"), "no such file"),
        (("--program", "digits"), "no such file"),
        (("--clean", "--nodes", "2"), "--clean by itself"),
        (("--clean", "runs/none"), "no such folder"),
    ],
)
def test_what_cannot_be_is_refused(door: Door, words: tuple[str, ...], part: str) -> None:
    code, _, err = door(*words)
    assert code == 2 and part in err


def test_the_program_is_compared_by_its_digest(door: Door, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("print('never run')")
    _, out, _ = door("--ranks", "1", "--program", "task.py", "--json")
    digest = as_object(out)["nodes"][0]["facts"]["program"]
    assert re.fullmatch(r"[0-9a-f]{12}", digest) and "never run" not in out


# --- cleaning -----------------------------------------------------------------------------------


def test_clean_says_what_it_removed(door: Door, tmp_path: Path) -> None:
    code = "from allranks.launcher.processes.leftovers import owner; print(owner())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    folder = tmp_path / "runs" / f"allranks-scratch-{done.stdout.strip()}-abc"
    folder.mkdir(parents=True)
    (tmp_path / "runs" / "kept").mkdir()
    code_, out, _ = door("--clean", "--json")
    assert code_ == 0
    assert {"kind": "folder", "name": str(folder), "pid": None, "run": None} in as_object(out)[
        "removed"
    ]
    folder.mkdir()
    _, out, _ = door("--clean")
    assert f"removed: {folder}" in out.splitlines()
    assert os.listdir(tmp_path / "runs") == ["kept"]
    code_, out, _ = door("--clean", "runs/kept")
    assert code_ == 0 and "no run that is dead has left anything here" in out


# --- devices --------------------------------------------------------------------------------------


def test_without_a_gpu_it_is_said_and_nothing_is_made(
    door: Door, tmp_path: Path, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "ForkServer", lambda modules: nullcontext(server))
    code, out, err = door("--gpus")
    assert (code, out) == (2, "") and list(tmp_path.iterdir()) == []
    assert re.search(r"found: no GPU that torch .* can use\nwhy: .*\ndo: ", err), err


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--gpus=bits,warp",), "no row warp"),
        (("--gpus", "--program", "mytask.py"), "many jobs, one after the other"),
        (("--gpus", "--rendezvous", "a:1", "--nodes", "2"), "many jobs, one after the other"),
        (("--gpus", "--clean"), "two things to do"),
    ],
)
def test_what_cannot_be_asked_of_gpus_is_refused(
    door: Door, tmp_path: Path, words: tuple[str, ...], found: str
) -> None:
    code, _, err = door(*words)
    assert code == 2 and f"found: {found}" in err and list(tmp_path.iterdir()) == []
