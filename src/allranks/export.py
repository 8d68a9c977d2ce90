"""The weights of a checkpoint as one safetensors file, with the model's own names.

Verified first, then put together tensor by tensor from the chunks that ranks wrote. Needs no
framework. Optimizer and random streams stay where they are: the file is for those who use the model.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from allranks.checkpoint_folder import verify_files
from allranks.errors import RequestError
from allranks.manifest import BadCheckpoint, Chunk, SavedTensor, piece_name, read_manifest
from allranks.tensor_file import ITEM_BYTES, Layout, Piece, lay_out, read_layout

MODEL = "common/model/"
WRITTEN_AS = (("~3", ""), ("~2", "@"), ("~1", "/"), ("~0", "~"))


def export_weights(folder: Path, target: Path) -> list[str]:
    """Write the weights of the checkpoint `folder` to `target`; returns their names.

    Raises `BadCheckpoint` if not all of it holds, and `RequestError` if `target` is there, cannot
    be written, or there are no weights. `target` is there whole, or not at all.
    """
    if os.path.lexists(target):
        raise _refused(target, "a file is there already", "an export never writes over one")
    manifest = read_manifest(folder)
    problems = verify_files(folder, manifest, manifest.files)
    if problems:
        raise BadCheckpoint("; ".join(problems))
    weights = {model_name(p): (p, t) for p, t in manifest.tensors.items() if p.startswith(MODEL)}
    if not weights:
        raise _refused(target, f"no tensor below {MODEL} in {folder}", "there is no model in it")
    layout = lay_out({name: Piece(t.dtype, t.shape) for name, (_, t) in weights.items()})
    with _Source(folder) as source:
        _write(target, layout, (source.tensor(*weights[name]) for name in layout.pieces))
    return sorted(weights)


def model_name(path: str) -> str:
    """`common/model/0.weight` -> `0.weight`: what the model calls the tensor of that path."""
    name = path.removeprefix(MODEL)
    for written, meant in WRITTEN_AS:
        name = name.replace(written, meant)
    return name


def _write(target: Path, layout: Layout, tensors: Iterator[bytes | bytearray]) -> None:
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            file.write(layout.header)
            for tensor in tensors:
                file.write(tensor)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(target)
    except OSError as error:
        raise _refused(target, str(error), "it cannot be written there") from None
    finally:
        beside.unlink(missing_ok=True)


def _refused(target: Path, found: str, why: str) -> RequestError:
    return RequestError(
        asked=f"to export weights to {target}", found=found, why=why, do="name another file, or run"
    )


class _Source:
    """The files of one checkpoint, mapped when they are needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, tuple[Layout, mmap.mmap]] = {}

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *_: object) -> None:
        for _layout, mapped in self._open.values():
            mapped.close()

    def tensor(self, path: str, tensor: SavedTensor) -> bytes | bytearray:
        """The bytes of a whole tensor, row by row."""
        if len(tensor.chunks) == 1:
            return self._chunk(path, tensor, tensor.chunks[0])
        whole = bytearray(tensor.size)
        for chunk in tensor.chunks:
            _put(whole, self._chunk(path, tensor, chunk), tensor, chunk)
        return whole

    def _chunk(self, path: str, tensor: SavedTensor, chunk: Chunk) -> bytes:
        name = piece_name(path, tensor.shape, chunk.offsets, chunk.sizes)
        layout, mapped = self._file(chunk.file)
        piece = layout.pieces.get(name)
        if piece is None or (piece.dtype, piece.shape) != (tensor.dtype, chunk.sizes):
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


def _put(whole: bytearray, data: bytes, tensor: SavedTensor, chunk: Chunk) -> None:
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
