"""Large gradients are written into their bucket and not added to zeros of it: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import contract_tasks
import plain_tasks
from allranks.errors import RequestError
from allranks.strategies.reduction_tree import Span
from allranks.torch.comm.comm import Comm
from allranks.torch.parallel.data import buckets as buckets_module
from allranks.torch.parallel.data.buckets import Buckets
from allranks.torch.parallel.data.reducer import Reducer
from conftest import Train
from in_this_process import trained

LARGE, NEVER = 0, 2**62  # from how many bytes on a gradient is moved
TASKS = [
    *(
        contract_tasks.Images,
        contract_tasks.Pairs,
        contract_tasks.Experts,
        contract_tasks.Penalised,
    ),
    *(plain_tasks.ComplexWeight, plain_tasks.SparseSGD, plain_tasks.SparseRows),
    *(plain_tasks.Unfrozen, plain_tasks.Adversarial),
]


class Sent(Reducer):
    """Keeps what was in each bucket when it left, and empties it where others come."""

    def __init__(self) -> None:
        super().__init__(Comm(device=torch.device("cpu")), 8)
        self.sent: list[list[float]] = []

    def launch(self, bucket: int, leaf: Span, *, last: bool) -> None:
        self.sent.append(self.buckets[bucket].flat.tolist())
        if not last:
            self.buckets[bucket].flat.zero_()

    def finish(self) -> None:
        """There is nothing to wait for."""


def made(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> tuple[Buckets, list[nn.Parameter], Sent]:
    """Buckets of one parameter each, of which those of 32 numbers and more are moved."""
    monkeypatch.setattr(buckets_module, "MOVED_BYTES", 128)
    given = [nn.Parameter(torch.ones(size)) for size in sizes]
    names, reducer = [str(number) for number in range(len(given))], Sent()
    how: dict[str, Any] = {"tally_size": 1, "bucket_bytes": 1, "reducer": reducer}
    made = Buckets(names, given, **how, moves=True)
    for number, parameter in enumerate(given):
        parameter.register_post_accumulate_grad_hook(lambda _, n=number: made.gradient_finished(n))
    return made, given, reducer


def begin(buckets: Buckets) -> None:
    """Nothing of the step before is left, whatever it was."""
    for flat in buckets.flats:
        flat.fill_(9.0)
    buckets.begin()


def test_a_large_gradient_is_made_anew_and_others_are_added_to_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buckets, (small, large), reducer = made(monkeypatch, 31, 40)
    begin(buckets)
    assert large.grad is None and small.grad is not None and not small.grad.any()
    for factor in (2.0, 3.0):
        (factor * (small.sum() + large.sum())).backward()
    buckets.finish(range(8))
    gaps = [0.0] * 24, [0.0, 0.0]  # up to 128 bytes; the tally
    assert reducer.sent == [[5.0] * 40 + gaps[0], [5.0] * 31 + gaps[1]]
    assert large.grad is not None and large.grad.data_ptr() == buckets.flats[0].data_ptr()


def test_what_no_pass_has_made_is_zero_when_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a leaf after one in which it was made."""
    buckets, (first, second), reducer = made(monkeypatch, 32, 32)
    begin(buckets)
    first.sum().backward()
    buckets.add_leaf(range(4))
    (2 * second.sum()).backward()
    buckets.finish(range(4, 8))
    zeros, ones, twos = ([number] * 32 for number in (0.0, 1.0, 2.0))
    assert reducer.sent == [zeros, [*ones, 0.0], twos, [*zeros, 0.0]]


def test_a_zero_has_the_sign_that_it_had_where_it_was_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buckets, (large,), reducer = made(monkeypatch, 32)
    begin(buckets)
    (large * torch.full((32,), -0.0)).sum().backward()
    buckets.finish(range(8))
    assert not torch.tensor(reducer.sent[0]).signbit().any()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_gradient_that_somebody_takes_away_is_refused(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a hook before ours and behind it; it would count as a gradient that no pass has made."""
    buckets, (large,), _ = made(monkeypatch, 32)
    if when == "after":
        large.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    begin(buckets)
    if when == "before":
        with pytest.raises(RequestError, match="replaced"):
            buckets.gradient_finished(0)
        return
    large.sum().backward()
    with pytest.raises(RequestError, match="replaced"):
        buckets.finish(range(8))


def test_a_gradient_that_nobody_told_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    buckets, (large,), _ = made(monkeypatch, 32)
    begin(buckets)
    large.grad = torch.ones(32)
    with pytest.raises(RequestError, match="replaced"):
        buckets.finish(range(8))


@pytest.mark.slow(but=2, most=8)
@pytest.mark.parametrize("bitwise", [False, True], ids=["", "bitwise"])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_a_training_has_the_same_bits(
    task: Any, bitwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    for from_bytes in (NEVER, LARGE):
        monkeypatch.setattr(buckets_module, "MOVED_BYTES", from_bytes)
        ends.append(trained(task(), strategy="ddp", bitwise=bitwise, precision="fp32"))
    assert ends[0][1] == ends[1][1]
    assert all(torch.equal(ends[1][0][name], tensor) for name, tensor in ends[0][0].items())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_on_ranks_too(ranks: int, train: Train) -> None:
    digests = [
        train("contract_tasks:Wide", strategy=s, ranks=n, bitwise=True, steps=5).summary
        for s, n in (("single", 1), ("ddp", ranks))
    ]
    assert digests[0]["weights_sha256"] == digests[1]["weights_sha256"]
