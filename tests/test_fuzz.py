"""Random combinations beside one process: drawn again by number, held for real, made smaller."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from allranks.errors import ProgramError, RequestError
from allranks.job.config import resolve
from allranks.job.engines import preload_for
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.strategies.resolve import strategy_spec
from conftest import ROOT

ROOM = ROOT / "benchmarks" / "fuzzing"
FAULTY = "215"
"""`ddp` on two ranks, with a model, samples and an average that the fault does not need."""

NO_SAMPLE_LEFT = {"kind": "residual", "norm": "batch", "batchnorm": "whole"}
NO_SAMPLE_LEFT |= {"samples": 100, "batch_size": 24}


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOM))
    return importlib.import_module("draw")


@pytest.fixture
def hold(draw: ModuleType) -> ModuleType:
    return importlib.import_module("hold")


@pytest.fixture
def teams(hold: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Warm ranks, and the server that they come from."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOM}{os.pathsep}{os.environ['PYTHONPATH']}")
    with (
        ForkServer((*preload_for(hold.PROGRAM, "torch"), "member")) as server,
        importlib.import_module("team").Teams(server) as running,
    ):
        yield running


def test_a_number_is_the_same_combination_again(draw: ModuleType) -> None:
    found = [draw.drawn(7, number) for number in range(200)]
    assert found == [draw.drawn(7, number) for number in range(200)]
    assert len(set(map(str, found))) > 180
    assert {len(one.legs) for one in found} == {1, 2}
    one_task = found[: draw.TOGETHER]
    assert len({str(one.settings) for one in one_task}) == 1  # trained once by one process


@pytest.mark.slow
def test_most_of_what_is_drawn_can_be_and_every_promise_is_drawn(draw: ModuleType) -> None:
    refused, names, flags = 0, set[str](), set[str]()
    found = [draw.drawn(3, number) for number in range(800)]
    for one in found:
        names |= {leg.strategy.partition(":")[0] for leg in one.legs}
        flags |= one.flags.keys()
        said = tuple(f"{name}={value}" for name, value in one.settings.items())
        try:
            for leg in one.legs:
                resolve("x.py", {**one.flags, "strategy": leg.strategy, "ranks": leg.ranks}, said)
                assert strategy_spec(leg.strategy, leg.ranks).mesh.ranks == leg.ranks
        except RequestError:
            refused += 1
    assert 0 < refused < len(found) / 10
    assert names == set(draw.RATES)
    assert {"bitwise", "micro_batch", "activation_checkpointing", "backend"} <= flags


@pytest.mark.slow
def test_what_one_process_gives_is_equal_and_what_cannot_be_is_refused(
    draw: ModuleType, hold: ModuleType, server: ForkServer
) -> None:
    settings = {"kind": "words", "samples": 13, "by": "adamw", "clip_norm": 0.05, "ema": 0.5}
    legs = (draw.Leg("zero2:bucket_mb=0.001", 3), draw.Leg("ddp:reduce=tree", 2))
    found = hold.held(draw.Combination(legs, settings, {"micro_batch": 1}), server)
    assert found.what == hold.EQUAL and found.difference < 1e-12
    found = hold.held(draw.Combination((draw.Leg("context", 2),), settings), server)
    assert found.what == hold.REFUSED and found.why


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "settings", "flags"),
    [
        ("local-sgd:every=1", {"norm": "batch", "shards": 2, "weighted": True}, {}),
        ("gpipe", {"kind": "residual"}, {"precision": "fp32", "channels_last": True}),
        ("fsdp", {"kind": "lookups", "shards": 4}, {"precision": "fp32", "seed": 928}),
        ("zero2:bucket_mb=0.001", NO_SAMPLE_LEFT, {}),
    ],
)
def test_what_was_found_stays_mended(
    strategy: str,
    settings: dict[str, Any],
    flags: dict[str, Any],
    draw: ModuleType,
    hold: ModuleType,
    server: ForkServer,
) -> None:
    """Statistics counted by weight, a gradient in another order, rows that come twice, a hang."""
    flags = {**flags, "bitwise": True} if flags else flags
    found = hold.held(draw.Combination((draw.Leg(strategy, 2),), settings, flags), server)
    assert found.what == hold.EQUAL, found


@pytest.mark.slow
def test_warm_ranks_say_what_the_command_says(
    draw: ModuleType, hold: ModuleType, teams: Any
) -> None:
    """One training after another in the same processes, one of them refused in between."""
    settings = {"kind": "residual", "norm": "batch", "ema": 0.5, "batch_size": 24}
    legs = (draw.Leg("1f1b", 2), draw.Leg("zero1", 2))
    bits = {"bitwise": True, "precision": "bf16"}
    for flags, of in (({}, legs), (bits, legs[1:]), ({"micro_batch": 1}, legs[1:]), ({}, legs)):
        one = draw.Combination(of, settings, flags)
        found = []
        for way in (lambda r: hold.by_team(r, teams), lambda r: hold.by_command(r, teams._server)):
            try:
                found.append(hold.trained(one, way))
            except RequestError as error:
                found.append(error.why)
        warm, commanded = found
        if "micro_batch" in flags:
            assert warm == commanded and isinstance(warm, str)
            continue
        assert warm.sha256 == commanded.sha256 and warm.loss == commanded.loss
        assert warm.tensors.keys() == commanded.tensors.keys()
        assert any(name.startswith("average of ") for name in warm.tensors)


@pytest.mark.slow
def test_a_rank_that_dies_breaks_one_training_and_no_other(
    draw: ModuleType, hold: ModuleType, teams: Any
) -> None:
    one = draw.Combination()
    wanted = hold.trained(one, lambda resolved: hold.by_team(resolved, teams))
    teams._server.exits(0.0)
    os.kill(teams._server.pids()[-1], 9)
    with pytest.raises(ProgramError):
        hold.trained(one, lambda resolved: hold.by_team(resolved, teams))
    again = hold.trained(one, lambda resolved: hold.by_team(resolved, teams))
    assert again.sha256 == wanted.sha256


def trained_of(hold: ModuleType, tensors: dict[str, Any], digest: str = "") -> Any:
    return hold.Trained(tensors, 0.0, digest)


def test_a_weight_that_is_another_one_is_seen(hold: ModuleType) -> None:
    of = {"weight": np.ones(4), "zero": np.zeros(4)}
    single = trained_of(hold, of)
    assert not hold.compared(single, single, "fp64").fails
    for name, by in (("weight", 1e-8), ("zero", 1e-8), ("weight", np.nan)):
        found = hold.compared(trained_of(hold, of | {name: of[name] + by}), single, "fp64")
        assert found.fails and found.why == name
    assert hold.compared(trained_of(hold, {"weight": np.ones(4)}), single, "fp64").fails
    assert hold.compared(trained_of(hold, of, "another"), single, None).fails


@pytest.mark.parametrize(
    ("ours", "what"), [(1.03, "rounded"), (1.05, "different"), (np.nan, "different")]
)
def test_more_than_the_bound_is_rounded_if_one_process_rounds_so(
    ours: float, what: str, draw: ModuleType, hold: ModuleType
) -> None:
    """0.01 between one process in float32 and in float64: four times that is allowed."""
    one = draw.Combination(flags={"precision": "fp32"})

    def reference(one: Any) -> Any:
        value = 1.0 if one.flags else 1.01
        return trained_of(hold, {"weight": np.full(4, value)})

    def train(resolved: Any) -> Any:
        return trained_of(hold, {"weight": np.full(4, ours)})

    assert hold.verdict_of(one, train, reference).what == what


def test_what_fails_is_made_smaller(
    draw: ModuleType, hold: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only dropout on two ranks or more of zero1 fails: nothing else is left."""

    def held(one: Any, server: Any) -> Any:
        zero1 = any(leg.strategy.startswith("zero1") and leg.ranks > 1 for leg in one.legs)
        return hold.Verdict(hold.DIFFERENT if zero1 and "dropout" in one.settings else hold.EQUAL)

    monkeypatch.setattr(hold, "held", held)
    settings = {"kind": "images", "dropout": 0.5, "samples": 13}
    legs = (draw.Leg("ddp", 2), draw.Leg("zero1:reduce=tree,bucket_mb=1", 4))
    one = draw.Combination(legs, settings, {"seed": 3})
    least, found = hold.shrunk(one, held(one, None), None)
    assert least == draw.Combination((draw.Leg("zero1", 2),), {"dropout": 0.5}, {})
    compile(hold.script_of(least, found), "script", "exec")
    learners = draw.Combination((draw.Leg("diloco:every=1,lr=1,momentum=0,after=2", 2),))
    kept = {leg.strategy for less in draw.simpler(learners) for leg in less.legs}
    assert kept == {"diloco:every=1,lr=1,momentum=0", *(leg.strategy for leg in learners.legs)}


@pytest.mark.slow
def test_a_planted_fault_ends_in_a_script_that_shows_it_from_a_checkout(tmp_path: Path) -> None:
    """A sum that counts one number twice: the number below is made smaller, and written down."""
    for part in ("src", "benchmarks/fuzzing"):
        shutil.copytree(ROOT / part, tmp_path / part)  # with what is compiled
    for name in ("fuzz.py", "harness.py"):
        shutil.copy(ROOT / "benchmarks" / name, tmp_path / "benchmarks")
    mean = tmp_path / "src/allranks/torch/parallel/data/reducer.py"
    right = "pending.wait()"
    assert mean.read_text().count(right) == 1
    wrong = "pending.wait(); self.buckets[0].flat[:1].mul_(2)"
    mean.write_text(mean.read_text().replace(right, wrong))

    def run(*words: str) -> Any:
        variables = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
        )

    drawn = ["--seed", "0", "--first", FAULTY, "--combinations", "1"]
    found = run("benchmarks/fuzz.py", *drawn, "--scripts", "scripts", "--no-record")
    assert found.returncode == 1 and "Traceback" not in found.stderr, found.stderr
    (script,) = (tmp_path / "scripts").iterdir()
    text = script.read_text()
    assert "settings={}" in text and "flags={}" in text and len(text.splitlines()) <= 25
    assert "what='different'" in run(str(script)).stdout
    mean.write_text(mean.read_text().replace(wrong, right))
    assert "what='equal'" in run(str(script)).stdout


FOUND = {
    "trainer_times_ranks.py": r"(?s)2 rank.*True: eval_loss 1\.39.*2 rank.*False: eval_loss 0\.69",
    "fabric_double.py": r"torch.float32; its gradient differs by [1-9].*e-0[78]",
    "accelerate_short_window.py": r"is 0\.250 of the mean",
    "deepspeed_clips.py": r"the length 58\.8, the update 1\.000",
    "deepspeed_unused.py": r"stage 0: 0\.0e\+00 .*\nstage 2: the ranks end so: .*SIGABRT",
    "group_norm_ends.py": r"contiguous_format: exit code 0\ntorch.channels_last: SIGSEGV",
    "repeated_samples.py": r"6 samples are counted of 5, and the gradient differs by 0\.[1-9]",
}


@pytest.mark.slow
@pytest.mark.cases("script", [*FOUND][6:], exhaustive=[*FOUND][:6])
def test_what_was_found_in_peers_is_there(script: str) -> None:
    """As `docs/found.md` tells it; one that is mended upstream is told there as mended."""
    assert script in (ROOT / "docs" / "found.md").read_text()
    command = [sys.executable, str(ROOT / "benchmarks" / "peers" / "found" / script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert re.search(FOUND[script], done.stdout), done.stdout + done.stderr
