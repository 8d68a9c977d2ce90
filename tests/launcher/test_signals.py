"""Signals are noted while a job runs, never raised in mid-message, and given back afterwards."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from allranks.launcher.supervisor import Signals


@pytest.mark.parametrize("number", Signals.STOP, ids=lambda n: n.name)
def test_what_asks_to_stop_is_noted_by_its_name(number: signal.Signals) -> None:
    given = signal.signal(number, signal.SIG_DFL)  # SIGHUP is ignored under nohup, and stays so
    try:
        with Signals() as signals:
            assert signals.reason == "" and not signals.take_saves()
            os.kill(os.getpid(), number)
            assert signals.reason == number.name and not signals.insists
    finally:
        signal.signal(number, given)


def test_the_first_reason_stays() -> None:
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.reason == "SIGUSR1" and not signals.insists


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_a_reason_insists(first: signal.Signals) -> None:
    with Signals() as signals:
        os.kill(os.getpid(), first)
        assert not signals.insists
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.insists and signals.reason == first.name


def test_a_save_is_asked_for_once_however_often_the_signal_came() -> None:
    with Signals() as signals:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGUSR2)
        assert signals.take_saves() and not signals.take_saves()
        assert signals.reason == ""


def test_all_are_given_back() -> None:
    numbers = (*Signals.STOP, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    with Signals():
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before


def test_beside_the_main_thread_nothing_is_changed() -> None:
    seen: list[object] = []

    def run() -> None:
        with Signals() as signals:
            seen.extend([signal.getsignal(signal.SIGTERM), signals.reason])

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before, ""]
