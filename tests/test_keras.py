"""A Keras model is trained as the same network of torch is; what could not be right is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from allranks.errors import RequestError
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import Result
from conftest import Train

BAR = 1e-6  # in fp32: what Keras multiplies is fp32 even where all weights are fp64


@pytest.fixture
def server(keras_server: ForkServer) -> ForkServer:
    """The fork server that has imported Keras, in the place of the one without."""
    return keras_server


def weights(result: Result) -> dict[str, Tensor]:
    """By layer and kind, as torch lays them out: `conv/kernel`."""
    found = {}
    for name, value in load_file(result.run_dir / "weights.safetensors").items():
        if "net/" in name:
            order = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[value.ndim]
            found[name.rpartition("net/")[2]] = value.permute(order)
        else:
            layer, _, kind = name.partition(".")
            found[f"{layer}/{'kernel' if kind == 'weight' else kind}"] = value
    return found


@pytest.mark.slow
def test_a_keras_model_is_trained_as_the_same_of_torch(train: Train) -> None:
    wanted = train("keras_tasks:OfTorch", threads=1)
    for ranks in (1, 2):
        found = train("keras_tasks:OfKeras", ranks=ranks, threads=1)
        assert found.summary["eval"]["loss"] == pytest.approx(wanted.summary["eval"]["loss"], BAR)
        ours, theirs = weights(found), weights(wanted)
        assert ours.keys() == theirs.keys() and len(ours) == 6
        for name, value in theirs.items():
            difference = torch.linalg.vector_norm(ours[name] - value)
            assert difference <= BAR * torch.linalg.vector_norm(value), (name, float(difference))


@pytest.mark.slow
def test_keras_layers_stand_beside_those_that_belong_to_a_shard(train: Train) -> None:
    """Equal bits on any number of ranks, with torch's BatchNorm and dropout between them."""
    runs = [train("keras_tasks:Mixed", ranks=n, bitwise=True) for n in (1, 2)]
    assert runs[0].summary["weights_sha256"] == runs[1].summary["weights_sha256"]


def test_what_keras_would_train_otherwise_is_refused(on_ranks: Callable[..., Any]) -> None:
    on_ranks(1, "keras_tasks:refuse", None)


@pytest.mark.slow
def test_in_float64_keras_layers_compute_in_float64(train: Train) -> None:
    """Else two right runs would differ by the rounding of 32 bits, and BatchNormalization crash."""
    flags: dict[str, Any] = {"threads": 1, "steps": 9, "precision": "fp64"}
    wanted = weights(train("keras_tasks:OfTorch", **flags))
    for ranks in (1, 2):
        found = weights(train("keras_tasks:OfKeras", ranks=ranks, **flags))
        for name, value in wanted.items():
            assert found[name].dtype == torch.float64
            assert torch.linalg.vector_norm(found[name] - value) <= 1e-12 * value.norm(), name


@pytest.mark.slow
def test_batch_normalization_of_keras_trains_in_float64(train: Train) -> None:
    runs = [
        train("keras_tasks:Normed", ranks=n, threads=1, steps=9, precision="fp64") for n in (1, 2)
    ]
    losses = [run.summary["train_loss"] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_keras_layers_of_32_bits_are_refused_in_float64(train: Train) -> None:
    with pytest.raises(RequestError, match="which the model makes as float32"):
        train("keras_tasks:Narrow", precision="fp64", steps=1)
