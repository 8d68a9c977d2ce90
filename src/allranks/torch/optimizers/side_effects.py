"""To ask an optimizer how it updates changes nothing but the copies that it is asked on.

A copy of an optimizer may know more than its parameters: a function that it calls, a module, a
global name. What it would write there, it would write into what is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # public: the docs name this path

from allranks.alive import instances_of
from allranks.torch.checkpoint.state import random_streams, set_random_streams
from allranks.torch.deferred_init.arguments import address_of, written_by

Refuse = Callable[[str, str], Exception]
WHY = "it is asked how it updates, by steps of a copy, and these would change what is trained"


@contextmanager
def no_side_effects(device: torch.device, refuse: Refuse) -> Iterator[None]:
    """Within, raise `refuse(found, why)` before a tensor is written that was there before.

    Generators of random numbers go on afterwards where they were. A thread is not seen, nor what
    NumPy writes.
    """
    streams, watch = random_streams(device), _Watch(refuse)
    try:
        with watch:
            yield
    finally:
        set_random_streams(streams, device)
    if watch.found or watch.moved():  # the program may have caught what was raised
        raise refuse(watch.found or "another memory that it gave a tensor", WHY)


class _Watch(TorchDispatchMode):
    """Knows all tensors that are there when it is made."""

    def __init__(self, refuse: Refuse) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refuse, self.found = refuse, ""
        every = instances_of(Tensor)
        self._there = [(one, held) for one in every if (held := _storage(one)) is not None]
        self._addresses = {address_of(held) for _, held in self._there}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            storage = _storage(tensor)
            if storage is not None and address_of(storage) in self._addresses:
                self.found = f"a write into a tensor of shape {tuple(tensor.shape)}, which is none"
                self.found += " of its parameters or of its state"
                raise self.refuse(self.found, WHY)
        return func(*args, **(kwargs or {}))

    def moved(self) -> bool:
        """Whether one of them lies elsewhere now: `weight.data = …`."""
        return any(
            (now := _storage(one)) is None or address_of(now) != address_of(held)
            for one, held in self._there
        )


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, or of a lazy layer
        return None
