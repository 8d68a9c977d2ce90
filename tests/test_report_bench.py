"""`allranks report` of benches and of checks: figures that are known, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.main import main
from allranks.job.run_folder import read_rows
from allranks.tools.bench.measuring import RunSet
from allranks.tools.bench.plan import BenchPlan, Combination
from allranks.tools.bench.reading import Measured, StepSpeeds
from allranks.tools.bench.results import rows_of, to_data
from allranks.tools.report.bench_page import charts_of_bench, page_of_benches, read_bench
from test_report_in_a_browser import brightness, look
from test_report_page import Door, Elements, words_of

MACHINE: dict[str, Any] = {
    "host": "node0",
    "processor": "A <processor>",
    "cores": 2,
    "memory_bytes": 2**34,
    "load_1min": 0.25,
    "copy_bytes_per_s": 2.0**33,
    "copy_all_cores_bytes_per_s": 2.0**34,
    "all_reduce_bytes_per_s": None,
}
SPEEDS = {
    ("ddp", 1): (100.0, 102.0),
    ("ddp", 2): (190.0, 194.0),
    ("ddp", 4): (200.0, 208.0),
    ("fsdp", 1): (),
    ("fsdp", 2): (80.0, 82.0),
    ("hand", 2): (150.0, 151.0),
}


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Door:
    """`door(*words)`: exit code, standard output and standard error of `allranks report`."""

    def call(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["allranks", "report", *map(str, words)])
        code: Any = 0
        try:
            main()
        except SystemExit as left:
            code = left.code
        return int(code or 0), *capsys.readouterr()

    return call


def run_of(turn: int, speed: float, ranks: int) -> Measured:
    share = 0.1 * ranks
    shares = {"compute": 0.9 - share, "exchange": share, "data": 0.1}
    steps = StepSpeeds(speed, 1.0, 1.0)
    return Measured(turn, steps, 32 / speed, shares, 2048.0, 2048.0, "abc", 2**28 * ranks)


def found_of(strategy: str, ranks: int, speeds: tuple[float, ...]) -> RunSet:
    one = Combination(strategy, ranks, is_peer=strategy == "hand")
    runs = [run_of(turn, speed, ranks) for turn, speed in enumerate(speeds)]
    losses = (2.0, 1.5) if strategy != "hand" else (2.0, 1.6)
    return RunSet(one, runs, "" if runs else "refused: <none>", losses)


def write_bench(
    path: Path, plan: BenchPlan | None = None, found: list[RunSet] | None = None
) -> Path:
    plan = plan or BenchPlan("digits", (), 30, 10, 2)
    found = found or [found_of(*key, speeds) for key, speeds in SPEEDS.items()]
    path.mkdir(parents=True)
    (path / "bench.json").write_text(json.dumps(to_data(plan, found, MACHINE)))
    return path


def swept_bench(path: Path) -> Path:
    """Pieces in flight by the formula of a pipeline of two parts: 2 (m + 1) (2 + 32 / m) ms."""
    plan = BenchPlan("waiting", (), 30, 10, 2, swept="split")
    found = []
    for m in (1, 2, 4, 8, 16, 32):
        speed = 32e3 / (2 * (m + 1) * (2 + 32 / m))
        found.append(found_of(f"model-parallel:parts=2,split={m}", 1, (speed, speed)))
    return write_bench(path, plan, [*found, found_of("single", 1, (240.0, 240.0))])


def test_the_record_of_a_bench_is_read_as_it_was_written(tmp_path: Path) -> None:
    bench = read_bench(write_bench(tmp_path / "b"), "b")
    found = [found_of(*key, speeds) for key, speeds in SPEEDS.items()]
    assert bench.rows == tuple(rows_of(found))
    assert bench.plan == BenchPlan("digits", (), 30, 10, 2)


def test_scaling_is_drawn_beside_the_ideal_with_intervals(tmp_path: Path) -> None:
    charts = {
        chart.title: chart for chart in charts_of_bench(read_bench(write_bench(tmp_path / "b"), ""))
    }
    up = charts["Speed-up, strong scaling"]
    lines = {line.label: line for line in up.lines}
    assert (
        lines["ddp"].series.xs == lines["ideal"].series.xs == lines["ideal"].series.ys == (1, 2, 4)
    )
    assert lines["ddp"].series.ys == pytest.approx((1, (1.9 + 194 / 102) / 2, (2 + 208 / 102) / 2))
    low, high = lines["ddp"].ranges[1]
    assert low < lines["ddp"].series.ys[1] < high and high - low == pytest.approx(0.0249, abs=1e-3)
    assert lines["fsdp"].series.xs == (2.0,), "what was not measured has no point"
    line = {line.label: line for line in charts["Efficiency"].lines}["75%"]
    assert set(line.series.ys) == {0.75}
    drawn = {path.colour: path.ranges for path in up.paths if path.style == "line"}
    assert drawn[0].count("M") == 2, "a point of the base has no interval"
    memory = charts["Peak memory of a rank, MiB"].lines[0]
    assert memory.series.ys == (256, 512, 1024)
    share = charts["Part of the time in exchange, %"].lines[0]
    assert share.series.ys == pytest.approx((10, 20, 40))


def test_a_sweep_is_drawn_over_its_option_as_a_u(tmp_path: Path) -> None:
    bench = read_bench(swept_bench(tmp_path / "b"), "b")
    (chart,) = charts_of_bench(bench)
    lines = {line.label: line.series for line in chart.lines}
    ys = lines["model-parallel:parts=2"].ys
    assert lines["model-parallel:parts=2"].xs == (1, 2, 4, 8, 16, 32)
    assert min(ys) == ys[2] == pytest.approx(100) and ys[0] > ys[1] > ys[2] < ys[3] < ys[4] < ys[5]
    assert len(set(lines["single"].ys)) == 1
    places = [tick.place for tick in chart.x_ticks]
    assert [tick.text for tick in chart.x_ticks] == ["1", "2", "4", "8", "16", "32"]
    assert places == pytest.approx([0, 20, 40, 60, 80, 100]), "by their logarithms"
    words = words_of(page_of_benches([bench]))
    assert "The sweep" in words and "speed-up" not in words


def test_the_page_of_a_bench_says_what_it_found(door: Door, tmp_path: Path) -> None:
    bench = write_bench(tmp_path / "b")
    assert door(bench) == (0, f"page {bench / 'report.html'}\n", "")
    page = (bench / "report.html").read_text()
    words = words_of(page)
    for told in (
        "digits 3 strategies on 1, 2, 4 ranks · strong scaling · 2 turns · 30 steps each",
        "samples/s, fastest 204 ddp on 4",
        "efficiency on 4, best 0.50 ddp",
        "ranks to ask for 2 ddp, above 75% surely",
        "peers with another loss 1 hand",
        "peak memory 1.0 GiB ddp on 4",
        "DIFFERS by 7e-02",
        "fsdp on 1: refused: <none>",
        "0.95 ± 0.01 yes 20% 2.0 KiB 2.0 KiB 512.0 MiB",
        "A <processor>, 2 processors, 16.0 GiB, copies 8.0 GiB/s on one core, 16.0 GiB/s on all",
        "2 ranks with --strategy ddp : 192 samples a second",
    ):
        assert told in words, told
    found = Elements(page)
    assert found.names.count("script") == 2 and "none" not in found.names
    assert not re.search(r"https?:|@import|@font-face|url\(", page)
    code, out, _ = door(bench, "--json")
    assert code == 0 and json.loads(out)["benches"] == [str(bench)]


def test_noise_asks_for_more_repeats_and_for_no_ranks(tmp_path: Path) -> None:
    speeds = {1: (700.0, 1650.0), 2: (500.0, 1700.0)}
    noisy = [found_of("ddp", ranks, each) for ranks, each in speeds.items()]
    bench = read_bench(write_bench(tmp_path / "noisy", found=noisy), "noisy")
    words = words_of(page_of_benches([bench]))
    assert "None yet: ddp on 2 may be above" in words and "repeat more, --repeats 7" in words
    assert "ranks to ask for" not in words and "efficiency on 2, best 0.44 ddp ± 1.00" in words
    assert all(chart.scale.y[0] == 0 for chart in charts_of_bench(bench)), "no negative rates"


def test_several_benches_are_beside_each_other(door: Door, tmp_path: Path) -> None:
    one, two = write_bench(tmp_path / "one"), write_bench(tmp_path / "two")
    out = tmp_path / "page.html"
    assert door(one, two, "--out", out)[0] == 0
    words = words_of(out.read_text())
    assert "2 benches of digits A one B two Beside each other Samples per second" in words
    assert "ddp 2 192 ± 25 192 ± 25" in words
    numbers = [int(n) for n in re.findall(r'data-chart="(\d+)"', out.read_text())]
    assert numbers == list(range(10)), "each chart finds its own numbers"


def a_check(equal: bool) -> dict[str, Any]:
    first = {
        "step": 3,
        "stage": "gradient",
        "tensor": "0.weight",
        "size": 0.5,
        "found": "<off> by half",
        "hint": "a mean of means",
    }
    look = {
        "ranks": 3,
        "precision": "fp64",
        "bitwise": False,
        "asked": True,
        "steps": 20,
        "tolerance": 1e-10,
        "largest_difference": 3e-15,
        "one_process": False,
        "evaluation_equal": True,
        "first_difference": None if equal else first,
    }
    named = {"equal": equal, "program": "digits", "strategy": "ddp"}
    return {
        **named,
        **look,
        "looks": [{**look, "first_difference": None}, look],
        "not_checked": ["x"],
    }


def test_the_page_of_a_check(door: Door, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "check.json").write_text(json.dumps(a_check(equal=False)) + "\n")
    assert door(tmp_path / "kept")[0] == 0
    words = words_of((tmp_path / "kept" / "report.html").read_text())
    assert "digits different from one process ddp" in words
    assert "gradient of 0.weight at step 3, on 3 ranks, fp64" in words
    assert "<off> by half looks like: a mean of means" in words
    assert "3 ranks, fp64 20 1.0e-10 3.0e-15 equal" in words and "Not checked: x." in words
    (tmp_path / "good.json").write_text("equal: digits\n" + json.dumps(a_check(equal=True)) + "\n")
    drift = {
        "strategy": "local-sgd:every=4",
        "ranks": 2,
        "precision": "fp32",
        "exact_at": "every=1",
    }
    step = {"loss": 2.0, "loss_of_one_process": 2.0, "weights_apart": 0.25}
    drift |= {"steps": [{"step": 0, **step}, {"step": 1, **step, "weights_apart": 0.5}]}
    cause = {"says": "rank 1 weighs half", "do": "mend <it>"}
    said = a_check(equal=False) | {"drift": drift}
    said["looks"][1]["cause"] = cause
    (tmp_path / "why.json").write_text(json.dumps(said))
    assert door(tmp_path / "why.json")[0] == 0
    words = words_of((tmp_path / "report.html").read_text())
    assert "cause, confirmed: rank 1 weighs half do: mend <it>" in words
    assert "local-sgd:every=4 on 2 ranks, fp32: measured, and not judged." in words
    assert "1 0.5" in words and "looks like" not in words
    (tmp_path / "open.json").write_text(json.dumps({**said, "equal": None, "looks": []}))
    assert door(tmp_path / "open.json", "--out", tmp_path / "open.html")[0] == 0
    assert "digits not judged ddp" in words_of((tmp_path / "open.html").read_text())
    out = tmp_path / "page.html"
    assert door(tmp_path / "kept", tmp_path / "good.json", "--out", out)[0] == 0
    words = words_of(out.read_text())
    assert "A kept different from one process B good.json equal to one process" in words


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("bench", "check.json"), "benches and checks"),
        (("bench", "--trace", "trace.json"), "found: benches"),
        (("torn.json",), "no record of a check"),
        (("edited.json",), "found: KeyError: 'file'"),
        (("old",), "schema 1"),
    ],
)
def test_what_is_no_record_is_refused(
    door: Door, tmp_path: Path, words: tuple[str, ...], found: str
) -> None:
    write_bench(tmp_path / "bench")
    (tmp_path / "check.json").write_text(json.dumps(a_check(equal=True)))
    (tmp_path / "torn.json").write_text('{"equal": true}\n')
    of_script = {"findings": [{}], "unwatched": [], "ranks": 2}
    (tmp_path / "edited.json").write_text(json.dumps(of_script))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "bench.json").write_text('{"schema": 1}')
    asked = [str(tmp_path / w) if not w.startswith("--") else w for w in words]
    code, out, err = door(*asked)
    assert (code, out) == (2, "") and found in err
    assert not list(tmp_path.rglob("*.html"))


def test_a_script_of_which_not_all_was_watched_is_not_called_good(
    door: Door, tmp_path: Path
) -> None:
    record = {"findings": [], "unwatched": ["Loaders.install: gone"], "ranks": 2, "doubt": "so"}
    (tmp_path / "check.json").write_text(json.dumps({**record, "command": "python train.py"}))
    page = tmp_path / "page.html"
    assert door(str(tmp_path / "check.json"), "--out", str(page))[0] == 0
    text = page.read_text()
    assert "undecided: nothing found on 2 ranks; so, but not all was watched" in text
    assert "Not watched: Loaders.install: gone." in text


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_of_a_bench_in_a_browser(tmp_path: Path, width: int, dark: bool) -> None:
    benches = [
        read_bench(write_bench(tmp_path / "one"), "one"),
        read_bench(swept_bench(tmp_path / "a_long_name_of_a_bench_without_a_space"), "two"),
    ]
    found = look(tmp_path, page_of_benches(benches), width, dark)
    assert found["width"] == found["client"] > width - 20, "nothing is wider than the page"
    assert found["wide"] == []
    assert found["right"] <= width
    assert (brightness(found["paper"]) < 60) == dark == (brightness(found["ink"]) > 200)
    assert found["said"][:4] == ["ranks", "4", "ddp", "2.0196"], "under the pointer"
    assert found["first"][:4] == ["ranks", "1", "ddp", "1"], "by the keyboard"
    assert found["plots"] == 6 and found["unnamed"] == 0


@pytest.mark.slow
def test_a_check_leaves_its_record_where_it_keeps_its_runs(
    door: Door, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    words = ["check", "digits", "--strategy", "single", "--steps", "2", "--keep-runs", str(kept)]
    monkeypatch.setattr(sys, "argv", ["allranks", *words, "--json"])
    main()
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(read_rows(kept / "check.json")) == [said] and said["equal"]
    assert door(kept)[0] == 0
    assert "digits equal to one process" in words_of((kept / "report.html").read_text())
