"""`allranks cluster list|show|discover`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.main import main
from allranks.launcher.slurm.site import bundled_names, bundled_text, load_site, parse_site
from slurm_answers import CONFIG, NODES, PARTITIONS

Door = Callable[..., tuple[int, str, str]]


@pytest.fixture
def door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Door:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["allranks", *words])
        code: Any = 0
        try:
            main()
        except SystemExit as left:
            code = left.code
        out, err = capsys.readouterr()
        return int(code or 0), out, err

    return call


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with Slurm."""
    commands = tmp_path / "bin"
    commands.mkdir()
    table = {"config": CONFIG, "partition": PARTITIONS, "node": NODES}
    (commands / "scontrol").write_text(
        f"#!{sys.executable} -I\nimport sys\nprint({table!r}[sys.argv[-1]])\n"
    )
    (commands / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(commands))


def test_list_names_every_site_with_its_partitions(door: Door) -> None:
    code, out, _ = door("cluster", "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == bundled_names()
    assert "puhti         Puhti (CSC): test, small, large, longrun, hugemem, gputest, gpu" in out
    rows = json.loads(door("cluster", "list", "--json")[1])
    assert rows[-2] == {"name": "taurus-ml", "partitions": ["ml"]}


def test_show_is_a_file_to_start_from(door: Door, tmp_path: Path) -> None:
    code, out, _ = door("cluster", "show", "template")
    assert (code, out) == (0, bundled_text("template"))
    (tmp_path / "mine.toml").write_text(out)
    code, out, _ = door("cluster", "show", "mine.toml")
    assert code == 0
    assert out.splitlines() == [
        "a site of your own: an account is needed",
        "",
        "gpu: 16 nodes at most, 64 CPUs, 254000 MB, 4 GPUs, at most 3-00:00:00",
        "cpu: 100 nodes at most, 128 CPUs, 254000 MB, 0 GPUs, at most 1-12:00:00",
    ]
    data = json.loads(door("cluster", "show", "lumi", "--json")[1])
    assert data["partitions"]["dev-g"]["max_nodes"] == 32
    assert data["sources"]["partitions"]["url"].startswith("https://docs.lumi")


def test_an_unknown_site_is_refused(door: Door) -> None:
    code, out, err = door("cluster", "show", "lumii")
    assert (code, out) == (2, "")
    assert "did you mean 'lumi'?" in err


@pytest.mark.usefixtures("scontrol")
def test_discover_writes_a_profile_that_submit_takes(door: Door, tmp_path: Path) -> None:
    code, out, _ = door("cluster", "discover", "--name", "mine")
    assert code == 0
    (tmp_path / "mine.toml").write_text(out)
    site = load_site(str(tmp_path / "mine.toml"))
    assert (site.name, site.partitions["gpu"].gpus) == ("mine", 4)
    assert parse_site(out, "x").default_partition == "cpu"
    assert json.loads(door("cluster", "discover", "--json")[1])["name"] == "borealis"


def test_without_slurm_there_is_nothing_to_discover(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, err = door("cluster", "discover")
    assert (code, out) == (2, "")
    assert "there is no `scontrol` on this machine" in err and "cluster show template" in err
