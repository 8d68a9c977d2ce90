"""A recorded initialisation gives the bits of one process, tensor by tensor, and little memory."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from allranks.catalog import STRATEGIES, TORCH
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.programs.models.gpt import GPT
from allranks.strategies.torch_cards import CARDS
from allranks.torch import Trainer
from allranks.torch.deferred_init.in_blocks import (
    BLOCK,
    TOGETHER,
    draw_in_blocks,
    is_drawn_in_blocks,
    sizes,
)
from allranks.torch.deferred_init.recorded import Outcome, Recorded, on_device, record
from conftest import Train
from contract_tasks import Words
from deferred_workers import SHAPE, Hooked, measured
from fake_sharded import CARD, NAME
from init_models import MODELS, WHOLE, Build
from init_programs import drawn_program

SEED = 11


def seeded(build: Build) -> nn.Module:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    return build()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def same(one: Tensor, other: Tensor) -> bool:
    """Every bit, and where each number lies."""
    if one.layout is not torch.strided:
        return bool((one.to_dense() == other.to_dense()).all())
    one, other = one.detach().resolve_conj(), other.detach().resolve_conj()
    layout = [(t.shape, t.stride(), t.dtype, t.device) for t in (one, other)]
    ours, theirs = (t.contiguous().view(-1).view(torch.uint8) for t in (one, other))
    return layout[0] == layout[1] and torch.equal(ours, theirs)


def recorded(build: Build) -> Outcome[nn.Module]:
    return record(lambda: seeded(build), lambda model: model)


def filled(recorded: Recorded, model: nn.Module) -> None:
    """The model with memory, and in it what is replayed."""
    on_device(model, torch.device("cpu"))
    held = tensors_of(model)

    def place(name: str, whole: Tensor) -> None:
        with torch.no_grad():
            held[name].set_(whole) if not whole.is_conj() else held[name].copy_(whole)

    recorded.replay(place)


@pytest.mark.slow(but=6)
@pytest.mark.parametrize("name", MODELS)
def test_every_bit_is_that_of_one_process(name: str) -> None:
    wanted = seeded(MODELS[name])
    after = torch.get_rng_state(), random.random(), np.random.rand()
    outcome = recorded(MODELS[name])
    assert outcome.recorded is not None, outcome.why
    assert torch.equal(torch.get_rng_state(), after[0])
    assert (random.random(), np.random.rand()) == after[1:]
    model = outcome.built
    assert all(tensor.is_meta for tensor in tensors_of(model).values())
    filled(outcome.recorded, model)
    assert torch.equal(torch.get_rng_state(), after[0])
    ours, theirs = tensors_of(model), tensors_of(wanted)
    assert [(n, t.requires_grad) for n, t in ours.items()] == [
        (n, t.requires_grad) for n, t in theirs.items()
    ]
    for key, tensor in theirs.items():
        assert same(ours[key], tensor), key
    assert model.state_dict().keys() == wanted.state_dict().keys()
    tied = [[n for n, t in m.named_parameters(remove_duplicate=False)] for m in (model, wanted)]
    assert tied[0] == tied[1]


def test_tensors_that_no_module_has_registered_are_computed_too() -> None:
    wanted, outcome = seeded(MODELS["rotary"]), recorded(MODELS["rotary"])
    assert outcome.recorded is not None
    filled(outcome.recorded, outcome.built)
    found: Any = outcome.built
    for model in (found, wanted):
        assert not model.angles.is_meta
    assert same(found.angles, wanted.angles)  # type: ignore[arg-type]
    assert same(found.cache["mask"][0], wanted.cache["mask"][0])  # type: ignore[index]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("seed", range(8))
def test_programs_drawn_at_random(seed: int) -> None:
    wanted = seeded(lambda: drawn_program(seed, steps=60))
    after = torch.get_rng_state()
    outcome = recorded(lambda: drawn_program(seed, steps=60))
    assert outcome.recorded is not None, outcome.why
    filled(outcome.recorded, outcome.built)
    assert torch.equal(torch.get_rng_state(), after)
    for key, tensor in tensors_of(wanted).items():
        assert same(tensors_of(outcome.built)[key], tensor), key
    pairs: Any = zip(outcome.built.kept, wanted.kept, strict=True)  # type: ignore[arg-type]
    assert all(same(ours, theirs) for ours, theirs in pairs)


@pytest.mark.slow(but=7)
@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_recorded_is_built_whole(name: str) -> None:
    wanted = seeded(WHOLE[name])
    after = torch.get_rng_state()
    outcome = recorded(WHOLE[name])
    assert outcome.recorded is None
    assert outcome.why
    assert torch.equal(torch.get_rng_state(), after)
    ours, theirs = tensors_of(outcome.built), tensors_of(wanted)
    for key, tensor in theirs.items():
        assert same(ours[key], tensor), key


def test_no_more_than_a_few_of_the_largest_parameter_are_held() -> None:
    with measured() as whole:
        model = GPT(SHAPE)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert sum(sizes) > 50e6
    assert whole.bytes >= sum(sizes)
    del model
    with measured() as peak:
        outcome = recorded(lambda: GPT(SHAPE))
        assert outcome.recorded is not None
        outcome.recorded.replay(lambda name, whole: None)
    assert max(sizes) <= peak.bytes < 2 * max(sizes)


def test_ranks_hold_their_halves_of_what_one_process_starts_with(
    on_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """And never the whole. The usual recipe draws the same half on both ranks."""
    on_ranks(2, "deferred_workers:halves_of_a_large_model", {"folder": str(tmp_path)})
    torch.manual_seed(5)
    whole = {name: p.detach() for name, p in GPT(SHAPE).named_parameters()}
    (first, shapes), (second, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert shapes == {name: tuple(p.shape) for name, p in whole.items()}
    for name, tensor in whole.items():
        assert same(torch.cat((first[name], second[name])), tensor), name
    size, largest = (f(p.nbytes for p in whole.values()) for f in (sum, max))
    for rank in range(2):
        peak = json.loads((tmp_path / f"{rank}.json").read_text())["peak"]
        assert size / 2 < peak < size / 2 + 2 * largest < size

    name = "blocks.0.feed_forward.0.weight"
    usual = [nn.Linear(256, 512, device="meta").to_empty(device="cpu") for _ in range(2)]
    for half in usual:
        torch.manual_seed(5)
        half.reset_parameters()
    assert same(usual[0].weight, usual[1].weight)
    assert not same(first[name], second[name])


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CARDS, NAME, CARD)
    monkeypatch.setitem(STRATEGIES[TORCH], NAME, "fake_sharded:FakeSharded")


@pytest.mark.usefixtures("known")
def test_ranks_that_draw_otherwise_are_told_the_weight(train: Train) -> None:
    with pytest.raises(RequestError, match=r"first in weight .*mix\.bias"):
        train("deferred_tasks:Apart", strategy=NAME, ranks=2, steps=1)


@pytest.mark.usefixtures("known")
def test_a_model_that_is_built_whole_is_noted() -> None:
    with Trainer(Hooked(), Job(strategy=NAME)) as trainer:
        assert trainer.built.recorded is None
        assert "every rank held the whole model" in trainer.model_notes[0]
        assert "mix.weight has hooks" in trainer.model_notes[0]


@pytest.mark.usefixtures("known")
def test_pretrained_weights_are_read_one_by_one(tmp_path: Path) -> None:
    torch.manual_seed(1)
    other = Words().model()
    file = {n: p.detach().clone() for n, p in other.named_parameters() if n != "mix.bias"}
    save_file(file, tmp_path / "weights.safetensors")

    class Filled(Words):
        def pretrained(self) -> Any:
            return tmp_path / "weights.safetensors"

    with Trainer(Filled(), Job(strategy=NAME, seed=3)) as trainer:
        found = dict(trainer.weights())
    with Trainer(Filled(), Job(strategy="single", seed=3)) as trainer:
        wanted = dict(trainer.weights())
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert same(found[name], tensor), name
    assert same(found["frozen.weight"], file["frozen.weight"])


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("numbers", [BLOCK + 1, BLOCK + 16, BLOCK + 17, 2 * BLOCK + 1001])
@pytest.mark.parametrize("name", ["normal_", "uniform_"])
def test_a_large_tensor_is_drawn_in_blocks_as_if_at_once(
    name: str, numbers: int, kind: torch.dtype
) -> None:
    whole = torch.empty(numbers, dtype=kind)
    assert is_drawn_in_blocks(name, whole, whole.device)
    assert sum(sizes(numbers)) == numbers
    torch.manual_seed(3)
    getattr(whole, name)(-1.0, 2.0)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    blocks: list[torch.Tensor] = []
    draw_in_blocks(lambda block: blocks.append(getattr(block, name)(-1.0, 2.0)), numbers, kind)
    assert max(map(len, blocks)) <= BLOCK + TOGETHER
    assert torch.equal(torch.cat(blocks), whole) and torch.equal(torch.get_rng_state(), after)
