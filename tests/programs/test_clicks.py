"""The program `clicks`: data as it says, an area that is one, and a model that learns from rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from allranks.errors import RequestError
from allranks.programs.clicks import BINS, CATEGORIES, COUNTS, ClickLaw, ClickThrough
from conftest import Train

SMALL = ("rows=50", "samples=600", "held_out=100", "batch_size=64", "width=8", "dim=3")


def test_samples_follow_the_law() -> None:
    law = ClickLaw(2000)
    found, again = law.samples(20_000, 0), law.samples(20_000, 0)
    assert np.array_equal(found.categories, again.categories)
    assert np.array_equal(found.clicks, again.clicks)
    assert not np.array_equal(found.categories, law.samples(20_000, 1).categories)
    assert found.counts.shape == (20_000, COUNTS) and found.counts.min() >= 0
    assert len(law.sizes) == CATEGORIES and (law.sizes[0], law.sizes[-1]) == (4, 2000)
    for feature, size in enumerate(law.sizes):
        values = found.categories[:, feature]
        assert values.min() == 0 and values.max() < size
        for value in (0, 1):  # Zipf: the share of value v is log((v + 2) / (v + 1)) / log(size + 1)
            share = np.log((value + 2) / (value + 1)) / np.log(size + 1)
            assert (values == value).mean() == pytest.approx(share, abs=0.015)
    assert found.clicks.mean() == pytest.approx(found.chances.mean(), abs=0.01)
    assert 0.25 < found.chances.mean() < 0.32


@pytest.mark.parametrize(
    ("scores", "clicks", "area"),
    [
        ([-3.0, -2.0, 1.0, 2.0], [0, 0, 1, 1], 1.0),
        ([-3.0, -2.0, 1.0, 2.0], [1, 1, 0, 0], 0.0),
        ([0.1, 0.1, 0.1, 0.1], [1, 0, 1, 0], 0.5),
        ([-99.0, 0.0, 1.0, 99.0], [0, 1, 0, 1], 0.75),
    ],
)
def test_the_area_is_how_often_a_click_is_above(
    scores: list[float], clicks: list[int], area: float
) -> None:
    task = ClickThrough()
    batch = (None, None, torch.tensor(clicks, dtype=torch.float32))
    pairs = task.metrics(torch.tensor(scores), batch)
    assert len(pairs) == 1 + 2 * BINS
    found = task.finalize({name: float(total) / count for name, (total, count) in pairs.items()})
    assert set(found) == {"accuracy", "auc"}
    assert found["auc"] == pytest.approx(area)


def test_a_sample_touches_one_row_for_each_category_and_pair() -> None:
    task = ClickThrough(rows=50, dim=2, width=4, crossed=7)
    model = task.model()
    counts, categories, clicks = task.train_data()
    task.loss(model(counts[:2], categories[:2]), (None, None, clicks[:2])).sum().backward()
    wide, deep = model.wide.weight.grad.coalesce(), model.deep.weight.grad.coalesce()
    first = np.cumsum([0, *task.law.sizes])[:-1]
    wanted = {int(row) for sample in categories[:2].numpy() for row in sample + first}
    assert set(deep.indices()[0].tolist()) == wanted
    crossed = set(wide.indices()[0].tolist()) - wanted
    assert set(wide.indices()[0].tolist()) > wanted and 1 <= len(crossed) <= 6
    assert min(crossed) >= sum(task.law.sizes) and max(crossed) < len(model.wide.weight)


@pytest.mark.slow
def test_in_float64_two_ranks_agree_with_one(train: Train) -> None:
    one = train("clicks", *SMALL, precision="fp64", steps=12)
    two = train("clicks", *SMALL, precision="fp64", steps=12, ranks=2, strategy="ddp")
    assert two.summary["eval"]["auc"] == one.summary["eval"]["auc"]
    weights = load_file(one.run_dir / "weights.safetensors")
    for name, tensor in load_file(two.run_dir / "weights.safetensors").items():
        np.testing.assert_allclose(tensor, weights[name], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_two_ranks_learn_who_clicks(train: Train) -> None:
    """Who says that nobody clicks is right in 73 % of the samples; the law itself in 85 %."""
    found = train("clicks", ranks=2).summary["eval"]
    assert found["auc"] >= 0.80 and found["accuracy"] >= 0.77


def test_a_model_without_numbers_is_refused() -> None:
    for wrong in ({"rows": 3}, {"width": 1}, {"dim": 0}, {"crossed": 0}):
        with pytest.raises(RequestError, match="without numbers"):
            ClickThrough(**wrong)
