"""`allranks bench`: golden statistics, turns, what it concludes from figures, and a real one."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from allranks.cli.bench import BenchTable, _job
from allranks.cli.main import cli
from allranks.errors import RequestError
from allranks.job.job import Job, Tracing, names_in
from allranks.tools.bench.figure import sweep_curves, sweep_figure
from allranks.tools.bench.machine import all_reduce_bytes_per_s, copy_bytes_per_s
from allranks.tools.bench.measuring import EnergyMeter, RunSet
from allranks.tools.bench.peers import SAME, check_job
from allranks.tools.bench.plan import (
    WEAK,
    BenchPlan,
    Combination,
    checked_plan,
    swept,
    value_of,
    with_shares,
)
from allranks.tools.bench.reading import (
    EXCHANGE,
    Measured,
    StepSpeeds,
    interval,
    of_steps,
    ratio,
    timed,
)
from allranks.tools.bench.results import request_of, rows_of, to_data
from allranks.tools.bench.tables import proposal, table
from launch_host import Host

PLAN = BenchPlan(
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
    shares = {"compute": 0.5, EXCHANGE: 0.25, "data": 0.25}
    peaks = (2**20 * (1 + turn), None)
    return Measured(turn, StepSpeeds(speed, 1, 2), 1 / speed, shares, 100, 100, "abc", *peaks)


def found_with(speeds: dict[tuple[str, int], list[float]]) -> list[RunSet]:
    found = []
    for (strategy, ranks), each in speeds.items():
        runs = [run(turn, speed) for turn, speed in enumerate(each)]
        found.append(RunSet(Combination(strategy, ranks), runs, "" if runs else "refused: no"))
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
    assert "a rank held 3.0 MiB at most" in page and page.count("| 3.0 MiB |") == 3
    assert above == [
        *("above 75%", "the base", "yes", "undecided"),
        *("refused: no", "the base", "one repeat: unknown"),
    ]
    assert "190" not in table(rows) and "1.90 ± 0.04" in table(rows)


def test_the_record_is_plain_json() -> None:
    data = json.loads(json.dumps(to_data(PLAN, found_with(FIGURES), {}), allow_nan=False))
    assert data["rows"][4]["speed"] == {"mean": 90.0, "low": None, "high": None, "repeats": 1}
    assert [(one["strategy"], one["turn"]) for one in data["runs"]][-2:] == [
        ("zero1", 0),
        ("zero1", 0),
    ]
    assert data["settings"]["repeats"] == 3 and data["schema"] == 2
    assert [row["peak_bytes"] for row in data["rows"][:4]] == [3 * 2**20] * 3 + [None]
    assert {data["rows"][0][name] for name in ("compute", "input")} == {0.5, 0.25}
    assert data["rows"][0]["joules"] is data["rows"][0]["device_peak_bytes"] is None


def rows_at(times: list[float], first: int = 0) -> list[dict[str, Any]]:
    return [
        {"step": first + number, "samples": 10, "loss": 1.0 / (number + 1), "monotonic": at}
        for number, at in enumerate(times)
    ]


def test_a_step_behind_an_evaluation_is_not_timed() -> None:
    rows = rows_at([0.0, 0.1, 0.2, 9.2, 9.4])
    found = timed(rows, 1, {3})
    assert not isinstance(found, str)
    assert found.step_s == pytest.approx(0.4 / 3) and found.steps.speed == pytest.approx(75.0)
    assert found.losses == (1, 1 / 2, 1 / 3, 1 / 4, 1 / 5), "of every step, the warm-up too"
    assert "1 steps after the warm-up" in str(timed(rows, 4, set()))
    early = timed(rows, 4, {3}, ended_early=True)
    assert not isinstance(early, str) and early.step_s == pytest.approx(0.3 / 2)


def test_shares_are_compared_with_even_ones() -> None:
    names = with_shares(["ddp", "zero1:reduce=tree"], ["even", "auto"])
    assert names == [
        *("ddp", "ddp --share auto"),
        *("zero1:reduce=tree", "zero1:reduce=tree --share auto"),
    ]
    words = PLAN.words_of(Combination(names[1], 2))
    assert words[words.index("ddp") :][:3] == ["ddp", "--share", "auto"]
    assert Combination(names[1], 2).name != Combination(names[0], 2).name
    assert with_shares(["ddp"], []) == ["ddp"]


def test_the_time_to_a_metric_is_of_the_runs_that_reached_it() -> None:
    """A run that did not reach it has no time, and nobody guesses one."""
    plan = dataclasses.replace(PLAN, steps=0, until="accuracy=0.9")
    words = plan.words_of(Combination("ddp", 2))
    assert words[words.index("--until") + 1] == "accuracy=0.9" and "--steps" not in words
    found = found_with({("ddp", 1): [100.0, 100.0, 100.0], ("ddp", 2): [150.0, 150.0]})
    seconds = {(1, 0): 4.0, (1, 2): 6.0}
    for one in found:
        one.runs = [
            dataclasses.replace(
                run,
                until_s=seconds.get((one.combination.ranks, run.turn)),
                until_step=40 if (one.combination.ranks, run.turn) in seconds else None,
                joules=100.0 * (1 + run.turn),
            )
            for run in one.runs
        ]
    first, second = rows_of(found, plan.until)
    assert first.until_s is not None and first.until_s.mean == 5.0 and first.until_runs == 2
    assert first.until_s.high - 5 == pytest.approx(12.706 * math.sqrt(2) / math.sqrt(2))
    assert (first.joules, first.joules_until) == (200.0, 200.0)
    assert (second.until_s, second.until_runs, second.joules_until) == (None, 0, None)
    told = table([first, second])
    assert "5.00 ± 12.71 (2 runs)" in told and "not reached" in told
    page = proposal(plan, [first, second], "a machine")
    assert "| ddp | 1 | 5.00 ± 12.71 (2 runs) | 40 | 200 |" in page
    assert "| ddp | 2 | not reached |  | unknown |" in page
    data = to_data(plan, found, {})
    assert data["rows"][1]["until_s"] is None and data["rows"][1]["until_runs"] == 0


def test_a_peer_whose_loss_is_another_is_marked() -> None:
    """Beside an exact strategy of ours on as many ranks; scaling is over its own fewest ranks."""
    ours = RunSet(Combination("ddp", 2), [run(0, 100.0)], losses=(2.0, 1.0, 0.5))
    rarely = RunSet(Combination("local-sgd:every=4", 2), [run(0, 120.0)], losses=(2.0, 1.5, 0.9))
    peer = RunSet(Combination("hand", 2, is_peer=True), [run(0, 90.0)], losses=(2.0, 1.000001, 0.5))
    other = RunSet(Combination("fabric", 2, True), [run(0, 90.0)], losses=(2.0, 1.0, 0.51))
    alone = RunSet(Combination("hand", 4, True), [run(0, 90.0)], losses=(2.0, 1.0, 0.5))
    rows = rows_of([rarely, ours, peer, other, alone])
    assert [row.loss_apart for row in rows[:2]] == [None, None]
    assert rows[2].loss_apart == pytest.approx(1e-6) and rows[3].loss_apart == pytest.approx(0.02)
    assert rows[4].loss_apart is None and rows[4].base == 2
    assert rows[2].base == 2, "its own, not that of a strategy"
    told = table(rows).splitlines()
    assert "as ours, 1e-06" in told[3] and "DIFFERS by 2e-02" in told[4]
    assert told[3].startswith("hand (peer)") and "nothing of ours" in told[5]
    assert request_of(rows[2:], PLAN) is None, "nobody asks for a peer"


def test_a_sweep_is_each_strategy_that_has_the_option_with_each_value() -> None:
    strategies = ["single", "model-parallel:parts=2", "gpipe"]
    found, option = swept(strategies, "split=1,4,16")
    assert found == [
        "single",
        *(f"model-parallel:parts=2,split={m}" for m in (1, 4, 16)),
        "gpipe",
    ] and (option == "split")
    plan = BenchPlan("digits", tuple(Combination(s, 1) for s in found), 5, 2, 2, swept="split")
    times = {"single": 10.0, found[1]: 9.0, found[2]: 6.0, found[3]: 12.0, "gpipe": 8.0}
    rows = rows_of(
        [
            RunSet(Combination(s, 1), [run(t, 1000 / ms + t) for t in (0, 1)])
            for s, ms in times.items()
        ]
    )
    curves = {curve.name: curve.points for curve in sweep_curves(plan, rows)}
    assert [point[0] for point in curves["model-parallel:parts=2"]] == [1, 4, 16]
    assert [round(p[1], 1) for p in curves["model-parallel:parts=2"]] == [9.0, 6.0, 11.9]
    assert {point[1] for point in curves["single"]} == {curves["single"][0][1]}, "a level line"
    figure = sweep_figure(plan, rows)
    assert figure is not None and figure.count("<polyline") == 3
    written = ["ddp:bucket_mb=1", "ddp"]
    assert swept(written, "reduce=mean,top-k(k=1,chunk=64)")[0] == [
        *(f"ddp:bucket_mb=1,reduce={r}" for r in ("mean", "top-k(k=1,chunk=64)")),
        *(f"ddp:reduce={r}" for r in ("mean", "top-k(k=1,chunk=64)")),
    ]
    assert value_of("ddp:reduce=top-k(chunk=64,k=1,x=2),bucket_mb=3", "k") is None
    assert value_of("ddp:reduce=top-k(chunk=64,k=1,bucket_mb=2),bucket_mb=3", "bucket_mb") == 3
    with pytest.raises(RequestError, match="not closed"):
        swept(["ddp"], "reduce=mean,top-k(k=1")
    for bad, why in (("splat=1,2", "no strategy with that option"), ("split=4", "fewer than two")):
        with pytest.raises(RequestError, match=why):
            swept(strategies, bad)


def test_energy_is_counted_by_package_over_the_end_of_the_counter(tmp_path: Path) -> None:
    def write(counts: dict[str, int]) -> None:
        for name, count in counts.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "energy_uj").write_text(f"{count}\n")
            (tmp_path / name / "max_energy_range_uj").write_text("10000000\n")

    write({"intel-rapl:0": 1_000_000, "intel-rapl:1": 9_500_000, "intel-rapl:0:0": 5})
    meter = EnergyMeter(tmp_path)
    write({"intel-rapl:0": 3_000_000, "intel-rapl:1": 500_000, "intel-rapl:0:0": 9_000_000})
    assert meter.joules() == pytest.approx(2.0 + 1.0)
    assert EnergyMeter(tmp_path / "none").joules() is None
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert meter.joules() is None, "of one package alone nobody asked"


def test_the_machine_copies_no_faster_than_memory_can() -> None:
    assert 1e8 < copy_bytes_per_s(1) < 1e12


def test_the_table_grows_while_a_bench_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only on a terminal; elsewhere a line for each run."""
    plan = dataclasses.replace(PLAN, combinations=PLAN.combinations[:3])
    one, two, four = plan.combinations
    shown = BenchTable(plan, {four: "refused: why"})
    said: list[str] = []
    monkeypatch.setattr("allranks.cli.bench.say", said.append)
    with shown.shown():
        watcher = shown.watcher()
        watcher.began(one, 0)
        watcher.ended(one, 0, run(0, 100.0))
        watcher.ended(one, 1, run(1, 110.0))
        watcher.began(two, 0)
        watcher.tick()
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(shown.drawn())
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[1][:6] == ["ddp", "1", "2/3", "105", "±", "64"] and lines[1][6:] == [
        *("25%", "2.0", "MiB")
    ]
    assert lines[2][-3:] == ["ddp", "2", "0/3"] and lines[2][1] == "s", "it runs"
    assert lines[3][:5] == ["ddp", "4", "0/3", "refused:", "why"]
    assert said == [
        "turn 1  ddp on 1: 100 samples/s",
        "turn 2  ddp on 1: 110 samples/s",
    ]


def test_weak_scaling_gives_each_rank_as_many_samples() -> None:
    plan = dataclasses.replace(PLAN, scaling=WEAK, batch_size=16)
    words = plan.words_of(Combination("ddp", 4))
    assert words[words.index("--set") + 1] == "batch_size=64"
    with pytest.raises(RequestError, match="no --batch-size"):
        checked_plan(dataclasses.replace(PLAN, scaling=WEAK), ["ddp"])
    with pytest.raises(RequestError, match="one of them twice"):
        checked_plan(PLAN, ["ddp", "ddp"])


@pytest.fixture
def every_peer_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused for another reason is refused without the peer's packages, too."""
    monkeypatch.setattr("allranks.cli.bench.look_at_program", lambda jobs: None)
    monkeypatch.setattr("allranks.tools.bench.peers.find_spec", lambda _name: object())


def test_a_dry_run_says_what_would_run_and_what_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allranks.cli.bench.look_at_program", lambda jobs: None)
    words = ["digits", "--strategy", "single", "--strategy", "ddp", "--ranks", "1,2", "--dry-run"]
    folder = tmp_path / "bench"
    said = CliRunner().invoke(cli, ["bench", *words, "--json", "--run-dir", str(folder)])
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
        (("--peers", "horovod"), "no peer 'horovod'"),
        (("--peers", "tf", "--strategy", "independent"), "train apart"),
        (("--sweep", "split=1,2"), "no strategy with that option"),
        (("--until", "loss=0.1"), "which way is better"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(
    words: tuple[str, ...], found: str, tmp_path: Path, every_peer_is_installed: None
) -> None:
    asked = ["digits", "--run-dir", str(tmp_path / "bench"), *words]
    said = CliRunner().invoke(cli, ["bench", *asked])
    assert isinstance(said.exception, RequestError) and found.lower() in str(said.exception).lower()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("text", "words"), [("x = 1\n", ()), (None, ("--dry-run",))])
def test_a_program_without_a_task_is_refused_before_the_machine_is_measured(
    text: str | None, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allranks.cli.bench.machine_facts", lambda: pytest.fail("measured"))
    program = tmp_path / "nope.py"
    if text is not None:
        program.write_text(text)
    said = CliRunner().invoke(
        cli, ["bench", str(program), "--run-dir", str(tmp_path / "bench"), *words]
    )
    assert isinstance(said.exception, RequestError) and "nope.py" in str(said.exception)
    assert not (tmp_path / "bench").exists()


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
    assert rows["ddp", 1]["peak_bytes"] > 2**26 and rows["ddp", 2]["peak_bytes"] is None
    assert json.loads((tmp_path / "b" / "bench.json").read_text())["rows"] == said["rows"]
    assert "1 of 4 were not measured: ddp on 2" in launch.err
    assert (tmp_path / "b" / "proposal.md").is_file()
    again = host.launch(tmp_path, *words, *more, "--run-dir", "b")
    assert again.wait() == 2 and "something in it" in again.err


@pytest.mark.slow
def test_what_ranks_sum_in_a_second_is_measured_by_a_job_of_its_own() -> None:
    """Here, and not in a fork of the host: a fork removes folders of its parent when it ends."""
    found = all_reduce_bytes_per_s(Job(ranks=2))
    assert found is not None and found > 1e6 and all_reduce_bytes_per_s(Job(ranks=1)) is None


@pytest.mark.slow
@pytest.mark.timeout(660)  # so that it is this test's own limit that ends it
@pytest.mark.cases(
    ("program", "peers", "fields"),
    [("digits", "hand,accelerate,deepspeed-zero1", ("shards=2", "dropout=0"))],
    exhaustive=[("digits-keras", "tf", ("shards=2", "dropout=0"))],
)
def test_peers_train_what_we_train(
    host: Host, tmp_path: Path, program: str, peers: str, fields: tuple[str, ...]
) -> None:
    """The same weights, samples and optimizer: in every step the loss is ours but for rounding."""
    words = ("bench", program, "--ranks", "2", "--peers", peers, "--repeats", "1", "--json")
    if program == "digits-keras":
        words += ("--strategy", "multi-worker-mirrored")
    sets = [word for field in fields for word in ("--set", field)]
    more = ("--steps", "6", "--warm-up", "2", "--run-dir", "b", "--", *sets)
    launch = host.launch(tmp_path, *words, *more)
    assert launch.wait(within_s=600) == 0, launch.err
    rows = {row["strategy"]: row for row in launch.summary()["rows"] if row["is_peer"]}
    assert list(rows) == peers.split(",")
    for row in rows.values():
        assert row["speed"]["mean"] > 0 and row["peak_bytes"] > 2**26
        assert row["loss_apart"] <= 1e-4, row


@pytest.mark.slow
def test_a_peer_that_does_not_end_is_ended_and_named(host: Host, tmp_path: Path) -> None:
    """Nobody else watches over it; importing torch alone takes longer than this limit."""
    words = ("bench", "digits", "--ranks", "2", "--peers", "hand", "--peer-limit", "1", "--json")
    launch = host.launch(tmp_path, *words, "--repeats", "1", "--steps", "4", "--warm-up", "2")
    launch.wait()
    ours, peer = launch.summary()["rows"]
    assert ours["speed"]["mean"] > 0 and peer["speed"] is None
    assert "interrupted (time limit)" in launch.err


@pytest.mark.parametrize(
    ("peer", "words", "found"),
    [
        ("tf", (), "a task of torch"),
        ("hand", ("--precision", "fp64"), "precision = fp64"),
        ("hand", ("--bitwise",), "bitwise = True"),
        ("hand", ("--place", "slurm", "--nodes", "2"), "no part of this machine"),
        ("hand", ("--checkpoint-every", "5"), "writes no checkpoints"),
        ("hand", ("--inject", "exit@rank=1,step=4"), "in our ranks alone"),
        ("hand", ("--log", "csv"), "its losses, and nothing else"),
    ],
)
def test_what_a_peer_does_not_have_is_refused_by_name(
    peer: str, words: tuple[str, ...], found: str, tmp_path: Path, every_peer_is_installed: None
) -> None:
    asked = ["digits", "--ranks", "2", "--peers", peer, "--dry-run", "--json", "--", *words]
    said = CliRunner().invoke(cli, ["bench", *asked])
    jobs = {job["strategy"]: job for job in json.loads(said.stdout)["jobs"]}
    assert "refused" not in jobs["ddp"] and jobs[peer]["refused"].startswith("refused: ")
    job = jobs[peer]["words"]
    with pytest.raises(RequestError, match=found):
        check_job(peer, _job(job))


def test_an_installed_package_has_no_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_peer_is_installed: None
) -> None:
    monkeypatch.setattr("allranks.tools.bench.peers.SCRIPT", tmp_path / "train.py")
    said = CliRunner().invoke(cli, ["bench", "digits", "--peers", "hand", "--dry-run"])
    assert isinstance(said.exception, RequestError)
    assert f"no {tmp_path / 'train.py'}" in said.exception.found
    assert "project's checkout, under benchmarks/peers" in said.exception.why


def test_of_each_option_of_a_job_somebody_has_said_what_peers_make_of_it() -> None:
    """One that they pass over in silence would make them another training than ours."""
    checked = {"engine", "place"}
    they_have = {"program", "task", "steps", "seed", "ranks", "nodes", "threads"}
    ours_alone = {"strategy", "until", "backend", "prefetch", "run_dir"}
    with_others = {"patience", "eval_every", "keep", "loss_scale", "devices", "share_device"}
    with_others |= {"hang_timeout"}
    no_training_of_ours = {"witness", "first_check", *names_in(Tracing)}
    said = checked | they_have | ours_alone | with_others | no_training_of_ours
    assert said.isdisjoint(SAME) and {field.name for field in dataclasses.fields(Job)} == {
        *said,
        *SAME,
    }


@pytest.mark.slow
@pytest.mark.cases(
    ("program", "strategy", "peer"),
    [("digits", "ddp", "hand")],
    exhaustive=[("digits-keras", "multi-worker-mirrored", "tf")],
)
def test_a_task_that_no_peer_trains_is_refused_before_anything_runs(
    program: str, strategy: str, peer: str
) -> None:
    words = ["--strategy", strategy, "--ranks", "2", "--peers", peer, "--dry-run", "--json"]
    said = CliRunner().invoke(cli, ["bench", program, *words, "--", "--set", "clip_norm=1"])
    ours, theirs = json.loads(said.stdout)["jobs"]
    assert "refused" not in ours
    assert theirs["refused"].startswith("refused: a task with clip_norm; a peer takes its model")
