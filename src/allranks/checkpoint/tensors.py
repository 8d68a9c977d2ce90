"""The tensors of a checkpoint as bytes: each put together from the chunks that ranks wrote.

Needs no framework. What is read is held against the manifest, not against its digests.
"""

from __future__ import annotations

import itertools
import math
import mmap
from pathlib import Path

from allranks.checkpoint.format import BadCheckpoint, SavedTensor, TensorBox, piece_name
from allranks.checkpoint.tensor_file import ITEM_BYTES, Layout, as_written, read_layout


class TensorFiles:
    """The files of the checkpoint `folder`, mapped when they are needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, tuple[Layout, mmap.mmap]] = {}

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for _layout, mapped in self._open.values():
            mapped.close()

    def bytes_of(self, path: str, tensor: SavedTensor) -> bytes | bytearray:
        """The bytes of a whole tensor, row by row; raises `BadCheckpoint`."""
        if len(tensor.chunks) == 1:
            return self._chunk(path, tensor, tensor.chunks[0])
        whole = bytearray(tensor.size)
        for chunk in tensor.chunks:
            _put(whole, self._chunk(path, tensor, chunk), tensor, chunk)
        return whole

    def _chunk(self, path: str, tensor: SavedTensor, chunk: TensorBox) -> bytes:
        name = piece_name(path, tensor.shape, chunk.offsets, chunk.sizes)
        layout, mapped = self._file(chunk.file)
        piece = layout.pieces.get(name)
        wanted = as_written(tensor.dtype, chunk.sizes)
        if piece is None or (piece.dtype, piece.shape) != (wanted.dtype, wanted.shape):
            raise BadCheckpoint(f"{chunk.file}: {name} is not in it as the manifest says")
        start = len(layout.header)
        return mapped[start + piece.begin : start + piece.end]

    def _file(self, name: str) -> tuple[Layout, mmap.mmap]:
        if name not in self._open:
            try:
                layout = read_layout(self.folder / name)
                with open(self.folder / name, "rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise BadCheckpoint(f"{name}: {error}") from None
            self._open[name] = layout, mapped
        return self._open[name]


def _put(whole: bytearray, data: bytes, tensor: SavedTensor, chunk: TensorBox) -> None:
    """Put a box into its place: run by run along the last axis."""
    if not data:
        return
    item = ITEM_BYTES[tensor.dtype]
    run = chunk.sizes[-1] * item
    strides = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
    rows = itertools.product(*(range(size) for size in chunk.sizes[:-1]))
    for number, row in enumerate(rows):
        index = zip((*row, 0), chunk.offsets, strides, strict=True)
        at = item * sum((i + offset) * stride for i, offset, stride in index)
        whole[at : at + run] = data[number * run : (number + 1) * run]
