"""A process group that counts what is sent through it, whoever calls: DTensor, FSDP2, pipelining.

`Comm` counts what it sends itself. Torch's own parallel parts call collectives on a group that they
are given; this one hands every call on to an ordinary group of the same ranks, and first tells its
bytes, as what this rank sends under the field's algorithm for that collective, and gives a sign of
life. Torch resolves a group by its name, so it is registered as a backend of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

BACKEND = "allranks-counting"


def _ring(size: int, given: int) -> float:
    return 2 * (size - 1) / size * given


def _to_all(size: int, given: int) -> float:
    return (size - 1) * given


def _parts(size: int, given: int) -> float:
    return (size - 1) / size * given


def _once(size: int, given: int) -> float:
    return given


def _nothing(size: int, given: int) -> float:
    return 0


SENT: dict[str, tuple[int, Callable[[int, int], float]]] = {
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
"""Method of a process group -> which argument holds what this rank gives,
and the bytes it sends."""


class CountingGroup(dist.ProcessGroup):
    """Hands calls on to `inner`; `count(bytes)` hears of each before it is made."""

    def __init__(self, inner: Any, count: Callable[[float], None]) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner, self.count = inner, count
        self._name = ""

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch's own asks for a backend
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:  # torch calls it so
        return BACKEND


def _handing_on(name: str) -> Callable[..., Any]:
    given_at, sent = SENT[name]

    def call(self: CountingGroup, *args: Any, **kwargs: Any) -> Any:
        size = self.inner.size()
        given = sum(t.nbytes for t in _tensors(args[given_at : given_at + 1]))
        self.count(sent(size, given))
        return getattr(self.inner, name)(*args, **kwargs)

    return call


for _name in SENT:
    if hasattr(dist.ProcessGroup, _name):  # torch renames them from version to version
        setattr(CountingGroup, _name, _handing_on(_name))


def counting_group(
    inner: Any, ranks: list[int], count: Callable[[float], None], timeout: timedelta
) -> Any:
    """A registered group of the same ranks as `inner`; each of `ranks` calls this."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu", "cuda"])
    _next.append(CountingGroup(inner, count))
    return dist.new_group(ranks, timeout=timeout, backend=BACKEND, use_local_synchronization=True)


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> CountingGroup:
    """What torch calls for a new group of this backend."""
    return _next.pop()


_next: list[CountingGroup] = []


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
