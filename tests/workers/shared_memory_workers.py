"""What runs in the ranks of tests/shared_memory/."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from allranks.errors import PeerLost
from allranks.launcher.processes.fork_server import SEGMENT_FD
from allranks.launcher.world import World
from allranks.torch.comm.comm import CPU
from allranks.torch.comm.counting_group import all_gather_single, reduce_scatter_single
from allranks.torch.comm.join import join
from allranks.torch.shared_memory import backend, posting
from allranks.torch.shared_memory import operands as cards
from allranks.torch.shared_memory.segment import Segment
from allranks.torch.shared_memory.work import RankLost

TIMEOUT = timedelta(seconds=60)
PAUSED_S = 1.5
ENDS_WITHIN_S = 30.0  # far less than TIMEOUT: how soon it is, benchmarks/ measure
OP = dist.ReduceOp


@contextmanager
def job(name: str = backend.BACKEND, turn: int = 0) -> Iterator[tuple[int, int]]:
    """A process group of that backend; gives (rank, ranks). Each turn has a store of its own."""
    world = World.from_environment()
    backend.register()
    store = dist.FileStore(f"{world.store}-{turn}", world.size)
    dist.init_process_group(
        name, rank=world.rank, world_size=world.size, store=store, timeout=TIMEOUT
    )
    yield world.rank, world.size
    dist.destroy_process_group()


def numbers(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Small whole numbers, so that every order of adding gives the same, whatever the type."""
    random = torch.Generator().manual_seed(rank)
    values = torch.randint(1, 4, shape, generator=random)
    return values.to(torch.bool) if dtype == torch.bool else values.to(dtype)


DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
)
SHAPES = ((), (0,), (1,), (5, 3), (70_001,))


def every_collective(argument: None) -> None:
    """Each, on this group and on Gloo, gives the same; sub-groups and what is asynchronous, too."""
    with job("gloo") as (rank, size):
        shared = dist.new_group(backend=backend.BACKEND, timeout=TIMEOUT)
        outcome = backend.outcome_of(shared)
        assert outcome is not None and outcome.did == outcome.asked == "shared_memory", outcome
        for dtype in DTYPES:
            for shape in SHAPES:
                for call in (*SUMS, *COPIES):
                    _compare(call, shared, lambda: (rank, size, dtype, shape))  # noqa: B023
        for call in COPIES:
            _compare(call, shared, lambda: (rank, size, torch.bool, (4, 3)))
        _across(shared, rank, size)
        assert not shared.under_way
        _sub_groups(rank, size)


def _compare(call: Callable[..., Any], shared: Any, case: Callable[[], Any]) -> None:
    found, wanted = call(shared, *case()), call(dist.group.WORLD, *case())
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        same = one.contiguous().view(-1).view(torch.uint8)
        assert torch.equal(same, other.contiguous().view(-1).view(torch.uint8)), (call, case())


def _all_reduce(group: Any, rank: int, size: int, dtype: Any, shape: Any) -> list[Tensor]:
    made = []
    for operation in (OP.SUM, OP.MAX, OP.MIN, OP.PRODUCT):
        tensor = numbers(rank, dtype, *shape)
        work = dist.all_reduce(tensor, operation, group=group, async_op=True)
        assert work is not None and work.wait() and work.is_completed()
        made.append(tensor)
    return made


def _reduce(group: Any, rank: int, size: int, dtype: Any, shape: Any) -> list[Tensor]:
    tensor = numbers(rank, dtype, *shape)
    dist.reduce(tensor, size - 1, group=group)
    return [tensor] if rank == size - 1 else []


def _reduce_scatter(group: Any, rank: int, size: int, dtype: Any, shape: Any) -> list[Tensor]:
    parts = [numbers(size * rank + i, dtype, *shape) for i in range(size)]
    apart, together = torch.empty_like(parts[0]), torch.empty_like(parts[0])
    dist.reduce_scatter(apart, parts, group=group)
    if shape:
        reduce_scatter_single(together, torch.cat(parts), group=group)
    return [apart, together] if shape else [apart]


def _all_gather(group: Any, rank: int, size: int, dtype: Any, shape: Any) -> list[Tensor]:
    part = numbers(rank, dtype, *shape)
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part, group=group)
    whole = part.new_empty(size * part.numel())
    all_gather_single(whole, part.view(-1), group=group)
    return [*parts, whole]


def _broadcast(group: Any, rank: int, size: int, dtype: Any, shape: Any) -> list[Tensor]:
    tensor = numbers(rank, dtype, *shape)
    dist.broadcast(tensor, size - 1, group=group)
    return [tensor]


def _gather(group: Any, rank: int, size: int, dtype: Any, shape: Any) -> list[Tensor]:
    part = numbers(rank, dtype, *shape)
    parts = [torch.empty_like(part) for _ in range(size)] if rank == 1 else None
    dist.gather(part, parts, 1, group=group)
    return parts or []


def _scatter(group: Any, rank: int, size: int, dtype: Any, shape: Any) -> list[Tensor]:
    parts = [numbers(i, dtype, *shape) for i in range(size)] if rank == 0 else None
    part = torch.empty(shape, dtype=dtype)
    dist.scatter(part, parts, 0, group=group)
    return [part]


def _to_all(group: Any, rank: int, size: int, dtype: Any, shape: Any) -> list[Tensor]:
    """Rank r gives rank s r + s rows, with and without sizes."""
    given = [rank + to for to in range(size)]
    rows = numbers(rank, dtype, sum(given), 3)
    unevenly = rows.new_empty(sum(given), 3)
    dist.all_to_all_single(unevenly, rows, given, given, group=group)
    evenly = rows.new_empty(size * 2)
    dist.all_to_all_single(evenly, numbers(rank, dtype, size * 2), group=group)
    return [unevenly, evenly]


def _around(group: Any, rank: int, size: int, dtype: Any, shape: Any) -> list[Tensor]:
    """To the next rank, by two tags that are asked for the other way round."""
    first, second = numbers(rank, dtype, *shape), numbers(rank + size, dtype, *shape)
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    sends = [dist.isend(first, ahead, group, 1), dist.isend(second, ahead, group, 2)]
    taken = [torch.empty_like(first), torch.empty_like(first)]
    dist.irecv(taken[1], behind, group, 2).wait()
    dist.irecv(taken[0], behind, group, 1).wait()
    for work in sends:
        work.wait()
    return taken


SUMS = (_all_reduce, _reduce, _reduce_scatter)
COPIES = (_all_gather, _broadcast, _gather, _scatter, _around, _to_all)


def _across(shared: Any, rank: int, size: int) -> None:
    """What Gloo cannot do, or does otherwise, by its definition."""
    mine = [numbers(r, torch.float32, 4, 6) for r in range(size)]
    total = torch.stack(mine).sum(0)
    tensor = mine[rank].clone()
    dist.all_reduce(tensor, OP.AVG, group=shared)
    assert torch.equal(tensor, total / size)
    tensor = mine[rank].t().contiguous().t()  # columns lie together
    dist.all_reduce(tensor, group=shared)
    assert torch.equal(tensor, total) and not tensor.is_contiguous()
    tensor = torch.complex(mine[rank], -mine[rank])
    shared.allreduce([tensor]).wait()
    assert torch.equal(tensor, torch.complex(total, -total))
    gathered = torch.empty(size, 6, 4).transpose(1, 2)
    shared.allgather([list(gathered)], [mine[rank]]).wait()
    assert torch.equal(gathered, torch.stack(mine))
    truth = torch.tensor([rank == 0, False, True])
    shared.allreduce([truth]).wait()
    assert truth.tolist() == [True, False, True]
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, OP.BOR, group=shared)  # of the Gloo beside it
    assert bits.item() == (1 << size) - 1
    sparse = torch.tensor([0.0, rank]).to_sparse()
    dist.all_reduce(sparse, group=shared)
    assert sparse.to_dense().tolist() == [0.0, sum(range(size))]
    small = torch.full((size,), rank, dtype=torch.int16)
    dist.all_reduce(small, group=shared)
    assert small.tolist() == [sum(range(size))] * size
    eighth = torch.full((3,), float(rank)).to(torch.float8_e5m2)
    dist.broadcast(eighth, 1, group=shared)
    assert eighth.float().tolist() == [1.0] * 3
    texts: list[Any] = [None] * size
    dist.all_gather_object(texts, f"rank {rank}", group=shared)
    assert texts == [f"rank {r}" for r in range(size)]
    if rank == 0:
        came = torch.zeros(1)
        froms = {dist.recv(came, group=shared, tag=7) for _ in range(size - 1)}
        assert froms == set(range(1, size))
    else:
        dist.send(torch.ones(1), 0, group=shared, tag=7)
    shared.monitored_barrier(TIMEOUT)
    future = dist.all_reduce(torch.ones(3), group=shared, async_op=True).get_future()
    assert future.then(lambda done: done.value()[0] * 2).wait().tolist() == [2.0 * size] * 3


def every_form(argument: None) -> None:
    """The methods of the group, called as torch's own can be: each gives what Gloo's gives."""
    with job("gloo") as (rank, size):
        shared = dist.new_group(backend=backend.BACKEND, timeout=TIMEOUT)
        forms = zip(_forms(shared, rank, size), _forms(dist.group.WORLD, rank, size), strict=True)
        for (name, found), (_, wanted) in forms:
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one.to_dense(), other.to_dense()), (name, one, other)
        for call in (shared.barrier, partial(shared.broadcast, torch.ones(1))):
            with pytest.raises(TypeError, match="was called with"):
                call("all")
        with pytest.raises(ValueError, match="the root is rank 7"):
            shared.broadcast(torch.ones(1), root=7)
        with pytest.raises(RuntimeError, match="int32"):
            shared.allgather([torch.ones(3) for _ in range(size)], torch.ones(3).int())


def _forms(group: Any, rank: int, size: int) -> Iterator[tuple[str, list[Tensor]]]:
    """What each form of a call leaves in the tensors that it was given."""
    seconds, at_root = timedelta(seconds=50), rank == 1

    def one(*shape: int) -> Tensor:
        return torch.arange(4.0).repeat(*shape or (1,)) + rank

    def each() -> list[Tensor]:
        return [one() for _ in range(size)]

    reduced: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("allreduce", (OP.MAX, 50.0), {}),
        ("allreduce", (), {"op": OP.MIN, "timeout": seconds}),
        ("broadcast", (1, seconds), {}),
        ("broadcast", (), {"root": 1, "timeout": 50.0}),
        ("reduce", (1, OP.MAX, seconds), {}),
        ("reduce", (), {"root": 1, "op": OP.PRODUCT}),
    ]
    for name, given, named in reduced:
        tensor = one()
        getattr(group, name)(tensor, *given, **named).wait()
        yield f"{name}{given}{named}", [tensor] if name != "reduce" or at_root else []
    listed, named_one = one(), one()
    group.allreduce([listed], op=OP.MAX).wait()
    group.broadcast(tensor=named_one, root=1).wait()
    yield "lists and names", [listed, named_one]
    several = [one(), one()]
    group.allreduce(several).wait()
    yield "several tensors are added up", several
    sparse = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (5,), check_invariants=True)
    yield "sparse", group.allreduce([sparse]).get_future().wait()
    parts, whole, cut = each(), one(size), one()
    group.allgather(parts, one(), seconds).wait()
    group.alltoall_base(whole, one(size), [], [], timeout=seconds).wait()
    group.reduce_scatter(cut, each(), OP.MAX, seconds).wait()
    yield "for each rank", [*parts, whole, cut]
    gathered, part = each() if at_root else [], one()
    group.gather(gathered, one(), root=1, timeout=seconds).wait()
    group.scatter(part, each() if at_root else [], root=1).wait()
    yield "of a root", [*gathered, part]
    group.barrier(timeout=seconds).wait()
    group.barrier().wait()
    group.monitored_barrier(seconds, wait_all_ranks=True)
    group.monitored_barrier(50.0)
    group.barrier().wait(50.0)


def overlapping(argument: None) -> None:
    """Tensors of one call that share memory are read before anything is written, as on Gloo."""
    with job("gloo") as (rank, size):
        shared = dist.new_group(backend=backend.BACKEND, timeout=TIMEOUT)
        for found, wanted in zip(
            _overlaps(shared, rank, size), _overlaps(dist.group.WORLD, rank, size), strict=True
        ):
            assert torch.equal(found, wanted), (found, wanted)
        for dims in ((4,), (3, 4)):  # Gloo writes behind its memory
            expanded = torch.full((1,), rank + 1.0).expand(dims)
            shared.allreduce([expanded]).wait()
            assert expanded.unique().tolist() == [sum(range(1, size + 1))]
        rows = torch.arange(2.0 * size).view(size, 2) + 10 * rank
        given = rows.clone()
        shared.alltoall(list(rows), list(rows.flip(0))).wait()
        apart, before = torch.empty(size, 2), list(given.flip(0))
        dist.all_to_all_single(apart, torch.stack(before))
        assert torch.equal(rows, apart)
        sums = torch.arange(2.0 * size)
        shared.reduce_scatter([sums[1:3]], [list(sums.view(size, 2))]).wait()
        assert sums[1:3].tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)]


def _overlaps(group: Any, rank: int, size: int) -> Iterator[Tensor]:
    for first, second in ((slice(0, 4), slice(0, 4)), (slice(0, 3), slice(2, 4))):
        tensor = torch.arange(4.0) + rank
        group.allreduce_coalesced([tensor[first], tensor[second]]).wait()
        yield tensor
    whole = torch.zeros(size * 50_000)
    whole[:50_000] = rank + 1.0  # what rank 0 gives lies where all others take it, too
    group.allgather([list(whole.view(size, -1))], [whole[:50_000]]).wait()
    yield whole
    once = torch.zeros(2)
    group.gather([[once] * size] if rank == 0 else [], [torch.full((2,), rank + 1.0)]).wait()
    yield once


def what_torch_asks(argument: None) -> None:
    """Torch's own functions ask a group for its parts, or for Gloo by its name."""
    with job() as (rank, size):
        group: Any = dist.group.WORLD
        dist.monitored_barrier(timeout=TIMEOUT, wait_all_ranks=True)
        for timeout in (timedelta(seconds=40), 50.0):
            dist.distributed_c10d._set_pg_timeout(timeout)
        assert group.seconds == 50.0
        assert group._get_backend(torch.device("cpu")).size() == size
        assert group.get_group_store() is not None
        before = group._get_sequence_number_for_group()
        dist.all_reduce(torch.ones(1))
        assert group._get_sequence_number_for_group() == before + 1
        boxed = dist.all_reduce(torch.ones(1), async_op=True).boxed()
        assert dist.Work.unbox(boxed).wait()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            dist.all_reduce(torch.ones(1))
        names = {event.name: event for event in seen.events()}
        assert "c10d::allreduce_" in names and names["shared_memory:all_reduce"].is_async
        model = DistributedDataParallel(nn.Linear(4, 1))
        with model.join(divide_by_initial_world_size=False):
            for _ in range(2 + rank):
                model(torch.ones(2, 4)).sum().backward()
        assert model.module.bias.grad.item() == 2.0 * (2 + rank)


def barriers_that_fail(argument: None) -> None:
    """Rank 1 of 3 does not come, or none but rank 0: the errors say it in the words of Gloo."""
    with job("gloo") as (rank, _):
        for name in ("gloo", backend.BACKEND):
            failed = dist.new_group(backend=name, timeout=TIMEOUT)
            if rank == 0:
                with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier"):
                    dist.monitored_barrier(failed, timedelta(seconds=0.3))
            elif rank == 2:
                says = "Rank 2 successfully reached monitoredBarrier, but received errors"
                with pytest.raises(RuntimeError, match=f"{says} .* from rank 0"):
                    dist.monitored_barrier(failed, timedelta(seconds=0.3))
            dist.barrier()
            alone: Any = dist.new_group(backend=name, timeout=TIMEOUT)
            if rank == 0:
                with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier"):
                    alone.monitored_barrier(timedelta(0))
                with pytest.raises(RuntimeError, match="Ranks 1, 2 failed to pass monitoredBar"):
                    alone.monitored_barrier(0.1, wait_all_ranks=True)
            dist.barrier()
            pair: Any = dist.new_group([0, 1], backend=name, timeout=TIMEOUT)
            if rank == 0:
                with pytest.raises(RuntimeError, match="Ranks 1 failed to pass monitoredBarrier"):
                    pair.monitored_barrier(timedelta(seconds=0.1), wait_all_ranks=True)
            dist.barrier()
        lost: Any = dist.new_group(backend=backend.BACKEND, timeout=TIMEOUT)
        if rank == 1:
            lost.shutdown()
        elif rank == 0:
            with pytest.raises(RankLost, match=r"Rank 1 failed to pass .* has left the group"):
                lost.monitored_barrier(wait_all_ranks=True)
            lost.shutdown()
        else:
            with pytest.raises(RankLost, match=r"Rank 2 successfully .* has left the group"):
                lost.monitored_barrier()
        dist.barrier()


def compiled(argument: None) -> None:
    """`torch.compile` traces no method of the group: it is called as that of Gloo."""
    with job() as (rank, size):
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        model = torch.compile(DistributedDataParallel(net), backend="aot_eager")
        for step in range(2):
            model(torch.ones(8, 4) * (rank + step)).sum().backward()

        def twice(tensor: Tensor) -> Tensor:
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            work.wait()
            dist.barrier()
            return tensor * 2

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            total = torch.compile(twice, backend="aot_eager")(torch.ones(3))
        assert total.tolist() == [2.0 * size] * 3


def _sub_groups(rank: int, size: int) -> None:
    """Pairs of neighbours, each rank in two of them, with collectives under way in both."""
    pairs = [tuple(sorted((first, (first + 1) % size))) for first in range(size)]
    groups = {}
    for pair in sorted(set(pairs)):
        groups[pair] = dist.new_group(list(pair), TIMEOUT, backend.BACKEND)
    own = [pair for pair in sorted(set(pairs)) if rank in pair]
    tensors = [torch.full((1000,), float(rank)) for _ in own]
    works = [
        dist.all_reduce(tensor, group=groups[pair], async_op=True)
        for pair, tensor in zip(own, tensors, strict=True)
    ]
    for pair, work, tensor in reversed(list(zip(own, works, tensors, strict=True))):
        work.wait()
        assert tensor.unique().tolist() == [float(sum(pair))]


def two_threads(argument: None) -> None:
    """Two threads, each with a group of its own, call at once."""
    with job() as (rank, size):
        groups = [dist.new_group(timeout=TIMEOUT) for _ in range(2)]
        wrong: list[Any] = []

        def call(index: int) -> None:
            for turn in range(200):
                tensor = torch.full((1 + 37 * turn,), float(rank + index + turn))
                dist.all_reduce(tensor, group=groups[index])
                if tensor.unique().tolist() != [sum(range(size)) + size * (index + turn)]:
                    wrong.append((index, turn, tensor))

        threads = [threading.Thread(target=call, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong[0]


class Layers(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.append(nn.Linear(16, 2))


def _batch(rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def _mean_gradients(size: int) -> list[Tensor]:
    """Of one process that has the samples of all ranks."""
    model = Layers()
    model(torch.cat([_batch(rank) for rank in range(size)])).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def training_of_torch(argument: None) -> None:
    """DDP, FSDP2, DTensor and a pipeline take the group as any other, and are right on it."""
    with job() as (rank, size):
        wanted = _mean_gradients(size)
        replica = DistributedDataParallel(Layers(), bucket_cap_mb=1e-3)
        for _ in range(3):
            replica.zero_grad()
            replica(_batch(rank)).square().mean().backward()
        for parameter, gradient in zip(replica.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        mesh = DeviceMesh("cpu", list(range(size)))
        model = Layers()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        model(_batch(rank)).square().mean().backward()
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), gradient)
        whole = torch.arange(24.0).view(6, 4)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        assert torch.equal((sharded @ sharded.t()).full_tensor(), whole @ whole.t())
        turned = sharded.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()])
        assert torch.equal(turned.to_local(), whole)
        _pipeline(rank, size)


def _pipeline(rank: int, size: int) -> None:
    layers = [nn.Linear(6, 6) for _ in range(size)]
    for index, layer in enumerate(layers):
        torch.manual_seed(index)
        layer.reset_parameters()
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss())
    samples, losses = _batch(9), list[Tensor]()
    target = torch.zeros_like(samples)
    if rank == 0:
        schedule.step(samples)
    else:
        schedule.step(target=target, losses=losses)
    whole = nn.Sequential(*[nn.Linear(6, 6) for _ in range(size)])
    for index, layer in enumerate(whole):
        torch.manual_seed(index)
        layer.reset_parameters()
    nn.MSELoss()(whole(samples), target).backward()
    torch.testing.assert_close(layers[rank].weight.grad, whole[rank].weight.grad)


def a_wait_ends(argument: None) -> None:
    """A wait whose time is up raises, and the collective goes on."""
    with job() as (rank, size):
        tensor = torch.ones(2)
        if rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
            begun = time.monotonic()
            with pytest.raises(RuntimeError, match="Timed out"):
                work.wait(timedelta(seconds=0.3))
            assert time.monotonic() - begun < ENDS_WITHIN_S
            assert not work.is_completed()
            dist.group.WORLD._store.set("waited", "")
            work.wait()
        else:
            dist.group.WORLD._store.get("waited")
            dist.all_reduce(tensor)
        assert tensor.tolist() == [size, size]


class SlowStore(dist.PrefixStore):  # type: ignore[misc]
    """It reads what rank 0 has written long after that is there."""

    def get(self, key: str) -> bytes:
        if key == "attached/0":
            time.sleep(PAUSED_S)
        value: bytes = super().get(key)
        return value


def rank_0_ends_at_once(port: int) -> None:
    """Its program, which serves the store, ends as soon as it has its group."""
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    store: Any = dist.TCPStore("localhost", port, size, rank == 0, timeout=TIMEOUT)
    store = (SlowStore if rank else dist.PrefixStore)("", store)
    group, choice = backend.make_group(store, rank, size, TIMEOUT, range(size))
    assert choice.did == backend.SHARED
    if rank == 0:
        os._exit(0)
    group.shutdown()


def nothing_is_left(argument: None) -> None:
    """After several groups were made and left: no file, no thread, no memory, no name."""
    torch.set_num_threads(1)  # torch's own threads stay
    before = _held()
    for turn in range(3):
        with job(turn=turn):
            more = dist.new_group(timeout=TIMEOUT)
            dist.all_reduce(torch.ones(100_000), group=more)
            work = dist.all_reduce(torch.ones(3), async_op=True)
            work.get_future().wait()
            with open("/proc/self/maps") as maps:
                assert "memfd:allranks" in maps.read()
    for _ in range(100):
        left = {name: value - before[name] for name, value in _held().items()}
        if not any(left.values()):
            break
        time.sleep(0.05)
    assert not any(left.values()), left


def _held() -> dict[str, set[str]]:
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    with open("/proc/self/maps") as maps:
        mapped = {line.split()[-1] for line in maps if "allranks" in line and ".so" not in line}
    names = {open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")}
    return {
        "files": {link for link in links if "memfd" in link or "pidfd" in link},
        "mapped": mapped,
        "names": {name for name in os.listdir("/dev/shm") if "allranks" in name},
        "threads": {str(len(os.listdir("/proc/self/task"))), *names},
    }


def a_rank_is_lost(how: str) -> None:
    """Rank 1 goes in one of four ways while the others wait for it: they say that it was rank 1."""
    posting.STOPPED_S = 0.5
    with job() as (rank, _):
        dist.barrier()
        if rank == 1:
            _go(how)
            return
        begun = time.monotonic()
        with pytest.raises(RankLost, match=f"peer lost: rank 1 .*{REASONS[how]}") as caught:
            dist.all_reduce(torch.ones(300_000))
        assert time.monotonic() - begun < ENDS_WITHIN_S
        assert (caught.value.job_rank, caught.value.reason) == (1, REASONS[how])
        with pytest.raises(RankLost):  # a group that has failed stays so
            dist.barrier()


def a_rank_is_stopped_and_goes_on(argument: None) -> None:
    with job() as (rank, _):
        process = torch.tensor([os.getpid() if rank == 1 else 0])
        dist.all_reduce(process)
        begun = time.monotonic()
        if rank == 0:
            os.kill(int(process), signal.SIGSTOP)
            threading.Timer(PAUSED_S, os.kill, (int(process), signal.SIGCONT)).start()
        one = torch.ones(300_000)
        dist.all_reduce(one)
        assert one.eq(3).all()
        assert rank > 0 or time.monotonic() - begun > PAUSED_S / 2
        dist.barrier()


REASONS = {"kill": "died", "exit": "died", "stop": "stopped", "leave": "left"}


def _go(how: str) -> None:
    time.sleep(0.2)
    if how == "kill":
        os.kill(os.getpid(), 9)
    elif how == "stop":
        os.kill(os.getpid(), 19)
    elif how == "exit":
        raise SystemExit(3)


def memory_of_the_launcher(argument: None) -> None:
    """The group of the job uses the memory that all were given, and other groups their own."""
    world = World.from_environment()
    assert world.segment == SEGMENT_FD
    for turn in range(2):
        comm = join(world, CPU)
        of_launcher, of_group = (_is_mapped(f"memfd:allranks-{of}") for of in ("segment", "group"))
        assert (of_launcher, of_group) == (turn == 0, turn == 1)
        assert not _held()["files"] & {"/memfd:allranks-segment (deleted)"}
        pair = dist.new_group([0, 1], TIMEOUT)
        tensor = torch.ones(3)
        comm.all_reduce(tensor).wait()
        if comm.rank < 2:
            assert _is_mapped("memfd:allranks-group")
            dist.all_reduce(tensor, group=pair)
        assert tensor.tolist() == [comm.size * (2 if comm.rank < 2 else 1)] * 3
        comm.leave()


def _is_mapped(name: str) -> bool:
    with open("/proc/self/maps") as maps:
        return name in maps.read()


def several_hosts(argument: None) -> None:
    """3 ranks on 2 hosts, one alone: two levels, and what Gloo gives."""
    rank_of = World.from_environment().rank
    cards.host_identity = lambda: f"host {rank_of // 2}"
    with job("gloo") as (rank, size):
        group = dist.new_group(backend=backend.BACKEND, timeout=TIMEOUT)
        outcome = backend.outcome_of(group)
        assert outcome is not None and outcome.did == "hierarchical", outcome
        assert outcome.why == "its 3 ranks run on 2 hosts"
        for dtype in (torch.float32, torch.int64):
            for shape in SHAPES:
                for call in (*SUMS, *COPIES):
                    _compare(call, group, lambda: (rank, size, dtype, shape))  # noqa: B023
        truth = torch.tensor([rank == 0, False])
        group.allreduce([truth]).wait()
        assert truth.tolist() == [True, False]
        dist.barrier(group)
        dist.monitored_barrier(group)
        group._set_default_timeout(50.0)
        group.barrier().wait(50.0)
        with pytest.raises(RuntimeError, match="name the rank"):
            dist.recv(torch.ones(1), group=group)
    with job(turn=1) as (rank, size):
        wanted = _mean_gradients(size)
        replica = DistributedDataParallel(Layers())
        replica(_batch(rank)).square().mean().backward()
        for parameter, gradient in zip(replica.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


def no_memory(why: str) -> None:
    """Where one rank cannot, all use Gloo, and say why."""
    rank_of = World.from_environment().rank
    if why == "hosts":
        cards.host_identity = lambda: f"host {rank_of}"
    elif why == "not built" and rank_of == 1:
        backend.library = lambda: None
    elif why == "refused" and rank_of == 1:
        posting.Segment = Refusing  # type: ignore[misc]
    before = _held()
    with job() as (_, size):
        outcome = backend.outcome_of()
        assert outcome is not None
        assert (outcome.asked, outcome.did) == ("shared_memory", "gloo")
        assert outcome.why.startswith(NO_MEMORY[why]), outcome
        assert backend.library_group_of() is None
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [size] * 3
        assert _held()["mapped"] <= before["mapped"]


NO_MEMORY = {
    "hosts": "its 2 ranks run on 2 hosts",
    "not built": "rank 1: the library for it was not compiled",
    "refused": "rank 1: [Errno 13] this test",
}


class Refusing(Segment):
    @classmethod
    def open(cls, where: str, nbytes: int) -> Segment:
        raise PermissionError(13, "this test")


class Signs:
    """A heartbeat that only counts: the collectives, and the phases that were entered."""

    def __init__(self) -> None:
        self.collectives, self.phases = 0, list[str]()

    def collective(self) -> None:
        self.collectives += 1

    def enter(self, phase: str) -> str:
        self.phases.append(phase)
        return "start"


def a_rank_comes_for_no_memory(argument: None) -> None:
    """Whoever waits for it there is seen to wait, and is a victim when it leaves."""
    signs: Any = Signs()
    comm = join(World.from_environment(), CPU, signs)
    before = signs.collectives
    if comm.rank == 1:
        comm.leave()
        return
    with pytest.raises(PeerLost, match="rank 1 has left"):
        comm.zeros(10, torch.ones(1))
    assert (signs.collectives, signs.phases) == (before + 1, ["exchange"])
    comm.leave(failed=True)
