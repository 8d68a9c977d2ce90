"""docs/reference.md is what the docstrings say now, and everything public says something."""

from __future__ import annotations

import runpy

from conftest import ROOT


def test_the_reference_is_not_stale() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))
    assert made["PAGE"].read_text() == made["page"](), "stale: `make docs` writes it anew"


def test_it_names_what_a_user_meets() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    for name in ("Trainer", "Batch", "StepResult", "Job", "Task", "Callback", "Plateau", "launch"):
        assert f"### `{name}`" in page
    assert "**`evaluate(data: Any = None) -> dict[str, float]`**" in page
    assert "0x" not in page, "an address"
