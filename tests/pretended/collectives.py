"""Collectives of the pretended device: Gloo's, on a stream of their own, as NCCL's are.

A collective begins when the stream that is current has come to it, and `wait` lets that stream
wait, not the host. What is read before that, or written, is a `Misuse`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.utils import _pytree as pytree

from pretended import chip, streams
from pretended.record import Misuse, line, record
from pretended.streams import Event, Stream

READS_ALONE = {
    "send": (0,),
    "_allgather_base": (1,),
    "_reduce_scatter_base": (1,),
    "alltoall_base": (1,),
}
"""Of each method, the arguments that are read and not written."""
METHODS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "gather", "scatter"),
    *("_allgather_base", "all_gather_single", "allgather", "allgather_into_tensor_coalesced"),
    *("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter"),
    *("reduce_scatter_tensor_coalesced", "alltoall_base", "all_to_all_single", "alltoall"),
    *("send", "recv", "recv_anysource"),
)
done: WeakKeyDictionary[Any, Event] = WeakKeyDictionary()
_own: dict[int, Stream] = {}


def install() -> None:
    """Let torch's process groups and their work keep to it."""
    for name in METHODS:
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _begun(name, getattr(dist.ProcessGroup, name)))
    dist.Work.wait = _waited(dist.Work.wait)


def _begun(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, chip.OnChip)]
        if not given:
            return real(group, *args, **kwargs)
        devices = {tensor.device for tensor in given}
        if devices != {streams.default_stream().device}:
            raise Misuse(f"{name} of tensors of {devices} on another device, at {line()}")
        record("collective", name)
        current = streams.current_stream()
        own = _own.setdefault(current.device.index, Stream(current.device))
        streams.of_collectives.add(own)
        own.wait_stream(current)
        alone = {id(args[k]) for k in READS_ALONE.get(name, ())}
        for tensor in given:
            memory = chip.memory_of(tensor.inner, own)
            memory.is_read(own, name)
            memory.recorded.add(own)  # NCCL holds what it works on
            if id(tensor) not in alone:
                memory.is_written(own, name)
        streams.ran(own)
        work = real(group, *args, **kwargs)
        if work is not None:
            done[work] = own.record_event()
        return work

    return call


def _waited(real: Callable[..., Any]) -> Callable[..., Any]:
    def wait(work: Any, *args: Any) -> Any:
        result = real(work, *args)
        if work in done:
            streams.current_stream().wait_event(done[work])
        return result

    return wait
