"""What others say of a failure is read in one place, and given its kind there."""

from __future__ import annotations

import pytest

from allranks.errors import BadStep, FaultKind, PeerLost, PlaceError, ProgramError, RequestError
from allranks.launcher.processes.process import classify, failure_of, is_said

LOST = "shared memory: peer lost: rank 2 has left the group"
OTHERS = "shared memory: collective mismatch: rank 2 makes another collective than this rank"
SIZES = "data size (800) doesn't match expected size (400)"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), FaultKind.OUT_OF_MEMORY),
        (OSError(12, "Cannot allocate memory"), FaultKind.OUT_OF_MEMORY),
        (ProgramError("RESOURCE_EXHAUSTED: Out of memory"), FaultKind.OUT_OF_MEMORY),
        (RuntimeError("DataLoader worker is killed by signal: Killed."), FaultKind.CHILD_KILLED),
        (RuntimeError("Connection closed by peer"), FaultKind.PROGRAM),
        (PeerLost("Cannot allocate memory"), FaultKind.PEER_LOST),
        (BadStep("step 3: the loss is nan"), FaultKind.PROGRAM),
        (PlaceError("no node"), FaultKind.PLACE),
        (RequestError(asked="a", found="b", why="c", do="d"), FaultKind.REQUEST),
        (ProgramError("x", fault_kind=FaultKind.HANG), FaultKind.HANG),
        (KeyError("hang"), FaultKind.PROGRAM),
    ],
)
def test_every_failure_has_a_kind(error: BaseException, kind: FaultKind) -> None:
    assert classify(error) is kind


class Wordless(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def test_an_error_without_a_text_is_told_by_its_kind() -> None:
    told = failure_of(Wordless(), 0, 3)
    assert told["kind"] == "Wordless" and "its __str__ raises ZeroDivisionError" in told["message"]
    assert "Wordless" in told["traceback"]


@pytest.mark.slow
def test_what_an_error_says_has_a_bound_and_keeps_both_ends() -> None:
    try:
        raise ValueError(f"first {'x' * 20_000_000} last")
    except ValueError as error:
        told = failure_of(error, 0, 3)
    assert told["message"].startswith("first x") and told["message"].endswith("x last")
    assert "in test_what_an_error_says" in told["traceback"]
    assert len(str(told)) < 50_000


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (FaultKind.PEER_LOST, "Connection closed by peer [127.0.0.1]:1", True),
        (FaultKind.PEER_LOST, "recv: Broken pipe", True),
        (FaultKind.PEER_LOST, "Read error [::1]:1: Software caused connection abort", True),
        (FaultKind.PEER_LOST, "writev [127.0.0.1]:1: No route to host", True),
        (FaultKind.PEER_LOST, "writev [127.0.0.1]:1: Connection timed out", True),
        (FaultKind.PEER_LOST, "Failed to read. Connection was likely closed.", True),
        (FaultKind.PEER_LOST, "Timeout waiting for key: default_pg/0/0", True),
        (FaultKind.PEER_LOST, "WorkNCCL(SeqNum=3) ran for 9 milliseconds before timing out", True),
        (FaultKind.PEER_LOST, "[PG ID 1] NCCL communicator 0x1 was aborted", True),
        (FaultKind.PEER_LOST, "NCCL error: unhandled cuda error, ncclUnhandledCudaError", False),
        (FaultKind.PEER_LOST, SIZES, False),
        (FaultKind.COLLECTIVE_MISMATCH, SIZES, True),
        (FaultKind.COLLECTIVE_MISMATCH, "recv: Broken pipe", False),
        (FaultKind.PEER_LOST, LOST, True),
        (FaultKind.COLLECTIVE_MISMATCH, LOST, False),
        (FaultKind.COLLECTIVE_MISMATCH, OTHERS, True),
        (FaultKind.PEER_LOST, OTHERS, False),
        (FaultKind.TIMED_OUT, "Timed out waiting 1800000ms for recv", True),
        (FaultKind.TIMED_OUT, SIZES, False),
        (FaultKind.TWO_TYPES, "expected scalar type Double but found Float", True),
        (FaultKind.TWO_TYPES, "expected scalar type Float but found Half", False),
    ],
)
def test_what_a_broken_collective_says(kind: FaultKind, text: str, said: bool) -> None:
    assert is_said(kind, text) is said


def test_a_line_below_changes_neither_kind_nor_cause() -> None:
    error = ProgramError("report", fault_kind=FaultKind.HANG, cause="why").with_more("more")
    assert (str(error), error.fault_kind, error.cause) == ("report\nmore", FaultKind.HANG, "why")
    assert str(error.with_more("")) == str(error)
