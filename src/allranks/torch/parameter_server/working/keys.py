"""A gradient leaves in keys, last layers first, while backward makes the rest of it.

    what goes to a server   | first layers … | … | … last layers |      as it lies (`flat`)
    keys                    |  key 3  | key 2 | key 1  |  key 0  |      whole pieces, `key_mb` each
    backward                            <- finishes

A key leaves as soon as backward has finished all that lies in it, in a thread of its own; its
server puts it where the gradient of this worker lies, and hears by the push after it that all have
come. Only where a gradient travels: in memory that is shared it lies where the server reads it as
soon as backward has made it. MXNet's kvstore and BytePS send so, with a key for each array.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from allranks.torch.parameter_server.flat import Flat, FlatLayout, cut
from allranks.torch.parameter_server.links import Links
from allranks.torch.parameter_server.tables.remote import RowGradients
from allranks.torch.step.gradients import clip_factor, gradient_taken


@dataclass(frozen=True)
class Key:
    """The bytes `start` to `stop` - 1 of what goes to a `server`, with these of its `pieces`."""

    server: int
    start: int
    stop: int
    pieces: tuple[int, ...]


def keys_of(layout: FlatLayout, server: int, least_bytes: int) -> list[Key]:
    """Keys of at least so many bytes, but for the last; the end of the layout comes first."""
    found = list[Key]()
    stop, pieces = layout.nbytes, list[int]()

    def lies_at(piece: int) -> tuple[int, bool]:  # one without a number begins where the next does
        return layout.starts[piece], layout.pieces[piece].numbers > 0

    for piece in sorted(range(len(layout.pieces)), key=lies_at, reverse=True):
        pieces.append(piece)
        start = layout.starts[piece]
        if stop - start >= least_bytes or start == 0:
            found.append(Key(server, start, stop, tuple(pieces)))
            stop, pieces = start, []
    return found


class Leaving:
    """The keys of a worker's gradient, which is in `flats`, one for each server of `links`.

    A step calls `begin` before its last backward pass, `finished` in it, and `finish` after it.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        flats: Sequence[Flat],
        parameters: Sequence[nn.Parameter],
        links: Links,
    ) -> None:
        self.keys, self._flats, self._parameters, self._links = keys, flats, parameters, links
        self.is_open = False
        self._of: dict[int, list[tuple[Key, int]]] = {}
        for key in keys:
            for piece in key.pieces:
                position = flats[key.server].layout.pieces[piece].position
                self._of.setdefault(position, []).append((key, piece))
        self._pending: dict[Key, int] = {}
        self._finished: set[int] = set()
        self._sender = ThreadPoolExecutor(1, "allranks-keys")
        self._sent: list[Future[None]] = []

    def begin(self) -> None:
        """A key may leave once the next backward pass has finished it."""
        self.is_open = True
        self._pending = {key: len(key.pieces) for key in self.keys}
        self._finished.clear()

    def drop(self) -> None:
        """Before the passes of a step: what has left in one that was no step is forgotten."""
        self._wait()
        self.is_open = False

    @torch.no_grad()
    def finished(self, position: int) -> None:
        """Backward has finished the gradient of a parameter (called during backward).

        What is finished twice (by a checkpoint that is computed again) stays, to be sent once more.
        """
        if not self.is_open:
            return
        again = position in self._finished
        self._finished.add(position)
        for key, piece in self._of.get(position, ()):
            if again:
                self._pending[key] = -1
                continue
            if self._pending[key] < 0:
                continue
            self._lay_down(key, piece, position)
            self._pending[key] -= 1
            if not self._pending[key]:
                self._sent.append(self._sender.submit(self._send, key))

    def left(self, server: int) -> Collection[int]:
        """The pieces of a server that have left, as they are."""
        return {
            piece
            for key, pending in self._pending.items()
            if self.is_open and key.server == server and not pending
            for piece in key.pieces
        }

    def finish(self) -> None:
        """Let the rest leave, which lies in `flats` by now, and wait until all has."""
        for key, pending in self._pending.items():
            if pending:
                self._sent.append(self._sender.submit(self._send, key))
        self.is_open = False
        self._wait()

    def _wait(self) -> None:
        for one in self._sent:
            one.result()
        self._sent = []

    def _lay_down(self, key: Key, piece: int, position: int) -> None:
        """Copy a gradient that backward has left elsewhere: of a tensor that is cut, say."""
        flat, gradient = self._flats[key.server], self._parameters[position].grad
        if gradient is None:
            raise gradient_taken(self._parameters[position])
        view = flat.views[piece]
        dense: Tensor = gradient.to_dense() if gradient.is_sparse else gradient
        if dense.data_ptr() != view.data_ptr():
            view.copy_(cut(dense, flat.layout.pieces[piece]).view(view.shape))

    def _send(self, key: Key) -> None:
        body = self._flats[key.server].buffer[key.start : key.stop]
        self._links.send(key.server, {"key": key.start}, body)

    def close(self) -> None:
        """The servers are left; what is under way may have come there, or not."""
        if not all(one.done() for one in self._sent):
            self._links.shut()
        self._sent, self.is_open = [], False
        self._sender.shutdown(cancel_futures=True)


class LeftGradients(RowGradients):
    """A gradient whose keys leave as backward has made them: what is done to it is their `factor`.

    It is for the servers to multiply by it.
    """

    def add(self, value: Tensor) -> None:
        raise AssertionError("with a regularizer no key leaves before it is added")

    def tensors(self) -> list[Tensor | None]:
        return [None if g is None else g * self.factor for g in super().tensors()]

    def scale_(self, factor: float | Tensor) -> None:
        self.factor *= float(factor)

    def norm(self, *, clips: bool, left_out: bool) -> float:
        return abs(self.factor) * super().norm(clips=clips, left_out=left_out)

    def norm_unread(self, *, clips: bool, left_out: bool) -> Tensor:
        return abs(self.factor) * super().norm_unread(clips=clips, left_out=left_out)

    def clip_(self, limit: float, norm: float | Tensor) -> None:
        self.factor *= clip_factor(limit, norm)
