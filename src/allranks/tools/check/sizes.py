"""The size of a difference: of two numbers, and of two tensors relative to the norms of a stage.

A tensor counts as at least a small part of the usual norm of its stage, so that the rounding of a
true zero is no difference. Tensors that never change (a mask of -inf, a table of positions, a
count) do not enter the usual norm. Elements that are not finite must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
TINY = 1e-300
MOST_TIMES = 16


def norm(tensor: Array) -> float:
    """The norm of the finite elements of a tensor."""
    wide = tensor.astype(np.float64).ravel()
    return float(np.linalg.norm(wide[np.isfinite(wide)]))


def tensor_difference(ours: Array, theirs: Array, mask: Array | None = None) -> float:
    """The norm of the difference where `mask` is set; infinite if only one side is finite."""
    if ours.shape != theirs.shape:
        return math.inf
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    if mask is not None:
        a, b = a[mask], b[mask]
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return math.inf
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return math.inf
    return float(np.linalg.norm((a[finite] - b[finite]).ravel()))


def number_difference(ours: Any, theirs: Any, scale: float) -> float:
    """Their relative difference: 0 for texts, infinities and NaN that are the same."""
    try:
        a, b = float(ours), float(theirs)
    except (TypeError, ValueError):
        return 0.0 if ours == theirs else math.inf
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(b), scale, TINY)


def factors(size: int) -> Iterator[tuple[float, str]]:
    """Numbers that a result may be multiplied by in error, and what to call them."""
    ranks = f"{size}, the number of ranks,"
    yield size, f"{ranks} times too large: a sum where a mean is meant, or a part counted by all"
    yield 1 / size, f"{ranks} times too small: divided once too often, or a mean for a sum"
    yield size**2, f"{size} x {size}, the number of ranks twice, times too large"
    yield 1 / size**2, f"{size} x {size}, the number of ranks twice, times too small"
    for times in range(2, MOST_TIMES + 1):
        yield times, f"{times} times too large"
        yield 1 / times, f"{times} times too small"
    yield -1, "of the other sign"


def usual_sizes(
    stage: str, wanted: Mapping[str, Array], start: Mapping[str, Array], small: float, floor: float
) -> dict[str, float]:
    """The scale by which the difference of each tensor of a stage is divided.

    `start` holds the tensors of the stage before the first step: elements that have not changed
    since are left out. A gradient with a norm below `floor` counts as zero.
    """
    norms = {}
    for name, tensor in wanted.items():
        changed = _changed(tensor, start.get(name))
        norms[name] = norm(tensor if changed is None else tensor[changed])
    moving = [norms[n] for n, t in wanted.items() if norms[n] > 0 and _is_real(t)]
    total = math.sqrt(math.fsum(length**2 for length in moving))
    usual = float(np.median(moving)) if moving and stage == "buffer" else total
    least = floor if "gradient" in stage else 0.0
    return {
        name: max(length, small * usual if _is_real(wanted[name]) else 0.0, least, TINY)
        for name, length in norms.items()
    }


def _changed(tensor: Array, start: Array | None) -> Array | None:
    """A mask of the elements that have changed; `None` if there is nothing to compare with."""
    if start is None or start.shape != tensor.shape:
        return None
    with np.errstate(invalid="ignore"):
        changed: Array = (tensor != start) & ~(np.isnan(tensor) & np.isnan(start))
    return changed


def _is_real(tensor: Array) -> bool:
    return bool(np.issubdtype(tensor.dtype, np.floating))


@dataclass
class Rounding:
    """Elements of weights whose gradient was only rounding in some step.

    Examples are a bias before BatchNorm, and the third of a packed attention bias that belongs to
    the keys. AdamW turns rounding into steps of any size, so such weights prove nothing.
    """

    only: dict[str, Array] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def add(
        self, ours: Mapping[str, Array], theirs: Mapping[str, Array], limit: float, floor: float
    ) -> None:
        """Add the gradients of a step; `limit` is relative to the norm of all of them."""
        total = math.sqrt(math.fsum(norm(tensor) ** 2 for tensor in theirs.values()))
        least = limit * max(total, floor)
        for name, b in theirs.items():
            a = ours.get(name, b)
            if a.shape != b.shape:
                continue
            larger = np.maximum(np.abs(a), np.abs(b))
            small = (larger > 0) & (larger <= least)
            whole = 0 < norm(b) <= least
            if whole or small.any():
                mask = np.ones(b.shape, bool) if whole else small
                self.only[name] = self.only.get(name, np.zeros(b.shape, bool)) | mask
                self.sizes[name] = b.size

    def mask(self, name: str) -> Array | None:
        """A mask of the elements of a weight that are compared; `None` for all."""
        return ~self.only[name] if name in self.only else None

    def in_words(self) -> tuple[str, ...]:
        """Which weights are passed over: whole, or so many of their elements."""
        counts = {name: int(mask.sum()) for name, mask in sorted(self.only.items())}
        return tuple(
            name if n == self.sizes[name] else f"{name} ({n} of {self.sizes[name]} elements)"
            for name, n in counts.items()
        )
