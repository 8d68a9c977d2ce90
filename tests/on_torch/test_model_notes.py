"""What is said of a model before it is trained."""

from __future__ import annotations

import pytest
from torch import nn

import kinds_tasks
from allranks.cli.display.following import in_words
from allranks.cli.display.progress import in_sentences
from allranks.job.run_folder import rank_events_path, read_rows
from allranks.torch.model.placement import notes_on
from conftest import Train


def test_a_model_in_eval_mode_is_trained_so_and_says_so(train: Train) -> None:
    result = train("kinds_tasks:Evaluated", ranks=2, steps=2)
    (note,) = result.summary["model_notes"]
    assert note.startswith(
        "5 of 5 modules of the model are trained in eval mode, 0 (Linear) first: dropout off"
    )
    rows = read_rows(rank_events_path(result.run_dir, 0))
    (event,) = [row for row in rows if row["event"] == "model_notes"]
    assert in_words(event) == [f"note: {note}"]
    assert f"note       {note}" in in_sentences({**result.summary, "run_dir": "there"})


def test_one_frozen_layer_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert notes_on(model, kinds_tasks.Rows()) == []
    model[1].eval()
    (note,) = notes_on(model, kinds_tasks.Rows())
    assert note.startswith("1 of 3 modules of the model are trained in eval mode, 1 (BatchNorm1d)")


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            (),
            "BatchNorm normalises every shard by itself, of 2 samples (batch_size 16 in 8 shards)",
        ),
        (("shards=1",), ""),
        (("batchnorm=whole",), ""),
    ],
)
def test_the_size_of_a_shard(settings: tuple[str, ...], told: str, train: Train) -> None:
    notes = train("kinds_tasks:Normalised", *settings, steps=1).summary["model_notes"]
    assert [note.startswith(told) for note in notes] == [True] * bool(told)
