"""Messages between stages: activations forward, their gradients backward, one message each.

A stage returns a tensor, or tensors in tuples, lists and dicts. Its metadata (structure, shapes,
strides, dtypes, which tensors need a gradient) is sent once for each shape of input, in a separate
message. After that both sides know it, and only values are sent. With tensors on a device, metadata
for the host is sent over the host, so that no rank waits for a device to read it.

A NCCL group runs one message after the other, in the order in which they are begun, and a send
waits for its receive. So the two directions use different groups. In a ring, where each rank has
several stages, a rank also sends and receives by different groups.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.torch.checkpoint.state import DTYPES, NAMES
from allranks.torch.comm.comm import Comm, Pending
from allranks.torch.data.collate import tensors_in

TENSOR = "tensor"
PLAIN = (bool, int, float, str, type(None))
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
MOST_DIMS = 5  # 120 orders: the number of one fits in a byte


@dataclass(frozen=True)
class TensorMeta:
    """Structure, shapes, strides and dtypes of a value; `text` is its JSON."""

    text: str

    @staticmethod
    def of(value: Any) -> TensorMeta:
        if type(value) is Tensor:
            return _of_one(value.dtype, value.shape, laid_out(value).stride(), value.requires_grad)
        rows = [
            _row(t.dtype, t.shape, laid_out(t).stride(), t.requires_grad) for t in tensors_in(value)
        ]
        return TensorMeta(json.dumps([_structure(value), rows]))

    def tensors(self, device: torch.device) -> list[tuple[Tensor, bool]]:
        """An empty tensor for each, and whether it needs a gradient."""
        return [
            (torch.empty_strided(shape, stride, dtype=DTYPES[kind], device=device), wants)
            for kind, shape, stride, wants in self.rows
        ]

    def value(self, tensors: Iterator[Tensor]) -> Any:
        """The value made of these tensors."""
        return _value(_parsed(self.text)[0], tensors)

    @property
    def shapes(self) -> list[tuple[torch.dtype, list[int], list[int]]]:
        """Dtype, shape and strides of each tensor."""
        return [(DTYPES[kind], shape, stride) for kind, shape, stride, _ in self.rows]

    @property
    def rows(self) -> list[Any]:
        """Dtype, shape and strides of each tensor, and whether it needs a gradient."""
        rows: list[Any] = _parsed(self.text)[1]
        return rows


def _row(kind: torch.dtype, shape: Sequence[int], stride: Sequence[int], wants: bool) -> list[Any]:
    return [NAMES[kind], list(shape), list(stride), wants]


@lru_cache(maxsize=1024)
def _of_one(
    kind: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], wants: bool
) -> TensorMeta:
    """The metadata of a single tensor, as most stages return; cached, as JSON is slow."""
    return TensorMeta(json.dumps([TENSOR, [_row(kind, shape, stride, wants)]]))


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Any:
    return json.loads(text)


def laid_out(tensor: Tensor) -> Tensor:
    """The tensor in dense memory, with its own strides (channels-last) if it is dense already."""
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor  # as most are
    plain = tensor.resolve_conj().resolve_neg()
    return plain if _is_dense(plain) else plain.contiguous()


def orders_of(tensor: Tensor) -> list[tuple[int, ...]]:
    """Possible strides of the gradient of a dense tensor: its own, torch's formats, and all orders.

    The last bit of what a layer computes from a gradient depends on its strides. Beyond `MOST_DIMS`
    dimensions there are too many orders, and a gradient with other strides is copied.
    """
    return _orders_of(tensor.shape, tensor.stride())


@lru_cache(maxsize=1024)
def _orders_of(shape: torch.Size, stride: tuple[int, ...]) -> list[tuple[int, ...]]:
    empty, last = torch.empty(shape, device="meta"), CHANNELS_LAST.get(len(shape))
    kinds = [torch.contiguous_format, *([] if last is None else [last])]
    orders = [stride, *(empty.contiguous(memory_format=kind).stride() for kind in kinds)]
    for order in permutations(range(len(shape))) if len(shape) <= MOST_DIMS else ():
        permuted = torch.empty([shape[dim] for dim in order], device="meta")
        orders.append(permuted.permute([order.index(dim) for dim in range(len(shape))]).stride())
    return orders


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill contiguous memory, in any order of dimensions."""
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != filled:
                return False
            filled *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor, as bytes."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8) if tensor.numel() else flat


def _structure(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TENSOR
    if type(value) in (tuple, list):
        return {type(value).__name__: [_structure(item) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _structure(item) for key, item in value.items()}}
    if type(value) in PLAIN:
        return {"plain": value}
    raise RequestError(
        asked="to send what a part of the model returns to other ranks",
        found=f"a {type(value).__name__} in it",
        why="they have to be told what to make of the numbers",
        do="return a tensor, or tensors in tuples, lists and dicts",
    )


def _value(structure: Any, tensors: Iterator[Tensor]) -> Any:
    if structure == TENSOR:
        return next(tensors)
    ((kind, inner),) = structure.items()
    if kind == "plain":
        return inner
    if kind == "dict":
        return {key: _value(item, tensors) for key, item in inner.items()}
    items = [_value(item, tensors) for item in inner]
    return tuple(items) if kind == "tuple" else items


# --- parcels -------------------------------------------------------------------------------------
# Tensors that are sent together, packed into the memory of one message.
#
# The latency of a message equals hundreds of kilobytes, so tensors for one rank share a message. A
# single tensor is sent in place.


ALIGNED = 16  # bytes: the largest number that torch knows
Shape = tuple[torch.dtype, Sequence[int], Sequence[int]]
"""Dtype, shape and strides of a dense tensor."""


@dataclass(frozen=True)
class Parcel:
    """Some `tensors`; `message` is their memory, as bytes."""

    message: Tensor
    tensors: list[Tensor]

    @staticmethod
    def room(shapes: Sequence[Shape], device: torch.device) -> Parcel:
        """Memory for tensors of these shapes; each can be written separately."""
        if len(shapes) == 1:
            ((kind, shape, stride),) = shapes
            alone = torch.empty_strided(shape, stride, dtype=kind, device=device)
            return Parcel(flat(alone), [alone])
        sizes = [math.prod(shape) * kind.itemsize for kind, shape, _ in shapes]
        starts, size = _starts(tuple(sizes))
        message = torch.empty(size, dtype=torch.uint8, device=device)
        memory, tensors = message.untyped_storage(), []
        for (kind, shape, stride), start in zip(shapes, starts, strict=True):
            empty = torch.empty(0, dtype=kind, device=device)
            tensors.append(empty.set_(memory, start // kind.itemsize, shape, stride))
        return Parcel(message, tensors)

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Parcel:
        """Pack these tensors, which must not change before the message was sent."""
        dense = [laid_out(tensor.detach()) for tensor in tensors]
        if len(dense) == 1:
            return Parcel(flat(dense[0]), dense)
        parcel = Parcel.room([shape_of(tensor) for tensor in dense], dense[0].device)
        for there, tensor in zip(parcel.tensors, dense, strict=True):
            there.copy_(tensor)
        return parcel


def shape_of(tensor: Tensor) -> Shape:
    """The dtype, shape and strides of a tensor."""
    return tensor.dtype, tensor.shape, tensor.stride()


@lru_cache(maxsize=1024)
def _starts(sizes: tuple[int, ...]) -> tuple[list[int], int]:
    starts, end = [], 0
    for size in sizes:
        starts.append(-(-end // ALIGNED) * ALIGNED)
        end = starts[-1] + size
    return starts, end


LOOKS_TAG = 0
OutgoingMessage = tuple[Pending, Tensor]
"""A message, and the memory that it is sent from."""


@dataclass(frozen=True)
class Lane:
    """The groups by which a rank sends and receives messages of one direction."""

    sends: Comm
    receives: Comm


def lanes_of(line: Comm, *, is_ring: bool) -> tuple[Lane, Lane, list[Comm]]:
    """The lanes forwards and backwards, and the new groups for them.

    Every rank of `line` calls this. If each rank has several stages, ranks form a ring. If a group
    is one queue, neighbouring pairs of ranks then use different groups: two for an even number of
    ranks and three for an odd one, so that no rank sends and receives by the same group.
    """
    is_odd = line.size % 2
    count = 2 + is_odd if is_ring and line.is_one_queue else 1
    created = [line.duplicate() for _ in range(2 * count - 1)]
    groups = [line, *created]

    def group_of(rank: int) -> int:
        """The group of a rank and the next one."""
        is_last = is_odd and rank % line.size == line.size - 1
        return (2 if is_last else rank % line.size % 2) % count

    here, before = group_of(line.rank), group_of(line.rank - 1)
    forwards = Lane(groups[here], groups[before])
    return forwards, Lane(groups[count + before], groups[count + here]), created


class StageLinks:
    """The messages of one rank with the ranks of the stages before and after its own.

    Stage s is on rank s mod ranks of `line`. `control` is a group of the same ranks for values that
    the host reads. Call `finish` once at the end of each step.
    """

    def __init__(self, line: Comm, forwards: Lane, backwards: Lane, control: Comm) -> None:
        self.line, self.forwards, self.backwards = line, forwards, backwards
        self.control = control
        self._known: dict[Hashable, TensorMeta] = {}
        self._on_their_way: dict[tuple[int, int], OutgoingMessage] = {}
        self._metas: list[OutgoingMessage] = []
        self._expected: dict[tuple[str, int, int], tuple[TensorMeta | None, Parcel, Pending]] = {}
        self._orders: dict[tuple[int, int], tuple[Tensor, Pending]] = {}

    def send(self, stage: int, micro: int, key: Hashable, value: Any, kind: str) -> None:
        """Send the output of `stage` to the next one. `key` identifies the shape of the input."""
        peer, meta = (stage + 1) % self.line.size, TensorMeta.of(value)
        known = self._known.get((stage, key))
        if known is None:
            self._known[stage, key] = meta
            self._send_meta(meta, peer)
        elif known != meta:
            raise _changed(stage, known, meta)
        if tensors := list(tensors_in(value)):
            parcel, tag = Parcel.of(tensors), _tag(stage, micro)
            self._send(self.forwards.sends, (stage, micro), parcel, parcel.tensors, peer, tag, kind)

    def _send(
        self,
        comm: Comm,
        at: tuple[int, int],
        parcel: Parcel,
        tensors: list[Tensor],
        to: int,
        tag: int,
        kind: str,
    ) -> None:
        """Send a parcel; bytes other than those of `tensors` count as `control`."""
        message = parcel.message
        control = message.nbytes - sum(tensor.nbytes for tensor in tensors)
        if message.numel():
            self._on_their_way[at] = comm.send(message, to, tag, kind, control=control), message

    def expect(self, stage: int, micro: int, key: Hashable) -> bool:
        """Post the message for the next `receive`, so that it may arrive while this rank computes.

        Returns whether its shapes are known.
        """
        meta = self._known.get((stage - 1, key))
        if meta is None or ("F", stage, micro) in self._expected:
            return meta is not None
        room = Parcel.room(meta.shapes, self.line.device)
        peer, tag = (stage - 1) % self.line.size, _tag(stage - 1, micro)
        pending = _posted(self.forwards.receives, room, peer, tag)
        self._expected["F", stage, micro] = meta, room, pending
        return True

    def receive(self, stage: int, micro: int, key: Hashable) -> tuple[Any, list[Received]]:
        """The output of the stage before `stage`, and its tensors that need a gradient."""
        if (stage - 1, key) not in self._known:
            self._known[stage - 1, key] = self._receive_meta((stage - 1) % self.line.size)
        self.expect(stage, micro, key)
        meta, room, pending = self._expected.pop(("F", stage, micro))
        assert meta is not None
        pending.wait()
        wanted = zip(room.tensors, meta.rows, strict=True)
        received = [Received(t) if wants else None for t, (*_, wants) in wanted]
        with torch.enable_grad():
            pairs = zip(received, room.tensors, strict=True)
            entered = [t if entry is None else entry.entering() for entry, t in pairs]
        return meta.value(iter(entered)), [entry for entry in received if entry is not None]

    def send_gradients(self, stage: int, micro: int, received: list[Received]) -> None:
        """Send the gradients of the inputs of `stage` to the stage before it.

        Each has a byte (`control`) with the index of its strides in `orders_of`. It is 0 if
        backward has not reached a tensor: zeros are sent, and the weights before it get no
        gradient, as in one process.
        """
        if not received:
            return
        room, there = self._room_for_gradients([r.tensor for r in received])
        gradients = room.tensors[: len(received)]
        lies = [_put(gradient, r.gradient) for r, gradient in zip(received, gradients, strict=True)]
        there.copy_(torch.tensor(lies))
        peer, tag = (stage - 1) % self.line.size, _tag(stage, micro)
        if self._orders_by_host:
            self._metas.append((self.control.send(there, peer, tag, "control"), there))
        at = -1 - stage, micro
        self._send(self.backwards.sends, at, room, gradients, peer, tag, "gradients")

    def receive_gradients(
        self, stage: int, micro: int, outputs: list[Tensor]
    ) -> list[Tensor | None]:
        """The gradients of the outputs of `stage` that need one.

        `None` if the next stage has not used the tensor.
        """
        self.expect_gradients(stage, micro, outputs)
        gradients: list[Tensor | None] = []
        if outputs:
            _, room, pending = self._expected.pop(("B", stage, micro))
            there, orders = self._orders.pop((stage, micro))
            orders.wait()
            pending.wait()
            pairs = zip(there.tolist(), room.tensors[: len(outputs)], strict=True)
            gradients += [
                gradient.as_strided(gradient.shape, orders_of(gradient)[lies - 1]) if lies else None
                for lies, gradient in pairs
            ]
        self.arrived(stage, micro)
        return gradients

    def expect_gradients(self, stage: int, micro: int, outputs: list[Tensor]) -> None:
        """Post the message for the next `receive_gradients`."""
        if outputs and ("B", stage, micro) not in self._expected:
            peer, tag = (stage + 1) % self.line.size, _tag(stage + 1, micro)
            room, there = self._room_for_gradients(outputs)
            orders = self.control.receive(there, peer, tag) if self._orders_by_host else Pending()
            self._orders[stage, micro] = there, orders
            pending = _posted(self.backwards.receives, room, peer, tag)
            self._expected["B", stage, micro] = None, room, pending

    @property
    def _orders_by_host(self) -> bool:
        return self.control is not self.line

    def _room_for_gradients(self, tensors: list[Tensor]) -> tuple[Parcel, Tensor]:
        """Memory for the gradient of each tensor, and for a byte of each at the end of the message.

        On a device, where the host would have to wait, the bytes are a separate message.
        """
        shapes = [shape_of(laid_out(tensor.detach())) for tensor in tensors]
        device, byte_of_each = tensors[0].device, (torch.uint8, (len(shapes),), (1,))
        if self._orders_by_host:
            return Parcel.room(shapes, device), torch.zeros(len(shapes), dtype=torch.uint8)
        room = Parcel.room([*shapes, byte_of_each], device)
        return room, room.tensors[-1]

    def arrived(self, stage: int, micro: int) -> None:
        """The output of `stage` has been used: release its memory."""
        if message := self._on_their_way.pop((stage, micro), None):
            message[0].wait()

    def gradients_arrived(self, stage: int, is_used: Callable[[int], bool]) -> None:
        """Gradients that `stage` sent for some micro-batches have been used."""
        for to, micro in list(self._on_their_way):
            if to == -1 - stage and is_used(micro):
                self.arrived(to, micro)

    def finish(self) -> None:
        """Wait until all messages were sent."""
        for key in list(self._on_their_way):
            self.arrived(*key)
        for pending, _ in self._metas:
            pending.wait()
        self._metas.clear()

    def share(self, value: Any, source: int, key: Hashable) -> Any:
        """Broadcast a value from rank `source`; every rank calls this. Counted as `control`."""
        line = self.line
        if line.size == 1:
            return value
        meta = TensorMeta.of(value) if line.rank == source else None
        if ("shared", key) not in self._known:
            texts = line.gather_texts("" if meta is None else meta.text)
            self._known["shared", key] = TensorMeta(texts[source])
        known = self._known["shared", key]
        if meta is not None and meta != known:
            raise _changed(source, known, meta)
        if meta is not None:
            line.broadcast(*tensors_in(value), source=source)
            return value
        tensors = [tensor for tensor, _ in known.tensors(line.device)]
        line.broadcast(*tensors, source=source)
        return known.value(iter(tensors))

    def _send_meta(self, meta: TensorMeta, peer: int) -> None:
        control = self.control
        data = torch.frombuffer(bytearray(meta.text.encode()), dtype=torch.uint8)
        size, data = torch.tensor([data.numel()]).to(control.device), data.to(control.device)
        self._metas += [(control.send(t, peer, LOOKS_TAG, "control"), t) for t in (size, data)]

    def _receive_meta(self, peer: int) -> TensorMeta:
        control = self.control
        size = torch.zeros(1, dtype=torch.int64, device=control.device)
        control.receive(size, peer, LOOKS_TAG).wait()
        data = torch.zeros(int(size), dtype=torch.uint8, device=control.device)
        control.receive(data, peer, LOOKS_TAG).wait()
        return TensorMeta(bytes(data.cpu().numpy()).decode())


@dataclass
class Received:
    """A tensor from another stage; backward sets its `gradient`."""

    tensor: Tensor
    gradient: Tensor | None = None

    def entering(self) -> Tensor:
        """The tensor as the output of a function, so that in-place layers may come first."""
        apply: Any = _Entering.apply
        entered: Tensor = apply(torch.zeros((), requires_grad=True), self)
        return entered


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, received: Received) -> Tensor:
        ctx.received = received
        ctx.set_materialize_grads(False)
        return received.tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None]:
        ctx.received.gradient = gradient
        return None, None


def _tag(stage: int, micro: int) -> int:
    return 1 + stage + (micro << 12)


def _posted(comm: Comm, room: Parcel, peer: int, tag: int) -> Pending:
    return comm.receive(room.message, peer, tag) if room.message.numel() else Pending()


def _put(room: Tensor, gradient: Tensor | None) -> int:
    """Copy a gradient into `room`; returns the number of its strides from 1, or 0 for `None`."""
    if gradient is None:
        room.zero_()
        return 0
    plain, orders = laid_out(gradient.detach()), orders_of(room)
    order = orders.index(plain.stride()) if plain.stride() in orders else 0
    room.as_strided(room.shape, orders[order]).copy_(plain)
    return order + 1


def _changed(stage: int, known: TensorMeta, looks: TensorMeta) -> RequestError:
    return RequestError(
        asked="a pipeline over stages",
        found=f"stage {stage} returned {looks.text} for an input of the shape for which it had "
        f"returned {known.text}"[:300],
        why="the next stage has made room for what came the first time",
        do="let the shapes that a stage returns follow from the shapes of its inputs",
    )
