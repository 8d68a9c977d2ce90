"""Whether every rank has the same data: compared once, before the first update, by both engines.

Which rank reads which samples is arithmetic over one data set, so each rank must have the whole of
it, in one order. Compared are what it is, its length, and a digest of what is at hand: of arrays
at most `DIGEST_BYTES`, rows from the first to the last; of a data set by number five samples; of
what makes batches by itself what it gives first. Of a stream only what it is: each of its shards
is read by one rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allranks.errors import RequestError
from allranks.training.engine.structures import Walker

DIGEST_BYTES = 16 << 20
TEXT = "the order of a set of texts follows this"
HASHES = "hash of a text"
SAMPLES = "samples"


ARRAYS = Walker(lambda value: isinstance(value, np.ndarray))


def digest_of(
    value: Any, walker: Walker = ARRAYS, as_numpy: Callable[[Any], Any] = lambda array: array
) -> str:
    """A digest of a sample, a batch, or arrays in any structure; other objects go by their kind.

    `walker` knows arrays of other kinds, of which `as_numpy` makes those of NumPy. Of an object
    only the arrays in it count: the rest may be another on each rank, as a path or a time.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in _parts(value, walker, as_numpy):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any, walker: Walker, as_numpy: Callable[[Any], Any]) -> Iterator[bytes]:
    if walker.is_array(value):
        value = as_numpy(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        yield f"{value.dtype}{value.shape}".encode() + value.tobytes()
    elif isinstance(value, Mapping):
        for key in value:
            yield repr(key).encode()
            yield from _parts(value[key], walker, as_numpy)
    elif isinstance(value, (list, tuple)):
        yield f"{len(value)}".encode()
        for item in value:
            yield from _parts(item, walker, as_numpy)
    elif isinstance(value, (str, bytes, bool, int, float, complex, np.generic, type(None))):
        yield repr(value).encode()
    elif callable(array := getattr(value, "numpy", None)):
        yield from _parts(array(), walker, as_numpy)
    elif callable(image := getattr(value, "tobytes", None)):
        yield image()
    else:
        yield type(value).__name__.encode()
        for array in walker.arrays_in(value):
            yield from _parts(array, walker, as_numpy)


def rows_to_compare(rows: int, size_bytes: int) -> NDArray[np.int64]:
    """Of so many rows of so many bytes together: all, or some that are evenly apart."""
    count = rows if size_bytes <= DIGEST_BYTES else max(2, rows * DIGEST_BYTES // size_bytes)
    return np.linspace(0, rows - 1, count).astype(np.int64)


def samples_to_compare(samples: int) -> list[int]:
    """The numbers of five samples from the first to the last."""
    return sorted({part * (samples - 1) // 4 for part in range(5)})


def identity(kind: str, samples: int | None, digest: str) -> str:
    """What all ranks must have in common, as a text; `samples` is `None` where nobody knows."""
    return json.dumps({"kind": kind, SAMPLES: samples, "digest": digest, HASHES: hash(TEXT)})


def facts_of(text: str) -> dict[str, Any]:
    """What is compared of an `identity`."""
    return {name: value for name, value in json.loads(text).items() if name != HASHES}


def check_same(name: str, identities: list[str]) -> None:
    """Raise `RequestError` unless the data `name` is the same on all ranks, by their identities."""
    ranks = [json.loads(text) for text in identities]
    same = [facts_of(text) for text in identities]
    other = next((rank for rank, facts in enumerate(same) if facts != same[0]), None)
    if other is None:
        return
    why = "which rank reads which samples is arithmetic over one data set, the same on every rank"
    do = "return the whole data on every rank, and do not cut it by rank: the engine does that"
    if len({rank[HASHES] for rank in ranks}) > 1:
        do += "; or, if it follows the order of a set, start all ranks with PYTHONHASHSEED=0"
    raise RequestError(
        asked=f"{name}() of the task on {len(ranks)} ranks",
        found=_difference(same[0], same[other], other),
        why=why,
        do=f"{do}; seed what is drawn there",
    )


def _difference(first: dict[str, Any], other: dict[str, Any], rank: int) -> str:
    if other["kind"] != first["kind"]:
        return f"{first['kind']} on rank 0, {other['kind']} on rank {rank}"
    if other[SAMPLES] != first[SAMPLES]:
        return f"{first[SAMPLES]} samples on rank 0, {other[SAMPLES]} on rank {rank}"
    many = "" if other[SAMPLES] is None else f" ({other[SAMPLES]} on each)"
    return f"other samples on rank {rank} than on rank 0{many}"
