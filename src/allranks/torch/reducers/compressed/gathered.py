"""Sums of what a codec makes of each rank's bucket: every rank is given all, and adds it up.

    1. every rank adds its residual to its bucket, encodes that, keeps what the message leaves out
    2. an all-gather gives every rank the messages of all, with their tallies as they are
    3. every rank adds what they say in the order of the ranks: all end with the same bits

Sends (N-1) messages: so it is for few ranks, or for messages that are small enough. One rank alone
encodes and decodes too, and keeps a residual.

`top-k` keeps the k largest of each chunk of a bucket (Lin et al. 2018, Deep Gradient Compression,
arXiv 1712.01887, without its momentum correction; the form is that of `compression.top_k`).
`two-bit` is that of MXNet.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from allranks.strategies.reductions.compressed import whole_words
from allranks.torch.comm.comm import Comm
from allranks.torch.comm.subgroups import Pending
from allranks.torch.compression.base import Codec
from allranks.torch.compression.error_feedback import ErrorFeedback
from allranks.torch.compression.top_k import TopK as TopKCodec
from allranks.torch.compression.two_bit import TwoBit as TwoBitCodec
from allranks.torch.reducers.base import Bucket
from allranks.torch.reducers.compressed.base import Compressed, Exchange, views_into


class Gathered(Exchange):
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


class TopK(Compressed):
    """An all-gather per bucket. Sends (N-1) times k numbers of each chunk, with 12-bit indices."""

    def __init__(
        self, comm: Comm, shards: int, *, k: int, chunk: int, values: str, after: int
    ) -> None:
        super().__init__(comm, shards, after)
        self.codec = TopKCodec(k, chunk, values)

    def exchange_of(self, bucket: Bucket) -> Exchange:
        return Gathered(self.comm, bucket, self.codec)


class TwoBit(Compressed):
    """An all-gather per bucket. Sends (N-1) times 2 bits of each number."""

    def __init__(self, comm: Comm, shards: int, *, threshold: float, after: int) -> None:
        super().__init__(comm, shards, after)
        self.codec = TwoBitCodec(threshold)

    def exchange_of(self, bucket: Bucket) -> Exchange:
        return Gathered(self.comm, bucket, self.codec)
