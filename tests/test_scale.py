"""Ranks join and leave a job that runs, as a request in its folder says."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from allranks.errors import RequestError
from allranks.job.scaling import (
    REQUEST,
    Bounds,
    ScaleRequest,
    joiners_of,
    leavers_of,
    next_request,
    post,
    withdraw,
)
from allranks.launcher.heartbeat import Heartbeat, HeartbeatTable

BOUNDS = Bounds(2, 4)


# --- requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "members", "size", "leavers", "joiners"),
    [
        ({"ranks": 4}, (0, 1), 4, (), (2, 3)),
        ({"ranks": 3}, (0, 2), 3, (), (1,)),  # the lowest number that is free
        ({"ranks": 2}, (0, 1, 3), 2, (3,), ()),  # the highest numbers leave
        ({"ranks": 2}, (1, 3), 2, (), ()),
        ({"join": 1}, (1, 2, 3), 4, (), (0,)),
        ({"leave": 0}, (0, 1, 2), 2, (0,), ()),  # also the leader
    ],
)
def test_who_joins_and_who_leaves(
    words: dict[str, int],
    members: tuple[int, ...],
    size: int,
    leavers: tuple[int, ...],
    joiners: tuple[int, ...],
) -> None:
    request = ScaleRequest.new(**words)
    assert request.size_after(members, BOUNDS) == size
    assert leavers_of(request, members, size) == leavers
    assert joiners_of(members, members, size) == joiners


@pytest.mark.parametrize(
    ("words", "members", "says"),
    [
        ({"ranks": 5}, (0, 1), "elastic 2:4, and 2 ranks train"),
        ({"ranks": 1}, (0, 1), "elastic 2:4"),
        ({"join": 1}, (0, 1, 2, 3), "join: 5 ranks"),
        ({"leave": 1}, (0, 1), "scale --leave 1: 1 rank\n"),
        ({"leave": 2}, (0, 1, 3), "ranks 0, 1, 3 train"),
    ],
)
def test_outside_of_the_bounds_is_refused(
    words: dict[str, int], members: tuple[int, ...], says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        ScaleRequest.new(**words).size_after(members, BOUNDS)


def test_a_request_is_read_once_and_replaces_no_other(tmp_path: Path) -> None:
    first, second = ScaleRequest.new(ranks=3), ScaleRequest.new(join=1)
    assert next_request(tmp_path) is None and not withdraw(tmp_path)
    post(tmp_path, first)
    with pytest.raises(RequestError, match="another request"):
        post(tmp_path, second)
    assert next_request(tmp_path) == first and next_request(tmp_path) is None
    post(tmp_path, second)
    assert withdraw(tmp_path) and next_request(tmp_path) is None
    assert not list(tmp_path.iterdir())


NUMBERS = {"number": "1", "by": "", "ranks": 0, "join": 0, "leave": -1}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[" * 4000,
        "3",
        json.dumps({**NUMBERS, "ranks": 3, "more": 1}),
        json.dumps({**NUMBERS, "ranks": "3"}),
        json.dumps({**NUMBERS, "ranks": 3, "join": 1}),
        json.dumps(NUMBERS),
        json.dumps({**NUMBERS, "by": "x" * 5000, "ranks": 3}),
    ],
    ids=range(9),
)
def test_what_is_no_request_is_removed(tmp_path: Path, content: str) -> None:
    (tmp_path / REQUEST).write_text(content)
    assert next_request(tmp_path) is None and not (tmp_path / REQUEST).exists()


def test_the_launcher_waits_for_no_pipe_and_follows_no_link(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({**NUMBERS, "ranks": 3}))
    (tmp_path / REQUEST).symlink_to(secret)
    assert next_request(tmp_path) is None and secret.exists()
    os.mkfifo(tmp_path / REQUEST)
    assert next_request(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_rows_of_nobody_are_in_no_group() -> None:
    with closing(HeartbeatTable(4, begin=2)) as table:
        rank = Heartbeat(table.fd, 1)
        rank.at_step(7)
        rank.enter("compute")
        assert table.group.members == rank.group().members == (0, 1)
        group = table.form_group((0, 3), from_step=9)
        assert table.group.members == rank.group().members == (0, 3) and group.number == 1
        table.clear(1)
        assert (rank.step, table.read()[1].beats) == (-1, 0)
        assert table.group.members == (0, 3)
