"""What user code draws belongs to the sample, the shard or the step, whichever rank runs it."""

from __future__ import annotations

import pytest

from allranks.errors import RequestError
from allranks.job.run_folder import read_events
from conftest import TASKS, Train
from data_tasks import OnceMore

TASK_FILE = TASKS / "data_tasks.py"


def digests(
    train: Train, task: str, ranks: tuple[int, ...] = (1, 2, 3), **flags: object
) -> set[str]:
    return {
        str(train(f"{TASK_FILE}:{task}", ranks=n, steps=7, **flags).summary["weights_sha256"])
        for n in ranks
    }


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("task", ["Masked", "MaskedStream", "NoisyForward", "NoisyUpdates"])
def test_bits_are_equal_on_any_number_of_ranks(train: Train, task: str) -> None:
    assert len(digests(train, task, bitwise=True)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("task", ["Masked", "MaskedStream", "NoisyUpdates"])
def test_without_bits_the_same_is_drawn(train: Train, task: str) -> None:
    """In float64, and each shard goes through the model alone where collate draws."""
    losses = []
    for ranks in (1, 2, 4):
        result = train(f"{TASK_FILE}:{task}", ranks=ranks, steps=7, precision="fp64")
        losses.append(result.summary["train_loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)


@pytest.mark.slow
def test_loader_processes_draw_the_same_in_collate(train: Train) -> None:
    assert (
        len(digests(train, "Masked", (2,)) | digests(train, "Masked", (2,), loader_workers=2)) == 1
    )


@pytest.mark.slow
def test_collate_that_draws_is_told(train: Train) -> None:
    for task, draws_in_evaluation in (("Evaluated", True), ("EvaluatedUnmasked", False)):
        run = train(f"{TASK_FILE}:{task}", ranks=2, steps=3, precision="fp64", witness="stop")
        events = read_events(run.run_dir)
        (notes,) = [event["notes"] for event in events if event["event"] == "data_notes"]
        assert any("collate draws" in note for note in notes)
        assert any("eval_collate" in note for note in notes) is draws_in_evaluation
        assert run.summary["eval"] == {"loss": 1.0}, "self.training is false there"
        assert run.summary["train_loss"] != 1.0


def test_a_generator_of_ones_own_is_told_and_keeps_no_bits(train: Train) -> None:
    events = read_events(train(f"{TASK_FILE}:Drawing", ranks=2, steps=1).run_dir)
    (notes,) = [event["notes"] for event in events if event["event"] == "data_notes"]
    assert any("NOT equal on another number of ranks" in note for note in notes)
    with pytest.raises(RequestError, match="generator of its own"):
        train(f"{TASK_FILE}:Drawing", ranks=1, steps=1, bitwise=True)


@pytest.mark.slow
def test_a_loader_is_read_as_often_on_one_rank_as_on_two(train: Train) -> None:
    """What it draws from a generator of its own goes on from epoch to epoch."""
    assert len(list(OnceMore())) == 48
    assert len(digests(train, "Whole", (1, 2), bitwise=True)) == 1
