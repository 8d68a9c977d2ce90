"""What reducers with error feedback share: what was not sent, by parameter, and a plain beginning.

How one bucket is summed is a generator, which yields each message that it has begun and goes on
once that has come. So several buckets are under way at once, in one order on all ranks.

Residuals are of a rank alone. They are kept by the name of a parameter: another order or another
size of buckets finds them again, and a resumed training, on as many ranks, goes on to the bit.
The tally is never rounded. Gradients come divided by the global batch, so a sum is their mean;
clipping, the guard and the optimizer see that sum, the same bits on every rank. What a rank had
sent in a step that is skipped is lost with that step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from allranks.strategies.reduction_tree import Span
from allranks.strategies.reductions.compressed import whole_words
from allranks.torch.comm.comm import Comm
from allranks.torch.comm.subgroups import Pending
from allranks.torch.compression.codecs import Codec, TopK, TwoBit
from allranks.torch.compression.cosines import CodecParts, CosineBlocks
from allranks.torch.compression.error_feedback import ErrorFeedback
from allranks.torch.parallel.data.reducer import Bucket, Reducer


class BucketExchange(ABC):
    """One bucket, and what this rank keeps of it from step to step."""

    @abstractmethod
    def messages(self) -> Iterator[Pending]:
        """Sum the bucket over all ranks: each message that is begun, to be waited for."""

    @abstractmethod
    def kept(self) -> dict[str, dict[str, Tensor]]:
        """Views of what is kept, by the name of a parameter and of what it is."""


class Compressed(Reducer):
    """Sums plainly in the first `after` steps; then as the exchange of each bucket does."""

    def __init__(self, comm: Comm, shards: int, after: int = 0) -> None:
        super().__init__(comm, shards)
        self.after, self.steps = after, 0
        self._exchanges: list[BucketExchange] = []
        self._under_way: list[tuple[Iterator[Pending], Pending]] = []

    @abstractmethod
    def exchange_of(self, bucket: Bucket) -> BucketExchange:
        """How a bucket with the gradients of parameters is summed."""

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        super().prepare(buckets)
        self._exchanges = [self.exchange_of(bucket) for bucket in buckets if bucket.views]

    def launch(self, bucket: int, leaf: Span, *, last: bool) -> None:
        assert last, "gradients of all shards add up in the bucket: one leaf per rank"
        compresses = self._exchanges and self.steps >= self.after
        found = self._exchanges[bucket].messages() if compresses else self._plain(bucket)
        first = next(found, None)
        if first is not None:
            self._under_way.append((found, first))

    def finish(self) -> None:
        under_way, self._under_way = self._under_way, []
        while under_way:
            still = []
            for messages, pending in under_way:
                pending.wait()
                following = next(messages, None)
                if following is not None:
                    still.append((messages, following))
            under_way = still
        self.steps += bool(self._exchanges)

    def state(self) -> dict[str, Any]:
        kept = {n: parts for exchange in self._exchanges for n, parts in exchange.kept().items()}
        return {"steps": self.steps, "kept": kept}

    def load_state(self, state: dict[str, Any]) -> None:
        if not state:
            return
        self.steps = int(state["steps"])
        for exchange in self._exchanges:
            for name, parts in exchange.kept().items():
                for what, tensor in state["kept"].get(name, {}).items():
                    if what in parts and parts[what].shape == tensor.shape:
                        parts[what].copy_(tensor)

    def _plain(self, bucket: int) -> Iterator[Pending]:
        yield self.comm.all_reduce(self.buckets[bucket].flat)


def real_view(view: Tensor) -> Tensor:
    """A gradient in real numbers: complex ones are pairs."""
    return torch.view_as_real(view) if view.is_complex() else view


def views_into(flat: Tensor, bucket: Bucket) -> dict[str, Tensor]:
    """The parts of `flat` that lie as the gradients of a bucket lie in it, by name."""
    found = {}
    for name, view in bucket.views.items():
        real = real_view(view)
        offset = real.storage_offset() - bucket.flat.storage_offset()
        found[name] = flat.as_strided(real.shape, real.stride(), flat.storage_offset() + offset)
    return found


def shapes_of(bucket: Bucket) -> tuple[tuple[int, ...], ...]:
    """Those of its gradients; complex ones are vectors of real numbers."""
    views = bucket.views.values()
    return tuple((2 * v.numel(),) if v.is_complex() else tuple(v.shape) for v in views)


# --- gathered ------------------------------------------------------------------------------------
# Sums of what a codec makes of each rank's bucket: every rank is given all, and adds it up.
#
#     1. every rank adds its residual to its bucket, encodes that, keeps what the message leaves out
#     2. an all-gather gives every rank the messages of all, with their tallies as they are
#     3. every rank adds what they say in the order of the ranks: all end with the same bits
#
# Sends (N-1) messages: so it is for few ranks, or for messages that are small enough. One rank
# alone encodes and decodes too, and keeps a residual.
#
# `top-k` keeps the k largest of each chunk of a bucket (Lin et al. 2018, Deep Gradient Compression,
# arXiv 1712.01887, without its momentum correction; the form is that of `compression.codecs`).
# `two-bit` is that of MXNet.


class Gathered(BucketExchange):
    """One bucket, encoded whole. Keeps a residual of its size, which may fade."""

    def __init__(self, comm: Comm, bucket: Bucket, codec: Codec, decay: float = 1) -> None:
        self.comm, self.bucket = comm, bucket
        self.feedback = ErrorFeedback(codec, bucket.gradients, decay)

    def messages(self) -> Iterator[Pending]:
        gradients = self.bucket.gradients
        tally = self.bucket.flat[gradients.numel() :]
        encoded = self.feedback.encode(gradients)
        size = encoded.numel()
        own = encoded.new_zeros(size + whole_words(tally.nbytes))
        own[:size] = encoded
        own[size : size + tally.nbytes] = tally.view(torch.uint8)
        every = own
        if self.comm.size > 1:
            every = own.new_empty(self.comm.size * own.numel())
            yield self.comm.all_gather(every, own)
        self.bucket.flat.zero_()
        for row in every.view(-1, own.numel()):
            self.feedback.codec.add_decoded(row[:size], gradients)
            tally += row[size : size + tally.nbytes].view(tally.dtype)

    def kept(self) -> dict[str, dict[str, Tensor]]:
        views = views_into(self.feedback.residual, self.bucket)
        return {name: {"residual": view} for name, view in views.items()}


class TopKReducer(Compressed):
    """An all-gather per bucket. Sends (N-1) times k numbers of each chunk, with 12-bit indices."""

    def __init__(
        self, comm: Comm, shards: int, *, k: int, chunk: int, values: str, after: int
    ) -> None:
        super().__init__(comm, shards, after)
        self.codec = TopK(k, chunk, values)

    def exchange_of(self, bucket: Bucket) -> BucketExchange:
        return Gathered(self.comm, bucket, self.codec)


class TwoBitReducer(Compressed):
    """An all-gather per bucket. Sends (N-1) times 2 bits of each number."""

    def __init__(self, comm: Comm, shards: int, *, threshold: float, after: int) -> None:
        super().__init__(comm, shards, after)
        self.codec = TwoBit(threshold)

    def exchange_of(self, bucket: Bucket) -> BucketExchange:
        return Gathered(self.comm, bucket, self.codec)


# --- demo ----------------------------------------------------------------------------------------
# DeMo: each rank keeps a momentum of its own, and sends what is largest in it, by cosines.
#
#     1. m <- beta m + gradient: of this rank alone
#     2. q: the k largest coefficients of each block of m; m <- m - what q says
#   3. an all-gather gives every rank the q of all; weights move by the signs of what they add up to
#
# A momentum that loses what was sent is a residual that fades: so this is error feedback with a
# decay in front of a codec. The sum leaves here with its size, by which steps are guarded; its
# signs are taken where weights are updated (`Gradients.sign_`), by SGD without a momentum. What
# that has as weight decay is added after the signs: decoupled. Peng et al. 2024, arXiv 2411.19870,
# whose code has blocks of 64 x 64, k = 32 and beta = 0.999.


class DeMo(Compressed):
    """An all-gather per bucket. Sends (N-1) times k coefficients of each block."""

    def __init__(self, comm: Comm, shards: int, *, k: int, chunk: int, beta: float) -> None:
        super().__init__(comm, shards)
        self.keep, self.chunk, self.beta = k, chunk, beta

    def exchange_of(self, bucket: Bucket) -> BucketExchange:
        first = int(bucket.flat.storage_offset())
        parts: list[tuple[int, int, Codec]] = []
        for view, shape in zip(bucket.views.values(), shapes_of(bucket), strict=True):
            real = real_view(view)
            if real.numel():
                codec = CosineBlocks(shape, self.keep, self.chunk)
                parts.append((int(real.storage_offset()) - first, real.numel(), codec))
        return Gathered(self.comm, bucket, CodecParts(parts), self.beta)
