"""Operations counted against formulae, and what is unknown stays unknown."""

from __future__ import annotations

import pytest

import trainer_tasks
from allranks.job.job import Job
from allranks.torch import Trainer
from allranks.torch.model.flops import TERA, FlopsMeter, peak_flops
from allranks.torch.model.weights import weights_sha256


def test_the_peak_of_a_device() -> None:
    assert peak_flops("NVIDIA H200", "bf16") == 989.5 * TERA
    assert peak_flops("NVIDIA A100-SXM4-80GB", "tf32") == 156 * TERA
    assert peak_flops("NVIDIA L40S", "fp32") == 91.6 * TERA, "not the L4"
    assert peak_flops("NVIDIA GH200 480GB", "bf16") == 989.5 * TERA
    assert peak_flops("Tesla T4", "bf16") is None, "it has none"
    assert peak_flops("NVIDIA RTX A4000", "bf16") is None, "not the A40"
    assert peak_flops("NVIDIA A10G", "bf16") is None, "not the A10"
    assert peak_flops("Tesla V100-SXM2-16GB", "bf16") is None
    assert peak_flops("NVIDIA RTX A1000 Laptop GPU", "bf16") is None, "not the A100"
    assert peak_flops("NVIDIA H200 NVL", "bf16") is None, "not the H200 with its own module"
    assert peak_flops("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16") is None, "a slice"
    assert peak_flops("Some Other Device", "fp32") is None


def test_the_operations_of_a_step() -> None:
    """A linear layer of 72 by 3: 2·72·3 forward, and as many for its weights; inputs need none."""
    with Trainer(trainer_tasks.Worse(), Job(threads=1)) as trainer:
        trainer.meter = FlopsMeter(trainer.job, peak=1e6)
        batches = trainer.batches()
        for _ in range(2):
            trainer.step(next(batches))
        assert trainer.meter.flops_per_sample == 2 * 2 * 72 * 3
        assert trainer.meter.utilisation(100.0, devices=2) == pytest.approx(864 * 100 / 2e6)
        assert trainer.meter.utilisation(None, devices=2) is None


def test_counting_changes_nothing() -> None:
    digests = set()
    for peak in (None, 1e12):
        with Trainer(trainer_tasks.Blocks(), Job(threads=1)) as trainer:
            trainer.meter = FlopsMeter(trainer.job, peak)
            for batch in trainer.batches(steps=3):
                trainer.step(batch)
            digests.add(weights_sha256(trainer.weights()))
            assert (trainer.meter.flops_per_sample is None) == (peak is None)
    assert len(digests) == 1


@pytest.mark.parametrize("job", [Job(compile="eager"), Job(activation_checkpointing=True)])
def test_what_cannot_be_counted_is_unknown(job: Job) -> None:
    meter = FlopsMeter(job, peak=1e12)
    with meter.watching(8):
        pass
    assert meter.utilisation(1.0, 1) is None
