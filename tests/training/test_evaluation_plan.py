"""What a training run needs beside steps: evaluations, an early end, an average, given weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import trainer_tasks
from allranks.checkpoint.folder import committed, step_of
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.job.run_folder import read_events
from allranks.torch import Trainer
from allranks.torch.model.weights import weights_sha256
from conftest import Train
from trainer_tasks import Block, Blocks, Residual


def evaluations(run_dir: Path) -> list[tuple[int, bool]]:
    rows = [row for row in read_events(run_dir) if row["event"] == "evaluated"]
    return [(row["step"], row["best"]) for row in rows]


@pytest.mark.slow
def test_evaluations_on_the_way_and_the_best_is_kept(train: Train) -> None:
    """Metrics are those of the weights at that step; the best of them has a checkpoint."""
    flags = {"eval_every": "4", "best": "max:accuracy", "steps": 20, "ranks": 2}
    result = train("digits", "lr=0.003", **flags)
    found = [row for row in read_events(result.run_dir) if row["event"] == "evaluated"]
    assert [row["step"] for row in found] == [4, 8, 12, 16, 20]
    assert found[-1]["metrics"] == result.summary["eval"]
    best, better = -1.0, []
    for row in found:
        better.append(row["metrics"]["accuracy"] > best)
        best = max(best, row["metrics"]["accuracy"])
    assert [row["best"] for row in found] == better
    kept = {step_of(path) for path in committed(result.run_dir / "checkpoints")}
    assert max(row["step"] for row in found if row["best"]) in kept


def test_an_epoch_ends_with_its_evaluation(train: Train) -> None:
    """5 steps an epoch; a stream that nobody knows the length of ends one too."""
    result = train("contract_tasks:Images", "epochs=2", eval_every="epoch")
    assert [step for step, _ in evaluations(result.run_dir)] == [5, 10]


@pytest.mark.slow
def test_it_ends_early_and_stays_ended(train: Train, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"eval_every": "2", "early_stop": "min:loss", "patience": 3}
    run_dir = str(tmp_path / "run")
    flags |= {"run_dir": run_dir, "checkpoint_every": 50, "steps": 100}
    first = train("trainer_tasks:Worse", **flags, ranks=2)
    assert first.summary["steps"] == 8 and first.summary["ended_early"]
    again = train("", run_dir=run_dir, ranks=1)
    assert again.summary["steps"] == 8 and again.summary["resumed_from_step"] == 8
    longer = train("", run_dir=run_dir, patience=5)
    assert longer.summary["steps"] == 12, "patience may change, and what was in vain is remembered"


@pytest.mark.slow
def test_it_ends_when_a_metric_is_reached_and_says_when(train: Train, tmp_path: Path) -> None:
    """With the seconds that a clock beside it confirms; not reached is no number."""
    flags: dict[str, Any] = {"eval_every": "4", "until": "accuracy=0.5", "steps": 60}
    done = train("digits", "lr=0.003", **flags, ranks=2)
    found = [row for row in read_events(done.run_dir) if row["event"] == "evaluated"]
    assert [row["metrics"]["accuracy"] >= 0.5 for row in found] == [False] * (len(found) - 1) + [
        True
    ]
    told = done.summary["until"]
    assert done.summary["ended_early"] and told["step"] == done.summary["steps"] < 60
    (first,) = (r for r in read_events(done.run_dir) if r["event"] == "training" and r["rank"] == 0)
    since_first_step = found[-1]["monotonic"] - first["monotonic"]
    assert since_first_step <= told["seconds"] < since_first_step + 30
    never = train("digits", **{**flags, "until": "min:loss=1e-9", "steps": 8})
    assert never.summary["until"] == {"asked": "min:loss=1e-9", "step": None, "seconds": None}
    assert not never.summary["ended_early"] and never.summary["steps"] == 8


@pytest.mark.parametrize(
    ("until", "every", "found"),
    [
        ("loss=0.1", "2", "which way is better"),
        ("accuracy=high", "2", "no METRIC=NUMBER"),
        ("accuracy", "2", "no METRIC=NUMBER"),
        ("accuracy=0.9", "", "no --eval-every"),
        ("acuracy=0.9", "2", "no metric 'acuracy'"),
    ],
)
def test_what_a_training_cannot_end_at(train: Train, until: str, every: str, found: str) -> None:
    with pytest.raises(RequestError, match=found):
        train("contract_tasks:Images", eval_every=every, until=until, steps=4)


def test_a_metric_that_is_not_there(train: Train) -> None:
    with pytest.raises(RequestError, match="no metric 'acuracy'"):
        train("contract_tasks:Images", eval_every="2", early_stop="max:acuracy", steps=4)


class Rare(trainer_tasks.Worse):
    """A metric of what the first samples to be judged have none of."""

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        rare = batch[1] == 2
        rare[:5] = False
        return {"recall": ((output.argmax(1) == batch[1])[rare].sum(), rare.sum())}


def test_a_metric_that_the_first_samples_do_not_have() -> None:
    job = Job(eval_every="1", early_stop="max:recall", patience=1)
    with Trainer(Rare(), job) as trainer:
        trainer.rehearse()
        trainer.step(next(trainer.batches()))
        assert trainer.evaluate_if_due() is not None


def test_ranks_that_train_apart_do_not_judge_apart(train: Train) -> None:
    flags = {"strategy": "independent", "ranks": 2, "eval_every": "2", "best": "min:loss"}
    with pytest.raises(RequestError, match="metrics of their own"):
        train("trainer_tasks:Worse", steps=4, **flags)


def test_callbacks_are_called_on_every_rank(train: Train, tmp_path: Path) -> None:
    flags = {"steps": 3, "ranks": 2, "eval_every": "2", "checkpoint_every": 2}
    train("trainer_tasks:Recorded", f"folder={tmp_path}", **flags)
    metrics = ["accuracy", "loss"]
    evaluation = ["before an evaluation", "after it", f"evaluation {metrics}"]
    expected = ["start", "step 0", "step 1", *evaluation, "save 2", "step 2", "save 3"]
    for rank in range(2):
        calls = json.loads((tmp_path / f"calls-{rank}.json").read_text())
        assert calls == [*expected, "end"]


# --- the moving average -----------------------------------------------------------------------


def test_the_average_is_that_of_the_weights() -> None:
    """Against one kept by hand; evaluation sees the average, and leaves the weights alone."""
    task = Blocks(ema=0.7)
    with Trainer(task, Job(threads=1)) as trainer:
        average = {n: t.clone() for n, t in trainer.weights() if t.is_floating_point()}
        for batch in trainer.batches(steps=4):
            trainer.step(batch)
            for name, tensor in trainer.weights():
                if tensor.is_floating_point():
                    average[name].lerp_(tensor, 1 - 0.7)
        kept = trainer.strategy.step.average
        assert kept is not None
        for name, tensor in kept.state().items():
            torch.testing.assert_close(tensor, average[name], rtol=1e-6, atol=1e-7)
        weights = {name: tensor.clone() for name, tensor in trainer.weights()}
        metrics = trainer.evaluate()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in trainer.weights())
        with kept.in_place():
            by_hand = trainer.task_data.evaluate()
        assert metrics == by_hand != trainer.task_data.evaluate()


@pytest.mark.slow
def test_the_average_goes_on_with_the_run(train: Train, tmp_path: Path) -> None:
    flags = {"bitwise": True, "checkpoint_every": 3}
    whole = train("trainer_tasks:Blocks", "ema=0.9", steps=7, ranks=2, **flags)
    run_dir = str(tmp_path / "run")
    train("trainer_tasks:Blocks", "ema=0.9", steps=3, ranks=1, run_dir=run_dir, **flags)
    rest = train("", run_dir=run_dir, steps=7, ranks=2)
    for name in ("weights", "average"):
        one, two = (load_file(run / f"{name}.safetensors") for run in (whole.run_dir, rest.run_dir))
        assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


# --- weights to start from --------------------------------------------------------------------


def test_given_weights_and_frozen_ones(train: Train, tmp_path: Path) -> None:
    """What is not given keeps its initial value and is named; what is frozen stays as given."""
    given = {n: t + 1 for n, t in Residual().state_dict().items() if not n.startswith("last")}
    path = tmp_path / "given.safetensors"
    save_file(given, path)
    settings = (f"weights={path}", "frozen=true")
    result = train("trainer_tasks:Blocks", *settings, ranks=2, steps=3)
    ready = next(row for row in read_events(result.run_dir) if row["event"] == "ready")
    assert ready["not_pretrained"] == ["last.bias", "last.weight"]
    weights = load_file(result.run_dir / "weights.safetensors")
    for name in ("first.weight", "first.bias"):
        assert torch.equal(weights[name], given[name])
    assert not torch.equal(weights["blocks.0.linear.weight"], given["blocks.0.linear.weight"])


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        ({"last.weight": torch.ones(4, 8)}, r"last.weight: \(4, 8\), in the model \(3, 8\)"),
        ({"frist.bias": torch.ones(8)}, r"frist.bias: \(8,\), in the model nothing"),
    ],
)
def test_weights_of_another_model(weights: dict[str, Tensor], found: str, tmp_path: Path) -> None:
    path = tmp_path / "given.safetensors"
    save_file(weights, path)
    with pytest.raises(RequestError, match=found):
        Trainer(Blocks(weights=str(path)))


class Told(Blocks):
    def pretrained(self) -> Any:
        return {"last.bias": torch.ones(3), "epoch": 3}


def test_given_weights_are_tensors_of_the_model() -> None:
    with pytest.raises(RequestError, match="epoch: a int, in the model nothing"):
        Trainer(Told())


def test_weights_that_no_file_holds(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.ones(1)}, path)
    with pytest.raises(RequestError, match="a pickle could run anything"):
        Trainer(Blocks(weights=str(path)))


# --- forward passes in another way ------------------------------------------------------------


def outcome(job: Job, steps: int = 4) -> tuple[str | None, int]:
    Block.computed = 0
    with Trainer(Blocks(), job) as trainer:
        for batch in trainer.batches(steps=steps):
            trainer.step(batch)
        return weights_sha256(trainer.weights()), Block.computed


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("micro_batch", [None, 6])
def test_activations_computed_again_are_the_same(micro_batch: int | None) -> None:
    """Dropout draws the same masks, BatchNorm counts its moments once;
    blocks run twice as often."""
    plain, computed = outcome(Job(threads=1, micro_batch=micro_batch))
    again, twice = outcome(Job(threads=1, micro_batch=micro_batch, activation_checkpointing=True))
    assert again == plain and twice == 2 * computed


def test_a_model_is_given_back_as_it_was() -> None:
    with Trainer(Blocks(), Job(activation_checkpointing=True)) as trainer:
        model = trainer.strategy.model
        assert "forward" in vars(model.blocks[0])
    assert "forward" not in vars(model.blocks[0])


class Shared(Blocks):
    def model(self) -> Any:
        model = Residual()
        model.blocks = torch.nn.ModuleList([model.blocks[0]] * 3)
        return model


def test_a_block_that_is_shared_over_depth() -> None:
    losses = []
    for again in (False, True):
        with Trainer(Shared(), Job(threads=1, activation_checkpointing=again)) as trainer:
            losses.append([trainer.step(batch).loss for batch in trainer.batches(steps=3)])
    assert losses[0] == losses[1]


def test_no_blocks_to_compute_again() -> None:
    with pytest.raises(RequestError, match="no blocks in Sequential"):
        Trainer(trainer_tasks.Worse(), Job(activation_checkpointing=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of what the compiler looks at
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by the compiler
@pytest.mark.usefixtures("compiler")
def test_a_compiled_model_gives_the_same() -> None:
    """Also with layers that belong to shards."""
    plain = losses(Job(threads=1))
    assert losses(Job(threads=1, compile="eager")) == pytest.approx(plain, rel=1e-5)


def losses(job: Job) -> list[float]:
    with Trainer(Blocks(), job) as trainer:
        return [trainer.step(batch).loss for batch in trainer.batches(steps=3)]


def test_an_unknown_compiler() -> None:
    with pytest.raises(RequestError, match="no backend of that name"):
        Trainer(Blocks(), Job(compile="nothing"))
