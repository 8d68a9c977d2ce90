"""The first-fault report: the cause is named, the victims are folded away."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import PlaceError, ProgramError, RequestError
from allranks.job.run_folder import JsonLines, rank_events_path, rank_log_path
from allranks.launcher.fault_report import first_fault, rank_to_blame, user_error
from allranks.launcher.heartbeat import Beat
from allranks.launcher.processes.process import Exit, ProcessState, kind_said_in
from allranks.launcher.supervisor import Ended

HELD = "it held 2.0 MiB at most"
REFUSAL = {"asked": "loss", "found": "a scalar", "why": "no mean", "do": "leave it out"}


def ended(codes: list[int], stopped: Iterable[int] = (), times: list[int] | None = None) -> Ended:
    """Ranks that left with these codes, in this order of time unless `times` says otherwise."""
    at = times or list(range(100, 100 + len(codes)))
    exits = {rank: Exit(rank, code, at[rank], 2 << 20) for rank, code in enumerate(codes)}
    return Ended(exits, frozenset(stopped))


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
    event |= values
    said = kind_said_in(f"{event['kind']}: {event['message']}")
    with JsonLines(rank_events_path(folder, rank)) as lines:
        lines.row({"event": "ready", "time": 0.0, "monotonic": 0.0})
        lines.row({"fault_kind": said, **event})


def rank_of_first_fault(found: Ended, folder: Path) -> int | None:
    fault = first_fault(found, folder)
    return None if fault is None else fault.rank


def report(found: Ended, folder: Path) -> str:
    fault = first_fault(found, folder)
    assert fault is not None
    error = user_error(fault, found, folder)
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


WATCHDOG = "[Rank 1] Process group watchdog thread terminated with exception: "
ABORTED = (
    "Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  <no Python frame>\n"
)


@pytest.mark.parametrize(
    ("said", "first"),
    [
        ("NCCL error: remote process exited or there was a network error", 1),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)", 1),
        ("CUDA error: an illegal memory access was encountered", 0),
    ],
)
def test_whom_the_watchdog_of_nccl_ends_may_be_a_victim(
    tmp_path: Path, said: str, first: int
) -> None:
    """It ends a process by SIGABRT, which leaves no event: what it said is in the log."""
    log = rank_log_path(tmp_path, 0)
    log.parent.mkdir(parents=True)
    log.write_text(f"terminate called\n  what():  {WATCHDOG}{said}\n{ABORTED}")
    found = ended([-signal.SIGABRT, -signal.SIGKILL], times=[10, 11])
    assert rank_of_first_fault(found, tmp_path) == first


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
        (-signal.SIGKILL, f"killed by SIGKILL; it could leave no traceback ({HELD})"),
        (-signal.SIGSEGV, f"killed by SIGSEGV; it could leave no traceback ({HELD})"),
        (-(signal.SIGRTMIN + 3), f"killed by signal 37; it could leave no traceback ({HELD})"),
        (3, "it left with exit code 3 without a word"),
    ],
)
def test_a_rank_that_left_no_word(tmp_path: Path, code: int, cause: str) -> None:
    text = report(ended([code]), tmp_path)
    assert text.splitlines()[0].endswith(f"failed first: {cause}")
    assert "stopped because" not in text


@pytest.mark.parametrize(("code", "event"), [(-9, False), (1, True)])
def test_the_kernels_word_is_added_where_a_process_was_killed(
    tmp_path: Path, code: int, event: bool
) -> None:
    """The rank itself, or a loader worker of it: torch says that it was killed, and not why."""
    if event:
        failed(tmp_path, 0, 10.0, message="DataLoader worker (pid 3) is killed by signal: Killed. ")
    fault = first_fault(ended([code]), tmp_path, memory="out of memory: the kernel did it")
    assert fault is not None
    first = str(user_error(fault, ended([code]), tmp_path)).splitlines()[0]
    assert "failed first: out of memory: the kernel did it" in first


@pytest.mark.parametrize("code", [1, -15, -11])
def test_the_kernels_word_is_not_added_to_other_ends(tmp_path: Path, code: int) -> None:
    if code > 0:
        failed(tmp_path, 0, 10.0)
    fault = first_fault(ended([code]), tmp_path, memory="out of memory")
    assert fault is not None and fault.memory == ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("MemoryError", ""),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB"),
        ("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        ("OSError", "[Errno 12] Cannot allocate memory"),
    ],
)
def test_an_allocation_that_failed_is_out_of_memory(
    tmp_path: Path, kind: str, message: str
) -> None:
    failed(tmp_path, 0, 10.0, kind=kind, message=message, step=3)
    assert f"at step 3: out of memory: {kind}: {message}" in report(ended([1]), tmp_path)


def test_what_a_rank_wrote_in_another_attempt_is_not_of_this_one(tmp_path: Path) -> None:
    failed(tmp_path, 0, 10.0, attempt=0, message="old")
    failed(tmp_path, 0, 20.0, attempt=1, message="new")
    found = ended([1])
    old, new = (first_fault(found, tmp_path, attempt) for attempt in (0, 1))
    assert old is not None and old.event is not None and old.event["message"] == "old"
    assert new is not None and new.event is not None and new.event["message"] == "new"
    assert not new.repeats(old) and not new.repeats(None) and new.repeats(new)


def test_a_rank_that_says_it_is_done_may_leave_as_it_likes(tmp_path: Path) -> None:
    with JsonLines(rank_events_path(tmp_path, 0)) as lines:
        lines.row({"event": "done", "time": 0.0, "monotonic": 0.0})
    assert first_fault(ended([-6]), tmp_path, must_say_so=True) is None
    left = first_fault(ended([0]), tmp_path / "other", must_say_so=True)
    assert left is not None
    text = str(user_error(left, ended([0]), tmp_path))
    assert "it left with exit code 0 before the training was done" in text


@pytest.mark.parametrize("passing", [True, False])
def test_a_fault_says_whether_another_attempt_may_go_better(tmp_path: Path, passing: bool) -> None:
    failed(tmp_path, 0, 10.0, passing=passing)
    fault = first_fault(ended([1]), tmp_path)
    assert fault is not None and fault.is_passing is passing


def test_a_bad_request_found_before_the_first_update_is_one(tmp_path: Path) -> None:
    failed(tmp_path, 0, 10.0, kind="RequestError", request=REFUSAL)
    found = ended([2, -15], {1})
    fault = first_fault(found, tmp_path)
    assert fault is not None
    error = user_error(fault, found, tmp_path)
    assert isinstance(error, RequestError) and error.to_data() == REFUSAL


def test_a_bad_request_found_after_an_update_is_a_failed_program(tmp_path: Path) -> None:
    failed(tmp_path, 0, 10.0, kind="RequestError", message="asked", request=REFUSAL, updates=1)
    lines = report(ended([2, -15], {1}), tmp_path).splitlines()
    assert lines[0].endswith("failed first, after 1 update:")
    assert lines[1:] == str(RequestError.from_data(REFUSAL)).splitlines()


def test_a_torn_event_is_no_event(tmp_path: Path) -> None:
    rank_events_path(tmp_path, 0).write_text('{"event": "failed", "mono')
    assert "killed by SIGKILL" in report(ended([-9]), tmp_path)


def test_clocks_of_other_hosts_do_not_decide_who_was_first(tmp_path: Path) -> None:
    """Rank 0 wrote by a clock that is far ahead of ours, and failed two seconds before rank 1."""
    failed(tmp_path, 0, 1e6 + 5.0)
    failed(tmp_path, 1, 7.0, kind="KeyError")
    exits = {0: Exit(0, 1, 5.5, clock_ahead_s=1e6), 1: Exit(1, 1, 7.5)}
    fault = first_fault(Ended(exits, frozenset()), tmp_path)
    assert fault is not None and (fault.rank, fault.monotonic) == (0, 5.0)


@pytest.mark.parametrize("there", ["", "out of memory there"])
def test_the_kernel_of_its_own_host_is_asked_about_memory(tmp_path: Path, there: str) -> None:
    exits = {0: Exit(0, -signal.SIGKILL, 1.0, host="node1", memory=there)}
    fault = first_fault(Ended(exits, frozenset()), tmp_path, memory="out of memory here")
    assert fault is not None and fault.memory == there


@pytest.mark.parametrize(
    ("steps", "at"),
    [((), ""), ((9, 7, 7), " at step 7"), ((9, -1, -1), " at step 9")],
    ids=["nobody has begun", "it said so itself", "the others know"],
)
def test_a_lost_node_is_named_before_its_victims(
    tmp_path: Path, steps: tuple[int, ...], at: str
) -> None:
    beats = [Beat(rank, 1, step, "step", 0.0, 0, {}) for rank, step in enumerate(steps)]
    failed(tmp_path, 0, 1.0, peer_lost=True)
    exits = {0: Exit(0, 1, 1.0), 1: Exit(1, -9, 9.0, host="node1", lost="no word of it")}
    exits[2] = Exit(2, -9, 9.0, host="node1", lost="no word of it")
    ended_ = Ended(exits, frozenset((1, 2)))
    fault = first_fault(ended_, tmp_path, beats=beats)
    assert fault is not None
    error = user_error(fault, ended_, tmp_path)
    assert isinstance(error, PlaceError)
    assert str(error) == (
        f"node node1 is lost{at}, with rank 1, 2: no word of it\nstopped because of it: rank 0"
    )


MISMATCH = "shared memory: collective mismatch: rank 0 makes another collective than rank 1"
PACKAGE = str(Path(first_fault.__code__.co_filename).parents[1])
IN_A_STEP = f"""Traceback (most recent call last):
  File "{PACKAGE}/training/rank_program.py", line 24, in _fit
  File "{PACKAGE}/torch/trainer.py", line 203, in steps
  File "{PACKAGE}/torch/comm/comm.py", line 9, in all_reduce
  File "/usr/lib/python3/site-packages/torch/distributed/c10d.py", line 1, in all_reduce
RankLost: {MISMATCH}
"""
THROUGH_A_MODULE = f"""Traceback (most recent call last):
  File "{PACKAGE}/torch/trainer.py", line 203, in steps
  File "/home/me/task.py", line 7, in forward
  File "/usr/lib/python3/site-packages/torch/nn/modules/module.py", line 1, in _call_impl
  File "/usr/lib/python3/site-packages/torch/distributed/fsdp.py", line 1, in pre_forward
RankLost: {MISMATCH}
"""
CALLED = {
    "of the trainer": f"""Thread 0x1 (most recent call first):
  File "{PACKAGE}/torch/comm/comm.py", line 276 in gather_texts
  File "{PACKAGE}/torch/trainer.py", line 276 in save
  File "/home/me/task.py", line 28 in on_step
  File "{PACKAGE}/training/rank_program.py", line 28 in _fit
""",
    "of torch": f"""Thread 0x1 (most recent call first):
  File "{PACKAGE}/torch/shared_memory/backend.py", line 9 in allreduce
  File "/usr/lib/python3/site-packages/torch/distributed/c10d.py", line 1 in all_reduce
  File "/home/me/task.py", line 28 in on_step
  File "{PACKAGE}/training/rank_program.py", line 28 in _fit
""",
}


@pytest.mark.parametrize("call", CALLED)
@pytest.mark.parametrize("seen", [IN_A_STEP, THROUGH_A_MODULE], ids=["step", "module"])
def test_who_called_a_collective_alone_is_named_and_not_who_saw_it(
    tmp_path: Path, call: str, seen: str
) -> None:
    failed(tmp_path, 1, 9.0, step=4, kind="RankLost", message=MISMATCH, traceback=seen)
    found = ended([-15, 1, -15], stopped={0, 2})
    found = replace(
        found, stands={0: ProcessState("S", CALLED[call]), 2: ProcessState("S", IN_A_STEP)}
    )
    text = report(found, tmp_path)
    assert text.startswith("rank 0 called a collective that the others did not at step 4; rank 1")
    assert "rank 0 called it: /home/me/task.py line 28 in on_step" in text
    assert "stopped because of it: rank 2" in text and "failed first" not in text
    fault = first_fault(found, tmp_path)
    assert fault is not None and rank_to_blame(fault, found, tmp_path) == 0
