"""Context parallelism: equal to one process, and refused where a part of a sequence is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from safetensors.numpy import load_file

from allranks.errors import AllranksError, RequestError
from conftest import Train
from context_tasks import Sentences
from test_check import Check, check
from test_every_strategy import STEPS, difference

__all__ = ["check"]

WAYS = ["ulysses", "ring", "zig-zag"]
Results = dict[str, Any]


@pytest.fixture(scope="session")
def alone() -> Results:
    """What `single` made of each task, once for all tests."""
    return {}


def reference(task: str, train: Train, alone: Results) -> tuple[Any, Any]:
    if task not in alone:
        result = train(f"context_tasks:{task}", strategy="single", precision="fp64", steps=STEPS)
        alone[task] = result.summary, load_file(result.run_dir / "weights.safetensors")
    summary, weights = alone[task]
    return summary, weights


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("length", [12, 11])
@pytest.mark.parametrize(
    ("by", "ranks"), [("ulysses", 2), ("ring", 3), ("ring", 4), ("zig-zag", 2), ("zig-zag", 4)]
)
def test_attention_over_parts_is_attention(
    by: str, ranks: int, length: int, on_ranks: Callable[..., Any]
) -> None:
    """Forward and backward in float64 at 1e-12: causal, masks, groups of heads, uneven parts."""
    argument = {"by": by, "length": length}
    on_ranks(ranks, "context_workers:attention_is_that_of_one_process", argument)


def test_a_folded_sequence_gives_each_rank_as_much_to_compute(
    on_ranks: Callable[..., Any],
) -> None:
    """Scores under a causal mask, counted where they are computed, on 4 ranks: 1, 2, 3 and 4 blocks
    of 16 by 16 positions round a ring; 9 of 8 by 8 on each where the sequence lies folded."""
    for by in ("ring", "zig-zag"):
        on_ranks(4, "context_workers:scores_are_counted", {"by": by})


@pytest.mark.slow(but=1, most=6)
@pytest.mark.parametrize(
    ("task", "by", "ranks"),
    [
        *(("Odd", "ulysses", 2), ("Odd", "ulysses", 4), ("Odd", "ring", 3)),
        *(("Rotary", "ulysses", 2), ("Rotary", "ring", 3)),
        *(("Between", "ring", 2), ("Halved", "ulysses", 2), ("Coupled", "ring", 2)),
        *(("Encoder", "ulysses", 2), ("Encoder", "ring", 3)),
        *(("Odd", "zig-zag", 3), ("Rotary", "zig-zag", 2), ("Between", "zig-zag", 2)),
    ],
)
def test_equal_to_one_process(task: str, by: str, ranks: int, train: Train, alone: Results) -> None:
    """Uneven parts, masks and positions that are handed in, shared weights, torch's own layers."""
    wanted, weights = reference(task, train, alone)
    strategy = f"context:attention={by},bucket_mb=0.001"
    result = train(
        f"context_tasks:{task}", strategy=strategy, ranks=ranks, precision="fp64", steps=STEPS
    )
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10
    assert result.summary["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-10)
    assert result.summary["eval"] == pytest.approx(wanted["eval"], rel=1e-10)
    assert result.summary["witness"]["found"] == []


@pytest.mark.slow(most=2)
@pytest.mark.parametrize("by", WAYS)
def test_micro_batches_and_recomputed_blocks(by: str, train: Train, alone: Results) -> None:
    """Pieces of shards, of which some ranks have more; backward exchanges activations again."""
    _, weights = reference("Sentences", train, alone)
    result = train(
        "context_tasks:Sentences",
        strategy=f"context:data=2,attention={by}",
        ranks=4,
        precision="fp64",
        steps=STEPS,
        micro_batch=2,
        activation_checkpointing=True,
    )
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10
    sent = result.summary["sent_bytes"]["gradients"] / STEPS
    assert result.summary["card_bytes_per_step"] == pytest.approx(sent, abs=1)


@pytest.mark.slow
@pytest.mark.parametrize("by", WAYS)
def test_bytes_by_hand(by: str, train: Train) -> None:
    """4 steps of 24 sentences of 12 tokens, width 16, in 2 blocks on 2 ranks."""
    result = train(
        "context_tasks:Sentences",
        strategy=f"context:attention={by}",
        ranks=2,
        precision="fp64",
        steps=4,
    )
    own = 24 * 6 * 16 * 8  # activations of one rank
    attention = 8 * own / 2 if by == "ulysses" else 6 * own
    weights = [p.nbytes * 2 for p in Sentences().model().parameters()]  # in float64
    gradients = sum(-(-size // 128) * 128 for size in weights)  # each begins at 128 bytes
    tally = (1 + 8 + len(weights)) * 8
    sent = 2 * attention + own + gradients + tally  # own: gathered after the last block
    assert result.summary["sent_bytes"]["gradients"] == 4 * sent
    assert result.summary["card_bytes_per_step"] == sent


@pytest.mark.slow(most=1)
@pytest.mark.parametrize("by", WAYS)
def test_checkpoints_cross_over(by: str, train: Train, alone: Results) -> None:
    """ddp on 2 ranks, context on 2, context on 4 in two groups, one process: 10 steps of one."""
    _, weights = reference("Sentences", train, alone)
    resume: dict[str, Any] = {}
    for strategy, ranks, steps in (
        ("ddp", 2, 3),
        (f"context:attention={by}", 2, 5),
        (f"context:data=2,attention={by}", 4, 8),
        ("single", 1, STEPS),
    ):
        result = train(
            "context_tasks:Sentences",
            strategy=strategy,
            ranks=ranks,
            steps=steps,
            precision="fp64",
            checkpoint_every=5,
            **resume,
        )
        resume = {"resume": str(result.run_dir)}
    assert result.summary["resumed_from_step"] == 8
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10


@pytest.mark.slow
def test_a_bad_step_is_skipped_and_a_killed_rank_replaced(train: Train) -> None:
    """Who is to blame is searched in whole passes; the moving average follows good steps alone."""
    common: dict[str, Any] = {"precision": "fp64", "steps": 8, "on_bad_step": "skip"}
    nan, kill = "nan@rank=0,step=3", "kill@rank=1,step=5"  # once the step of the NaN is saved
    one = train("context_tasks:Sentences", "ema=0.9", strategy="single", inject=nan, **common)
    many = train(
        "context_tasks:Sentences",
        "ema=0.9",
        strategy="context:data=2",
        ranks=4,
        inject=f"{nan} {kill} slow@rank=2,seconds=0.2",
        checkpoint_every=2,
        max_restarts=1,
        **common,
    )
    assert many.summary["restarts"] == 1
    weights = [load_file(run.run_dir / "weights.safetensors") for run in (many, one)]
    assert difference(*weights) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_check_calls_it_equal(precision: str, check: Check) -> None:
    """The proof lets rounding pass, of half types too."""
    strategy = "context:attention=ring" if precision == "fp16" else "context"
    verdict = check(
        "context_tasks:Rotary", strategy=strategy, ranks=2, precision=precision, steps=2
    )
    assert verdict.equal, str(verdict)


@pytest.mark.slow(but=1, most=7)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("own positions", "in the block 'blocks.0', where a rank has 6 of 12 positions"),
        ("convolution", "its output differs"),
        ("attention written out", "in the block 'blocks.0'"),
        ("dropout of weights", r"dropout in a block, on a tensor of shape \(24, 4, 6, 6\)"),
        ("dropout by function", "in the block 'blocks.0'"),
        ("beside blocks", "aten.mean.dim in what _Rotary.forward does with what a block returns"),
        ("let in later", "its output differs"),
        ("layout", r"a tensor of shape \(1, 12, 2\), with 12 positions, another one"),
        ("capacity", "a MixtureOfExperts with capacity_factor in the block 'blocks.0'"),
        ("skips", "other calls of blocks than in the first pass, at 'blocks.1'"),
        ("own mask", r"a mask of shape \(6, 6\) for 12 positions"),
        ("drops weights", "dropout_p=0.1"),
        ("batch norm", "BatchNorm in the block 'blocks.0'"),
        ("counts", "the block 'blocks.0' writes a buffer"),
    ],
)
def test_what_is_another_model_on_a_part_is_refused(fault: str, message: str, train: Train) -> None:
    with pytest.raises(AllranksError, match=message):
        train(
            "context_tasks:Refused", f"fault={fault}", strategy="context", ranks=2, precision="fp64"
        )


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("program", "settings", "strategy", "ranks", "message"),
    [
        ("context_tasks:Sentences", (), "context", 3, "4 heads of attention on 3 ranks"),
        ("context_tasks:Sentences", ("tokens=2",), "context:attention=ring", 3, "1-1-0 of them"),
        ("context_tasks:Sentences", (), "context:data=2", 3, "3 ranks for 2 copies"),
        ("contract_tasks:Words", (), "context", 2, "no blocks in _Tied"),
        ("contract_tasks:Images", (), "context", 2, "no blocks in Sequential"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    program: str,
    settings: tuple[str, ...],
    strategy: str,
    ranks: int,
    message: str,
    train: Train,
) -> None:
    with pytest.raises(RequestError, match=message):
        train(program, *settings, strategy=strategy, ranks=ranks, steps=1)
