"""What runs in the ranks of the tests of reductions made of messages."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from allranks.catalog import REDUCERS, load
from allranks.errors import PeerLost
from allranks.launcher.world import World
from allranks.strategies.card import Workload
from allranks.strategies.cards import CARDS
from allranks.torch.comm.comm import CPU, Comm
from allranks.torch.comm.join import join
from allranks.torch.parallel.data.buckets import Buckets
from allranks.torch.parallel.data.reducer import Bucket, Reducer

SHAPES = [(3,), (40, 7), (1,), (), (5, 5), (13,), (2,)]
SIZES = (1, 24, 2**20)
"""Bytes of a bucket: one for each parameter, some of several, one of all."""


def sums_are_the_sums(argument: dict[str, Any]) -> None:
    """Each way, for buckets of all sizes, twice: the sum, equal bits everywhere, its bytes."""
    comm = join(World.from_environment(), CPU)
    try:
        for text in argument["ways"]:
            for bucket_bytes in SIZES:
                _sum(comm, text, bucket_bytes)
    finally:
        comm.leave()


def _sum(comm: Comm, text: str, bucket_bytes: int) -> None:
    options = CARDS["ddp"].read_options({"reduce": text})
    picked = options["reduce"]
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
    names = [str(number) for number in range(len(parameters))]
    reducer = load(REDUCERS[picked.name])(comm, 8, **picked.options)
    buckets = Buckets(names, parameters, tally_size=3, bucket_bytes=bucket_bytes, reducer=reducer)
    group = picked.options.get("group") or comm.size
    for step in range(2):
        before, far = comm.sent_bytes["gradients"], _bytes_to_other_groups(comm, group)
        _step(comm, buckets, parameters, step)
        sent = torch.tensor([comm.sent_bytes["gradients"] - before])
        across = torch.tensor([float(far.pop())])
        _check_equal_bits(comm, buckets)
        every = sent.new_empty(comm.size)
        comm.all_gather(every, sent, "control").wait()
        messages = tuple(flat.nbytes for flat in buckets.flats)
        promised = CARDS["ddp"].bytes_sent(Workload(messages, comm.size, 8), options)
        assert abs(float(every.max()) - promised) <= 1, (text, every, promised)
        if picked.name == "hierarchical":
            groups = comm.size // group
            assert float(across) == 2 * (groups - 1) / groups / group * sum(messages)


def _step(comm: Comm, buckets: Buckets, parameters: list[nn.Parameter], step: int) -> None:
    """One step of gradients that every rank can compute for all."""
    of_all = [_made_up(rank, step) for rank in range(comm.size)]
    buckets.begin()
    buckets.release(range(8))
    for position in reversed(range(len(parameters))):
        parameters[position].grad.copy_(of_all[comm.rank][position])  # type: ignore[union-attr]
        buckets.gradient_finished(position)
    buckets.tally.fill_(float(1 + comm.rank))
    buckets.finish(range(8))
    for position, parameter in enumerate(parameters):
        wanted = torch.stack([gradients[position] for gradients in of_all]).sum(dim=0)
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-12, atol=1e-12)
    assert buckets.tally.tolist() == [comm.size * (comm.size + 1) / 2] * 3


def _made_up(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def _check_equal_bits(comm: Comm, buckets: Buckets) -> None:
    for flat in buckets.flats:
        everywhere = flat.new_empty(comm.size * flat.numel())
        comm.all_gather(everywhere, flat.clone(), "control").wait()
        assert all(torch.equal(one, flat) for one in everywhere.view(comm.size, -1))


def _bytes_to_other_groups(comm: Comm, group: int) -> list[int]:
    """How many bytes this rank sends from here on to ranks of other groups, as its one element."""
    found, exchange = [0], Comm.exchange

    def watched(sends: Any, receives: Any, tag: int) -> Any:
        own = comm.rank // group
        found[0] += sum(tensor.nbytes for peer, tensor in sends if peer // group != own)
        return exchange(comm, sends, receives, tag)

    comm.exchange = watched  # type: ignore[method-assign]
    return found


def a_peer_is_lost(argument: dict[str, Any]) -> None:
    """The last rank goes away with the first turn of a sum: the others hear of a lost peer."""
    comm = join(World.from_environment(), CPU)
    picked = CARDS["ddp"].read_options({"reduce": argument["way"]})["reduce"]
    reducer = load(REDUCERS[picked.name])(comm, 8, **picked.options)
    flat = torch.ones(2**18 * reducer.multiple)
    reducer.prepare([Bucket(flat, flat)])
    comm.barrier()
    if comm.rank == comm.size - 1:
        os._exit(0)
    with pytest.raises(PeerLost):
        _until_it_breaks(reducer)
    comm.leave(failed=True)


def _until_it_breaks(reducer: Reducer) -> None:
    """One that only gives to the lost one may hear of it with the next sum."""
    for _ in range(3):
        reducer.launch(0, (0, 8), last=True)
        reducer.finish()
