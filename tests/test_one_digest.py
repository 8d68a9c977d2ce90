"""One digest for everything exact: whoever holds which part, and whoever goes on from whom."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import Train

TASK = "contract_tasks:Images"
STEPS = 10
ON_RANKS = [
    *(("ddp", 2), ("ddp", 3), ("zero1", 3), ("zero2", 4), ("fsdp", 2), ("fsdp", 3)),
    *(("hsdp:shard=2", 4), ("gpipe", 2), ("1f1b", 3), ("interleaved:chunks=2", 2)),
    *(("model-parallel", 1), ("zero1", 8), ("fsdp", 8), ("zero-bubble", 4)),
    *(("mesh:data=2,pipeline=2", 4), ("mesh:data=3,pipeline=2,schedule=gpipe", 6)),
]


@pytest.fixture(scope="module")
def digests() -> dict[str, str]:
    """That of one process, once for all tests."""
    return {}


def alone(train: Train, digests: dict[str, str]) -> str:
    if not digests:
        run = train(TASK, strategy="single", bitwise=True, steps=STEPS)
        digests["single"] = run.summary["weights_sha256"]
    return digests["single"]


@pytest.mark.slow(but=2, most=7)
@pytest.mark.parametrize(("strategy", "ranks"), ON_RANKS)
def test_every_strategy_has_the_bits_of_one_process(
    strategy: str, ranks: int, train: Train, digests: dict[str, str]
) -> None:
    run = train(TASK, strategy=strategy, ranks=ranks, bitwise=True, steps=STEPS)
    assert run.summary["weights_sha256"] == alone(train, digests)


@pytest.mark.slow
def test_a_training_that_goes_through_strategies_has_them_too(
    train: Train, digests: dict[str, str]
) -> None:
    """Each goes on from a checkpoint of the one before, on other ranks."""
    job: dict[str, Any] = {"bitwise": True, "checkpoint_every": 2}
    mesh = "mesh:data=2,pipeline=2", 4
    parts = ("ddp", 4), ("fsdp", 2), mesh, ("1f1b", 2), ("single", 1)
    for number, (strategy, ranks) in enumerate(parts):
        steps = 2 * (number + 1)
        run = train(TASK, strategy=strategy, ranks=ranks, steps=steps, **job)
        job["resume"] = str(run.run_dir)
    assert run.summary["weights_sha256"] == alone(train, digests)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks", "micro_batch"), [("fsdp", 2, 1), ("fsdp", 2, 8), ("zero1", 1, 1)]
)
def test_rows_that_several_samples_touch_in_passes_have_one_digest(
    strategy: str, ranks: int, micro_batch: int, train: Train
) -> None:
    """Each pass adds one number to a row, whether its gradient comes as rows or dense."""
    how: dict[str, Any] = {"bitwise": True, "micro_batch": micro_batch, "steps": 3}
    found = [
        train("table_tasks:Tables", "shards=2", strategy=name, ranks=on, **how).summary
        for name, on in ((strategy, ranks), ("single", 1))
    ]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
