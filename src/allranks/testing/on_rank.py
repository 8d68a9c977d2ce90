"""What a rank of a test does: join the others, call the function of the test, leave a record.

The fork server calls `main`. A rank is a new process, so it gets the folders of pytest's modules
first, then the function by value (cloudpickle). It works with one thread. `random` and NumPy start
from a seed of this process's own, as in processes that a launcher starts.

With `undo`, one thing is done otherwise than the code says: `causes` looks whether a difference
vanishes then. The changes are in `undo`.
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

import allranks.torch.shared_memory.backend as shared_memory
from allranks.launcher.heartbeat import Heartbeat
from allranks.launcher.processes.fork_server import HEARTBEAT_FD, SEGMENT_FD
from allranks.launcher.processes.linux import adopt_orphans, children_of_this_process
from allranks.launcher.processes.process import failure_of
from allranks.testing import undo
from allranks.testing.compare import INPUT, TestedPart, check, recorded

LAST_S = 1.0  # for loader processes, which end when nobody holds their loader any more
TRACKER = "multiprocessing.resource_tracker"  # Python's own, ends with this process


@dataclass(frozen=True)
class RankOfTest:
    """The argument `ranks` of a test: this process is rank `rank` of `world`."""

    rank: int
    world: int


@dataclass(frozen=True, kw_only=True)
class TestCall:
    """What every rank of a world is to do. `function` is the pickle of a function and arguments.

    With `steps` it is a step function, of which the tensors are recorded so many times; without it
    is the body of a test. `precision` "float64" makes what would be 32 bits wide 64.
    """

    __test__ = False  # pytest does not collect it

    function: bytes
    path: list[str]
    backend: str
    timeout_s: float
    steps: int = 0
    precision: str = "own"
    undo: str = ""


def main(argument: dict[str, Any]) -> int:
    """Rank `argument["rank"]` of `argument["ranks"]` ranks, with the call in `argument["folder"]`.

    The outcome is in a file `rank-N` of that folder; the exit code is 0 if the call ended well.
    """
    folder, rank, size = Path(argument["folder"]), argument["rank"], argument["ranks"]
    heartbeat = Heartbeat(HEARTBEAT_FD, rank)
    heartbeat.enter("compute")
    adopt_orphans()
    outcome: dict[str, Any] = {}
    try:
        call: TestCall = pickle.loads((folder / "call").read_bytes())
        outcome["steps"] = _called(call, rank, size, folder, heartbeat)
        _check_that_no_process_is_left()
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        error = error.with_traceback(trace)
        outcome = {**failure_of(error, 0, heartbeat.step), "monotonic": time.monotonic()}
        outcome["skipped"] = type(error).__name__ == "Skipped"  # pytest's
    part = folder / f"rank-{rank}.part"
    part.write_bytes(pickle.dumps(outcome))
    part.rename(folder / f"rank-{rank}")
    return 0 if "steps" in outcome else 1


def _called(call: TestCall, rank: int, size: int, folder: Path, heartbeat: Heartbeat) -> Any:
    sys.path[:] = call.path
    torch.set_num_threads(1)
    random.seed()
    np.random.seed()
    if call.precision == "float64":
        torch.set_default_dtype(torch.float64)
    store = FileStore(str(folder / "store"), size)
    with ExitStack() as stack:
        watch = undo.Counts()
        backend = call.backend
        if backend == shared_memory.SHARED:
            shared_memory.register(SEGMENT_FD)
        if call.undo:
            backend = undo.enter(call.undo, backend, stack, watch)
        limit = timedelta(seconds=call.timeout_s + 60)  # the launcher sees a hang before
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        if store.add("joined", 1) == size:  # a rank that ends early would break off others' joining
            store.set("all-joined", "")
        store.wait(["all-joined"], limit)
        function, arguments = pickle.loads(call.function)
        if call.precision == "float64" or call.undo:
            stack.enter_context(Functions(call, watch))
        if not call.steps:
            function(ranks=RankOfTest(rank, size), **arguments)
            result: Any = []
        else:
            result = list(_steps(call, function, rank, size, heartbeat, store, watch.inputs))
    if dist.is_initialized():  # the test may have left it itself
        dist.destroy_process_group()
    return result


def _steps(
    call: TestCall,
    function: Any,
    rank: int,
    size: int,
    heartbeat: Heartbeat,
    store: Any,
    inputs: list[Tensor],
) -> Iterator[Any]:
    """The tensors of each step; a step function that yields is called once."""
    several: Iterator[Any] | None = None
    for step in range(call.steps):
        heartbeat.at_step(step)
        heartbeat.enter("compute")
        if call.undo == undo.SEEDS:
            undo.seed_all(step)
        values = function(rank, size) if several is None else next(several, None)
        if step == 0 and isinstance(values, Iterator):
            several = values
            values = next(several, None)
        words, do = f"the step function yielded {step} times", f"steps={step}, or yield more"
        is_over = values is None and several is not None
        check(f"{call.steps} steps", "each step is compared", (is_over, words, do))
        tensors = recorded(values, step, rank, size, store)
        yield tensors | {f"{INPUT}{n}": TestedPart(t) for n, t in enumerate(inputs)}
        inputs.clear()


def _check_that_no_process_is_left() -> None:
    """Raise if the function of the test left a process running; orphans are this rank's, too."""
    gc.collect()
    deadline = time.monotonic() + LAST_S
    while running := [words for pid in children_of_this_process() if (words := _command(pid))]:
        if time.monotonic() > deadline:
            raise RuntimeError("the test left a process behind: " + "; ".join(running))
        time.sleep(0.02)


def _command(pid: int) -> str:
    """The command of a child, "" for one that has ended and for Python's own."""
    try:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return ""
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
    return "" if TRACKER in words else f"{pid} ({words.strip() or 'forked'})"


class Functions(TorchFunctionMode):
    """Changes calls of torch's functions: 32 bits become 64, and what is undone is done otherwise.

    A tensor of 32 bits that comes from elsewhere, as from NumPy, is made wider, too.
    """

    def __init__(self, call: TestCall, counts: undo.Counts) -> None:
        super().__init__()
        self.wide = call.precision == "float64"
        self.undone, self.counts = call.undo, counts
        narrow = {torch.float32}
        if call.undo == undo.ROUNDING:
            narrow |= {torch.bfloat16, torch.float16}
        self.narrow = narrow if self.wide else set()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if self.wide and WIDTHS.get(name) in self.narrow:
            return args[0].double()
        if self.wide and not IN_PLACE.match(name):
            args = tuple(self._wider(value) for value in args)
            kwargs = {key: self._wider(value) for key, value in kwargs.items()}
        if self.undone:
            return self._wider(undo.call(self.undone, self.counts, function, args, kwargs))
        return self._wider(function(*args, **kwargs))

    def _wider(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float64 if value in self.narrow else value
        if type(value) in (list, tuple):
            return type(value)(self._wider(item) for item in value)
        return value.double() if type(value) is Tensor and value.dtype in self.narrow else value


WIDTHS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
IN_PLACE = re.compile(r"__(i\w+|[gs]et|setitem)__$|(?!__)\w*[^_]_$")  # a copy would be changed
