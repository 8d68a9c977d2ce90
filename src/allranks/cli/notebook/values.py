"""What a notebook holds, by value: as Python where it is plain, tensors and arrays in files.

    width = 3
    points, label = VALUES['points'], VALUES['label']
    split = Subset(TensorDataset(VALUES['X'], VALUES['y']), [4, 0, 2])

Tensors go into a safetensors file, arrays into an .npz, both beside the program and named by their
content. Nothing is pickled, and nothing that made a value is run again. The writing side is
`Values`; `read_values` and `check_made_alike` are called by the program, on every rank.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import Any

from allranks.catalog import load
from allranks.errors import RequestError
from allranks.job.job_file import HIDDEN, redacted

VALUES = "_VALUES"
LONGEST_TEXT = 1_000_000  # characters of Python that one value may take


class NotAValue(Exception):
    """`what` cannot travel by value; `do` says what would help, if something special does."""

    def __init__(self, what: str, do: str = "") -> None:
        super().__init__(what)
        self.what, self.do = what, do


class Values:
    """The tensors and arrays of a program, by name, and the Python text that stands for a value."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self.arrays: dict[str, Any] = {}
        self._known: dict[int, str] = {}

    def text(self, name: str, value: Any) -> str:
        """Python for `value`, the global `name`; raises `NotAValue`."""
        try:
            text = self._text(name, name, value)
        except RecursionError:
            raise NotAValue(f"{name!r}, which holds itself") from None
        if len(text) > LONGEST_TEXT:
            do = "make a tensor or an array of it"
            raise NotAValue(f"{name!r}, of {len(text):,} characters", do)
        return text

    def _text(self, where: str, word: str, value: Any) -> str:
        """`where` it is, as one would write it; `word` is the name or key that says what it is."""
        kind = type(value)
        if kind is str and redacted({word: value})[word] == HIDDEN:
            do = "read it in a method of the task: os.environ[…]"
            raise NotAValue(f"{where!r}, which looks like a secret", do)
        if value is None or kind in (bool, int, str, bytes):
            return repr(value)
        if kind is float:
            return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
        if kind is complex:
            return f"complex({str(value)!r})"
        if kind in (list, tuple, set, frozenset, dict):
            return self._collection(where, word, value)
        if isinstance(value, PurePath):
            return f"{_named('pathlib:Path')}({os.fspath(value)!r})"
        made = self._of_numpy(where, value) or self._of_torch(where, value)
        if made is None:
            raise NotAValue(f"{where!r}, a {kind.__module__}.{kind.__qualname__}")
        return made

    def _collection(self, where: str, word: str, value: Any) -> str:
        if type(value) is dict:
            pairs = [
                f"{self._text(where, word, k)}: {self._text(f'{where}[{k!r}]', str(k), v)}"
                for k, v in value.items()
            ]
            return "{" + ", ".join(pairs) + "}"
        parts = [self._text(f"{where}[{i}]", word, part) for i, part in enumerate(value)]
        if isinstance(value, set | frozenset):
            parts.sort()
            return f"{type(value).__name__}([{', '.join(parts)}])"
        if isinstance(value, list):
            return f"[{', '.join(parts)}]"
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"

    def _of_numpy(self, where: str, value: Any) -> str | None:
        numpy: Any = sys.modules.get("numpy")
        if numpy is None:
            return None
        if isinstance(value, numpy.dtype) and not value.hasobject and value.names is None:
            return f"{_named('numpy:dtype')}({value.str!r})"
        if not (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
            return None
        if value.dtype.hasobject:
            do = "give it a type of numbers or texts of one length"
            raise NotAValue(f"{where!r}, an array of Python objects", do)
        kept = self._kept(self.arrays, where, value)
        return f"{kept}[()]" if isinstance(value, numpy.generic) else kept

    def _of_torch(self, where: str, value: Any) -> str | None:
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return None
        kind = type(value)
        if kind is torch.dtype:
            return _named(str(value).replace(".", ":"))
        if kind is torch.device:
            return f"{_named('torch:device')}({str(value)!r})"
        if kind is torch.Tensor:
            if value.requires_grad:
                raise NotAValue(f"{where!r}, a tensor that requires a gradient", "detach() it")
            if value.device.type != "cpu" or value.layout is not torch.strided:
                found = f"{where!r}, a tensor on {value.device}, {value.layout}"
                raise NotAValue(found, "make it a dense one on the CPU: .to_dense(), .cpu()")
            return self._kept(self.tensors, where, value)
        if kind is torch.utils.data.TensorDataset:
            inner = [self._text(f"{where}[{i}]", "", t) for i, t in enumerate(value.tensors)]
            return f"{_named('torch.utils.data:TensorDataset')}({', '.join(inner)})"
        if kind is torch.utils.data.Subset:
            data = self._text(f"{where}.dataset", "", value.dataset)
            chosen = self._text(f"{where}.indices", "", value.indices)
            return f"{_named('torch.utils.data:Subset')}({data}, {chosen})"
        return None

    def _kept(self, among: dict[str, Any], where: str, value: Any) -> str:
        key = self._known.setdefault(id(value), where)
        among[key] = value
        return f"{VALUES}[{key!r}]"

    def write(self, folder: Path) -> list[str]:
        """Write what there is to files of `folder`; returns their names. Raises `NotAValue`."""
        kinds: list[tuple[dict[str, Any], str, Callable[..., None]]] = [
            (self.tensors, "safetensors", _save_tensors),
            (self.arrays, "npz", _save_arrays),
        ]
        return [_written(folder, kept, end, save) for kept, end, save in kinds if kept]


def _named(path: str) -> str:
    return f"_load({path!r})"


def _save_tensors(kept: dict[str, Any], path: Path) -> None:
    whole = {name: tensor.clone().contiguous() for name, tensor in kept.items()}
    load("safetensors.torch:save_file")(whole, path)


def _save_arrays(kept: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        load("numpy:savez")(file, allow_pickle=False, **kept)


def _written(folder: Path, kept: dict[str, Any], end: str, save: Callable[..., None]) -> str:
    """The name of a file with these, after its content, so that it is never written over."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".values.{os.getpid()}.{end}"
    try:
        save(kept, beside)
        with open(beside, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        name = f"values-{digest}.{end}"
        os.replace(beside, folder / name)
    except OSError:
        raise
    except Exception as error:  # a type that the format has not
        raise NotAValue(f"{', '.join(kept)}: {type(error).__name__}: {error}") from error
    finally:
        beside.unlink(missing_ok=True)
    return name


# --- on a rank ----------------------------------------------------------------------------------


def read_values(program: str, names: Iterable[str]) -> dict[str, Any]:
    """The tensors and arrays in the files of these names, beside the file `program`."""
    found: dict[str, Any] = {}
    for name in names:
        path = Path(program).resolve().parent / name
        if name.endswith(".npz"):
            with load("numpy:load")(path, allow_pickle=False) as arrays:
                found |= {key: arrays[key] for key in arrays.files}
        else:
            found |= load("safetensors.torch:load_file")(path)
    return found


def check_made_alike(name: str, here: Any, there: Any) -> None:
    """Raise `RequestError` unless `name`, which a definition makes, is what the notebook had."""
    if not is_same(here, there):
        raise RequestError(
            asked=f"to train what a notebook defines, with its {name}",
            found=f"{name} is {here!r} here, and was {there!r} in the notebook"[:500],
            why="it is made where it is defined, so every rank made another one",
            do="assign it to a name at the top of a cell first: that value travels as it is",
        )


def is_same(here: Any, there: Any) -> bool:
    """Whether two values are equal, part by part and in their types; nan is itself."""
    if type(here) is not type(there):
        return False
    if isinstance(here, list | tuple):
        return len(here) == len(there) and all(map(is_same, here, there))
    if isinstance(here, dict):
        return here.keys() == there.keys() and all(is_same(here[k], there[k]) for k in here)
    equal = here == there
    return bool(equal.all() if hasattr(equal, "all") else equal) or here != here
