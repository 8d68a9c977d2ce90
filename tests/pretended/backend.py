"""What `torch.pretended` is to this device, as `torch.cuda` is to CUDA; and how torch gets it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import _foreach_supported_types as updated_in_lists
from torch.utils import backend_registration
from torch.utils._foreach_utils import _foreach_supported_types as clipped_in_lists

import allranks.torch.accelerator as accelerator
from allranks.torch.batchnorm import in_c
from allranks.torch.batchnorm import shard as by_shard
from allranks.torch.random import counter as kernel
from pretended import chip, collectives, streams
from pretended.record import record
from pretended.streams import NAME, Event, Stream

CAST_DOWN = ("linear", "matmul", "mm", "bmm", "addmm", "conv1d", "conv2d", "conv3d")
CAST_UP = ("cross_entropy_loss", "log_softmax", "nll_loss", "mse_loss")


class Backend:
    """The functions that torch and allranks ask the module of a device for."""

    Stream, Event = Stream, Event
    device = staticmethod(streams.on_device)
    stream = staticmethod(streams.on_stream)
    set_device = staticmethod(streams.set_index)
    current_device = staticmethod(streams.current_index)
    current_stream = staticmethod(streams.current_stream)
    default_stream = staticmethod(streams.default_stream)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return streams.DEVICES

    def synchronize(self, device: Any = None) -> None:
        record("wait", "synchronize")
        streams.host_waits_for_device()

    def manual_seed(self, seed: int) -> None:
        chip.generator_of().manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for device in range(streams.DEVICES):
            chip.generator_of(device).manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> Tensor:
        return chip.generator_of(device).get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        chip.generator_of(device).set_state(state)

    def get_device_name(self, device: Any = None) -> str:
        return "a pretended chip"

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(name="a pretended chip", total_memory=0)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def install() -> None:
    """Give torch the device. Of a process for good: PrivateUse1 is one, and takes one name."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, Backend())
    keep(torch.library.Library("_", "IMPL")).fallback(_fallback, "PrivateUse1")
    passes = torch.library.fallthrough_kernel
    keep(torch.library.Library("_", "IMPL")).fallback(passes, "AutocastPrivateUse1")
    casts = keep(torch.library.Library("aten", "IMPL"))
    for name in (*CAST_DOWN, *CAST_UP):
        casts.impl(name, partial(_cast, getattr(torch.ops.aten, name)), "AutocastPrivateUse1")
    for overload in ("default", "start", "start_step"):  # torch's own gives a tensor of no length
        arange = getattr(torch.ops.aten.arange, overload)
        casts.impl(arange.name(), partial(_fallback, arange), "PrivateUse1")
    for taken in (updated_in_lists, clipped_in_lists):  # as of a device whose tensors are torch's
        taken.append(chip.OnChip)
    dist.Backend.default_device_backend_map[NAME] = "gloo"
    torch.tensor = partial(_tensor, torch.tensor)
    torch.Tensor.pin_memory = chip.pinned
    torch.Tensor.is_pinned = chip.is_pinned
    torch.UntypedStorage.resize_ = partialmethod(_resized, torch.UntypedStorage.resize_)
    accelerator.pinned_zeros = _pinned_zeros
    by_shard.MEAN_THEN_SQUARES.add(NAME)  # its arithmetic is that of the CPU
    kernel.COMPILERS[NAME] = chip.compile_flags
    in_c.LIBRARY = None  # by operations on both
    collectives.install()


def _fallback(func: Any, *args: Any, **kwargs: Any) -> Any:
    return chip.run(func, args, kwargs)


def _tensor(real: Callable[..., Tensor], data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
    """torch's own makes it on the host, and copies it while the host waits."""
    if device is None or torch.device(device).type != NAME:
        return real(data, device=device, **kwargs)
    grad = kwargs.pop("requires_grad", False)
    return real(data, **kwargs).to(device).requires_grad_(grad)


def _pinned_zeros(size: int, dtype: torch.dtype, *, pin: bool) -> Tensor:
    zeros = torch.zeros(size, dtype=dtype)
    zeros.untyped_storage().pinned = pin
    return zeros


def _resized(storage: Any, real: Callable[..., Any], size: int) -> Any:
    """FSDP frees what it gathered, and takes room again: here the numbers stay where they are."""
    return storage if storage.device.type == NAME else real(storage, size)


def _cast(packet: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation within autocast: its floats are cast, as on other devices."""
    is_down = packet._qualified_op_name.removeprefix("aten::") in CAST_DOWN
    dtype = torch.get_autocast_dtype(NAME) if is_down else torch.float32
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float and value.device.type == NAME else value

    with torch._C._ExcludeDispatchKeyGuard(key):
        return packet(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})


_kept: list[Any] = []


def keep(library: torch.library.Library) -> torch.library.Library:
    """What is registered ends with its library."""
    _kept.append(library)
    return library
