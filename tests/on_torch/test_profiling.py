"""`--profile` writes a trace of the steps that it names, and changes no bit."""

from __future__ import annotations

import json

import pytest

from allranks.cli.display.following import in_words
from allranks.errors import RequestError
from allranks.job.config import resolve
from allranks.job.run_folder import read_events
from conftest import Train


@pytest.mark.slow
def test_a_profile_is_a_chrome_trace_in_the_run_folder(train: Train) -> None:
    found = train("bad_tasks:Good", ranks=2, steps=8, bitwise=True, profile=True)
    plain = train("bad_tasks:Good", ranks=2, steps=8, bitwise=True)
    assert found.summary["weights_sha256"] == plain.summary["weights_sha256"]
    (event,) = (e for e in read_events(found.run_dir) if e["event"] == "profiled")
    path = found.run_dir / "profile" / "rank-000.json"
    assert in_words(event) == [f"profile of steps 3 to 5: {path}"]
    names = [e.get("name") for e in json.loads(path.read_text())["traceEvents"]]
    assert names.count("aten::linear") == 3 * 8 // 2, (
        "a forward pass of each own shard, three times"
    )
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_short_training_is_profiled_as_far_as_it_came(train: Train) -> None:
    found = train("bad_tasks:Good", steps=3, profile=True)
    (event,) = (e for e in read_events(found.run_dir) if e["event"] == "profiled")
    assert (event["first"], event["last"]) == (3, 3)


def test_tensorflow_has_another_profiler() -> None:
    with pytest.raises(RequestError, match="its profiler is torch's"):
        resolve("digits-keras", {"engine": "tensorflow", "profile": True})
