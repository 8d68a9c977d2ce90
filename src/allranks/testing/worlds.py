"""Runs a function of a test on ranks, from the process of pytest, and returns what each rank left.

One fork server serves all tests of a process: a rank is a fork of it, which takes milliseconds. The
function goes to the ranks by value, in a folder that only this user can read and that goes with the
call. The first failure, or a hang, ends all ranks, and is raised with that rank's traceback.
"""

from __future__ import annotations

import inspect
import marshal
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import cloudpickle
import torch

from allranks.errors import FaultKind, ProgramError, RequestError, nearest
from allranks.launcher.heartbeat import HeartbeatTable
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.leftovers import scratch_folder
from allranks.launcher.processes.process import Process
from allranks.launcher.supervisor import (
    Ended,
    Hang,
    WatchPolicy,
    place_of_users_collective,
    supervise,
)
from allranks.testing import on_rank
from allranks.testing.compare import Rule
from allranks.testing.on_rank import TestCall

MODULES = ("allranks.testing.on_rank", "allranks.torch.preload", "pytest")
BACKENDS = ("gloo", "shared_memory", "nccl")
TIMEOUT_S = 60.0
LOG_LINES = 30
MOST_CALLS = 5  # from function to function, in search of what cannot be copied
Arguments = Mapping[str, Any]


class SkippedOnRank(Exception):
    """A rank called `pytest.skip`, with this reason."""


class Worlds:
    """Runs worlds of ranks, one after another, on one warm fork server. Close it at the end.

    `preload` are more modules to import once for all ranks.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._environment = dict(os.environ)
        self._server = ForkServer((*MODULES, *preload))

    def close(self) -> None:
        self._server.close()

    def run(self, call: TestCall, ranks: int) -> list[Any]:
        """What each of `ranks` ranks recorded. Raises `ProgramError`, `RequestError`, `Skipped…`.

        Standard output of the ranks is written to that of this process, line by line.
        """
        changed = {k: v for k, v in os.environ.items() if self._environment.get(k) != v}
        with (
            scratch_folder() as name,  # if pytest is killed, the next start removes it
            closing(HeartbeatTable(ranks)) as heartbeats,
        ):
            folder = Path(name)
            (folder / "call").write_bytes(pickle.dumps(call))
            processes = [_process(rank, ranks, folder, changed) for rank in range(ranks)]
            policy = WatchPolicy(heartbeats, hang_timeout_s=call.timeout_s)
            ended = supervise(self._server, processes, policy=policy)
            logs = [(folder / f"log-{rank}").read_text(errors="replace") for rank in range(ranks)]
            for rank, log in enumerate(logs):
                sys.stdout.writelines(f"[rank {rank}] {line}\n" for line in log.splitlines())
            files = [folder / f"rank-{rank}" for rank in range(ranks)]
            outcomes = [pickle.loads(f.read_bytes()) if f.exists() else {} for f in files]
        _raise_the_first(ended, outcomes, logs)
        return [outcome["steps"] for outcome in outcomes]


def _process(rank: int, size: int, folder: Path, changed: dict[str, str]) -> Process:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    variables = {name: str(number) for name, number in numbers.items()}
    return Process(
        rank=rank,
        target="allranks.testing.on_rank:main",
        argument={"folder": str(folder), "rank": rank, "ranks": size},
        environment={"GLOO_SOCKET_IFNAME": "lo"} | changed | variables,
        log=folder / f"log-{rank}",
    )


def _raise_the_first(ended: Ended, outcomes: list[dict[str, Any]], logs: list[str]) -> None:
    """Raise the fault of the rank that failed first: not that of one which lost another."""
    size = len(outcomes)
    if ended.interrupted:  # pytest's own handlers are back
        signal.raise_signal(signal.Signals[ended.reason])
    failed = {r: o for r, o in enumerate(outcomes) if "message" in o}
    silent = [
        rank
        for rank, exit_ in sorted(ended.exits.items())
        if not outcomes[rank] and (rank not in ended.stopped or exit_.code not in (-9, -15))
    ]
    causes = [rank for rank, outcome in failed.items() if not outcome["peer_lost"]]
    if not causes and silent:
        rank = silent[0]
        tail = "\n".join(logs[rank].splitlines()[-LOG_LINES:])
        code = ended.exits[rank].code
        how = f"was killed by signal {-code}" if code < 0 else f"left with exit code {code}"
        raise ProgramError(f"rank {rank} of {size} {how} before the end of the test\n{tail}")
    if not failed:
        if ended.hang is not None:
            raise ProgramError(_hang_text(ended.hang, size), fault_kind=FaultKind.HANG)
        return
    rank = min(causes or failed, key=lambda r: float(failed[r]["monotonic"]))
    first = failed[rank]
    if first["skipped"]:
        raise SkippedOnRank(first["message"])
    if first["request"]:
        raise RequestError.from_data(first["request"])
    step = "" if first["step"] is None or first["step"] < 0 else f" in step {first['step']}"
    raise ProgramError(f"rank {rank} of {size} failed{step}\n{first['traceback']}")


def _hang_text(hang: Hang, size: int) -> str:
    """The stacks of all ranks, those first that are in no collective: the others wait for them."""
    places = {rank: place_of_users_collective(stack) for rank, stack in hang.stacks.items()}
    parts = [f"no progress for {hang.timeout_s:g} s on {size} ranks"]
    for rank in sorted(places, key=lambda rank: (places[rank] != "", rank)):
        where = f"waits in a collective, called by {places[rank]}"
        stack = hang.stacks[rank].partition(f'  File "{on_rank.__file__}"')[0].rstrip()
        parts.append(f"rank {rank} {where if places[rank] else 'is in no collective'}\n{stack}")
    return "\n".join(parts)


def rules_of(ranks: Sequence[Any], backend: str, timeout_s: Any, least: int) -> Iterator[Rule]:
    """What holds for numbers of ranks, at least so many of them, a backend and a timeout."""
    are_numbers = all(isinstance(n, int) and n is not True and n > 0 for n in ranks)
    is_few = len(ranks) < least or len({*map(str, ranks)}) < len(ranks)
    words, do = f"{list(ranks)} as numbers of ranks", "whole numbers from 1 on, such as (1, 2)"
    yield not are_numbers, words, do
    yield is_few, words, f"give {least} or more of them, all different, such as (1, 2)"
    yield backend not in BACKENDS, f"backend={backend!r}", nearest(str(backend), BACKENDS)
    is_time = isinstance(timeout_s, int | float) and timeout_s > 0
    yield not is_time, f"timeout={timeout_s!r}", f"give seconds, such as timeout={TIMEOUT_S:g}"


# --- the function, by value ----------------------------------------------------------------------


def carried(function: Callable[..., Any], arguments: Arguments, *, wide: bool) -> bytes:
    """A function and its arguments as ranks get them; with `wide`, tensors of 32 bits have 64.

    Whatever its module defines goes with it by value, since ranks cannot import a test as pytest
    has. Raises `RequestError` for what cannot be copied into another process.
    """
    content = BytesIO()
    try:
        with _by_value(function):
            _Carrier(content, wide).dump((function, dict(arguments)))
    except Exception as error:  # an object may raise anything when it is pickled
        name, value = _culprit(function, {"the function": function, **arguments}) or ("", error)
        raise RequestError(
            asked=f"to run {getattr(function, '__qualname__', function)} on ranks",
            found=f"it uses {name!r}, a {type(value).__name__}: {error}",
            why="ranks are other processes, which get copies of what it uses; of files, locks, "
            "connections, generators and devices there is none",
            do=f"make {name or 'it'} inside of the function",
        ) from error
    return content.getvalue()


class _Carrier(cloudpickle.Pickler):  # type: ignore[misc]  # of a package without types
    def __init__(self, content: BytesIO, wide: bool) -> None:
        super().__init__(content)
        self._wide = wide

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, CodeType):  # whole, with the file that a traceback names
            return marshal.loads, (marshal.dumps(value),)
        if self._wide and isinstance(value, torch.Tensor) and value.dtype == torch.float32:
            wider = value.detach().double().requires_grad_(value.requires_grad)
            if isinstance(value, torch.nn.Parameter):
                wider = torch.nn.Parameter(wider, value.requires_grad)
            return wider.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(value)


@contextmanager
def _by_value(function: Any) -> Iterator[None]:
    """Within, what the module of `function` defines is pickled by value."""
    while isinstance(function, partial):  # its own module is functools
        function = function.func
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    known = cloudpickle.list_registry_pickle_by_value()
    if module is None or module.__name__ in known or not hasattr(module, "__file__"):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _culprit(function: Any, things: Arguments, depth: int = 0) -> tuple[str, Any] | None:
    """The first thing by name that cannot be pickled; of a function, what it uses."""
    for name, value in things.items():
        try:
            with _by_value(function):
                _Carrier(BytesIO(), wide=False).dump(value)
        except Exception:
            used = getattr(value, "__func__", value)
            if not isinstance(used, FunctionType) or depth > MOST_CALLS:
                return name, value
            inner = inspect.getclosurevars(used)
            parts = {**inner.nonlocals, **inner.globals}
            return _culprit(function, parts, depth + 1) or (name, value)
    return None
