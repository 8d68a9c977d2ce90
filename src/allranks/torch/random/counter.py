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
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allranks.strategies.shards import Micro
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
    first, rest = table(sizes, starts)
    rows, elements = len(keys), len(first)
    if rows * elements <= BLOCK:
        return finish(_hashed(keys, first, rest))
    out = None
    wide = min(elements, BLOCK)
    high = max(1, BLOCK // wide)
    for left in range(0, elements, wide):
        own = slice(left, left + wide)
        for top in range(0, rows, high):
            some = keys[top : top + high]
            done = finish(_hashed(some, first[own], None if rest is None else rest[own]))
            if out is None:
                out = done.new_empty(rows, elements)
            out[top : top + high, own] = done
    assert out is not None
    return out


def _hashed(keys: Words, first: Words, rest: Words | None) -> Tensor:
    second = keys[:, 1:] if rest is None else keys[:, 1:] + rest
    return torch.from_numpy(mixed(keys[:, :1] + first, second).view(np.int32))


def on_device(
    keys: Tensor, sizes: tuple[int, ...], starts: tuple[int, ...], finish: Finish
) -> Tensor:
    """The same in tensor code, for any device and any compiler; `keys` are int32."""
    first, rest = coordinates(sizes, starts, keys.device)
    second = keys[:, 1:] if rest is None else keys[:, 1:] + rest
    return finish(mixed_tensor(keys[:, :1] + first, second))


def table(sizes: tuple[int, ...], starts: tuple[int, ...]) -> tuple[Words, Words | None]:
    """`coordinates` on the CPU, kept where they are not many."""
    elements = 1
    for size in sizes:
        elements *= size
    return (_kept_table if elements <= KEPT_TABLE else _table)(sizes, starts)


def _table(sizes: tuple[int, ...], starts: tuple[int, ...]) -> tuple[Words, Words | None]:
    first, rest = coordinates(sizes, starts, torch.device("cpu"))
    return unsigned(first), None if rest is None else unsigned(rest)


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
    rest = None
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
        rest = far if rest is None else rest + far
    first = first.expand(sizes).reshape(-1)
    return first, None if rest is None else rest.expand(sizes).reshape(-1)
