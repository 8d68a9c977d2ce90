"""Whoever asks for shared memory by its name hears that Gloo does it instead."""

from __future__ import annotations

import pytest

from allranks.torch.shared_memory import backend


def test_a_backend_that_was_asked_for_by_name_is_missed_aloud(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {"asked": "shared_memory", "did": "gloo", "why": "rank 1: no library was built"}
    monkeypatch.setattr(backend, "backend_record", lambda group: told)
    (note,) = backend.notes_on_backend(None, "shared_memory")
    assert note == (
        "--backend shared_memory was asked for, and gloo does it: rank 1: no library was built"
    )
    assert backend.notes_on_backend(None, "") == []  # nobody asked for it by name
    told["did"] = "shared_memory"
    assert backend.notes_on_backend(None, "shared_memory") == []
