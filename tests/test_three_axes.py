"""A mesh of data, tensor and pipeline: equal to one process, on any product of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from safetensors.numpy import load_file

from allranks.errors import RequestError
from allranks.strategies.card import Workload
from allranks.strategies.mesh import PIPELINE, TENSOR
from allranks.strategies.resolve import strategy_spec
from conftest import Train
from test_check import Check, check
from test_every_strategy import STEPS, difference

__all__ = ["check"]

ALL = "mesh:data=2,tensor=2,pipeline=2"
MESHES = [
    (ALL, 8),
    ("mesh:tensor=2,pipeline=2", 4),
    ("mesh:data=2,tensor=2", 4),
    ("mesh:tensor=3,pipeline=2,schedule=gpipe", 6),
    ("mesh:data=2,pipeline=3", 6),  # a weight in the first and the last of three stages
]


@pytest.fixture(scope="session")
def alone() -> dict[str, Any]:
    """What `single` made of each task, once for all tests."""
    return {}


def reference(task: str, train: Train, alone: dict[str, Any], *settings: str) -> tuple[Any, Any]:
    key = task, settings
    if key not in alone:
        common: dict[str, Any] = {"strategy": "single", "precision": "fp64", "steps": STEPS}
        result = train(f"mesh_tasks:{task}", *settings, **common)
        names = ("weights", "average") if settings else ("weights",)
        files = [load_file(result.run_dir / f"{name}.safetensors") for name in names]
        alone[key] = result.summary, files[0] if len(files) == 1 else files
    summary, weights = alone[key]
    return summary, weights


def test_ranks_lie_on_one_grid_of_which_the_last_axis_varies_fastest() -> None:
    mesh = strategy_spec("mesh(data=2,tensor=3,pipeline=2)", 12).mesh
    where = [mesh.place(rank) for rank in (1, 3, 6)]
    assert where == [(0, 0, 1), (0, 1, 0), (1, 0, 0)]
    assert mesh.group(4, PIPELINE) == (4, 10) and mesh.group(4, TENSOR) == (3, 4, 5)


def test_golden_bytes_of_the_busiest_rank() -> None:
    """100 cross, 40 are summed and 20 gathered on 2, 60 of gradients on 2, and a tally of 8."""
    spec = strategy_spec(ALL, 8)
    quiet, busiest = (10, 40, 20, 60, 0), (100, 40, 20, 60, 5)
    work = Workload((*quiet * 7, *busiest, 8, 8), 8, 8)
    sent = 100 + (40 + 20 / 2) + 60 + 5 + 14
    assert spec.card.bytes_sent(work, spec.options) == sent


@pytest.mark.parametrize(
    ("strategy", "ranks", "do"),
    [
        (ALL, 6, "--ranks 8"),
        ("mesh:tensor=2,pipeline=2", 8, "--ranks 4, or data=2"),
        ("mesh", 2, "--ranks 1, or data=2"),
    ],
)
def test_factors_that_do_not_fit_are_refused_with_the_number_to_set(
    strategy: str, ranks: int, do: str
) -> None:
    with pytest.raises(RequestError) as refused:
        strategy_spec(strategy, ranks).mesh  # noqa: B018  raises
    assert refused.value.do == do


@pytest.mark.slow(most=2)
@pytest.mark.thinned(1, ("task", ["Stack", "Planned", "Letters"]), ("strategy,ranks", MESHES))
def test_equal_to_one_process(
    task: str, strategy: str, ranks: int, train: Train, alone: dict[str, Any]
) -> None:
    wanted, weights = reference(task, train, alone)
    common: dict[str, Any] = {"precision": "fp64", "steps": STEPS}
    result = train(f"mesh_tasks:{task}", strategy=strategy, ranks=ranks, **common)
    found = result.summary
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10
    assert found["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-10)
    assert found["eval"] == pytest.approx(wanted["eval"], rel=1e-10)


@pytest.mark.slow(most=2)
@pytest.mark.parametrize(
    ("task", "strategy", "ranks"),
    [
        ("Stack", ALL, 8),
        ("Letters", "mesh:tensor=2,pipeline=2", 4),
        ("Stack", "mesh:data=3,pipeline=2,schedule=gpipe", 6),  # two have fewer micro-batches
        ("Stack", "mesh:data=3,pipeline=2,reduce=tree", 6),
    ],
)
def test_the_busiest_rank_sends_what_the_card_says_and_each_holds_its_part(
    task: str, strategy: str, ranks: int, on_ranks: Callable[..., Any]
) -> None:
    job = {"strategy": strategy, "steps": 6}
    on_ranks(ranks, "mesh_tasks:bytes_and_memory", {"task": task, "job": job})


@pytest.mark.slow
@pytest.mark.cases("task", ["Letters"], exhaustive=["Stack"])
def test_checkpoints_cross_over(task: str, train: Train, alone: dict[str, Any]) -> None:
    """Whole, cut and staged, cut, staged, and on one process: 10 steps of one, and its average."""
    _, (weights, average) = reference(task, train, alone, "ema=0.9")
    resume: dict[str, Any] = {}
    for strategy, ranks, steps in (
        ("ddp", 2, 2),
        (ALL, 8, 4),
        ("tensor", 2, 6),
        ("mesh:data=2,pipeline=2", 4, 9),
        ("single", 1, STEPS),
    ):
        common: dict[str, Any] = {"precision": "fp64", "checkpoint_every": 1}
        result = train(
            f"mesh_tasks:{task}",
            "ema=0.9",
            strategy=strategy,
            ranks=ranks,
            steps=steps,
            **common,
            **resume,
        )
        resume = {"resume": str(result.run_dir)}
    assert result.summary["resumed_from_step"] == 9
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10
    assert difference(load_file(result.run_dir / "average.safetensors"), average) < 1e-10


@pytest.mark.slow
def test_a_checkpoint_keeps_the_bits_of_weights_and_optimizer(train: Train) -> None:
    """What one process saved is what comes out again of a mesh of cut stages, without a step."""
    program, common = "mesh_tasks:Letters", {"precision": "fp64", "checkpoint_every": 3}
    one = train(program, strategy="single", steps=3, **common)
    mesh = "mesh:tensor=2,pipeline=2"
    four = train(program, strategy=mesh, ranks=4, steps=3, resume=str(one.run_dir), **common)
    assert four.summary["weights_sha256"] == one.summary["weights_sha256"]
    both = [
        train(program, strategy="single", ranks=1, steps=4, resume=str(run.run_dir), **common)
        for run in (one, four)
    ]
    assert both[0].summary["weights_sha256"] == both[1].summary["weights_sha256"]


@pytest.mark.slow
@pytest.mark.cases(("strategy", "ranks"), [("mesh:tensor=2,pipeline=2", 4)], exhaustive=[(ALL, 8)])
def test_check_calls_it_equal(strategy: str, ranks: int, check: Check) -> None:
    verdict = check("mesh_tasks:Letters", strategy=strategy, ranks=ranks, steps=2)
    assert verdict.equal, str(verdict)


@pytest.mark.slow(most=1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_other_precisions_train(precision: str, train: Train) -> None:
    losses = [
        train("mesh_tasks:Stack", strategy=s, ranks=n, precision=precision, steps=6).summary
        for s, n in (("single", 1), ("mesh:tensor=2,pipeline=2", 4))
    ]
    assert losses[1]["train_loss"] == pytest.approx(losses[0]["train_loss"], rel=0.03)


@pytest.mark.slow
def test_micro_batches_and_recomputed_blocks(train: Train, alone: dict[str, Any]) -> None:
    _, weights = reference("Letters", train, alone)
    result = train(
        "mesh_tasks:Letters",
        strategy=ALL,
        ranks=8,
        precision="fp64",
        steps=STEPS,
        micro_batch=2,
        activation_checkpointing=True,
    )
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_job_goes_on(train: Train, alone: dict[str, Any]) -> None:
    _, weights = reference("Stack", train, alone)
    result = train(
        "mesh_tasks:Stack",
        strategy="mesh:tensor=2,pipeline=2",
        ranks=4,
        precision="fp64",
        steps=STEPS,
        checkpoint_every=4,
        max_restarts=1,
        inject="kill@rank=3,step=9",
    )
    assert result.summary["restarts"] == 1
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10


@pytest.mark.slow
def test_replicas_of_cut_stages_are_compared(train: Train) -> None:
    """The same bits on all ranks that hold the same part, after each step."""
    train("mesh_tasks:Stack", strategy=ALL, ranks=8, steps=3, verify_every=1, witness="stop")


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("program", "strategy", "flags", "found"),
    [
        ("mesh_tasks:Stack", "mesh:tensor=2", {"bitwise": True}, "layers cut over 2 ranks"),
        ("mesh_tasks:NoSuchModule", "mesh:tensor=2", {}, "no module has such a name"),
        ("tensor_tasks:WholeTensors", "mesh:tensor=2", {}, "where others have no gradient"),
        ("tensor_tasks:HookedWeight", "mesh:tensor=2", {}, "a hook on the parameter '0.weight'"),
        ("contract_tasks:Pairs", "mesh:data=2", {}, "loss_over"),
        ("contract_tasks:Words", "mesh:pipeline=2", {}, "only an nn.Sequential says by itself"),
        ("mesh_tasks:Stack", "mesh:pipeline=2,schedule=1f1b(chunks=2)", {}, "has no such option"),
    ],
)
def test_what_cannot_be_is_refused(
    program: str, strategy: str, flags: dict[str, Any], found: str, train: Train
) -> None:
    with pytest.raises(RequestError, match=found):
        train(program, strategy=strategy, ranks=2, steps=1, **flags)
