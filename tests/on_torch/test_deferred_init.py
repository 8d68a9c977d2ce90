"""First weights: ranks of a node build one after the other, or fill a model that lies on meta."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import allranks.launcher.processes.linux as linux
import allranks.torch.model.deferred_init as in_turn
from allranks.catalog import STRATEGIES, TORCH
from allranks.errors import AllranksError, ProgramError, RequestError
from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.programs.models.gpt import GPT
from allranks.strategies.cards import CARDS
from allranks.torch import Trainer
from allranks.torch.build import _copy
from allranks.torch.model.deferred_init import (
    MetaModel,
    build_turn,
    free_memory_bytes,
    within_memory,
)
from conftest import Train
from contract_tasks import Words
from deferred_tasks import OnMeta
from deferred_workers import SHAPE, measured
from fake_sharded import CARD, NAME
from fsdp_tasks import Deep

HOST = torch.device("cpu")


def same(tensor: Tensor, other: Tensor) -> bool:
    return tensor.dtype == other.dtype and torch.equal(tensor, other)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CARDS, NAME, CARD)
    monkeypatch.setitem(STRATEGIES[TORCH], NAME, "fake_sharded:FakeSharded")


# --- in turn ----------------------------------------------------------------------------------


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("on_meta", [False, True])
def test_ranks_hold_their_halves_of_what_one_process_starts_with(
    on_meta: bool, on_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """In the end; meanwhile one rank at a time the whole model, or on meta a module."""
    argument = {"folder": str(tmp_path), "on_meta": on_meta}
    on_ranks(2, "deferred_workers:halves_of_a_large_model", argument)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    torch.manual_seed(5)
    whole = {name: p.detach() for name, p in GPT(SHAPE).named_parameters()}
    size, largest = (f(p.nbytes for p in whole.values()) for f in (sum, max))
    records = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for row in records:
        assert row["at_the_end"] < size / 2 + largest / 10
    if on_meta:
        assert all(row["peak"] < size / 2 + 3 * largest < size for row in records)
        return
    for name, tensor in whole.items():
        assert same(torch.cat((first[name], second[name])), tensor), name
    (_, before), (after, _) = sorted(row["built"] for row in records)
    assert before <= after


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["raises", "dies"])
def test_no_rank_waits_for_the_turn_of_one_that_has_failed(
    how: str, rank: int, train: Train
) -> None:
    with pytest.raises(AllranksError) as failed:
        train("deferred_tasks:Fails", f"how={how}", f"rank={rank}", strategy="fsdp", ranks=2)
    assert f"rank {rank}" in str(failed.value)
    if how == "raises":
        assert isinstance(failed.value, ProgramError) and "no such layer" in str(failed.value)


def test_processes_of_one_node_take_turns_and_other_nodes_do_not_wait() -> None:
    job = {"size": 4, "store": "somewhere"}

    def child(node: int) -> bool:
        """Whether a process of that node, forked here, gets its turn at once."""
        reader, writer = os.pipe()
        process = os.fork()
        if not process:
            in_turn.time.sleep = lambda _: os._exit(0)  # type: ignore[assignment]
            with build_turn(World(rank=1, node=node, **job), None):  # type: ignore[arg-type]
                os.write(writer, b"1")
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            got_it = bool(answer.read())
        os.waitpid(process, 0)
        return got_it

    with build_turn(World(node=0, **job), None):  # type: ignore[arg-type]
        assert not child(node=0)
        assert child(node=1)
    assert child(node=0)


def test_a_process_that_the_model_leaves_behind_keeps_no_turn() -> None:
    world = World(size=2, store="somewhere else")
    reader, writer = os.pipe()
    with build_turn(world, None):
        process = os.fork()
        if not process:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
    with build_turn(world, None):  # it is alive
        os.close(reader)
        os.close(writer)
    os.waitpid(process, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("known")
def test_ranks_that_draw_otherwise_are_told_the_weight(train: Train) -> None:
    with pytest.raises(RequestError, match=r"first in weight .*mix\.bias"):
        train("sharded_tasks:Apart", strategy=NAME, ranks=2, steps=1)


# --- too large for the host -------------------------------------------------------------------


def test_a_model_larger_than_free_memory_is_refused_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = sum(p.nbytes for p in Words().model().parameters())
    monkeypatch.setattr(in_turn, "LOOK_EVERY_BYTES", size)
    monkeypatch.setattr(in_turn, "free_memory_bytes", lambda: size - 1)
    with pytest.raises(RequestError) as refused, Trainer(Words(), Job(strategy="single")):
        pass
    error = refused.value
    assert "GiB of weights more at 'bias' of a Linear, and " in error.found
    assert 'torch.device("meta")' in error.do and "pretrained()" in error.do
    assert "init(module)" in error.do and "whole" in error.why and "model()" in error.asked
    with Trainer(OnMeta(), Job(strategy="single")):
        pass


def test_only_what_takes_memory_of_the_host_is_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(in_turn, "LOOK_EVERY_BYTES", 1)
    monkeypatch.setattr(in_turn, "free_memory_bytes", lambda: 5000)
    mapped = torch.from_file(str(tmp_path / "weights"), shared=True, size=4000)
    with within_memory():
        layer = nn.Linear(10, 100, bias=False)
        for _ in range(3):
            layer.weight = nn.Parameter(torch.zeros(100, 10))  # the one before is gone
            layer.bias = nn.Parameter(mapped)
        layer.weight = nn.Parameter(TwoTensor(torch.zeros(100, 10), torch.zeros(100, 10)))
        with pytest.raises(RequestError, match="free memory"):
            nn.Linear(100, 100, bias=False)


def test_free_memory_is_that_of_the_control_groups_without_the_pages_of_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert free_memory_bytes() > 0
    monkeypatch.setattr(linux, "GROUPS", tmp_path / "self")
    monkeypatch.setattr(linux, "MOUNT", tmp_path)
    inner = tmp_path / "slurm" / "job"
    inner.mkdir(parents=True)
    (tmp_path / "self").write_text("0::/slurm/job\n")
    (tmp_path / "cgroup.controllers").touch()

    def limit(folder: Path, most: str) -> None:
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text("30\n")
        (folder / "memory.stat").write_text("anon 9\ninactive_file 12\nactive_file 8\n")

    limit(inner, "max")
    assert free_memory_bytes() > 1000
    limit(inner.parent, "100")  # of a group around that of this process
    assert free_memory_bytes() == 90
    limit(inner, "40")
    assert free_memory_bytes() == 30


def test_a_mask_that_nobody_sets_is_an_error_and_any_number_may_be_set() -> None:
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("mask", torch.ones(2, 2).tril().bool())
            self.register_buffer("least", torch.zeros(2, dtype=torch.int8))

    class Sets(Words):
        sets = True

        def model(self) -> nn.Module:
            with torch.device("meta"):
                return Masked()

        def init(self, module: nn.Module) -> None:
            super().init(module)
            assert isinstance(module, Masked)
            module.least.fill_(-128)
            if self.sets:
                module.mask.copy_(torch.ones(2, 2).tril())

    def filled(task: Sets) -> nn.Module:
        model = task.model()
        MetaModel(model).fill(model, {}, task.init, _copy, seed=0, device=torch.device("cpu"))
        return model

    model = filled(Sets())
    assert model.mask.tolist() == [[True, False], [True, True]]
    assert model.least.tolist() == [-128, -128]
    task = Sets()
    task.sets = False
    with pytest.raises(RequestError, match="'mask' that it did not set"):
        filled(task)


# --- on meta ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_on_meta_ends_alike_under_every_strategy(train: Train) -> None:
    runs = [
        train("deferred_tasks:OnMeta", strategy=name, ranks=ranks, steps=3, bitwise=True)
        for name, ranks in (("single", 1), ("ddp", 2), ("fsdp", 2))
    ]
    assert len({run.summary["weights_sha256"] for run in runs}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("hsdp:shard=2", 4), ("zero1", 2), ("tensor", 2), (NAME, 2)],
)
@pytest.mark.usefixtures("known")
def test_it_starts_alike_under_every_strategy(name: str, ranks: int, train: Train) -> None:
    flags: dict[str, Any] = {"steps": 1, "precision": "fp64"}
    result, single = (
        train("sharded_tasks:OnMeta", strategy=strategy, ranks=count, **flags)
        for strategy, count in ((name, ranks), ("single", 1))
    )
    ours, theirs = (load_file(run.run_dir / "weights.safetensors") for run in (result, single))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[key], theirs[key], atol=1e-9) for key in theirs)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("strategy", [NAME, "single"])
def test_pretrained_weights_are_read_and_the_others_drawn(strategy: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    names = ("frozen.weight", "frozen.bias", "mix.weight")
    file = {n: p.detach().clone() for n, p in Words().model().named_parameters() if n in names}
    save_file(file, tmp_path / "weights.safetensors")
    before = torch.get_rng_state()
    with Trainer(OnMeta(), Job(strategy="single", seed=3)) as trainer:
        drawn = dict(trainer.weights())
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    task = OnMeta(file=str(tmp_path / "weights.safetensors"))
    with Trainer(task, Job(strategy=strategy, seed=3)) as trainer:
        weights = dict(trainer.weights())
        assert trainer.built.not_pretrained == sorted({*drawn, "out.weight"} - set(names))
    assert same(torch.get_rng_state(), after)
    for name, tensor in weights.items():
        assert same(tensor, file.get(name, drawn[name])), name
    assert (drawn["mix.bias"] == 0.25).all()


def test_what_init_sees_is_the_module_of_the_task_whole_and_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.Linear(3, 4, device="meta")
            self.write = nn.Linear(3, 4, device="meta")
            self.write.weight = self.read.weight
            self.register_buffer("scale", torch.full((2,), 3.0))
            self.register_buffer("count", torch.zeros(2, dtype=torch.int64, device="meta"))

    model: Any = Tied()
    calls: list[nn.Module] = []

    def init(module: Any) -> None:
        calls.append(module)
        if module is model:
            module.count = module.scale.long()
        elif module is model.read:
            module.weight = nn.Parameter(torch.ones(4, 3))
            module.bias.zero_()
        else:
            module.weight.add_(1)
            module.bias.normal_()

    filling, weight = MetaModel(model), model.read.weight
    digests = filling.fill(model, {}, init, lambda _, t, w: t.copy_(w), seed=1, device=HOST)  # type: ignore[arg-type, return-value]
    assert calls == [m for m in (model, model.read, model.write) for _ in range(2)]
    assert model.read.weight is model.write.weight is weight and weight.requires_grad
    assert (weight == 2).all() and model.count.tolist() == [3, 3] and model.scale[0] == 3
    assert set(digests) == {"count", "read.weight", "read.bias", "write.bias"}
    before = model.write.bias.clone()
    torch.rand(1)
    again: Any = Tied()
    model = again
    MetaModel(again).fill(again, {}, init, lambda _, t, w: t.copy_(w), seed=1, device=HOST)  # type: ignore[arg-type, return-value]
    assert same(again.write.bias, before)


@pytest.mark.parametrize("strategy", ["single", NAME])
@pytest.mark.usefixtures("known")
def test_what_nobody_sets_is_named(strategy: str) -> None:
    class Forgets(OnMeta):
        def init(self, module: nn.Module) -> None:
            if getattr(module, "bias", None) is None:
                super().init(module)

    class Bare(Deep):
        def model(self) -> nn.Module:
            with torch.device("meta"):
                return nn.Sequential(nn.ParameterList([torch.ones(2)]))

    job = Job(strategy=strategy)
    with pytest.raises(RequestError, match=r"numbers of 'mix.weight' that it did not set"):
        Trainer(Forgets(), job)
    with pytest.raises(RequestError, match=r"no reset_parameters\(\) in its class"):
        Trainer(Bare(), job)


def test_no_more_than_a_module_is_whole_while_a_model_on_meta_is_filled() -> None:
    with torch.device("meta"):
        model = GPT(SHAPE)
    sizes = [parameter.nbytes for parameter in model.parameters()]

    def init(module: Any) -> None:
        module.reset_parameters()

    def place(name: str, target: Tensor, whole: Tensor) -> None:
        assert target.shape == whole.shape

    with measured() as peak:
        MetaModel(model).fill(model, {}, init, place, seed=1, device=HOST)
    assert sum(sizes) < peak.bytes < sum(sizes) + 3 * max(sizes)
