"""What is where: the table against bytes counted by hand, before a training and after it."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import contract_tasks
import placement_tasks
from allranks.cli.display.placement import as_data, place_ranks, table
from allranks.cli.main import main
from allranks.job.config import resolve
from allranks.job.job import Job
from allranks.job.place import Placed, RankPlacement, read_placements, write_placement
from allranks.launcher.plan import LocalMachine
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import plan_job
from allranks.strategies.mesh import replicated_mesh
from allranks.strategies.resolve import strategy_spec
from allranks.torch import Trainer
from allranks.torch.model.placement import update_by_nothing
from conftest import Train

DP = "dp:replicas=3"
MESH = "mesh:data=2,tensor=2,pipeline=2"

# Linear(4, 3) without bias, BatchNorm(3), float32. AdamW keeps two moments and a count of steps of
# 4 bytes for each weight.
WEIGHT, NORM = 4 * 3 * 4, 3 * 4
BUFFERS = 2 * NORM + 8  # mean, variance, and how many batches (int64)
WEIGHTS = WEIGHT + 2 * NORM
MOMENTS = 2 * WEIGHTS + 3 * 4


PROGRAM = "placement_tasks:Small"


def rows_by_name(held: RankPlacement, replica: int = 0) -> dict[str, tuple[Any, ...]]:
    return {
        row.name: (
            row.kind,
            row.dtype,
            row.shape,
            row.bytes,
            row.gradient_bytes,
            row.optimizer_bytes,
        )
        for row in held.rows
        if row.replica == replica
    }


def hand_counted(has_optimizer: bool = True) -> dict[str, tuple[Any, ...]]:
    kept = {WEIGHT: 2 * WEIGHT + 4, NORM: 2 * NORM + 4} if has_optimizer else {WEIGHT: 0, NORM: 0}
    parameters = {
        "0.weight": ("parameter", "float32", (3, 4), WEIGHT, WEIGHT, kept[WEIGHT]),
        "1.weight": ("parameter", "float32", (3,), NORM, NORM, kept[NORM]),
        "1.bias": ("parameter", "float32", (3,), NORM, NORM, kept[NORM]),
    }
    return parameters | {
        "1.running_mean": ("buffer", "float32", (3,), NORM, 0, 0),
        "1.running_var": ("buffer", "float32", (3,), NORM, 0, 0),
        "1.num_batches_tracked": ("buffer", "int64", (), 8, 0, 0),
    }


def check_ddp(found: list[RankPlacement]) -> None:
    assert [held.rank for held in found] == [0, 1]
    for held in found:
        assert rows_by_name(held) == hand_counted()
        (total,) = held.totals
        assert (total.bytes, total.gradient_bytes) == (WEIGHTS + BUFFERS, WEIGHTS)
        assert (total.optimizer_bytes, total.gathered_bytes) == (MOMENTS, 0)
        assert total.all_bytes == 2 * WEIGHTS + BUFFERS + MOMENTS


def check_dp(found: list[RankPlacement], gathered: int | None) -> None:
    (held,) = found
    first = {n: row for n, row in rows_by_name(held).items() if row[0] != "gathered"}
    assert first == hand_counted()
    for replica in (1, 2):
        assert rows_by_name(held, replica) == hand_counted(has_optimizer=False)
    totals = [(t.bytes, t.gradient_bytes, t.optimizer_bytes, t.gathered_bytes) for t in held.totals]
    each = WEIGHTS + BUFFERS, WEIGHTS
    assert totals == [(*each, MOMENTS, gathered), (*each, 0, 0), (*each, 0, 0)]


def check_parts(found: list[RankPlacement]) -> None:
    (held,) = found
    assert rows_by_name(held) == hand_counted()
    totals = [(t.part, t.bytes, t.gradient_bytes, t.optimizer_bytes) for t in held.totals]
    assert totals == [
        (0, WEIGHT, WEIGHT, 2 * WEIGHT + 4),
        (1, 2 * NORM + BUFFERS, 2 * NORM, 4 * NORM + 8),
    ]
    lines = table(found, replicated_mesh(1)).splitlines()
    assert {line.split("  ")[0] for line in lines if line} == {
        "held by",
        "rank 0, part 0",
        "rank 0, part 1",
    }


def check_mesh(found: list[RankPlacement]) -> None:
    """Linear(6, 24) and Linear(24, 6) in the first stage; a half of what is cut."""
    first = {row.name: (row.bytes, row.shape, row.whole) for row in found[1].rows}
    assert first == {
        "0.weight": (24 * 6 * 4 // 2, (12, 6), (24, 6)),
        "0.bias": (24 * 4 // 2, (12,), (24,)),
        "3.weight": (6 * 24 * 4 // 2, (6, 12), (6, 24)),
        "3.bias": (6 * 4, (6,), None),
    }
    mesh = strategy_spec(MESH, 8).mesh
    assert [held.totals for held in found[:4]] == [found[0].totals] * 4
    *_, last = table(found, mesh).splitlines()
    assert last.split()[:4] == ["7", "1", "1", "1"]
    assert "12 × 6 of 24 × 6" in table(found, mesh)
    assert as_data(found, mesh)[6]["place"] == {"pipeline": 1, "data": 1, "tensor": 0}


@pytest.mark.slow
def test_a_dry_run_sets_the_ranks_up_and_trains_nothing(server: ForkServer, tmp_path: Path) -> None:
    def placed(program: str = PROGRAM, **flags: Any) -> list[RankPlacement]:
        resolved = resolve(program, {"run_dir": str(tmp_path / "run"), "threads": 1, **flags})
        return place_ranks(plan_job(resolved, LocalMachine(server)), server)

    check_ddp(placed(ranks=2))
    check_dp(placed(strategy=DP), gathered=None)
    check_parts(placed(strategy="model-parallel"))
    check_mesh(placed(program="mesh_tasks:Stack", strategy=MESH, ranks=8))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_training_records_what_its_ranks_hold(train: Train) -> None:
    run = train(PROGRAM, ranks=2, steps=1, threads=1)
    check_ddp(read_placements(run.run_dir, 2))
    run = train(PROGRAM, strategy=DP, steps=1, threads=1)
    inputs, outputs = 24 * (4 + 1), 24 * 3
    check_dp(read_placements(run.run_dir, 1), gathered=(inputs + outputs) * 4)


# --- what optimizers keep ------------------------------------------------------------------------


def plain(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def factored(model: nn.Module) -> Optimizer:
    return torch.optim.Adafactor(model.parameters())


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (plain, 0),
        (momentum, WEIGHTS),
        (factored, (3 + 4 + 3 + 3) * 4 + 3 * 4),  # rows and columns of a matrix; whole vectors
        (lambda model: AdamW(model.parameters(), amsgrad=True), MOMENTS + WEIGHTS),
    ],
    ids=["sgd", "momentum", "adafactor", "amsgrad"],
)
def test_what_an_optimizer_keeps_is_measured_not_guessed(make: Any, kept: int) -> None:
    """Before a training by updates of nothing, one weight at a time; the same as a step makes."""
    task = type("Task", (placement_tasks.Small,), {"optimizer": lambda self, model: make(model)})
    found = []
    for is_dry in (True, False):
        with Trainer(task(), Job()) as trainer:
            strategy = trainer.strategy
            before = RankPlacement(0, tuple(strategy.placement(updated=False)))
            assert before.totals[0].optimizer_bytes is before.totals[0].all_bytes is None
            if is_dry:
                update_by_nothing(strategy.step.parameters, strategy.step.optimizer)
            else:
                trainer.step(next(trainer.batches()))
            found.append(RankPlacement(0, tuple(strategy.placement(updated=True))).totals[0])
    assert found[0] == found[1] and found[0].optimizer_bytes == kept


def test_frozen_weights_have_no_gradient_and_an_average_is_held_too() -> None:
    with Trainer(contract_tasks.Words(ema=0.9), Job()) as trainer:
        rows = trainer.strategy.placement(updated=False)
    frozen = next(row for row in rows if row.name == "frozen.weight")
    assert (frozen.bytes, frozen.gradient_bytes, frozen.optimizer_bytes) == (8 * 8 * 4, 0, 0)
    averages = {row.name: row.bytes for row in rows if row.kind == "average"}
    trained = {r.name: r.bytes for r in rows if r.kind == "parameter" and r.gradient_bytes}
    assert averages == trained and "frozen.weight" not in averages


# --- the table ------------------------------------------------------------------------------------


def placed(rank: int, *names: str, replica: int = 0, kept: int | None = 8) -> RankPlacement:
    rows = [
        Placed("parameter", name, f"cuda:{rank}", "float32", (2, 3), 24, 24, kept, replica)
        for name in names
    ]
    return RankPlacement(rank, tuple(rows))


def test_what_ranks_hold_alike_is_one_line() -> None:
    held = [placed(0, "all", "most"), placed(1, "all", "most"), placed(2, "all")]
    held.append(placed(3, "all", "most", kept=None))
    assert (
        table(held, replicated_mesh(4))
        == """\
held by       device       dtype    shape  bytes  name
ranks 0-3     cuda:0-3     float32  2 × 3     24  all
ranks 0-1, 3  cuda:0-1, 3  float32  2 × 3     24  most

held by    device    tensors  gradients  optimizer  together
ranks 0-1  cuda:0-1     48 B       48 B       16 B     112 B
rank 2     cuda:2       24 B       24 B        8 B      56 B
rank 3     cuda:3       48 B       48 B    unknown   unknown"""
    )


def test_replicas_and_what_they_gather_are_shown() -> None:
    first, second = placed(0, "all"), placed(1, "all", replica=1, kept=0)
    gathered = Placed("gathered", "output", "cuda:0", "float32", (), 4)
    unknown = Placed("gathered", "input", "cuda:0", "unknown", None, None)
    one = RankPlacement(0, (*first.rows, *second.rows, gathered))
    lines = table([one], replicated_mesh(1)).splitlines()
    assert lines[1].split("  ")[0] == "rank 0, replicas 0-1"
    assert lines[2].endswith("one number      4  output (gathered)")
    assert [line.split()[-2:] for line in lines[-2:]] == [["4", "B"], ["0", "B"]]
    one = RankPlacement(0, (*first.rows, unknown))
    assert table([one], replicated_mesh(1)).splitlines()[-1].endswith("unknown")


def test_a_rank_that_is_no_more_is_left_out(tmp_path: Path) -> None:
    for rank in range(3):
        write_placement(tmp_path, rank, placed(rank, "all").rows)
    assert read_placements(tmp_path, 2) == [placed(0, "all"), placed(1, "all")]


# --- the door -------------------------------------------------------------------------------------


Door = Callable[..., tuple[int, str, str]]


@pytest.fixture
def door(
    server: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Door:
    """`door(*words)`: exit code, standard output and error of `allranks WORDS`,
    on the warm server."""
    monkeypatch.chdir(tmp_path)
    name = "allranks.launcher.start.ForkServer"
    monkeypatch.setattr(name, lambda modules: contextlib.nullcontext(server))

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["allranks", *words])
        code: Any = 0
        try:
            main()
        except SystemExit as left:
            code = left.code
        return int(code or 0), *capsys.readouterr()

    return call


@pytest.mark.slow
def test_the_words_of_the_command_line(door: Door, train: Train, tmp_path: Path) -> None:
    asked = ("train", PROGRAM, "--ranks", "2", "--dry-run", "--placement")
    code, out, err = door(*asked)
    assert code == 0 and err == ""
    assert re.search(r"^ranks 0-1 +cpu +float32 +3 × 4 +48  0\.weight$", out, re.M)
    run = train(PROGRAM, ranks=2, steps=1, threads=1, run_dir=str(tmp_path / "run"))
    assert door("show", "run", "--placement")[1] == out[out.index("held by") :]
    planned = json.loads(door(*asked, "--json")[1])
    shown = json.loads(door("show", str(run.run_dir), "--placement", "--json")[1])
    assert shown["placement"] == planned["placement"] and planned["job"]["ranks"] == 2
    assert shown["placement"][1]["totals"][0]["optimizer_bytes"] == MOMENTS


def test_a_placement_that_nobody_knows_is_refused(door: Door, tmp_path: Path) -> None:
    code, _, err = door("train", PROGRAM, "--placement")
    assert code == 2 and "--dry-run --placement" in err
    (tmp_path / "job.toml").write_text('program = "p"\nranks = 2\n')
    code, _, err = door("show", ".", "--placement")
    assert code == 2 and "no rank has said what it holds" in err
    code, _, err = door("train", "placement_tasks:NoModel", "--dry-run", "--placement")
    assert code == 2 and "the engine trains torch modules" in err
