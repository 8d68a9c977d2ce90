"""What a reduction must give, bit for bit: numpy along the tree of `reduction_tree`, pair by pair.

bfloat16 lies in arrays of uint16. Values of 16 bits are added as float32 and rounded at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allranks.strategies.reduction_tree import split

Array = np.ndarray[Any, Any]
DTYPES: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int8": np.int8,
    "uint8": np.uint8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
}
QUIET_NAN_BFLOAT16 = 0x7FC0


def merges_of(leaves: int) -> bytes:
    """How many pairs of the tree are complete after each leaf: 4 leaves, 0 1 0 2."""
    counts = [0] * leaves

    def visit(low: int, high: int) -> None:
        if high - low > 1:
            middle = split((low, high))
            visit(low, middle)
            visit(middle, high)
            counts[high - 1] += 1

    visit(0, leaves)
    return bytes(counts)


def reduced(type_name: str, op: str, given: Sequence[Array]) -> Array:
    """The reduction of what the ranks give, each an array of the same length."""

    def below(low: int, high: int) -> Array:
        if high - low == 1:
            return given[low]
        middle = split((low, high))
        return _combined(type_name, op, below(low, middle), below(middle, high))

    with np.errstate(all="ignore"):
        total = below(0, len(given))
        return _divided(type_name, total, len(given)) if op == "mean" else total


def same_bits(type_name: str, found: Array, wanted: Array) -> bool:
    """Whether they are equal, where any two values that are no numbers are."""
    if found.tobytes() == wanted.tobytes():
        return True
    if type_name == "bfloat16":
        left, right = _wide(type_name, found), _wide(type_name, wanted)
    else:
        left, right = found, wanted
    if left.dtype.kind != "f":
        return False
    none = np.isnan(left)
    return bool((none == np.isnan(right)).all()) and (
        found[~none].tobytes() == wanted[~none].tobytes()
    )


def _combined(type_name: str, op: str, left: Array, right: Array) -> Array:
    a, b = _wide(type_name, left), _wide(type_name, right)
    if op in ("sum", "mean"):
        value = a + b
    elif op == "product":
        value = a * b
    else:
        keeps = a > b if op == "max" else a < b
        value = np.where(keeps | (a != a), a, b)
    return _narrow(type_name, value)


def _divided(type_name: str, total: Array, by: int) -> Array:
    wide = _wide(type_name, total)
    if wide.dtype.kind == "f":
        return _narrow(type_name, wide / wide.dtype.type(by))
    quotient = wide.astype(np.int64) // by
    rest = wide.astype(np.int64) - quotient * by
    return (quotient + ((quotient < 0) & (rest != 0))).astype(wide.dtype)  # towards zero, as C


def _wide(type_name: str, values: Array) -> Array:
    if type_name == "float16":
        return values.astype(np.float32)
    if type_name == "bfloat16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values


def _narrow(type_name: str, values: Array) -> Array:
    if type_name == "float16":
        return values.astype(np.float16)
    if type_name == "bfloat16":
        bits = values.view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(QUIET_NAN_BFLOAT16), rounded)
    return values
