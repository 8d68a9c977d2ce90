"""Where facts go: one file of JSON lines per process; and which line of the user's code it was.

A recorder that fails says so as a fact, and the script goes on. A forked child (a worker of a
loader) writes nothing, unless it makes a process group of its own.
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
    """The facts of this process, in `folder`; nothing is opened before the first."""

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

    def speak(self) -> None:
        """Write facts in a forked child as well: it takes part in a group."""
        self._silent = False

    def tell(self, fact: str, **values: Any) -> None:
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
        """The same, but its errors are facts: what looks on never ends a script."""

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
                        self.tell("unwatched", what=name, why=repr(error)[:300])
                return None

        return safe  # type: ignore[return-value]

    def where(self) -> tuple[str, int] | None:
        """File and line of the nearest frame of the user's code; else of a library on torch."""
        frame = sys._getframe(1)
        library = None
        while frame is not None:
            name = frame.f_code.co_filename
            kind = self._kinds.get(name)
            if kind is None:
                kind = self._kinds[name] = self._kind_of(name)
            if kind == USER:
                return os.path.abspath(name), frame.f_lineno
            if kind == LIBRARY and library is None:
                library = name, frame.f_lineno
            frame = frame.f_back  # type: ignore[assignment]
        return library

    def _kind_of(self, name: str) -> int:
        path = os.path.abspath(name)
        if name.startswith("<") or path.startswith(self._below):
            return BELOW
        if f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path:
            return LIBRARY
        is_standard = path.startswith((sysconfig.get_path("stdlib"), os.path.dirname(os.__file__)))
        return BELOW if is_standard else USER


def wrap(holder: Any, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `made(own)` in the place of `holder.name`, under its name and docstring."""
    own = getattr(holder, name)
    setattr(holder, name, functools.wraps(own)(made(own)))


# --- numbers -------------------------------------------------------------------------------------
# Digests of tensors, of rows of a batch, and of the states of random generators.


MOST_TENSORS = 4


def digest_of(torch: Any, tensor: Any) -> int | None:
    """CRC-32 of the bytes of a plain tensor; None for one that is in parts, or has no memory."""
    if hasattr(tensor, "to_local") or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return crc32(memoryview(flat.view(torch.uint8).numpy())) if flat.numel() else 0


def tensors_in(torch: Any, data: Any, depth: int = 3) -> Iterable[Any]:
    """The tensors of a batch, in their order."""
    if isinstance(data, torch.Tensor):
        yield data
    elif depth and isinstance(data, dict):
        for value in data.values():
            yield from tensors_in(torch, value, depth - 1)
    elif depth and isinstance(data, list | tuple):
        for value in data:
            yield from tensors_in(torch, value, depth - 1)


def rows_of(torch: Any, data: Any, size: int) -> list[list[int]]:
    """For each of `size` samples of a batch the digests of its rows in the first tensors."""
    tensors = [t for t in tensors_in(torch, data) if t.dim() and t.shape[0] == size]
    tensors = [tensor for tensor in tensors if tensor.device.type == "cpu"][:MOST_TENSORS]
    return [[digest_of(torch, tensor[i]) or 0 for tensor in tensors] for i in range(size)]


def random_states(torch: Any, device: str = "cpu") -> dict[str, int]:
    """Digests of the generators that a script may draw from: torch's, Python's, NumPy's."""
    found = {"torch": crc32(memoryview(torch.get_rng_state().numpy()))}
    if device not in ("cpu", "meta"):
        state = torch.get_device_module(device).get_rng_state()
        found[f"torch on {device}"] = crc32(memoryview(state.cpu().numpy()))
    found["random"] = crc32(repr(random.getstate()).encode())
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        state = numpy.random.get_state()
        found["numpy.random"] = crc32(state[1].tobytes() + bytes(str(state[2]), "ascii"))
    return found


# --- progress ------------------------------------------------------------------------------------
# Where a rank is in its training: what the recorders tell each other.


MOST_IN_A_WINDOW = 1024


@dataclass
class StepCounts:
    """Counts since the start, and what lies between two steps of an optimizer."""

    backwards: int = 0
    steps: int = 0
    batch: tuple[int, int, int] | None = None
    """Loader, pass and number of the last batch that was taken."""
    begun: tuple[int, int] | None = None
    """Loader and pass that was begun last: its workers are made next."""
    last_pass: tuple[int, int] | None = None
    """Loader and pass of the last pass that came to its end."""
    scaled: bool = False
    """Whether a GradScaler multiplies the loss."""
    meetings: int = 0
    """Collectives of all ranks that this one has come to."""
    is_apart: bool = False
    """Whether it came to one of some ranks alone: then counts of ranks say nothing of order."""
    large_collectives: int = 0
    """Collectives of the script's own on tensors that may be gradients or weights."""
    to_one: int = 0
    """Messages from one rank to another: stages of a pipeline, not replicas."""
    sent: set[int] = field(default_factory=set)
    """Addresses of the tensors in large collectives since the last step."""
    lines: list[tuple[tuple[str, int] | None, bool]] = field(default_factory=list)
    """Of each backward since the last step: its line, and whether its loss is a plain mean."""
    forwards: list[tuple[int, bool]] = field(default_factory=list)
    """Of each forward of a DDP since the last step: which one, and whether it reduces."""
    last_gradient: list[float] | None = None
    """Some numbers of a gradient after the last backward, while micro-batches add up."""
    probes: list[Any] = field(default_factory=list)
    """Parameters whose gradients are looked at."""

    def meet(self, *, is_all: bool) -> None:
        """A collective, of all ranks or of some."""
        self.meetings += 1
        self.is_apart |= not is_all

    def met(self) -> tuple[int, ...] | None:
        """Two ranks with the same had no meeting between them; None if that cannot be told."""
        return None if self.is_apart else (self.meetings, self.backwards, self.steps)

    def new_window(self) -> None:
        """A step was made."""
        self.lines, self.forwards, self.last_gradient = [], [], None
        self.sent.clear()
