"""A configuration of DeepSpeed as a job: the batch triad, what is taken, what is refused."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import RequestError
from allranks.job.config import Resolved, resolve
from allranks.job.deepspeed.sections import KEYS, DeepSpeedBatch, batch_of
from allranks.job.recipes import factor_of
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import run_job
from conftest import Train

ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.99], "weight_decay": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}}


def configured(folder: Path, ranks: int = 2, *settings: str, **sections: Any) -> Resolved:
    """The job of a configuration with a batch of 24, and these sections."""
    path = folder / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 24, **sections}))
    return resolve("digits", {"ranks": ranks}, settings, str(path))


GOLDEN = (
    (0.001, 0.001, 0.0055, 0.008132331253245204, 0.01, 0.01, 0.01, 0.01),
    (0.0, 0.0, 0.02 / 3, 0.04 / 3, 0.02, 0.04 / 3, 0.02 / 3, 0.0),
    (0.0, 0.001, 0.01, 0.008535680352542145, 0.0050005, 0.0014653196474578559, 1e-6, 1e-6),
)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ((24, 4, 3), DeepSpeedBatch(24, 4, 3)),
        ((24, 4, None), DeepSpeedBatch(24, 4, 3)),
        ((24, None, 3), DeepSpeedBatch(24, 4, 3)),
        ((None, 4, 3), DeepSpeedBatch(24, 4, 3)),
        ((24, None, None), DeepSpeedBatch(24, 12, 1)),
        ((None, 4, None), DeepSpeedBatch(8, 4, 1)),
        ((None, None, 3), None),
        ((24, 4, 2), None),
        ((25, None, None), None),
        ((24, 5, None), None),
        ((24, None, 5), None),
        ((24, 48, None), None),
    ],
)
def test_two_of_the_three_numbers_give_the_third(
    said: tuple[int | None, ...], wanted: DeepSpeedBatch | None
) -> None:
    """All 7 subsets, on 2 ranks; "auto" is as if it were not there. `None`: refused."""
    for absent in ({}, {key: "auto" for key in KEYS}):
        data = {**absent, **{k: v for k, v in zip(KEYS, said, strict=True) if v is not None}}
        if wanted is None:
            with pytest.raises(RequestError, match=r"ds\.json"):
                batch_of(data, "ds.json", 2)
        else:
            assert batch_of(data, "ds.json", 2) == wanted


@pytest.mark.parametrize("value", [0, -1, 2.5, "24", True, None])
def test_a_count_is_a_whole_number(value: Any) -> None:
    with pytest.raises(RequestError, match="a count of at least 1"):
        batch_of({"train_batch_size": value}, "ds.json", 2)


def test_what_has_a_counterpart_is_taken_and_says_from_where(tmp_path: Path) -> None:
    found = configured(
        tmp_path,
        gradient_accumulation_steps=3,
        optimizer=ADAMW,
        scheduler=WARMUP,
        fp16={"enabled": True, "initial_scale_power": 8, "loss_scale_window": 50, "hysteresis": 1},
        gradient_clipping=0.5,
        zero_optimization={
            "stage": 2,
            "overlap_comm": True,
            "offload_optimizer": {"device": "none"},
        },
        steps_per_print=10,
        bf16={"enabled": False},
    )
    job, sources = found.job, found.sources
    assert (job.strategy, job.micro_batch, job.precision) == ("zero2", 4, "fp16")
    assert job.loss_scale == "dynamic:initial=256.0,every=50"
    assert job.task == {"batch_size": 24, "clip_norm": 0.5}
    assert job.optimizer == "adamw:lr=0.01,weight_decay=0.1,beta1=0.8,beta2=0.99"
    assert job.schedule == "warmup-lr:highest=0.01,steps=4"
    path = tmp_path / "ds_config.json"
    assert sources["strategy"] == f"file {path}: zero_optimization.stage = 2"
    assert sources["ds_config.json: steps_per_print"].startswith("10, passed over: ")
    assert "ds_config.json: gradient_clipping" not in sources
    assert sources["ds_config.json: zero_optimization.overlap_comm"].startswith("true, passed over")


@pytest.mark.parametrize(("stage", "strategy"), list(enumerate(["ddp", "zero1", "zero2", "fsdp"])))
def test_a_stage_is_a_strategy(stage: int, strategy: str, tmp_path: Path) -> None:
    """And that nobody said whether gradients are clipped is recorded: it follows the version."""
    found = configured(tmp_path, zero_optimization={"stage": stage})
    assert found.job.strategy == strategy and "clip_norm" not in found.job.task
    assert "0.19.8 clips them" in found.sources["ds_config.json: gradient_clipping"]


def test_auto_is_what_task_and_flags_say(tmp_path: Path) -> None:
    params = {"lr": "auto", "betas": "auto"}
    found = configured(
        tmp_path,
        2,
        "lr=0.5",
        train_batch_size="auto",
        train_micro_batch_size_per_gpu="auto",
        optimizer={"type": "AdamW", "params": params},
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
        bf16={"enabled": "auto"},
        gradient_clipping="auto",
    )
    assert found.job == resolve("digits", {"ranks": 2}, ("lr=0.5",)).job


def test_flags_go_before_the_file_and_ranks_may_come_from_nodes(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4}))
    flags = {"nodes": 3, "place": "simulated", "micro_batch": 2}
    found = resolve("digits", flags, (), str(path))
    assert (found.job.task["batch_size"], found.job.micro_batch) == (12, 2)


def adam(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "Adam", "params": {"lr": 0.1, **params}}}


def sgd(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "SGD", "params": {"lr": 0.1, **params}}}


def warmup(kind: str = "WarmupLR", **params: Any) -> dict[str, Any]:
    needed = {"warmup_max_lr": 0.01} if kind != "WarmupCosineLR" else {}
    return {"optimizer": ADAMW, "scheduler": {"type": kind, "params": {**needed, **params}}}


NOT_OF_SGD = {
    **{"betas": [0.5, 0.5], "torch_adam": True, "adam_w_mode": True, "eps": 1e-8},
    **{"amsgrad": False, "capturable": False, "dampening": 0.5, "nesterov": 1},
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1}}}, "optimizer.type"),
    ({"optimizer": {"type": "Lamb", "params": {"lr": 1}}}, "optimizer.type"),
    ({"optimizer": {"type": "Adam", "params": {"lr": 1, "amsgrad": True}}}, "params.amsgrad"),
    ({"optimizer": {"type": "Adam", "params": {"lr": 1, "betas": "auto"}}}, "params.betas"),
    ({"optimizer": ADAMW, "scheduler": {"type": "OneCycle", "params": {}}}, "scheduler.type"),
    ({"scheduler": WARMUP}, "scheduler"),
    ({"optimizer": ADAMW, "scheduler": {"type": "WarmupDecayLR", "params": {}}}, "warmup_max_lr"),
    ({"fp16": {"enabled": True, "hysteresis": 2}}, "fp16.hysteresis"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16, bf16"),
    ({"fp16": {"enabled": True}, "bfloat16": {"enabled": True}}, "fp16, bfloat16"),
    ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, "bf16, bfloat16"),
    *(
        ({key: {"enabled": value}}, f"{key}.enabled = {json.dumps(value)}")
        for key in ("fp16", "bf16", "bfloat16")
        for value in (1, 0, "true", None)
    ),
    *(
        ({"fp16": {"enabled": True, "initial_scale_power": value}}, "fp16.initial_scale_power")
        for value in ("auto", 2000, 128, -1, 8.0, True)
    ),
    *(
        ({"fp16": {"enabled": True, "loss_scale": value}}, "fp16.loss_scale")
        for value in ("128", False, None)
    ),
    *(
        ({"gradient_clipping": value}, "gradient_clipping")
        for value in (-1, math.nan, math.inf, 10**400, True)
    ),
    *(({"zero_optimization": {"stage": value}}, "stage") for value in (4, -1, 1.0, True, "3")),
    (adam(torch_adam=True), "params.torch_adam"),
    (adam(torch_adam="false"), "params.torch_adam"),
    (adam(adam_w_mode=0), "params.adam_w_mode"),
    (adam(momentum=0.9), "params.momentum"),
    (adam(lr="1e-3"), "params.lr"),
    (adam(lr="0.1,weight_decay=5"), "params.lr"),
    (adam(eps=True), "params.eps"),
    (adam(betas=None), "params.betas"),
    (adam(betas=["0.9", 0.99]), "params.betas"),
    *((sgd(**{name: value}), f"params.{name}") for name, value in NOT_OF_SGD.items()),
    (warmup(warmup_type="log,steps=5"), "params.warmup_type"),
    (warmup(warmup_min_lr="0"), "params.warmup_min_lr"),
    (warmup(betas=[0.9, 0.99]), "params.betas"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "offload_opt"),
    ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized"),
    ({"zero_optimization": True}, "zero_optimization"),
    ({"prescale_gradients": True}, "prescale_gradients"),
    ({"amp": {"enabled": True}}, "amp"),
    ({"train_batchsize": 3}, "train_batchsize"),
]


@pytest.mark.parametrize(("sections", "named"), REFUSED, ids=lambda case: str(case)[:60])
def test_what_has_no_counterpart_is_refused_by_name(
    sections: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError) as refused:
        configured(tmp_path, **sections)
    assert named in refused.value.found and "ds_config.json" in refused.value.asked
    assert refused.value.why and refused.value.do


@pytest.mark.parametrize(
    ("sections", "found"),
    [
        (adam(betas=[1.0, 0.99]), "beta1=1.0"),
        (adam(betas=[0.9, -0.1]), "beta2=-0.1"),
        (adam(lr=math.nan), "lr=nan"),
        (sgd(nesterov=True), "nesterov=true, momentum=0"),
        (warmup(warmup_min_lr=0.5), "lowest=0.5, over 0.01"),
        (warmup("WarmupCosineLR", total_num_steps=2000, warmup_min_ratio=2), "lowest_ratio=2.0"),
        *(
            (warmup(kind, total_num_steps=total, warmup_num_steps=10), f"total={total}, steps=10")
            for kind in ("WarmupDecayLR", "WarmupCosineLR")
            for total in (5, 10)
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_job_starts(
    sections: dict[str, Any], found: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError) as refused:
        configured(tmp_path, **sections)
    assert refused.value.found.startswith(found) and refused.value.why and refused.value.do


@pytest.mark.parametrize(
    ("kind", "params", "wanted"),
    [
        ("adam", {"adam_w_mode": False}, "adam"),
        ("Adam", {"adam_w_mode": False, "torch_adam": True}, "adam"),
        ("ADAM", {"adam_w_mode": True}, "adamw"),
        ("Adam", {"torch_adam": True, "weight_decay": 0}, "adamw"),
        ("AdamW", {"adam_w_mode": False}, "adamw"),
        ("SGD", {"momentum": 0.9, "nesterov": True, "dampening": 0, "fused": True}, "sgd"),
    ],
)
def test_a_type_is_an_optimizer(
    kind: str, params: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    found = configured(tmp_path, optimizer={"type": kind, "params": {"lr": 0.1, **params}})
    assert found.job.optimizer.partition(":")[0] == wanted


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[]", "a list"),
        ("{", "Expecting property name"),
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
    ],
)
def test_what_is_no_configuration_is_refused(text: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(RequestError) as refused:
        resolve("digits", {}, (), str(tmp_path / "ds.json"))
    assert refused.value.found.startswith(found)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({"optimizer": "adamx"}, "no optimizer of the name 'adamx'"),
        ({"optimizer": "adamw:lr=0"}, "lr=0"),
        ({"optimizer": "adamw:lr"}, "'lr' is not key=value"),
        ({"schedule": "warmup-lr"}, "no --optimizer"),
        ({"optimizer": "sgd", "engine": "tensorflow"}, "optimizer = sgd"),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused(flags: dict[str, Any], found: str) -> None:
    program = "digits-keras" if "engine" in flags else "digits"
    with pytest.raises(RequestError) as refused:
        resolve(program, flags)
    assert refused.value.found == found


def test_rates_are_those_of_deepspeed() -> None:
    """As its schedulers of 0.19.8 set them, stepped once after each update."""
    of = "adamw:lr=0.01"
    rates = {
        "warmup-lr:lowest=0.001,highest=0.01,steps=4": GOLDEN[0],
        "warmup-decay-lr:highest=0.02,steps=3,total=6,kind=linear": GOLDEN[1],
        "warmup-cosine-lr:lowest_ratio=0.1,steps=2,total=6": GOLDEN[2],
    }
    for schedule, wanted in rates.items():
        found = [0.01 * factor_of(schedule, of, update) for update in range(8)]
        assert found == pytest.approx(wanted, rel=1e-12, abs=1e-15), schedule


@pytest.mark.slow
def test_a_training_is_that_of_the_same_job_said_with_flags(
    train: Train, server: ForkServer, tmp_path: Path
) -> None:
    """2 ranks, accumulation, clipping, ZeRO 1, AdamW and WarmupLR: the same digest."""
    path = tmp_path / "ds_config.json"
    sections = {"optimizer": ADAMW, "scheduler": WARMUP, "gradient_clipping": 0.5}
    batch = {"train_batch_size": 24, "gradient_accumulation_steps": 3}
    path.write_text(json.dumps({**batch, **sections, "zero_optimization": {"stage": 1}}))
    flags = {"ranks": 2, "steps": 6}
    wanted = {"run_dir": str(tmp_path / "said"), **flags}
    said = run_job(resolve("contract_tasks:Images", wanted, (), str(path)), server).summary
    flagged = train(
        "contract_tasks:Images",
        *("batch_size=24", "clip_norm=0.5"),
        optimizer="adamw:lr=0.01,beta1=0.8,beta2=0.99,weight_decay=0.1",
        schedule="warmup-lr:highest=0.01,steps=4",
        strategy="zero1",
        micro_batch=4,
        **flags,
    ).summary
    assert said["weights_sha256"] == flagged["weights_sha256"]
    own = train("contract_tasks:Images", strategy="zero1", micro_batch=4, **flags).summary
    assert own["weights_sha256"] != said["weights_sha256"], "the optimizer of the task was taken"
    kept = tomllib.loads((tmp_path / "said" / "job.toml").read_text())
    assert kept["optimizer"].startswith("adamw:") and "optimizer" in kept["source"]["optimizer"]
