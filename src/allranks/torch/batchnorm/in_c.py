"""BatchNorm of the shards of a run in C (`native/`): a channel of a shard is read from memory once.

Torch's operations go over all of it a dozen times, and its own kernel knows no shards. They are
what runs where there is no library, on other devices, for other types and where channels come last;
and where a rank has several threads, which they share out and this does not. Only the last bits
differ: sums are in float64 here, of blocks that are summed in the type of the numbers.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor, nn

MODULE = "allranks.torch.batchnorm._norms"
TYPES = (torch.float32, torch.float64)
LEAST_VALUES = 16  # of a channel in a sample: below, torch's operations take as long


def _found() -> ModuleType | None:
    try:
        return importlib.import_module(MODULE)
    except ImportError:
        return None


LIBRARY = _found()


def library_for(*views: Tensor, channels: tuple[Tensor | None, Tensor | None]) -> ModuleType | None:
    """The library, if it takes these views (pieces, rows, channels, values) as they lie."""
    kind = views[0].dtype
    if LIBRARY is None or kind not in TYPES or views[0].shape[3] < LEAST_VALUES:
        return None
    given = (*views, *(tensor for tensor in channels if tensor is not None))
    fits = torch.get_num_threads() == 1 and all(
        type(one) in (Tensor, nn.Parameter)  # any other may have no memory
        and one.dtype == kind
        and one.device.type == "cpu"
        and one.is_contiguous()
        for one in given
    )
    return LIBRARY if fits else None


def normalise(
    library: ModuleType,
    source: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    target: Tensor,
) -> tuple[Tensor, Tensor]:
    """Fill `target`; mean and variance, (2, pieces, 1, channels, 1), and 1 / sqrt(var + eps)."""
    pieces, _, channels, _ = source.shape
    both = source.new_empty(2, pieces, 1, channels, 1)
    inverse = source.new_empty(pieces, 1, channels, 1)
    mean = both.data_ptr()
    library.normalise(
        source.dtype == torch.float64,
        *(source.data_ptr(), tuple(source.shape), _address(weight), _address(bias), eps),
        *(target.data_ptr(), mean, mean + inverse.nbytes, inverse.data_ptr()),
    )
    return both, inverse


def derive(
    library: ModuleType,
    gradient: Tensor,
    source: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    target: Tensor | None,
) -> Tensor:
    """Fill `target`, if any, with the gradient of `source`; returns those of weight and bias."""
    sums = source.new_empty(2, source.shape[2])
    library.derive(
        source.dtype == torch.float64,
        *(gradient.data_ptr(), source.data_ptr(), tuple(source.shape), _address(weight)),
        *(mean.data_ptr(), inverse.data_ptr(), _address(target)),
        *(tensor.data_ptr() for tensor in sums),
    )
    return sums


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
