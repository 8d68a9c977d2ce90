"""Named tensors of steps: what a rank records, and the first that differs between two worlds.

On ranks, `recorded` makes plain tensors of what a step function returned. A `DTensor`, as in the
parameters of FSDP2, is gathered there by `full_tensor`. In the process of pytest, `whole` joins the
parts of all ranks, and `first_difference` compares the steps of two worlds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from allranks.errors import RequestError
from allranks.tools.check.sizes import Array, norm, tensor_difference

COPY, ALONG, AT, ROWS = "copy", "along", "at", "rows"
INPUT = "input of reduction "
Index = tuple[slice, ...]


@dataclass(frozen=True)
class TestedPart:
    """A tensor of one rank, and how the whole is made of those of all ranks.

    `kind` is COPY: each rank has the whole; ALONG: parts along `dim`, in the order of ranks; AT:
    the part at `index` of a whole of `shape`; ROWS: rows of which the order does not matter.
    """

    __test__ = False  # pytest does not collect it

    tensor: Tensor
    kind: str = COPY
    dim: int = 0
    index: Index = ()
    shape: tuple[int, ...] = ()


Rule = tuple[bool, str, str]  # whether it is broken, what was found, what to do


def check(request: str, why: str, *rules: Rule) -> None:
    """Raise `RequestError` for the first broken rule."""
    for is_broken, words, do in rules:
        if is_broken:
            raise RequestError(asked=request, found=words, why=why, do=do)


def shard(
    tensor: Any, dim: int = 0, *, index: Index | None = None, shape: Sequence[int] = ()
) -> TestedPart:
    """This rank's part of a tensor, for a step function to return; the wholes are compared.

    The parts follow each other along `dim` in the order of ranks, and may differ in length. With
    `index`, a tuple of slices, this part lies at `index` in a whole of `shape`. Several ranks may
    hold one element if they agree on it. It communicates nothing.
    """
    value = torch.as_tensor(tensor)
    if index is None:
        return TestedPart(value, ALONG, dim=dim)
    return TestedPart(value, AT, index=tuple(index), shape=tuple(shape))


def samples(rows: Any) -> TestedPart:
    """This rank's samples, one a row, for a step function to return.

    The samples of all ranks are compared as a multiset: each must be there as often as on one rank,
    in any order. It communicates nothing.
    """
    return TestedPart(torch.as_tensor(rows), ROWS)


def recorded(values: Any, step: int, rank: int, size: int, store: Any) -> dict[str, TestedPart]:
    """The named tensors that a step function returned, by flat names, detached and on the CPU.

    Every rank calls it: `DTensor`s are gathered. Raises `RequestError` for anything else.
    """
    is_mapping = isinstance(values, Mapping)
    words = f"the step function returned {'an empty mapping' if is_mapping else repr(values)[:80]}"
    do = 'return {"loss": loss, …} with losses, gradients and weights'
    request, why = f"the named tensors of step {step}", "what is compared are tensors with names"
    check(request, why, (not is_mapping or not values, words, do))
    flat = dict(_flat(values, ""))
    gathered = [name for name, value in flat.items() if isinstance(value, DTensor)]
    store.set(f"gathered-{step}/{rank}", json.dumps(gathered))
    for other in range(size if gathered else 0):  # to gather what another does not never ends
        theirs = json.loads(store.get(f"gathered-{step}/{other}"))
        check_names(rank, other, gathered, theirs)
    return {name: _part(value) for name, value in flat.items()}


def _flat(values: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Values by names as `layer.weight`, without `None`, as of a gradient that is not there."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    elif isinstance(values, list | tuple):
        for number, value in enumerate(values):
            yield from _flat(value, f"{name}.{number}")
    elif values is not None:
        is_wrong = not isinstance(
            values, TestedPart | Tensor | np.ndarray | np.generic | int | float
        )
        why = "tensors, arrays and numbers are compared, and mappings and lists of them"
        words = f"{type(values).__name__}: {values!r:.80}"
        check(f"the tensor {name!r}", why, (is_wrong, words, "return its tensors by name"))
        yield name, values


def check_names(a: int, b: int, of_a: Sequence[str], of_b: Sequence[str]) -> None:
    """Refuse ranks `a` and `b` that returned tensors of other names, or in another order."""
    differ = [f"{n!r} on rank {a} alone" for n in of_a if n not in of_b]
    differ += [f"{n!r} on rank {b} alone" for n in of_b if n not in of_a]
    words = ", ".join(differ) or f"another order on rank {b} than on rank {a}"
    why = "each tensor is compared under its name, as a copy or a part on every rank"
    do = "return the same names on all ranks; of a rank without a part, an empty shard"
    check("to compare the named tensors of all ranks", why, (of_a != of_b, words, do))


def _part(value: Any) -> TestedPart:
    if isinstance(value, TestedPart):
        return TestedPart(_plain(value.tensor), value.kind, value.dim, value.index, value.shape)
    return TestedPart(_plain(value))


def _plain(value: Any) -> Tensor:
    """A copy that owns its memory: the next step changes weights in place."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, Tensor):
        value = torch.as_tensor(value)
    plain: Tensor = value.detach().to("cpu", copy=True)
    return plain.resolve_conj().resolve_neg().contiguous()


def whole(parts: Sequence[TestedPart]) -> Tensor | None:
    """The tensor of which each rank has a part; `None` if each has a copy of its own."""
    first = parts[0]
    if first.kind == COPY:
        return None
    if first.kind == ROWS:
        return _sorted_rows(torch.cat([part.tensor for part in parts]))
    if first.kind == ALONG:
        return torch.cat([part.tensor for part in parts], dim=first.dim)
    return _placed(parts)


def _placed(parts: Sequence[TestedPart]) -> Tensor:
    """Parts at their indices. What no rank holds, or two hold differently, is not a number."""
    first = parts[0].tensor
    is_real = first.is_floating_point() or first.is_complex()
    result = torch.full(parts[0].shape, torch.nan, dtype=first.dtype if is_real else torch.float64)
    covered = torch.zeros(parts[0].shape, dtype=torch.bool)
    for part in parts:
        here, was = result[part.index], covered[part.index]
        differs = was & (here != part.tensor)
        result[part.index] = torch.where(differs, torch.nan, part.tensor.to(result.dtype))
        covered[part.index] = True
    return result


def _sorted_rows(rows: Tensor) -> Tensor:
    """The rows in the order of their values."""
    if rows.dim() == 0 or not len(rows):
        return rows
    flat = rows.reshape(len(rows), -1)
    keys = flat.to(torch.float64).numpy().T[::-1]
    return rows[torch.from_numpy(np.lexsort(keys).copy())] if len(keys) else rows


# --- comparing -----------------------------------------------------------------------------------
# A difference is a norm relative to that of the tensor. A tensor that is nearly zero, as a gradient
# that is only rounding, counts as at least a thousandth of the largest of its step.


IN_64_BITS = 1e-10
SMALL = 1e-3  # of the largest root mean square in a step


class NotSame(AssertionError):
    """Another number of ranks gave other tensors: the first one, and its cause.

    `step`, `tensor`, `ranks` (those that disagree), `cause` and its `kind` ("" if unknown) are for
    programs.
    """

    def __init__(self, difference: TensorDifference, kind: str, cause: str, text: str) -> None:
        super().__init__(text)
        self.step, self.tensor, self.ranks = difference.step, difference.tensor, difference.ranks
        self.kind, self.cause = kind, cause


@dataclass(frozen=True)
class Limits:
    """The largest difference that counts as equal. `tolerance` overrides that of the type."""

    bitwise: bool = False
    tolerance: float | None = None

    def of(self, tensor: Tensor) -> float:
        """1e-10 in 64 bits, the square root of a rounding in others, no difference of integers."""
        if self.bitwise or not _is_real(tensor):
            return 0.0
        if self.tolerance is not None:
            return self.tolerance
        rounding: float = torch.finfo(tensor.dtype).eps ** 0.5
        return IN_64_BITS if tensor.dtype in (torch.float64, torch.complex128) else rounding


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that differs: by `size` of its norm, on `ranks` (none: the whole does)."""

    step: int
    tensor: str
    size: float
    limit: float
    ranks: tuple[int, ...]
    text: str


class RecordedWorld:
    """The steps that the ranks of one world recorded. Raises `RequestError` if names differ."""

    def __init__(self, ranks: Sequence[Sequence[dict[str, TestedPart]]]) -> None:
        self.ranks, self.size = ranks, len(ranks)
        for steps in zip(*ranks, strict=True):
            for rank, parts in enumerate(steps):
                check_names(0, rank, list(steps[0]), list(parts))

    def names(self, step: int) -> list[str]:
        return list(self.ranks[0][step])

    def tensors(self, step: int, name: str) -> list[Tensor]:
        """The copy of each rank, or the one tensor that their parts are together."""
        parts = [steps[step][name] for steps in self.ranks]
        shapes = {tuple(part.tensor.shape): rank for rank, part in enumerate(parts)}
        words = ", ".join(f"{shape} on rank {rank}" for shape, rank in shapes.items())
        is_copy, kinds = parts[0].kind == COPY, {part.kind for part in parts}
        request = f"to compare {name!r} of step {step}"
        do = f'"{name}": shard(…) for a part of it, or samples(…) for rows in any order'
        check(
            request,
            "a tensor is a copy of the whole on each rank, or a part, marked in one way on all",
            (len(kinds) > 1, f"{', '.join(sorted(kinds))} on different ranks", do),
            (is_copy and len(shapes) > 1, words, do),
        )
        try:
            joined = whole(parts)
        except (RuntimeError, IndexError) as error:
            why, do = f"the parts make no tensor: {error}", "give the right dim, or index and shape"
            raise RequestError(asked=request, found=words, why=why, do=do) from error
        return [part.tensor for part in parts] if joined is None else [joined]


def first_difference(
    reference: RecordedWorld, candidate: RecordedWorld, limits: Limits
) -> TensorDifference | None:
    """The first tensor, in the order in which a step returns them, that differs too much."""
    for step in range(len(reference.ranks[0])):
        names = reference.names(step)
        alone = ", ".join(map(repr, sorted({*names} ^ {*candidate.names(step)})))
        words = f"{alone} in one of them alone" if alone else "another order"
        check(
            f"to compare step {step} on {reference.size} and on {candidate.size} ranks",
            "each tensor is compared under its name",
            (candidate.names(step) != names, words, "return the same names on any number of ranks"),
        )
        wholes = {name: reference.tensors(step, name)[0] for name in names}
        least = SMALL * max((_root_mean_square(t) for t in wholes.values()), default=0.0)
        for name, true in wholes.items():
            tensors = candidate.tensors(step, name)
            sizes = [difference_of(true, tensor, least, limits) for tensor in tensors]
            wrong = [rank for rank, (size, limit, _) in enumerate(sizes) if size > limit]
            if wrong:
                size, limit, text = max(sizes[rank] for rank in wrong)
                ranks = tuple(wrong) if len(tensors) > 1 or candidate.size == 1 else ()
                return TensorDifference(step, name, size, limit, ranks, text)
    return None


def difference_of(
    true: Tensor, tensor: Tensor, least: float, limits: Limits
) -> tuple[float, float, str]:
    """How large the difference is, how large it may be, and a word on what differs."""
    limit = limits.of(tensor)
    if true.shape != tensor.shape or true.dtype != tensor.dtype:
        shapes = [f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (true, tensor)]
        return float("inf"), limit, f"{shapes[1]} in the place of {shapes[0]}"
    if not true.numel():
        return 0.0, limit, ""
    is_equal = _same_bits(true, tensor) if limits.bitwise else bool((true == tensor).all())
    if is_equal:
        return 0.0, limit, ""
    count = int((true != tensor).sum())
    text = f"{count} of {true.numel()} elements differ"
    if not _is_real(true):
        return count / true.numel(), limit, text
    a, b = _numbers(true), _numbers(tensor)
    size = tensor_difference(a, b)
    scale = max(norm(a), least * true.numel() ** 0.5)
    size = size / scale if scale else float("inf") if size else 0.0
    if limits.bitwise:
        return max(size, float(torch.finfo(torch.float64).tiny)), limit, f"{text} in their bits"
    return size, limit, text


def _numbers(tensor: Tensor) -> Array:
    """In 64 bits; a complex number is two of them."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().numpy()


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _same_bits(true: Tensor, tensor: Tensor) -> bool:
    a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (true, tensor))
    return torch.equal(a, b)


def _root_mean_square(tensor: Tensor) -> float:
    return norm(_numbers(tensor)) / max(1, tensor.numel()) ** 0.5 if _is_real(tensor) else 0.0
