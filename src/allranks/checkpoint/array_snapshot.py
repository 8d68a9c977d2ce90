"""The arrays of a checkpoint as bytes: copies in memory as their file will have them, and back.

Knows numpy only. The numbers that numpy does not have (bfloat16, float8) are those of the package
ml_dtypes, which comes with TensorFlow; here they are called by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allranks.checkpoint import format as tree
from allranks.checkpoint.checkpointer import Loaded, is_below, values_of
from allranks.checkpoint.commit import Planned, Ranks
from allranks.checkpoint.export import TensorFiles
from allranks.checkpoint.format import FileTensor, Manifest, SavedTensor, TensorBox, lay_out
from allranks.errors import RequestError

Array = NDArray[Any]

KINDS = {
    **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16"},
    **{"U32": "uint32", "U64": "uint64", "I32": "int32", "I64": "int64", "C64": "complex64"},
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn"},
}
COMMON = "common"
NAMES = {kind: name for name, kind in KINDS.items()}


class ArraySnapshot:
    """Copies of arrays, laid out as their file. Taking another one writes over the last."""

    def __init__(self) -> None:
        self._buffer: Array = np.empty(0, np.uint8)
        self._places: dict[str, Array] = {}
        self.layout = lay_out({})

    @property
    def data(self) -> memoryview:
        """The bytes after the header."""
        return self._buffer.data[: self.layout.data_bytes]

    def take(self, arrays: Mapping[str, Array]) -> None:
        """Copy the arrays; returns when they may change again. May raise `MemoryError`."""
        pieces = {path: FileTensor(NAMES[a.dtype.name], a.shape) for path, a in arrays.items()}
        layout = lay_out(pieces)
        if layout != self.layout:
            self._places = {}
            if self._buffer.size < layout.data_bytes:
                self._buffer = np.empty(layout.data_bytes, np.uint8)
            self.layout = layout
        for path, array in arrays.items():
            np.copyto(self._place(path, array.dtype), array)

    def _place(self, path: str, dtype: np.dtype[Any]) -> Array:
        if path not in self._places:
            piece = self.layout.pieces[path]
            flat = self._buffer[piece.begin : piece.end].view(dtype.newbyteorder("="))
            self._places[path] = flat.reshape(piece.shape)
        return self._places[path]

    def tensors(self, files: list[str]) -> dict[str, SavedTensor]:
        """Every array, whole in the one file there is, for the manifest."""
        (file,) = files
        return {
            path: SavedTensor(p.dtype, p.shape, (TensorBox(file, (0,) * len(p.shape), p.shape),))
            for path, p in sorted(self.layout.pieces.items())
        }


def flatten(state: Any, prefix: str) -> tuple[Any, dict[str, Array]]:
    """The state as JSON values, and its arrays by path. Numbers of numpy are arrays without axes.

    Raises `RequestError` for what cannot be saved.
    """
    return tree.flatten(state, prefix, _array_of)


def _array_of(value: Any, path: str) -> Array | None:
    if not isinstance(value, (np.ndarray, np.generic)):
        return None
    if value.dtype.name not in NAMES:
        raise tree.refused(path, f"an array of {value.dtype}")
    return np.asarray(value)


def read_arrays(files: TensorFiles, manifest: Manifest, prefix: str) -> dict[str, Array]:
    """The arrays below `prefix`, by path, to be written to; raises `BadCheckpoint`."""
    return {
        path: np.frombuffer(
            bytearray(files.bytes_of(path, saved)), _dtype(path, saved.dtype)
        ).reshape(saved.shape)
        for path, saved in manifest.tensors.items()
        if is_below(path, prefix)
    }


def read_checkpoint(folder: Path, manifest: Manifest) -> Loaded:
    """What a checkpoint whose digests hold has in it; raises `BadCheckpoint`.

    Its `common` is the state that was saved; each rank reads all of it.
    """
    common, _ = values_of(manifest)
    with TensorFiles(folder) as files:
        arrays = read_arrays(files, manifest, COMMON)
    return Loaded(manifest.step, folder, manifest, tree.unflatten(common, arrays), None)


class ArrayCopies:
    """Copies of a state that all ranks hold: nested dicts, lists and tuples of numpy arrays.

    One rank writes all of it; there is no state of a single rank.
    """

    def __init__(self) -> None:
        self._snapshot = ArraySnapshot()

    def plan(self, ranks: Ranks, step: int, common: Any, rank_state: None) -> Planned:
        """Sends nothing."""
        skeleton, arrays = flatten(common, COMMON)
        take = partial(self._snapshot.take, arrays)
        return Planned(skeleton, None, self._snapshot.tensors, self._snapshot, take)

    def reader(self, ranks: Ranks, templates: None) -> Callable[[Path, Manifest], Loaded]:
        """Reads into arrays of their own."""
        return read_checkpoint


def _dtype(path: str, name: str) -> np.dtype[Any]:
    try:
        return np.dtype(KINDS[name])
    except TypeError:
        raise RequestError(
            asked=f"to read {path}",
            found=f"numbers of type {name}",
            why="numpy has them only where the package ml_dtypes is loaded",
            do="import ml_dtypes, or tensorflow, first",
        ) from None
