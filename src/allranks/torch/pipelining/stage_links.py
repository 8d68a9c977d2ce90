"""What goes from stage to stage: activations forward, their gradients backward, one message each.

What a stage returns may be a tensor, or tensors in tuples, lists and dicts. Its looks (structure,
shapes, strides, types, which tensors want a gradient) are told once for each shape of input, as a
message of their own; after that both sides know them, and only numbers are sent. Messages of the
two directions go through groups of their own: under NCCL two ranks that send to each other at once
through one group would wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.torch.comm import Comm
from allranks.torch.data.nested import tensors_in
from allranks.torch.groups.pending import Pending
from allranks.torch.pipelining.looks import Looks, flat, laid_out

LOOKS_TAG = 0
Room = list[tuple[Tensor, bool]]
"""Memory for the tensors of a value, and which of them want a gradient."""
Sent = tuple[Pending, Tensor]
"""A message, and the memory that it leaves from."""


class Links:
    """The messages of one rank with those that hold the stages before and after its own.

    Stage s lies on rank s mod ranks of `line`. `finish` is called once at the end of each step.
    """

    def __init__(self, line: Comm, backwards: Comm) -> None:
        self.line, self.backwards = line, backwards
        self._known: dict[Hashable, Looks] = {}
        self._on_their_way: dict[tuple[int, int], list[Sent]] = {}
        self._told: list[Sent] = []
        self._expected: dict[tuple[str, int, int], tuple[Looks | None, Room, list[Pending]]] = {}

    def send(self, stage: int, micro: int, key: Hashable, value: Any, kind: str) -> None:
        """Give what `stage` returned to the next one. `key` stands for the shape of the input."""
        peer, looks = (stage + 1) % self.line.size, Looks.of(value)
        known = self._known.setdefault((stage, key), looks)
        if known is looks:
            self._tell(looks, peer)
        elif known != looks:
            raise _changed(stage, known, looks)
        tag = _tag(stage, micro)
        sent = [(laid_out(t.detach()), peer) for t in tensors_in(value)]
        self._on_their_way[stage, micro] = [
            (self.line.send(flat(t), to, tag, kind), t) for t, to in sent if t.numel()
        ]

    def expect(self, stage: int, micro: int, key: Hashable) -> None:
        """`receive` comes next: what is sent may come in while this rank computes."""
        looks = self._known.get((stage - 1, key))
        if looks is None or ("F", stage, micro) in self._expected:
            return
        room = looks.tensors(self.line.device)
        self._expected["F", stage, micro] = (
            looks,
            room,
            self._posted(self.line, room, (stage - 1) % self.line.size, _tag(stage - 1, micro)),
        )

    @staticmethod
    def _posted(comm: Comm, room: Room, peer: int, tag: int) -> list[Pending]:
        return [comm.receive(flat(t), peer, tag) for t, _ in room if t.numel()]

    def receive(self, stage: int, micro: int, key: Hashable) -> tuple[Any, list[Received]]:
        """What the stage before `stage` returned, and its tensors that want a gradient."""
        if (stage - 1, key) not in self._known:
            self._known[stage - 1, key] = self._hear((stage - 1) % self.line.size)
        self.expect(stage, micro, key)
        looks, room, pending = self._expected.pop(("F", stage, micro))
        assert looks is not None
        for one in pending:
            one.wait()
        received = [Received(t) if wants else None for t, wants in room]
        with torch.enable_grad():
            pairs = zip(received, room, strict=True)
            entered = [t if one is None else one.entering() for one, (t, _) in pairs]
        return looks.value(iter(entered)), [one for one in received if one is not None]

    def send_gradients(self, stage: int, micro: int, received: list[Received]) -> None:
        """Give the gradients of what `stage` was given to the stage before it.

        A byte for each says first whether there is one (`control`): where backward has not come to
        a tensor, zeros are sent, and the weights before it get no gradient, as in one process.
        """
        peer, tag = (stage - 1) % self.line.size, _tag(stage, micro)
        sent = []
        if received:
            there = torch.tensor([one.gradient is not None for one in received]).to(torch.uint8)
            there = there.to(self.line.device)
            sent.append((self.backwards.send(there, peer, tag, "control"), there))
        for one in received:
            if one.tensor.numel():
                gradient = torch.zeros_like(one.tensor) if one.gradient is None else one.gradient
                bytes_of_it = flat(_as(gradient, one.tensor))
                sent.append((self.backwards.send(bytes_of_it, peer, tag), bytes_of_it))
        self._on_their_way[-1 - stage, micro] = sent

    def receive_gradients(
        self, stage: int, micro: int, outputs: list[Tensor]
    ) -> list[Tensor | None]:
        """The gradients of the tensors that `stage` returned, of those that want one.

        `None` where the next stage has not used the tensor.
        """
        self.expect_gradients(stage, micro, outputs)
        _, room, pending = self._expected.pop(("B", stage, micro))
        for one in pending:
            one.wait()
        self.arrived(stage, micro)
        if not outputs:
            return []
        (there, _), *gradients = room
        pairs = zip(there.tolist(), gradients, strict=True)
        return [gradient if is_there else None for is_there, (gradient, _) in pairs]

    def expect_gradients(self, stage: int, micro: int, outputs: list[Tensor]) -> None:
        """`receive_gradients` comes next."""
        if ("B", stage, micro) not in self._expected:
            peer, tag = (stage + 1) % self.line.size, _tag(stage + 1, micro)
            room = [(_room_for(tensor), False) for tensor in outputs]
            if outputs:
                there = torch.zeros(len(outputs), dtype=torch.uint8, device=self.line.device)
                room.insert(0, (there, False))
            pending = self._posted(self.backwards, room, peer, tag)
            self._expected["B", stage, micro] = None, room, pending

    def arrived(self, stage: int, micro: int) -> None:
        """What `stage` sent forward has been used: its memory is not needed any more."""
        for pending, _ in self._on_their_way.pop((stage, micro), ()):
            pending.wait()

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
        looks = Looks.of(value) if line.rank == source else None
        if ("shared", key) not in self._known:
            texts = line.gather_texts("" if looks is None else looks.text)
            self._known["shared", key] = Looks(texts[source])
        known = self._known["shared", key]
        if looks is not None and looks != known:
            raise _changed(source, known, looks)
        if looks is not None:
            for tensor in tensors_in(value):
                line.broadcast(flat(laid_out(tensor.detach())), source=source)
            return value
        found = [tensor for tensor, _ in known.tensors(line.device)]
        for tensor in found:
            line.broadcast(flat(tensor), source=source)
        return known.value(iter(found))

    def _tell(self, looks: Looks, peer: int) -> None:
        device = self.line.device
        data = torch.frombuffer(bytearray(looks.text.encode()), dtype=torch.uint8).to(device)
        size = torch.tensor([data.numel()], device=device)
        self._told += [(self.line.send(t, peer, LOOKS_TAG, "control"), t) for t in (size, data)]

    def _hear(self, peer: int) -> Looks:
        size = torch.zeros(1, dtype=torch.int64, device=self.line.device)
        self.line.receive(size, peer, LOOKS_TAG).wait()
        data = torch.zeros(int(size), dtype=torch.uint8, device=self.line.device)
        self.line.receive(data, peer, LOOKS_TAG).wait()
        return Looks(bytes(data.cpu().numpy()).decode())


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


def _room_for(tensor: Tensor) -> Tensor:
    stride = laid_out(tensor.detach()).stride()
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)


def _as(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient in the order of memory of what it is of."""
    if gradient.stride() == like.stride() and gradient.dtype == like.dtype:
        return laid_out(gradient)
    return torch.empty_strided(
        like.shape, like.stride(), dtype=like.dtype, device=like.device
    ).copy_(gradient)


def _changed(stage: int, known: Looks, looks: Looks) -> RequestError:
    return RequestError(
        asked="a pipeline over stages",
        found=f"stage {stage} returned {looks.text} for an input of the shape for which it had "
        f"returned {known.text}"[:300],
        why="the next stage has made room for what came the first time",
        do="let the shapes that a stage returns follow from the shapes of its inputs",
    )
