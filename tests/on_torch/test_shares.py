"""Unequal shares of a batch: who computes which shards changes no result, and speed decides."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import share_workers
from allranks.errors import RequestError
from allranks.job.config import resolve
from allranks.job.run_folder import read_events
from allranks.launcher import heartbeat
from allranks.launcher.heartbeat import Heartbeat
from allranks.strategies.cards import CARDS
from allranks.strategies.shards import Shares, even_sizes
from allranks.strategies.shares import LEAST_GAIN, Dealing, shares_for
from allranks.torch.step.tally import Stopwatch
from conftest import Train

STEPS = 6  # the fifth batch has 5 samples, on 5 of 8 shards
WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)

# --- dealing -------------------------------------------------------------------------------------


def test_weights_are_met_to_a_shard() -> None:
    assert Shares.by_weights(8, (5, 2, 1)).counts == (5, 2, 1)
    assert Shares.by_weights(64, (5, 2, 1)).counts == (40, 16, 8)
    assert Shares.by_weights(8, (1, 1, 1)).counts == even_sizes(8, 3)
    assert Shares.by_weights(3, (100, 1, 1)).counts == (1, 1, 1), "none is without a shard"
    assert [*Shares((5, 2, 1)).runs] == [range(5), range(5, 7), range(7, 8)]


@given(shards=st.integers(1, 40), weights=WEIGHTS)
def test_shares_cover_all_shards(shards: int, weights: list[float]) -> None:
    for shares in (Shares.by_weights(shards, weights), Shares.by_speed(shards, weights)):
        assert shares.shards == shards and shares.ranks == len(weights)
        assert min(shares.counts) >= (shards >= len(weights))
        assert [k for run in shares.runs for k in run] == list(range(shards))


@given(shards=st.integers(3, 9), each=st.lists(st.floats(0.1, 10), min_size=3, max_size=3))
def test_no_other_shares_are_faster(shards: int, each: list[float]) -> None:
    ways = itertools.product(range(1, shards + 1), repeat=3)
    best = min(Shares(way).seconds(each) for way in ways if sum(way) == shards)
    assert Shares.by_speed(shards, each).seconds(each) == best


def steps_until_settled(costs: Callable[[int], list[tuple[float, float]]], dealing: Dealing) -> int:
    """The last of 100 steps that changed the shares; a rank takes constant + each x shards."""
    settled = 0
    for step in range(1, 101):
        pairs = zip(costs(step), dealing.shares.counts, strict=True)
        if dealing.after_step(tuple(constant + each * n for (constant, each), n in pairs)):
            settled = step
    return settled


COST = st.tuples(st.floats(0, 0.5), st.floats(0.1, 1))


@given(costs=st.lists(COST, min_size=2, max_size=4), shards=st.sampled_from([8, 16, 64]))
def test_dealing_settles_and_never_makes_the_slowest_rank_slower(
    costs: list[tuple[float, float]], shards: int
) -> None:
    slowest = [float("inf")]

    def at(step: int) -> list[tuple[float, float]]:
        now = max(c + e * n for (c, e), n in zip(costs, dealing.shares.counts, strict=True))
        assert now <= slowest[-1] * (1 + 1e-9)
        slowest.append(now)
        return costs

    dealing = Dealing(Shares.even(shards, len(costs)))
    assert steps_until_settled(at, dealing) <= 50


def test_shares_follow_a_rank_that_becomes_slow() -> None:
    dealing = Dealing(Shares.even(64, 4))
    fast, slow = [(0.01, 1.0)] * 4, [(0.01, 1.0)] * 3 + [(0.01, 4.0)]
    assert 30 < steps_until_settled(lambda step: fast if step <= 30 else slow, dealing) <= 50
    assert dealing.shares.counts == (20, 20, 19, 5)


def test_small_gains_and_single_late_steps_change_nothing() -> None:
    dealing = Dealing(Shares.even(64, 2))
    for step in range(40):
        late = 100.0 if step % 5 == 2 else 0.0
        assert dealing.after_step((1.0 + late, 1.0 + 1.5 * LEAST_GAIN)) is None, "33 and 31"


def test_noise_deals_nothing() -> None:
    """Ranks that differ by a tenth from step to step, and are as fast as each other."""
    draws, dealing = random.Random(1), Dealing(Shares.even(64, 4))
    for _ in range(500):
        assert dealing.after_step(tuple(draws.lognormvariate(0, 0.1) for _ in range(4))) is None


# --- the same result -----------------------------------------------------------------------------

BITWISE = [
    ("ddp", 2, "5,3"),
    ("ddp", 3, "5,2,1"),
    ("ddp", 4, "1,1,5,1"),
    ("zero1", 2, "3,5"),
    ("zero2", 3, "1,6,1"),
    ("fsdp", 2, "5,3"),
    ("hsdp:shard=2", 4, "5,1,1,1"),
    ("mesh:data=2,pipeline=2", 4, "5,3"),
]


@pytest.fixture(scope="module")
def alone() -> dict[Any, Any]:
    """Digests and weights of one process, by what was trained."""
    return {}


@pytest.mark.slow(but=2, most=6)
@pytest.mark.parametrize(("strategy", "ranks", "share"), BITWISE)
def test_unequal_shares_end_with_the_bits_of_one_process(
    strategy: str, ranks: int, share: str, train: Train, alone: dict[Any, Any]
) -> None:
    task = "contract_tasks:Images" if "mesh" not in strategy else "pipeline_tasks:Images"
    flags: dict[str, Any] = {"bitwise": True, "steps": STEPS, "first_check": "off"}
    if task not in alone:
        alone[task] = train(task, **flags).summary
    found = train(task, ranks=ranks, strategy=strategy, share=share, **flags).summary
    assert found["shares"] == [int(n) for n in share.split(",")] and alone[task]["shares"] is None
    assert found["weights_sha256"] == alone[task]["weights_sha256"]
    sent, card = found["sent_bytes"]["gradients"] / STEPS, found["card_bytes_per_step"]
    is_busiest = share.startswith("5") and "mesh" not in strategy  # rank 0, whose bytes these are
    assert sent == card if is_busiest else sent <= card


@pytest.mark.slow
def test_sums_of_unequal_shares_go_through_sockets_too(train: Train) -> None:
    """Where ranks share no memory, even shares are summed in pairs, and these by all-to-all."""
    flags: dict[str, Any] = {"bitwise": True, "steps": 3}
    wanted = train("contract_tasks:Plain", **flags).summary["weights_sha256"]
    flags |= {"backend": "gloo", "strategy": "ddp", "ranks": 2}
    found = train("contract_tasks:Plain", share="5,3", **flags).summary
    assert found["weights_sha256"] == wanted
    assert found["sent_bytes"]["gradients"] / 3 == found["card_bytes_per_step"]


EXACT = [
    ("ddp", 2, "5,3"),
    ("ddp:reduce=ring", 3, "5,2,1"),
    ("ddp-plain", 2, "2,6"),
    ("zero1", 2, "5,3"),
    ("zero2", 2, "7,1"),
    ("fsdp", 2, "5,3"),
    ("hsdp:shard=2", 4, "5,1,1,1"),
    ("mesh:data=2,tensor=2", 4, "5,3"),
]


@pytest.mark.slow(but=2, most=6)
@pytest.mark.parametrize("micro_batch", [None, 6])
@pytest.mark.parametrize(("strategy", "ranks", "share"), EXACT)
def test_unequal_shares_change_no_weight(
    strategy: str,
    ranks: int,
    share: str,
    micro_batch: int | None,
    train: Train,
    alone: dict[Any, Any],
) -> None:
    task = "contract_tasks:Images" if "mesh" not in strategy else "mesh_tasks:Stack"
    flags: dict[str, Any] = {"precision": "fp64", "steps": STEPS, "first_check": "off"}
    if (task, "fp64") not in alone:
        alone[task, "fp64"] = _weights(train(task, **flags))
    flags |= {"strategy": strategy, "share": share, "micro_batch": micro_batch}
    found = _weights(train(task, ranks=ranks, **flags))
    for name, wanted in alone[task, "fp64"].items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-10, atol=1e-10)


def _weights(result: Any) -> dict[str, torch.Tensor]:
    return load_file(Path(result.summary["run_dir"], "weights.safetensors"))


ANEW = [
    ("images", "ddp", 2, 0),
    ("images", "ddp", 3, 1),
    ("images", "zero2", 2, 1),
    ("images", "fsdp", 2, 1),
    ("batch", "ddp", 2, 1),
    ("stream", "ddp", 3, 1),
    ("stateful", "ddp", 2, 1),
    ("loader", "ddp", 2, 1),
    ("buckets", "zero1", 2, 1),
]


@pytest.mark.slow(but=3, most=6)
@pytest.mark.parametrize(("task", "strategy", "ranks", "seed"), ANEW)
def test_shares_that_change_with_every_step_end_with_the_bits_of_one_process(
    task: str, strategy: str, ranks: int, seed: int, on_ranks: Callable[..., Any]
) -> None:
    wanted = share_workers.digest(task, "single")
    argument = {"task": task, "strategy": strategy, "wanted": wanted, "seed": seed}
    on_ranks(ranks, "share_workers:dealt_anew", argument)


# --- by speed ------------------------------------------------------------------------------------


def test_waits_for_others_are_no_work() -> None:
    beat = Heartbeat()
    watch = Stopwatch(beat, 1, torch.device("cpu"))
    beat.enter("data")
    watch.start()
    beat._row[beat_seconds("exchange")] += 100
    beat._row[beat_seconds("compute")] += 3
    beat._row[beat_seconds("data")] += 4
    slots = torch.zeros(2, dtype=torch.bfloat16)
    watch.stop(slots)
    assert slots.tolist() == [0, pytest.approx(7, rel=0.01)]


def beat_seconds(phase: str) -> int:
    return heartbeat._SECONDS + heartbeat._NUMBER[phase]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("task", ["contract_tasks:Images", "contract_tasks:Uneven"])
def test_a_slow_rank_gets_fewer_shards_and_the_bits_are_those_of_one_process(
    task: str, train: Train, alone: dict[Any, Any]
) -> None:
    flags: dict[str, Any] = {"bitwise": True, "steps": 10}
    wanted = train(task, **flags).summary["weights_sha256"]
    flags |= {"inject": "slow@rank=1,per_sample=0.02", "share": "auto", "strategy": "ddp"}
    result = train(task, ranks=2, **flags)
    assert result.summary["weights_sha256"] == wanted
    first, last = result.summary["shares"]
    assert first > last
    events = read_events(Path(result.summary["run_dir"]))
    tables = [event for event in events if event["event"] == "shares"]
    assert tables[0]["step"] == 0 and tables[0]["shares"] == [4, 4]
    assert tables[-1]["step"] >= 4 and tables[-1]["shares"] == [first, last]
    slow, fast = reversed(tables[-1]["seconds_per_shard"])
    assert slow > fast


@pytest.mark.slow
def test_jobs_without_auto_send_what_they_did(train: Train) -> None:
    """One number for each rank is added to the tally, for `auto` alone."""
    flags: dict[str, Any] = {"ranks": 2, "steps": 2, "strategy": "ddp-plain", "precision": "fp64"}
    even, static, by_speed = (
        train("contract_tasks:Plain", share=share, **flags).summary["sent_bytes"]["gradients"]
        for share in ("", "5,3", "auto")
    )
    assert even == static == by_speed - 2 * 2 * 8


# --- errors --------------------------------------------------------------------------------------

REFUSED = [
    ({"share": "5,2,1", "ranks": 2, "strategy": "ddp"}, "3 numbers for 2 ranks"),
    ({"share": "5,0", "ranks": 2, "strategy": "ddp"}, "neither positive numbers"),
    ({"share": "5,-1", "ranks": 2, "strategy": "ddp"}, "neither positive numbers"),
    ({"share": "5,nan", "ranks": 2, "strategy": "ddp"}, "neither positive numbers"),
    ({"share": "5,fast", "ranks": 2, "strategy": "ddp"}, "neither positive numbers"),
    ({"share": "a=5,2", "ranks": 2, "strategy": "ddp"}, "neither positive numbers"),
    ({"share": "a=5,a=2", "ranks": 2, "strategy": "ddp"}, "neither positive numbers"),
    ({"share": "2", "strategy": "single"}, "one rank"),
    ({"share": "2,1", "ranks": 2, "strategy": "ddp", "elastic": "1:3"}, "--share 2,1"),
    ({"share": "auto", "ranks": 2, "strategy": "ddp:reduce=top-k"}, "'ddp'"),
    ({"share": "auto", "ranks": 2, "strategy": "ddp:reduce=bf16"}, "'ddp'"),
    ({"share": "auto", "ranks": 2, "strategy": "ddp:late=1"}, "'ddp'"),
    ({"share": "1,2", "ranks": 2, "strategy": "local-sgd"}, "'local-sgd'"),
    ({"share": "1,2", "ranks": 2, "strategy": "1f1b"}, "'1f1b'"),
    ({"share": "1,2", "ranks": 2, "strategy": "ps"}, "'ps'"),
]


@pytest.mark.parametrize(("flags", "found"), REFUSED)
def test_shares_that_cannot_be_are_refused(flags: dict[str, Any], found: str) -> None:
    with pytest.raises(RequestError) as refused:
        resolve("digits", flags, ())
    assert found in refused.value.found and "--share" in refused.value.asked + found


@pytest.mark.parametrize(("share", "right"), [("5,2", "5,2,1"), ("5,2,1,4", "5,2,1")])
def test_the_numbers_that_were_given_are_in_the_advice(share: str, right: str) -> None:
    with pytest.raises(RequestError) as refused:
        resolve("digits", {"share": share, "ranks": 3, "strategy": "ddp"}, ())
    assert refused.value.do == f"--share {right}, or --share auto"


def test_shares_go_by_the_names_of_hosts_and_devices() -> None:
    names = [["big", "cuda", "NVIDIA H200"], ["small", "cuda", "NVIDIA L4"], ["small", "cpu"]]
    assert shares_for("*H200=5,*L4=2,cpu=1", 8, names).counts == (5, 2, 1)
    assert shares_for("big=2,small=1", 8, names).counts == (4, 2, 2)
    for text, found in (
        ("big=2,small=1,other=5", "no rank on 'other'"),
        ("big=2,cuda=1,small=1", "2 names that fit rank 0 (big, cuda, NVIDIA H200)"),
        ("big=2", "0 names that fit rank 1 (small, cuda, NVIDIA L4)"),
    ):
        with pytest.raises(RequestError) as refused:
            shares_for(text, 8, names)
        assert refused.value.found == found
    with pytest.raises(RequestError, match="shards=3"):
        shares_for("big=2,small=1", 2, names)
    assert shares_for("auto", 2, names).counts == (1, 1, 0), "as without --share"


def test_only_cards_that_say_so_have_unequal_shares() -> None:
    able = [n for n, card in CARDS.items() if not card.even_shares(card.read_options({}))]
    assert able == ["ddp-plain", "ddp", "zero1", "zero2", "fsdp", "hsdp", "mesh"]
