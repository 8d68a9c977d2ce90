"""What goes from stage to stage: activations forward, their gradients backward, one message each.

What a stage returns may be a tensor, or tensors in tuples, lists and dicts. Its looks (structure,
shapes, strides, types, which tensors want a gradient) are told once for each shape of input, as a
message of their own; after that both sides know them, and only numbers are sent. Where tensors lie
on a device, what the host must know goes over the host: no rank waits for a device to read it.

A group of NCCL makes one message after the other, in the order in which they are begun, and a rank
that sends waits until the other one receives. So the two directions have groups of their own, and
in a ring, where each rank has several stages, a rank sends and receives by different groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.torch.comm.comm import Comm
from allranks.torch.comm.subgroups import Pending
from allranks.torch.data.collate import tensors_in
from allranks.torch.parallel.pipeline.tensor_meta import TensorMeta, flat, laid_out, orders_of

# --- parcels -------------------------------------------------------------------------------------
# Tensors that leave together: one message, which is the memory that they lie in side by side.
#
# A message costs as much as hundreds of kilobytes: what goes the same way at the same time goes in
# one. A tensor that is alone in it leaves from where it lies.


ALIGNED = 16  # bytes: the largest number that torch knows
Shape = tuple[torch.dtype, Sequence[int], Sequence[int]]
"""Of a tensor that fills its memory: type, shape and strides."""


@dataclass(frozen=True)
class Parcel:
    """`message` are the bytes of all `tensors`."""

    message: Tensor
    tensors: list[Tensor]

    @staticmethod
    def room(shapes: Sequence[Shape], device: torch.device) -> Parcel:
        """Memory for tensors that look so; each is written on as if it were alone."""
        if len(shapes) == 1:
            ((kind, shape, stride),) = shapes
            alone = torch.empty_strided(shape, stride, dtype=kind, device=device)
            return Parcel(flat(alone), [alone])
        sizes = [math.prod(shape) * kind.itemsize for kind, shape, _ in shapes]
        starts, size = _starts(tuple(sizes))
        message = torch.empty(size, dtype=torch.uint8, device=device)
        memory, found = message.untyped_storage(), []
        for (kind, shape, stride), start in zip(shapes, starts, strict=True):
            empty = torch.empty(0, dtype=kind, device=device)
            found.append(empty.set_(memory, start // kind.itemsize, shape, stride))
        return Parcel(message, found)

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Parcel:
        """These tensors, which must not change before the message has left."""
        dense = [laid_out(tensor.detach()) for tensor in tensors]
        if len(dense) == 1:
            return Parcel(flat(dense[0]), dense)
        found = Parcel.room([shape_of(tensor) for tensor in dense], dense[0].device)
        for there, tensor in zip(found.tensors, dense, strict=True):
            there.copy_(tensor)
        return found


def shape_of(tensor: Tensor) -> Shape:
    """What there is to know of a tensor to make room for it."""
    return tensor.dtype, tensor.shape, tensor.stride()


@lru_cache(maxsize=1024)
def _starts(sizes: tuple[int, ...]) -> tuple[list[int], int]:
    starts, end = [], 0
    for size in sizes:
        starts.append(-(-end // ALIGNED) * ALIGNED)
        end = starts[-1] + size
    return starts, end


LOOKS_TAG = 0
Sent = tuple[Pending, Tensor]
"""A message, and the memory that it leaves from."""


@dataclass(frozen=True)
class Lane:
    """The groups by which messages of one direction leave a rank, and come to it."""

    sends: Comm
    receives: Comm


def lanes_of(line: Comm, *, is_ring: bool) -> tuple[Lane, Lane, list[Comm]]:
    """The lanes forwards and backwards, and the groups that are made for them.

    Every rank of `line` calls this. Where each rank has several stages, ranks are a ring: if a
    group is one queue, neighbouring pairs of ranks take different groups there, two for an even
    number of ranks and three for an odd one, so that no rank sends and receives by the same.
    """
    is_odd = line.size % 2
    count = 2 + is_odd if is_ring and line.is_one_queue else 1
    made = [line.duplicate() for _ in range(2 * count - 1)]
    groups = [line, *made]

    def group_of(rank: int) -> int:
        """That of the pair of this rank and the next one."""
        is_last = is_odd and rank % line.size == line.size - 1
        return (2 if is_last else rank % line.size % 2) % count

    here, before = group_of(line.rank), group_of(line.rank - 1)
    forwards = Lane(groups[here], groups[before])
    return forwards, Lane(groups[count + before], groups[count + here]), made


class StageLinks:
    """The messages of one rank with those that hold the stages before and after its own.

    Stage s lies on rank s mod ranks of `line`. `control` are the same ranks, for what the host
    reads. `finish` is called once at the end of each step.
    """

    def __init__(self, line: Comm, forwards: Lane, backwards: Lane, control: Comm) -> None:
        self.line, self.forwards, self.backwards = line, forwards, backwards
        self.control = control
        self._known: dict[Hashable, TensorMeta] = {}
        self._on_their_way: dict[tuple[int, int], Sent] = {}
        self._told: list[Sent] = []
        self._expected: dict[tuple[str, int, int], tuple[TensorMeta | None, Parcel, Pending]] = {}
        self._orders: dict[tuple[int, int], tuple[Tensor, Pending]] = {}

    def send(self, stage: int, micro: int, key: Hashable, value: Any, kind: str) -> None:
        """Give what `stage` returned to the next one. `key` stands for the shape of the input."""
        peer, looks = (stage + 1) % self.line.size, TensorMeta.of(value)
        known = self._known.get((stage, key))
        if known is None:
            self._known[stage, key] = looks
            self._tell(looks, peer)
        elif known != looks:
            raise _changed(stage, known, looks)
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
        """What is not of `tensors` is counted as `control`."""
        message = parcel.message
        control = message.nbytes - sum(tensor.nbytes for tensor in tensors)
        if message.numel():
            self._on_their_way[at] = comm.send(message, to, tag, kind, control=control), message

    def expect(self, stage: int, micro: int, key: Hashable) -> bool:
        """`receive` comes next: what is sent may come in while this rank computes.

        Whether it is known what comes.
        """
        looks = self._known.get((stage - 1, key))
        if looks is None or ("F", stage, micro) in self._expected:
            return looks is not None
        room = Parcel.room(looks.shapes, self.line.device)
        peer, tag = (stage - 1) % self.line.size, _tag(stage - 1, micro)
        pending = _posted(self.forwards.receives, room, peer, tag)
        self._expected["F", stage, micro] = looks, room, pending
        return True

    def receive(self, stage: int, micro: int, key: Hashable) -> tuple[Any, list[Received]]:
        """What the stage before `stage` returned, and its tensors that want a gradient."""
        if (stage - 1, key) not in self._known:
            self._known[stage - 1, key] = self._hear((stage - 1) % self.line.size)
        self.expect(stage, micro, key)
        looks, room, pending = self._expected.pop(("F", stage, micro))
        assert looks is not None
        pending.wait()
        wanted = zip(room.tensors, looks.rows, strict=True)
        received = [Received(t) if wants else None for t, (*_, wants) in wanted]
        with torch.enable_grad():
            pairs = zip(received, room.tensors, strict=True)
            entered = [t if one is None else one.entering() for one, t in pairs]
        return looks.value(iter(entered)), [one for one in received if one is not None]

    def send_gradients(self, stage: int, micro: int, received: list[Received]) -> None:
        """Give the gradients of what `stage` was given to the stage before it.

        With them goes a byte for each (`control`) that says in which of `orders_of` it lies; 0
        where backward has not come to a tensor: zeros are sent, and the weights before it get no
        gradient, as in one process.
        """
        if not received:
            return
        room, there = self._room_for_gradients([one.tensor for one in received])
        gradients = room.tensors[: len(received)]
        lies = [
            _put(gradient, one.gradient) for one, gradient in zip(received, gradients, strict=True)
        ]
        there.copy_(torch.tensor(lies))
        peer, tag = (stage - 1) % self.line.size, _tag(stage, micro)
        if self._tells_by_host:
            self._told.append((self.control.send(there, peer, tag, "control"), there))
        at = -1 - stage, micro
        self._send(self.backwards.sends, at, room, gradients, peer, tag, "gradients")

    def receive_gradients(
        self, stage: int, micro: int, outputs: list[Tensor]
    ) -> list[Tensor | None]:
        """The gradients of the tensors that `stage` returned, of those that want one.

        `None` where the next stage has not used the tensor.
        """
        self.expect_gradients(stage, micro, outputs)
        found: list[Tensor | None] = []
        if outputs:
            _, room, pending = self._expected.pop(("B", stage, micro))
            there, told = self._orders.pop((stage, micro))
            told.wait()
            pending.wait()
            pairs = zip(there.tolist(), room.tensors[: len(outputs)], strict=True)
            found += [
                gradient.as_strided(gradient.shape, orders_of(gradient)[lies - 1]) if lies else None
                for lies, gradient in pairs
            ]
        self.arrived(stage, micro)
        return found

    def expect_gradients(self, stage: int, micro: int, outputs: list[Tensor]) -> None:
        """`receive_gradients` comes next."""
        if outputs and ("B", stage, micro) not in self._expected:
            peer, tag = (stage + 1) % self.line.size, _tag(stage + 1, micro)
            room, there = self._room_for_gradients(outputs)
            told = self.control.receive(there, peer, tag) if self._tells_by_host else Pending()
            self._orders[stage, micro] = there, told
            pending = _posted(self.backwards.receives, room, peer, tag)
            self._expected["B", stage, micro] = None, room, pending

    @property
    def _tells_by_host(self) -> bool:
        return self.control is not self.line

    def _room_for_gradients(self, tensors: list[Tensor]) -> tuple[Parcel, Tensor]:
        """Room for the gradient of each, and for a byte of each, which is last in the message.

        Where the host would wait for a device to read it, the byte is a message of its own.
        """
        shapes = [shape_of(laid_out(tensor.detach())) for tensor in tensors]
        device, byte_of_each = tensors[0].device, (torch.uint8, (len(shapes),), (1,))
        if self._tells_by_host:
            return Parcel.room(shapes, device), torch.zeros(len(shapes), dtype=torch.uint8)
        room = Parcel.room([*shapes, byte_of_each], device)
        return room, room.tensors[-1]

    def arrived(self, stage: int, micro: int) -> None:
        """What `stage` sent forward has been used: its memory is not needed any more."""
        if sent := self._on_their_way.pop((stage, micro), None):
            sent[0].wait()

    def gradients_arrived(self, stage: int, is_used: Callable[[int], bool]) -> None:
        """What `stage` sent backward of some micro-batches has been used."""
        for to, micro in list(self._on_their_way):
            if to == -1 - stage and is_used(micro):
                self.arrived(to, micro)

    def finish(self) -> None:
        """Return when all that was sent has left."""
        for key in list(self._on_their_way):
            self.arrived(*key)
        for pending, _ in self._told:
            pending.wait()
        self._told.clear()

    def share(self, value: Any, source: int, key: Hashable) -> Any:
        """What rank `source` has, on every rank; every rank calls this. Counted as `control`."""
        line = self.line
        if line.size == 1:
            return value
        looks = TensorMeta.of(value) if line.rank == source else None
        if ("shared", key) not in self._known:
            texts = line.gather_texts("" if looks is None else looks.text)
            self._known["shared", key] = TensorMeta(texts[source])
        known = self._known["shared", key]
        if looks is not None and looks != known:
            raise _changed(source, known, looks)
        if looks is not None:
            line.broadcast(*tensors_in(value), source=source)
            return value
        found = [tensor for tensor, _ in known.tensors(line.device)]
        line.broadcast(*found, source=source)
        return known.value(iter(found))

    def _tell(self, looks: TensorMeta, peer: int) -> None:
        control = self.control
        data = torch.frombuffer(bytearray(looks.text.encode()), dtype=torch.uint8)
        size, data = torch.tensor([data.numel()]).to(control.device), data.to(control.device)
        self._told += [(control.send(t, peer, LOOKS_TAG, "control"), t) for t in (size, data)]

    def _hear(self, peer: int) -> TensorMeta:
        control = self.control
        size = torch.zeros(1, dtype=torch.int64, device=control.device)
        control.receive(size, peer, LOOKS_TAG).wait()
        data = torch.zeros(int(size), dtype=torch.uint8, device=control.device)
        control.receive(data, peer, LOOKS_TAG).wait()
        return TensorMeta(bytes(data.cpu().numpy()).decode())


@dataclass
class Received:
    """A tensor that came from another stage; `gradient` is there once backward has come to it."""

    tensor: Tensor
    gradient: Tensor | None = None

    def entering(self) -> Tensor:
        """The tensor as the result of a function: a layer that writes in place may come first."""
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
    """Fill the room with it; 0 where there is none, else which of the orders it lies in, from 1."""
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
