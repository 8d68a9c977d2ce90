"""The codecs that `reduce=` names."""

from __future__ import annotations

from allranks.strategies.card import Picked
from allranks.torch.compression.base import Codec
from allranks.torch.compression.top_k import TopK
from allranks.torch.compression.two_bit import TwoBit


def codec_of(reduce: Picked) -> Codec:
    """The codec of `top-k` or `two-bit`, with its options."""
    options = reduce.options
    if reduce.name == "top-k":
        return TopK(options["k"], options["chunk"], options["values"])
    assert reduce.name == "two-bit"
    return TwoBit(options["threshold"])
