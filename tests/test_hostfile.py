"""Hostfiles of DeepSpeed, Open MPI and MPICH, and what is wrong with others, by file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.errors import RequestError
from allranks.launcher.places.ssh import HostSlots, parse_hostfile, read_hostfile


def hosts(text: str) -> list[tuple[str, int | None]]:
    return [(row.host, row.slots) for row in parse_hostfile(text, "hosts")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("worker-1 slots=4\nworker-2 slots=2\n", [("worker-1", 4), ("worker-2", 2)]),
        ("# DeepSpeed\n\nworker-1 slots=4 # four GPUs\n", [("worker-1", 4)]),
        ("aa slots=2 max_slots=4\nbb slots=2 max-slots=2\ncc", [("aa", 2), ("bb", 2), ("cc", None)]),
        ("n3:4\nn4\n", [("n3", 4), ("n4", None)]),
        ("n1\nn1\nn2\nn1\n", [("n1", 3), ("n2", None)]),
        ("me@10.0.0.7 slots=1\r\n", [("me@10.0.0.7", 1)]),
        ("fe80::1%eth0 slots=2\n[::1]:4\n[fe80::2]\n", [("fe80::1%eth0", 2), ("::1", 4), ("fe80::2", None)]),
        ("\tb slots=1\n  a\tslots=1", [("b", 1), ("a", 1)]),
        ("node max_slots=3", [("node", None)]),
    ],
)  # fmt: skip
def test_the_forms_of_others(text: str, found: list[tuple[str, int | None]]) -> None:
    assert hosts(text) == found


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("a slots=4\nb slots=x\n", "line 2 of hosts", "'x'"),
        ("a slots=0", "line 1 of hosts", "'0'"),
        ("a slots=-1", "line 1 of hosts", "'-1'"),
        ("a slots=1 slots=2", "line 1 of hosts", "'slots=2'"),
        ("a:2 slots=2", "line 1 of hosts", "'slots=2'"),
        ("a:b", "line 1 of hosts", "'b'"),
        ("\n\na gpus=4", "line 3 of hosts", "'gpus=4'"),
        ("a b", "line 1 of hosts", "'b'"),
        ("a slots=4 max_slots=2", "line 1 of hosts", "slots=4, max_slots=2"),
        ("a slots=4\nb\na slots=2", "lines 1 and 3 of hosts", "'a' on each of them"),
        ("a\na slots=2", "lines 1 and 2 of hosts", "'a' on each of them"),
        ("-oProxyCommand=x", "line 1 of hosts", "'-oProxyCommand=x'"),
        ("$(reboot)", "line 1 of hosts", "'$(reboot)'"),
        ("", "the hosts in hosts", "no host in it"),
        ("# nobody\n", "the hosts in hosts", "no host in it"),
    ],
)
def test_what_is_wrong_is_named_by_file_and_line(text: str, line: str, found: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_hostfile(text, "hosts")
    assert (refused.value.asked, refused.value.found) == (line, found)


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n1 slots=2\n")
    assert read_hostfile(tmp_path / "hosts") == (HostSlots("n1", 2),)
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfn1 slots=2\r\n")  # as editors of Windows do
    assert read_hostfile(tmp_path / "hosts") == (HostSlots("n1", 2),)
    (tmp_path / "hosts").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "hosts", tmp_path / "none", tmp_path):
        with pytest.raises(RequestError, match=str(path)):
            read_hostfile(path)
