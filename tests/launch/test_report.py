"""The first-fault report: the cause is named, the victims are folded away."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import ProgramError, RequestError
from allranks.launch.report import error_of, first_fault
from allranks.launch.server import Exit
from allranks.launch.supervisor import Ended
from allranks.record import JsonLines, rank_events_path, rank_log_path

REFUSAL = {"asked": "loss", "found": "a scalar", "why": "no mean", "do": "leave it out"}


def ended(codes: list[int], stopped: Iterable[int] = (), times: list[int] | None = None) -> Ended:
    """Ranks that left with these codes, in this order of time unless `times` says otherwise."""
    at = times or list(range(100, 100 + len(codes)))
    exits = {rank: Exit(rank, code, at[rank]) for rank, code in enumerate(codes)}
    return Ended(exits, frozenset(stopped), False)


def failed(folder: Path, rank: int, monotonic: float, **values: Any) -> None:
    """The event that rank `rank` wrote before it left."""
    event = {
        "event": "failed",
        "time": monotonic,
        "monotonic": monotonic,
        "kind": "ValueError",
        "message": "on purpose",
        "traceback": "Traceback (most recent call last):\n  …\nValueError: on purpose\n",
        "peer_lost": False,
        "request": None,
        "updates": 0,
        "step": None,
    }
    with JsonLines(rank_events_path(folder, rank)) as lines:
        lines.row({"event": "ready", "time": 0.0, "monotonic": 0.0})
        lines.row({**event, **values})


def rank_of_first_fault(found: Ended, folder: Path) -> int | None:
    fault = first_fault(found, folder)
    return None if fault is None else fault.rank


def report(found: Ended, folder: Path) -> str:
    fault = first_fault(found, folder)
    assert fault is not None
    error = error_of(fault, found, folder)
    assert isinstance(error, ProgramError) and error.exit_code == 1
    return str(error)


def test_no_fault_where_every_rank_ended_well(tmp_path: Path) -> None:
    assert first_fault(ended([0, 0, 0]), tmp_path) is None


def test_a_rank_that_was_told_to_stop_is_no_fault(tmp_path: Path) -> None:
    assert first_fault(ended([-15, -9], stopped={0, 1}), tmp_path) is None
    assert rank_of_first_fault(ended([-15, 1, -9], stopped={0, 2}), tmp_path) == 1


def test_the_exit_that_the_kernel_showed_first(tmp_path: Path) -> None:
    assert rank_of_first_fault(ended([1, 3, -9], times=[12, 11, 13]), tmp_path) == 1


def test_the_event_that_was_written_first_goes_before_the_order_of_exits(tmp_path: Path) -> None:
    failed(tmp_path, 0, 10.0)
    failed(tmp_path, 1, 9.0)
    assert rank_of_first_fault(ended([1, 1], times=[20, 21]), tmp_path) == 1


def test_a_cause_goes_before_its_victims_however_late_it_is_seen(tmp_path: Path) -> None:
    for rank in (0, 2):
        failed(tmp_path, rank, 10.0 + rank, kind="PeerLost", peer_lost=True)
    assert rank_of_first_fault(ended([1, -9, 1], times=[20, 22, 21]), tmp_path) == 1
    assert rank_of_first_fault(ended([1, 0, 1]), tmp_path) == 0, "if nobody else can be named"


def test_a_rank_that_failed_by_itself_before_it_was_stopped_is_a_fault(tmp_path: Path) -> None:
    failed(tmp_path, 0, 10.0)
    assert rank_of_first_fault(ended([1, -9], {0}, [20, 15]), tmp_path) == 0


def test_the_report_tells_who_where_why_and_who_else(tmp_path: Path) -> None:
    failed(tmp_path, 1, 10.0, step=7, updates=7)
    text = report(ended([-15, 1, -15, 0], {0, 2}), tmp_path)
    lines = text.splitlines()
    assert lines[0].startswith("rank 1 on ")
    assert lines[0].endswith(" failed first at step 7: ValueError: on purpose")
    assert "ValueError: on purpose" in lines[2:]
    assert lines[-2] == "stopped because of it: rank 0, 2"
    assert lines[-1] == f"its output: {rank_log_path(tmp_path, 1)}"


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (-signal.SIGKILL, "killed by SIGKILL; it could leave no traceback"),
        (-signal.SIGSEGV, "killed by SIGSEGV; it could leave no traceback"),
        (-(signal.SIGRTMIN + 3), "killed by signal 37; it could leave no traceback"),
        (3, "it left with exit code 3 without a word"),
    ],
)
def test_a_rank_that_left_no_word(tmp_path: Path, code: int, cause: str) -> None:
    text = report(ended([code]), tmp_path)
    assert text.splitlines()[0].endswith(f"failed first: {cause}")
    assert "stopped because" not in text


def test_a_bad_request_found_before_the_first_update_is_one(tmp_path: Path) -> None:
    failed(tmp_path, 0, 10.0, kind="RequestError", request=REFUSAL)
    found = ended([2, -15], {1})
    fault = first_fault(found, tmp_path)
    assert fault is not None
    error = error_of(fault, found, tmp_path)
    assert isinstance(error, RequestError) and error.to_data() == REFUSAL


def test_a_bad_request_found_after_an_update_is_a_failed_program(tmp_path: Path) -> None:
    failed(tmp_path, 0, 10.0, kind="RequestError", message="asked", request=REFUSAL, updates=1)
    assert "RequestError: asked" in report(ended([2]), tmp_path)


def test_a_torn_event_is_no_event(tmp_path: Path) -> None:
    rank_events_path(tmp_path, 0).write_text('{"event": "failed", "mono')
    assert "killed by SIGKILL" in report(ended([-9]), tmp_path)
