"""One safetensors file: 8 bytes of length, a JSON header, the data.

Only the layout: which tensor lies at which bytes. No framework and no numpy, so that checkpoints
are verified and exported without one. Tensors of large elements come first, so that each is
aligned to its elements without a hole; the format allows none.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ITEM_BYTES = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "U16": 2, "I16": 2, "F16": 2},
    **{"BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8},
    **{"C128": 16},
}
PAIR = {"C128": "F64"}
"""What the format has no name for: it is written as pairs, (…, 2), of these."""
COMPLEX = "complex"
"""Where the metadata of a file of weights lists its tensors that are such pairs, as JSON."""
HEADER_LIMIT = 100_000_000


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a file: `begin` and `end` count bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    end: int = 0

    @property
    def size(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


def as_written(dtype: str, shape: tuple[int, ...]) -> FileTensor:
    """The piece that a tensor becomes in a file."""
    return FileTensor(PAIR[dtype], (*shape, 2)) if dtype in PAIR else FileTensor(dtype, shape)


@dataclass(frozen=True)
class Layout:
    """The header of a file, and where each tensor lies after it. `data_bytes` is without header."""

    header: bytes
    pieces: dict[str, FileTensor]
    data_bytes: int


def lay_out(pieces: dict[str, FileTensor], metadata: dict[str, str] | None = None) -> Layout:
    """Give every piece its place; the header is padded so that the data starts at 8 bytes."""
    order = sorted(pieces, key=lambda name: (-ITEM_BYTES[pieces[name].dtype], name))
    placed, at = {}, 0
    for name in order:
        piece = pieces[name]
        begin, at = at, at + piece.size
        placed[name] = FileTensor(piece.dtype, piece.shape, begin, at)
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    entries |= {
        name: {"dtype": p.dtype, "shape": list(p.shape), "data_offsets": [p.begin, p.end]}
        for name, p in placed.items()
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Layout(struct.pack("<Q", len(text)) + text, placed, at)


def read_layout(path: Path) -> Layout:
    """The layout of a file that is there; raises ValueError if it is not one of tensors."""
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else HEADER_LIMIT + 1
        if length > HEADER_LIMIT:
            raise ValueError(f"{path.name}: no header of a tensor file")
        text = file.read(length)
        total = os.fstat(file.fileno()).st_size
    try:
        pieces = {n: _piece(e) for n, e in json.loads(text).items() if n != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path.name}: its header cannot be read: {error!r}") from None
    _check(path.name, pieces.values(), total - 8 - length)
    return Layout(start + text, pieces, total - 8 - length)


def _piece(entry: dict[str, object]) -> FileTensor:
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError("shape and data_offsets are lists")
    if not all(type(n) is int and n >= 0 for n in (*shape, *offsets)):
        raise TypeError("shape and data_offsets are whole numbers")
    begin, end = offsets
    return FileTensor(str(entry["dtype"]), tuple(shape), begin, end)


def _check(name: str, pieces: Iterable[FileTensor], data_bytes: int) -> None:
    for piece in pieces:
        if piece.dtype not in ITEM_BYTES:
            raise ValueError(f"{name}: a type of number that is not known: {piece.dtype!r}")
        if piece.end - piece.begin != piece.size or piece.end > data_bytes:
            raise ValueError(f"{name}: a tensor that does not fit into the file")


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
