"""What a recorded tensor answers while a program is recorded: what the real one would.

A program that sees `is_meta` takes another way: torch's own `trunc_normal_` then draws nothing, in
silence. So these methods of `torch.Tensor` are replaced in this process while a `Recorder` records;
tensors that it does not know answer as ever. A `TorchFunctionMode` would not do: torch leaves it
inside of the functions that it intercepts.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allranks.torch.deferred_init.arguments import exchange
from allranks.torch.deferred_init.recorder import Recorder

DEVICES = ("device", "is_meta", "is_cpu", "is_cuda", "is_xpu")
AS_IF_THERE = ("to", "cpu", "cuda", "xpu", "type", "get_device")
OF_VALUES = ("tolist", "__repr__")
SHARE_MEMORY = (
    "__dlpack__",
    "__reduce_ex__",
    "_typed_storage",
    "data_ptr",
    "pin_memory",
    "share_memory_",
    "storage",
    "untyped_storage",
)
BY_FUNCTION = ("apply_", "map2_", "map_")  # which call a function of Python, and no operator
STARTS = ((threading.Thread, "start"), (ThreadPoolExecutor, "submit"))
COPIED = "allranks.deferred_init"


@contextmanager
def disguised(recorder: Recorder) -> Iterator[None]:
    """Within, the tensors of `recorder` seem to be where the program put them."""
    made: dict[str, Any] = {name: _where(recorder, name) for name in DEVICES}
    made.update({name: _as_if_there(recorder, name) for name in AS_IF_THERE})
    made.update({name: _of_values(recorder, name) for name in OF_VALUES})
    made.update({name: _refused(recorder, name) for name in SHARE_MEMORY})
    made.update({name: _refused(recorder, name, "calls a function") for name in BY_FUNCTION})
    made.update({name: _array(recorder, name) for name in ("numpy", "__array__")})
    made["__deepcopy__"] = _deepcopy(recorder)
    made["new_tensor"] = _new_tensor(recorder)
    made.update({name: _indexed(recorder, name) for name in ("__getitem__", "__setitem__")})
    made["data"] = _data(recorder)
    before = {name: vars(Tensor).get(name) for name in made}
    for name, value in made.items():
        setattr(Tensor, name, value)
    starts = [(kind, name, getattr(kind, name)) for kind, name in STARTS]
    for kind, name, ours in starts:
        setattr(kind, name, _in_a_thread(recorder, ours))
    try:
        yield
    finally:
        for kind, name, ours in starts:
            setattr(kind, name, ours)
        for name, value in before.items():
            if value is None:
                delattr(Tensor, name)  # that of the base is seen again
            else:
                setattr(Tensor, name, value)


def _is_seen(recorder: Recorder, tensor: Tensor) -> bool:
    return recorder.is_recording and recorder.number(tensor) is not None


def _where(recorder: Recorder, name: str) -> property:
    ours: Any = getattr(Tensor, name)

    def get(tensor: Tensor) -> Any:
        if not _is_seen(recorder, tensor):
            return ours.__get__(tensor)
        device = recorder.device_of(tensor)
        return device if name == "device" else device.type == name.removeprefix("is_")

    return property(get)


def _as_if_there(recorder: Recorder, name: str) -> Callable[..., Any]:
    """`weight.to("cpu")` is `weight` itself, where it is there already."""
    ours = getattr(Tensor, name)

    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        means_meta = any(_is_the_meta_device(value) for value in (*args, *kwargs.values()))
        if not _is_seen(recorder, tensor):
            with recorder.paused() if means_meta else nullcontext():
                return ours(tensor, *args, **kwargs)
        if means_meta:
            raise recorder.refuse(f"{name}(…) moves a tensor to the meta device")
        if "memory_format" in kwargs:
            return ours(tensor, *args, **kwargs)
        with recorder.paused():
            probe = _probe(recorder, tensor)
            others = [_probe(recorder, a) if isinstance(a, Tensor) else a for a in args]
            found = ours(probe, *others, **kwargs)
        if found is probe:
            return tensor
        return ours(tensor, *args, **kwargs) if isinstance(found, Tensor) else found

    return call


def _is_the_meta_device(value: Any) -> bool:
    return value == "meta" or (isinstance(value, torch.device) and value.type == "meta")


def _probe(recorder: Recorder, tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=recorder.device_of(tensor))


def _data(recorder: Recorder) -> property:
    """`weight.data = tensor` shares memory; torch forbids it between meta and the host."""
    ours: Any = vars(Tensor.__base__)["data"]

    def put(tensor: Tensor, given: Tensor) -> None:
        if recorder.is_recording and isinstance(given, Tensor):
            is_seen = recorder.number(tensor) is not None
            if is_seen != (recorder.number(given) is not None):
                with recorder.paused():
                    exchange(tensor, given.detach())
                return
        before = recorder.number(tensor)
        ours.__set__(tensor, given)
        recorder.moved(tensor, before)

    return property(ours.__get__, put)


def _of_values(recorder: Recorder, name: str) -> Callable[..., Any]:
    ours = getattr(Tensor, name)

    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _is_seen(recorder, tensor):
            return ours(tensor, *args, **kwargs)
        with recorder.paused():
            return ours(_value(recorder, tensor), *args, **kwargs)

    return call


def _array(recorder: Recorder, name: str) -> Callable[..., Any]:
    """An array that cannot be written: it is a copy, and a program may mean the tensor."""
    ours = getattr(Tensor, name)

    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _is_seen(recorder, tensor):
            return ours(tensor, *args, **kwargs)
        with recorder.paused():
            array = ours(_value(recorder, tensor), *args, **kwargs)
        array.flags.writeable = False
        return array

    return call


def _value(recorder: Recorder, tensor: Tensor) -> Tensor:
    found: Tensor = recorder.values([tensor])[0]
    return found.requires_grad_(tensor.requires_grad)


def _indexed(recorder: Recorder, name: str) -> Callable[..., Any]:
    """`weight[[1, 3]] = 0`: torch would take the list to the meta device, where it is lost."""
    ours = getattr(Tensor, name)

    def call(tensor: Tensor, index: Any, *value: Any) -> Any:
        if _is_seen(recorder, tensor):
            several = isinstance(index, tuple)
            index = tuple(map(_as_index, index)) if several else _as_index(index)
        return ours(tensor, index, *value)

    return call


def _as_index(index: Any) -> Any:
    is_list = isinstance(index, list) and all(isinstance(item, int) for item in index)
    return torch.tensor(index) if is_list or isinstance(index, np.ndarray) else index


def _in_a_thread(recorder: Recorder, ours: Callable[..., Any]) -> Callable[..., Any]:
    """What another thread does with tensors goes past the recorder."""

    @wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        if recorder.is_recording:
            raise recorder.refuse("it hands work to another thread")
        return ours(*args, **kwargs)

    return call


def _refused(
    recorder: Recorder, name: str, what: str = "hands out the memory of a tensor"
) -> Callable[..., Any]:
    ours = getattr(Tensor, name)

    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_seen(recorder, tensor):
            raise recorder.refuse(f"{name}() {what}")
        return ours(tensor, *args, **kwargs)

    return call


def _new_tensor(recorder: Recorder) -> Callable[..., Any]:
    ours = Tensor.new_tensor

    def call(tensor: Tensor, data: Any, **kwargs: Any) -> Any:
        if _is_seen(recorder, tensor):
            kwargs = {"dtype": tensor.dtype, "device": recorder.device_of(tensor), **kwargs}
            return torch.tensor(data, **kwargs)
        return ours(tensor, data, **kwargs)

    return call


def _deepcopy(recorder: Recorder) -> Callable[..., Any]:
    """Torch copies the storage, once for all that share it; here each has one of its own."""
    ours = Tensor.__deepcopy__

    def call(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
        if not _is_seen(recorder, tensor):
            with recorder.paused() if not vars(tensor) else nullcontext():
                return ours(tensor, memo)  # type: ignore[no-untyped-call, no-any-return]
        if id(tensor) in memo:
            found: Tensor = memo[id(tensor)]
            return found
        view, copied = recorder.view(tensor), memo.setdefault(COPIED, set())
        assert view is not None
        whole = view.covers(recorder.program.size_bytes[view.storage])
        if not whole or view.storage in copied or tensor.grad is not None or not tensor.is_leaf:
            raise recorder.refuse("a copy of tensors that share memory, or have a gradient")
        copied.add(view.storage)
        with torch.no_grad():
            new = tensor.clone()
        vars(new).update(copy.deepcopy(vars(tensor), memo))
        memo[id(tensor)] = new.requires_grad_(tensor.requires_grad)
        return new

    return call
