"""What all tests share: one warm fork server, a way to run a job, and a watch for leaks.

Every test runs under `no_leaks`: a process, thread, socket, variable, shared-memory name, temporary
file or setting of torch that is there after a test and was not before fails that test.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.config import resolve
from allranks.launch.server import ForkServer
from allranks.launch.start import Result, run_job
from allranks.launch.supervisor import Ended, Process, supervise

ROOT = Path(__file__).parent.parent
os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # so that ranks can import test workers
MODULES = (
    "allranks.on_torch.worker",
    "allranks.on_torch.warm",
    "allranks.programs.digits",
    "allranks.programs.synthetic",
)

Train = Callable[..., Result]


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """A fork server that has imported torch once, for all tests."""
    with ForkServer(MODULES) as running:
        yield running


@pytest.fixture
def train(server: ForkServer, tmp_path: Path) -> Train:
    """`train(program, **flags)`: run a job as the command line would, and return its result.

    `settings` are the values of --set; each run gets a run folder of its own.
    """
    runs = iter(range(1000))

    def run(program: str, *settings: str, **flags: Any) -> Result:
        flags.setdefault("run_dir", str(tmp_path / f"run-{next(runs)}"))
        return run_job(resolve(program, flags, settings), server)

    return run


@pytest.fixture
def on_ranks(server: ForkServer, tmp_path: Path) -> Callable[..., Ended]:
    """`on_ranks(n, target, argument)`: call module:function in n processes that are a world."""
    calls = iter(range(1000))

    def run(ranks: int, target: str, argument: Any) -> Ended:
        store = str(tmp_path / f"store-{next(calls)}") if ranks > 1 else ""
        processes = []
        for rank in range(ranks):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
                "ALLRANKS_STORE": store,
                "GLOO_SOCKET_IFNAME": "lo",
            }
            log = tmp_path / f"worker-{rank}.log"
            processes.append(Process(rank, target, argument, variables, log))
        ended = supervise(server, processes)
        codes = {rank: exit_.code for rank, exit_ in ended.exits.items()}
        logs = "".join((tmp_path / f"worker-{r}.log").read_text() for r in range(ranks))
        assert set(codes.values()) == {0}, f"{codes}\n{logs}"
        return ended

    return run


def _descendants(pid: int) -> set[int]:
    found = set()
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        children = [
            int(child)
            for task in tasks
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return found
    for child in children:
        found |= {child, *_descendants(child)}
    return found


def _sockets() -> set[str]:
    """The sockets that this process holds, without those of the fork server's control."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


def _torch_settings() -> tuple[Any, ...]:
    torch = sys.modules.get("torch")
    if torch is None:
        return ()
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
    )


def _snapshot() -> dict[str, Any]:
    temporary = Path(tempfile.gettempdir())
    return {
        "processes": _descendants(os.getpid()),
        "threads": {thread.name for thread in threading.enumerate()},
        "sockets": _sockets(),
        "variables": {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
        "shared memory": set(os.listdir("/dev/shm")),
        "temporary files": {path.name for path in temporary.glob("allranks-*")},
        "folder": os.getcwd(),
        "torch settings": _torch_settings(),
    }


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves anything behind."""
    if "train" in request.fixturenames or "on_ranks" in request.fixturenames:
        request.getfixturevalue("server")
    before = _snapshot()
    yield
    after = _snapshot()
    if not before["torch settings"]:
        after["torch settings"] = ()
    left = {name: after[name] for name in before if after[name] != before[name]}
    assert not left, {name: (before[name], after[name]) for name in left}
