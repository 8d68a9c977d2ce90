"""A misspelt method of a task is refused with the nearest name;
a name of one's own is left alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest

from allranks.errors import RequestError
from allranks.training.keras_task import Task as KerasTask
from allranks.training.task_fields import TaskFields, check_task
from bad_tasks import Good
from conftest import Train


@dataclass(kw_only=True)
class OfKeras(KerasTask):
    def model(self) -> Any: ...

    def optimizer(self) -> Any: ...

    def train_data(self) -> Any: ...

    def loss(self, output: Any, batch: Any) -> Any: ...


@dataclass(kw_only=True)
class Own(Good):
    """Every name here is near one of a task, and is used: by a method, a function, or a class."""

    weights: str = ""
    batch_sizes: list[int] = field(default_factory=list)

    def inputs(self, batch: Any) -> Any:
        return (self.input(batch), self.weights, self.batch_sizes)[:1]

    def input(self, batch: Any) -> Any:
        return batch[0]

    @cached_property
    def models(self) -> int:
        return self.metric

    @property
    def metric(self) -> int:
        return next((lambda: self.losses)() for _ in (1,))()

    @staticmethod
    def losses() -> int:
        return 1

    def helper(self) -> int:
        return 2


def used_by_a_function(task: Own) -> int:
    return task.models


def test_a_misspelt_method_ends_with_2_and_the_nearest_name(train: Train) -> None:
    with pytest.raises(RequestError) as error:
        train("bad_tasks:Misspelt", steps=2)
    assert error.value.found == "shedule in Misspelt, which nothing calls or reads"
    assert error.value.do.startswith("did you mean 'schedule'?")


@pytest.mark.parametrize("base", [Good, OfKeras])
@pytest.mark.parametrize(
    ("name", "meant"),
    [("metric", "metrics"), ("regulariser", "regularizer"), ("eval_dataset", "eval_data")],
)
def test_each_engine_knows_its_names(base: type, name: str, meant: str) -> None:
    kind = dataclass(kw_only=True)(type("Mine", (base,), {name: lambda self: None}))
    with pytest.raises(RequestError, match=f"did you mean '{meant}'"):
        check_task(kind(), "mine")


def test_a_field_is_a_name_too() -> None:
    @dataclass(kw_only=True)
    class Fields(Good):
        batchsize: int = 3

    with pytest.raises(RequestError, match="did you mean 'batch_size'"):
        check_task(Fields(), "mine")


@pytest.mark.parametrize("task", [Own(), Good(), OfKeras()])
def test_names_of_ones_own_are_left_alone(task: TaskFields) -> None:
    check_task(task, "mine")
