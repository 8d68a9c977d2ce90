"""Out of memory, by the kernel's counters: version 1 and 2 of control groups, and the machine's."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.launcher.processes import linux as oom
from allranks.launcher.processes.linux import Kills

GROUP = "/jobs/mine"
V1 = "9:name=systemd:/x\n4:cpu,memory:/jobs/mine\n0::/\n"
V2 = "0::/jobs/mine\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine made of files; what it has not, it does not say."""
    monkeypatch.setattr(oom, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(oom, "MOUNT", tmp_path / "sys")
    monkeypatch.setattr(oom, "MACHINE", tmp_path / "vmstat")
    return tmp_path


def version_1(machine: Path, kills: int, *, at: str = GROUP) -> None:
    (machine / "cgroup").write_text(V1)
    folder = machine / "sys" / "memory" / at.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    text = f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"
    (folder / "memory.oom_control").write_text(text)


def version_2(machine: Path, kills: int, *, at: str = GROUP) -> None:
    (machine / "cgroup").write_text(V2)
    folder = machine / "sys" / at.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    (machine / "sys" / "cgroup.controllers").write_text("cpu memory\n")
    text = f"low 0\nhigh 3\nmax 17\noom 2\noom_kill {kills}\noom_group_kill 0\n"
    (folder / "memory.events").write_text(text)


@pytest.mark.parametrize("version", [version_1, version_2])
@pytest.mark.parametrize("at", [GROUP, "/"], ids=["on the machine", "in a container"])
def test_a_kill_in_our_group_is_out_of_memory(machine: Path, version: object, at: str) -> None:
    assert callable(version)
    version(machine, 3, at=at)
    before = Kills.now()
    assert before == Kills(3, None) and before.since(before) == ""
    version(machine, 4, at=at)
    assert Kills.now().since(before).startswith("out of memory: the kernel killed it at the limit")


def test_a_kill_on_the_machine_may_have_been_anothers(machine: Path) -> None:
    version_1(machine, 3)
    (machine / "vmstat").write_text("pgfault 12\noom_kill 7\n")
    before = Kills.now()
    assert before == Kills(3, 7)
    (machine / "vmstat").write_text("pgfault 99\noom_kill 8\n")
    assert Kills.now().since(before).startswith("probably out of memory: the kernel killed a")
    version_1(machine, 4)
    assert Kills.now().since(before).startswith("out of memory: ")


@pytest.mark.parametrize(
    "content", ["", "oom_kill many\n", "oom_kill\n", "\n\n", "4:memory\n", "pgfault 1\n"]
)
def test_a_machine_that_does_not_say_is_no_error(machine: Path, content: str) -> None:
    assert Kills.now() == Kills(None, None)
    (machine / "vmstat").write_text(content)
    (machine / "cgroup").write_text(V2)
    now = Kills.now()
    assert now == Kills(None, None) and now.since(now) == ""
    assert Kills(1, 1).since(Kills(None, None)) == Kills(None, None).since(Kills(1, 1)) == ""


def test_this_machine_says_something() -> None:
    assert Kills.now() != Kills(None, None)
