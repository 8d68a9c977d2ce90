"""Pipelines: bits, checkpoints that cross over, `check`, refusals, and what a cut can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from torch import nn

from allranks.errors import AllranksError, RequestError
from allranks.job.config import resolve
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.tools.check.against_single import CheckPlan, check_against_one
from allranks.torch.parallel.pipeline import staged
from conftest import Train
from test_check import Check, check
from test_every_strategy import (
    STEPS,
    check_that_it_goes_on_after_a_kill,
    difference,
    reference_for,
    references,
)

__all__ = ["check", "references"]


@pytest.mark.slow(most=2)
@pytest.mark.cases(
    ("strategy", "ranks"),
    [("1f1b", 3), ("zero-bubble", 3), ("interleaved:chunks=2", 2), ("gpipe", 2)],
    exhaustive=[("zero-bubble", 5), ("gpipe", 4), ("1f1b", 1), ("1f1b", 4), ("1f1b", 5)],
)
def test_bitwise_gives_the_bits_of_one_process(strategy: str, ranks: int, train: Train) -> None:
    common: dict[str, Any] = {"bitwise": True, "steps": 12}
    wanted = train("pipeline_tasks:Images", strategy="single", **common)
    found = train("pipeline_tasks:Images", strategy=strategy, ranks=ranks, **common)
    assert found.summary["weights_sha256"] == wanted.summary["weights_sha256"]


@pytest.mark.slow
def test_a_training_goes_through_strategies_with_the_bits_of_one(train: Train) -> None:
    """`1f1b`, `ddp`, `zero-bubble` on 3 ranks, `single`: the bits of `single` all along."""
    common: dict[str, Any] = {"bitwise": True, "checkpoint_every": 4}
    wanted = train("pipeline_tasks:Images", "ema=0.9", strategy="single", steps=16, **common)
    folder = ""
    for step, (strategy, ranks) in enumerate(
        [("1f1b", 2), ("ddp", 2), ("zero-bubble", 3), ("single", 1)]
    ):
        found = train(
            "pipeline_tasks:Images",
            "ema=0.9",
            strategy=strategy,
            ranks=ranks,
            steps=4 * (step + 1),
            **({"resume": folder} if folder else {}),
            **common,
        )
        folder = str(found.run_dir)
    assert found.summary["weights_sha256"] == wanted.summary["weights_sha256"]
    ours, theirs = (load_file(run.run_dir / "average.safetensors") for run in (found, wanted))
    assert difference(ours, theirs) == 0


@pytest.mark.slow
def test_ranks_that_share_one_weight_and_not_another_do_not_wait_for_each_other(
    check: Check,
) -> None:
    job: dict[str, Any] = {"strategy": "1f1b", "ranks": 3, "precision": "fp64"}
    verdict = check("pipeline_tasks:TwoTied", **job)
    assert verdict.equal, str(verdict)


@pytest.mark.slow
@pytest.mark.cases("strategy", ["1f1b"], exhaustive=["gpipe"])
def test_check_calls_it_equal(strategy: str, check: Check) -> None:
    verdict = check("pipeline_tasks:Words", strategy=strategy, ranks=2, steps=2)
    assert verdict.equal, str(verdict)


@pytest.mark.slow
def test_check_goes_without_a_number_of_ranks_that_nobody_asked_for(
    server: ForkServer, tmp_path: Path
) -> None:
    """A model of two layers has no third stage: the look on 3 ranks is left out, and said so."""
    flags = {"strategy": "1f1b", "ranks": 2, "steps": 2, "precision": "fp64"}
    job = resolve("pipeline_tasks:Pictures", flags)
    verdict = check_against_one(job, tmp_path, server, CheckPlan((2, 3), 2, shards=8))
    assert verdict.equal, str(verdict)
    assert "3 ranks: refused, an nn.Sequential of 2 layers with weights" in str(verdict)


@pytest.mark.slow
def test_micro_batches_of_another_size(train: Train, references: dict[str, Any]) -> None:
    """5 samples at once of batches of 24 and 5: the last micro-batch has fewer."""
    _, weights = reference_for("Words", train, references)
    result = train(
        "pipeline_tasks:Words",
        strategy="1f1b",
        ranks=3,
        precision="fp64",
        steps=STEPS,
        micro_batch=5,
    )
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("program", "ranks", "flags", "found"),
    [
        ("contract_tasks:Words", 2, {}, "only an nn.Sequential says by itself"),
        ("contract_tasks:Pairs", 2, {}, "loss_over"),
        ("pipeline_tasks:Pictures", 3, {}, "an nn.Sequential of 2 layers with weights"),
        ("pipeline_tasks:Words", 2, {"bitwise": True}, "'embedding.weight' in several stages"),
        ("pipeline_tasks:Drawing", 2, {"bitwise": True}, "stage 1 or the loss draws by itself"),
        ("pipeline_tasks:Images", 2, {"compile": "eager"}, "passes of its own"),
        ("pipeline_tasks:Lost", 2, {}, "in none of the stages of the task"),
        ("pipeline_tasks:Copied", 2, {}, "not one of the model's"),
        ("pipeline_tasks:Renewed", 2, {}, "a new Dropout"),
        ("pipeline_tasks:Shared", 2, {}, "the Dropout '0' in stages 0 and 1"),
        ("pipeline_tasks:Checkpointing", 2, {}, "ran again during backward"),
        ("pipeline_tasks:ClippedWithAnIdleRank", 3, {}, "it raised RuntimeError"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    program: str, ranks: int, flags: dict[str, Any], found: str, train: Train
) -> None:
    with pytest.raises(RequestError, match=found):
        train(program, strategy="1f1b", ranks=ranks, steps=2, **flags)


@pytest.mark.slow
def test_what_the_next_stage_does_not_use_has_no_gradient(train: Train) -> None:
    """As in one process: no weight decay without a gradient."""
    common: dict[str, Any] = {"precision": "fp64", "steps": 4}
    wanted = train("pipeline_tasks:Unused", strategy="single", **common)
    found = train("pipeline_tasks:Unused", strategy="1f1b", ranks=2, **common)
    ours, theirs = (load_file(run.run_dir / "weights.safetensors") for run in (found, wanted))
    assert difference(ours, theirs) < 1e-10


@pytest.mark.slow
def test_an_optimizer_that_needs_some_gradient_trains_where_every_rank_has_one(
    train: Train,
) -> None:
    common: dict[str, Any] = {"precision": "fp64", "steps": 4}
    wanted = train("pipeline_tasks:Clipped", strategy="single", **common)
    found = train("pipeline_tasks:Clipped", strategy="gpipe", ranks=2, **common)
    ours, theirs = (load_file(run.run_dir / "weights.safetensors") for run in (found, wanted))
    assert difference(ours, theirs) < 1e-10


@pytest.mark.slow
def test_the_witness_finds_nothing_in_a_pipeline(train: Train) -> None:
    flags: dict[str, Any] = {"steps": 3, "witness": "stop"}  # it would end the job
    result = train("pipeline_tasks:Images", strategy="1f1b", ranks=2, **flags)
    assert all(
        '"event": "witness"' not in path.read_text() for path in result.run_dir.glob("events*")
    )


def test_weights_of_other_stages_keep_what_is_written_on_them() -> None:
    """An optimizer makes its groups by it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias.no_decay = True
    staged._replace_by_meta(model, {"0.weight", "0.bias"})
    assert model[1].bias.is_meta
    assert vars(model[1].bias) == {"no_decay": True}


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_job_goes_on(
    train: Train, references: dict[str, Any]
) -> None:
    _, weights = reference_for("Images", train, references)
    check_that_it_goes_on_after_a_kill(train, "pipeline_tasks:Images", "1f1b", weights)


@pytest.mark.slow
@pytest.mark.cases("rank", [0], exhaustive=[1, 2])
def test_a_bad_step_stops_all_ranks_alike(rank: int, train: Train) -> None:
    inject = f"nan@rank={rank},step=3"
    with pytest.raises(AllranksError, match="none looks for the samples"):
        train("pipeline_tasks:Images", strategy="1f1b", ranks=3, steps=6, inject=inject)


@pytest.mark.slow
@pytest.mark.cases(
    ("strategy", "ranks"),
    [("1f1b", 3), ("interleaved:chunks=2", 2)],
    exhaustive=[("zero-bubble", 4)],
)
def test_the_busiest_rank_sends_what_the_card_says(
    strategy: str, ranks: int, on_ranks: Callable[..., Any]
) -> None:
    job = {"strategy": strategy, "steps": 6}
    on_ranks(ranks, "pipeline_tasks:bytes_and_memory", {"task": "Images", "job": job})


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("flag", "value"), [("precision", "bf16"), ("precision", "fp16"), ("micro_batch", 5)]
)
def test_zero_bubble_has_the_bits_of_1f1b(flag: str, value: Any, train: Train) -> None:
    found = [
        train("pipeline_tasks:Images", strategy=s, ranks=2, steps=6, **{flag: value}).summary
        for s in ("1f1b", "zero-bubble")
    ]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    assert found[0]["train_loss"] == found[1]["train_loss"]


def test_zero_bubble_keeps_its_activations(train: Train) -> None:
    flags: dict[str, Any] = {"ranks": 2, "steps": 2, "activation_checkpointing": True}
    with pytest.raises(RequestError, match="compute their activations again"):
        train("pipeline_tasks:Blocks", strategy="zero-bubble", **flags)


def test_layers_are_cut_by_what_all_ranks_measure(on_ranks: Callable[..., Any]) -> None:
    on_ranks(2, "pipeline_tasks:cut_by_cost", {})


@pytest.mark.slow
def test_the_gradient_is_that_of_torch_pipelining(on_ranks: Callable[..., Any]) -> None:
    job = {"strategy": "gpipe", "precision": "fp64"}
    on_ranks(2, "pipelining_workers:as_torch_pipelining", {"task": "Plain", "job": job})


@pytest.mark.slow(most=2)
@pytest.mark.parametrize(("strategy", "ranks"), [("gpipe", 2), ("1f1b", 4), ("zero-bubble", 4)])
def test_messages_need_no_tags(strategy: str, ranks: int, on_ranks: Callable[..., Any]) -> None:
    """Micro-batches of two sizes, one after the other: what is not known yet is not passed over."""
    job = {"strategy": strategy, "steps": 3, "micro_batch": 2, "backend": "gloo"}
    argument = {"module": "pipeline_tasks", "task": "Words", "job": job}
    on_ranks(ranks, "pipelining_workers:without_tags", argument)
