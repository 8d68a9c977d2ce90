"""`model-parallel`: parts of one model on devices, pieces of a micro-batch in flight.

What every strategy must give is in `tests/test_every_strategy.py`; here is what only parts of a
model in one process can get wrong. There is no GPU: parts are all on the CPU, or one of them on
`meta`, a device that holds shapes alone.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import contract_tasks
import trainer_tasks
from allranks.errors import BadStep, RequestError
from allranks.job.job import Job
from allranks.job.place import RankPlacement
from allranks.torch import Trainer
from allranks.torch.data.collate import map_arguments
from allranks.torch.machine import check_devices
from allranks.torch.model.partition import balanced, by_hand, runs_of, units_of
from allranks.torch.model.weights import weights_sha256
from conftest import Train
from in_this_process import STEPS, assert_equal, one_thread_each, trained, with_model

PARTS = "model-parallel:parts=3,by=size"
SPLIT = "model-parallel:by=size,split=4"

__all__ = ["one_thread_each"]


# --- the same as one process ----------------------------------------------------------------


class Skips(nn.Module):
    """A skip over a part, a module that is called twice, one that writes into what it is given,
    a parameter of its own, and a way back to the first part."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.first, self.act = nn.Linear(4, 8, bias=False), nn.ReLU(inplace=True)
        self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        skip = self.first(inputs)
        hidden = self.act(self.middle(self.middle(skip)))
        again = self.first(inputs * self.scale)
        out: Tensor = self.last(self.dropout(hidden) + skip * again)
        return out


def by_name(self: Any, model: nn.Module) -> dict[str, int]:
    return {"scale": 0, "first": 0, "act": 1, "middle": 1, "last": 2, "dropout": 2}


SKIPS = with_model(Skips, device_map=by_name)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("task", "job"),
    [
        pytest.param(contract_tasks.Images(), {"micro_batch": 7}, id="micro-batches"),
        pytest.param(contract_tasks.Pictures(), {"micro_batch": 2}, id="parts of shards"),
        pytest.param(contract_tasks.Pairs(), {"micro_batch": 9}, id="loss over the batch"),
        pytest.param(trainer_tasks.Blocks(), {"activation_checkpointing": True}, id="recomputed"),
        pytest.param(trainer_tasks.Blocks(frozen=True), {"channels_last": True}, id="frozen"),
        pytest.param(SKIPS, {"strategy": "model-parallel:parts=3,split=8"}, id="skips"),
        pytest.param(
            contract_tasks.Images(batchnorm="whole"), {"strategy": PARTS}, id="whole norm"
        ),
    ],
)
def test_equal_to_one_process(task: Any, job: dict[str, Any]) -> None:
    wanted = trained(task, **{**job, "strategy": "single"})
    assert_equal(trained(task, **{"strategy": SPLIT, **job}), wanted)


def test_pieces_that_one_thread_launches_are_the_same() -> None:
    """As on CUDA, where devices work side by side by themselves."""
    for task in (contract_tasks.Images(), contract_tasks.Pairs(), SKIPS):
        wanted = trained(task, strategy="single")
        strategy = "model-parallel:parts=3,by=size,split=4"
        with Trainer(task, Job(strategy=strategy, precision="fp64")) as trainer:
            trainer.strategy._pieces.clear()  # type: ignore[attr-defined]
            losses = [trainer.step(batch).loss for batch in trainer.batches(steps=STEPS)]
            assert_equal((trainer.strategy.model.state_dict(), losses), wanted)


@pytest.mark.slow
def test_pieces_in_threads_give_the_same_bits_in_every_run() -> None:
    """They add up to one gradient, in their order."""

    def bits() -> str:
        with Trainer(contract_tasks.Images(), Job(strategy=SPLIT)) as trainer:
            for batch in trainer.batches(steps=8):
                trainer.step(batch)
            return weights_sha256(trainer.weights())

    assert len({bits() for _ in range(4)}) == 1


def test_equal_bits_where_they_are_asked_for() -> None:
    def bits(strategy: str) -> str:
        job = Job(strategy=strategy, bitwise=True)
        with Trainer(contract_tasks.Images(), job) as trainer:
            for batch in trainer.batches(steps=STEPS):
                trainer.step(batch)
            return weights_sha256(trainer.weights())

    assert bits(PARTS) == bits("single")


@pytest.mark.slow
def test_ddp_on_two_ranks_goes_on_where_it_stopped(train: Train) -> None:
    flags = {"precision": "fp64", "threads": 1}
    first = train("contract_tasks:Images", strategy=SPLIT, steps=3, checkpoint_every=3, **flags)
    resume = str(first.run_dir)
    resumed = train(
        "contract_tasks:Images", strategy="ddp", ranks=2, steps=7, resume=resume, **flags
    )
    assert resumed.summary["resumed_from_step"] == 3
    wanted, _ = trained(contract_tasks.Images(), 7)
    found = load_file(resumed.run_dir / "weights.safetensors")
    for name, tensor in wanted.items():
        np.testing.assert_allclose(found[name], tensor.numpy(), rtol=1e-10, atol=1e-12)


# --- in flight --------------------------------------------------------------------------------


def test_one_piece_is_in_each_part_forward_and_backward() -> None:
    """Two pieces, two parts: the second one enters the first part while the first is in the last.

    Both wait there for each other, so without that nothing would go on.
    """
    meeting, seen = threading.Barrier(2, timeout=20), list[Any]()

    class Beside(nn.Linear):
        def __init__(self, part: str) -> None:
            super().__init__(4, 4)
            self.part = part

        def forward(self, inputs: Tensor) -> Tensor:
            name = threading.current_thread().name
            if not name.startswith("piece-"):
                return super().forward(inputs)
            self.meet("forward", name, {("front", "piece-1_0"), ("back", "piece-0_0")})
            output = super().forward(inputs)
            output.register_hook(lambda _: self.back(threading.current_thread().name))
            return output.clone()  # the hook is of what is inside of this part

        def back(self, name: str) -> None:
            self.meet("backward", name, {("back", "piece-1_0"), ("front", "piece-0_0")})

        def meet(self, where: str, name: str, beside: set[tuple[str, str]]) -> None:
            seen.append((where, self.part, name))
            if (self.part, name) in beside:
                meeting.wait()

    def model() -> nn.Module:
        return nn.Sequential(Beside("front"), Beside("back"), nn.Linear(4, 1))

    task = with_model(model, device_map=lambda self, model: {"0": 0, "1": 1, "2": 1})
    job = Job(strategy="model-parallel:split=2", witness="off")
    with Trainer(task, job) as trainer:
        for batch in trainer.batches(steps=2):
            trainer.step(batch)
    for where, parts in (("forward", ("front", "back")), ("backward", ("back", "front"))):
        for part in parts:
            own = [name for at, in_part, name in seen if (at, in_part) == (where, part)]
            assert own == ["piece-0_0", "piece-1_0"] * 2, "in order"


def test_an_error_of_a_piece_is_raised_once_all_are_done() -> None:
    class Fails(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if threading.current_thread().name.startswith("piece-1_"):
                raise ValueError("not this piece")
            return super().forward(inputs)

    task = with_model(lambda: nn.Sequential(nn.Linear(4, 4), Fails(4, 4), nn.Linear(4, 1)))
    job = Job(strategy=SPLIT, witness="off")
    with pytest.raises(ValueError, match="not this piece"), Trainer(task, job) as trainer:
        trainer.step(next(trainer.batches()))
    assert not [t.name for t in threading.enumerate() if t.name.startswith("piece")]


def test_a_bad_sample_is_found_as_in_one_process() -> None:
    told = []
    for strategy in ("single", SPLIT):
        with Trainer(contract_tasks.Images(), Job(strategy=strategy)) as trainer:
            batches = trainer.batches()
            trainer.step(next(batches))
            trainer.strategy.step.poison_next()
            with pytest.raises(BadStep) as bad:
                trainer.step(next(batches))
            told.append(str(bad.value))
    assert told[0] == told[1] and "the loss of sample" in told[0]


# --- which part is where ----------------------------------------------------------------------


@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=7), parts=st.integers(1, 4))
def test_the_largest_run_is_as_small_as_can_be(costs: list[int], parts: int) -> None:
    if parts > len(costs):
        return
    found = runs_of(costs, parts)
    assert found == sorted(found) and set(found) == set(range(parts))
    ways = itertools.combinations(range(1, len(costs)), parts - 1)
    cuts = [[0, *way, len(costs)] for way in ways]
    best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts)
    assert (
        max(sum(c for c, r in zip(costs, found, strict=True) if r == run) for run in found) == best
    )


def test_what_is_placed_as_a_whole() -> None:
    """Members of containers and sequences; more of them where there are too few."""
    block = nn.TransformerEncoderLayer(8, 2, 16)
    model = nn.ModuleDict(
        {"body": nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()), block])}
    )
    assert [unit.name for unit in units_of(model, 2)] == ["body.0.0", "body.0.1", "body.1"]
    names = [unit.name for unit in units_of(model, 4)]
    assert names[:2] == ["body.0.0", "body.0.1"] and "body.1.self_attn" in names


def test_a_tied_weight_keeps_both_in_one_part() -> None:
    model = contract_tasks.Words().model()
    units = units_of(model, 2)
    found = balanced(units, [1.0, 1.0, 1.0, 9.0], 2)
    assert [unit.name for unit in units] == ["embedding", "mix", "frozen", "out"]
    assert found.parts == (0, 1, 1, 0)


@dataclass(kw_only=True)
class Sleepy(contract_tasks.Plain):
    """The last module is small and slow, the first one large and quick."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Linear(64, 2), _Sleeps())


class _Sleeps(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1  # type: ignore[operator]
        time.sleep(0.03)
        return super().forward(inputs) + 0 * torch.rand(())


def test_cost_is_measured_and_leaves_no_trace() -> None:
    parts = {}
    for by in ("size", "cost"):
        with Trainer(Sleepy(), Job(strategy=f"model-parallel:by={by}")) as trainer:
            found = trainer.strategy
            parts[by] = found.device_map.parts  # type: ignore[attr-defined]
            assert not found.model[3].calls and not found.model[1].num_batches_tracked
            drawn = torch.rand(3)
            assert all(parameter.grad is None for parameter in found.model.parameters())
        with Trainer(Sleepy(), Job(strategy="single")):
            assert torch.equal(drawn, torch.rand(3))
    assert parts == {"size": (0, 1, 1, 1), "cost": (0, 0, 0, 1)}


# --- two devices --------------------------------------------------------------------------------


class Mixes(nn.Module):
    """Puts together what two parts have made."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.ends_mixed = False

    def forward(self, inputs: Tensor, *, factor: Tensor) -> Tensor:
        hidden = self.front(inputs)
        output: Tensor = self.norm(self.back(hidden) * factor.to("meta"))
        return hidden + output if self.ends_mixed else output


def test_what_goes_into_a_part_goes_to_its_device_and_two_devices_are_explained() -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    task = with_model(
        Mixes,
        inputs=lambda self, batch: {"inputs": batch[0], "factor": batch[0].new_ones(())},
        loss=lambda self, output, batch: output[:, 0],
    )
    with Trainer(task, Job(strategy="model-parallel:by=size", witness="off")) as trainer:
        strategy: Any = trainer.strategy
        model = strategy.model
        strategy.devices = [cpu, meta]
        hand = {"front": 0, "back": 1, "norm": 1}
        strategy.device_map = by_hand(model, hand, 2)
        strategy._place(model, strategy.device_map)
        where = {name: tensor.device for name, tensor in model.state_dict().items()}
        assert {name.split(".")[0]: device for name, device in where.items()} == {
            "front": cpu,
            "back": meta,
            "norm": meta,
        }
        rows = RankPlacement(0, tuple(strategy.placement(updated=False)))
        assert [(t.part, t.device, t.bytes) for t in rows.totals] == [
            (0, "cpu", 80),
            (1, "meta", 80 + 16 * 4 + 8),
        ]
        strategy.devices[0] = meta  # where its output goes: nothing comes back from `meta`
        model.eval()
        arguments = {"inputs": torch.ones(3, 4), "factor": torch.ones(())}
        output = strategy.eval_step(arguments, lambda call, given: call(**given))
        assert output.device == meta and output.shape == (3, 4)
        model.ends_mixed = True
        with pytest.raises(RequestError, match="tensors on two devices"):
            strategy.eval_step(arguments, lambda call, given: call(**given))


class Output(OrderedDict[str, Tensor]):
    """As models of Hugging Face return it."""

    @property
    def logits(self) -> Tensor:
        return self["logits"]


def test_what_modules_hand_to_each_other_stays_of_its_kind() -> None:
    given = ([Output(logits=torch.ones(2))], {"past": (torch.zeros(1), None)}, "text")
    found = map_arguments(lambda tensor: tensor.to("meta"), given)
    assert found[0][0].logits.is_meta and not given[0][0].logits.is_meta
    assert found[1]["past"][0].is_meta and found[1]["past"][1] is None and found[2] == "text"


# --- what is refused ---------------------------------------------------------------------------


class RunsAgain(nn.Module):
    """Checkpoints its dropout by hand where the thread is that of the last piece."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
        self.outer = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        if threading.current_thread().name.startswith("piece-3"):
            return self.outer(checkpoint(self.inner, inputs, use_reentrant=False))
        return self.outer(self.inner(inputs))


def mapped(given: dict[str, int], make: Callable[[], nn.Module] = Skips) -> Any:
    return with_model(make, device_map=lambda self, model: given)


ALL = {"scale": 0, "first": 0, "act": 1, "middle": 1, "last": 1, "dropout": 1}
NO_DROPOUT = {name: part for name, part in ALL.items() if name != "dropout"}
WORDS = {"embedding": 0, "mix": 0, "frozen": 0, "out": 1}


@pytest.mark.parametrize(
    ("task", "job", "found"),
    [
        (with_model(RunsAgain), {"strategy": SPLIT}, "such a layer ran again during backward"),
        (with_model(lambda: nn.Linear(4, 1)), {}, "Linear is made of 0 modules"),
        (contract_tasks.Plain(), {"compile": "eager"}, "passes of its own"),
        (contract_tasks.Plain(), {"strategy": "model-parallel:split=9"}, "shards = 8"),
        (contract_tasks.Plain(), {"strategy": SPLIT, "bitwise": True}, "by itself"),
        (contract_tasks.Images(batchnorm="whole"), {"strategy": SPLIT}, "cuts what goes through"),
        (mapped({**ALL, "lost": 0}), {}, "'lost'"),
        (mapped(NO_DROPOUT), {"strategy": SPLIT}, "a Dropout that is in no part as a whole"),
        (mapped({**ALL, "last": 2}), {}, "part 2 for 'last', with parts=2"),
        (mapped({**ALL, "": 0}), {}, "'the whole model' and"),
        (mapped({n: p for n, p in ALL.items() if n != "last"}), {}, "nothing for 'last.weight'"),
        (mapped(dict.fromkeys(ALL, 0)), {}, "nothing in part 1 of 2"),
        (mapped(WORDS, contract_tasks.Words().model), {}, "'embedding' in part 0, 'out' in part 1"),
    ],
)
def test_what_cannot_be_is_refused(task: Any, job: dict[str, Any], found: str) -> None:
    job = {"strategy": "model-parallel", "witness": "off", **job}
    with pytest.raises(RequestError, match=found), Trainer(task, Job(**job)) as trainer:
        trainer.step(next(trainer.batches()))


def test_a_machine_needs_a_device_for_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices(Job(device="cuda", strategy="model-parallel"), 1)
    with pytest.raises(RequestError, match="every part needs a device") as refused:
        check_devices(Job(device="cuda", strategy="model-parallel:parts=3"), 1)
    assert refused.value.do == "--device cuda --strategy model-parallel:parts=2"
