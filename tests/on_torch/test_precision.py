"""Half precision: it learns, it is equal where equality is promised,
and an overflow leaves no trace."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import allranks.torch.accelerator as accelerator
import contract_tasks
import data_tasks
import trainer_tasks
from allranks.errors import ProgramError, RequestError
from allranks.job.job import Job
from allranks.job.run_folder import read_rows
from allranks.torch import Trainer
from allranks.torch.model.precision import set_kernels
from conftest import Train

OnRanks = Callable[..., Any]


@pytest.mark.slow(most=1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_digits_are_learnt(precision: str, train: Train) -> None:
    result = train("digits", "epochs=6", ranks=2, precision=precision)
    assert result.summary["eval"]["accuracy"] >= 0.94


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_equal_bits_on_any_ranks(precision: str, train: Train) -> None:
    """BatchNorm, dropout, clipping, an uneven last batch; under fp16 the scale grows on the way."""
    more = {"loss_scale": "dynamic:initial=64,every=2"} if precision == "fp16" else {}
    digests = set()
    for ranks in (1, 3):
        flags = {"ranks": ranks, "precision": precision, "bitwise": True, "steps": 6}
        result = train("contract_tasks:Images", **flags, **more)
        digests.add(result.summary["weights_sha256"])
        rows = read_rows(result.run_dir / "metrics.jsonl")
        scales = [row.get("loss_scale") for row in rows]
        assert scales == [2.0 ** (6 + n // 2) if more else None for n in range(6)]
    assert len(digests) == 1


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("ranks", "job"),
    [
        (1, {"strategy": "single"}),
        (2, {"strategy": "ddp"}),
        (3, {"bitwise": True}),
        (2, {"strategy": "ddp-plain"}),
    ],
    ids=str,
)
def test_an_overflow_leaves_every_rank_untouched(
    ranks: int, job: dict[str, Any], on_ranks: OnRanks
) -> None:
    on_ranks(ranks, "trainer_tasks:overflow", {"job": job})


@pytest.mark.slow
def test_too_large_a_scale_is_brought_down(train: Train) -> None:
    """Steps are skipped until the scale fits; they count as steps of the job, not as updates."""
    flags = {"precision": "fp16", "loss_scale": "dynamic:initial=1e12", "steps": 40, "ranks": 2}
    result = train("trainer_tasks:Steep", **flags)
    rows = read_rows(result.run_dir / "metrics.jsonl")
    scales = [row["loss_scale"] for row in rows]
    skipped = sum(1 for before, after in itertools.pairwise(scales) if after < before)
    assert skipped > 3 and scales[-1] == scales[-2] and scales[:2] == [1e12, 5e11]
    assert result.summary["steps"] == 40 - skipped
    assert not any("bad" in row for row in rows)


def test_weights_stay_whole_and_activations_are_half() -> None:
    seen = []
    with Trainer(trainer_tasks.Blocks(), Job(precision="bf16", threads=1)) as trainer:
        hook = trainer.strategy.model.last.register_forward_hook(
            lambda module, inputs, output: seen.append(output.dtype)
        )
        result = trainer.step(next(trainer.batches()))
        hook.remove()
        assert {t.dtype for _, t in trainer.weights() if t.is_floating_point()} == {torch.float32}
        assert all(p.grad.dtype == torch.float32 for p in trainer.strategy.step.parameters)
    assert set(seen) == {torch.bfloat16} and result.loss_scale is None


def test_images_in_channels_last_order() -> None:
    """The layout that convolutions see; the result is the same up to the order of sums."""
    losses = []
    for channels_last in (False, True):
        seen = []
        with Trainer(trainer_tasks.Steep(), Job(channels_last=channels_last)) as trainer:
            model = trainer.strategy.model
            assert isinstance(model, nn.Sequential)
            hook = model[0].register_forward_pre_hook(
                lambda module, inputs, seen=seen: seen.append(
                    inputs[0].is_contiguous(memory_format=torch.channels_last)
                )
            )
            losses.append([trainer.step(batch).loss for batch in trainer.batches(steps=4)])
            hook.remove()
        assert set(seen) == {channels_last}
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_group_norm_of_images_that_need_no_gradient_does_not_end_the_process() -> None:
    """In channels-last order torch would: see docs/found.md."""
    losses = []
    for channels_last in (False, True):
        with Trainer(trainer_tasks.Grouped(), Job(channels_last=channels_last)) as trainer:
            losses.append([trainer.step(batch).loss for batch in trainer.batches(steps=2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {"ranks": 3},
        {"ranks": 2, "strategy": "ddp:bucket_mb=0.0005"},
        {"ranks": 3, "strategy": "ddp-plain"},
        {"ranks": 4, "bitwise": True},
    ],
    ids=str,
)
def test_channels_last_on_several_ranks_with_weights(flags: dict[str, Any], train: Train) -> None:
    """Weights in that order lie in buckets; samples count for 1, 2 or 3,
    with a short last batch."""
    job: dict[str, Any] = {"precision": "fp64", "steps": 7}
    wanted = train("evaluation_workers:WeightedImages", **job, ranks=1)
    found = train("evaluation_workers:WeightedImages", **job, **flags, channels_last=True)
    assert found.summary["eval"] == pytest.approx(wanted.summary["eval"], rel=1e-9)
    ours, theirs = (load_file(r.run_dir / "weights.safetensors") for r in (found, wanted))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_torch_can_still_be_asked_about_tf32(precision: str) -> None:
    """It has an older and a newer set of switches, and refuses to answer where they disagree."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    with Trainer(trainer_tasks.Worse(), Job(precision=precision)):
        assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "highest"
        with torch.backends.cudnn.flags(enabled=False):
            pass
    assert before == (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision())


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("", "tf32"),
        ("cuda.matmul", "tf32"),
        ("cudnn", "tf32"),
        ("cudnn.conv", "ieee"),
        ("mkldnn.matmul", "bf16"),
    ],
)
def test_a_program_may_use_the_newer_switches_of_torch(
    on_ranks: OnRanks, place: str, value: str
) -> None:
    """fp32 means fp32 whatever a program has set, and it finds its switches as they were."""
    on_ranks(1, "kernel_workers:newer_switch", {"place": place, "value": value})


def test_a_script_gets_kernels_that_do_not_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN searches for none, and it is put back; cuBLAS has its workspace, or the user's.

    Torch reads that variable once in a process: a job without --bitwise must leave it behind, too.
    """
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    set_kernels(Job(device="cpu"))()
    assert name not in os.environ
    set_kernels(Job(device="cuda"))()
    assert os.environ[name] == ":4096:8"
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    job = Job(bitwise=True, device="cuda")
    put_back = set_kernels(job)
    assert not torch.backends.cudnn.benchmark and os.environ[name] == ":4096:8"
    put_back()
    assert torch.backends.cudnn.benchmark
    monkeypatch.setenv(name, ":16:8")
    put_back = set_kernels(job)
    assert os.environ[name] == ":16:8"
    put_back()
    assert os.environ[name] == ":16:8"


def test_a_kernel_that_is_not_deterministic_is_refused_by_name() -> None:
    class Puts(trainer_tasks.Worse):
        def loss(self, output: Any, batch: Any) -> Any:
            output = output.clone().put_(torch.tensor([0]), output.new_ones(1))
            return super().loss(output, batch)

    with Trainer(Puts(), Job(bitwise=True)) as trainer:
        with pytest.raises(RequestError, match="put_ does not have a deterministic") as refused:
            trainer.step(next(iter(trainer.batches())))
        assert refused.value.asked == "--bitwise"
        with pytest.raises(RequestError, match="put_ does not have a deterministic"):
            trainer.evaluate(trainer.task.train_data())


def test_a_device_without_memory_says_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By size of the blocks, while all of it is still held; the note is part of the traceback."""
    gpu = torch.device("cuda")
    blocks = [("active_allocated", 3 << 20), ("active_allocated", 3 << 20), ("inactive", 9 << 20)]
    module = SimpleNamespace(
        memory_stats=lambda _: {"allocated_bytes.all.current": 6 << 20},
        memory_snapshot=lambda: [{"blocks": [{"state": s, "size": n} for s, n in blocks]}],
        get_device_name=lambda _: "NVIDIA H200",
    )
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: gpu)
    monkeypatch.setattr(accelerator, "module_of", lambda _: module)

    class Large(trainer_tasks.Worse):
        def loss(self, output: Any, batch: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    with Trainer(Large()) as trainer, pytest.raises(torch.OutOfMemoryError) as error:
        trainer.step(next(iter(trainer.batches())))
    (note,) = error.value.__notes__
    first, second = note.splitlines()
    assert first.startswith("held on NVIDIA H200: 6") and second.startswith("  2 × 3")


def test_two_types_that_do_not_go_together_are_noted_with_that_of_the_job() -> None:
    class Mixes(trainer_tasks.Worse):
        def loss(self, output: Any, batch: Any) -> Any:
            return super().loss(output @ torch.eye(output.shape[1], dtype=torch.float64), batch)

    with Trainer(Mixes()) as trainer:
        for run in (trainer.rehearse, lambda: trainer.step(next(iter(trainer.batches())))):
            with pytest.raises(RuntimeError, match="dtype") as error:
                run()
            (note,) = error.value.__notes__
            assert note.startswith("This job computes in torch.float32: weights and batches")


def test_pretrained_weights_of_64_bits_are_not_rounded_to_32() -> None:
    given = {"0.weight": contract_tasks.made(8, 4, seed=3)}
    task = type("Filled", (contract_tasks.Plain,), {"pretrained": lambda self: given})()
    with Trainer(task, Job(precision="fp64")) as trainer:
        assert torch.equal(dict(trainer.weights())["0.weight"], given["0.weight"])


def test_a_tensor_of_another_type_made_in_forward_is_explained(train: Train) -> None:
    program = f"{data_tasks.__file__}:OfTwoTypes"
    with pytest.raises(
        ProgramError, match=r"(?s)x\.new_zeros.*torch\.float64|torch\.float64.*x\.new_"
    ):
        train(program, ranks=1, steps=1, precision="fp64")
    assert train(program, ranks=1, steps=1).summary["steps"] == 1
