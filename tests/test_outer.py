"""Learners that meet every few steps: beside `single` where they are exact, else a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import contract_tasks
from allranks.errors import RequestError
from allranks.strategies.resolve import resolved_strategy
from conftest import Train
from outer_simulation import (
    Outer,
    average,
    block_momentum,
    four_bits,
    largest,
    nesterov,
    simulate,
    slowmo,
)

STEPS = 14
EXACT = ["local-sgd:every=1", "diloco:every=1,lr=1,momentum=0", "slowmo:every=1,beta=0"]
SPARSE = "sparse-loco:every=1,chunk=16,keep=16,bits=0,decay=1"
BLOCKS = "block-momentum:every=1,momentum=0"


def difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(
        ((found[n] - w).double().norm() / w.double().norm().clamp(min=1e-12)).item()
        for n, w in wanted.items()
    )


def weights(train: Train, task: str, strategy: str, **flags: Any) -> Any:
    flags = {"precision": "fp64", "steps": STEPS, **flags}
    result = train(f"contract_tasks:{task}", strategy=strategy, **flags)
    return result, load_file(result.run_dir / "weights.safetensors")


@pytest.mark.slow(most=8)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("strategy", [*EXACT, BLOCKS, SPARSE])
def test_one_step_of_plain_sgd_between_meetings_is_exact(
    strategy: str, ranks: int, train: Train
) -> None:
    """Uneven batches: the last of an epoch has 5 samples, so a learner may have none."""
    _, wanted = weights(train, "Descent", "single")
    result, found = weights(train, "Descent", strategy, ranks=ranks)
    assert difference(found, wanted) < 1e-10
    sent = result.summary["sent_bytes"]["gradients"] / STEPS
    assert sent == pytest.approx(result.summary["card_bytes_per_step"], rel=0.01)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", ["SGD", "SparseAdam"])
def test_rows_are_summed_over_all_before_learners_train_apart(kind: str, train: Train) -> None:
    program, numbers = ("table_tasks:Tables", f"kind={kind}"), {"precision": "fp64", "steps": 4}
    single = train(*program, strategy="single", **numbers)
    ours = train(*program, strategy="local-sgd:after=4", ranks=2, **numbers)
    found, wanted = (load_file(one.run_dir / "weights.safetensors") for one in (ours, single))
    assert difference(found, wanted) < 1e-12


@pytest.mark.slow
def test_parts_are_summed_over_all_before_learners_of_fsdp_train_apart(train: Train) -> None:
    _, wanted = weights(train, "Plain", "single")
    _, found = weights(train, "Plain", f"diloco:learners=2,inner=fsdp,after={STEPS}", ranks=4)
    assert difference(found, wanted) < 1e-10


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_moving_average_is_refused_of_one_learner_too(ranks: int, train: Train) -> None:
    """It was kept of the learner's weights, and the global ones were written in its place."""
    with pytest.raises(RequestError, match="moves other weights"):
        train("contract_tasks:Descent", "ema=0.5", strategy="diloco", ranks=ranks, steps=2)


def exact_slow(**options: Any) -> Outer:
    return slowmo(**options, rate=1e-2)


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("local-sgd:every=5", 3, {"every": 5}),
    ("local-sgd:every=4,after=3", 2, {"every": 4, "after": 3}),
    ("local-sgd:every=6,near=2,group=2", 4, {"every": 6, "near": 2, "group": 2}),
    ("slowmo:every=4,beta=0.5", 2, {"every": 4, "outer": lambda: exact_slow(alpha=1, beta=0.5)}),
    (
        "block-momentum:every=4,momentum=0.5",
        3,
        {"every": 4, "reset": True, "outer": lambda: block_momentum(0.5)},
    ),
    ("diloco:every=4", 3, {"every": 4, "outer": lambda: nesterov(0.7, 0.9)}),
    (
        "diloco:every=4,bits=4",
        3,
        {"every": 4, "outer": lambda: nesterov(0.7, 0.9), "coded": four_bits},
    ),
    (
        "sparse-loco:every=2,keep=3,chunk=16,bits=0",
        2,
        {"every": 2, "outer": lambda: nesterov(1, 0), "coded": largest(3, 16), "decay": 0.95},
    ),
]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("strategy", "ranks", "how"), CASES, ids=[case[0] for case in CASES])
def test_meetings_are_those_of_a_plain_loop(
    strategy: str, ranks: int, how: dict[str, Any], train: Train
) -> None:
    how = {**how, "outer": how.get("outer", lambda: average)()}
    wanted = simulate(contract_tasks.Plain(), ranks, STEPS, **how)
    _, found = weights(train, "Plain", strategy, ranks=ranks)
    assert difference(found, wanted) < 1e-10


@pytest.mark.slow
def test_the_card_counts_the_messages_of_each_fragment(train: Train) -> None:
    """In 13 steps, and the meeting at the end, both fragments are sent 7 times: as in 14."""
    result, _ = weights(train, "Plain", "diloco:every=2,fragments=2,bits=4", ranks=3, steps=13)
    sent = result.summary["sent_bytes"]["gradients"] / 14
    assert sent == pytest.approx(result.summary["card_bytes_per_step"], abs=1)


@pytest.mark.slow
def test_learners_by_muon_are_those_of_a_plain_loop_and_learn(train: Train) -> None:
    """Also where they meet in each step, which is not exact: it is a mean of orthogonal updates."""
    task = contract_tasks.Orthogonal()
    for text, every in (("diloco:every=4", 4), ("diloco:every=1,lr=1,momentum=0", 1)):
        outer = nesterov(0.7, 0.9) if every > 1 else nesterov(1, 0)
        wanted = simulate(task, 3, STEPS, every=every, outer=outer)
        _, found = weights(train, "Orthogonal", text, ranks=3)
        assert difference(found, wanted) < 1e-10
    first, exact = weights(train, "Orthogonal", "single")
    assert difference(found, exact) > 1e-3
    calm = "diloco:every=4,lr=0.7,momentum=0.5"  # so 1.4 times the mean, in the long run
    apart, _ = weights(train, "Orthogonal", calm, ranks=3, steps=240)
    whole, _ = weights(train, "Orthogonal", "single", steps=240)
    assert apart.summary["train_loss"] < 0.3 * first.summary["train_loss"]
    assert apart.summary["train_loss"] < 1.5 * whole.summary["train_loss"]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("inner", ["ddp", "fsdp", "zero1", "zero2(reduce=tree)", "tensor"])
def test_a_learner_of_two_ranks_is_one_learner(inner: str, train: Train) -> None:
    """Four ranks in two learners are two learners, by whatever strategy they train."""
    task, how = contract_tasks.Plain(), {"every": 4, "outer": nesterov(0.7, 0.9)}
    wanted = simulate(task, 2, STEPS, **how)
    strategy = f"diloco:every=4,learners=2,inner={inner}"
    _, found = weights(train, "Plain", strategy, ranks=4)
    assert difference(found, wanted) < 1e-10


GO_ON = [
    ("diloco:every=4,fragments=2,overlap=1,mix=0.5", 2, "Images"),
    ("local-sgd:every=4,after=2", 3, "Images"),
    ("diloco:every=4,fragments=2,overlap=1,bits=4", 2, "Images"),
    ("sparse-loco:every=2,keep=2,chunk=64", 2, "Images"),
    ("slowmo:every=2", 2, "Uneven"),
    ("block-momentum:every=5", 2, "Sentences"),
    ("diloco:every=2,learners=2,inner=fsdp", 4, "Sentences"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks", "task"), GO_ON)
def test_a_state_between_two_meetings_can_be_taken_up_again(
    strategy: str, ranks: int, task: str, on_ranks: Callable[..., Any]
) -> None:
    argument = {"task": task, "job": {"strategy": strategy}, "steps": 3}
    on_ranks(ranks, "contract_workers:go_on_from_a_state", argument)


@pytest.mark.slow
def test_streams_of_unequal_lengths_end_together(train: Train) -> None:
    """Shard k has 10 + 3k samples: learners run dry at different steps, and wait for each other."""
    result, found = weights(train, "Uneven", "local-sgd:every=3", ranks=3, steps=None)
    alone, _ = weights(train, "Uneven", "single", steps=None)
    assert result.summary["steps"] == alone.summary["steps"]
    assert all(tensor.isfinite().all() for tensor in found.values())


@pytest.mark.slow
def test_a_kill_between_meetings_changes_nothing(train: Train) -> None:
    strategy = "diloco:every=4,fragments=2,overlap=1"
    _, wanted = weights(train, "Images", strategy, ranks=2)
    flags = {"checkpoint_every": 3, "max_restarts": 1, "inject": "kill@rank=1,step=9"}
    result, found = weights(train, "Images", strategy, ranks=2, **flags)
    assert result.summary["restarts"] == 1
    assert difference(found, wanted) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("inner", "ranks"), [("", 2), (",learners=2,inner=fsdp", 4)])
def test_what_one_learner_alone_has_updated_is_saved_and_restored(
    inner: str, ranks: int, train: Train
) -> None:
    """A sample that one learner has seen uses a layer; the other has no optimizer state for it."""
    strategy = f"diloco:every=8{inner}"
    _, wanted = weights(train, "Experts", strategy, ranks=ranks, steps=8)
    flags = {"checkpoint_every": 4, "max_restarts": 1, "inject": "kill@rank=1,step=6"}
    result, found = weights(train, "Experts", strategy, ranks=ranks, steps=8, **flags)
    assert result.summary["restarts"] == 1
    assert difference(found, wanted) == 0


@pytest.mark.slow
def test_learners_of_two_ranks_resume(train: Train) -> None:
    """The ranks of the second learner, 2 and 3, find their parts of the weights, too."""
    strategy = "local-sgd:every=2,learners=2,inner=tensor"
    first, wanted = weights(train, "Sentences", strategy, ranks=4, steps=4, checkpoint_every=2)
    half = next(first.run_dir.glob("checkpoints/step-*2"))
    _, found = weights(train, "Sentences", strategy, ranks=4, steps=4, resume=str(half))
    assert difference(found, wanted) == 0


@pytest.mark.slow
def test_a_training_goes_on_with_other_learners(train: Train, tmp_path: Path) -> None:
    """From its last meeting, under `ddp` or with more learners; and back."""
    first, _ = weights(train, "Images", "diloco:every=4", ranks=2, steps=8, checkpoint_every=8)
    for strategy, ranks in (("ddp", 2), ("diloco:every=4", 3), ("slowmo:every=2", 2)):
        flags = {"ranks": ranks, "steps": 12, "resume": str(first.run_dir)}
        result, _ = weights(train, "Images", strategy, **flags)
        assert result.summary["resumed_from_step"] == 8


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("local-sgd:learners=2", 4),
        ("local-sgd:learners=3,inner=ddp", 4),
        ("local-sgd:every=6,near=4", 4),
        ("diloco:every=4,fragments=5", 2),
        ("diloco:every=4,overlap=4", 2),
        ("local-sgd:near=4,group=3", 4),
    ],
)
def test_what_does_not_fit_is_refused(strategy: str, ranks: int) -> None:
    with pytest.raises(RequestError):
        _ = resolved_strategy(strategy, ranks=ranks, bitwise=False).mesh


def test_nodes_say_what_was_left_open() -> None:
    def resolved(text: str) -> str:
        return str(resolved_strategy(text, ranks=8, bitwise=False, per_node=4))

    assert resolved("diloco:inner=ddp") == "diloco:inner=ddp,learners=2"
    assert resolved("local-sgd:near=4") == "local-sgd:near=4,group=4"
    assert resolved("local-sgd:near=4,learners=4,inner=ddp").endswith("inner=ddp,group=2")
