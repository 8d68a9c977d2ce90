"""BatchNorm of the shards of a run in C (`native/`): a channel of a shard is read from memory once.

Torch's operations go over all of it a dozen times, and its own kernel knows no shards. They are
what runs where there is no library, on other devices, for other types and where channels come last;
and where a rank has several threads, which they share out and this does not. Only the last bits
differ: sums are in float64 here, of blocks that are summed in the type of the numbers.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor, nn

from allranks.torch.model.layers import Normalising
from allranks.torch.native import built

LIBRARY = built("allranks.torch.batchnorm._norms")
TYPES = (torch.float32, torch.float64)
LEAST_VALUES = 16  # of a channel in a sample: below, torch's operations take as long


def library_for(source: Tensor, *more: Tensor | None) -> ModuleType | None:
    """The library, if it takes `source` (pieces, rows, channels, values) and `more` as they lie."""
    if LIBRARY is None or source.dtype not in TYPES or source.shape[3] < LEAST_VALUES:
        return None
    fits = torch.get_num_threads() == 1 and all(
        tensor is None or (tensor.dtype == source.dtype and _lies_in_memory(tensor))
        for tensor in (source, *more)
    )
    return LIBRARY if fits else None


def _lies_in_memory(tensor: Tensor) -> bool:
    """Whether its numbers are those that lie at its address, one behind the other."""
    return (
        type(tensor) in (Tensor, nn.Parameter)  # any other may have no memory
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor._is_zerotensor())
    )


def normalise(
    library: ModuleType, source: Tensor, by: Normalising, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill `target`; mean and variance, (2, pieces, 1, channels, 1), and 1 / sqrt(var + eps)."""
    pieces, _, channels, _ = source.shape
    both = source.new_empty(2, pieces, 1, channels, 1)
    inverse = source.new_empty(pieces, 1, channels, 1)
    mean = both.data_ptr()
    library.normalise(
        source.dtype == torch.float64,
        *(_address(source), tuple(source.shape), _address(by.weight), _address(by.bias)),
        *(by.eps, _address(target), mean, mean + inverse.nbytes, inverse.data_ptr()),
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
        *(_address(gradient), _address(source), tuple(source.shape), _address(weight)),
        *(_address(mean), _address(inverse), _address(target)),
        *(tensor.data_ptr() for tensor in sums),
    )
    return sums


def _address(tensor: Tensor | None) -> int:
    """Where the tensor lies; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()
