"""`allranks bench -- COMMAND`: an unchanged script is timed by its own steps, or as a whole."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from allranks.cli.main import cli
from allranks.errors import RequestError
from allranks.job.job import HIDDEN
from allranks.tools.bench.measuring import RunSet
from allranks.tools.bench.plan import STRONG, WEAK, BenchPlan, Combination
from allranks.tools.bench.results import rows_of, scaling_of, to_data
from allranks.tools.bench.scripts import measured_script
from allranks.tools.bench.tables import how_timed, proposal, table
from allranks.tools.script_check.rules.facts import APART

PLAN = BenchPlan("t.py", (), 4, 2, 1, command=("python", "t.py"))
LOOP = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(96, 4))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    for (batch,) in DataLoader(data, batch_size=8 * {ranks}):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    for (batch,) in DataLoader(data, batch_size=96):
        with torch.no_grad():
            model(batch)
"""


def write_steps(
    folder: Path,
    rank: int,
    samples: list[int | None],
    seconds: float,
    evaluated: int = 0,
    joined: bool = True,
) -> None:
    """The facts of a rank; before the step `evaluated` it evaluated for 10 seconds."""
    folder.mkdir(exist_ok=True)
    lines, now = [], 0.0
    for number, count in enumerate(samples, start=1):
        now += seconds + 10 * (number == evaluated)
        fact = {"fact": "step", "rank": rank, "step": number, "monotonic": now, "samples": count}
        fact |= {"evaluated": number == evaluated, "host_bytes": 5 + rank, "joined": joined}
        lines.append(json.dumps(fact))
    (folder / f"{rank}.jsonl").write_text("\n".join(lines) + '\n{"fact": "st')


def test_the_samples_of_all_ranks_are_over_the_time_of_a_step(tmp_path: Path) -> None:
    for rank in range(2):
        write_steps(tmp_path, rank, [8, 8, 8, 8, 8, 8 + rank, 9999], 0.5, evaluated=4)
    measured, _ = measured_script(tmp_path, tmp_path, PLAN, 0, None)
    assert not isinstance(measured, str)
    assert measured.unit == "samples/s" and measured.peak_bytes == 6
    assert measured.steps.speed == pytest.approx((16 + 16 + 17) / 1.5), "4 has an evaluation"
    assert measured.step_samples == pytest.approx(49 / 3) and measured.step_s == 0.5


def test_three_steps_are_timed_if_no_more_were_asked_for(tmp_path: Path) -> None:
    """Such a run was stopped after them: its whole time says nothing."""
    write_steps(tmp_path, 0, [8] * 3, 0.5)
    plan = dataclasses.replace(PLAN, steps=2, warm_up=1)
    measured, _ = measured_script(tmp_path, tmp_path, plan, 0, None)
    assert not isinstance(measured, str)
    assert (measured.unit, measured.steps.speed) == ("samples/s", 16.0)


def test_a_key_among_the_words_of_a_script_is_not_recorded() -> None:
    plan = dataclasses.replace(PLAN, command=("python", "t.py", "--api-key=sesame", "--lr=1"))
    recorded = to_data(plan, [], {})["settings"]["command"]
    assert recorded == ["python", "t.py", f"--api-key={HIDDEN}", "--lr=1"]


def test_without_samples_steps_are_counted_and_nothing_is_said_of_scaling(tmp_path: Path) -> None:
    found = []
    for ranks, seconds in ((1, 0.5), (2, 0.25)):
        folder = tmp_path / str(ranks)
        for rank in range(ranks):
            write_steps(folder, rank, [None] * 6, seconds)
        runs, _ = measured_script(folder, tmp_path, PLAN, 0, None)
        found.append(RunSet(Combination("t.py", ranks), [runs]))
    rows = rows_of(found)
    assert [row.speed.mean for row in rows if row.speed] == [2.0, 4.0]
    assert {row.unit for row in rows} == {"steps/s"} and rows[1].efficiency is None
    assert "steps/s" in table(rows) and "sent a step" not in table(rows)
    assert "no DataLoader" in proposal(PLAN, rows, "a machine"), "and no ranks to ask for"


def test_without_steps_the_whole_run_is_timed(tmp_path: Path) -> None:
    events = [{"event": "attempt", "monotonic": 10.0}, {"event": "done", "monotonic": 46.0}]
    lines = [json.dumps({**event, "time": event["monotonic"]}) for event in events]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    measured, _ = measured_script(tmp_path / "none", tmp_path, PLAN, 0, None)
    rows = rows_of([RunSet(Combination("t.py", 1), [measured])])
    assert rows[0].speed is not None and rows[0].speed.mean == 100.0 and rows[0].step_ms == 36_000
    assert "runs/hour" in table(rows) and "ms a run" in table(rows)
    assert how_timed(PLAN, rows).startswith("timed as a whole")


@pytest.mark.parametrize(("samples", "scaling"), [(8, WEAK), (4, STRONG)])
def test_what_a_rank_reads_says_how_a_script_scales(
    samples: int, scaling: str, tmp_path: Path
) -> None:
    found = []
    for ranks, each in ((1, 8), (2, samples)):
        for rank in range(ranks):
            write_steps(tmp_path / str(ranks), rank, [each] * 6, 0.5)
        runs, _ = measured_script(tmp_path / str(ranks), tmp_path, PLAN, 0, None)
        found.append(RunSet(Combination("t.py", ranks), [runs]))
    assert scaling_of(rows_of(found)) == scaling


@pytest.mark.parametrize("joined", [True, False])
def test_the_speed_of_ranks_that_share_nothing_is_not_called_scaling(
    joined: bool, tmp_path: Path
) -> None:
    """Two copies of a script of one process: twice the samples a second, and no faster."""
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        for rank in range(ranks):
            write_steps(folder, rank, [8] * 6, 0.5, joined=joined)
        runs, _ = measured_script(folder, tmp_path, PLAN, 0, None)
        found.append(RunSet(Combination("t.py", ranks), [runs]))
    rows = rows_of(found)
    assert not rows[0].problem and (rows[1].problem == APART) != joined
    assert (APART in table(rows)) != joined
    assert ("1 rank for t.py" in proposal(PLAN, rows, "a machine")) != joined


def refused(*words: str) -> str:
    said = CliRunner().invoke(cli, ["bench", *words])
    assert isinstance(said.exception, RequestError), said.output
    return str(said.exception)


def test_what_makes_no_sense_for_a_script_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "t.py"
    script.write_text(
        "import torch\nclass Net(torch.nn.Module):\n    pass\nwhile True:\n    Net()\n"
    )
    for option in ("--strategy=ddp", "--until=a=1", "--batch-size=8", "--peers=hand"):
        assert f"asked: bench {option.partition('=')[0]}" in refused(option, "--", str(script))
    assert f"bench --ranks 1,2 -- python {script}" in refused(str(script)), "it is not imported"
    assert "no such file" in refused("--", "nope.py")
    plan = CliRunner().invoke(cli, ["bench", "--ranks=1,2", "--dry-run", "--", str(script), "-x"])
    assert plan.output.splitlines()[1].startswith("allranks run --ranks 2 -- ")
    assert plan.output.splitlines()[1].endswith(f"{script} -x"), plan.output


@pytest.mark.slow
def test_a_script_without_an_end_is_stopped_after_its_steps(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP.format(ranks="int(__import__('os').environ['WORLD_SIZE'])"))
    words = ["--ranks=1,2", "--repeats=1", "--warm-up=2", "--steps=9", "--json"]
    folder = tmp_path / "bench"
    said = CliRunner().invoke(
        cli, ["bench", *words, "--run-dir", str(folder), "--", sys.executable, str(script)]
    )
    data: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    assert [row["problem"] for row in data["rows"]] == ["", APART], said.output
    assert [row["unit"] for row in data["rows"]] == ["samples/s"] * 2
    assert [row["step_samples"] for row in data["rows"]] == pytest.approx([8, 32]), "of both ranks"
    assert data["settings"]["command"][-1] == str(script)
    facts = [json.loads(line) for path in folder.glob("turn-0/*-1.steps/*.jsonl")
             for line in path.read_text().splitlines()]  # fmt: skip
    assert [fact["evaluated"] for fact in facts[:14]] == [*[False] * 12, True, False]
    page = CliRunner().invoke(cli, ["report", str(folder)])
    text = (folder / "report.html").read_text()
    assert page.exit_code == 0 and "weak scaling" in text and "by its card" not in text
    assert APART in text and "efficiency on 2" not in text, "two copies are no scaling"
