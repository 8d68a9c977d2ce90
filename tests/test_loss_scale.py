"""The loss scale: both rules with golden values, and what can be asked for."""

from __future__ import annotations

import math

import pytest

from allranks.errors import RequestError
from allranks.job.loss_scale import LEAST, LossScale, parse_loss_scale

GOLDEN = {  # the scale after each of 12 steps, every=3, from 128, with overflows at steps 3 and 8
    "torch": [128, 128, 64, 64, 64, 128, 128, 64, 64, 64, 128, 128],
    "tf_cnn": [128, 128, 64, 64, 64, 64, 128, 64, 64, 64, 64, 128],
}


@pytest.mark.parametrize("rule", GOLDEN)
def test_the_scale_after_each_step(rule: str) -> None:
    scale = LossScale(128.0, every=3, rule=rule)
    found = []
    for step in range(1, 13):
        if step in (3, 8):
            scale.overflowed()
        else:
            scale.went_well()
        found.append(scale.value)
    assert found == GOLDEN[rule]


def test_it_goes_on_where_it_was() -> None:
    one, other = LossScale(8.0, every=2), LossScale(8.0, every=2)
    one.went_well()
    other.load_state(one.state())
    other.went_well()
    assert other.value == 16.0


def test_what_the_scale_explains() -> None:
    scale = LossScale(2.0)
    assert scale.explains(1.0, math.inf) and scale.explains(1.0, math.nan)
    assert not scale.explains(1.0, 3.0)
    assert not scale.explains(math.nan, math.nan), "the scale comes in after the loss"
    scale.overflowed()
    assert scale.value == LEAST and not scale.explains(1.0, math.inf)
    assert not parse_loss_scale("1024").explains(1.0, math.inf), "a fixed scale cannot give way"


def test_what_can_be_asked_for() -> None:
    assert parse_loss_scale("dynamic") == LossScale(65536.0, 2000, "torch")
    asked = parse_loss_scale("dynamic:initial=128,every=3,rule=tf_cnn")
    assert asked == LossScale(128.0, 3, "tf_cnn")
    fixed = parse_loss_scale("128")
    fixed.went_well()
    assert fixed.value == 128 and not fixed.is_dynamic


@pytest.mark.parametrize(
    "text",
    ["", "static", "0", "-1", "inf", "nan", "dynamic:every=0", "dynamic:grow=2", "1:every=3"],
)
def test_what_cannot(text: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_loss_scale(text)
    assert str(error.value).startswith("asked: --loss-scale")
