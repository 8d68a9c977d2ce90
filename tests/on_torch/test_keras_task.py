"""A Keras task on the torch engine: one task for either engine,
with every promise of a torch one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from sklearn.datasets import load_digits

from allranks.errors import ProgramError, RequestError
from allranks.job.run_folder import read_rows
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import Result
from allranks.programs.digits_data import TRAINING, digits
from conftest import Train
from record_writers import write_idx

BITWISE = {"engine": "torch", "bitwise": True, "steps": 8}


@pytest.fixture
def server(keras_server: ForkServer) -> ForkServer:
    """The fork server that has imported Keras, in the place of the one without."""
    return keras_server


def difference(one: Result, other: Result) -> float:
    """The largest norm-relative difference over all tensors."""
    ours, theirs = (load_file(r.run_dir / "weights.safetensors") for r in (one, other))
    assert ours.keys() == theirs.keys()
    norm = np.linalg.norm
    return max(float(norm(ours[n] - t) / max(float(norm(t)), 1e-12)) for n, t in theirs.items())


def losses(result: Result) -> list[float]:
    return [row["loss"] for row in read_rows(result.run_dir / "metrics.jsonl")]


def test_the_digits_are_those_of_torchs_order() -> None:
    """The order was torch's own before; what is held out stays held out."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(1797)).numpy()
    for part in (slice(0, TRAINING), slice(TRAINING, None)):
        found = digits(part)
        assert np.array_equal(16 * found[0].reshape(-1, 64), images[order][part])
        assert np.array_equal(found[1], labels[order][part])


@pytest.mark.slow
def test_the_digits_are_learnt_by_ddp(train: Train) -> None:
    result = train("digits-keras", engine="torch", strategy="ddp", ranks=2)
    assert result.summary["eval"]["accuracy"] >= 0.97
    assert "digits/conv1/kernel" in load_file(result.run_dir / "weights.safetensors")


@pytest.mark.slow
def test_ddp_equals_single_in_fp64(train: Train) -> None:
    """BatchNormalization, dropout, an uneven last batch; the loss of every step too."""
    flags = {"engine": "torch", "precision": "fp64", "steps": 50}
    wanted = train("keras_twins:Sgd", strategy="single", **flags)
    found = train("keras_twins:Sgd", strategy="ddp", ranks=2, **flags)
    assert difference(found, wanted) < 1e-10
    assert losses(found) == pytest.approx(losses(wanted), rel=1e-10)
    assert found.summary["eval"] == pytest.approx(wanted.summary["eval"], rel=1e-10)


@pytest.mark.slow
def test_it_equals_a_loop_of_plain_torch(on_ranks: Callable[..., Any]) -> None:
    on_ranks(1, "keras_twins:equals_a_plain_loop", {})


@pytest.mark.slow
def test_the_programs_start_as_their_twins(on_ranks: Callable[..., Any]) -> None:
    on_ranks(1, "keras_twins:twins_start_alike", {})


@pytest.mark.slow
def test_mnist_with_keras(train: Train, tmp_path: Path) -> None:
    """Made images: how bright one is tells its label."""
    (tmp_path / "mnist").mkdir()
    labels = np.arange(64).astype(np.uint8) % 10
    images = np.broadcast_to(25 * labels[:, None, None], (64, 28, 28)).astype(np.uint8)
    for part in ("train", "t10k"):
        write_idx(tmp_path / "mnist" / f"{part}-images-idx3-ubyte", images)
        write_idx(tmp_path / "mnist" / f"{part}-labels-idx1-ubyte", labels)
    settings = (f"data={tmp_path}", "batch_size=16", "lr=0.003")
    result = train("mnist-keras", *settings, engine="torch", ranks=2, steps=20)
    assert losses(result)[-1] < 0.9 * losses(result)[0]


@pytest.mark.slow
def test_equal_bits_on_any_number_of_ranks_and_after_a_kill(train: Train, tmp_path: Path) -> None:
    """A schedule, clipping, an average, a regularizer, weights; killed and resumed in mid-epoch."""
    runs = [train("keras_twins:Rich", ranks=ranks, **BITWISE) for ranks in (1, 2, 3)]
    wanted = runs[0].summary["weights_sha256"]
    assert {run.summary["weights_sha256"] for run in runs} == {wanted}
    assert losses(runs[1]) == losses(runs[2]) == losses(runs[0])
    run, fault = str(tmp_path / "run"), "kill@at=save:prune,step=6"
    with pytest.raises(ProgramError):
        train("keras_twins:Rich", ranks=2, run_dir=run, checkpoint_every=3, inject=fault, **BITWISE)
    resumed = train("", run_dir=run, ranks=3)
    assert resumed.summary["resumed_from_step"] == 6
    assert resumed.summary["weights_sha256"] == wanted and losses(resumed) == losses(runs[0])


@pytest.mark.slow
def test_every_optimizer_of_keras_goes_on(on_ranks: Callable[..., Any]) -> None:
    on_ranks(1, "keras_twins:every_optimizer_goes_on", {})


def test_rates(on_ranks: Callable[..., Any]) -> None:
    on_ranks(1, "keras_twins:rates_are_those_of_the_task", {})


def test_a_model_is_given_back(on_ranks: Callable[..., Any], tmp_path: Path) -> None:
    on_ranks(1, "keras_twins:a_model_is_given_back", {"folder": str(tmp_path)})


@pytest.mark.slow
def test_half_precision_learns(train: Train) -> None:
    flags = {"engine": "torch", "precision": "bf16"}
    result = train("keras_twins:Rich", "clip_norm=none", "ema=none", steps=60, **flags)
    assert losses(result)[-1] < 0.8 * losses(result)[0]


def test_what_a_layer_writes_is_seen(train: Train) -> None:
    """It follows the samples of a rank: recorded, and no part of equal bits."""
    result = train("keras_twins:Counting", engine="torch", steps=2)
    assert result.summary["user_buffers"] == ["counting/counts/seen"]
    with pytest.raises((RequestError, ProgramError), match="counting/counts/seen"):
        train("keras_twins:Counting", **BITWISE)


@pytest.mark.slow
def test_what_could_not_be_right_is_refused(on_ranks: Callable[..., Any]) -> None:
    on_ranks(1, "keras_twins:refuse", {})


def test_a_file_without_a_task_says_what_one_is(train: Train, tmp_path: Path) -> None:
    path = tmp_path / "none.py"
    path.write_text(
        "from allranks.training.keras_task import Task\nfrom allranks.torch import Task as T\n"
    )
    with pytest.raises(RequestError) as raised:
        train(str(path), engine="torch")
    assert "0 tasks" in raised.value.found
    assert "allranks.torch.task.Task or allranks.training.keras_task.Task" in raised.value.why
