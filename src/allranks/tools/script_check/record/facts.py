"""Writes facts to one file of JSON lines per process, with the line of the user's code.

If a recorder fails, that is written as a fact, and the script goes on. A forked child (a worker of
a loader) writes nothing, unless it creates a process group.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TextIO, TypeVar
from zlib import crc32

Function = TypeVar("Function", bound=Callable[..., Any])
HERE = os.path.dirname(os.path.abspath(__file__))
OWN = (HERE + os.sep, os.path.join(os.path.dirname(os.path.dirname(HERE)), "launcher") + os.sep)
USER, LIBRARY, BELOW = 0, 1, 2


class ScriptFacts:
    """The facts of this process, in `folder`; the first fact opens the file."""

    def __init__(self, folder: str, torch_folder: str) -> None:
        self.folder = folder
        self._below = (*OWN, torch_folder + os.sep)
        self._kinds: dict[str, int] = {}
        self._file: TextIO | None = None
        self._silent = False
        self._failed: set[str] = set()
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._silent, self._file, self._lock = True, None, threading.RLock()

    def enable(self) -> None:
        """Enable writing in a forked child that has joined a process group."""
        self._silent = False

    def write(self, fact: str, **values: Any) -> None:
        """Write one fact."""
        if self._silent:
            return
        line = json.dumps({"fact": fact, **values})
        with self._lock:
            if self._file is None:
                os.makedirs(self.folder, exist_ok=True)
                self._file = open(
                    os.path.join(self.folder, f"{os.getpid()}.jsonl"), "a", buffering=1
                )
            self._file.write(line + "\n")

    def guarded(self, function: Function) -> Function:
        """The same function, but its errors become facts: a recorder never ends a script."""

        @functools.wraps(function)
        def safe(*args: Any, **kwargs: Any) -> Any:
            if self._silent:
                return None
            try:
                return function(*args, **kwargs)
            except Exception as error:
                name = function.__qualname__
                if name not in self._failed:
                    self._failed.add(name)
                    with suppress(Exception):
                        self.write("unwatched", what=name, why=repr(error)[:300])
                return None

        return safe  # type: ignore[return-value]

    def where(self, *, nearest: bool = False) -> tuple[str, int] | None:
        """File and line of the nearest frame of user code, else, or if nearest, of a library."""
        frame = sys._getframe(1)
        library = None
        while frame is not None:
            name = frame.f_code.co_filename
            kind = self._kinds.get(name)
            if kind is None:
                kind = self._kinds[name] = self._kind_of(name)
            if kind == USER or (nearest and kind == LIBRARY):
                return os.path.abspath(name), frame.f_lineno
            if kind == LIBRARY and library is None:
                library = name, frame.f_lineno
            frame = frame.f_back  # type: ignore[assignment]
        return library

    def is_within(self, function: str) -> bool:
        """Whether a function of this name is being called."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_name != function:
            frame = frame.f_back  # type: ignore[assignment]
        return frame is not None

    def _kind_of(self, name: str) -> int:
        path = os.path.abspath(name)
        if name.startswith("<") or path.startswith(self._below):
            return BELOW
        if f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path:
            return LIBRARY
        is_standard = path.startswith((sysconfig.get_path("stdlib"), os.path.dirname(os.__file__)))
        return BELOW if is_standard else USER


def wrap(holder: Any, name: str, call: Callable[..., Any]) -> Any:
    """Let `call(original, …)` run in the place of `holder.name`, under its name and docstring.

    Arguments may have any names, so `original` is positional. Returns what is there now.
    """
    original = getattr(holder, name)

    @functools.wraps(original)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    setattr(holder, name, inner)
    return inner


def note_before(holder: Any, name: str, note: Callable[..., Any]) -> None:
    """Call `note` with the arguments of `holder.name` before each call of it."""

    def call(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return original(*args, **kwargs)

    wrap(holder, name, call)


def note_after(holder: Any, name: str, note: Callable[..., Any]) -> None:
    """Call `note` with the result of `holder.name` and its arguments after each call of it."""

    def call(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        note(result, *args, **kwargs)
        return result

    wrap(holder, name, call)


# --- numbers -------------------------------------------------------------------------------------
# Digests of tensors, of rows of a batch, and of the states of random generators.


MOST_TENSORS = 4


def digest_of(torch: Any, tensor: Any) -> int | None:
    """CRC-32 of the bytes of a plain tensor; None for a sharded, sparse or meta tensor."""
    if hasattr(tensor, "to_local") or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return crc32(memoryview(flat.view(torch.uint8).numpy())) if flat.numel() else 0


def leaves_in(data: Any, depth: int = 3) -> Iterable[Any]:
    """What a batch contains, in its order, within dictionaries, lists and tuples."""
    if depth and isinstance(data, dict | list | tuple):
        for value in data.values() if isinstance(data, dict) else data:
            yield from leaves_in(value, depth - 1)
    else:
        yield data


def tensors_in(torch: Any, data: Any, depth: int = 3) -> Iterable[Any]:
    """The tensors of a batch, in their order."""
    return [leaf for leaf in leaves_in(data, depth) if isinstance(leaf, torch.Tensor)]


def rows_of(torch: Any, data: Any, size: int) -> list[list[int]]:
    """Digests of the rows of each of `size` samples, in the first tensors of a batch."""
    tensors = [t for t in tensors_in(torch, data) if t.dim() and t.shape[0] == size]
    tensors = [tensor for tensor in tensors if tensor.device.type == "cpu"][:MOST_TENSORS]
    return [[digest_of(torch, tensor[i]) or 0 for tensor in tensors] for i in range(size)]


def random_states(torch: Any, device: str = "cpu") -> dict[str, int]:
    """Digests of the generators that a script may draw from: torch's, Python's, NumPy's."""
    digests = {"torch": crc32(memoryview(torch.get_rng_state().numpy()))}
    if device not in ("cpu", "meta"):
        state = torch.get_device_module(device).get_rng_state()
        digests[f"torch on {device}"] = crc32(memoryview(state.cpu().numpy()))
    digests["random"] = crc32(repr(random.getstate()).encode())
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        state = numpy.random.get_state()
        digests["numpy.random"] = crc32(state[1].tobytes() + bytes(str(state[2]), "ascii"))
    return digests


def drawn_since(torch: Any, before: dict[str, int], device: str = "cpu") -> dict[str, int]:
    """The generators that were drawn from since `before`, with their states at that time."""
    after = random_states(torch, device)
    return {name: state for name, state in before.items() if after.get(name) != state}


# --- progress ------------------------------------------------------------------------------------
# The position of a rank in its training, which the recorders share.


MOST_IN_A_WINDOW = 1024


@dataclass
class StepCounts:
    """Counts since the start, and events since the last step of an optimizer."""

    backwards: int = 0
    steps: int = 0
    batch: tuple[int, int, int] | None = None
    """Loader, pass and number of the last batch."""
    begun: tuple[int, int] | None = None
    """Loader and pass that began last: its workers are created next."""
    last_pass: tuple[int, int] | None = None
    """Loader and number of the last pass that ended."""
    means: Any = None
    """The last `Means` of this process."""
    scaler: Any = None
    """The GradScaler that multiplies the loss."""
    collectives: int = 0
    """The number of collectives that this rank has called."""
    in_subgroup: bool = False
    """Whether it called one in a subgroup: then the counts of ranks cannot be compared."""
    large_collectives: int = 0
    """The script's own collectives on tensors that may be gradients or weights."""
    to_one: int = 0
    """Point-to-point messages, as between stages of a pipeline."""
    data_ptrs: set[int] = field(default_factory=set)
    """Addresses of the tensors in large collectives since the last step."""
    lines: list[tuple[Any, bool, Any]] = field(default_factory=list)
    """For each backward since the last step: its line, whether its loss is a plain mean, and the
    batch of the loader with the address of the input of the last DDP forward."""
    input: int = 0
    forwards: list[tuple[int, bool]] = field(default_factory=list)
    """For each DDP forward since the last step: the number of the DDP, and whether it reduces."""
    last_gradient: list[float] | None = None
    """Some numbers of a gradient after the last backward, while micro-batches add up."""
    probes: list[Any] = field(default_factory=list)
    """Parameters whose gradients are sampled."""

    def count_collective(self, *, is_all: bool) -> None:
        """Count a collective, of all ranks or of a subgroup."""
        self.collectives += 1
        self.in_subgroup |= not is_all

    def position(self) -> tuple[int, ...] | None:
        """A position: two ranks with equal ones had no collective between; None if unknown."""
        return None if self.in_subgroup else (self.collectives, self.backwards, self.steps)

    def new_window(self) -> None:
        """Begin a new window after a step."""
        self.lines, self.forwards, self.last_gradient = [], [], None
        self.data_ptrs.clear()
