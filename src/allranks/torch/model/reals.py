"""Complex numbers as pairs of real ones: how they are summed, sent, and written to files.

Buckets, the wire and the files know real numbers only; a complex tensor is seen there through
`torch.view_as_real`, with one dimension of 2 more. A file names them in its metadata: the format
has complex numbers of 64 bits, and none of 128.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from allranks.checkpoint.format import COMPLEX

END_BYTES = 2**16  # of each end of a tensor, for its digest


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
        self._names: dict[str, None] = dict.fromkeys(self._file.keys())
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


class TensorFolder(Mapping[str, Tensor]):
    """Tensors of several files, mapped into memory: only what is used of one is read.

    `names` are their names here, and those in the files; by default all, with these.
    """

    def __init__(
        self, files: Mapping[str, TensorFile], names: Mapping[str, str] | None = None
    ) -> None:
        self._file_of = {name: file for file in files.values() for name in file}
        self._files = files
        self._names = {name: name for name in self._file_of} if names is None else names

    def renamed(self, names: Mapping[str, str]) -> TensorFolder:
        """The tensors of some names in the files, under other names."""
        return TensorFolder(self._files, names)

    def __getitem__(self, name: str) -> Tensor:
        place = self._names[name]
        return self._file_of[place][place]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def digest(self, name: str) -> str:
        """A digest of type, shape, and the first and last 64 KiB of a tensor."""
        tensor = self[name].contiguous().reshape(-1)
        count = END_BYTES // tensor.itemsize
        ends = torch.cat((tensor[:count], tensor[-count:])).view(torch.uint8)
        content = hashlib.blake2b(ends.numpy().data, digest_size=16).hexdigest()
        return f"{tensor.dtype} {tuple(self[name].shape)} {content}"
