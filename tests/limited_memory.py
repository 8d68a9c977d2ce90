"""The memory of a process as a test bounds it: what tensors on the CPU hold together."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Limited(TorchDispatchMode):
    """Within, what tensors hold together is bounded, as if the memory of a worker were."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.held, self.most = limit, 0, 0
        self.known: set[int] = set()
        self.is_here = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else [found]:
            if self.is_here and isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self.count(tensor.untyped_storage())
        return found

    def count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.held += size
        self.most = max(self.most, self.held)
        weakref.finalize(storage, self.let_go, key, size)
        if self.held > self.limit:
            raise MemoryError(f"{self.held} bytes in tensors, and {self.limit} are allowed")

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Within, another process is at work, with memory of its own."""
        before, self.is_here = self.is_here, False
        try:
            yield
        finally:
            self.is_here = before

    def let_go(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.held -= size
