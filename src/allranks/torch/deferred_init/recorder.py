"""Records what a program does with tensors, while the tensors have no memory.

Under the mode, every tensor that is made lies on the meta device, and each operator that makes or
changes one is written down. What must be exact now is: random operators are carried out on scratch
memory of their size, so that generators advance as in one process, draw by draw; where a number is
asked for (`.item()`, `if (weight > 0).any()`, a result whose shape its values decide), what it
depends on is computed. Tensors that somebody else made (from NumPy, from a file) stay what they
are, and enter the program as constants.

Torch's own `FakeTensorMode` knows shapes only, and its generators stand still.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # public: the docs name this path

from allranks.torch.data.collate import map_arguments, tensors_of_arguments
from allranks.torch.deferred_init.arguments import (
    KNOWN_LAYOUT,
    LIKE,
    OVERWRITES,
    STORAGE_OF,
    address_of,
    bits_of,
    device_of,
    generator_of,
    is_meta,
    overwritten_by,
    placed,
    says_meta,
    snapshot,
    twin,
    written_by,
)
from allranks.torch.deferred_init.in_blocks import draw_in_blocks, is_drawn_in_blocks
from allranks.torch.deferred_init.program import (
    Draw,
    NotRecordable,
    Program,
    Step,
    View,
    map_views,
)

CPU, META = torch.device("cpu"), torch.device("meta")
TENSORS = {"Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]"}


class Recorder(TorchDispatchMode):
    """Within, what this thread does with tensors goes into `program`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program = Program()
        self.refused = ""
        self.is_recording = True
        self._storages: list[torch.UntypedStorage] = []  # alive, so that no address is used twice
        self._numbers: dict[int, int] = {}
        self.writes: Counter[int] = Counter()  # what was seen of each storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.is_recording:
            return func(*args, **(kwargs or {}))
        with self.paused():
            try:
                return self._dispatch(func, args, kwargs or {})
            except NotRecordable as refusal:
                raise self.refuse(str(refusal)) from None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, nothing is recorded, and recorded tensors say that they are on meta."""
        before, self.is_recording = self.is_recording, False
        try:
            yield
        finally:
            self.is_recording = before

    def refuse(self, why: str) -> NotRecordable:
        """What is raised where something cannot be recorded; that it was is not forgotten."""
        self.refused = self.refused or why
        return NotRecordable(why)

    def number(self, tensor: Tensor) -> int | None:
        """The number of the storage of a recorded tensor; `None` for any other."""
        if tensor.layout is not torch.strided or not is_meta(tensor):
            return None
        return self._numbers.get(address_of(STORAGE_OF(tensor)))

    def moved(self, tensor: Tensor, before: int | None) -> None:
        """A tensor shows another storage than `before`: what was written of it counts there too."""
        now = self.number(tensor)
        if now is not None and before is not None and now != before:
            self.writes[now] += self.writes[before]

    def view(self, tensor: Tensor) -> View | None:
        number = self.number(tensor)
        return None if number is None else View.of(tensor, number)

    def device_of(self, tensor: Tensor) -> torch.device:
        """Where a recorded tensor would be."""
        number = self.number(tensor)
        return device_of(tensor) if number is None else self.program.device[number]

    def values(self, value: Any) -> Any:
        """The same arguments with real tensors for the recorded ones, as they are now: copies."""
        wanted = [t for t in tensors_of_arguments(value) if self.number(t) is not None]
        held: dict[int, torch.UntypedStorage] = {}
        views = {id(tensor): self.view(tensor) for tensor in wanted}
        self.program.replay({view.storage for view in views.values() if view}, held.__setitem__)
        real = {key: view.on(held[view.storage]) for key, view in views.items() if view}
        return map_arguments(lambda tensor: real.get(id(tensor), tensor), value)

    def added(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A tensor on meta whose storage is new."""
        storage = STORAGE_OF(tensor)
        number = self._numbers[address_of(storage)] = len(self._storages)
        self._storages.append(storage)
        self.program.device[number] = device
        self.program.size_bytes[number] = storage.nbytes()
        return tensor

    def write(self, tensor: Tensor, operator: Callable[[Tensor], Any]) -> None:
        """Record that `operator` overwrites all of a recorded tensor."""
        self._add(operator, (tensor,), {}, [tensor], overwritten=[tensor])

    # --- one operator ---------------------------------------------------------------------

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = list(tensors_of_arguments((args, kwargs)))
        recorded = [t for t in tensors if self.number(t) is not None]
        name = func.overloadpacket.__name__
        if tensors and not recorded:  # `weight[[1, 3]]` takes its index to where `weight` is
            return func(*args, **placed(kwargs, CPU))
        if not tensors and says_meta(kwargs) and name != "scalar_tensor":
            return func(*args, **kwargs)  # the program means it, or it has no number
        if any(is_meta(t) and self.number(t) is None for t in tensors):
            raise NotRecordable(f"{func} reads a tensor of the meta device")
        if kwargs.get("pin_memory"):
            raise NotRecordable(f"{func} asks for pinned memory")
        if not all(str(result.type) in TENSORS for result in func._schema.returns):
            return func(*self.values(args), **self.values(kwargs))
        written = written_by(func, args, kwargs)
        self.writes.update(number for t in written if (number := self.number(t)) is not None)
        if torch.Tag.inplace_view in func.tags:
            if len(recorded) < len(tensors):
                raise NotRecordable(f"{func} mixes recorded tensors and others")
            before = [self.number(tensor) for tensor in written]
            result = func(*args, **kwargs)
            for tensor, number in zip(written, before, strict=True):
                self.moved(tensor, number)
            self._measure(written)
            return result
        if any(self.number(tensor) is None for tensor in written):
            if any(self.number(t) is not None or is_meta(t) for t in written):
                raise NotRecordable(f"{func} writes recorded tensors and others")
            return func(*self.values(args), **self.values(kwargs))
        device = self._device_for(recorded, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, args, kwargs, device)
        if func.namespace not in ("aten", "prims"):  # nobody knows whether it draws
            return self._for_real(func, args, kwargs, device)
        try:
            result = func(*self._on_meta(args), **self._on_meta(kwargs, not tensors))
        except Exception:  # no meta kernel, or a shape that the numbers decide
            return self._for_real(func, args, kwargs, device)
        is_known = not tensors or name in KNOWN_LAYOUT or torch.Tag.pointwise in func.tags
        if not is_known and any(self.number(t) is None for t in tensors_of_arguments(result)):
            return self._for_real(func, args, kwargs, device)
        self._measure(written)
        self._add(func, args, kwargs, written, results=result, device=device)
        return result

    def _device_for(self, recorded: list[Tensor], kwargs: Any) -> torch.device:
        """Where results would be: where they are asked for, or where the first argument is."""
        asked = kwargs.get("device")
        if asked is not None and not says_meta(kwargs):
            return torch.device(asked)
        return self.device_of(recorded[0]) if recorded else CPU

    def _on_meta(self, value: Any, makes: bool = False) -> Any:
        """Arguments for the meta kernel: no number of a real tensor, no other device."""
        found = map_arguments(lambda t: t if self.number(t) is not None else twin(t), value)
        if isinstance(found, dict) and (makes or found.get("device") is not None):
            found["device"] = META
        return found

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
        """Draw now, to advance the generator, and note its state before."""
        generator = generator_of(args, kwargs, device)
        name, tensors = func.overloadpacket.__name__, list(tensors_of_arguments((args, kwargs)))
        draw = Draw(generator, generator.get_state())
        if not tensors:
            real = func(*args, **{**kwargs, "device": device})
        elif (
            (name in OVERWRITES or name in LIKE)
            and len(tensors) == 1
            and not (args[0].is_conj() or args[0].is_neg())
        ):
            if is_drawn_in_blocks(name, args[0], device):
                rest = args[1:], placed(kwargs, device)
                draw_in_blocks(
                    lambda block: func(block, *rest[0], **rest[1]), args[0].numel(), args[0].dtype
                )
                self._add(func, args, kwargs, args[:1], overwritten=args[:1], draw=draw)
                return args[0]
            shape = args[0].shape, args[0].stride()
            scratch = torch.empty_strided(*shape, dtype=args[0].dtype, device=device)
            real = func(scratch, *args[1:], **placed(kwargs, device))
            if name in OVERWRITES:
                self._add(func, args, kwargs, args[:1], overwritten=args[:1], draw=draw)
                return args[0]
        else:
            return self._for_real(func, args, kwargs, device)
        result = self.added(twin(real), device)
        self._add(func, args, kwargs, [], results=result, device=device, draw=draw)
        return result

    def _for_real(self, func: Any, args: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
        """Carry an operator out on real tensors, to see what its results are like.

        Some kernels write what their schema does not say (BatchNorm its running statistics).
        """
        generator = generator_of(args, kwargs, device)
        draw = Draw(generator, generator.get_state())
        real_args, real_kwargs = self.values(args), self.values(placed(kwargs, device))
        given = list(tensors_of_arguments((args, kwargs)))
        changed = list(tensors_of_arguments((real_args, real_kwargs)))
        written = written_by(func, args, kwargs)
        silent = [
            (tensor, real, bits_of(real).clone())
            for tensor, real in zip(given, changed, strict=True)
            if not any(tensor is one for one in written)
        ]
        results = func(*real_args, **real_kwargs)
        for tensor, real, bits in silent:
            if not torch.equal(bits_of(real), bits):
                if self.number(tensor) is None:
                    raise NotRecordable(f"{func} writes recorded tensors and others")
                written.append(tensor)
        results = self._twins(func, results, changed, given)
        drew = not torch.equal(draw.state, generator.get_state())
        self._add(func, args, kwargs, written, results=results, draw=draw if drew else None)
        return results

    def _twins(self, func: Any, results: Any, real: list[Tensor], given: list[Tensor]) -> Any:
        """Recorded tensors for real results: those that were given, or new ones."""
        same = {id(one): tensor for one, tensor in zip(real, given, strict=True)}
        seen = {address_of(STORAGE_OF(tensor)) for tensor in real}

        def recorded(result: Tensor) -> Tensor:
            if id(result) in same:
                return same[id(result)]
            address = address_of(STORAGE_OF(result))
            if address in seen:
                raise NotRecordable(f"{func} gives results that share memory")
            seen.add(address)
            return self.added(twin(result), device_of(result))

        return map_arguments(recorded, results)

    def _measure(self, written: list[Tensor]) -> None:
        """Storages may have grown."""
        for tensor in written:
            number = self.number(tensor)
            if number is not None:
                size = self.program.size_bytes
                size[number] = max(size[number], STORAGE_OF(tensor).nbytes())

    def _add(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        written: Any,
        *,
        results: Any = (),
        device: torch.device = CPU,
        overwritten: Any = None,
        draw: Draw | None = None,
    ) -> None:
        """Write the step down, unless it only shows a storage in another way."""
        if overwritten is None:
            overwritten = overwritten_by(func, args, kwargs)
        inputs = list(tensors_of_arguments((args, kwargs)))
        made = self._made(func, results, {self.number(tensor) for tensor in inputs}, device)
        writes = {view.storage for view in made if view}
        writes |= {number for tensor in written if (number := self.number(tensor)) is not None}
        if not writes:
            return
        times = Counter(map(id, inputs))
        whole = {id(t) for t in overwritten if self._is_whole(t) and times[id(t)] == 1}
        reads = (self.number(tensor) for tensor in inputs if id(tensor) not in whole)

        def noted(value: Any) -> Any:
            is_tensor = isinstance(value, Tensor)
            return self.view(value) or snapshot(value) if is_tensor else value

        step = Step(
            func,
            map_views(noted, tuple(args)),
            map_views(noted, placed(kwargs, device)),
            frozenset(number for number in reads if number is not None),
            frozenset(writes),
            made,
            draw,
            torch.get_default_dtype(),
        )
        self.program.add(step)

    def _made(
        self, func: Any, results: Any, inputs: set[int | None], device: torch.device
    ) -> tuple[View | None, ...]:
        """The results in storages that are new; `None` for each that shows one of the inputs."""
        made: list[View | None] = []
        for tensor in tensors_of_arguments(results):
            if not is_meta(tensor):
                raise NotRecordable(f"{func} gives a result on {device_of(tensor)}")
            if self.number(tensor) is None:
                self.added(tensor, device)
            view = self.view(tensor)
            assert view is not None
            made.append(None if view.storage in inputs else view)
        return tuple(made)

    def _is_whole(self, tensor: Tensor) -> bool:
        view = self.view(tensor)
        return view is not None and view.covers(self.program.size_bytes[view.storage])
