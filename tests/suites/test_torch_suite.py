"""torch's own tests of `torch.distributed`: what Gloo passes, shared memory passes.

`torch_suite.json` has what every test came to on both backends; the docs quote its counts. What
runs here again is a part of it, on shared memory alone: tests that failed once, and every 32nd
by a hash of its name. `--exhaustive` runs all that Gloo passes.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
TABLE: list[dict[str, Any]] = json.loads((FOLDER / "torch_suite.json").read_text())["tests"]
REFUSED = {
    "test_get_backend": "`get_backend()` says `shared_memory`: a script can see what it runs on",
}
"""What Gloo passes and shared memory does not, and why not; `docs/suites.md` has the sentences."""
FAILED_ONCE = [
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_compile_static_graph",
    "test_ddp_profiling_torch_profiler",
    "test_all_reduce_coalesced_sum",
    "test_sparse_all_reduce_sum",
    "test_get_future",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_ddp_logging_data_cpu",
    "test_isend_torch_profiler",
    "test_send_recv_any_source",
    "test_ddp_hook_parity_powerSGD",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
    "test_ddp_uneven_input_exception",
]
PASSED = [row for row in TABLE if row["gloo"] == "pass" and row["test"] not in REFUSED]
WAYS = [(2, False), (2, True), (4, True)]


def is_drawn(name: str) -> bool:
    """Of none with a time limit of its own: a loaded machine may miss that."""
    if "barrier" in name or "timeout" in name:
        return False
    return name in FAILED_ONCE or hashlib.sha256(name.encode()).digest()[0] % 32 == 0


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "forced"), WAYS)
def test_what_gloo_passes_passes(
    ranks: int, forced: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rows = [row for row in PASSED if (row["ranks"], row["forced"]) == (ranks, forced)]
    names = [row["test"] for row in rows]
    if not request.config.getoption("exhaustive"):
        names = [name for name in names if is_drawn(name)]
    assert names
    out = tmp_path / "rows"
    command = [sys.executable, str(FOLDER / "torch_suite.py"), "--ranks", str(ranks)]
    command += ["--out", str(out), *["--forced"] * forced, *names]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["test"]: row["outcome"] for row in found} == dict.fromkeys(names, "pass")


def test_nothing_that_gloo_passes_fails_without_a_sentence() -> None:
    differs = [r for r in TABLE if r["gloo"] == "pass" and r["shared_memory"] != "pass"]
    assert {row["test"] for row in differs} == REFUSED.keys()
    assert {(row["ranks"], row["forced"]) for row in TABLE} == {*WAYS}
    assert set(FAILED_ONCE) <= {row["test"] for row in PASSED}
    page = (ROOT / "docs" / "suites.md").read_text().replace("\n", " ")
    assert all(name in page and why in page for name, why in REFUSED.items())


def test_the_counts_of_the_pages_are_those_of_the_table() -> None:
    page = (ROOT / "docs" / "suites.md").read_text()
    both = Counter((r["gloo"][:4], r["shared_memory"][:4]) for r in TABLE)
    passed = sum(number for (gloo, _), number in both.items() if gloo == "pass")
    ours = both["pass", "pass"]
    rows = re.findall(
        r"^\| (passes|fails|skipped) \| (passes|fails|skipped) \| (\d+) \|", page, re.M
    )
    words = {"pass": "passes", "fail": "fails", "skip": "skipped"}
    wanted = {(words[gloo], words[shared]): number for (gloo, shared), number in both.items()}
    assert {(gloo, shared): int(number) for gloo, shared, number in rows} == wanted
    ways = {(ranks, forced): f"{number} " for ranks, forced, number in by_way()}
    assert f"{len(TABLE)} tests" in page and f"{ours} of the {passed}" in page
    for (ranks, forced), number in ways.items():
        assert f"| {ranks} | {'yes' if forced else 'no'} | {number}|" in page
    assert f"| {ours} of {passed} |" in (ROOT / "README.md").read_text()


def by_way() -> list[tuple[int, bool, int]]:
    """How many tests Gloo passes, by the number of ranks and whether torch skips them here."""
    numbers = Counter((r["ranks"], r["forced"]) for r in TABLE if r["gloo"] == "pass")
    return [(ranks, forced, numbers[ranks, forced]) for ranks, forced in WAYS]
