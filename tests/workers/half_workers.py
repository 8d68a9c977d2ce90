"""What runs in the ranks of the tests of 16-bit reducers, and the plain simulation of a sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from allranks.catalog import REDUCERS, load
from allranks.launcher.world import World
from allranks.torch.comm.comm import CPU
from allranks.torch.comm.join import join
from allranks.torch.parallel.data.buckets import Buckets

KINDS = {"fp16": torch.float16, "bf16": torch.bfloat16}
# no bucket is a multiple of the ranks
SHAPES = [(3,), (40, 7), (1,), (), (0,), (5, 5), (13,), (2,)]
CASES = (  # type, size of the tally, bytes of a bucket
    (torch.float32, 29, 64),
    (torch.float32, 1, 2**20),
    (torch.float64, 3, 64),
)
STEPS = 2


def plain_sum(gradients: list[Tensor], kind: torch.dtype) -> Tensor:
    """What a 16-bit reducer makes of the gradients of all ranks, as its docstring says it."""
    total = gradients[0].to(kind).float()
    for gradient in gradients[1:]:
        total = total + gradient.to(kind).float()
    return total.to(kind).to(gradients[0].dtype)


def made_up(
    rank: int, step: int, tally_size: int, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """Gradients from tiny to huge, some of them not finite,
    and a tally that 16 bits cannot hold."""
    generator = torch.Generator().manual_seed(1000 * step + rank)

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    gradients = [(drawn(shape) * 10 ** (4 * drawn(shape))).to(dtype) for shape in SHAPES]
    gradients[1].view(-1)[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e5])
    gradients[1].view(-1)[4:8] = torch.tensor([65504.0, 1e-7, 2e-8, -0.0])
    gradients[1].view(-1)[8] = (2**15, 2**-10, -(2**15), 0)[rank]  # only one order gives 0
    tally = (drawn((tally_size,)) * 1e6).to(dtype)
    tally[0] = 100_003 + 2 * rank + step  # beyond fp16, and between two numbers of bf16
    return gradients, tally


def sums_are_the_simulation(argument: None) -> None:
    """Buckets of all sizes and types, twice through the same reducer: equal bits,
    two messages each."""
    comm = join(World.from_environment(), CPU)
    try:
        messages = watched(comm)
        for name in KINDS:
            for case in CASES:
                _sum(comm, messages, name, *case)
    finally:
        comm.leave()


def watched(comm: Any) -> list[str]:
    """The names of the collectives that are begun from here on."""
    names: list[str] = []
    begin = comm._begin

    def begin_and_tell(collective: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(collective.__name__)
        return begin(collective, *args, **kwargs)

    comm._begin = begin_and_tell
    return names


def _sum(
    comm: Any,
    messages: list[str],
    name: str,
    dtype: torch.dtype,
    tally_size: int,
    bucket_bytes: int,
) -> None:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    reducer = load(REDUCERS[name])(comm, 8)
    names = [str(number) for number in range(len(parameters))]
    buckets = Buckets(
        names, parameters, tally_size=tally_size, bucket_bytes=bucket_bytes, reducer=reducer
    )
    for step in range(STEPS):
        of_all = [made_up(rank, step, tally_size, dtype) for rank in range(comm.size)]
        gradients, tally = of_all[comm.rank]
        buckets.begin()
        buckets.tally.copy_(tally)
        buckets.release(range(8))
        messages.clear()
        for position in reversed(range(len(parameters))):
            parameters[position].grad.copy_(gradients[position])
            buckets.gradient_finished(position)
        buckets.finish(range(8))
        assert len(messages) == 2 * len(buckets.flats), messages
        total = of_all[0][1].clone()
        for _, other in of_all[1:]:
            total += other
        assert_equal_bits(buckets.tally, total)
        for position, parameter in enumerate(parameters):
            wanted = plain_sum([g[position] for g, _ in of_all], KINDS[name])
            assert_equal_bits(parameter.grad, wanted)


def assert_equal_bits(found: Any, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    signs = [torch.signbit(tensor.nan_to_num(0.0)) for tensor in (found, wanted)]  # of zeros too
    assert torch.equal(*signs), (found, wanted)
