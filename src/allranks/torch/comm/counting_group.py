"""A process group that counts the bytes sent through it by DTensor, FSDP2 and pipelining.

`Comm` counts what it sends itself. Torch's own parallel classes call collectives on a group that
they get. This group forwards every call to an ordinary group of the same ranks. Before, it reports
the bytes that this rank sends under the standard algorithm for that collective. The counter also
waits for the collective and translates its errors. Torch resolves a group by its name, so this
class is registered as a backend.

On NCCL the sends and receives of `batch_isend_irecv` run one by one: torch coalesces them only for
groups of its own class. Ranks that send to each other at once then wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import allranks.torch.accelerator as accelerator
from allranks.torch.comm.subgroups import new_group

BACKEND = "allranks-counting"

all_gather_single: Callable[..., Any] = (
    getattr(
        dist,
        "all_gather_single",
        None,  # named so since torch 2.13, which warns at the old name
    )
    or dist.all_gather_into_tensor
)

reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def _ring(size: int, nbytes: int) -> float:
    return 2 * (size - 1) / size * nbytes


def _to_all(size: int, nbytes: int) -> float:
    return (size - 1) * nbytes


def _parts(size: int, nbytes: int) -> float:
    return (size - 1) / size * nbytes


def _once(size: int, nbytes: int) -> float:
    return nbytes


def _nothing(size: int, nbytes: int) -> float:
    return 0


SENT_BYTES: dict[str, tuple[int, Callable[[int, int], float]]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), (0, _ring)),
    **dict.fromkeys(("_allgather_base", "all_gather_single", "allgather"), (1, _to_all)),
    **dict.fromkeys(
        ("allgather_into_tensor_coalesced", "all_gather_single_coalesced", "allgather_coalesced"),
        (1, _to_all),
    ),
    **dict.fromkeys(
        ("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter"), (1, _parts)
    ),
    **dict.fromkeys(
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), (1, _parts)
    ),
    **dict.fromkeys(("alltoall_base", "all_to_all_single", "alltoall"), (1, _parts)),
    **dict.fromkeys(("broadcast", "reduce"), (0, _parts)),
    "send": (0, _once),
    **dict.fromkeys(("gather", "scatter"), (1, _once)),
    **dict.fromkeys(("recv", "recv_anysource", "barrier"), (0, _nothing)),
}
"""Method of a process group -> the position of the argument with this rank's data,
and the bytes that it sends."""

OF_TWO = ("send", "recv", "recv_anysource")
FOR_EVER = timedelta(0)  # as torch says it
TO_ALL_UNEVENLY, SPLITS = ("alltoall_base", "all_to_all_single"), 3
OF_WORK = (
    *("is_completed", "is_success", "exception", "result", "source_rank", "_source_rank"),
    *("synchronize", "block_current_stream", "get_future", "get_future_result"),
    *("_get_op_type", "_get_duration", "boxed"),
)


class CollectiveCounter(Protocol):
    """The counter. A collective `meets` the whole group; sends and receives do not."""

    def begin(self, sent_bytes: float, *, meets: bool) -> None:
        """Count a collective that is about to begin, in which this rank sends so many bytes."""
        ...

    def wait(self, work: Any, *, meets: bool) -> None:
        """Wait for a collective."""
        ...

    def translated(self, error: RuntimeError) -> Exception:
        """Translate the error of a failed collective."""
        ...


class CountingGroup(dist.ProcessGroup):
    """Forwards calls to `inner`, and reports each call and each wait to `watch`."""

    def __init__(self, inner: Any, watch: CollectiveCounter) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner, self.watch = inner, watch
        self._name = ""

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch's own asks for a backend
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:  # torch calls it so
        return BACKEND

    def _start_coalescing(self, device: torch.device) -> None:
        self.inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> CountedWork:
        work = self.inner._end_coalescing(device)
        return CountedWork(work, self.watch, meets=False)  # sends and receives may be in it


class CountedWork(dist.Work):
    """A collective in flight on the inner group; all but `wait` is forwarded."""

    def __init__(self, work: Any, watch: CollectiveCounter, *, meets: bool) -> None:
        super().__init__()
        self.work, self.watch, self.meets = work, watch, meets

    def wait(self, timeout: timedelta = FOR_EVER) -> bool:
        if not timeout:
            self.watch.wait(self.work, meets=self.meets)
            return True
        try:
            return bool(self.work.wait(timeout))
        except RuntimeError as error:
            raise self.watch.translated(error) from error


def _handing_on(name: str) -> Callable[..., Any]:
    argument, sent_bytes = SENT_BYTES[name]
    meets = name not in OF_TWO

    def call(self: CountingGroup, *args: Any, **kwargs: Any) -> Any:
        nbytes = sum(t.nbytes for t in _tensors(args[argument : argument + 1]))
        if name in TO_ALL_UNEVENLY and args[SPLITS]:
            local_share = args[SPLITS][self.inner.rank()] / max(1, sum(args[SPLITS]))
            self.watch.begin(nbytes * (1 - local_share), meets=meets)
        else:
            self.watch.begin(sent_bytes(self.inner.size(), nbytes), meets=meets)
        try:
            work = getattr(self.inner, name)(*args, **kwargs)
        except RuntimeError as error:
            raise self.watch.translated(error) from error
        return None if work is None else CountedWork(work, self.watch, meets=meets)

    return call


def _as_inner_work(name: str) -> Callable[..., Any]:
    def call(self: CountedWork, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.work, name)(*args, **kwargs)

    return call


for _name in SENT_BYTES:
    if hasattr(dist.ProcessGroup, _name):  # torch renames them from version to version
        setattr(CountingGroup, _name, _handing_on(_name))
for _name in OF_WORK:
    if hasattr(dist.Work, _name):
        setattr(CountedWork, _name, _as_inner_work(_name))


def counting_group(
    inner: Any, ranks: list[int], watch: CollectiveCounter, timeout: timedelta
) -> Any:
    """A registered group of the same ranks as `inner`; each of `ranks` calls this."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu", *accelerator.kinds()])
    _next.append(CountingGroup(inner, watch))
    return new_group(ranks, timeout, BACKEND, use_local_synchronization=True)


def leave_counting_group(group: CountingGroup) -> None:
    """Unregister the group and drop its inner group, which stays open."""
    with suppress(ValueError, AssertionError):  # the process group of the job is gone already
        dist.destroy_process_group(group)
    group.inner = None


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> CountingGroup:
    """Torch calls this for a new group of this backend."""
    return _next.pop()


_next: list[CountingGroup] = []


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
