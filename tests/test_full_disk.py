"""A disk that is full before the end of a job: what was computed is kept elsewhere, and said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from allranks.launcher.start import Result
from conftest import Train

OnRanks = Callable[..., Any]
STEPS = 60
TESTS = Path(__file__).parent
WORDS = {
    "full_disk_tasks.py": ["--ranks", "2"],
    "tf_tasks.py": ["--engine", "tensorflow", "--threads", "1"],
}


@pytest.fixture
def on_a_small_disk(on_ranks: OnRanks, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`run(elsewhere)`: a job whose disk fills up; what it said and left."""

    def run(elsewhere: Path, file: str = "full_disk_tasks.py") -> dict[str, Any]:
        argument = {
            "disk": str(tmp_path / "disk"),
            "told": str(tmp_path / "told.json"),
            "program": f"{TESTS / file}:Filling",
            "words": [*WORDS[file], "--steps", str(STEPS), "--log", "csv"],
            "variables": {"TMPDIR": str(elsewhere), "TEMP": str(elsewhere)},
        }
        on_ranks(1, "full_disk_workers:a_job_on_a_small_disk", argument)
        told: dict[str, Any] = json.loads((tmp_path / "told.json").read_text())
        return told

    return run


@pytest.mark.slow
def test_what_does_not_fit_is_kept_elsewhere_and_said(
    on_a_small_disk: Callable[..., dict[str, Any]], train: Train, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    told = on_a_small_disk(elsewhere)
    assert_all_is_kept(told, elsewhere, train("digits", ranks=2, steps=STEPS), average=True)


@pytest.mark.slow
def test_a_job_of_tensorflow_keeps_it_too(
    on_a_small_disk: Callable[..., dict[str, Any]], train_tf: Train, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    told = on_a_small_disk(elsewhere, "tf_tasks.py")
    assert_all_is_kept(told, elsewhere, train_tf("digits-keras", steps=STEPS), average=False)


def assert_all_is_kept(
    told: dict[str, Any], elsewhere: Path, plain: Result, *, average: bool
) -> None:
    """The end of a job whose disk was full is that of the `plain` one, and said."""
    assert told["code"] == 0, told["err"]
    assert "Traceback" not in told["err"]
    (folder,) = elsewhere.glob("allranks-run-*")
    kept = ["metrics.jsonl", "weights.safetensors"]
    kept = ["average.safetensors", *kept] if average else kept
    assert sorted(path.name for path in folder.iterdir()) == kept
    digest = plain.summary["weights_sha256"]
    assert f"sha256 {digest}" in told["out"] and f"sha256 {digest}" in told["show"]
    found, right = (load_file(p / "weights.safetensors") for p in (folder, plain.run_dir))
    assert {n: a.tobytes() for n, a in found.items()} == {n: a.tobytes() for n, a in right.items()}
    for name in kept:
        assert any(name in line and str(folder) in line for line in told["out"].splitlines())
        assert not name.endswith("tensors") or name not in told["left"]
    metrics = told["metrics"] + (folder / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in metrics.splitlines()] == list(range(STEPS))
    assert f"of {STEPS} rows" in told["out"]
    assert "metrics.csv" in told["out"]


@pytest.mark.slow
def test_what_can_be_kept_nowhere_is_said_and_the_place_has_failed(
    on_a_small_disk: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    told = on_a_small_disk(tmp_path / "disk")
    assert told["code"] == 3, told["err"]
    assert "Traceback" not in told["err"]
    assert "accuracy" in told["out"]
    assert "weights.safetensors is LOST" in told["out"]
    assert told["left"].count("weights.safetensors") == 0
