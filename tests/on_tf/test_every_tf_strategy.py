"""Every strategy of the TensorFlow engine against `single`: the contract of its card.

In float64, with an uneven last batch that leaves some replicas without a sample: weights, the loss
of every step and the evaluation are equal up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from allranks.catalog import STRATEGIES, TENSORFLOW
from allranks.errors import RequestError
from allranks.launcher.start import Result
from allranks.strategies.card import Exact
from allranks.strategies.cards import CARDS
from conftest import Train
from tf_runs import difference, events, rows, weights

pytestmark = pytest.mark.slow

TOLERANCE = 1e-10
STEPS = 15  # three epochs
JOINED: list[dict[str, Any]] = [
    {"strategy": "mirrored:replicas=2"},
    {"strategy": "mirrored:replicas=3"},
    {"strategy": "central-storage:replicas=3"},
    {"strategy": "multi-worker-mirrored", "ranks": 2},
    {"strategy": "multi-worker-mirrored:collective=ring", "ranks": 3},
]
Alone = Callable[..., Result]


@pytest.fixture(scope="module")
def known() -> dict[Any, Result]:
    return {}


@pytest.fixture
def alone(train_tf: Train, known: dict[Any, Result]) -> Alone:
    """A training in one process, run once for all tests of this file."""

    def run(program: str, *settings: str, **flags: Any) -> Result:
        key = (program, settings, tuple(flags.items()))
        if key not in known:
            known[key] = train_tf(program, *settings, strategy="single", **flags)
        return known[key]

    return run


def assert_equal(found: Result, wanted: Result) -> None:
    assert difference(found, wanted) <= TOLERANCE
    ours, theirs = rows(found), rows(wanted)
    assert len(ours) == len(theirs) == STEPS
    for one, other in zip(ours, theirs, strict=True):
        assert one["samples"] == other["samples"]
        for name in ("loss", "grad_norm", "learning_rate"):
            assert one[name] == pytest.approx(other[name], rel=TOLERANCE, abs=TOLERANCE)
    assert found.summary["train_loss"] == pytest.approx(wanted.summary["train_loss"], rel=1e-10)
    assert found.summary["eval"] == pytest.approx(wanted.summary["eval"], rel=TOLERANCE)


def test_every_strategy_of_the_engine_has_a_card_and_a_class() -> None:
    names = {name for name, card in CARDS.items() if "tensorflow" in card.engines}
    assert names == set(STRATEGIES[TENSORFLOW])
    exact = {parse for parse in names if isinstance(CARDS[parse].guarantee, Exact)}
    tried = {str(flags["strategy"]).partition(":")[0] for flags in JOINED}
    assert exact - {"tpu"} == tried | {"single"}


@pytest.mark.slow(most=3)
@pytest.mark.thinned(1, ("flags", JOINED), ("task", ["Dense", "Convolutions"]))
def test_equal_to_one_process(
    task: str, flags: dict[str, Any], alone: Alone, train_tf: Train
) -> None:
    job: dict[str, Any] = {"steps": STEPS, "precision": "fp64"}
    wanted = alone(f"tf_tasks:{task}", **job)
    found = train_tf(f"tf_tasks:{task}", **job, **flags)
    assert_equal(found, wanted)
    assert found.summary["strategy"].startswith(flags["strategy"].partition(":")[0])


@pytest.mark.slow(most=2)
@pytest.mark.parametrize(
    "flags",
    [
        {"micro_batch": 4, "strategy": "mirrored:replicas=2"},
        {"steps_per_call": 4, "strategy": "mirrored:replicas=2"},
        {"steps_per_call": 3, "strategy": "multi-worker-mirrored", "ranks": 2},
    ],
    ids=lambda f: "-".join(map(str, f.values())),
)
def test_how_a_step_is_carried_out_changes_nothing(
    flags: dict[str, Any], alone: Alone, train_tf: Train
) -> None:
    """Adam and clipping, so that the second step depends on all of the first."""
    job: dict[str, Any] = {"steps": STEPS, "precision": "fp64"}
    settings = ("optimizer_name=Adam", "lr=0.01", "clip_norm=0.5")
    wanted = alone("tf_tasks:Dense", *settings, **job)
    assert_equal(train_tf("tf_tasks:Dense", *settings, **job, **flags), wanted)


@pytest.mark.slow(most=2)
@pytest.mark.parametrize(
    ("program", "ranks"),
    [("tf_tasks:Augmented", 2), ("tf_datasets:Batched", 2), ("tf_datasets:OneByOne", 2)],
)
def test_data_of_every_kind_is_the_same_on_all_ranks(
    program: str, ranks: int, alone: Alone, train_tf: Train
) -> None:
    job: dict[str, Any] = {"steps": STEPS, "precision": "fp64"}
    wanted = alone(program, **job)
    assert_equal(train_tf(program, **job, ranks=ranks, loader_workers=2, prefetch=5), wanted)
    assert len({row["loss"] for row in rows(wanted)[::5]}) == STEPS // 5, (
        "the order is new in each epoch"
    )


def test_a_dataset_is_read_in_the_order_of_its_seed(alone: Alone, train_tf: Train) -> None:
    job: dict[str, Any] = {"steps": 10, "precision": "fp64"}
    one = train_tf("tf_datasets:Batched", **job, strategy="single")
    again = train_tf("tf_datasets:OneByOne", **job, strategy="single", seed=1)
    wanted = alone("tf_datasets:Batched", steps=STEPS, precision="fp64")
    first, second, other = ([row["loss"] for row in rows(run)[:5]] for run in (one, wanted, again))
    assert first == pytest.approx(second, rel=TOLERANCE)
    assert other[0] != pytest.approx(first[0], rel=TOLERANCE)


def test_sixteen_bits_keep_weights_in_32(train_tf: Train) -> None:
    """A scale that is too large skips steps, on all replicas alike, until it fits."""
    scale = {"loss_scale": "dynamic:initial=1e12,every=2000"}
    for precision, more in (("bf16", {}), ("fp16", scale)):
        result = train_tf(
            "tf_tasks:Convolutions",
            precision=precision,
            strategy="mirrored:replicas=2",
            steps=40,
            **more,
        )
        assert {str(value.dtype) for value in weights(result).values()} == {"float32"}
        assert result.summary["train_loss"] < rows(result)[0]["loss"]
    scales = [row["loss_scale"] for row in rows(result)]
    assert scales[0] == 1e12
    assert scales[-1] < 1e12, "it was too large"
    assert 0 < result.summary["steps"] < 40, "some steps were skipped, others made"


@pytest.mark.parametrize(
    ("program", "flags", "words"),
    [
        ("tf_tasks:Dense", {"strategy": "tpu"}, "no TPU"),
        ("tf_tasks:Dense", {"bitwise": True}, "no fixed order of sums"),
        ("tf_tasks:Dense", {"strategy": "ddp"}, "'ddp' is a strategy of torch"),
        ("tf_tasks:Dense", {"compile": "inductor"}, "graphs of TensorFlow already"),
        ("tf_tasks:Dense", {"steps_per_call": 2, "on_bad_step": "skip"}, "decided by Python"),
        ("tf_tasks:Poisoned", {"steps": 1}, "activity regularizer"),
        ("tf_tasks:Mean", {"steps": 1}, "it takes no mean"),
        ("tf_tasks:Weightless", {"steps": 1}, "its global batch add up to 0.0"),
    ],
)
def test_what_cannot_be_is_refused(
    program: str, flags: dict[str, Any], words: str, train_tf: Train, tmp_path: Any
) -> None:
    with pytest.raises(RequestError, match=words):
        train_tf(program, **flags)
    assert not list(tmp_path.glob("run-*"))


def test_no_average_is_kept(train_tf: Train) -> None:
    with pytest.raises(RequestError, match="this engine keeps none"):
        train_tf("tf_tasks:Dense", "ema=0.9")
    with pytest.raises(RequestError, match="use_ema=True"):
        train_tf("tf_tasks:Averaged", steps=1)


@pytest.mark.parametrize("strategy", ["mirrored:replicas=2", "multi-worker-mirrored"])
def test_groups_of_steps_are_the_same_on_all_ranks(strategy: str, train_tf: Train) -> None:
    """The last batch has fewer samples on one replica only: 116 samples by 24, 20 in the last."""
    ranks = 1 if strategy.startswith("mirrored") else 2
    flags: dict[str, Any] = {"strategy": strategy, "ranks": ranks, "precision": "fp64"}
    one = train_tf("tf_tasks:Dense", "samples=116", "epochs=2", **flags)
    three = train_tf("tf_tasks:Dense", "samples=116", "epochs=2", **flags, steps_per_call=3)
    assert difference(one, three) <= TOLERANCE
    assert [row["samples"] for row in rows(three)] == [24, 24, 24, 24, 20] * 2


def test_what_the_loss_does_not_reach_stays_as_it_is(train_tf: Train) -> None:
    """AdamW would shrink it; also in a batch of which one replica has nothing."""
    flags: dict[str, Any] = {"precision": "fp64", "steps": 10}
    alone = train_tf("tf_tasks:Unreached", strategy="single", **flags)
    mirrored = train_tf("tf_tasks:Unreached", strategy="mirrored:replicas=3", **flags)
    assert difference(mirrored, alone) <= TOLERANCE


def test_every_epoch_of_a_dataset_is_evaluated(train_tf: Train) -> None:
    """Nobody knows its length before; the end of an early stop is the same with several steps."""
    flags: dict[str, Any] = {"eval_every": "epoch", "strategy": "single"}
    result = train_tf("tf_datasets:Filtered", "epochs=3", **flags)
    assert [event["step"] for event in events(result, "evaluated")] == [4, 8, 12]
    judged = {"early_stop": "max:accuracy", "patience": 1}
    ends = [
        train_tf("tf_tasks:Dense", "lr=1e-12", **flags, **judged, steps_per_call=n).summary["steps"]
        for n in (1, 3)
    ]
    assert ends == [10, 10]


@pytest.mark.parametrize(
    ("program", "flags", "words"),
    [
        ("tf_datasets:Small", {}, "a batch of 8 samples in the midst of an epoch"),
        ("tf_datasets:Nothing", {}, "there is nothing to learn from"),
        ("tf_tasks:Noisy", {"strategy": "central-storage:replicas=2"}, "draws random numbers"),
        ("tf_tasks:Columns", {}, "a list of 2 arrays"),
        ("tf_tasks:Dense", {"steps_per_call": 2, "spike": 3.0}, "--spike"),
    ],
)
def test_what_would_be_wrong_in_silence(
    program: str, flags: dict[str, Any], words: str, train_tf: Train
) -> None:
    with pytest.raises(RequestError, match=words):
        train_tf(program, **{"strategy": "single", "steps": 3, **flags})
