"""Ranks that draw apart, or that leave out a collective: found and named, never passed over."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from allranks.errors import ProgramError, ReplicasDiffer
from allranks.torch.comm.comm import Comm
from allranks.torch.witness.replicas import SIDE_BY_SIDE, compare_replicas, digest
from conftest import Train

OnRanks = Callable[..., Any]


def differ(ranks: int, odd: dict[int, str], on_ranks: OnRanks, words: str | None) -> None:
    argument = {"odd": {str(rank): name for rank, name in odd.items()}, "words": words}
    on_ranks(ranks, "replicas_workers:compare", argument)


def test_equal_replicas_send_32_bytes_to_each_other_rank(on_ranks: OnRanks) -> None:
    differ(3, {}, on_ranks, None)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("ranks", "odd", "words"),
    [
        (4, {2: "b"}, "rank 2 differs from ranks 0, 1, 3; first in b."),
        (3, {0: "c"}, "rank 0 differs from ranks 1, 2; first in c."),
        (4, {1: "c", 3: "a"}, "rank 3 differs from ranks 0, 1, 2; first in a."),
        (2, {1: "b"}, "rank 0 / rank 1 differ from each other, and no majority tells"),
        (4, {1: "b", 2: "b"}, "ranks 0, 3 / ranks 1, 2 differ from each other, and no majority"),
        (3, {0: "+", 1: "+"}, None),
    ],
    ids=str,
)
def test_the_first_tensor_and_the_odd_ranks_are_named(
    ranks: int, odd: dict[int, str], words: str, on_ranks: OnRanks
) -> None:
    """`+` is a name that one rank does not give: it is left out."""
    differ(ranks, odd, on_ranks, words)


def test_one_rank_has_nothing_to_compare() -> None:
    def never() -> Any:
        raise AssertionError
        yield

    compare_replicas(never(), Comm())
    assert ReplicasDiffer.passing
    assert torch.is_grad_enabled()


def errors_of(states: list[dict[str, float]], new: tuple[int, ...]) -> list[str]:
    """What `compare_replicas` raises on each rank, by name; "" if it raises nothing."""
    tensors = [{name: torch.tensor(value) for name, value in s.items()} for s in states]
    wholes = [digest(*state.values()) for state in tensors]
    rows = [{name: digest(t) for name, t in state.items()} for state in tensors]
    errors = []
    for rank, state in enumerate(tensors):
        comm = SimpleNamespace(rank=rank, size=len(states), members=None)
        comm.gather_texts, comm.gather_values = lambda text: wholes, lambda value: rows
        try:
            compare_replicas(state.items(), cast(Any, comm), new=new)
            errors.append("")
        except ProgramError as error:
            errors.append(type(error).__name__)
    return errors


@pytest.mark.parametrize(
    ("states", "new", "errors"),
    [
        ([{"a": 1, "b": 2}] * 3, (2,), ["", "", ""]),
        ([{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 3}], (2,), ["P", "P", "R"]),
        ([{"a": 1, "b": 3}, {"a": 1, "b": 2}, {"a": 1, "b": 2}], (0, 2), ["R", "P", "P"]),
        ([{"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2}], (0,), ["R", "P", "P"]),
        ([{"a": 1}, {"a": 2}, {"a": 2}], (2,), ["R", "R", "R"]),
        ([{"a": 1}, {"a": 2}], (0, 1), ["R", "R"]),
    ],
    ids=["equal", "the last", "the first of two", "without a name", "older ones", "all are new"],
)
def test_a_new_rank_that_differs_is_refused_alone(
    states: list[dict[str, float]], new: tuple[int, ...], errors: list[str]
) -> None:
    """The others lose it (`PeerLost`), and end with it if those before it differ."""
    names = {"P": "PeerLost", "R": "ReplicasDiffer", "": ""}
    assert errors_of(states, new) == [names[error] for error in errors]


@pytest.mark.slow(but=1)
@pytest.mark.thinned(1, ("strategy", ["ddp", "ddp-plain", "ddp:reduce=tree"]), ("ranks", [2, 3]))
def test_a_flipped_bit_is_found_within_the_steps_asked_for(
    ranks: int, strategy: str, train: Train
) -> None:
    """Flipped after step 4; the ranks are compared after steps 2, 5, 8."""
    corrupt = "corrupt@rank=1,step=4,at=stepped"
    with pytest.raises(ProgramError) as raised:
        train(
            "contract_tasks:Images",
            **{"ranks": ranks, "strategy": strategy, "steps": 20},
            **{"inject": corrupt, "verify_every": 3, "max_restarts": 0},
        )
    text = str(raised.value)
    assert "ReplicasDiffer" in text and "first in 0.weight" in text
    who = {2: "rank 0 / rank 1 differ from each other", 3: "rank 1 differs from ranks 0, 2"}
    assert who[ranks] in text
    assert " at step 6: " in text  # progress: six steps are done


def test_without_a_comparison_nobody_would_know(train: Train) -> None:
    job = {"ranks": 2, "steps": 8, "inject": "corrupt@rank=1,step=4,at=stepped"}
    assert train("contract_tasks:Images", **job, witness="off").summary["steps"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 6])
def test_the_first_two_steps_and_the_end_are_compared_by_default(step: int, train: Train) -> None:
    """Flipped after the first step, and just before the end: no weights are written."""
    inject = f"corrupt@rank=1,step={step},at=stepped"
    with pytest.raises(ProgramError, match=r"first in 0\.weight") as raised:
        train("contract_tasks:Images", ranks=3, steps=8, inject=inject)
    assert ("So early it is the task" in str(raised.value)) is (step == 0)
    assert f" at step {2 if step == 0 else 8}: " in str(raised.value)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("task", ["Images", "Words", "Uneven", "Experts", "Pairs"])
def test_ranks_that_agree_are_left_alone(task: str, train: Train) -> None:
    job = {"ranks": 3, "steps": 8, "verify_every": 1}
    assert train(f"contract_tasks:{task}", **job).summary["steps"] == 8


@pytest.mark.slow
def test_buffers_that_follow_the_samples_of_a_rank_are_no_difference(train: Train) -> None:
    job = {"ranks": 3, "steps": 4, "verify_every": 1}
    result = train("guard_tasks:BadImages", "kind=none", **job)
    assert "10.seen" in result.summary["user_buffers"]


def test_ranks_that_train_alone_are_not_compared(train: Train) -> None:
    job = {"ranks": 2, "steps": 4, "verify_every": 1, "strategy": "independent"}
    assert train("contract_tasks:Plain", **job).summary["steps"] == 4


def left_out(step: int, rank: int, train: Train, **job: Any) -> str:
    """What the report of a job says in which one rank leaves out a collective."""
    inject = f"skip-collective@rank={rank},step={step}"
    with pytest.raises(ProgramError) as raised:
        train("contract_tasks:Plain", steps=8, inject=inject, hang_timeout=8.0, **job)
    return str(raised.value)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_collective_left_out_shows_in_the_tally(ranks: int, rank: int, train: Train) -> None:
    """One bucket: the sums of two steps fit into each other, and only their position does not."""
    text = left_out(3, rank, train, ranks=ranks, strategy="ddp")
    assert "the ranks are not at the same step" in text


@pytest.mark.slow(but=1)
@pytest.mark.thinned(
    2, ("ranks", [2, 3]), ("strategy", ["ddp", "ddp-plain"]), ("step", [3, 7]), ("rank", [0, 1])
)
def test_a_collective_left_out_never_ends_well(
    ranks: int, strategy: str, step: int, rank: int, train: Train
) -> None:
    """Also in the last step."""
    text = left_out(step, rank, train, ranks=ranks, strategy=strategy)
    seen = ("not at the same step", "collective mismatch", "has left the group", "no sign of life")
    assert any(words in text for words in seen), text


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.uint8])
def test_one_other_number_is_seen_wherever_it_lies(kind: torch.dtype) -> None:
    """Words of large tensors are added up, and the sums so far: rows that change places show."""
    generator = torch.Generator().manual_seed(0)
    count = 3 * SIDE_BY_SIDE * 8 // kind.itemsize + 5
    first = torch.randint(1, 100, (count,), generator=generator).to(kind)
    assert digest(first) == digest(first.clone())
    for at in (0, 7, count // 2, count - 1):
        other = first.clone()
        other[at] += 1
        assert digest(other) != digest(first), at
    row = SIDE_BY_SIDE * 8 // kind.itemsize
    moved = torch.cat([first[row : 2 * row], first[:row], first[2 * row :]])
    assert digest(moved) != digest(first)
    small, last = first[:9], first.flip(0)
    together = digest(first, small, last)
    assert together == digest(first.clone(), small.clone(), last.clone())
    others = (moved, small, last), (first, small + 1, last), (first, small, moved)
    assert together not in {digest(*other) for other in (*others, (last, small, first))}


@pytest.mark.parametrize("every", [1, 2, 16])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_a_lane_that_turns_signs_is_seen(kind: torch.dtype, every: int) -> None:
    """The same fault in each row, of as many rows as cancel the highest bit of a sum of words."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(768 * 768, generator=generator).to(kind)
    faulty = first.clone()
    faulty[every - 1 :: every].neg_()
    for count in (first.numel(), 4 * SIDE_BY_SIDE * 8 // kind.itemsize):
        assert digest(first[:count]) != digest(faulty[:count]), count
    assert digest(first, first) != digest(faulty, faulty)
