"""The weights of a checkpoint as one safetensors file, with the model's own names.

Verified first, then put together tensor by tensor from the chunks that ranks wrote. Needs no
framework. Optimizer and random streams stay where they are:
the file is for those who use the model.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from allranks.checkpoint.files import fsync_folder, write_whole
from allranks.checkpoint.folder import verify_files
from allranks.checkpoint.format import (
    COMPLEX,
    ITEM_BYTES,
    PAIR,
    BadCheckpoint,
    FileLayout,
    Manifest,
    SavedTensor,
    TensorBox,
    as_written,
    lay_out,
    piece_name,
    read_layout,
    read_manifest,
)
from allranks.errors import RequestError

MODEL = "common/model/"
EVALUATED = "common/evaluated/"
"""Of an optimizer with two modes: its steps go on from the weights of the model."""
WRITTEN_AS = (("~3", ""), ("~2", "@"), ("~1", "/"), ("~0", "~"))


def export_weights(folder: Path, target: Path) -> list[str]:
    """Write the weights of the checkpoint `folder` to `target`; returns their names.

    Raises `BadCheckpoint` if not all of it holds, and `RequestError` if `target` is there, cannot
    be written, or there are no weights. `target` is there whole, or not at all.
    """
    check_free(target)
    manifest = verified(folder)
    weights = weights_of(manifest)
    if not weights:
        raise refused(target, f"no tensor below {MODEL} in {folder}", "there is no model in it")
    pairs = sorted(name for name, (_, t) in weights.items() if t.dtype in PAIR)
    layout = lay_out(
        {name: as_written(t.dtype, t.shape) for name, (_, t) in weights.items()},
        {COMPLEX: json.dumps(pairs)} if pairs else None,
    )
    with TensorFiles(folder) as source:
        _write(target, layout, (source.bytes_of(*weights[name]) for name in layout.pieces))
    return sorted(weights)


def weights_of(manifest: Manifest) -> dict[str, tuple[str, SavedTensor]]:
    """The path and the tensor of each weight, by the name in the model's state dict."""
    weights = {
        model_name(path, below): (path, tensor)
        for below in (MODEL, EVALUATED)
        for path, tensor in manifest.tensors.items()
        if path.startswith(below)
    }
    for name in _not_persistent(manifest):
        weights.pop(name, None)
    return weights


def _not_persistent(manifest: Manifest) -> list[str]:
    """The buffers that a strict load of the model would not know."""
    try:
        return list(manifest.values["common"]["not_persistent"])
    except (TypeError, KeyError):  # of an older version, or of another engine
        return []


def check_free(target: Path) -> None:
    """Raise `RequestError` if something is there, be it a link to nothing."""
    if os.path.lexists(target):
        kind = "folder" if target.is_dir() else "file"
        raise refused(target, f"a {kind} is there already", "an export never writes over one")


def verified(folder: Path) -> Manifest:
    """The manifest of a checkpoint all of whose files hold; raises `BadCheckpoint`."""
    manifest = read_manifest(folder)
    problems = verify_files(folder, manifest, manifest.files)
    if problems:
        raise BadCheckpoint("; ".join(problems))
    return manifest


def model_name(path: str, below: str = MODEL) -> str:
    """`common/model/0.weight` -> `0.weight`: what the model calls the tensor of that path."""
    name = path.removeprefix(below)
    for written, meant in WRITTEN_AS:
        name = name.replace(written, meant)
    return name


def _write(target: Path, layout: FileLayout, tensors: Iterator[bytes | bytearray]) -> None:
    try:
        write_whole(target, itertools.chain([layout.header], tensors))
    except OSError as error:
        raise refused(target, str(error), "it cannot be written there") from None


def put_in_place(temporary: Path, target: Path) -> None:
    """Sync a file, or all files of a folder, and rename it to `target`. Raises `RequestError`."""
    try:
        for folder, _, files in os.walk(temporary):
            for name in files:
                _fsync(Path(folder) / name)
            fsync_folder(Path(folder))
        if temporary.is_file():
            _fsync(temporary)
        check_free(target)
        temporary.rename(target)
        fsync_folder(target.parent)
    except OSError as error:
        raise refused(target, str(error), "it cannot be written there") from None


def _fsync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def refused(target: Path, found: str, why: str) -> RequestError:
    """The error for an export that cannot be made."""
    return RequestError(
        asked=f"to export weights to {target}", found=found, why=why, do="name another file, or run"
    )


# --- tensors -------------------------------------------------------------------------------------
# The tensors of a checkpoint as bytes: each put together from the chunks that ranks wrote.
#
# Needs no framework. What is read is held against the manifest, not against its digests.


class TensorFiles:
    """The files of the checkpoint `folder`, mapped when they are needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, tuple[FileLayout, mmap.mmap]] = {}

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
        data = mapped[start + piece.begin : start + piece.end]
        mapped.madvise(mmap.MADV_DONTNEED)  # else all that was read counts as resident memory
        return data

    def _file(self, name: str) -> tuple[FileLayout, mmap.mmap]:
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


# --- digest --------------------------------------------------------------------------------------
# The digest of a model: equal exactly when every bit of every parameter and buffer is equal.


def digest_of_weights(tensors: Iterator[tuple[str, str, memoryview]]) -> str:
    """SHA-256 over name, dtype and contiguous little-endian bytes of each tensor, as they come.

    Give them by name in sorted order; one is held at a time.
    """
    digest = hashlib.sha256()
    for name, kind, data in tensors:
        digest.update(f"{name}\0{kind}\0".encode())
        digest.update(data)
    return digest.hexdigest()
