"""DeMo: each rank keeps a momentum of its own, and sends what is largest in it, by cosines.

    1. m <- beta m + gradient: of this rank alone
    2. q: the k largest coefficients of each block of m; m <- m - what q says
    3. an all-gather gives every rank the q of all; weights move by the signs of what they add up to

A momentum that loses what was sent is a residual that fades: so this is error feedback with a decay
in front of a codec. The sum leaves here with its size, by which steps are guarded; its signs are
taken where weights are updated (`Gradients.sign_`), by SGD without a momentum. What that has as
weight decay is added after the signs: decoupled. Peng et al. 2024, arXiv 2411.19870, whose code has
blocks of 64 x 64, k = 32 and beta = 0.999.
"""

from __future__ import annotations

from allranks.torch.comm.comm import Comm
from allranks.torch.compression.base import Codec
from allranks.torch.compression.cosines import CosineBlocks, Parts
from allranks.torch.reducers.base import Bucket
from allranks.torch.reducers.compressed.base import Compressed, Exchange, real_view, shapes_of
from allranks.torch.reducers.compressed.gathered import Gathered


class DeMo(Compressed):
    """An all-gather per bucket. Sends (N-1) times k coefficients of each block."""

    def __init__(self, comm: Comm, shards: int, *, k: int, chunk: int, beta: float) -> None:
        super().__init__(comm, shards)
        self.keep, self.chunk, self.beta = k, chunk, beta

    def exchange_of(self, bucket: Bucket) -> Exchange:
        first = int(bucket.flat.storage_offset())
        parts: list[tuple[int, int, Codec]] = []
        for view, shape in zip(bucket.views.values(), shapes_of(bucket), strict=True):
            real = real_view(view)
            if real.numel():
                codec = CosineBlocks(shape, self.keep, self.chunk)
                parts.append((int(real.storage_offset()) - first, real.numel(), codec))
        return Gathered(self.comm, bucket, Parts(parts), self.beta)
