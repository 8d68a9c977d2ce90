"""Random bits from a counter: what is drawn is a pure function of a key and of where it is drawn.

Each sample of a step has a key, a hash (BLAKE2b) of (seed, step, shard) and its row in the shard;
a layer and its call are added to it, and 32 bits are drawn for each element of the sample by a hash
of the key and the element's coordinates. So it does not matter which rank draws, on what device,
how much is drawn at once, or whether a compiler has fused it; and what is drawn for an element does
not follow the size of the tensor: more padding adds draws, and changes none.

The hash is `triple32` of Chris Wellons (github.com/skeeto/hash-prospector: a mixer of 32 bits found
by search, bias of its avalanche 0.021), with the second word of the key added after its first
round. Tensors compute it in int32, which wraps around alike on every device; on a CPU, NumPy does
in uint32, block by block, which is quicker than torch's Mersenne Twister.
"""

from __future__ import annotations

import hashlib
import struct
import warnings
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allranks.strategies.shards import Micro
from allranks.torch.accelerator import WITH_KERNELS, compile_kernel
from allranks.training.order import random_key

Words = NDArray[np.uint32]
Finish = Callable[[Tensor], Tensor]
"""Makes something of 32 random bits (int32) for each element, in any shape."""

WORD, HALF = 1 << 32, 1 << 31
ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))  # (shift, factor) of triple32
LAST_SHIFT = 14
BLOCK = 1 << 16  # elements that are drawn at once on a CPU: they stay in its cache
KEPT_TABLE = 1 << 16  # elements of the largest table of coordinates that is kept
SHORT = 16  # bits of each of the last two coordinates in the first word
SHARDS_PER_HASH = 8  # two words of 32 bits for each are a digest of BLAKE2b
DRAWS = -5  # what keys are made for, beside shards


def signed(word: int) -> int:
    """The int32 of the same 32 bits."""
    return (word + HALF) % WORD - HALF


def words(*parts: int) -> tuple[int, int]:
    """Two words, of 32 and 31 bits, that are a hash of whole numbers."""
    key = random_key(*parts)
    return key % WORD, key // WORD


FAR = [signed(words(from_last, DRAWS)[0] | 1) for from_last in range(64)]
"""What coordinates beyond the last two are multiplied by; torch has no more dimensions."""


def keys_of(seed: int, step: int, pieces: Micro) -> Words:
    """The keys of the samples of a micro-batch, in the order of its rows: (samples, 2)."""
    shards, rows = _layout(tuple((p.shard, p.start, p.stop) for p in pieces))
    groups = range(int(shards[0]) // SHARDS_PER_HASH, int(shards[-1]) // SHARDS_PER_HASH + 1)
    hashes = b"".join(_hash(seed, step, group) for group in groups)
    of_shards = np.frombuffer(hashes, "<u4").reshape(-1, 2)
    return mixed(of_shards[shards - groups[0] * SHARDS_PER_HASH] + rows)


@lru_cache(maxsize=256)
def _layout(pieces: tuple[tuple[int, int, int], ...]) -> tuple[NDArray[np.int64], Words]:
    """The shard of each sample, and its row in there: (samples,) and (samples, 1)."""
    shards = [shard for shard, start, stop in pieces for _ in range(start, stop)]
    rows = [row for _, start, stop in pieces for row in range(start, stop)]
    return np.array(shards), np.array(rows, np.uint32)[:, None]


def _hash(seed: int, step: int, group: int) -> bytes:
    """Two words for each of the shards of a group."""
    key = struct.pack("<4q", seed, step, group, DRAWS)
    return hashlib.blake2b(key, digest_size=8 * SHARDS_PER_HASH).digest()


def mixed(x: Words, second: Words | None = None) -> Words:
    """`triple32` in place, `second` added after its first round."""
    other = np.empty_like(x)
    for round_, (shift, factor) in enumerate(ROUNDS):
        np.right_shift(x, np.uint32(shift), out=other)
        np.bitwise_xor(x, other, out=x)
        np.multiply(x, np.uint32(factor), out=x)
        if round_ == 0 and second is not None:
            np.add(x, second, out=x)
    np.right_shift(x, np.uint32(LAST_SHIFT), out=other)
    return np.bitwise_xor(x, other, out=x)


def mixed_tensor(x: Tensor, second: Tensor) -> Tensor:
    """The same of int32; the sign that a shift draws in is masked out."""
    for round_, (shift, factor) in enumerate(ROUNDS):
        x = x ^ ((x >> shift) & (WORD >> shift) - 1)
        x = x * signed(factor)
        if round_ == 0:
            x = x + second
    return x ^ ((x >> LAST_SHIFT) & (WORD >> LAST_SHIFT) - 1)


@lru_cache(maxsize=4096)
def place_words(index: int, call: int) -> Words:
    """What a call of a layer adds to the keys of all samples: (1, 2)."""
    return np.array([words(index, call, DRAWS)], np.uint32)


def on_cpu(keys: Words, sizes: tuple[int, ...], starts: tuple[int, ...], finish: Finish) -> Tensor:
    """What `finish` makes of the bits of each element: (rows, elements).

    `keys`, (rows, 2), are those of the rows. Each has elements of the given `sizes`, the first of
    them at the coordinates `starts`.
    """
    first, more = table(sizes, starts)
    rows, elements = len(keys), len(first)
    if rows * elements <= BLOCK:
        return finish(_hashed(keys, first, more))
    out = None
    wide = min(elements, BLOCK)
    high = max(1, BLOCK // wide)
    for start in range(0, elements, wide):
        columns = slice(start, start + wide)
        for top in range(0, rows, high):
            some = keys[top : top + high]
            done = finish(_hashed(some, first[columns], None if more is None else more[columns]))
            if out is None:
                out = done.new_empty(rows, elements)
            out[top : top + high, columns] = done
    assert out is not None
    return out


def _hashed(keys: Words, first: Words, more: Words | None) -> Tensor:
    second = keys[:, 1:] if more is None else keys[:, 1:] + more
    return torch.from_numpy(mixed(keys[:, :1] + first, second).view(np.int32))


def on_device(
    keys: Tensor, sizes: tuple[int, ...], starts: tuple[int, ...], finish: Finish
) -> Tensor:
    """The same in tensor code, for any device and any compiler; `keys` are int32."""
    first, more = coordinates(sizes, starts, keys.device)
    second = keys[:, 1:] if more is None else keys[:, 1:] + more
    return finish(mixed_tensor(keys[:, :1] + first, second))


def table(sizes: tuple[int, ...], starts: tuple[int, ...]) -> tuple[Words, Words | None]:
    """`coordinates` on the CPU, kept where they are not many."""
    elements = 1
    for size in sizes:
        elements *= size
    return (_kept_table if elements <= KEPT_TABLE else _table)(sizes, starts)


def _table(sizes: tuple[int, ...], starts: tuple[int, ...]) -> tuple[Words, Words | None]:
    first, second = coordinates(sizes, starts, torch.device("cpu"))
    return unsigned(first), None if second is None else unsigned(second)


_kept_table = lru_cache(maxsize=64)(_table)


def unsigned(words: Tensor) -> Words:
    """The same 32 bits in NumPy."""
    return words.numpy().view(np.uint32)


def coordinates(
    sizes: tuple[int, ...], starts: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Two words for where each element of a sample is, in order, as int32: (elements,).

    The first holds the last two coordinates, 16 bits each; what does not fit and the coordinates
    before them are in the other one, `None` if there are none. Equal coordinates have equal words,
    whatever the sizes are.
    """
    dims = len(sizes)
    first = torch.zeros([1] * dims, dtype=torch.int32, device=device)
    second = None
    for dim, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        from_last = dims - 1 - dim
        at = torch.arange(start, start + size, dtype=torch.int32, device=device)
        at = at.view([-1 if other == dim else 1 for other in range(dims)])
        if from_last < 2:
            first = first + ((at & (1 << SHORT) - 1) << SHORT * from_last)
            if start + size <= 1 << SHORT:
                continue
            at = at >> SHORT
        far = at * FAR[from_last]
        second = far if second is None else second + far
    first = first.expand(sizes).reshape(-1)
    return first, None if second is None else second.expand(sizes).reshape(-1)


# --- kernel --------------------------------------------------------------------------------------
# Masks of dropout on a device by one kernel, compiled there (torch's jiterator, by NVRTC).
#
# The tensor code of `counter` makes 28 passes over all elements. The kernel makes the same bits in
# one: an element of its output is four bytes, the flags of four neighbours. It takes integers of 32
# bits alone, so the type of the activation plays no part. Where the kernel cannot be compiled, or
# makes other bits in a first trial, the tensor code stays, with a warning.


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
    *far_starts, top, left_column = (0, 0, *starts)
    elements = len(keys) * high * wide
    for size in far:
        elements *= size
    kernel = _kernel_on(keys.device)
    is_near = max(top + high, left_column + wide) <= 1 << SHORT
    if kernel is None or not is_near or not 0 < elements < MOST_ELEMENTS:
        return None
    return _flags(kernel, keys, (far, high, wide), (far_starts, top, left_column), below).view(
        len(keys), *sizes
    )


def _flags(kernel: Kernel, keys: Tensor, sizes: Any, starts: Any, below: int) -> Tensor:
    far, high, wide = sizes
    far_starts, top, left_column = starts
    first, second = keys.view(-1, 2, 1, 1, 1).unbind(1)
    if any(size > 1 or start for size, start in zip(far, far_starts, strict=True)):
        second = second + _far(tuple(far), tuple(far_starts), keys.device)
    row = _steps(top << SHORT, high, 1 << SHORT, keys.device).view(-1, 1)
    columns = -(-wide // FLAGS)
    column = _steps(left_column, columns, FLAGS, keys.device)
    flags = kernel(first, second, row, column, below=below).contiguous().view(torch.bool)
    return flags if wide == columns * FLAGS else flags[..., :wide]


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
    _, second = coordinates((*sizes, 1, 1), (*starts, 0, 0), torch.device("cpu"))
    assert second is not None
    return second.view(-1, 1, 1).to(device)


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
    flags = _flags(kernel, keys, ([far], high, wide), ([2], 1, 3), 1 << 29)
    wanted = on_device(keys, TRIAL, (2, 1, 3), lambda bits: bits.ge(1 << 29))
    return torch.equal(flags.reshape(2, -1), wanted)
