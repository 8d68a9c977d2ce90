"""Gradients in a few flat buckets, in the reverse order of the parameters.

That is roughly the order in which backward finishes them. The `.grad` of every parameter is a view
into its bucket. The tally is at the end of the bucket that is launched last. Every view begins at a
multiple of 128 bytes, as a separate gradient would: results of kernels depend on alignment, to the
last bit. Buckets are launched in index order on all ranks, each as soon as it and all before it are
finished; the last one after backward, because of the tally. So a single bucket overlaps with
nothing, and a parameter without a gradient delays its bucket, and all later ones, to the end.

Backward accumulates into an existing `.grad`, so a bucket begins as zeros. With `moves`, backward
makes large gradients anew, and each is copied into its view, which is faster (`Moved`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.torch.model.reals import real_type, reals
from allranks.torch.parallel.data.reducer import Bucket, Reducer
from allranks.torch.step.gradients import gradient_taken

# --- moved ---------------------------------------------------------------------------------------
# Gradients that are moved into their bucket as soon as backward has made them.
#
# To accumulate into zeros costs a write and a read more than a new gradient. So `.grad` is None
# here, and the new gradient is moved into the bucket: the same bits, 0 + g.


MOVED_BYTES = 2**16  # from here on a pass through memory takes longer than a Python call


class Moved:
    """The `homes` of gradients, by the positions of their parameters.

    One or more passes begin with `begin` and end with `settle`; `finished` is called for each
    gradient that a backward pass has finished.
    """

    def __init__(self, homes: Mapping[int, tuple[nn.Parameter, Tensor]]) -> None:
        self._homes = homes
        self._awaited: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def begin(self) -> None:
        """Let backward make all gradients anew."""
        self._awaited = dict(self._homes)
        for parameter, _ in self._homes.values():
            parameter.grad = None

    def finished(self, position: int) -> None:
        """Backward has finished a gradient (called during backward): the first one is moved.

        Later passes accumulate in the bucket.
        """
        if position in self._awaited:
            self._move(*self._awaited.pop(position))

    def _move(self, parameter: nn.Parameter, home: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            raise gradient_taken(parameter)
        if gradient.is_sparse:
            home.zero_().add_(gradient)
        else:
            torch.add(gradient, 0, out=home)  # no copy: 0 + -0.0 is 0.0
        parameter.grad = home

    def settle(self) -> None:
        """Set gradients to zero that no pass has made."""
        for parameter, home in self._awaited.values():
            if parameter.grad is not None:
                raise gradient_taken(parameter)
            parameter.grad = home.zero_()
        self._awaited = {}


# --- in order ------------------------------------------------------------------------------------
# The order in which buckets are launched: the same on all ranks.


class InOrder:
    """Calls `leave(bucket)` for the buckets 0, 1, 2, … of one backward pass, in this order.

    `bucket_of` is the bucket of each parameter. The last `held_back` buckets leave only with
    `finish`.
    """

    def __init__(
        self, bucket_of: Sequence[int], leave: Callable[[int], None], *, held_back: int = 0
    ) -> None:
        self._bucket_of, self._leave = bucket_of, leave
        self._buckets = max(bucket_of, default=-1) + 1
        self._members: list[set[int]] = [set() for _ in range(self._buckets)]
        for position, bucket in enumerate(bucket_of):
            self._members[bucket].add(position)
        self._may_leave = self._buckets - held_back
        self._pending: list[set[int]] = []
        self._is_open = False
        self._launched = 0

    def begin(self) -> None:
        """Begin a step; no bucket leaves before `release`."""
        self._is_open, self._launched = False, 0

    def release(self) -> None:
        """Let buckets leave as soon as the next backward pass has finished them."""
        self._is_open, self._pending = True, list(map(set.copy, self._members))

    def finished(self, position: int) -> None:
        """Backward has finished the gradient of a parameter (called during backward)."""
        if not self._is_open:
            return
        pending = self._pending[self._bucket_of[position]]
        if position not in pending:
            raise RequestError(
                asked="one backward pass",
                found="it finished the gradient of a parameter twice",
                why="its bucket may have left after the first time",
                do="use checkpoint(…, use_reentrant=False)",
            )
        pending.remove(position)
        if not pending:
            while self._launched < self._may_leave and not self._pending[self._launched]:
                self._launch_next()

    def finish(self) -> None:
        """Let the remaining buckets leave."""
        while self._launched < self._buckets:
            self._launch_next()
        self._is_open = False

    def _launch_next(self) -> None:
        self._leave(self._launched)
        self._launched += 1


ALIGNED_BYTES = 128


class Buckets:
    """The buckets of one model on one rank.

    A step calls `begin`, `add_leaf` after each leaf but the last, `release` before the last
    backward pass, and `finish`. `gradient_finished` is called in every backward pass; without
    `moves` the last one is enough.
    """

    def __init__(
        self,
        names: list[str],
        parameters: list[nn.Parameter],
        *,
        tally_size: int,
        bucket_bytes: int,
        reducer: Reducer,
        moves: bool = False,
    ) -> None:
        self.reducer = reducer
        self.buckets: list[Bucket] = []
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        moved: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self._zeroed: list[Tensor] = []  # parts that `begin` clears: all but moved gradients
        self._bucket_of = [0] * len(parameters)
        groups = grouped(parameters, bucket_bytes)
        for bucket, positions in enumerate(groups):
            extra = tally_size if bucket == len(groups) - 1 else 0
            sizes = [_room_for(parameters[position]) for position in positions]
            size = sum(sizes)
            flat = reducer.room(size + extra, reals(parameters[positions[0]].detach()))
            parts = flat[:size].split(sizes)
            views, end = {}, 0
            for position, part in zip(positions, parts, strict=True):
                parameter = parameters[position]
                view = views[names[position]] = _laid_out_as(parameter, part)
                self._views.append((parameter, view))
                self._bucket_of[position] = bucket
                if moves and parameter.nbytes >= MOVED_BYTES:
                    moved[position] = parameter, view
                    start = part.storage_offset() - flat.storage_offset()
                    self._zeroed.append(flat[end:start])
                    end = start + parameter.nbytes // flat.element_size()
            self._zeroed.append(flat[end:])
            self.buckets.append(Bucket(flat, flat[:size], views))
        self.tally = self.buckets[-1].flat[size : size + tally_size]
        self._zeroed = [part for part in self._zeroed if part.numel()]
        self._moved = Moved(moved)
        reducer.prepare(self.buckets)
        self._leave = _Leave(reducer)
        self._order = InOrder(self._bucket_of, self._leave, held_back=1)

    @property
    def flats(self) -> list[Tensor]:
        """The messages: one flat tensor for each bucket."""
        return [bucket.flat for bucket in self.buckets]

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients of each bucket, without the tally."""
        return [bucket.gradients for bucket in self.buckets]

    def begin(self) -> None:
        """Set the tally and all gradients to zero; moved ones are made by backward."""
        if self._zeroed:
            torch._foreach_zero_(self._zeroed)
        for parameter, view in self._views:
            parameter.grad = view
        self._moved.begin()
        self._order.begin()

    def add_leaf(self, shards: range) -> None:
        """Add a leaf that is not the last; gradients and tally are zero again."""
        self._moved.settle()
        for bucket in range(len(self.buckets)):
            self.reducer.launch(bucket, (shards.start, shards.stop), last=False)
        self._moved.begin()

    def release(self, shards: range) -> None:
        """The next backward pass is the last: buckets may leave as soon as they are finished."""
        self._leave.shards = shards
        self._order.release()

    def gradient_finished(self, position: int) -> None:
        """Backward has finished the gradient of a parameter (called during backward)."""
        self._moved.finished(position)
        self._order.finished(position)

    def finish(self, shards: range) -> None:
        """Launch the remaining buckets and wait: all hold the sums over all ranks."""
        self.leave(shards)
        self.reducer.finish()

    def leave(self, shards: range) -> None:
        """Launch the remaining buckets."""
        self._moved.settle()
        self._leave.shards = shards
        self._order.finish()
        for parameter, view in self._views:
            if parameter.grad is not view:
                raise gradient_taken(parameter)


class _Leave:
    """Launches a bucket with the last of this rank's `shards`.

    It holds no reference to the buckets, so that their memory is freed with them.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.reducer, self.shards = reducer, range(0)

    def __call__(self, bucket: int) -> None:
        self.reducer.launch(bucket, (self.shards.start, self.shards.stop), last=True)


def _room_for(parameter: Tensor) -> int:
    """The size of a gradient in its bucket, in real numbers."""
    item = reals(parameter.detach()).element_size()
    return -(-parameter.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES // item


def _laid_out_as(parameter: Tensor, flat: Tensor) -> Tensor:
    """The start of `flat` as a parameter's shape, in its memory format (channels-last)."""
    if parameter.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    flat = flat[: parameter.numel()]
    if parameter.is_contiguous():
        return flat.view(parameter.shape)
    return flat.as_strided(
        parameter.shape, torch.empty_like(parameter).stride(), flat.storage_offset()
    )


def grouped(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[int]]:
    """Positions of the parameters of each bucket, last parameter first, one type per bucket."""
    groups: list[list[int]] = []
    filled, kind = 0, torch.float32
    for position in reversed(range(len(parameters))):
        parameter = parameters[position]
        dtype = real_type(parameter.dtype)
        if not groups or filled + parameter.nbytes > bucket_bytes or dtype != kind:
            groups.append([])
            filled, kind = 0, dtype
        groups[-1].append(position)
        filled += parameter.nbytes
    return groups
