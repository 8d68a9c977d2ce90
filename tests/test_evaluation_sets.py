"""Several sets to evaluate on: each as if it were the only one, under its name, everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allranks.errors import RequestError
from allranks.training.engine.trainer import sets_of
from conftest import Train


@pytest.mark.slow
def test_each_set_is_judged_as_if_it_were_alone(train: Train) -> None:
    flags: dict[str, Any] = {"steps": 6, "bitwise": True}
    one = train("bad_tasks:Sets", eval_every="2", best="min:b/loss", log="csv", **flags)
    two = train("bad_tasks:Sets", ranks=2, **flags)
    alone = train("bad_tasks:Good", **flags)
    judged = one.summary["eval"]
    assert judged.keys() == {"a/loss", "b/loss", "b/hits", "a/hits"}
    assert judged == two.summary["eval"] and judged["a/loss"] == alone.summary["eval"]["loss"]
    assert judged["b/hits"] != judged["a/hits"]
    assert "6,b/loss," in (one.run_dir / "evaluations.csv").read_text()
    with pytest.raises(RequestError, match="no metric 'loss'") as error:
        train("bad_tasks:Sets", best="min:loss", **flags)
    assert "a/loss" in error.value.do


def test_what_is_one_set_and_what_is_several() -> None:
    x = torch.zeros(3)
    for one in (x, (x, x), {"x": x, "y": x}, [x], {}):
        assert sets_of(one) == {"": one}
    assert sets_of({"a": (x,), "b": [x]}).keys() == {"a", "b"}
    for wrong in ({"a": x, "b": (x,)}, {1: (x,)}, {"a/b": (x,)}):
        with pytest.raises(RequestError, match="several sets"):
            sets_of(wrong)
