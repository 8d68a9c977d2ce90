"""A process group of ranks that share a device: Gloo, with a copy on the host of every tensor.

NCCL before 2.31 refuses two ranks on one GPU, and Gloo reads device memory only in some
collectives. So each tensor is copied to the host, goes over Gloo, and is copied back in `wait`. For
checks, not for speed: the host waits for the device in every collective.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import allranks.torch.accelerator as accelerator
from allranks.torch.comm.counting_group import FOR_EVER, SENT_BYTES
from allranks.torch.shared_memory.posting import Named, gloo_group

BACKEND, GLOO = "shared_device", "gloo"
READ_ALONE = ("send", "barrier")  # all others write their first argument


class HostGroup(Named):
    """Forwards every call to Gloo, with copies of its tensors on the host."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store, self.inner = store, gloo_group(store, rank, size, timeout)

    def getBackendName(self) -> str:  # torch calls it so
        return BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def monitored_barrier(self, *args: Any, **named: Any) -> Any:
        """Block until all ranks have called this; the error names those that did not."""
        return self.inner.monitored_barrier(*args, **named)

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)

    def shutdown(self) -> None:
        """Close the connections; the other ranks get an error."""
        self.inner = None

    abort = shutdown


class HostWork(dist.Work):
    """A call in flight on the host; `wait` copies its results to the `targets` on the device."""

    def __init__(self, work: Any, targets: list[tuple[Tensor, Tensor]], divisor: int) -> None:
        super().__init__()
        self.work, self.targets, self.divisor = work, targets, divisor
        self.tensors = [target for target, _ in targets]

    def wait(self, timeout: timedelta = FOR_EVER) -> bool:
        if timeout:
            self.work.wait(timeout)
        else:
            self.work.wait()
        targets, self.targets = self.targets, []
        for target, host in targets:
            if self.divisor > 1:
                host.div_(self.divisor)
            if host is not target:
                target.data.copy_(host)  # as a collective: autograd is not told
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        self.wait()
        return self.tensors

    def get_future(self) -> Any:
        """A completed future; waits for the work."""
        future: Any = torch.futures.Future()
        future.set_result(self.result())
        return future

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def is_success(self) -> bool:
        return bool(self.work.is_success())

    def exception(self) -> Any:
        return self.work.exception()

    def source_rank(self) -> int:
        return int(self.work._source_rank())

    _source_rank = source_rank


def register() -> None:
    """Register the backend with torch, once in a process."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        kinds = ["cpu", *accelerator.kinds()]
        dist.Backend.register_backend(BACKEND, HostGroup, devices=kinds)


def goes_through_host(group: Any) -> bool:
    """Whether the host waits for messages of this group although its tensors lie on a device."""
    return isinstance(group, HostGroup)


def _by_host(name: str) -> Callable[..., Any]:
    def call(self: HostGroup, *args: Any, **named: Any) -> Any:
        copies: list[tuple[Tensor, Tensor]] = []
        handed = [_on_host(value, copies) for value in args]
        targets: list[tuple[Tensor, Tensor]] = []
        if args and name not in READ_ALONE:
            count = len(_leaves(args[0]))
            targets = copies[:count]
        divisor = 1
        for opts in (*args, *named.values()):
            if getattr(opts, "reduceOp", None) == dist.ReduceOp.AVG:  # Gloo has none
                opts.reduceOp, divisor = dist.ReduceOp.SUM, self.size()
        work = getattr(self.inner, name)(*handed, **named)
        return None if work is None else HostWork(work, targets, divisor)

    return call


def _on_host(value: Any, copies: list[tuple[Tensor, Tensor]]) -> Any:
    """`value` with host copies of its tensors; adds each (tensor, copy) to `copies`."""
    if isinstance(value, Tensor):
        host = value.detach().cpu().contiguous()
        copies.append((value, host))
        return host
    if isinstance(value, (list, tuple)):
        return [_on_host(item, copies) for item in value]
    return value


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in _leaves(item)] if isinstance(value, (list, tuple)) else []


for _name in SENT_BYTES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(HostGroup, _name, _by_host(_name))
