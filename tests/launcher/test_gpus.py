"""The rows of `allranks doctor --gpus`: what counts as seen, not seen and failed; made up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import Interrupted, PlaceError, ProgramError, RequestError
from allranks.programs import gpus as programs
from allranks.strategies.resolve import strategy_spec
from allranks.tools.doctor import gpus
from allranks.tools.doctor.gpus import Machine, Promise, RowResult, page_of, record_of, rows_of
from allranks.torch import Task

HANG = "rank {} on a is missing: at step 5\nrank {} waits at step 5"
STEP = {
    "allranks": {"waits": 0, "launches": 110},
    "hand": {"waits": 1, "launches": 100},
    "ratio": 1.1,
}


def machine(device: str = "cuda", count: int = 1, ranks: int = 2, **more: Any) -> Machine:
    """A machine that trains nothing; `more` are its results."""
    made = Machine(None, Path("none"), device, count, ranks)  # type: ignore[arg-type]
    made.__dict__.update(more)
    return made


def raised(error: Exception) -> Callable[[Machine, int], RowResult]:
    def look(machine: Machine, ranks: int) -> RowResult:
        raise error

    return look


def test_a_row_says_what_was_seen_whatever_its_function_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusal = RequestError(asked="a", found="two | of them", why="c", do="d")
    outcomes: dict[str, Any] = {
        "holds": lambda machine, ranks: RowResult(True),
        "fails": lambda machine, ranks: RowResult(False, "1 is not 2"),
        "refused": raised(refusal),
        "broken": raised(ProgramError("a report\nof lines", cause="it broke")),
        "wrong": raised(KeyError("waits")),
    }
    monkeypatch.setattr(gpus, "ROWS", {n: Promise(f"{n}!", f) for n, f in outcomes.items()})
    rows = list(rows_of(machine(), list(outcomes)))
    assert [(row["verdict"], row["why"]) for row in rows] == [
        ("seen", ""),
        ("failed", "1 is not 2"),
        ("not seen", "refused: two | of them"),
        ("failed", "it broke"),
        ("failed", "KeyError: 'waits'"),
    ]
    assert rows[3]["found"]["said"] == "a report\nof lines"
    (late,) = rows_of(machine(), ["fails"], budget_s=-1.0)
    assert late["verdict"] == "not seen" and late["why"].startswith("no time was left")
    page = page_of(record_of(machine(), rows))
    assert "1 seen, 1 not seen, 3 failed" in page and "two \\| of them" in page
    monkeypatch.setattr(gpus, "ROWS", {"ended": Promise("!", raised(Interrupted("Ctrl-C")))})
    with pytest.raises(Interrupted):
        list(rows_of(machine(), ["ended"]))


@pytest.mark.parametrize(
    ("name", "results", "verdict"),
    [
        ("hang", {"failure": lambda *a, **k: HANG.format(1, 0)}, "seen"),
        ("hang", {"failure": lambda *a, **k: HANG.format(0, 1)}, "failed"),
        ("hang", {"failure": lambda *a, **k: ""}, "failed"),
        ("corrupt", {"failure": lambda *a, **k: "ranks must hold the same weights"}, "seen"),
        ("memory", {"failure": lambda *a, **k: "out of memory"}, "failed"),
        ("memory", {"failure": lambda *a, **k: "out of memory\nheld on a chip"}, "seen"),
        ("host", {"probe": lambda name: {"largest": 1e-8}}, "failed"),
        ("waits", {"probe": lambda name: STEP}, "seen"),
        ("launches", {"probe": lambda name: STEP}, "seen"),
        ("launches", {"probe": lambda name: {**STEP, "hand": {"launches": 99}}}, "failed"),
        ("launches", {"probe": lambda name: {**STEP, "hand": {"launches": 0}}}, "not seen"),
        ("waits", {"probe": lambda name: {**STEP, "hand": {}}}, "not seen"),
        ("pace", {"probe": lambda name: {**STEP, "ratio": 1.11}}, "failed"),
        ("pace", {"probe": lambda name: STEP, "device": "xpu"}, "not seen"),
    ],
)
def test_a_promise_is_judged_by_what_was_found(
    name: str, results: dict[str, Any], verdict: str
) -> None:
    (row,) = rows_of(machine(**results), [name])
    assert row["verdict"] == verdict, row


def test_equal_bits_are_those_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {1: "a", 3: "a"}

    def train(task: str, ranks: int, *settings: str, **flags: Any) -> dict[str, Any]:
        return {"weights_sha256": digests[ranks] + str(settings), "restarts": 1}

    for last, verdict in (("a", "seen"), ("b", "failed")):
        digests[3] = last
        rows = list(rows_of(machine(ranks=3, train=train), ["bits", "kill"]))
        assert [row["verdict"] for row in rows] == [verdict] * 2


def test_ranks_share_devices_only_where_they_outnumber_them() -> None:
    flags = {"strategy": "ddp", "precision": "fp64"}
    for count, ranks, shares in ((1, 2, True), (2, 2, False), (2, 4, True), (4, 4, False)):
        here = machine(count=count)
        job = here.job("Pictures", ranks, **flags).job
        assert (job.ranks, job.share_device, job.device) == (ranks, shares, "cuda")
        assert ("share" in here.on(ranks)) == shares
    nodes = machine(count=2, more={"nodes": 2, "place": "slurm"}, devices=4)
    assert nodes.job("Pictures", 4, **flags).job.nodes == 2
    assert nodes.job("Pictures", 1, precision="fp64").job.nodes == 1


def test_a_probe_that_failed_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(server: Any, name: str, device: str) -> dict[str, Any]:
        asked.append(name)
        raise PlaceError("it ended without an answer")

    monkeypatch.setattr(gpus, "ask", ask)
    rows = list(rows_of(machine(), ["waits", "launches", "pace"]))
    assert [row["verdict"] for row in rows] == ["failed"] * 3 and asked == ["step"]


def test_every_promise_of_equality_names_a_task_and_a_strategy() -> None:
    """Both are texts, and the ranks that read them need GPUs."""
    named = [row.look.args for row in gpus.ROWS.values() if isinstance(row.look, partial)]
    assert len(named) > 10
    for task, strategy in named:
        assert issubclass(getattr(programs, task), Task)
        strategy_spec(strategy, 4)
