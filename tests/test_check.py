"""`check` says equal of what is equal, in every precision, and finds what hides;
it leaves no space.

Correct tasks of `check_tasks` look wrong to a comparison that is too simple: zero gradients,
infinite buffers, losses that add up to nothing, callbacks that change weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import allranks
from allranks.errors import RequestError
from allranks.job.config import resolve
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.tools.check.against_single import CheckPlan, check_against_one, ranks_to_check
from allranks.tools.check.compare import BITS, CLOSE, FP64, RecordedTrace, compare
from allranks.tools.check.sizes import number_difference
from allranks.tools.check.verdict import Verdict

CORRECT = [
    *("EndlessMetric", "Clamped", "PackedBias", "BiasBeforeNorm", "Spectral", "ZeroSum", "Nearly"),
    *("Sparse", "Masked"),
]
HOW = ["fp64", "fp32", "bf16", "fp16", "bits"]
STRATEGIES = ["ddp", "ddp-plain", "ddp:reduce=tree", "dp:replicas=3"]

Check = Callable[..., Verdict]


@pytest.fixture
def check(server: ForkServer, tmp_path: Path) -> Check:
    """`check(program, **flags)`: the verdict, with float64 looked at on the same ranks only."""

    def run(program: str, *settings: str, **flags: Any) -> Verdict:
        flags = {"strategy": "ddp", "ranks": 2, "steps": 4, **flags}
        own = flags["ranks"]
        space = flags.pop("space", 0)
        keep, announce = flags.pop("keep", False), flags.pop("announce", lambda text: None)
        plan = CheckPlan((own,), own, 8, trace_bytes=space, keep=keep, announce=announce)
        return check_against_one(resolve(program, flags, settings), tmp_path, server, plan)

    return run


def possible(task: str, how: str, strategy: str, ranks: int) -> bool:
    """Whether there is such a job."""
    if how == "bits" and (task == "Spectral" or strategy not in ("ddp", "ddp:reduce=tree")):
        return False
    return not strategy.startswith("dp:") or ranks == 1


@pytest.mark.slow(most=7)
@pytest.mark.thinned(
    1,
    ("task", CORRECT),
    ("how", HOW),
    ("strategy", STRATEGIES),
    ("ranks", [1, 2, 3]),
    where=possible,
)
def test_no_false_alarm(task: str, how: str, strategy: str, ranks: int, check: Check) -> None:
    arithmetic: dict[str, Any] = {"bitwise": True} if how == "bits" else {"precision": how}
    verdict = check(f"check_tasks:{task}", strategy=strategy, ranks=ranks, **arithmetic)
    assert verdict.equal, str(verdict)
    look = verdict.deciding
    assert look.ranks == ranks and look.comparison.steps == 4
    if how in ("bf16", "fp16") and ranks > 1 and task != "Spectral":
        assert look.tolerance.tensors == 1e-5  # no wider than fp32
    if task == "PackedBias" and how == "fp64":
        assert any("in_proj_bias (8 of 24 elements)" in note for note in verdict.not_checked)


@pytest.mark.slow(most=2)
@pytest.mark.parametrize(
    ("strategy", "ranks", "more"),
    [("gpipe", 2, {}), ("1f1b", 3, {"micro_batch": 3}), ("interleaved:chunks=2", 2, {})],
)
def test_pipelines_are_held_against_one_process_of_their_micro_batches(
    strategy: str, ranks: int, more: dict[str, Any], check: Check
) -> None:
    """In 16 bits a gradient of two shards together is rounded once, and of each alone twice."""
    verdict = check(
        "pipeline_tasks:Images", strategy=strategy, ranks=ranks, precision="bf16", **more
    )
    assert verdict.equal, str(verdict)
    assert verdict.deciding.comparison.largest == 0


@pytest.mark.slow(most=1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_built_in_tasks_are_equal_in_16_bits(precision: str, check: Check) -> None:
    verdict = check("digits", ranks=3, steps=3, precision=precision)
    assert verdict.equal, str(verdict)
    assert verdict.deciding.precision == precision
    assert not any("rounding" in note for note in verdict.not_checked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "bitwise", "stage", "hint"),
    [
        ("Centred", False, "loss", "samples that depend on each other"),
        ("Centred", True, "loss", "samples that depend on each other"),
        ("Drawn", False, "loss", "torch.poisson"),
        ("OnlyOnMany", False, "weight", "trained in one run"),
        ("Walks", False, "weight", "each rank updates by itself"),
        ("Codebook", False, "buffer", "the model writes itself"),
    ],
)
def test_what_differs_is_found_and_explained(
    task: str, bitwise: bool, stage: str, hint: str, check: Check
) -> None:
    verdict = check(f"check_tasks:{task}", bitwise=bitwise)
    assert not verdict.equal
    assert verdict.first is not None and verdict.first.stage == stage
    assert hint in verdict.first.hint
    assert verdict.deciding.one_process == bitwise  # its shards alone are another training


@pytest.mark.slow
def test_bits_are_those_of_the_same_micro_batches(check: Check) -> None:
    """A shard in several passes adds up otherwise than in one, in one process too."""
    verdict = check("contract_tasks:Plain", bitwise=True, micro_batch=1, ranks=2)
    assert verdict.equal, str(verdict)


@pytest.mark.slow
def test_numbers_that_functions_draw_do_not_hide_equal_bits(check: Check) -> None:
    verdict = check("check_tasks:Drawn", bitwise=True)
    assert verdict.equal and verdict.deciding.tolerance.exact
    assert any("draw random numbers in forward" in note for note in verdict.not_checked)


# --- what is compared, on traces made by hand -------------------------------------------------


def trace(path: Path, tensors: dict[str, Any], **row: Any) -> RecordedTrace:
    """A trace of one step: `tensors` before it are those with `start/` in their name, or zeros."""
    (path / "tensors").mkdir(parents=True)
    arrays = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    start = {n.removeprefix("start/"): a for n, a in arrays.items() if n.startswith("start/")}
    step = {n: a for n, a in arrays.items() if not n.startswith("start/")}
    save_file(
        {**{n: np.zeros_like(a) for n, a in step.items()}, **start},
        str(path / "tensors/start.safetensors"),
    )
    save_file(step, str(path / "tensors/step-00000000.safetensors"))
    usual = {"ids": [], "loss": 1.0, "samples": 4, "weight": 4.0, "learning_rate": 0.1}
    usual |= {"grad_norm": 1.0, "overflow": False, "draws": False, "magnitude": 4.0}
    digests = {name: array.tobytes().hex() for name, array in step.items()}
    rows = [{"step": -1, "digests": {}}, {"step": 0, **usual, **row, "digests": digests}]
    (path / "rank-000.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return RecordedTrace(path)


@pytest.mark.parametrize("hides", [-math.inf, math.nan, -3.4e38, -1e9])
def test_no_buffer_hides_another(hides: float, tmp_path: Path) -> None:
    mask = {"buffer/mask": [0.0, hides], "start/buffer/mask": [0.0, hides]}
    right = trace(tmp_path / "a", {**mask, "buffer/mean": [1.0, 2.0]})
    assert compare(right, right, FP64).first is None
    wrong = trace(tmp_path / "b", {**mask, "buffer/mean": [1.0, 2.0 + 1e-6]})
    for tolerance in (FP64, BITS):
        first = compare(right, wrong, tolerance).first
        assert first is not None and first.name == "buffer/mean"
    other = {"buffer/mask": [hides, 0.0], "start/buffer/mask": [0.0, hides]}
    moved = trace(tmp_path / "c", {**other, "buffer/mean": [1.0, 2.0]})
    first = compare(right, moved, FP64).first
    assert first is not None and first.name == "buffer/mask"


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("average/w", [1.0, 2.1]), ("gradient/w", [1.0, 2.1]), ("buffer/b", [1.0, math.nan])],
)
def test_every_stage_is_compared(name: str, wrong: list[float], tmp_path: Path) -> None:
    right = trace(tmp_path / "a", {name: [1.0, 2.0], "weight/w": [1.0, 1.0]})
    other = trace(tmp_path / "b", {name: wrong, "weight/w": [1.0, 1.0]})
    first = compare(right, other, FP64).first
    assert first is not None and first.name == name


@pytest.mark.parametrize(
    ("row", "stage"),
    [
        ({"grad_norm": 1.001}, "gradient norm"),
        ({"loss": "nan"}, "loss"),
        ({"learning_rate": 0.2}, "learning rate"),
        ({"overflow": True}, "overflow"),
    ],
)
def test_every_number_of_a_step_is_compared(
    row: dict[str, Any], stage: str, tmp_path: Path
) -> None:
    right = trace(tmp_path / "a", {"gradient/w": [1.0]})
    other = trace(tmp_path / "b", {"gradient/w": [1.0 + 1e-15]}, **row)
    first = compare(right, other, FP64).first
    assert first is not None and first.stage == stage
    assert compare(other, other, FP64).first is None


def test_a_length_in_32_bits_may_be_less_exact(tmp_path: Path) -> None:
    right = trace(tmp_path / "a", {"gradient/w": [1.0]}, grad_norm=3.55772)
    other = trace(tmp_path / "b", {"gradient/w": [1.0 + 1e-7]}, grad_norm=3.55723)  # 2e6 elements
    assert compare(right, other, CLOSE).first is None
    wrong = trace(tmp_path / "c", {"gradient/w": [1.0 + 1e-7]}, grad_norm=2.5157)
    first = compare(right, wrong, CLOSE).first
    assert first is not None and first.stage == "gradient norm"


def test_a_loss_is_relative_to_the_losses_of_the_samples(tmp_path: Path) -> None:
    right = trace(tmp_path / "a", {"gradient/w": [1.0]}, loss=1e-17)
    other = trace(tmp_path / "b", {"gradient/w": [1.0]}, loss=-3e-17)
    assert compare(right, other, FP64).first is None
    wrong = trace(tmp_path / "c", {"gradient/w": [1.0]}, loss=1e-8)
    assert compare(right, wrong, FP64).first is not None


def test_metrics_may_be_texts_infinite_or_no_numbers() -> None:
    inf, nan = math.inf, math.nan
    for same in ((nan, nan), ("nan", nan), ("inf", inf), (-inf, -inf), ("word", "word"), (0, 0.0)):
        assert number_difference(*same, 0.0) == 0, same
    for other in ((nan, 1.0), (inf, -inf), ("word", "other"), ("word", 1.0), (None, 1.0), (1, inf)):
        assert number_difference(*other, 0.0) == inf, other


# --- where it looks, and what it needs ----------------------------------------------------------


def test_ranks_that_share_unevenly_are_looked_at_too() -> None:
    assert ranks_to_check(2, 8, explicit=False) == ((2, 3), 3)
    assert ranks_to_check(2, 8, explicit=True) == ((2, 3), 2)
    assert ranks_to_check(4, 8, explicit=True) == ((4, 3), 4)
    assert ranks_to_check(8, 8, explicit=True) == ((8, 7), 8)
    assert ranks_to_check(3, 8, explicit=True) == ((3,), 3)
    assert ranks_to_check(2, 2, explicit=False) == ((2,), 2)
    even = {"fits": lambda ranks: ranks % 2 == 0}
    assert ranks_to_check(2, 8, explicit=False, **even) == ((2,), 2)
    assert ranks_to_check(4, 8, explicit=True, **even) == ((4,), 4)
    assert ranks_to_check(1, 8, explicit=True) == ((1,), 1)


@pytest.mark.slow
def test_steps_are_as_many_as_the_space_for_their_tensors_allows(
    check: Check, tmp_path: Path
) -> None:
    """7 x 16 + 17 x 3 weights in float64, their gradients too, SGD: 2,608 bytes a step."""
    per_step = 2 * 8 * (7 * 16 + 17 * 3)
    verdict = check("check_tasks:Points", precision="fp64", steps=9, space=5 * per_step, keep=True)
    assert verdict.equal and verdict.looks[0].comparison.steps == 5
    assert any(note.startswith("steps after 5:") for note in verdict.not_checked)
    for run in ("fp64-reference", "fp64-2-ranks"):
        files = [*(tmp_path / run / "trace" / "tensors").glob("step-*")]
        assert len(files) == 5
        assert sum(len(np.fromfile(file, np.uint8)) for file in files) < 5 * (per_step + 1500)


@pytest.mark.slow
def test_tensors_are_removed_once_they_are_compared(check: Check, tmp_path: Path) -> None:
    lines: list[str] = []
    assert check("check_tasks:Points", announce=lines.append).equal
    assert lines[0] == "job 1 of about 7: fp64-reference, 1 rank, 4 steps"
    assert lines[1] == "job 2 of about 7: fp64-2-ranks, 2 ranks, 4 steps" and len(lines) == 7
    assert [*tmp_path.glob("*/trace/rank-000.jsonl")]
    assert not [*tmp_path.glob("*/trace/tensors/*")]


def test_check_from_python(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.tools.check.check.ForkServer", lambda modules: _Kept(server))
    verdict = allranks.check("check_tasks:Points", ranks=3, steps=2, precision="fp64")
    assert verdict.equal and verdict.looks[0].ranks == 3
    assert str(verdict).startswith("equal: check_tasks:Points under ddp")
    assert verdict.to_data()["looks"][0]["steps"] == 2
    with pytest.raises(RequestError, match="no option 'rank'") as refused:
        allranks.check("check_tasks:Points", rank=3)
    assert refused.value.asked == "check(…, rank=3)"


class _Kept:
    """A fork server that others go on using."""

    def __init__(self, server: ForkServer) -> None:
        self.server = server

    def __enter__(self) -> ForkServer:
        return self.server

    def __exit__(self, *_: object) -> None:
        pass
