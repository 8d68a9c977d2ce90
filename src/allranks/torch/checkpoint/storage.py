"""The tensors of a checkpoint as bytes: a snapshot in memory, and reading its files back.

The snapshot lies in one buffer of the host as the file will have it, so that training waits for one
copy in memory and no more; the buffer is kept from save to save.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import allranks.torch.accelerator as accelerator
from allranks.checkpoint.format import BadCheckpoint, SavedTensor, piece_name
from allranks.checkpoint.tensor_file import PAIR, as_written, lay_out
from allranks.torch.checkpoint.plan import Read, WritePart, load_plan
from allranks.torch.checkpoint.tree import DTYPES
from allranks.torch.model.reals import reals


class TorchSnapshot:
    """Copies of tensors, laid out as their file. Taking another one writes over the last."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._parts: list[WritePart] = []
        self._places: list[Tensor] = []
        self.layout = lay_out({})

    @property
    def data(self) -> memoryview:
        """The bytes after the header."""
        return self._buffer.numpy().data[: self.layout.data_bytes]

    def take(self, tensors: dict[WritePart, Tensor]) -> None:
        """Copy the tensors; returns when they may change again."""
        on_gpu = self.make_room(tensors)
        for place, (part, tensor) in zip(self._places, tensors.items(), strict=True):
            written = reals(tensor) if part.dtype in PAIR else tensor
            place.copy_(written, non_blocking=on_gpu)
        accelerator.synchronize({tensor.device for tensor in tensors.values()})

    def make_room(self, tensors: dict[WritePart, Tensor]) -> bool:
        """Take the memory for copies of these tensors; returns whether any is on a GPU."""
        on_gpu = any(map(accelerator.holds, tensors.values()))
        parts = list(tensors)
        if parts != self._parts:
            self._lay_out(parts, on_gpu)
        return on_gpu

    def _lay_out(self, parts: list[WritePart], on_gpu: bool) -> None:
        named = {piece_name(p.path, p.shape, p.offsets, p.sizes): p for p in parts}
        self.layout = lay_out({name: as_written(p.dtype, p.sizes) for name, p in named.items()})
        self._parts, self._places = [], []
        if self._buffer.numel() < self.layout.data_bytes:
            size = self.layout.data_bytes
            self._buffer = _memory(size, pin=on_gpu)
            self._buffer[:: mmap.PAGESIZE] = 0  # a page that was never touched costs the first copy
        for name in named:
            piece = self.layout.pieces[name]
            flat = self._buffer[piece.begin : piece.end].view(DTYPES[piece.dtype])
            self._places.append(flat.view(piece.shape))
        self._parts = parts


def _memory(size: int, *, pin: bool) -> Tensor:
    """So many bytes of the host; where none can be pinned, such as take a slower copy."""
    try:
        return accelerator.pinned_zeros(size, torch.uint8, pin=pin)
    except RuntimeError as error:  # torch's way to say so
        if pin:
            return _memory(size, pin=False)
        raise MemoryError(f"no memory for a copy of {size} bytes") from error


def read_files(folder: Path, saved: dict[str, SavedTensor], targets: dict[str, Tensor]) -> None:
    """Fill `targets` from the files of a checkpoint, each with what it needs of any chunk.

    Raises `BadCheckpoint` if a file is not what the manifest says; the digests are not read.
    """
    by_file: dict[str, list[Read]] = defaultdict(list)
    for read in load_plan(saved, targets):
        by_file[read.chunk.file].append(read)
    for file, reads in sorted(by_file.items()):
        try:
            with safe_open(str(folder / file), framework="pt") as there:
                for read in reads:
                    tensor, sizes = saved[read.path], read.chunk.sizes
                    name = piece_name(read.path, tensor.shape, read.chunk.offsets, sizes)
                    whole = there.get_tensor(name)
                    if tensor.dtype in PAIR and whole.shape == (*sizes, 2):
                        whole = torch.view_as_complex(whole.clone())  # aligned to 16 bytes
                    _check(file, name, whole, tensor.dtype, sizes)
                    read.target.copy_(whole[read.part])
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(f"{file}: {error}") from None


def _check(file: str, name: str, tensor: Tensor, dtype: str, sizes: tuple[int, ...]) -> None:
    if tensor.dtype != DTYPES[dtype] or tuple(tensor.shape) != sizes:
        kind = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise BadCheckpoint(f"{file}: {name} is {kind}, not {dtype} of shape {sizes}")
