"""Digests of tensors, for what is compared between ranks and for what is tried twice."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from allranks.torch.data.collate import DATA, map_tensors, tensors_in
from allranks.training import same_data
from allranks.training.same_data import DIGEST_BYTES, rows_to_compare


def digest_of(value: Any) -> str:
    """A digest of what a sample, a batch, or any structure of tensors holds."""
    return same_data.digest_of(value, DATA, _array)


def _array(tensor: Tensor) -> NDArray[Any]:
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:  # which NumPy has not
        plain = plain.view(torch.int16)
    array: NDArray[Any] = plain.numpy()
    return array


def digest_of_rows(tensors: Any) -> str:
    """Of tensors over samples: all of them, or as many rows as are quickly read."""
    size = sum(tensor.nbytes for tensor in tensors_in(tensors))
    if size <= DIGEST_BYTES:
        return digest_of(tensors)
    rows = next(tensors_in(tensors)).shape[0]
    index = torch.from_numpy(rows_to_compare(rows, size))
    return digest_of(map_tensors(lambda t: t.index_select(0, index.to(t.device)), tensors))
