"""A device that is none: torch's PrivateUse1, whose memory and arithmetic are those of the CPU.

    install()                    once in a process; torch keeps the name to its end
    Job(device="pretended")      as any accelerator: `allranks.torch.accelerator` finds it

Numbers are real, so the digest of a training is that of the CPU. What a device refuses is refused
(`Misuse`, with the line of allranks): operations on tensors of two devices, `numpy()`, what one
stream reads or writes of another's without an event (`streams`). What costs time on a device is
recorded: kernels, and waits of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from allranks.torch.random.counter import FLAGS, mixed_tensor
from pretended import streams
from pretended.record import Misuse, line, record
from pretended.streams import NAME, Memory, Stream

aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
MAY_TAKE_HOST_INDICES = ("aten::index", "aten::index_put_", "aten::_index_put_impl_")


class OnChip(Tensor):
    """A tensor of the device; `inner` is the tensor of the CPU that computes for it."""

    __slots__ = ("inner",)  # none of `vars`, which a part of a weight takes from the whole

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> OnChip:
        made: OnChip = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=device,
        )
        made.inner = inner
        return made

    def __repr__(self, **ignored: Any) -> str:
        return f"OnChip({self.inner!r})"

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: OnChip) -> None:
        Tensor.data.__set__(self, value)
        self.inner = value.inner

    def tolist(self) -> Any:
        wait_to_read(self, "tolist")
        return self.inner.tolist()

    def numpy(self, **ignored: Any) -> Any:
        raise Misuse(f"numpy() of a tensor of a device, at {line()}")

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        storage: Any = super().untyped_storage()
        storage.inner = self.inner.untyped_storage()
        storage.data_ptr = storage.inner.data_ptr
        return storage

    def set_(self, storage: Any, *where: Any) -> Tensor:  # type: ignore[override]
        return OnChip(self.inner.set_(storage.inner, *where), self.device)

    def pin_memory(self, *ignored: Any) -> Tensor:
        raise Misuse(f"pin_memory() of a tensor of a device, at {line()}")

    def record_stream(self, stream: Stream) -> None:
        memory_of(self.inner, stream).recorded.add(stream)

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:
        kwargs = {"dtype": self.dtype, "device": self.device, **kwargs}
        return torch.tensor(data, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied = self.detach().clone()
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied)
            memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(issubclass(kind, OnChip) for kind in types):
            return NotImplemented  # others unwrap theirs first
        return run(func, args, kwargs or {})


def memory_of(inner: Tensor, stream: Stream) -> Memory:
    """What is known of the storage of a tensor; `stream` takes it, where it is new."""
    storage: Any = inner.untyped_storage()
    if not hasattr(storage, "memory"):
        storage.memory = Memory(stream)
    found: Memory = storage.memory
    return found


def wait_to_read(tensor: OnChip, what: str) -> None:
    """The host waits for the stream that it reads from."""
    stream = streams.current_stream(tensor.device)
    memory_of(tensor.inner, stream).is_read(stream, what)
    record("wait", what)
    streams.ran(stream)
    streams.host_waits_for(stream.record_event().stands_for)


@cache
def kind_of(func: Any) -> str:
    """What a device does of an operation: nothing ("view", "room"), a "kernel", or a "wait"."""
    if torch.Tag.data_dependent_output in func.tags or func is aten._local_scalar_dense.default:
        return "wait"
    if torch.Tag.dynamic_output_shape in func.tags and "index" not in func.name():
        return "wait"
    writes = [a.alias_info.is_write for a in func._schema.arguments if a.alias_info is not None]
    if writes and not any(writes):
        return "view"
    return "room" if func.name().startswith(("aten::empty", "aten::new_empty")) else "kernel"


@cache
def written_by(func: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operation writes."""
    return tuple(
        (number, argument.name)
        for number, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation: of the device's rules first, then on the CPU."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    given = [value for value in flat if isinstance(value, OnChip)]
    if func.namespace == "c10d":
        return with_inner(func, flat, spec)  # `collectives` knows what it does to streams
    if func in COPIES:
        return copied(func, args, kwargs)
    device = the_device(func, flat, given, kwargs)
    if device is None:  # of the host alone, or made there like one of the device
        return with_inner(func, flat, spec)
    stream, kind = streams.current_stream(device), kind_of(func)
    if kwargs.get("output_size") is not None:  # the host says how many there will be
        kind = "kernel"
    if kind in ("kernel", "wait"):
        stamp(func, args, kwargs, given, stream)
    kwargs = {**kwargs, **({"device": "cpu"} if kwargs.get("device") is not None else {})}
    kwargs.pop("pin_memory", None)
    flat, spec = pytree.tree_flatten((args, kwargs))
    back = {id(tensor.inner): tensor for tensor in given}
    with drawing(func, device):
        results = with_inner(func, flat, spec)

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, OnChip):
            return value
        if id(value) in back:
            if value.shape != (known := back[id(value)]).shape:  # `out` of an operation grows
                Tensor.data.__set__(known, OnChip(value, device))
            return known
        memory = memory_of(value, stream)
        if kind != "view" and memory.written is None and kind != "room":
            memory.is_written(stream, func.name())
        return OnChip(value, device)

    results = pytree.tree_map(wrapped, results)
    if kind in ("kernel", "wait"):
        record(kind, func.name())
        streams.ran(stream)
    if kind == "wait":
        streams.host_waits_for(stream.record_event().stands_for)
    return results


def compile_flags(source: str, **defaults: int) -> Callable[..., Tensor]:
    """In place of a compiler on the device: one kernel, which does what this source says."""

    def launch(*given: OnChip, below: int) -> Tensor:
        (device,) = {tensor.device for tensor in given}
        stream = streams.current_stream(device)
        for tensor in given:
            memory_of(tensor.inner, stream).is_read(stream, "flags_from")
        first, second, row, column = (tensor.inner for tensor in given)
        made = [mixed_tensor(first + row + column + n, second).ge(below) for n in range(FLAGS)]
        flags = torch.stack(made, -1).view(torch.int32).squeeze(-1)
        memory_of(flags, stream).is_written(stream, "flags_from")
        record("kernel", "flags_from")
        streams.ran(stream)
        return OnChip(flags, device)

    return launch


def stamp(func: Any, args: Any, kwargs: Any, given: list[OnChip], stream: Stream) -> None:
    """Note which memory a kernel reads and writes; raises `Misuse` for what is not in order."""
    written: set[int] = set()
    for number, name in written_by(func):
        value = args[number] if number < len(args) else kwargs.get(name)
        written.update(id(t) for t in pytree.tree_leaves(value) if isinstance(t, OnChip))
    for tensor in given:
        memory = memory_of(tensor.inner, stream)
        memory.is_read(stream, func.name())
        if id(tensor) in written:
            memory.is_written(stream, func.name())


def the_device(func: Any, flat: Any, given: Any, kwargs: Any) -> torch.device | None:
    """The one device of an operation; raises `Misuse` if its tensors lie on several."""
    devices = {tensor.device for tensor in given}
    hosts = [t for t in flat if isinstance(t, Tensor) and not isinstance(t, OnChip) and t.ndim]
    if given and hosts and func.name().startswith(MAY_TAKE_HOST_INDICES):
        record("wait", f"{func.name()} with indices of the host")
    elif len(devices) > 1 or (given and hosts):
        found = sorted(map(str, {*devices, *(tensor.device for tensor in hosts)}))
        raise Misuse(f"{func.name()} on tensors of {' and '.join(found)}, at {line()}")
    wanted = kwargs.get("device")
    if wanted is None:
        return next(iter(devices), None)
    wanted = torch.device(wanted)
    return torch.device(NAME, streams.index_of(wanted)) if wanted.type == NAME else None


def with_inner(func: Any, flat: Any, spec: Any) -> Any:
    kinds = (OnChip, torch.UntypedStorage)
    inner = [
        getattr(value, "inner", value) if isinstance(value, kinds) else value for value in flat
    ]
    args, kwargs = pytree.tree_unflatten(inner, spec)
    return func(*args, **kwargs)


def copied(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`copy_` and `to`: within a device, or from and to the host, which waits if it must."""
    if func is aten.copy_.default:
        target, source = args[:2]
        is_async = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
        move(source, target, is_async)
        return target
    (source,), is_async = args, bool(kwargs.get("non_blocking"))
    device = torch.device(kwargs.get("device") or source.device)
    like = {key: value for key, value in kwargs.items() if key in ("dtype", "memory_format")}
    if device.type == NAME:
        made = aten.empty_like.default(
            source.inner if isinstance(source, OnChip) else source, **like
        )
        target: Tensor = OnChip(made, torch.device(NAME, streams.index_of(device)))
    else:  # torch takes pinned memory for what comes back while the host goes on
        target = aten.empty_like.default(source.inner, **like)
        target.untyped_storage().pinned = is_async
    move(source, target, is_async)
    return target


def move(source: Tensor, target: Tensor, is_async: bool) -> None:
    """Copy, as the stream that is current does; a copy that the host goes beside is late."""
    device = target.device if isinstance(target, OnChip) else source.device
    stream = streams.current_stream(device)
    from_, into = (t.inner if isinstance(t, OnChip) else t for t in (source, target))
    if isinstance(source, OnChip):
        memory_of(from_, streams.current_stream(source.device)).is_read(stream, "copy")
    if isinstance(target, OnChip):
        memory_of(into, stream).is_written(stream, "copy")
    streams.ran(stream)
    if isinstance(source, OnChip) and isinstance(target, OnChip):
        record("kernel", "copy")
        into.copy_(from_)
    elif isinstance(target, OnChip):
        record(
            "copy" if (is_async and is_pinned(source)) or not source.ndim else "wait", "to device"
        )
        into.copy_(from_)
    elif is_async and is_pinned(target):
        record("copy", "to the host")
        late = from_.clone()
        into.fill_(float("nan") if into.is_floating_point() else -77 if into.is_signed() else 77)
        streams.arrives_late(stream, lambda: into.copy_(late))
    else:
        record("wait", "copy to the host")
        streams.host_waits_for(stream.record_event().stands_for)
        into.copy_(from_)


def is_pinned(tensor: Tensor) -> bool:
    return bool(getattr(tensor.untyped_storage(), "pinned", False))


def pinned(tensor: Tensor) -> Tensor:
    """`tensor.pin_memory()`: a copy that a device reads while the host goes on."""
    if isinstance(tensor, OnChip):
        raise Misuse(f"pin_memory() of a tensor of a device, at {line()}")
    made = tensor.clone()
    made.untyped_storage().pinned = True
    return made


# --- random numbers -----------------------------------------------------------------------------

generators: dict[int, torch.Generator] = {}


def generator_of(device: Any = None) -> torch.Generator:
    """What draws on a device where no generator is given."""
    return generators.setdefault(streams.index_of(device), torch.Generator())


@contextmanager
def drawing(func: Any, device: torch.device) -> Iterator[None]:
    """Within, what the CPU draws comes from the generator of the device."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        yield
        return
    of_host, own = torch.get_rng_state(), generator_of(device)
    torch.set_rng_state(own.get_state())
    try:
        yield
    finally:
        own.set_state(torch.get_rng_state())
        torch.set_rng_state(of_host)
