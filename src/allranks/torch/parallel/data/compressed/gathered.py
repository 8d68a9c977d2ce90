"""The base of reducers with error feedback: residuals by parameter, and uncompressed first steps.

Residuals belong to one rank, and are saved by parameter name. So buckets may change in order or
size, and a training resumed on as many ranks continues to the bit. The tally is never rounded.
Gradients are already divided by the global batch, so a sum is their mean. Clipping, the guard and
the optimizer use that sum, the same bits on every rank. If a step is skipped, what was sent in it
is lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from allranks.strategies.compressed import whole_words
from allranks.torch.comm.comm import Comm, Pending
from allranks.torch.compression.codecs import Codec, ErrorFeedback, TopK, TwoBit
from allranks.torch.compression.cosines import CodecParts, CosineBlocks
from allranks.torch.parallel.data.reducer import Bucket, Reducer


class BucketExchange(ABC):
    """One bucket, and this rank's residuals for it."""

    @abstractmethod
    def messages(self) -> Iterator[Pending]:
        """Sum the bucket over all ranks; yields each message to wait for."""

    @abstractmethod
    def residuals(self) -> dict[str, dict[str, Tensor]]:
        """Views of the state, by parameter name and by key."""


class Compressed(Reducer):
    """Sums uncompressed in the first `after` steps, then by `exchange_of(bucket)`."""

    def __init__(
        self,
        comm: Comm,
        shards: int,
        exchange_of: Callable[[Bucket], BucketExchange],
        after: int = 0,
    ) -> None:
        super().__init__(comm, shards)
        self.exchange_of, self.after, self.steps = exchange_of, after, 0
        self._exchanges: list[BucketExchange] = []

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        super().prepare(buckets)
        self._exchanges = [self.exchange_of(bucket) for bucket in buckets if bucket.views]

    def exchange(self, bucket: int) -> Iterator[Pending]:
        compresses = self._exchanges and self.steps >= self.after
        return self._exchanges[bucket].messages() if compresses else super().exchange(bucket)

    def finish(self) -> None:
        super().finish()
        self.steps += bool(self._exchanges)

    def state(self) -> dict[str, Any]:
        named = [item for exchange in self._exchanges for item in exchange.residuals().items()]
        return {"steps": self.steps, "kept": dict(named)}

    def load_state(self, state: dict[str, Any]) -> None:
        if not state:
            return
        self.steps = int(state["steps"])
        for exchange in self._exchanges:
            for name, parts in exchange.residuals().items():
                for key, tensor in state["kept"].get(name, {}).items():
                    if key in parts and parts[key].shape == tensor.shape:
                        parts[key].copy_(tensor)


def real_view(view: Tensor) -> Tensor:
    """A gradient as real numbers; complex ones as pairs."""
    return torch.view_as_real(view) if view.is_complex() else view


def views_into(flat: Tensor, bucket: Bucket) -> dict[str, Tensor]:
    """Views of `flat` with the offsets and strides of a bucket's gradients, by name."""
    views = {}
    for name, view in bucket.views.items():
        real = real_view(view)
        offset = real.storage_offset() - bucket.flat.storage_offset()
        views[name] = flat.as_strided(real.shape, real.stride(), flat.storage_offset() + offset)
    return views


def shapes_of(bucket: Bucket) -> tuple[tuple[int, ...], ...]:
    """The shapes of its gradients; complex ones are vectors of real numbers."""
    views = bucket.views.values()
    return tuple((2 * v.numel(),) if v.is_complex() else tuple(v.shape) for v in views)


# --- gathered ------------------------------------------------------------------------------------
# Sums of encoded buckets: every rank gets the messages of all ranks, and adds them.
#
#     1. every rank adds its residual to its bucket, encodes it, and keeps the error as a residual
#     2. an all-gather gives every rank the messages of all, with their unrounded tallies
#     3. every rank decodes and adds them in rank order: all get the same bits
#
# Sends (N-1) messages, so it is for few ranks or small messages. A single rank encodes and decodes
# too, and has a residual.
#
# `top-k` keeps the k largest of each chunk of a bucket (Lin et al. 2018, Deep Gradient Compression,
# arXiv 1712.01887, without its momentum correction; the form is that of `compression.codecs`).
# `two-bit` is that of MXNet.


class Gathered(BucketExchange):
    """One bucket, encoded as a whole. Its residual has its size, and may decay."""

    def __init__(self, comm: Comm, bucket: Bucket, codec: Codec, decay: float = 1) -> None:
        self.comm, self.bucket = comm, bucket
        self.feedback = ErrorFeedback(codec, bucket.gradients, decay)

    def messages(self) -> Iterator[Pending]:
        gradients = self.bucket.gradients
        tally = self.bucket.flat[gradients.numel() :]
        encoded = self.feedback.encode(gradients)
        size = encoded.numel()
        message = encoded.new_zeros(size + whole_words(tally.nbytes))
        message[:size] = encoded
        message[size : size + tally.nbytes] = tally.view(torch.uint8)
        every = message
        if self.comm.size > 1:
            every = message.new_empty(self.comm.size * message.numel())
            yield self.comm.all_gather(every, message)
        self.bucket.flat.zero_()
        for row in every.view(-1, message.numel()):
            self.feedback.codec.add_decoded(row[:size], gradients)
            tally += row[size : size + tally.nbytes].view(tally.dtype)

    def residuals(self) -> dict[str, dict[str, Tensor]]:
        views = views_into(self.feedback.residual, self.bucket)
        return {name: {"residual": view} for name, view in views.items()}


def top_k(comm: Comm, shards: int, *, k: int, chunk: int, values: str, after: int) -> Compressed:
    """An all-gather per bucket. Sends (N-1) times k numbers of each chunk, with 12-bit indices."""
    codec = TopK(k, chunk, values)
    return Compressed(comm, shards, lambda bucket: Gathered(comm, bucket, codec), after)


def two_bit(comm: Comm, shards: int, *, threshold: float, after: int) -> Compressed:
    """An all-gather per bucket. Sends (N-1) times 2 bits of each number."""
    codec = TwoBit(threshold)
    return Compressed(comm, shards, lambda bucket: Gathered(comm, bucket, codec), after)


# --- demo ----------------------------------------------------------------------------------------
# DeMo: each rank has a local momentum, and sends its largest DCT coefficients.
#
#     1. m <- beta m + gradient: of this rank alone
#     2. q: the k largest coefficients of each block of m; m <- m - decoded q
#     3. an all-gather gives every rank the q of all; weights move by the signs of their sum
#
# A momentum minus what was sent is a decaying residual: so this is error feedback with a decay in
# front of a codec. The sum here has its magnitude, for the guard. Its signs are taken at the update
# (`Gradients.sign_`), by SGD without momentum. Weight decay of that SGD is added after the signs:
# decoupled. Peng et al. 2024, arXiv 2411.19870,
# whose code has blocks of 64 x 64, k = 32 and beta = 0.999.


def demo(comm: Comm, shards: int, *, k: int, chunk: int, beta: float) -> Compressed:
    """An all-gather per bucket. Sends (N-1) times k coefficients of each block."""

    def exchange_of(bucket: Bucket) -> BucketExchange:
        first = int(bucket.flat.storage_offset())
        parts: list[tuple[int, int, Codec]] = []
        for view, shape in zip(bucket.views.values(), shapes_of(bucket), strict=True):
            real = real_view(view)
            if real.numel():
                codec = CosineBlocks(shape, k, chunk)
                parts.append((int(real.storage_offset()) - first, real.numel(), codec))
        return Gathered(comm, bucket, CodecParts(parts), beta)

    return Compressed(comm, shards, exchange_of)
