"""`allranks report`: the page and the trace of run folders whose every number is known."""

from __future__ import annotations

import fcntl
import html
import itertools
import json
import math
import os
import re
import sys
import tracemalloc
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from allranks.cli.main import cli, main
from allranks.job.job import write_toml
from allranks.job.run_folder import read_rows
from allranks.launcher.scripts.plan import CommandRequest
from allranks.launcher.start import Result
from allranks.tools.report.numbers import Series, thinned
from allranks.tools.report.plot import charts_of, constants_of
from allranks.tools.report.records import read_run
from allranks.training.record.digests import DigestLog
from report_runs import DIGEST, event, job_toml, write_lines, write_phases, write_run

Door = Callable[..., tuple[int, str, str]]


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


class Elements(HTMLParser):
    """The names and the attributes of all elements, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def words_of(page: str) -> str:
    """What a person reads, on one line; cells and blocks apart by a space."""
    body = re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_a_page_says_what_a_run_has_recorded(door: Door, tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "one")
    assert door(run) == (0, f"page {run / 'report.html'}\n", "")
    words = words_of((run / "report.html").read_text())
    for told in (
        "digits done 2 ranks on 2 nodes · ddp · simulated · cpu · fp32",
        "accuracy, evaluated 0.75 after step 12",
        "training loss 0.5967 mean of the last epoch",
        "samples/s 160 of all ranks",
        "steps 12",
        "time 7 s",
        "restarts 1 2 steps made again",
        "equal to one process proved 2 steps on 2 ranks agree with one process",
        "sent in a step 2.0 KiB by rank 0; its card says 2.0 KiB",
        f"weights, sha256 {DIGEST}",
        "3 s all ranks started again from step 6; 2 steps lost rank 1 on node1 failed first",
        "1 starting 1 3 s 1 s",  # rank, phase, attempt, from, for
        "0 training 0 2 s 900 ms",
        "compute communication and waiting input evaluation",
        "1.25 s (45.5 %) 0 ms (0.0 %) 0 ms (0.0 %) 0 ms (0.0 %) 0 ms (0.0 %) 750 ms",
        "1 trains node1 1 cpu 4.0 KiB",
        "optimizer together process, at most 0 1.0 KiB 1.0 KiB 2.0 KiB 4.0 KiB 256.0 MiB",
        "1 1.0 KiB 1.0 KiB 2.0 KiB 4.0 KiB 512.0 MiB",
        "Learning rate: 0.003 at every step.",
        "allranks train digits --ranks 2 --set lr=0.003",
        "threads 1 (rank 0) threads 2 (rank 1)",
        "NCCL_AUTH [redacted]",
        "the kernel counts it: activations are in it",
    ):
        assert told in words, told


def test_curves_and_phases_are_the_recorded_numbers(door: Door, tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    code, out, _ = door(run, "--json")
    (told,) = json.loads(out)["runs"]
    assert code == 0
    curves = told["curves"]
    assert curves["Throughput"] == {
        "samples/s": {"step": [6, 12], "value": pytest.approx([320.0, 160.0], rel=1e-6)}
    }, "no window reaches over the restart"
    assert curves["Loss"]["evaluation"] == {"step": [9, 12], "value": [0.61, 0.61]}
    assert curves["Loss"]["training"]["step"] == list(range(1, 13))
    spans = [
        (s["rank"], s["phase"], round(s["start_s"], 3), round(s["end_s"], 3)) for s in told["spans"]
    ]
    assert spans == [
        *((0, "starting", 0, 1), (0, "preparing", 1, 2), (0, "training", 2, 2.9)),
        *((1, "starting", 0, 1), (1, "preparing", 1, 2), (1, "training", 2, 3)),
        *((0, "starting", 3, 4), (0, "preparing", 4, 5), (0, "training", 5, 6.5)),
        *((1, "starting", 3, 4), (1, "preparing", 4, 5), (1, "training", 5, 6.5)),
    ]
    assert told["held_bytes"] == {"0": 4096, "1": 4096}
    assert told["peak_bytes"]["1"] == {"host_bytes": 2**29, "device_bytes": None}


def test_gauges_of_devices_are_shown_where_there_are_some(door: Door, tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    door(run)
    assert "What their gauges showed" not in (run / "report.html").read_text()
    path = run / "events-1.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    looks = [
        event(at, "gauges", busy_percent=busy, celsius=60.0, watts=None, used_bytes=2**30)
        for at, busy in ((5.2, 90.0), (5.6, 70.0))
    ]
    write_lines(path, [*rows, *looks])
    door(run)
    words = words_of((run / "report.html").read_text())
    assert "1 2 80 %, most 90 % 60 °C, most 60 °C not recorded 1.0 GiB, most 1.0 GiB" in words


def test_nothing_that_was_recorded_is_read_as_html(door: Door, tmp_path: Path) -> None:
    nasty = "</script><img src=x onerror=alert(1)>'\"&"
    run = write_run(
        tmp_path / "<i>",
        report=f"{nasty}\n{nasty}",
        metrics={"loss": 0.5, nasty: 0.1},
        program=nasty,
    )
    plain = write_run(tmp_path / "plain")
    assert door(run, plain, "--out", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    found = Elements(page)
    assert not {"img", "i>"} & set(found.names)
    assert found.names.count("script") == 2
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert nasty in "".join(found.text)
    (data,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.S)
    assert any(nasty in one["label"] for chart in json.loads(data) for one in chart["lines"])


def test_a_page_loads_nothing(door: Door, tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    door(run)
    page = (run / "report.html").read_text()
    assert not re.search(r"https?:|@import|@font-face|url\(", page)
    links = [value for name, value in Elements(page).attributes if name in ("href", "src")]
    assert links == ["data:,"]


def test_several_runs_are_beside_each_other(door: Door, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b", strategy="zero1")
    write_run(tmp_path / "runs" / "c", digest="cd" * 32)
    assert door(tmp_path / "runs", "--out", tmp_path / "page.html")[0] == 0, "as of a sweep"
    page = (tmp_path / "page.html").read_text()
    words = words_of(page)
    assert "3 runs of digits A a done B b done C c done What differs In their jobs" in words
    (differs,) = re.findall(r"In their jobs A a B b C c (.*?) In what came out", words)
    assert differs == "strategy ddp zero1 ddp"
    assert "samples/s 160 160 (× 1.00) 160 (× 1.00)" in words
    assert "A, B ended with the same weights, bit for bit." in words
    assert page.count('class="curve line c2"') == page.count('class="curve line c0"') > 0


def test_a_running_job_is_reported_as_far_as_it_is(door: Door, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "live"
    run.mkdir(parents=True)
    (run / "job.toml").write_text(job_toml())
    started = [event(0.0, "started", ranks=2), event(0.0, "attempt", attempt=0)]
    write_lines(run / "events.jsonl", started)
    write_lines(run / "events-0.jsonl", [event(1.0, "ready", attempt=0, host="node0")])
    (run / "metrics.jsonl").write_text('{"step": 0, "los')  # a line that is being written
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, out, _ = door(run, "--json")
    (told,) = json.loads(out)["runs"]
    assert (code, told["state"]) == (0, "running")
    assert [(s["rank"], s["phase"], s["open"]) for s in told["spans"]] == [
        (0, "starting", False),
        (0, "preparing", True),
        (1, "starting", True),
    ]
    words = words_of((run / "report.html").read_text())
    assert "digits running" in words
    assert "No step was written down" in words
    door(run, "--json")
    assert "digits killed" in words_of((run / "report.html").read_text()), "nobody holds it"


def test_a_trace_is_what_chrome_reads(door: Door, tmp_path: Path) -> None:
    run, path = write_run(tmp_path / "one"), tmp_path / "trace.json"
    assert door(run, "--trace", path)[0] == 0
    events = json.loads(path.read_text())["traceEvents"]
    for one in events:
        assert one["ph"] in "XMiC" and {"pid", "tid", "ts", "name"} <= set(one)
        assert one["ts"] >= 0 and ("dur" in one) == (one["ph"] == "X")
    spans = [one for one in events if one["ph"] == "X"]
    assert {(one["pid"], one["tid"]) for one in spans} == {(0, 0), (1, 1)}, "a node each"
    training = [one for one in spans if one["name"] == "training" and one["tid"] == 0]
    assert [(t["ts"], t["dur"]) for t in training] == [
        (2e6, pytest.approx(0.9e6, abs=1)),
        (5e6, pytest.approx(1.5e6, abs=1)),
    ]
    steps = {one["name"]: (one["ts"], one["dur"]) for one in spans if one["cat"] == "step"}
    assert len(steps) == 10, "the first of each attempt has no begin"
    assert steps["step 2"] == (pytest.approx(2.0e6, abs=1), pytest.approx(0.1e6, abs=1))
    assert steps["step 8"] == (pytest.approx(5.0e6, abs=1), pytest.approx(0.2e6, abs=1))
    told = [one["args"]["name"] for one in events if one["ph"] == "M"]
    assert told == ["node 0: node0", "node 1: node1", "supervisor", "rank 0", "rank 1"]


def test_waiting_is_until_the_last_rank_has_come(door: Door, tmp_path: Path) -> None:
    run, path = write_run(tmp_path / "one"), tmp_path / "trace.json"
    write_phases(run)
    code, out, _ = door(run, "--json", "--trace", path)
    (told,) = json.loads(out)["runs"]
    assert code == 0
    near = {
        rank: {kind: round(1e3 * s, 3) for kind, s in one.items() if s}
        for rank, one in told["seconds_per_step"].items()
    }
    assert near == {
        "0": {"data": 0.1, "compute": 0.9, "waiting": 3.0, "communication": 1.0},
        "1": {"compute": 4.0, "communication": 1.0},
    }
    events = json.loads(path.read_text())["traceEvents"]
    within = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e.get("cat") == "within"]
    assert (0, "waiting", pytest.approx(5.001e6, abs=1), pytest.approx(3e3, abs=1)) in within
    steps = [(e["tid"], e["name"]) for e in events if e.get("cat") == "step"]
    assert steps.count((0, "step 8")) == steps.count((1, "step 8")) == 1
    words = words_of((run / "report.html").read_text())
    assert "0 0.1 ms 0.9 ms 1 ms 3 ms 5 ms 1 0 ms 4 ms 1 ms 0 ms 5 ms" in words
    assert (
        "mean of 1 step: all that every rank recorded, but the first of an attempt. A rank waits"
        in words
    )


def test_a_graph_that_computes_and_communicates_is_not_taken_apart(
    door: Door, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "one", engine="tensorflow")
    write_phases(run)
    door(run)
    words = words_of((run / "report.html").read_text())
    assert "computation and communication in one graph" in words
    assert "waiting for the last rank" not in words


def test_unlike_clocks_tell_no_waiting(door: Door, tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    write_phases(run)
    path = run / "events-1.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, [{**row, "monotonic": row["monotonic"] + 99.0} for row in rows])
    door(run)
    words = words_of((run / "report.html").read_text())
    assert "not told from communication everywhere: the ranks have unlike clocks" in words
    assert "waiting for the last rank" not in words


def broken(run: Path, file: str, text: str) -> None:
    (run / file).write_text(text)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda run: broken(run, "job.toml", "schema = 7\nprogram = 'x'\nranks = 1\n"), "schema 7"),
        (lambda run: broken(run, "job.toml", "= no TOML"), "TOMLDecodeError"),
        (lambda run: broken(run, "events.jsonl", '{"event": "attempt"}\n'), "KeyError"),
        (lambda run: broken(run, "metrics.jsonl", "no JSON\n"), "JSONDecodeError"),
        (lambda run: broken(run, "placement/rank-000.json", '{"rows": 3}'), "TypeError"),
        (
            lambda run: write_lines(run / "events-1.jsonl", [event(1, "ready", machine=3)]),
            "AttributeError",  # found as the page is made
        ),
        (lambda run: (run / "job.toml").unlink(), "no job.toml"),
        (lambda run: [file.unlink() for file in run.glob("events*")], "no events"),
        (lambda run: broken(run, "report.html", "somebody's"), "no report"),
        (lambda run: os.mkfifo(run / "report.html"), "no report"),  # nobody writes into it
    ],
)
def test_what_is_no_run_is_refused(
    door: Door, tmp_path: Path, damage: Callable[[Path], Any], found: str
) -> None:
    run = write_run(tmp_path / "one")
    damage(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, out, err = door(run, "--trace", tmp_path / "trace.json")
    assert (code, out) == (2, "")
    assert re.search(r"asked: .*\nfound: .*\nwhy:   .*\ndo:    ", err) and found in err
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert not (tmp_path / "trace.json").exists()


def test_a_path_that_cannot_be_is_refused(door: Door, tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    (tmp_path / "empty").mkdir()
    for words, found in (
        ((tmp_path / "none",), "nothing there"),
        ((tmp_path / "empty",), "an empty folder"),
        ((run, "--out", tmp_path / "none" / "page.html"), "no folder"),
        ((run, "--out", tmp_path), "a folder"),
        ((run, "--trace", run / "job.toml"), "no trace"),
    ):
        code, _, err = door(*words)
        assert code == 2 and found in err, err
    assert not list(tmp_path.rglob("*.html"))


def test_a_thinned_curve_keeps_what_stands_out() -> None:
    ys = [math.sin(i / 900) for i in range(20_000)]
    ys[7_777], ys[12_345] = 99.0, math.nan
    thin = thinned(Series("loss", tuple(range(20_000)), tuple(ys)))
    assert len(thin.xs) < 700
    assert (7_777, 99.0) in zip(thin.xs, thin.ys, strict=True)
    assert [x for x, y in zip(thin.xs, thin.ys, strict=True) if math.isnan(y)] == [12_345]
    assert (thin.xs[0], thin.xs[-1]) == (0, 19_999)


def test_the_shares_of_a_run_are_steps_of_a_line_for_each_rank(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    tables = [(0, [0, 1, 2], [2, 2, 4]), (5, [0, 2], [3, 5])]
    rows = [
        {"event": "shares", "time": float(step), "monotonic": float(step), "attempt": 0}
        | {"step": step, "ranks": ranks, "shares": shares}
        for step, ranks, shares in tables
    ]
    write_lines(folder / "events-0.jsonl", rows)
    run = read_run(folder, "shares")
    (chart,) = (chart for chart in charts_of([run]) if chart.title == "Shards of a step")
    last = run.rows.steps[-1]
    assert [(line.label, line.series.xs, line.series.ys) for line in chart.lines] == [
        ("rank 0", (0, 5, 5, last), (2, 2, 3, 3)),
        ("rank 1", (0, 5), (2, 2)),
        ("rank 2", (0, 5, 5, last), (4, 4, 5, 5)),
    ]


def test_what_was_computed_twice_is_shown(door: Door, tmp_path: Path) -> None:
    """A chain that somebody has changed, an alarm, and replays."""
    run = write_run(tmp_path / "run")
    log = DigestLog(run, lambda *_, **__: None, compares=True)
    for step in (3, 6, 9):
        log.add({"step": step, "weights": f"{step:016x}", "loss": 0.5})
    alarm = {"step": 7, "wrong": 1, "host": "node1", "shard": 5, "text": "audit of step 7"}
    alarm |= {"differs": "samples", "tensor": "the loss"}
    events = run / "events-0.jsonl"
    rows = [json.loads(line) for line in events.read_text().splitlines()]
    rows[-1]["summary"] |= {"user_buffers": [], "user_randomness": []}
    rows[-1]["summary"]["audits"] = {"shards": 6, "differed": 1, "every": 2}
    differs = event(5.3, "digest_differs", step=6, was={"weights": "a"}, now={"weights": "b"})
    write_lines(events, [*rows[:-1], differs, event(5.4, "audit", **alarm), rows[-1]])
    usual = {"losses": 3, "bitwise": True, "worst_loss": 0.1, "ranks": 1, "equal": False}
    there = [{"step": 7, "what": ["loss"]}]
    replays: list[dict[str, Any]] = [
        {"step": 9, **usual, "differs": [], "equal": True},
        {"step": 8, **usual, "differs": there, "ranks": 2},
        {"step": 8, **usual, "differs": there, "bitwise": False},
    ]
    write_lines(run / "replays.jsonl", replays)
    door(run)
    words = words_of((run / "report.html").read_text())
    for text in (
        "digests 3 to 9 3 rows, the chain holds",
        "made again 6 other weights than before",
        "audits 6 shards computed again, 1 differ; one every 2 steps",
        "alarm 8 1 on node1 other samples, first in the loss",
        "replay 9 on 1 rank equal",
        "replay 8 on 2 ranks differs from step 7 on: loss",
        "replay 8 on 1 rank equal to rounding: losses differ by 1.0e-01 at most",
    ):
        assert text in words, text
    lines = (run / "digests.jsonl").read_text().replace("0000006", "0000007").splitlines()
    (run / "digests.jsonl").write_text("\n".join(lines) + "\n")
    _, out, _ = door("--json", run)
    (shown,) = json.loads(out)["runs"]
    assert shown["computed_again"][0] == [
        *("digests", "3 to 9", "", "3 rows, the chain breaks at step 6")
    ]
    shown_lines = CliRunner().invoke(cli, ["show", str(run)], catch_exceptions=False).output
    for line in (
        "digests    3 rows, the chain breaks at step 6 (step 3 to 9)",
        "audits     6 shards computed again, 1 differ; one every 2 steps",
        "replay     equal to rounding: losses differ by 1.0e-01 at most (step 8 on 1 rank)",
        "note: rank 1: audit of step 7",
    ):
        assert line in shown_lines.splitlines(), line
    del rows[-1]["summary"]["audits"]["every"]  # as in a folder of an older version
    write_lines(events, rows)
    shown_lines = CliRunner().invoke(cli, ["show", str(run)], catch_exceptions=False).output
    assert "audits     6 shards computed again, 1 differ" in shown_lines.splitlines()


@pytest.mark.slow
def test_a_row_of_a_long_run_takes_few_bytes(tmp_path: Path) -> None:
    peaks = {}
    for count in (1_000, 21_000):
        folder = write_run(tmp_path / str(count))
        row = {"epoch": 0, "samples": 8, "learning_rate": 0.1}
        rows = [
            {**row, "step": n, "loss": 1 / (n + 1), "monotonic": float(n)} for n in range(count)
        ]
        for odd in rows[1::2]:
            odd["grad_norm"] = float(odd["step"])
        write_lines(folder / "metrics.jsonl", rows)
        del rows
        tracemalloc.start()
        run = read_run(folder, "long")
        charts = {chart.title: chart for chart in charts_of([run])}
        assert constants_of([run]) == ["Learning rate: 0.1 at every step."]
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        (norms,) = charts["Gradient norm before clipping"].lines
        assert (norms.series.xs[0], norms.series.ys[0]) == (2, 1.0)
        assert (norms.series.xs[-1], norms.series.ys[-1]) == (count, count - 1.0)
    assert (peaks[21_000] - peaks[1_000]) / 20_000 < 90, peaks


@pytest.mark.slow
def test_what_a_job_writes_is_what_a_report_reads(door: Door, train: Callable[..., Result]) -> None:
    result = train("digits", ranks=2, steps=12, eval_every="4", log="phases")
    code, out, _ = door(result.run_dir, "--json")
    (told,) = json.loads(out)["runs"]
    assert code == 0
    assert told["summary"]["weights_sha256"] == result.summary["weights_sha256"]
    assert told["curves"]["Evaluation: accuracy"]["accuracy"]["step"] == [4, 8, 12]
    assert {s["phase"] for s in told["spans"]} == {"starting", "preparing", "training"}
    assert set(told["seconds_per_phase"]) == set(told["held_bytes"]) == {"0", "1"}
    words = words_of((result.run_dir / "report.html").read_text())
    assert "Not recorded" not in words
    for rank, mean in told["seconds_per_step"].items():
        rows = read_rows(result.run_dir / "phases" / f"rank-00{rank}.jsonl")
        begins = [(row["step"], row["from"], row["spans"]) for row in rows]
        assert [step for step, _, _ in begins] == list(range(12))
        for (_, start, spans), (_, end, _) in itertools.pairwise(begins):
            assert spans[0][1] == 0 and spans[-1][1] + spans[-1][2] == pytest.approx(
                1e6 * (end - start), abs=2
            ), "spans fill a step"
        assert mean["compute"] > 0 and mean["waiting"] + mean["communication"] > 0


def test_a_watched_script_shows_its_findings_first(
    door: Door, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its run folder, of the object of `check --json`, and in `show`."""
    run = tmp_path / "watched"
    (run / "facts").mkdir(parents=True)
    request = CommandRequest(("python", "train.py", "--lr", "1"), 2).to_data()
    (run / "job.toml").write_text(write_toml({"schema": 1, **request, "ranks": 2, "nodes": 1}))
    events = [event(0, "attempt", attempt=0), event(9, "done", attempt=0, exits={})]
    write_lines(run / "events.jsonl", events)
    where = [str(tmp_path / "train.py"), 7]
    said = {"fact": "print", "where": where, "text": "loss `0.5`", "digest": 1}
    for rank in range(2):
        process = {"fact": "process", "rank": str(rank), "local_rank": str(rank), "group_rank": "0"}
        write_lines(run / "facts" / f"{rank}.jsonl", [process, said])
    assert door(run)[0] == 0
    page = (run / "report.html").read_text()
    words = words_of(page)
    assert "done, 1 finding" in words and 'class="state bad"' in page
    assert words.index("train.py:7 printed-by-all-ranks") < words.index("Timeline")
    assert "allranks check --ranks 2 -- python train.py --lr 1" in words
    assert "value is ranks 2" in words and "role_name" not in words.partition("TOML")[0]
    assert "--log phases" not in words and "`" not in words.partition("Not recorded")[2]
    monkeypatch.setattr(sys, "argv", ["allranks", "show", str(run), "--json"])
    main()
    record = json.loads(capsys.readouterr().out)
    assert [finding["line"] for finding in record["findings"]] == [7]
    saved = {"run_dir": "runs/x", "command": "python train.py", **record}
    (tmp_path / "saved.json").write_text("a line before\n" + json.dumps(saved))
    assert door(tmp_path / "saved.json")[0] == 0
    words = words_of((tmp_path / "report.html").read_text())
    assert "python train.py 1 finding on 2 ranks" in words and "train.py:7" in words
