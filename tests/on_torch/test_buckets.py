"""Buckets by themselves, with a reducer that only writes down what leaves and when."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.strategies.reduction_tree import Span
from allranks.torch.comm.comm import Comm
from allranks.torch.model.reals import reals
from allranks.torch.parallel.data.buckets import ALIGNED_BYTES, Buckets
from allranks.torch.parallel.data.half import PackedBucket, own_rows
from allranks.torch.parallel.data.reducer import Reducer
from counting import calls_of

TALLY = 3
SIZE = 10  # numbers of a parameter
ONE = 4 * SIZE  # its bytes
ROOM = 32  # numbers of float32 in the 128 bytes that its gradient takes up


class Notes(Reducer):
    """Sums nothing. What left, in order."""

    def __init__(self) -> None:
        super().__init__(Comm(device=torch.device("cpu")), 8)
        self.left: list[int] = []

    def launch(self, bucket: int, leaf: Span, *, last: bool) -> None:
        assert last
        self.left.append(bucket)

    def finish(self) -> None:
        """There is nothing to wait for."""


def named(parameters: list[nn.Parameter]) -> list[str]:
    return [f"weight-{number}" for number in range(len(parameters))]


def made(bucket_bytes: int, parameters: int = 5) -> tuple[Buckets, list[nn.Parameter]]:
    given = [nn.Parameter(torch.full((SIZE,), float(number))) for number in range(parameters)]
    return Buckets(
        named(given), given, tally_size=TALLY, bucket_bytes=bucket_bytes, reducer=Notes()
    ), given


@pytest.mark.parametrize(
    ("bucket_bytes", "sizes"),
    [
        (1, [1] * 5),
        (ONE, [1] * 5),
        (2 * ONE, [2, 2, 1]),
        (2 * ONE - 1, [1] * 5),
        (9**9, [5]),
    ],
)
def test_no_bucket_holds_more_than_asked_for(bucket_bytes: int, sizes: list[int]) -> None:
    """`sizes` in parameters: what a bucket holds is counted without the gaps between them."""
    buckets, _ = made(bucket_bytes)
    assert [gradients.numel() for gradients in buckets.gradients] == [n * ROOM for n in sizes]


def test_what_is_sent_is_the_gradients_and_one_tally() -> None:
    buckets, _ = made(2 * ONE)
    assert [flat.numel() for flat in buckets.flats] == [2 * ROOM, 2 * ROOM, ROOM + TALLY]
    assert buckets.tally.numel() == TALLY
    buckets.tally.fill_(7.0)
    assert buckets.flats[-1][ROOM:].tolist() == [7.0] * TALLY and not buckets.gradients[-1].any()


def test_gradients_are_zero_at_the_start_and_where_backward_finds_them() -> None:
    buckets, parameters = made(2 * ONE)
    for flat in buckets.flats:
        flat.fill_(9.0)
    parameters[2].grad = None
    buckets.begin()
    assert not any(flat.any() for flat in buckets.flats)
    for number, parameter in enumerate(parameters):
        assert parameter.grad is not None
        parameter.grad.fill_(float(number))
    gap = [0.0] * (ROOM - SIZE)
    rooms = [*[4.0] * SIZE, *gap, *[3.0] * SIZE, *gap]
    assert buckets.gradients[0].tolist() == rooms, "the last is finished first"
    assert buckets.gradients[2].tolist() == [0.0] * ROOM


def test_buckets_leave_in_order_as_soon_as_they_may() -> None:
    buckets, _ = made(2 * ONE)
    notes = buckets.reducer
    assert isinstance(notes, Notes)
    buckets.begin()
    buckets.gradient_finished(4)  # of a pass that is not the last
    buckets.release(range(8))
    for position, left in ((2, []), (1, []), (4, []), (3, [0, 1]), (0, [0, 1])):
        buckets.gradient_finished(position)
        assert notes.left == left, "the one with the tally waits for the end"
    buckets.finish(range(8))
    assert notes.left == [0, 1, 2]


def test_a_gradient_that_is_finished_twice_is_refused() -> None:
    buckets, _ = made(9**9)
    buckets.begin()
    buckets.release(range(8))
    buckets.gradient_finished(3)
    with pytest.raises(RequestError, match="twice"):
        buckets.gradient_finished(3)


def test_a_gradient_lies_as_its_parameter_does() -> None:
    """Channels-last weights behind another parameter of the same bucket."""
    shape = (2, 3, 2, 2)
    image = nn.Parameter(torch.randn(shape).contiguous(memory_format=torch.channels_last))
    given = [image, nn.Parameter(torch.zeros(5))]
    buckets = Buckets(named(given), given, tally_size=TALLY, bucket_bytes=9**9, reducer=Notes())
    buckets.begin()
    assert image.grad is not None and image.grad.stride() == image.stride()
    image.grad.fill_(1.0)
    flat, start = buckets.flats[0].tolist(), ROOM
    assert flat[start : start + image.numel()] == [1.0] * image.numel()
    assert sum(flat) == image.numel() and len(flat) == 2 * ROOM + TALLY


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_every_gradient_begins_where_one_of_its_own_could(kind: torch.dtype) -> None:
    """At a multiple of 128 bytes of its bucket, complex or not; none reaches into the next one."""
    sizes = [(3,), (33,), (7, 5), (1,), (16,), (17,)]
    kinds = [kind, kind.to_complex()] * 3
    given = [nn.Parameter(torch.zeros(*n, dtype=k)) for n, k in zip(sizes, kinds, strict=True)]
    buckets = Buckets(named(given), given, tally_size=TALLY, bucket_bytes=9**9, reducer=Notes())
    (flat,) = buckets.flats
    buckets.begin()
    starts = []
    for number, parameter in enumerate(given):
        gradient = parameter.grad
        assert gradient is not None and gradient.dtype == parameter.dtype
        starts.append(gradient.data_ptr() - flat.data_ptr())
        reals(gradient).fill_(number + 1.0)
    assert ALIGNED_BYTES == 128 and [start % 128 for start in starts] == [0] * len(sizes)
    assert starts == sorted(starts, reverse=True) and starts[-1] == 0
    for number, parameter in enumerate(given):
        assert parameter.grad is not None and bool((reals(parameter.grad) == number + 1.0).all())


def test_the_memory_of_buckets_goes_with_them() -> None:
    """Others may be laid out in mid-run: the old ones do not wait for the collector of cycles."""
    buckets, _ = made(ONE)
    buckets.begin()
    buckets.release(range(8))
    there = weakref.ref(buckets)
    gc.disable()
    try:
        del buckets
        assert there() is None
    finally:
        gc.enable()


def packed_example(ranks: int) -> tuple[PackedBucket, list[Tensor | None]]:
    """Rows that are cut evenly and not, fewer rows than ranks, none, turned, complex, and bf16."""
    drawn = torch.Generator().manual_seed(3)
    tensors = [
        torch.randn(16, 3, generator=drawn),
        torch.randn(10, 2, generator=drawn),
        torch.randn(3, generator=drawn),
        torch.randn(0, 4),
        torch.randn(8, 3, 2, 2, generator=drawn).to(memory_format=torch.channels_last),
        torch.randn(5, 12, generator=drawn).t(),
        torch.randn(6, 2, generator=drawn, dtype=torch.complex64),
        torch.randn(16, 2, generator=drawn),
    ]
    parameters = [nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    gradients = [*tensors[:-3], tensors[-3].to_sparse(1), tensors[-2], None]
    return PackedBucket(parameters, ranks), gradients


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_a_section_holds_the_rows_of_its_rank(ranks: int) -> None:
    """By copies, as a host packs, and at once, as a device does; and back into the parameters."""
    bucket, gradients = packed_example(ranks)
    flat = bucket.packed(gradients)
    dense = [None if g is None else reals(g.to_dense()) for g in gradients]
    for pack in (bucket.packed_at_once, bucket.packed_one_by_one):
        assert pack(dense).equal(flat)
    for rank, section in enumerate(flat.view(ranks, -1)):
        for (parameter, part), gradient in zip(bucket.parts(section, rank), gradients, strict=True):
            rows = own_rows(parameter if gradient is None else gradient.to_dense(), ranks, rank)
            assert part.equal(rows)
    for unpack in (bucket.unpack, bucket.unpack_at_once, bucket.unpack_one_by_one):
        for parameter in bucket.parameters:
            parameter.detach().zero_()
        unpack(flat)
        for parameter, gradient in zip(bucket.parameters, gradients, strict=True):
            assert gradient is None or parameter.equal(gradient.to_dense())
        for rank, section in enumerate(flat.view(ranks, -1)):
            assert bucket.section_of(rank).equal(section)


def test_packing_calls_no_function_for_a_rank() -> None:
    """As many for 64 ranks as for 8, and for twice the parameters no more than twice as many."""

    def calls(parameters: int, ranks: int, *, at_once: bool) -> int:
        made = [nn.Parameter(torch.randn(64, 2)) for _ in range(parameters)]
        bucket = PackedBucket(made, ranks)
        pack = bucket.packed_at_once if at_once else bucket.packed_one_by_one
        unpack = bucket.unpack_at_once if at_once else bucket.unpack_one_by_one

        def act() -> None:
            flat = pack([parameter.detach() for parameter in made])
            bucket.section_of(0)
            unpack(flat)

        return calls_of(act)

    for at_once in (False, True):
        few = calls(20, 8, at_once=at_once)
        assert calls(20, 64, at_once=at_once) == few
        assert few < calls(40, 8, at_once=at_once) <= 2 * few
