"""The weights at the end of a run, and those of a checkpoint: every name that the model has."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import kinds_tasks
from allranks.checkpoint.export import export_weights
from allranks.checkpoint.folder import committed
from allranks.torch.model.weights import weights_sha256
from conftest import Train


def test_buffers_that_share_memory_are_written(train: Train) -> None:
    result = train("kinds_tasks:Views", ranks=2, steps=3)
    found = load_file(result.run_dir / "weights.safetensors")
    kinds_tasks.Views().model().load_state_dict(found, strict=True)
    assert found["outputs"].tolist() == [1.0] * 3


@pytest.mark.slow
def test_every_rank_takes_part_where_whole_weights_are_put_together(train: Train) -> None:
    plain = train("kinds_tasks:Rows", ranks=3, steps=3)
    gathered = train("kinds_tasks:Gathered", ranks=3, steps=3)
    assert gathered.summary["weights_sha256"] == plain.summary["weights_sha256"]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_strict_load_finds_every_name_of_a_tied_model(ranks: int, train: Train) -> None:
    result = train(
        "kinds_tasks:TiedText", ranks=ranks, steps=4, checkpoint_every=2, micro_batch=None
    )
    (newest, *_) = committed(result.run_dir / "checkpoints")
    exported = result.run_dir / "exported.safetensors"
    export_weights(newest, exported)
    states = {}
    for path in (result.run_dir / "weights.safetensors", exported):
        states[path.name] = state = load_file(path)
        model = kinds_tasks.TinyGPT()
        model.load_state_dict(state, strict=True)
        assert torch.equal(state["lm_head.weight"], state["tokens.weight"])
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        digest = weights_sha256((name, named[name]) for name in sorted(named))
        assert digest == result.summary["weights_sha256"]
    average = load_file(result.run_dir / "average.safetensors")
    kinds_tasks.TinyGPT().load_state_dict(average, strict=True)
    assert torch.equal(average["lm_head.weight"], average["tokens.weight"])
    assert not torch.equal(average["lm_head.weight"], state["lm_head.weight"])
