"""BatchNorm over the whole global batch: equal to a plain loop, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import kinds_tasks
import plain_tasks
from allranks.errors import RequestError
from conftest import Train

STEPS = 9  # an epoch has 7: its last batch is of 5 samples, on 8 shards
WHOLE = "batchnorm=whole"


@pytest.fixture(scope="module")
def plain() -> dict[str, torch.Tensor]:
    """The weights of a loop of torch alone: the whole batch, plain layers."""
    return plain_tasks.plain(kinds_tasks.Normalised(), STEPS)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("ranks", "strategy"), [(1, "single"), (2, "ddp"), (3, "ddp-plain"), (4, "ddp")]
)
def test_the_whole_batch_is_normalised_as_in_a_plain_loop(
    ranks: int, strategy: str, plain: dict[str, torch.Tensor], train: Train
) -> None:
    result = train(
        "kinds_tasks:Normalised",
        WHOLE,
        precision="fp64",
        steps=STEPS,
        ranks=ranks,
        strategy=strategy,
    )
    found = load_file(result.run_dir / "weights.safetensors")
    for name, tensor in plain.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12, msg=name)
    sent = result.summary["sent_bytes"]["batchnorm"]
    gathered, summed = (ranks - 1) * (11 + 15) * 8, 2 * (ranks - 1) / ranks * (10 + 14) * 8
    assert sent == pytest.approx(STEPS * (gathered + summed), abs=1)


def test_a_batch_of_one_sample_goes_through_beside_ranks_that_have_none(train: Train) -> None:
    """It has no variance of its own, and so no sum in backward, for which the others would wait."""
    found = [
        train(
            "kinds_tasks:Normalised",
            *(WHOLE, "batch_size=20"),
            precision="fp64",
            steps=8,
            ranks=ranks,
            strategy=strategy,
            hang_timeout=20.0,
        )
        for ranks, strategy in ((2, "ddp"), (1, "single"))
    ]
    ours, wanted = (load_file(one.run_dir / "weights.safetensors") for one in found)
    for name, tensor in wanted.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"bitwise": True}, "every shard goes through the model by itself"),
        ({"strategy": "dp:replicas=2"}, "normalise what they have"),
        ({"micro_batch": 4}, "16 samples on a rank"),
        ({"activation_checkpointing": True}, "send their statistics again"),
    ],
)
def test_where_the_batch_does_not_go_through_at_once_it_is_refused(
    flags: dict[str, Any], match: str, train: Train
) -> None:
    with pytest.raises(RequestError, match=match):
        train("kinds_tasks:Normalised", WHOLE, steps=2, **flags)


def test_a_bad_step_is_searched_on_every_rank_alone(train: Train) -> None:
    """Only one rank goes through its samples twice: the others would wait for its statistics."""
    result = train(
        "kinds_tasks:Normalised",
        WHOLE,
        ranks=2,
        steps=4,
        inject="nan@rank=1,step=2",
        on_bad_step="skip",
    )
    assert result.summary["steps"] == 3
