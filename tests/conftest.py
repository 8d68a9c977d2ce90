"""What all tests share: one warm fork server, a way to run a job, and a watch for leaks.

Every test runs under `no_leaks`: a process, thread, socket, variable, shared-memory name, temporary
file or setting of torch that is there after a test and was not before fails that test.

There are two tiers. `pytest` runs every test, but of large products a part in which every pair of
values comes together (`tiers.py`: the markers `thinned` and `cases`), of ordeals a smaller number
(the fixture `exhaustive`), and of made-up input fewer examples. `pytest --exhaustive` runs all of
it. No test is skipped in either. With `--tier` some tests have fewer cases (`slow(most=N)`).

No bound in a test is a promise: machines that test are slow and loaded, and a wait only has to end.
What is promised in seconds is measured in `benchmarks/`.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import pytest_randomly
import torch

import allranks.torch.preload  # noqa: F401  it changes variables, once
from allranks.job.config import resolve
from allranks.job.engines import preload_for
from allranks.job.job import Job
from allranks.launcher.nodes.cluster import Cluster, gathered
from allranks.launcher.places import NodeRequest, Rendezvous
from allranks.launcher.plan import Shape
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.linux import state_of
from allranks.launcher.processes.process import Process
from allranks.launcher.start import Result, run_job
from allranks.launcher.supervisor import Ended, supervise
from launch_host import Host
from tiers import MARKERS, TIERS, more_than_most, parametrize, slow_ones

TESTS = Path(__file__).parent
ROOT, TASKS = TESTS.parent, TESTS / "tasks"
# so that ranks can import tasks and workers
os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (TESTS, TASKS, TESTS / "workers")))
_AROUND = os.environ.setdefault("ALLRANKS_TESTS_IN", tempfile.gettempdir())  # of all workers
tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="allranks-tests-", dir=_AROUND)
if "ALLRANKS_TESTS_CACHE" not in os.environ:  # first checks that have passed, of all workers
    os.environ["ALLRANKS_TESTS_CACHE"] = tempfile.mkdtemp(prefix="allranks-cache-", dir=_AROUND)
os.environ["XDG_CACHE_HOME"] = os.environ["ALLRANKS_TESTS_CACHE"]
os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that spin for others slow a busy machine down
# tensorboard imports TensorFlow where it is installed, unless it finds this
sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))
pytest_randomly.entrypoint_reseeds = []  # DeepSpeed has one, and would be imported for it
torch.set_num_threads(1)  # here, where that was read already
MODULES = (
    "allranks.torch.worker",
    "allranks.torch.preload",
    "allranks.programs.digits",
    "allranks.programs.synthetic",
    "pytest",  # tasks and workers import it, a fifth of a second in each rank
    "resume_tasks",  # with contract_tasks: most tests train theirs, and it is a fifth of a rank
)

# `make test` has no transformers; `make test-full` installs it.
collect_ignore = (
    []
    if find_spec("transformers")
    else [
        "test_huggingface.py",
        "test_huggingface_adapters.py",
        "test_huggingface_export.py",
        "test_huggingface_generate.py",
        "test_huggingface_parts.py",
    ]
)

Train = Callable[..., Result]
PATIENT = Rendezvous(node_timeout_s=1e6)
ON_ITS_WAY_OUT_S = 60.0  # a thread of torch's queues ends a moment after its loader is closed

# no test fails for being slow, none leaves a file
hypothesis.settings.register_profile("allranks", deadline=None, database=None)
hypothesis.settings.register_profile(
    "exhaustive", hypothesis.settings.get_profile("allranks"), max_examples=400
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, help="`make test` is quick, `make test-full` slow")
    parser.addoption(
        "--exhaustive", action="store_true", help="whole products, ordeals, and examples"
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    hypothesis.settings.load_profile("exhaustive" if config.getoption("exhaustive") else "allranks")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc, bool(metafunc.config.getoption("exhaustive")))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Tests as pytest rewrites them are kept: to do so is a third of what collecting takes.

    What is imported stays, so to look through it again and again for garbage is in vain.
    """
    was, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
    sys.dont_write_bytecode = was


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.accelerator.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU"))
    tier = config.getoption("tier")
    if tier is not None and not config.getoption("exhaustive"):
        too_many = set(more_than_most(items))
        items[:] = [item for item in items if item not in too_many]
        config.hook.pytest_deselected(items=list(too_many))
    if tier is not None:
        slow = set(slow_ones(items))
        left_out = [item for item in items if (item in slow) == (tier == "quick")]
        items[:] = [item for item in items if (item in slow) == (tier == "slow")]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def exhaustive(pytestconfig: pytest.Config) -> bool:
    """Whether the ordeals (launches disturbed, ranks killed)
    are to be run in their whole number."""
    return bool(pytestconfig.getoption("exhaustive"))


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """A fork server that has imported torch once, for all tests."""
    with ForkServer(MODULES) as running:
        yield running


@pytest.fixture(scope="session")
def nodes() -> Iterator[Cluster]:
    """Two simulated nodes for two ranks each, with torch imported, for all tests that break none.

    Between two tests nobody tells them that the head of the job is alive, so they never give up.
    """
    shared = Path(tempfile.mkdtemp())
    request = NodeRequest("simulated:link=1gbit", 2, 4, PATIENT, shared=shared, modules=MODULES)
    with gathered(request) as cluster:
        cluster.plan(Job(strategy="ddp", ranks=4, nodes=2), Shape({}, 256, 8))
        logs = Path(tempfile.mkdtemp(dir=shared))
        seen = [
            Process(rank, "builtins:print", rank, {}, logs / f"{rank}.log") for rank in range(4)
        ]
        supervise(cluster.server, seen)  # all that it starts is there now
        yield cluster


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    """Starts whole launches of the command line, each in processes of its own."""
    with closing(Host()) as running:
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


@pytest.fixture(scope="session")
def tf_server() -> Iterator[ForkServer]:
    """A fork server that has imported TensorFlow and Keras once, for all tests."""
    with ForkServer(preload_for("digits-keras", "tensorflow")) as running:
        yield running


@pytest.fixture(scope="session")
def keras_server() -> Iterator[ForkServer]:
    """A fork server that has imported Keras on torch once, for all tests."""
    with ForkServer((*preload_for("digits-keras", "torch"), *MODULES)) as running:
        yield running


@pytest.fixture
def train_tf(tf_server: ForkServer, tmp_path: Path) -> Train:
    """`train_tf(program, *settings, **flags)`: as `train`, with the TensorFlow engine."""
    runs = iter(range(1000))

    def run(program: str, *settings: str, **flags: Any) -> Result:
        defaults = {"run_dir": str(tmp_path / f"run-{next(runs)}"), "threads": 1}
        flags = {**defaults, "engine": "tensorflow", **flags}
        return run_job(resolve(program, flags, settings), tf_server)

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


@pytest.fixture
def on_device(on_ranks: Callable[..., Ended]) -> Callable[..., None]:
    """`on_device(n, name, argument)`: call a function of `pretended.workers` in n ranks.

    A process has one PrivateUse1 for good, so each of them installs the device, and ends with it.
    """

    def run(ranks: int, name: str, argument: Any = None) -> None:
        on_ranks(ranks, f"pretended.workers:{name}", argument)

    return run


def _descendants(pid: int) -> set[int]:
    """All processes below one, from the parents in /proc:
    its lists of children are not reliable."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                parent = int(stat.read().rpartition(b")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(name))
    found, ahead = set(), [pid]
    while ahead:
        below = children.get(ahead.pop(), [])
        found.update(below)
        ahead += below
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


def _shared_memory(ours: set[int]) -> set[str]:
    """The names in /dev/shm, without those of living processes that are none of ours."""
    names = {name: re.match(r"torch_(\d+)_", name) for name in os.listdir("/dev/shm")}
    if any(name.startswith("sem.") for name in names):  # such a name does not say whose it is
        mapped = _mapped_by_others(ours)
        names = {name: torchs for name, torchs in names.items() if name not in mapped}
    return {
        name
        for name, torchs in names.items()
        if torchs is None or int(torchs[1]) in ours or state_of(int(torchs[1])) in ("", "Z")
    }


def _mapped_by_others(ours: set[int]) -> set[str]:
    """The names in /dev/shm that processes hold which are none of ours: tests that run beside."""
    found: set[str] = set()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if pid not in ours:
            with suppress(OSError):
                found.update(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
    return found


def _torch_settings() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
    )


def _snapshot() -> dict[str, Any]:
    temporary = Path(tempfile.gettempdir())
    processes = _descendants(os.getpid())
    return {
        "processes": processes,
        "threads": {thread.name for thread in threading.enumerate()},
        "sockets": _sockets(),
        "variables": {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
        "shared memory": _shared_memory({os.getpid(), *processes}),
        "temporary files": {path.name for path in temporary.glob("allranks-*")},
        "folder": os.getcwd(),
        "torch settings": _torch_settings(),
    }


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves anything behind."""
    for shared in {"server", "nodes", "tf_server", "ranks_server"} & set(request.fixturenames):
        request.getfixturevalue(shared)
    before = _snapshot()
    yield
    deadline = time.monotonic() + ON_ITS_WAY_OUT_S
    while left := _all_left(before):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def _all_left(before: dict[str, Any]) -> dict[str, Any]:
    """What of each kind was left behind since `before`."""
    after = _snapshot()
    left = {name: _left(before[name], after[name]) for name in before}
    return {name: what for name, what in left.items() if what}


def _left(before: Any, after: Any) -> Any:
    """What is there after a test and was not before."""
    if isinstance(before, set):
        return after - before
    if isinstance(before, dict):
        return {
            name: after.get(name) for name in before | after if before.get(name) != after.get(name)
        }
    return None if before == after else (before, after)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`torch.compile` knows nothing yet, and shows no progress, which would start a thread."""
    if find_spec("tqdm"):
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["ALLRANKS_TESTS_CACHE"], ignore_errors=True)
