"""A model on the meta device, and how each of its tensors is computed, exactly as in one process.

`record(build)` calls `build()` once. Then `Recorded.replay(place)` makes one parameter or buffer
after the other, whole and on its device, and hands it to `place(name, whole)`, which keeps the part
of this rank; what is not kept is freed before the next. No communication: every rank replays all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from allranks.alive import instances_of
from allranks.torch.deferred_init.arguments import exchange
from allranks.torch.deferred_init.disguise import disguised
from allranks.torch.deferred_init.program import NotRecordable, Program, View
from allranks.torch.deferred_init.recorder import META, Recorder

Place = Callable[[str, Tensor], None]
T = TypeVar("T")
MOST_REPEATED = 4  # how often the work of one process may be done, to hold one tensor at a time

_recording: list[Recorder] = []


@dataclass
class Recorded:
    """How the tensors of a model that lies on meta are computed."""

    program: Program
    views: dict[str, View]
    given: dict[str, Tensor]
    loose: list[tuple[Tensor, View]] = field(default_factory=list)

    def replay(self, place: Place) -> None:
        """Hand every parameter and buffer to `place`, whole, by name; then what else is there.

        A tensor that `place` is given is freed when it returns, unless it is kept. Tensors that no
        module has registered (attributes, caches) become real ones, whole, in place.
        """
        for name, tensor in self.given.items():
            place(name, tensor)
        names: dict[int, list[str]] = {}
        for name, view in self.views.items():
            names.setdefault(view.storage, []).append(name)

        def give(storage: int, memory: torch.UntypedStorage) -> None:
            for name in names[storage]:
                place(name, self.views[name].on(memory))

        for group in self._groups(list(names)):
            self.program.replay(group, give)
        held: dict[int, torch.UntypedStorage] = {}
        self.program.replay({view.storage for _, view in self.loose}, held.__setitem__)
        for tensor, view in self.loose:
            exchange(tensor, view.on(held[view.storage]))

    def _groups(self, storages: list[int]) -> list[list[int]]:
        """Each by itself; all together where that would do the same work too often."""
        needed = self.program.needed
        alone = sum(self.program.cost(needed([storage])) for storage in storages)
        if alone > MOST_REPEATED * self.program.cost(needed(storages)):
            return [storages]
        return [[storage] for storage in storages]


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What `build()` gave; `recorded` is `None`, and `why`, if it had to be built whole."""

    built: T
    recorded: Recorded | None
    why: str = ""


def record(build: Callable[[], T], model_of: Callable[[T], nn.Module]) -> Outcome[T]:
    """Call `build` with tensors that have no memory, and every draw as in one process.

    Generators are left where one process leaves them. What cannot be recorded is built again as
    ever, from the same state of the generators of torch: `build` seeds those that it draws from.
    """
    recorder = Recorder()
    _recording.append(recorder)
    try:
        with disguised(recorder), recorder:
            built = build()
        if recorder.refused:
            raise NotRecordable(recorder.refused)
        return Outcome(built, _recorded(recorder, model_of(built)))
    except Exception as error:  # of the program itself, it comes again
        why = recorder.refused or f"{type(error).__name__}: {error}"
    finally:
        _recording.remove(recorder)
    del recorder
    return Outcome(build(), None, why)


def fill(target: Tensor, read: Callable[[], Tensor]) -> None:
    """Copy `read()` into all of `target`; where it is recorded, it is read when it is needed."""
    if _recording and _recording[-1].number(target) is not None:
        with _recording[-1].paused():
            _recording[-1].write(target, lambda held: held.copy_(read()))
    else:
        target.copy_(read())


def on_device(model: nn.Module, device: torch.device) -> None:
    """Give every tensor of the model that lies on meta memory on `device`, uninitialised.

    As `nn.Module.to_empty`, but tied weights stay one, and so does whatever refers to one.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_meta:
            exchange(tensor, torch.empty_like(tensor, device=device, requires_grad=False))


def _recorded(recorder: Recorder, model: nn.Module) -> Recorded:
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise NotRecordable("a compiled module holds its tensors where Python does not see them")
    views: dict[str, View] = {}
    given: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        seen.add(id(tensor))
        if _has_hooks(tensor) or not tensor.is_leaf:
            raise NotRecordable(f"{name} has hooks, or is computed from others")
        view = recorder.view(tensor)
        if view is not None:
            if tensor._version > recorder.writes[view.storage]:
                raise NotRecordable(f"{name} was written where no operator was seen")
            views[name] = view
        else:
            given[name] = _withdrawn(tensor)
    loose = [(t, v) for t, v in _alive(recorder) if id(t) not in seen]
    for tensor, _ in loose:
        if not tensor.is_leaf or _has_hooks(tensor) or type(tensor) not in (Tensor, nn.Parameter):
            raise NotRecordable("a tensor that no module has registered is computed from others")
    kept = {view.storage for view in (*views.values(), *(view for _, view in loose))}
    recorder.program.keep_only(kept)
    return Recorded(recorder.program, views, given, loose)


def _withdrawn(tensor: Tensor) -> Tensor:
    """The numbers of a real tensor, which lies on meta from here on."""
    kept = tensor.detach()
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise NotRecordable(f"the model has a {tensor.layout} tensor on {tensor.device}")
    storage = torch.UntypedStorage(kept.untyped_storage().nbytes(), device=META)
    exchange(tensor, View.of(kept, -1).on(storage))
    return kept


def _has_hooks(tensor: Tensor) -> bool:
    found: Any = tensor
    return bool(found._backward_hooks or found._post_accumulate_grad_hooks)


def _alive(recorder: Recorder) -> Iterator[tuple[Tensor, View]]:
    """The recorded tensors that somebody still refers to."""
    gc.collect()
    for found in instances_of(Tensor):
        view = recorder.view(found)
        if view is not None:
            yield found, view
