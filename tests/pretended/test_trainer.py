"""The whole trainer on the pretended device: weights, losses and metrics of the CPU, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import batch_kinds

OnDevice = Callable[..., None]
SCENARIOS: dict[str, dict[str, Any]] = {
    "data of the host": {},
    "data on the device": {"fields": {"data": "device"}},
    "a dataset": {"fields": {"data": "set"}},
    "a dataset, read ahead": {"fields": {"data": "set"}, "job": {"loader_workers": 1}},
    "a loader": {"fields": {"data": "loader"}},
    "a loss of the batch": {"task": "OfTheBatch"},
    "ema, clipping, adamw": {"fields": {"ema": 0.9, "clip_norm": 0.1, "optimizer_name": "adamw"}},
    "micro-batches": {"job": {"micro_batch": 3}},
    "a bad step is skipped": {"job": {"inject": "nan@step=2", "on_bad_step": "skip"}},
    "a bad step is told": {"job": {"inject": "nan@step=2", "on_bad_step": "warn"}},
    "a bit flips": {"job": {"inject": "corrupt@step=2"}},
    "fp64": {"job": {"precision": "fp64"}},
    "fp64, fused": {
        "fields": {"optimizer_name": "fused sgd", "clip_norm": 0.1},
        "job": {"precision": "fp64"},
    },
    "bf16": {"job": {"precision": "bf16"}},
    "fp16": {"job": {"precision": "fp16"}},
}


@pytest.mark.slow(but=1, most=8)
@pytest.mark.parametrize("name", SCENARIOS)
def test_one_process_trains_as_on_the_cpu(on_device: OnDevice, name: str) -> None:
    on_device(1, "as_on_the_cpu", SCENARIOS[name])


@pytest.mark.slow(most=2)
@pytest.mark.parametrize(
    ("kinds", "job"),
    [
        (["user dict", "dataclass", "movable"], {}),
        ([*batch_kinds.KINDS][1:], {"precision": "fp64"}),
        (["model output", "frozen", "movable"], {"precision": "fp64", "loader_workers": 1}),
    ],
)
def test_batches_of_every_kind_go_to_the_device(
    on_device: OnDevice, kinds: list[str], job: dict[str, Any]
) -> None:
    on_device(1, "every_kind", {"kinds": kinds, "job": job})


@pytest.mark.slow(most=4)
@pytest.mark.parametrize(
    "words",
    ["ddp", "ddp bitwise", "ddp:reduce=tree", "zero1", "zero1 bitwise", "zero2", "fsdp"],
)
def test_two_ranks_train_as_on_the_cpu(on_device: OnDevice, words: str) -> None:
    """Sums of two ranks have one order, so bits can be compared without --bitwise, too."""
    strategy, *bitwise = words.split()
    on_device(2, "as_on_the_cpu", {"job": {"strategy": strategy, "bitwise": bool(bitwise)}})


SHARING: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp:reduce=tree": {},
    "zero1 bitwise": {},
    "zero2": {},
    "fsdp": {},
    "interleaved": {"task": "Chain"},
    "expert": {"task": "Mixture"},
}


@pytest.mark.slow(most=4)
@pytest.mark.parametrize("words", SHARING)
def test_ranks_that_share_a_device_train_as_on_the_cpu(on_device: OnDevice, words: str) -> None:
    strategy, *bitwise = words.split()
    job = {"strategy": strategy, "bitwise": bool(bitwise)}
    on_device(2, "sharing_a_device", {**SHARING[words], "job": job})


@pytest.mark.slow
def test_messages_of_ranks_that_share_a_device_go_over_the_host(on_device: OnDevice) -> None:
    on_device(2, "messages_over_the_host")


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["interleaved:chunks=2", "tensor"],
)
def test_ranks_that_hold_parts_of_a_model_train_as_on_the_cpu(
    on_device: OnDevice, strategy: str
) -> None:
    on_device(2, "as_on_the_cpu", {"task": "Chain", "job": {"strategy": strategy}})


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["context", "tensor:sequence=yes"])
def test_ranks_that_cut_positions_train_as_on_the_cpu(on_device: OnDevice, strategy: str) -> None:
    argument = {"task": "Sentences", "job": {"strategy": strategy}}
    on_device(2, "attention_as_on_the_cpu", argument)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        {"inject": "nan@step=5", "on_bad_step": "skip"},
        {"precision": "fp16", "loss_scale": "dynamic:initial=1e6,every=2"},
    ],
)
def test_late_reading_changes_nothing(on_device: OnDevice, job: dict[str, Any]) -> None:
    fields = {"optimizer_name": "fused", "clip_norm": 0.1}
    on_device(1, "late_and_at_once", {"fields": fields, "job": {"steps": 8, **job}})


@pytest.mark.slow
def test_an_update_of_parts_does_not_divide_gradients(on_device: OnDevice) -> None:
    """Where samples do not weigh 1, the mean is rounded as on the CPU."""
    fields = {"optimizer_name": "fused", "clip_norm": 0.1}
    argument = {"task": "Weighted", "fields": fields, "job": {"strategy": "fsdp"}}
    on_device(2, "as_on_the_cpu", argument)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_an_update_divides_and_clips_gradients(on_device: OnDevice, strategy: str) -> None:
    """With a batch that is not full, whose mean is over other samples than the usual ones."""
    fields = {"optimizer_name": "fused sgd", "clip_norm": 0.1}
    on_device(2, "near_the_cpu", {"fields": fields, "job": {"strategy": strategy, "steps": 8}})


@pytest.mark.slow
def test_a_checkpoint_goes_on_on_either(on_device: OnDevice, tmp_path: Path) -> None:
    on_device(1, "goes_on", {"run_dir": str(tmp_path / "run"), "fields": {"ema": 0.9}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "shares"),
    [("transport=sockets", False), ("rate=plain", True), ("rate=staleness-aware", True)],
)
def test_a_worker_beside_servers_trains_as_on_the_cpu(
    on_device: OnDevice, options: str, shares: bool
) -> None:
    on_device(1, "beside_servers", {"options": options, "shares": shares})


def test_a_batch_that_has_not_arrived_is_told(on_device: OnDevice) -> None:
    on_device(1, "without_the_wait_for_a_copy", {})


@pytest.mark.slow
def test_a_sum_that_has_not_arrived_is_told(on_device: OnDevice) -> None:
    on_device(2, "without_the_wait_for_a_sum", {"job": {"strategy": "ddp"}})


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_shares_by_speed_train_as_on_the_cpu(on_device: OnDevice, strategy: str) -> None:
    """The time of a rank ends when its device has made the passes; each step is read at once."""
    more = {"share": "auto", "bitwise": True, "inject": "slow@rank=1,per_sample=0.01"}
    on_device(2, "as_on_the_cpu", {"job": {"strategy": strategy, **more}})
