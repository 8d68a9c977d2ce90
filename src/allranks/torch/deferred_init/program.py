"""A recorded initialisation: which operators wrote which storages, in program order.

A tensor is a view of a storage, so views, transpositions and `param.data = …` need no step of their
own. Any storage can be computed again, alone: the last write that left nothing of what was there
before, the writes after it, and in turn what those read. A step that draws has the state of its
generator with it. `Recorder` writes a program, `Recorded` replays it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allranks.torch.data.collate import tensors_of_arguments


class NotRecordable(Exception):
    """What a program does with a tensor that cannot be recorded: the model is built whole then."""


@dataclass(frozen=True, slots=True)
class View:
    """What a tensor shows of the storage of that number."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @staticmethod
    def of(tensor: Tensor, storage: int) -> View:
        return View(
            storage,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor; it shares the memory of `storage`."""
        shown = torch.empty(0, dtype=self.dtype, device=storage.device)
        shown.set_(storage, self.offset, self.size, self.stride)
        shown = shown.conj() if self.conj else shown
        return torch._neg_view(shown) if self.neg else shown

    def covers(self, size_bytes: int) -> bool:
        """Whether it shows each number of a storage of that size, once."""
        step = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size != 1:
                if stride != step:
                    return not size_bytes
                step *= size
        return self.offset == 0 and step * self.dtype.itemsize == size_bytes


@dataclass(frozen=True, slots=True)
class Draw:
    """The state of a generator before a step drew from it."""

    generator: torch.Generator
    state: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One call of an operator; views stand for the tensors that are not there.

    `reads` are the storages whose numbers it needs, also those that it changes in part; `writes`
    those that it changes or makes. `made` are its results in new storages.
    """

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    made: tuple[View | None, ...]
    draw: Draw | None
    default_dtype: torch.dtype


Give = Callable[[int, torch.UntypedStorage], None]


class Program:
    """The steps, and the size and the device of every storage."""

    def __init__(self) -> None:
        self.steps: dict[int, Step] = {}
        self.writes: dict[int, list[int]] = {}
        self.size_bytes: dict[int, int] = {}
        self.device: dict[int, torch.device] = {}
        self._end = 0

    def add(self, step: Step) -> None:
        self.steps[self._end] = step
        for storage in step.writes:
            self.writes.setdefault(storage, []).append(self._end)
        self._end += 1

    def needed(self, storages: Iterable[int]) -> list[int]:
        """The numbers of the steps, in order, that make these storages what they are now."""
        todo, found = [(storage, self._end) for storage in storages], set()
        while todo:
            storage, before = todo.pop()
            writes = self.writes[storage]
            at = bisect_left(writes, before)
            if at and (number := writes[at - 1]) not in found:
                found.add(number)
                todo += [(read, number) for read in self.steps[number].reads]
        return sorted(found)

    def keep_only(self, storages: Collection[int]) -> None:
        """Let go of the steps that none of these storages needs."""
        kept = set(self.needed(storages))
        self.steps = {number: step for number, step in self.steps.items() if number in kept}
        self.writes = {
            storage: [number for number in numbers if number in kept]
            for storage, numbers in self.writes.items()
        }

    def cost(self, numbers: Iterable[int]) -> int:
        """The bytes that these steps write."""
        return sum(self.size_bytes[s] for number in numbers for s in self.steps[number].writes)

    def replay(self, storages: Collection[int], give: Give) -> None:
        """Compute these storages; each is given away at its last step, then let go of.

        Generators are left as they were. Raises `NotRecordable` where an operator gives a result
        of another layout than it was said to give.
        """
        numbers = self.needed(storages)
        last: dict[int, int] = {}
        for number in numbers:
            step = self.steps[number]
            last.update(dict.fromkeys(step.reads | step.writes, number))
        ending: dict[int, list[int]] = {}
        for storage, number in last.items():
            ending.setdefault(number, []).append(storage)
        held: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad(), _kept_generators(self.steps[number] for number in numbers):
            for number in numbers:
                self._carry_out(self.steps[number], held)
                for storage in ending.get(number, ()):
                    memory = held.pop(storage)
                    if storage in storages:
                        give(storage, memory)
                    del memory

    def _carry_out(self, step: Step, held: dict[int, torch.UntypedStorage]) -> None:
        for storage in (step.reads | step.writes) - held.keys():
            if all(view is None or view.storage != storage for view in step.made):
                size, device = self.size_bytes[storage], self.device[storage]
                held[storage] = torch.UntypedStorage(size, device=device)

        def real(value: Any) -> Any:
            return value.on(held[value.storage]) if isinstance(value, View) else value

        args, kwargs = map_views(real, step.args), map_views(real, step.kwargs)
        if step.draw is not None:
            step.draw.generator.set_state(step.draw.state)
        with _default_dtype(step.default_dtype):
            results = list(tensors_of_arguments(step.operator(*args, **kwargs)))
        del args, kwargs
        for view in step.made:
            result = results.pop(0)
            if view is None:
                continue
            memory = result.untyped_storage()
            same = held.setdefault(view.storage, memory).data_ptr() == memory.data_ptr()
            if not same or View.of(result, view.storage) != view:
                raise NotRecordable(f"{step.operator} gives a result of another layout than said")


def map_views(change: Callable[[Any], Any], value: Any) -> Any:
    """The arguments of an operator, with `change` applied to what is no list, tuple or dict."""
    if isinstance(value, (list, tuple)):
        return type(value)(map_views(change, item) for item in value)
    if isinstance(value, dict):
        return {key: map_views(change, item) for key, item in value.items()}
    return change(value)


@contextmanager
def _kept_generators(steps: Iterable[Step]) -> Iterator[None]:
    generators = {id(step.draw.generator): step.draw.generator for step in steps if step.draw}
    states = [(generator, generator.get_state()) for generator in generators.values()]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@contextmanager
def _default_dtype(kind: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
