"""Masks of dropout on a device by one kernel, compiled there (torch's jiterator, by NVRTC).

The tensor code of `counter` makes 28 passes over all elements. The kernel makes the same bits in
one: an element of its output is four bytes, the flags of four neighbours. It takes integers of 32
bits alone, so the type of the activation plays no part. Where the kernel cannot be compiled, or
makes other bits in a first trial, the tensor code stays, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from allranks.torch.accelerator import WITH_KERNELS, compile_kernel
from allranks.torch.random.counter import (
    HALF,
    LAST_SHIFT,
    ROUNDS,
    SHORT,
    coordinates,
    on_device,
)

Kernel = Callable[..., Tensor]
COMPILERS: dict[str, Callable[..., Kernel]] = {WITH_KERNELS: compile_kernel}
"""What makes a kernel for each element of C++, by the type of the device."""

FLAGS = 4  # bytes of an element of the output
MOST_ELEMENTS = 1 << 31  # of a mask: a kernel counts what it writes in 32 bits
TRIAL = (3, 5, 7)  # sizes of a row: leading, last but one, no multiple of `FLAGS`
_XOR = "x ^= x >> {}u;"
_FIRST, *_MORE = [f"{_XOR.format(shift)} x *= {factor}u;" for shift, factor in ROUNDS]
SOURCE = f"""
template <typename T>
T flags_from(T first, T second, T row, T column, T below) {{
  unsigned int flags = 0u;
  for (unsigned int place = 0u; place < {FLAGS}u; ++place) {{
    unsigned int x = (unsigned int)first + (unsigned int)row + (unsigned int)column + place;
    {_FIRST} x += (unsigned int)second;
    {" ".join(_MORE)}
    {_XOR.format(LAST_SHIFT)}
    unsigned int flag = x + {HALF}u >= (unsigned int)below + {HALF}u ? 1u : 0u;
    flags |= flag << (8u * place);
  }}
  return (T)flags;
}}
"""


def has_kernel(device: torch.device) -> bool:
    """Whether masks on this device may be made by a kernel."""
    return device.type in COMPILERS


def flags_from(
    keys: Tensor, sizes: Sequence[int], starts: Sequence[int], below: int
) -> Tensor | None:
    """Whether the bits of each element are `below` or more, as bool (rows, *sizes).

    `keys`, (rows, 2) of int32, lie on the device. `None` where no kernel does it, as for more than
    2^16 elements along one of the last two dimensions.
    """
    *far, high, wide = (1, 1, *sizes)
    *far_starts, top, left = (0, 0, *starts)
    elements = len(keys) * high * wide
    for size in far:
        elements *= size
    kernel = _kernel_on(keys.device)
    is_near = max(top + high, left + wide) <= 1 << SHORT
    if kernel is None or not is_near or not 0 < elements < MOST_ELEMENTS:
        return None
    return _flags(kernel, keys, (far, high, wide), (far_starts, top, left), below).view(
        len(keys), *sizes
    )


def _flags(kernel: Kernel, keys: Tensor, sizes: Any, starts: Any, below: int) -> Tensor:
    far, high, wide = sizes
    far_starts, top, left = starts
    first, second = keys.view(-1, 2, 1, 1, 1).unbind(1)
    if any(size > 1 or start for size, start in zip(far, far_starts, strict=True)):
        second = second + _far(tuple(far), tuple(far_starts), keys.device)
    row = _steps(top << SHORT, high, 1 << SHORT, keys.device).view(-1, 1)
    columns = -(-wide // FLAGS)
    column = _steps(left, columns, FLAGS, keys.device)
    found = kernel(first, second, row, column, below=below).contiguous().view(torch.bool)
    return found if wide == columns * FLAGS else found[..., :wide]


@lru_cache(maxsize=256)
def _steps(start: int, count: int, step: int, device: torch.device) -> Tensor:
    """Coordinates as they stand in the first word: 2^16 for each row, 1 for each column.

    The host waits for the copy, once for each shape, so every stream may read it.
    """
    steps = torch.arange(start, start + count * step, step, dtype=torch.int64)
    return steps.to(torch.int32).to(device)  # the upper half wraps around


@lru_cache(maxsize=64)
def _far(sizes: tuple[int, ...], starts: tuple[int, ...], device: torch.device) -> Tensor:
    """What coordinates before the last two add to the second word: (elements, 1, 1)."""
    _, found = coordinates((*sizes, 1, 1), (*starts, 0, 0), torch.device("cpu"))
    assert found is not None
    return found.view(-1, 1, 1).to(device)


@cache
def _kernel_on(device: torch.device) -> Kernel | None:
    """The kernel, once it was seen to make the bits of the tensor code on this device."""
    compiler = COMPILERS.get(device.type)
    if compiler is None:
        return None
    try:
        kernel = compiler(SOURCE, below=0)
        why = "" if _is_right(kernel, device) else "makes other bits than the tensor code"
    except Exception as error:  # of a compiler that is not there, or knows another language
        why = f"cannot be compiled ({type(error).__name__}: {str(error).strip()[:200]})"
    if not why:
        return kernel
    warnings.warn(
        f"the kernel of dropout for {device} {why}: masks are drawn by operations of tensors, "
        "with the same bits, some 30 times as slow",
        stacklevel=1,
    )
    return None


def _is_right(kernel: Kernel, device: torch.device) -> bool:
    far, high, wide = TRIAL
    keys = torch.tensor([[-5, 7], [1 << 30, -(1 << 31)]], dtype=torch.int32).to(device)
    found = _flags(kernel, keys, ([far], high, wide), ([2], 1, 3), 1 << 29)
    wanted = on_device(keys, TRIAL, (2, 1, 3), lambda bits: bits.ge(1 << 29))
    return torch.equal(found.reshape(2, -1), wanted)
