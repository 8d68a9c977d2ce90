"""`allranks bench`: golden statistics, turns, what it concludes from figures, and a real one."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from allranks.cli.bench import bench
from allranks.errors import RequestError
from allranks.tools.bench.measuring import EXCHANGE, Found, Measured
from allranks.tools.bench.plan import WEAK, Combination, Plan, checked_plan
from allranks.tools.bench.results import request_of, rows_of, to_data
from allranks.tools.bench.statistics import Steps, interval, of_steps, ratio
from allranks.tools.bench.tables import proposal, table
from launch_host import Host

PLAN = Plan(
    "digits",
    tuple(Combination(s, n) for s in ("ddp", "zero1") for n in (1, 2, 4)),
    steps=10,
    warm_up=5,
    repeats=3,
)


def test_golden_statistics_of_steps() -> None:
    """The worked example of tf_cnn_benchmarks: the mean of times, not of speeds."""
    found = of_steps([10, 10, 10], [0.1, 0.1, 0.2])
    assert (round(found.speed, 1), round(found.uncertainty, 1), found.jitter) == (75.0, 13.6, 0.0)
    assert of_steps([1, 1, 1, 1], [1 / 2, 1 / 4, 1 / 6, 1 / 8]).jitter == pytest.approx(2 * 1.4826)


def test_golden_intervals_of_repeats() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, found.repeats) == (2.0, 3)
    assert found.high - 2 == pytest.approx(4.303 / math.sqrt(3)) == pytest.approx(2 - found.low)
    alone = interval([2.0])
    assert (alone.mean, alone.low, alone.high) == (2.0, -math.inf, math.inf)
    up = ratio([2.0, 4.0], [1.0, 2.0])
    assert (up.mean, up.low, up.high) == (2.0, 2.0, 2.0), "turn by turn: the machine was slower"
    assert up.agrees_with(found) and not up.agrees_with(interval([1.0, 1.0]))


def test_a_turn_has_each_combination_once_and_another_order_than_the_last() -> None:
    turns = [PLAN.turn(number) for number in range(6)]
    assert all(sorted(map(str, turn)) == sorted(map(str, PLAN.combinations)) for turn in turns)
    assert all(a != b for a, b in pairwise(turns))
    assert turns[1] == turns[0][::-1] and turns[2][0] == PLAN.combinations[1]


def run(turn: int, speed: float) -> Measured:
    return Measured(turn, Steps(speed, 1, 2), 1 / speed, {EXCHANGE: 0.25}, 100, 100, "abc")


def found_with(speeds: dict[tuple[str, int], list[float]]) -> list[Found]:
    found = []
    for (strategy, ranks), each in speeds.items():
        runs = [run(turn, speed) for turn, speed in enumerate(each)]
        found.append(Found(Combination(strategy, ranks), runs, "" if runs else "refused: no"))
    return found


FIGURES = {
    ("ddp", 1): [100.0, 50.0, 100.0],
    ("ddp", 2): [190.0, 94.0, 191.0],
    ("ddp", 4): [280.0, 110.0, 300.0],
    ("zero1", 1): [],
    ("zero1", 2): [90.0],
    ("zero1", 4): [170.0],
}


def test_speed_ups_are_turn_by_turn_over_the_fewest_ranks_of_a_strategy() -> None:
    rows = rows_of(found_with(FIGURES))
    two = rows[1]
    assert two.speed_up is not None and two.efficiency is not None and two.speed is not None
    assert two.speed_up.mean == pytest.approx((1.9 + 1.88 + 1.91) / 3) and two.base == 1
    assert two.efficiency.low > 0.9 and two.speed.high - two.speed.mean > 100
    assert rows[3].speed is None and rows[3].problem == "refused: no"
    assert rows[5].base == 2 and rows[5].efficiency is not None
    assert rows[5].efficiency.mean == pytest.approx(170 / 90 / 2)
    asked = request_of(rows, PLAN)
    assert asked is not None and (asked.strategy, asked.ranks) == ("ddp", 2)
    page = proposal(PLAN, rows, "a machine")
    assert "2 ranks with `--strategy ddp`: 158 samples a second" in page
    above = [line.split("|")[-2].strip() for line in page.splitlines() if line.startswith("| ")]
    assert above == [
        *("above 75%", "the base", "yes", "undecided"),
        *("refused: no", "the base", "one repeat: nobody knows"),
    ]
    assert "190" not in table(rows) and "1.90 ± 0.04" in table(rows)


def test_the_record_is_plain_json() -> None:
    data = json.loads(json.dumps(to_data(PLAN, found_with(FIGURES), {}), allow_nan=False))
    assert data["rows"][4]["speed"] == {"mean": 90.0, "low": None, "high": None, "repeats": 1}
    assert [(one["strategy"], one["turn"]) for one in data["runs"]][-2:] == [
        ("zero1", 0),
        ("zero1", 0),
    ]
    assert data["settings"]["repeats"] == 3 and data["schema"] == 1


def test_weak_scaling_gives_each_rank_as_many_samples() -> None:
    plan = dataclasses.replace(PLAN, scaling=WEAK, batch_size=16)
    words = plan.words_of(Combination("ddp", 4))
    assert words[words.index("--set") + 1] == "batch_size=64"
    with pytest.raises(RequestError, match="no --batch-size"):
        checked_plan(dataclasses.replace(PLAN, scaling=WEAK), ["ddp"])
    with pytest.raises(RequestError, match="one of them twice"):
        checked_plan(PLAN, ["ddp", "ddp"])


def test_a_dry_run_says_what_would_run_and_what_cannot(tmp_path: Path) -> None:
    words = ["digits", "--strategy", "single", "--strategy", "ddp", "--ranks", "1,2", "--dry-run"]
    folder = tmp_path / "bench"
    said = CliRunner().invoke(bench, [*words, "--json", "--run-dir", str(folder)])
    jobs = json.loads(said.stdout)["jobs"]
    assert [(job["strategy"], job["ranks"]) for job in jobs] == [
        ("single", 1),
        ("single", 2),
        ("ddp", 1),
        ("ddp", 2),
    ]
    assert ["refused" in job for job in jobs] == [False, True, False, False]
    assert not folder.exists()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--ranks", "1,x"), "no different numbers"),
        (("--strategy", "independent"), "train apart"),
        (("--", "--no-such-option"), "such option"),
        (("--scaling", "weak"), "no --batch-size"),
        (("--strategy", "nonsense"), "nonsense"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(
    words: tuple[str, ...], found: str, tmp_path: Path
) -> None:
    asked = ["digits", "--run-dir", str(tmp_path / "bench"), *words]
    said = CliRunner().invoke(bench, asked)
    assert isinstance(said.exception, RequestError) and found.lower() in str(said.exception).lower()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_bench_of_digits(host: Host, tmp_path: Path) -> None:
    """A combination that fails is named, the others are measured; what was counted is promised."""
    words = ("bench", "digits", "--strategy", "single", "--strategy", "ddp", "--ranks", "1,2")
    more = ("--steps", "8", "--warm-up", "3", "--repeats", "2", "--page", "proposal", "--json")
    launch = host.launch(
        tmp_path, *words, *more, "--run-dir", "b", "--", "--inject", "exit@rank=1,step=4"
    )
    assert launch.wait() == 1, launch.err
    said: dict[str, Any] = launch.summary()
    rows = {(row["strategy"], row["ranks"]): row for row in said["rows"]}
    assert rows["single", 2]["problem"].startswith("refused")
    assert "rank 1" in rows["ddp", 2]["problem"] and rows["ddp", 2]["speed"] is None
    assert rows["ddp", 1]["speed"]["repeats"] == rows["single", 1]["speed"]["repeats"] == 2
    assert json.loads((tmp_path / "b" / "bench.json").read_text())["rows"] == said["rows"]
    assert "1 of 4 were not measured: ddp on 2" in launch.err
    assert (tmp_path / "b" / "proposal.md").is_file()
    again = host.launch(tmp_path, *words, *more, "--run-dir", "b")
    assert again.wait() == 2 and "something in it" in again.err
