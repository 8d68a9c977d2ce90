"""Complex numbers as pairs of real ones: how they are summed, sent, and written to files.

Buckets, the wire and the files know real numbers only; a complex tensor is seen there through
`torch.view_as_real`, with one dimension of 2 more. A file names them in its metadata: the format
has complex numbers of 64 bits, and none of 128.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from allranks.checkpoint.format import COMPLEX


def real_type(kind: torch.dtype) -> torch.dtype:
    """The type of the parts of a number of that type."""
    return kind.to_real() if kind.is_complex else kind


def reals(tensor: Tensor) -> Tensor:
    """A tensor as real numbers; the same memory, unless a conjugation is still to be done."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file of whatever is there; complex numbers of 128 bits go as pairs of F64."""
    whole = {n: t.detach().resolve_conj().resolve_neg().contiguous() for n, t in tensors.items()}
    pairs = sorted(name for name, tensor in whole.items() if tensor.dtype == torch.complex128)
    written = {n: (reals(t) if n in pairs else t).cpu() for n, t in whole.items()}
    save_file(written, path, {COMPLEX: json.dumps(pairs)} if pairs else None)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """What `write_tensors` wrote, or any other safetensors file."""
    return dict(TensorFile(path))


class TensorFile(Mapping[str, Tensor]):
    """A safetensors file, from which each tensor is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        open_file: Any = safe_open
        self._file = open_file(str(path), framework="pt")
        self._names: list[str] = list(self._file.keys())
        self._pairs = set(json.loads((self._file.metadata() or {}).get(COMPLEX, "[]")))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        # a file aligns to 8 bytes, and kernels for numbers of 128 bits want 16
        return torch.view_as_complex(tensor.clone()) if name in self._pairs else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
