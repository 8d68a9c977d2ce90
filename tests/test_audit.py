"""Audits: every fault in a shard that is computed again is named, and sound runs are not disturbed.

A fault lies in an audited shard where the rank owns it, or computes it again: tests draw as ranks
do, and plant faults there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from allranks.errors import FaultKind, ProgramError, RequestError
from allranks.job.run_folder import read_events
from allranks.launcher.start import Result
from allranks.strategies.audits import (
    AUDIT,
    Draw,
    Findings,
    default_every,
    first_difference,
    judged,
)
from allranks.strategies.shards import Shares, even_sizes
from allranks.training.order import random_key
from conftest import TASKS

FILE = TASKS / "elastic_tasks.py"
PROGRAM = f"{FILE}:Elastic"
STEPS = 24
Train = Callable[..., Result]


def drawn(step: int, ranks: int = 3) -> Draw:
    """What is drawn in a step of the task, whose seed is 0."""
    runs = Shares.even(8, ranks).runs
    draw = Draw.of(random_key(0, step, AUDIT), even_sizes(64, 8), runs)
    assert draw is not None
    return draw


def steps_of(role: str, rank: int, ranks: int = 3) -> list[int]:
    """The steps in which a rank has this role: `owner`, `auditor` or `third`."""
    return [step for step in range(2, STEPS) if getattr(drawn(step, ranks), role) == rank]


def audits(result_or_folder: Any) -> list[dict[str, Any]]:
    return [row for row in read_events(result_or_folder) if row["event"] == "audit"]


def audited(train: Train, inject: str = "", program: str = PROGRAM, **flags: Any) -> Result:
    usual = {"strategy": "ddp", "ranks": 3, "steps": STEPS, "audit_every": 1, "witness": "off"}
    return train(program, **{"audit": "warn", **usual, "inject": inject, **flags})


# --- arithmetic ----------------------------------------------------------------------------------


def notes(loss: str, samples: str = "s", size: float = 1.0) -> dict[str, Any]:
    inputs = {"samples": samples, "random numbers": "r"}
    return {"inputs": inputs, "results": {"the loss": loss}, "sizes": {"the loss": [size, size]}}


def found(rank: int, first: Any, again: Any = None, weight: str = "w") -> Findings:
    weights = {"a": "a", "b": weight}
    return Findings(rank, f"host{rank}", "cpu", first or {}, again or {}, weights)


def test_a_draw_has_three_ranks_and_a_shard_with_samples() -> None:
    owners = set()
    for step in range(200):
        draw = Draw.of(random_key(0, step, AUDIT), (2, 2, 1, 0), Shares.even(4, 3).runs)
        assert draw is not None
        assert draw.shard < 3
        assert draw.shard in Shares.even(4, 3).owned(draw.owner)
        assert {draw.owner, draw.auditor, draw.third} == {0, 1, 2}
        owners.add((draw.owner, draw.auditor))
    assert len(owners) == 4, "shard 3 has no sample, so rank 2 owns none"
    assert Draw.of(5, (2, 2), Shares.even(2, 1).runs) is None
    assert Draw.of(5, (2, 2), Shares.even(2, 2).runs)[3] is None  # type: ignore[index]


def test_the_third_decides_and_two_contradict_themselves() -> None:
    draw = Draw(0, 0, 1, 2)
    right, wrong = notes("right"), notes("wrong")
    verdict = judged(draw, [found(0, wrong), found(1, right), found(2, None, right)])
    assert (verdict.wrong, verdict.differs, verdict.tensor) == (0, "computation", "the loss")
    verdict = judged(draw, [found(0, right), found(1, notes("x", "t")), found(2, None, right)])
    assert (verdict.wrong, verdict.differs) == (1, "samples")
    rows = [found(0, wrong, weight="v"), found(1, right), found(2, None, right)]
    verdict = judged(draw, rows)
    assert (verdict.wrong, verdict.differs, verdict.tensor) == (0, "weights", "b")
    rows = [found(0, wrong), found(1, right), found(2, None, notes("third"))]
    assert judged(draw, rows).wrong is None
    two = Draw(0, 1, 0, None)
    assert judged(two, [found(0, right, right), found(1, wrong, right)]).wrong == 1
    assert judged(two, [found(0, wrong, right), found(1, right, right)]).wrong == 0
    assert judged(two, [found(0, right, right), found(1, wrong, wrong)]).wrong is None


def test_nobody_is_named_where_replicas_hold_a_part_unalike() -> None:
    """Owner and third are of one group, and both compute with the wrong part of rank 0."""
    draw, right, wrong = Draw(0, 1, 2, 0), notes("loss"), notes("off")
    weights = [{"a, part 0 of 2": "off"}, {"a, part 1 of 2": "b"}, {"a, part 0 of 2": "a"}]
    first, again = [{}, wrong, right], [wrong, {}, {}]
    rows = [
        Findings(rank, "host", "cpu", first[rank], again[rank], weights[rank]) for rank in range(3)
    ]
    verdict = judged(draw, rows)
    assert (verdict.wrong, verdict.tensor) == (None, "a, part 0 of 2")
    weights[0]["a, part 0 of 2"] = "a"
    assert judged(draw, rows).wrong == 2


def test_rounding_is_no_difference_where_bits_may_differ() -> None:
    one, other = notes("a", size=1.0), notes("b", size=1.0 + 1e-6)
    assert first_difference(one, other)
    assert not first_difference(one, other, 1e-4)
    assert first_difference(one, notes("b", size=1.1), 1e-4)
    assert first_difference(one, notes("b", size=float("nan")), 1e-4)


def test_a_gradient_that_overflows_on_both_ranks_is_no_difference() -> None:
    """With fp16 the first steps do."""
    whole, large = notes("a"), notes("b")
    for each in (whole, large):
        each["sizes"]["more"] = [math.inf, math.nan]
        each["results"]["more"] = "i"
    assert first_difference(whole, large, 1e-4) == ""
    large["sizes"]["more"] = [1.0, 1.0]
    assert first_difference(whole, large, 1e-4) == "more"


def test_the_default_costs_one_percent() -> None:
    for shards, ranks in ((8, 2), (8, 8), (64, 4), (3, 8)):
        busiest = max(Shares.even(shards, ranks).counts)
        assert 6 / (default_every(shards, ranks) * busiest) <= 0.01


# --- planted faults ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("of", ["gradient", "sample"])
@pytest.mark.parametrize(
    ("strategy", "bitwise"), [("ddp", True), ("ddp", False), ("ddp-plain", False)]
)
def test_each_fault_in_an_audited_shard_is_named(
    train: Train, strategy: str, bitwise: bool, of: str
) -> None:
    planted: dict[int, int] = {}
    for role in ("owner", "auditor"):
        for rank in range(3):
            planted[next(at for at in steps_of(role, rank) if at not in planted)] = rank
    assert len(planted) == 6
    inject = " ".join(f"flip@of={of},rank={rank},step={step}" for step, rank in planted.items())
    missed = steps_of("third", 1)[-1]
    inject += f" flip@of={of},rank=1,step={missed}"  # of no audited shard
    result = audited(train, inject, strategy=strategy, bitwise=bitwise)
    rows = audits(result.run_dir)
    assert {row["step"]: row["wrong"] for row in rows} == planted
    reason = {"gradient": "computation", "sample": "samples"}[of]
    assert {row["differs"] for row in rows} == {reason}
    if of == "gradient":
        assert {row["tensor"] for row in rows} == {"the gradient of '0.0.weight'"}
    assert result.summary["audits"] == {"shards": STEPS, "differed": 6, "every": 1}


@pytest.mark.slow
@pytest.mark.thinned(1, ("strategy", ["zero1", "zero2"]), ("micro_batch", [None, 3]))
def test_faults_are_named_where_gradients_leave_in_parts(
    train: Train, strategy: str, micro_batch: int | None
) -> None:
    planted = {steps_of("owner", 0)[-1]: 0, steps_of("auditor", 2)[-1]: 2}
    inject = " ".join(f"flip@of=gradient,rank={r},step={step}" for step, r in planted.items())
    program = PROGRAM if micro_batch is None else f"{FILE}:Plain"
    flags = {"strategy": strategy, "micro_batch": micro_batch}
    rows = audits(audited(train, inject, program, **flags).run_dir)
    assert {row["step"]: row["wrong"] for row in rows} == planted


@pytest.mark.slow
@pytest.mark.cases(
    ("strategy", "ranks", "bitwise"),
    [("fsdp", 3, True), ("hsdp:shard=2", 4, False)],
    exhaustive=[("fsdp", 2, True), ("fsdp", 3, False)],
)
def test_faults_are_named_where_passes_gather_weights(
    train: Train, strategy: str, ranks: int, bitwise: bool
) -> None:
    """All ranks make the passes of an audit together, and none of them counts."""
    owned, audits_it = steps_of("owner", 0, ranks)[-1], steps_of("auditor", 1, ranks)[-2]
    inject = f"flip@of=gradient,rank=0,step={owned} flip@of=sample,rank=1,step={audits_it}"
    flags: dict[str, Any] = {"strategy": strategy, "ranks": ranks, "bitwise": bitwise}
    result = audited(train, inject, **flags)
    rows = {row["step"]: row for row in audits(result.run_dir)}
    assert {step: row["wrong"] for step, row in rows.items()} == {owned: 0, audits_it: 1}
    assert rows[owned]["tensor"] == "the gradient of '0.0.weight'"
    assert [rows[at]["differs"] for at in (owned, audits_it)] == ["computation", "samples"]
    if bitwise:
        plain = train(PROGRAM, steps=STEPS, inject=inject, witness="off", **flags)
        assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]


@pytest.mark.slow
def test_a_wrong_part_of_a_weight_ends_the_job_whoever_computes_with_it(train: Train) -> None:
    """Rank 2 holds it, and rank 3 computes with it, too: neither the third nor `leave` decides."""
    flags = {"strategy": "hsdp:shard=2", "ranks": 4, "bitwise": True, "elastic": "1:4"}
    with pytest.raises(
        ProgramError, match=r"differ in weights, first in 0\.0\.weight, part 0 of 2"
    ):
        audited(train, "flip@of=weight,rank=2,step=3", audit="leave", **flags)


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(3))
def test_a_wrong_weight_ends_the_job_with_its_name(train: Train, rank: int, tmp_path: Any) -> None:
    step = steps_of("owner", rank)[0]
    of = "moment" if rank == 2 else "weight"
    run = tmp_path / "run"
    with pytest.raises(ProgramError, match=rf"rank {rank} on .*weights are others, first in 0\.0"):
        audited(
            train,
            f"flip@of={of},rank={rank},step={step - (of == 'moment')}",
            audit="stop",
            max_restarts=2,
            run_dir=str(run),
        )
    (row,) = audits(run)
    assert (row["wrong"], row["step"] <= step) == (rank, True)
    kinds = {row["fault_kind"] for row in read_events(run) if row["event"] == "failed"}
    assert kinds == {FaultKind.SILENT_CORRUPTION}
    assert not [row for row in read_events(run) if row["event"] == "restart"]


@pytest.mark.slow
def test_of_two_ranks_the_one_that_contradicts_itself_is_wrong(train: Train) -> None:
    planted = {steps_of("owner", 1, 2)[0]: 1, steps_of("owner", 0, 2)[0]: 0}
    inject = " ".join(f"flip@of=gradient,rank={r},step={step}" for step, r in planted.items())
    rows = audits(audited(train, inject, ranks=2).run_dir)
    assert {row["step"]: row["wrong"] for row in rows} == planted
    step = steps_of("owner", 1, 2)[0]
    with pytest.raises(ProgramError, match="nobody can tell which of them is right"):
        audited(train, f"flip@of=weight,rank=1,step={step}", ranks=2, audit="stop")


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "of"), [("ddp", "weight"), ("fsdp", "gradient")])
def test_the_rank_that_is_wrong_leaves_and_no_bit_of_the_result_changes(
    train: Train, strategy: str, of: str
) -> None:
    step = steps_of("owner", 1)[0]
    flags: dict[str, Any] = {"bitwise": True, "steps": 12}
    alone = train(PROGRAM, strategy="ddp", **flags)
    inject, flags["spare_state"] = f"flip@of={of},rank=1,step={step}", strategy == "fsdp"
    result = audited(train, inject, audit="leave", elastic="1:3", strategy=strategy, **flags)
    assert result.summary["weights_sha256"] == alone.summary["weights_sha256"]
    (row,) = audits(result.run_dir)
    assert (row["wrong"], row["step"], row["does"]) == (1, step, "leave")
    (group,) = [row for row in read_events(result.run_dir) if row["event"] == "group"]
    assert (group["lost"], group["members"]) == ([1], [0, 2])


@pytest.mark.slow
def test_sound_runs_have_no_alarm_and_no_other_bit(train: Train) -> None:
    flags: dict[str, Any] = {"bitwise": True, "steps": 12}
    plain = train(PROGRAM, strategy="zero1", ranks=3, **flags)
    for strategy in ("ddp:bucket_mb=0.001", "zero1", "zero2"):
        result = audited(train, strategy=strategy, **flags)
        assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]
        assert result.summary["audits"] == {"shards": 12, "differed": 0, "every": 1}
    assert plain.summary["audits"] is None
    cut = audited(train, program=f"{FILE}:Plain", micro_batch=3, **flags)
    assert cut.summary["audits"] == {"shards": 12, "differed": 0, "every": 1}


@pytest.mark.slow
def test_ranks_whose_bits_may_differ_compare_up_to_rounding(train: Train) -> None:
    step = steps_of("owner", 1)[0]
    result = audited(train, f"flip@of=sample,rank=1,step={step}", f"{FILE}:Unlike")
    assert [(row["step"], row["wrong"]) for row in audits(result.run_dir)] == [(step, 1)]
    assert any("up to rounding" in note for note in result.summary["model_notes"])


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"audit": "tell"}, "known: leave, stop, warn"),
        ({"audit": ""}, "--audit stop --audit-every 1"),
        ({"ranks": 1}, "one rank"),
        ({"strategy": "fsdp:tensor=3"}, "fsdp:tensor=3"),
        ({"strategy": "tensor"}, "--strategy tensor"),
        ({"strategy": "ddp:late=1"}, "with late=1"),
        ({"strategy": "ddp:reduce=bf16"}, "reduce=bf16 rounds"),
        ({"audit": "leave"}, "no --elastic"),
    ],
)
def test_what_cannot_be_audited_is_refused(train: Train, flags: dict[str, Any], part: str) -> None:
    with pytest.raises(RequestError, match=part):
        audited(train, **flags)


@pytest.mark.parametrize("data", ["whole", "skips"])
def test_data_that_no_other_rank_can_read_is_refused(train: Train, data: str) -> None:
    with pytest.raises(RequestError, match="another rank reads the samples of a shard again"):
        train(f"{FILE}:Read", f"data={data}", strategy="ddp", ranks=2, audit="stop", steps=2)
