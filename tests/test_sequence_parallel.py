"""`sequence=yes`: equal to one process, fewer activations kept, refused where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from safetensors.numpy import load_file

from allranks.errors import AllranksError, RequestError
from conftest import Train
from test_check import Check, check
from test_every_strategy import STEPS, difference, reference_for, references

__all__ = ["check", "references"]

FP64: dict[str, Any] = {"precision": "fp64", "steps": STEPS}


@pytest.mark.slow(most=2)
@pytest.mark.cases(
    ("task", "strategy", "ranks", "how"),
    [
        ("Gated", "tensor:sequence=yes", 4, {}),
        ("Odd", "tensor:sequence=yes", 4, {"activation_checkpointing": True}),
        ("Gated", "tensor:sequence=yes", 2, {"activation_checkpointing": True, "micro_batch": 5}),
    ],
    exhaustive=[
        ("Gated", "tensor:sequence=yes", 2, {}),
        ("Odd", "tensor:data=2,sequence=yes", 4, {"micro_batch": 2}),
    ],
)
def test_equal_to_one_process(
    task: str,
    strategy: str,
    ranks: int,
    how: dict[str, Any],
    train: Train,
    references: dict[str, Any],
) -> None:
    """Lengths that no rank count divides, arguments that stay whole, weights that blocks share."""
    check_equal(task, strategy, ranks, how, train, references)


@pytest.mark.slow(most=1)
@pytest.mark.cases(
    ("task", "strategy", "ranks", "how"),
    [
        ("Scaled", "fsdp:tensor=2,sequence=yes", 4, {"micro_batch": 3}),
        ("Odd", "fsdp:tensor=4,sequence=yes", 4, {"activation_checkpointing": True}),
    ],
    exhaustive=[
        ("Gated", "fsdp:tensor=2,sequence=yes,reshard=no", 4, {}),
    ],
)
def test_sharded_and_cut_is_equal_to_one_process(
    task: str,
    strategy: str,
    ranks: int,
    how: dict[str, Any],
    train: Train,
    references: dict[str, Any],
) -> None:
    """Blocks that are units, with a weight of no dimension, and blocks that share weights."""
    check_equal(task, strategy, ranks, how, train, references)


@pytest.mark.slow(most=1)
@pytest.mark.cases(
    ("task", "strategy", "ranks", "how"),
    [
        ("Gated", "mesh:data=2,tensor=2,sequence=yes", 4, {"micro_batch": 2}),
        (
            "Scaled",
            "mesh:tensor=2,pipeline=2,sequence=yes,schedule=interleaved(chunks=2)",
            4,
            {"activation_checkpointing": True},
        ),
    ],
    exhaustive=[
        ("Scaled", "mesh:tensor=2,pipeline=2,sequence=yes", 4, {}),
        ("Scaled", "mesh:data=2,tensor=2,pipeline=2,sequence=yes,schedule=gpipe", 8, {}),
    ],
)
def test_stages_that_are_cut_are_equal_to_one_process(
    task: str,
    strategy: str,
    ranks: int,
    how: dict[str, Any],
    train: Train,
    references: dict[str, Any],
) -> None:
    """Stages with a block each and without one, and a table that two of them hold."""
    check_equal(task, strategy, ranks, how, train, references)


def check_equal(
    task: str,
    strategy: str,
    ranks: int,
    how: dict[str, Any],
    train: Train,
    references: dict[str, Any],
) -> None:
    wanted, weights = reference_for(task, train, references, "sequence_tasks")
    result = train(f"sequence_tasks:{task}", strategy=strategy, ranks=ranks, **how, **FP64)
    found = result.summary
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10
    assert found["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-10)
    assert found["eval"] == pytest.approx(wanted["eval"], rel=1e-10)
    assert found["witness"]["found"] == []
    sent = found["sent_bytes"]["gradients"] / STEPS
    if strategy.startswith("fsdp") and "micro_batch" in how:  # some steps have fewer passes
        assert sent <= found["card_bytes_per_step"] + 1
    else:
        of_rows = 5 if strategy.startswith("mesh") else 1  # of which each is rounded
        assert found["card_bytes_per_step"] == pytest.approx(sent, abs=of_rows)


@pytest.mark.slow
def test_bytes_by_hand(train: Train) -> None:
    """4 steps of 24 sentences of 12 tokens, width 16, in 2 blocks of 2 regions on 2 ranks."""
    how: dict[str, Any] = {"ranks": 2, "precision": "fp64", "steps": 4}
    sent = [
        train("contract_tasks:Sentences", strategy=strategy, **how).summary["sent_bytes"]
        for strategy in ("tensor:sequence=yes", "tensor")
    ]
    half = 24 * 12 * 16 * 8 // 2  # of activations
    again = 2 * 2 * half  # the input of each region, in backward
    edges = 2 * half  # gathered after the last block; the gradient in front of the first
    norms_and_biases = 2 * 6 * 16 * 8
    more = sent[0]["gradients"] - sent[1]["gradients"]
    assert more == 4 * (again + edges + norms_and_biases)


def test_blocks_keep_their_share_of_activations(on_ranks: Callable[..., Any]) -> None:
    """What autograd keeps of a GPT on 4 ranks, beside the weights, to that of one process."""
    on_ranks(4, "sequence_workers:kept_activations", {})


@pytest.mark.slow
@pytest.mark.cases("task", ["Gated"], exhaustive=["Odd"])
def test_checkpoints_cross_over(task: str, train: Train, references: dict[str, Any]) -> None:
    """In parts of sequences on 2 ranks, one process, a product on 4, in parts on 4: 10 steps."""
    _, weights = reference_for(task, train, references, "sequence_tasks")
    resume: dict[str, Any] = {}
    for strategy, ranks, steps in (
        ("tensor:sequence=yes", 2, 3),
        ("single", 1, 5),
        ("fsdp:tensor=2,sequence=yes", 4, 8),
        ("tensor:sequence=yes", 4, STEPS),
    ):
        result = train(
            f"sequence_tasks:{task}",
            strategy=strategy,
            ranks=ranks,
            precision="fp64",
            steps=steps,
            checkpoint_every=5,
            **resume,
        )
        resume = {"resume": str(result.run_dir)}
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10


@pytest.mark.slow
def test_a_checkpoint_keeps_the_bits(train: Train) -> None:
    """Saved in parts of sequences, whole in one process, in parts of weights, without a step."""
    how: dict[str, Any] = {"steps": 3, "checkpoint_every": 3}
    runs = [train("sequence_tasks:Gated", strategy="tensor:sequence=yes", ranks=2, **how)]
    for strategy, ranks in (("single", 1), ("fsdp", 2)):
        resume = str(runs[-1].run_dir)
        runs.append(
            train("sequence_tasks:Gated", strategy=strategy, ranks=ranks, resume=resume, **how)
        )
    assert len({run.summary["weights_sha256"] for run in runs}) == 1


@pytest.mark.slow
@pytest.mark.cases(
    ("strategy", "ranks"),
    [("tensor:sequence=yes", 2)],
    exhaustive=[
        ("fsdp:tensor=2,sequence=yes", 4),
        ("tensor:data=2,sequence=yes", 4),
        ("mesh:data=2,tensor=2,sequence=yes", 4),
    ],
)
def test_check_calls_it_equal(strategy: str, ranks: int, check: Check) -> None:
    verdict = check("sequence_tasks:Gated", strategy=strategy, ranks=ranks, steps=2)
    assert verdict.equal, str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("mean over time", "its output differs by .* in the block 'blocks.0', where a rank"),
        ("gradient of an argument", r"the gradient of an argument of shape \(.*, 4, 16\) differs"),
        ("a gate of zero", r"the gradient of an argument of shape \(.*, 4, 16\) differs"),
        ("dropout by function", "its output differs by .* in the block 'blocks.0', where a rank"),
        ("a layer behind a gate of zero", "the gradient of 'column.0.weight' differs"),
        ("as long", r"another tensor of shape \(.*, 6, 16\), and a rank has 6 positions of 11"),
        ("as long later", r"a Linear that is given a tensor of shape \(.*, 4, 16\)"),
        ("shared weight", "the weight 'scale', which a block has, too"),
        ("stranger", "the block 'blocks.0' uses 'bias', not its own"),
    ],
)
def test_what_is_another_model_on_a_part_is_refused(fault: str, message: str, train: Train) -> None:
    with pytest.raises(AllranksError, match=message):
        train(
            "sequence_tasks:Gated",
            f"fault={fault}",
            strategy="tensor:sequence=yes",
            ranks=2,
            precision="fp64",
        )


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("program", "strategy", "ranks", "message"),
    [
        ("contract_tasks:Words", "tensor:sequence=yes", 2, "no blocks in _Tied"),
        ("contract_tasks:Sentences", "tensor:sequence=yes,exact=yes", 2, "parts of a sequence"),
        ("contract_tasks:Sentences", "tensor:sequence=yes", 3, "in the block 'blocks.0'"),
        ("tensor_tasks:Encoder", "tensor:sequence=yes", 3, "in the block 'layers.layers.0'"),
        ("sequence_tasks:Scaled", "mesh:data=2,sequence=yes", 2, "tensor=1"),
        ("sequence_tasks:Scaled", "fsdp:sequence=yes", 2, "tensor=1"),
        ("sequence_tasks:UnitsWithin", "fsdp:tensor=2,sequence=yes", 2, "in the block 'blocks.0'"),
        ("sequence_tasks:HalfBlocks", "mesh:tensor=2,pipeline=2,sequence=yes", 4, "no block of"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    program: str, strategy: str, ranks: int, message: str, train: Train
) -> None:
    with pytest.raises(RequestError, match=message):
        train(program, strategy=strategy, ranks=ranks, steps=1)
