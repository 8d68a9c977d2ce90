"""What is read from the log of a script: its error, the loss of a peer, want of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.launcher.fault_report import OF_GLOO, last_words, stacks_in

CHAINED = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
    open("x")
FileNotFoundError: x

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
    raise RuntimeError("no data\\nin it") from None
RuntimeError: no data
in it
"""
DYING = """Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "loader.py", line 5 in read

Current thread 0x00007f02 (most recent call first):
  File "train.py", line 7 in step
"""
TAKEN_APART = """terminate called without an active exception
Fatal Python error: Aborted

Thread 0x00007fd3 (most recent call first):
  <no Python frame>
"""


THE_CAUSE = """Traceback (most recent call last):
  File "a.py", line 5, in <module>
    raise ValueError("the cause")
ValueError: the cause
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", ""),
        ("step 1\nno such option --lr\n", "no such option --lr"),
        ("10%\r20%\r100%\nbye\n", "bye"),
        (CHAINED, "RuntimeError: no data"),
        ("".join(f"[rank3]: {line}\n" for line in CHAINED.splitlines()), "RuntimeError: no data"),
        (DYING, "Fatal Python error: Segmentation fault"),
        (THE_CAUSE + TAKEN_APART, "ValueError: the cause"),
        (TAKEN_APART, OF_GLOO),
        ("Traceback (most recent call last):\n", "Traceback (most recent call last):"),
    ],
)
def test_the_line_that_names_the_error(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "log").write_text(text)
    assert last_words(tmp_path / "log").error == error


@pytest.mark.parametrize(
    ("error", "is_victim"),
    [
        (
            "RuntimeError: [gloo/pair.cc:538] Read error [127.0.0.1]:1: Connection reset by peer",
            True,
        ),
        ("RuntimeError: Application timeout caused pair closure", True),
        ("RuntimeError: Timed out waiting 1800000ms for recv operation to complete", True),
        ("torch.distributed.DistBackendError: NCCL error: remote process exited", True),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", True),
        ("BrokenPipeError: [Errno 32] Broken pipe", True),
        ("tensorflow.python.framework.errors_impl.UnavailableError: Socket closed", True),
        ("ValueError: the queue of connections is full", False),
        ("EOFError: Ran out of input", False),
        ("KeyError: 'connection'", False),
        ("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB", False),
    ],
)
def test_who_is_a_victim(tmp_path: Path, error: str, is_victim: bool) -> None:
    log = tmp_path / "log"
    log.write_text(f'Traceback (most recent call last):\n  File "a.py", line 1\n{error}\n')
    words = last_words(log)
    assert words.is_victim is is_victim and words.error == error
    assert words.is_out_of_memory is ("out of memory" in error)


def test_a_peer_that_was_lost_earlier_is_not_the_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"retrying: Connection reset by peer\n{CHAINED}")
    assert not last_words(log).is_victim


def test_only_this_attempt_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(CHAINED + "again\n")
    assert last_words(log, len(CHAINED)).text == "again"


def test_the_running_thread_comes_first(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"begins\n{DYING}")
    assert stacks_in(tmp_path / "log").splitlines() == [
        "Fatal Python error: Segmentation fault",
        "Current thread 0x00007f02 (most recent call first):",
        '  File "train.py", line 7 in step',
        "Thread 0x00007f01 (most recent call first):",
        '  File "loader.py", line 5 in read',
    ]


def test_a_log_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    assert last_words(tmp_path / "none").text == stacks_in(tmp_path / "none") == ""
