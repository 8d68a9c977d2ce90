"""Errors: the exit code each leads to, the four parts of a refusal, the nearest name."""

from __future__ import annotations

import json

from allranks.errors import (
    AllranksError,
    Interrupted,
    PeerLost,
    PlaceError,
    ProgramError,
    RequestError,
    nearest,
)

REFUSAL = RequestError(asked="--ranks 9", found="8 shards", why="none is left", do="--ranks 8")


def test_every_error_has_its_exit_code() -> None:
    codes = {
        AllranksError: 1,
        RequestError: 2,
        ProgramError: 1,
        PeerLost: 1,
        PlaceError: 3,
        Interrupted: 130,
    }
    for kind, code in codes.items():
        assert kind.exit_code == code and issubclass(kind, AllranksError)
    assert issubclass(PeerLost, ProgramError)


def test_a_refusal_reads_in_four_lines() -> None:
    assert str(REFUSAL) == (
        "asked: --ranks 9\nfound: 8 shards\nwhy:   none is left\ndo:    --ranks 8"
    )


def test_a_notebook_shows_a_refusal_without_a_traceback() -> None:
    """IPython calls this method, and prints the lines in the place of the stack."""
    assert REFUSAL._render_traceback_() == ["this cannot be done", *str(REFUSAL).splitlines()]


def test_a_refusal_crosses_from_a_rank_as_data() -> None:
    again = RequestError.from_data(json.loads(json.dumps(REFUSAL.to_data())))
    assert str(again) == str(REFUSAL) and again.exit_code == 2


def test_nearest_names_one_and_lists_all() -> None:
    known = ("train", "strategies", "show")
    assert nearest("trian", known) == "did you mean 'train'? known: show, strategies, train"
    assert nearest("xyzzy", known) == "known: show, strategies, train"
    assert nearest("xyzzy", ()) == "known: none"
