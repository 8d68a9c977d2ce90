"""The main job on real input: handwritten digits on 1 to 8 ranks, to the same accuracy and bits."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from conftest import Train


@pytest.mark.slow
@pytest.mark.cases("ranks", [1, 3, 8], exhaustive=[2, 4])
def test_every_number_of_ranks_learns_to_read(ranks: int, train: Train) -> None:
    summary = train("digits", ranks=ranks).summary
    assert summary["eval"]["accuracy"] >= 0.97
    assert summary["world_size"] == ranks


@pytest.mark.slow
def test_in_float64_all_numbers_of_ranks_agree_after_50_steps(
    train: Train, exhaustive: bool
) -> None:
    """The uneven last batch, BatchNorm and dropout included; evaluation is exactly the same."""
    one = train("digits", precision="fp64", steps=50)
    weights = load_file(one.run_dir / "weights.safetensors")
    for ranks in (2, 3, 4, 8) if exhaustive else (3, 8):
        many = train("digits", precision="fp64", steps=50, ranks=ranks)
        assert many.summary["eval"]["accuracy"] == one.summary["eval"]["accuracy"]
        assert many.summary["eval"]["loss"] == pytest.approx(one.summary["eval"]["loss"], rel=1e-10)
        for name, tensor in load_file(many.run_dir / "weights.safetensors").items():
            error = np.linalg.norm((tensor - weights[name]).astype(np.float64))
            assert error <= 1e-10 * np.linalg.norm(weights[name].astype(np.float64)), name


def test_bitwise_gives_equal_bits_on_1_to_8_ranks(train: Train, exhaustive: bool) -> None:
    """Dropout, BatchNorm, clipping; accumulation, because fewer ranks run more shards each."""

    def outcome(ranks: int) -> tuple[object, ...]:
        found = train("digits", "clip_norm=0.5", ranks=ranks, bitwise=True, steps=14).summary
        return found["weights_sha256"], found["train_loss"], found["eval"]

    one = outcome(1)
    for ranks in range(2, 9) if exhaustive else (2, 3, 7, 8):
        assert outcome(ranks) == one, ranks


@pytest.mark.slow
def test_bitwise_between_hosts_gives_the_bits_of_one(train: Train) -> None:
    """On Gloo, as between hosts, ranks pair up: two ranks of four shards, four of two, twice."""
    digests = {
        train("digits", ranks=ranks, backend="gloo", bitwise=True, steps=3).summary[
            "weights_sha256"
        ]
        for ranks in (1, 2, 4)
    }
    assert len(digests) == 1


@pytest.mark.slow
def test_bitwise_with_messages_that_go_in_chunks(train: Train) -> None:
    """Above 2 MiB ranks exchange chunks instead of pairing up; the bits are the same."""
    digests = {
        train("synthetic", "width=900", ranks=ranks, bitwise=True, steps=3).summary[
            "weights_sha256"
        ]
        for ranks in (1, 2, 3, 4)
    }
    assert len(digests) == 1


@pytest.mark.slow
def test_bitwise_with_parts_of_shards_as_micro_batches(train: Train) -> None:
    """Without batch statistics a shard may be cut, and the bits still do not know the ranks."""
    digests = set()
    for ranks in (1, 3, 8):
        for workers in (0, 2):
            flags = {"ranks": ranks, "bitwise": True, "steps": 7, "micro_batch": 2}
            if workers and ranks != 3:
                continue
            result = train("contract_tasks:Pictures", loader_workers=workers, **flags)
            digests.add(result.summary["weights_sha256"])
    assert len(digests) == 1


@pytest.mark.slow
def test_a_micro_batch_does_not_change_the_result(train: Train) -> None:
    """F2: accumulation keeps the global batch. In float64, whole shards and parts of shards."""
    for task, limits in (("Images", (3, 7)), ("Words", (1, 2, 5)), ("Pairs", (3, 4))):
        one = train(f"contract_tasks:{task}", precision="fp64", steps=10)
        wanted = load_file(one.run_dir / "weights.safetensors")
        for limit in limits:
            flags = {"precision": "fp64", "steps": 10, "ranks": 2, "micro_batch": limit}
            cut = train(f"contract_tasks:{task}", **flags)
            for name, tensor in load_file(cut.run_dir / "weights.safetensors").items():
                np.testing.assert_allclose(tensor, wanted[name], rtol=1e-9, atol=1e-12)
