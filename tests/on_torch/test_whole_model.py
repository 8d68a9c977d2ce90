"""`trainer.whole_model()`: the same model on every rank, and a training that goes on as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import contract_tasks
from allranks.torch import Trainer
from conftest import Train
from test_every_strategy import difference, reference_for, references

STEPS = 10
CASES = [
    *(("Sentences", 2, "fsdp"), ("Images", 2, "gpipe"), ("Sentences", 2, "ddp")),
    *(("Sentences", 1, "dp:replicas=3"), ("Sentences", 2, "zero1"), ("Sentences", 2, "context")),
    *(("Sentences", 4, "tensor:data=2"), ("Sentences", 4, "fsdp:tensor=2")),
    *(("Sentences", 2, "independent"), ("Sentences", 2, "local-sgd:every=2")),
    ("Sentences", 4, "local-sgd:every=4,learners=2,inner=fsdp"),
    *(("Images", 1, "model-parallel"), ("Images", 2, "branches"), ("Images", 2, "zero-bubble")),
    *(("Images", 4, "mesh:data=2,pipeline=2"), ("Images", 2, "ps"), ("Images", 2, "decoupled")),
]
NOT_EXACT = ("local-sgd", "independent", "ps", "decoupled")
__all__ = ["references"]


@pytest.mark.slow(but=3, most=10)
@pytest.mark.parametrize(("task", "ranks", "strategy"), CASES)
def test_it_has_the_weights_of_the_end(
    task: str, ranks: int, strategy: str, train: Train, references: dict[str, Any]
) -> None:
    program = f"contract_tasks:Whole{task}"
    flags: dict[str, Any] = {"strategy": strategy, "ranks": ranks, "precision": "fp64"}
    run = train(program, steps=STEPS, **flags).run_dir
    whole, weights = torch.load(run / "whole.pt"), load_file(run / "weights.safetensors")
    assert whole.keys() >= weights.keys()  # tied weights have a second name in it
    assert [name for name, tensor in weights.items() if not torch.equal(whole[name], tensor)] == []
    if not strategy.startswith(NOT_EXACT):
        _, alone = reference_for(f"Whole{task}", train, references)
        assert difference({name: tensor.numpy() for name, tensor in weights.items()}, alone) < 1e-10


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_it_has_the_average_which_an_evaluation_has(strategy: str, train: Train) -> None:
    program = "contract_tasks:WholeSentences"
    run = train(program, "ema=0.5", strategy=strategy, ranks=2, steps=4).run_dir
    whole, average = torch.load(run / "whole.pt"), load_file(run / "average.safetensors")
    assert [name for name, tensor in average.items() if not torch.equal(whole[name], tensor)] == []


def test_a_model_that_is_there_already_cannot_be_built_again(on_ranks: Any) -> None:
    on_ranks(2, "own_loop_workers:whole_of_parts", None)


def test_the_leader_alone_is_told(on_ranks: Any) -> None:
    on_ranks(2, "own_loop_workers:whole_alone", None)


def test_what_trains_is_as_it_was_after_it() -> None:
    with Trainer(contract_tasks.Images()) as trainer:
        batches = trainer.batches(epochs=1)
        trainer.step(next(batches))
        with trainer.whole_model() as model:
            assert model is trainer.model
            assert not any(module.training for module in model.modules())
        assert all(module.training for module in trainer.model.modules())
        trainer.step(next(batches))
        batches.close()
