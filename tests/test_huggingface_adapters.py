"""Adapters of peft under strategies that cut weights: results, bytes, and those that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
from safetensors.torch import load_file

import huggingface_tasks as tasks
from allranks.checkpoint.format import read_manifest, step_folder
from allranks.errors import RequestError
from test_huggingface import server  # noqa: F401  a fixture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft asks it
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]
FP64 = {"precision": "fp64", "steps": 4, "checkpoint_every": 4}


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    return {}


@pytest.mark.slow(most=5)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp", "tensor", "1f1b"])
@pytest.mark.parametrize("name", ["TwoAdapters", "OwnHead", "EightBitBase"])
def test_adapters_alone_are_trained(
    name: str, strategy: str, train: Callable[..., Any], references: dict[str, Any]
) -> None:
    """As in one process; only they have optimizer state, and what is sent is what is promised."""
    program = f"huggingface_tasks:{name}"
    if name not in references:
        references[name] = train(program, strategy="single", **FP64)
    found = train(program, strategy=strategy, ranks=2, **FP64)
    runs = found.run_dir, references[name].run_dir
    ours, theirs = (load_file(run / "weights.safetensors") for run in runs)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype
        assert (ours[key] - tensor).double().norm() <= 1e-10, key
    parameters = getattr(tasks, name)().model().named_parameters()
    trained = {key: p.numel() for key, p in parameters if p.requires_grad}
    assert all("lora_" in key or "modules_to_save" in key for key in trained)
    manifest = read_manifest(step_folder(found.run_dir / "checkpoints", 4))
    state = [
        tensor.size
        for key, tensor in manifest.tensors.items()
        if key.startswith("common/optimizer")
    ]
    assert 16 * sum(trained.values()) <= sum(state) < 17 * sum(trained.values())
    promised, sent = found.summary["card_bytes_per_step"], found.summary["sent_bytes"]["gradients"]
    if strategy in ("ddp", "zero2", "fsdp"):
        assert promised == pytest.approx(sent / 4, abs=1)
    if strategy in ("ddp", "zero2"):  # of 2 ranks each sends half of a sum, and half of the rest
        assert 8 * sum(trained.values()) <= promised < 8.2 * sum(trained.values()) + 200


def test_adapters_of_another_base_are_refused(train: Callable[..., Any], tmp_path: Path) -> None:
    """Before the first step: by layers that are not there, by shapes, and by names in the file."""
    with pytest.raises(RequestError, match=r"q_proj.* not found") as refused:
        train("huggingface_tasks:OtherAdapters")
    assert all(f"{part}:" in str(refused.value) for part in ("asked", "found", "why", "do"))
    wider = tasks.transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, **tasks.SIZES)
    deeper = tasks.transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, **tasks.SIZES)
    for name, config, words in (("wider", wider, "size mismatch"), ("short", deeper, "missing")):
        base = tasks.transformers.AutoModelForCausalLM.from_config(config)
        kind = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
        peft.get_peft_model(base, kind).save_pretrained(tmp_path / name)
        with pytest.raises(RequestError, match=words):
            tasks.OtherAdapters(adapters=str(tmp_path / name)).model()
