"""All objects of a type are found, while other threads go on building theirs."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from allranks.alive import instances_of


@pytest.mark.slow
def test_all_of_a_type_and_of_its_subtypes_are_found() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    plain = torch.zeros(2)
    found = {id(one) for one in instances_of(Tensor)}
    assert {id(plain), *map(id, model.state_dict(keep_vars=True).values())} <= found
    assert {id(one) for one in model.modules()} <= {id(one) for one in instances_of(nn.Module)}
    assert all(isinstance(one, nn.Module) for one in instances_of(nn.Module))


@pytest.mark.slow
def test_a_tuple_that_another_thread_is_building_is_left_alone() -> None:
    """Python raises SystemError in `tuple()` there, where a list of all objects holds it."""
    built, raised, is_over = 0, [], threading.Event()

    def build() -> None:
        nonlocal built
        try:
            while not is_over.is_set():
                tuple(number for number in range(1000))
                built += 1
        except SystemError as error:
            raised.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    for _ in range(10):
        instances_of(Tensor)
    is_over.set()
    thread.join()
    assert built and not raised
