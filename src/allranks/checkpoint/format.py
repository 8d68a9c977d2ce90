"""The manifest of a checkpoint: what was saved, in which files, with the digest of each.

    checkpoints/step-00000120/
        rank-000-of-004.a0.safetensors    what rank 0 of 4 wrote, in attempt 0 of the job
        manifest.json                     written last: no manifest, no checkpoint

The manifest is JSON whose last member is the digest of everything before it. Read with no
framework; what it says is checked before it is believed, for a folder may come from anywhere.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Generic, TypeVar

from allranks.checkpoint.files import as_json, fsync_folder
from allranks.errors import RequestError

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
SCHEMA = 1
NAME = "manifest.json"
DIGEST_BYTES = 32
LARGEST = 2**60  # elements of a tensor: no shape has more
STEP_FOLDER = re.compile(r"step-([0-9]{8,})")
RANK_FILE = re.compile(r"rank-([0-9]{3,})-of-([0-9]{3,})\.a[0-9]+\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SEAL = b',"blake2b":"'
_SEAL_LENGTH = len(_SEAL) + 2 * DIGEST_BYTES + len(b'"}\n')

Reach = Callable[[str, int], None]


class BadCheckpoint(Exception):
    """A checkpoint that must not be loaded; the message says what is wrong, and with which file."""


def nothing(*args: Any, **values: Any) -> None:
    """Called where nobody asked to be told."""


@dataclass(frozen=True)
class TensorBox:
    """A box of a tensor, and the file that holds it."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor: `dtype` as the safetensors format names it, and the chunks that fill it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[TensorBox, ...]

    @property
    def size(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class SavedFile:
    """What a file has to be: its length in bytes, and the hexadecimal BLAKE2b digest of them."""

    bytes: int
    blake2b: str


@dataclass(frozen=True)
class Manifest:
    """A checkpoint in full. `step` counts the global batches done; `created` is unix time.

    `values` is the state without its tensors; `job`, `progress` and `facts` are for those who
    resume, and mean nothing here.
    """

    step: int
    created: float
    ranks: int
    files: dict[str, SavedFile]
    tensors: dict[str, SavedTensor]
    values: Any = None
    job: dict[str, Any] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def bytes(self) -> int:
        """The bytes of all its files of tensors."""
        return sum(file.bytes for file in self.files.values())


def digest(data: bytes | memoryview) -> str:
    """The digest that manifests use: on common processors faster than SHA-256, and as strong."""
    return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def piece_name(
    path: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> str:
    """The name of a chunk within its file: the path, and where it begins if it is not the whole."""
    return path if sizes == shape else f"{path}@{','.join(map(str, offsets))}"


def step_folder(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of one step lies."""
    return checkpoints / f"step-{step:08d}"


def rank_file(rank: int, ranks: int, attempt: int) -> str:
    """The name of what one rank writes: another attempt never touches it."""
    return f"rank-{rank:03d}-of-{ranks:03d}.a{attempt}.safetensors"


def seal(manifest: Manifest) -> bytes:
    """The text of manifest.json. A metric that is not finite is written as text."""
    scores = {name: float(score) for name, score in manifest.metrics.items()}
    metrics = {name: s if math.isfinite(s) else str(s) for name, s in scores.items()}
    values = {"schema": manifest.schema, **vars(manifest), "metrics": metrics}
    body = json.dumps(values, allow_nan=False, default=_fields)[:-1].encode()
    return body + _SEAL + digest(body).encode() + b'"}\n'


def _fields(value: Any) -> dict[str, Any]:
    """What JSON holds of a part of a manifest. There may be tens of thousands: none is copied."""
    if isinstance(value, (SavedTensor, TensorBox, SavedFile)):
        return vars(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def unseal(text: bytes) -> dict[str, Any]:
    """The values of a manifest whose digest holds; raises BadCheckpoint."""
    body, end = text[:-_SEAL_LENGTH], text[-_SEAL_LENGTH:]
    if len(text) < _SEAL_LENGTH or not end.startswith(_SEAL) or not end.endswith(b'"}\n'):
        raise BadCheckpoint(f"{NAME} is torn: it does not end as a manifest does")
    if digest(body).encode() != end[len(_SEAL) : -3]:
        raise BadCheckpoint(f"{NAME}: its digest is not that of its text")
    try:
        values = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{NAME} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadCheckpoint(f"{NAME} is not an object")
    return values


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is in it")


def write_manifest(folder: Path, manifest: Manifest, reach: Reach = nothing) -> None:
    """Commit a checkpoint: write, fsync, rename, fsync. Not committed if it raises OSError.

    `reach` is called before the text is written, and before it is renamed.
    """
    reach("save:manifest", manifest.step)
    temporary = folder / f".{NAME}.{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            file.write(seal(manifest))
            file.flush()
            os.fsync(file.fileno())
        reach("save:rename", manifest.step)
        os.replace(temporary, folder / NAME)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    try:
        fsync_folder(folder)
    except OSError:
        (folder / NAME).unlink()
        raise


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, checked; raises BadCheckpoint. Its files are not looked at."""
    try:
        text = (folder / NAME).read_bytes()
    except FileNotFoundError:
        raise BadCheckpoint(f"no {NAME}: it was never committed") from None
    except OSError as error:
        raise BadCheckpoint(f"{NAME} cannot be read: {error.strerror}") from None
    values = unseal(text)
    if values.pop("schema", None) != SCHEMA:
        raise BadCheckpoint(f"{NAME}: its schema is not {SCHEMA}, the one that is known here")
    try:
        manifest = _manifest(values)
        _check(manifest)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise BadCheckpoint(f"{NAME}: {error or type(error).__name__}") from None
    named = STEP_FOLDER.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        raise BadCheckpoint(f"{NAME} is that of step {manifest.step}, in the folder {folder.name}")
    return manifest


def _manifest(values: dict[str, Any]) -> Manifest:
    del values["blake2b"]
    files = {name: SavedFile(**file) for name, file in values.pop("files").items()}
    tensors = {path: _tensor(**tensor) for path, tensor in values.pop("tensors").items()}
    metrics = {name: float(value) for name, value in values.pop("metrics").items()}
    return Manifest(files=files, tensors=tensors, metrics=metrics, **values)


def _tensor(dtype: Any, shape: Any, chunks: Any) -> SavedTensor:
    boxes = (TensorBox(c["file"], _whole(c["offsets"]), _whole(c["sizes"])) for c in chunks)
    return SavedTensor(dtype, _whole(shape), tuple(boxes))


def _whole(numbers: Any) -> tuple[int, ...]:
    if type(numbers) is not list or not all(type(n) is int and n >= 0 for n in numbers):
        raise TypeError("a shape, an offset or a size that is no list of whole numbers")
    return tuple(numbers)


def _check(manifest: Manifest) -> None:
    for name in ("step", "ranks"):
        value = getattr(manifest, name)
        _claim(type(value) is int and value >= 0, f"{name} is no whole number: {value!r}")
    is_time = type(manifest.created) in (int, float) and 0 <= manifest.created < 2**40
    _claim(is_time, "created is no time")
    for name in ("job", "progress", "facts"):
        _claim(isinstance(getattr(manifest, name), dict), f"{name} is no table")
    for name, file in manifest.files.items():
        _claim(RANK_FILE.fullmatch(name), f"a file of a name that no rank writes: {name!r}")
        _claim(type(file.bytes) is int and file.bytes >= 0, f"{name}: no number of bytes")
        known = isinstance(file.blake2b, str) and _DIGEST.fullmatch(file.blake2b)
        _claim(known, f"{name}: no digest")
    for path, tensor in manifest.tensors.items():
        _claim(tensor.dtype in ITEM_BYTES, f"{path}: an unknown type of number {tensor.dtype!r}")
        _claim(all(c.file in manifest.files for c in tensor.chunks), f"{path}: an unknown file")
        most = math.prod(max(length, 1) for length in tensor.shape)
        _claim(most < LARGEST, f"{path}: a shape that no memory holds: {tensor.shape}")
        _claim(_filled(tensor), f"{path}: its chunks do not fill it once")
    for name, count in _bytes_in(manifest.tensors.values()).items():
        there = manifest.files[name].bytes
        _claim(count <= there, f"{name}: {count} bytes of tensors in a file of {there}")


def _bytes_in(tensors: Iterable[SavedTensor]) -> dict[str, int]:
    """The bytes of all chunks in each file, before anyone takes memory for them."""
    counts: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        for chunk in tensor.chunks:
            counts[chunk.file] += ITEM_BYTES[tensor.dtype] * math.prod(chunk.sizes)
    return counts


def _claim(holds: Any, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _filled(tensor: SavedTensor) -> bool:
    """Whether the chunks lie inside the tensor, do not overlap, and fill it."""
    for chunk in tensor.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.shape):
            return False
        ends = zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)
        if any(offset + size > length for offset, size, length in ends):
            return False
    filled = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
    if not tensor.chunks or filled != math.prod(tensor.shape):
        return False
    return not _any_overlap([chunk for chunk in tensor.chunks if 0 not in chunk.sizes])


def _any_overlap(chunks: Sequence[TensorBox], axis: int = 0) -> bool:
    """Whether two boxes have an element in common, none of them empty.

    A line across `axis` sweeps over them. Those whose edges are the same along it are looked at
    along the next axis alone, so that a grid of boxes costs what it has boxes, and not the square.
    """
    if len(chunks) < 2:
        return False
    if axis == len(chunks[0].sizes):
        return True
    rows: dict[tuple[int, int], list[TensorBox]] = defaultdict(list)
    for chunk in chunks:
        rows[chunk.offsets[axis], chunk.sizes[axis]].append(chunk)
    reached: list[tuple[int, list[TensorBox]]] = []
    for (start, size), row in sorted(rows.items(), key=_edges):
        reached = [(end, others) for end, others in reached if end > start]
        active = [chunk for _, others in reached for chunk in others]
        if _any_overlap([*active, *row], axis + 1):
            return True
        reached.append((start + size, row))
    return False


def _edges(row: tuple[tuple[int, int], list[TensorBox]]) -> tuple[int, int]:
    return row[0]


# --- tensor files --------------------------------------------------------------------------------
# One safetensors file: 8 bytes of length, a JSON header, the data. Here is its layout alone.
#
# Tensors of large elements come first, so that each is aligned to its elements without a hole; the
# format allows none.


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
class FileLayout:
    """The header of a file, and where each tensor lies after it. `data_bytes` is without header."""

    header: bytes
    pieces: dict[str, FileTensor]
    data_bytes: int


def lay_out(pieces: dict[str, FileTensor], metadata: dict[str, str] | None = None) -> FileLayout:
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
    return FileLayout(struct.pack("<Q", len(text)) + text, placed, at)


def read_layout(path: Path) -> FileLayout:
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
    _check_pieces(path.name, pieces.values(), total - 8 - length)
    return FileLayout(start + text, pieces, total - 8 - length)


def _piece(entry: dict[str, object]) -> FileTensor:
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError("shape and data_offsets are lists")
    if not all(type(n) is int and n >= 0 for n in (*shape, *offsets)):
        raise TypeError("shape and data_offsets are whole numbers")
    begin, end = offsets
    return FileTensor(str(entry["dtype"]), tuple(shape), begin, end)


def _check_pieces(name: str, pieces: Iterable[FileTensor], data_bytes: int) -> None:
    for piece in pieces:
        if piece.dtype not in ITEM_BYTES:
            raise ValueError(f"{name}: a type of number that is not known: {piece.dtype!r}")
        if piece.end - piece.begin != piece.size or piece.end > data_bytes:
            raise ValueError(f"{name}: a tensor that does not fit into the file")


# --- about ---------------------------------------------------------------------------------------
# What the manifest of a checkpoint says beside the state, and the rule for which one is best.


@dataclass(frozen=True)
class About:
    """What the manifest says beside the state. The leader's is written; all of it is plain JSON.

    `slow` returns those fields that no step changes: the thread that writes calls it.
    """

    job: dict[str, Any] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    slow: Callable[[], dict[str, Any]] = dict

    def frozen(self) -> Callable[[], dict[str, Any]]:
        """A function that returns the fields as they are now; later changes do not reach them."""
        names, slow = ("job", "progress", "facts", "metrics"), self.slow
        copy = json.dumps({name: getattr(self, name) for name in names})
        return lambda: json.loads(as_json({**json.loads(copy), **slow()}))


def check_best(best: str) -> None:
    """Raise `RequestError` unless it is "", `max:METRIC` or `min:METRIC`."""
    if best and best.partition(":")[0] not in ("max", "min"):
        raise RequestError(
            asked=f"to keep the best checkpoint by {best!r}",
            found="neither max: nor min: before the name of a metric",
            why="whether more is better is not told by a name",
            do="write max:accuracy, or min:loss",
        )


# --- tree ----------------------------------------------------------------------------------------
# A state as JSON and tensors: what is saved comes back with the same keys, types and numbers.
#
# A state is made of dicts (keys: text or whole numbers), lists, tuples, tensors, and of plain
# values: bool, int, float, text, None. Anything else would need pickle, and is refused by its path.
# What a tensor is, the engine says.
#
# In the JSON, `{"$tensor": path}` stands for a tensor; `$tuple`, `$dict` (keys that are not text,
# or begin with `$`) and `$float` (nan, inf) for what JSON cannot say. A path joins keys with `/`.


Tensor = TypeVar("Tensor")
PLAIN = {str, int, bool, type(None)}


def flatten(
    state: Any, prefix: str, tensor_of: Callable[[Any, str], Tensor | None]
) -> tuple[Any, dict[str, Tensor]]:
    """The state as JSON values, and its tensors by path; every path begins with `prefix`.

    `tensor_of(value, path)` is the tensor that a value is, as it can be saved, or None if it is
    none. Raises `RequestError` for what cannot be saved.
    """
    writer = _Apart(tensor_of)
    return writer.to_json(state, prefix), writer.tensors


def unflatten(skeleton: Any, tensors: Mapping[str, Any]) -> Any:
    """Rebuild the state that `flatten` has split; raises `BadCheckpoint` for invalid values."""
    if isinstance(skeleton, list):
        return [unflatten(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    kind = next(iter(skeleton), "")
    if not kind.startswith("$"):
        return {key: unflatten(item, tensors) for key, item in skeleton.items()}
    try:
        return _special(kind, skeleton[kind], tensors)
    except (TypeError, ValueError, KeyError) as error:
        raise BadCheckpoint(f"its values cannot be read at {kind}: {error!r}") from None


def _special(kind: str, value: Any, tensors: Mapping[str, Any]) -> Any:
    if kind == "$tensor":
        return tensors[value]
    if kind == "$tuple":
        return tuple(unflatten(item, tensors) for item in value)
    if kind == "$dict":
        return {key: unflatten(item, tensors) for key, item in value}
    if kind == "$float":
        return float(value)
    raise ValueError("no such kind")


@dataclass
class _Apart(Generic[Tensor]):
    """A state while it is taken apart: the tensors found so far."""

    tensor_of: Callable[[Any, str], Tensor | None]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def to_json(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is dict or kind is OrderedDict:
            return self._dict(value, path)
        if kind is list or kind is tuple:
            items = list(value)
            for i, item in enumerate(items):
                if type(item) not in PLAIN:
                    items[i] = self.to_json(item, f"{path}/{i}")
            return items if kind is list else {"$tuple": items}
        if kind is not float and (tensor := self.tensor_of(value, path)) is not None:
            self.tensors[path] = tensor
            return {"$tensor": path}
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        if isinstance(value, (int, str)):  # an enumeration, or a number of numpy
            return int(value) if isinstance(value, int) else str.__str__(value)
        raise refused(path, f"a value of type {kind.__qualname__}")

    def _dict(self, value: dict[Any, Any], path: str) -> dict[str, Any]:
        items, has_names = [], True
        for key, item in value.items():
            if type(key) is str and key.isidentifier():  # most are
                place = f"{path}/{key}"
            else:
                key, place = _key(key, path), below(path, key)
                has_names = has_names and isinstance(key, str) and not key.startswith("$")
            items.append([key, item if type(item) in PLAIN else self.to_json(item, place)])
        return dict(items) if has_names else {"$dict": items}


def _key(key: Any, path: str) -> str | int:
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise refused(path, f"the key {key!r} of type {type(key).__qualname__}")
    return int(key) if isinstance(key, int) else str.__str__(key)


def below(path: str, key: Any) -> str:
    """The path of a member; `~` escapes `/`, `@`, `~` and text that looks like a number."""
    if not isinstance(key, str):
        return f"{path}/{key}"
    written = key.replace("~", "~0").replace("/", "~1").replace("@", "~2")
    return f"{path}/{'~3' if key.lstrip('-').isdecimal() else ''}{written}"


def refused(path: str, found: str) -> RequestError:
    """The error for a member of a state that no checkpoint can hold."""
    return RequestError(
        asked=f"a checkpoint of {path}",
        found=found,
        why="it cannot be checkpointed without pickle, and a pickle can run any program",
        do="keep it in the state as tensors, numbers, text, lists and dicts",
    )
