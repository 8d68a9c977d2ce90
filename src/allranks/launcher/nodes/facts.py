"""What there is on this node, as far as it can be told without a framework. Plain data.

The head of a job compares it between the nodes; `allranks doctor` prints it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import allranks
from allranks.errors import RequestError, nearest
from allranks.job.program import file_sha256

# --- interfaces ----------------------------------------------------------------------------------
# The network interfaces of this machine, and whether an address of another one answers.


GREETING = b"allranks "
MOST_AT_ONCE = 256


@dataclass(frozen=True)
class Interface:
    """A network interface that is up: its IPv4 address, and the speed that its driver tells."""

    name: str
    address: str
    speed_mbit: int | None = field(default=None, compare=False)


def interfaces() -> tuple[Interface, ...]:
    """Those of this machine that are up and have an IPv4 address, without the loopback."""
    addresses, found = psutil.net_if_addrs(), []
    for name, state in psutil.net_if_stats().items():
        flags = state.flags.split(",")
        own = [one.address for one in addresses.get(name, ()) if one.family == socket.AF_INET]
        if own and "up" in flags and "loopback" not in flags:
            found.append(Interface(name, own[0], state.speed or None))
    return tuple(found)


def candidates(first: str, wanted: str = "") -> tuple[Interface, ...]:
    """The interfaces by which other nodes may reach this one, the address `first` before others.

    With `wanted` it is the one of that name; raises `RequestError` if there is none.
    """
    there = interfaces()
    if wanted:
        named = tuple(one for one in there if one.name == wanted)
        if not named:
            raise RequestError(
                asked=f"--interface {wanted}",
                found=f"no interface of that name on {socket.gethostname()} that is up",
                why="the ranks of all nodes meet over this interface",
                do=nearest(wanted, [one.name for one in there]),
            )
        return named
    if first.startswith("127."):  # nodes on one machine
        return (Interface("lo", first),)
    return tuple(sorted(there, key=lambda one: one.address != first))


class Doorbell:
    """A port of this node at which others ring, to see by which of its addresses they reach it."""

    def __init__(self, token: str) -> None:
        self.token = token
        self._socket = socket.create_server(("0.0.0.0", 0))
        self._socket.setblocking(False)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def answer(self) -> None:
        """Greet all who ring; never waits."""
        with suppress(OSError):
            for _ in range(MOST_AT_ONCE):  # whoever rings without end keeps nobody from working
                caller = self._socket.accept()[0]
                with caller, suppress(OSError):
                    caller.send(GREETING + self.token.encode())

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


class Ringing:
    """Rings at all addresses of other nodes at once; `bells`: name -> (addresses, port, token)."""

    def __init__(self, bells: Mapping[str, tuple[Sequence[str], int, str]], seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self.found: dict[str, list[str]] = {name: [] for name in bells}
        self._tried: dict[tuple[str, str], socket.socket] = {}
        self._expected = {name: GREETING + token.encode() for name, (_, _, token) in bells.items()}
        for name, (addresses, port, _) in bells.items():
            for address in addresses:
                one = self._tried[name, address] = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                one.setblocking(False)
                one.connect_ex((address, port))

    def is_over(self) -> bool:
        """Look who has answered; true when nobody is waited for any more. Never waits."""
        for (name, address), one in list(self._tried.items()):
            try:
                answer = one.recv(256)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.ENOTCONN):
                    continue
                answer = b""
            if answer == self._expected[name]:
                self.found[name].append(address)
            self._tried.pop((name, address)).close()
        if self._tried and time.monotonic() < self._deadline:
            return False
        self.close()
        return True

    def close(self) -> None:
        for one in self._tried.values():
            one.close()
        self._tried.clear()


PACKAGES = ("torch", "numpy", "safetensors", "tensorflow", "keras", "jax", "deepspeed", "lightning")
MUST_BE_EQUAL = ("allranks", "source", "python", "program", "torch", "tensorflow", "jax")


@dataclass(frozen=True)
class NodeFacts:
    """One node: its host, its versions, its devices and its limits. Unknown is `None`.

    `machine` is the same for simulated nodes, which share one; `processors` are the numbers of
    those that this process may use.
    """

    host: str
    machine: str
    python: str
    allranks: str
    source: str
    packages: dict[str, str]
    system: str
    processor: str | None
    cores: int
    processors: str
    memory_bytes: int
    shared_memory_bytes: int | None
    open_files: int
    gpus: list[str]
    interfaces: dict[str, str]
    clock_s: float
    program: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def to_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> NodeFacts:
        """Raises `TypeError` for facts of another version of this package."""
        return cls(**data)

    def compared(self) -> dict[str, str | None]:
        """What must be the same on every node of a job, by name."""
        values: dict[str, str | None] = {**self.packages, "allranks": self.allranks}
        values |= {"source": self.source, "python": self.python, "program": self.program}
        return {name: values.get(name) for name in MUST_BE_EQUAL}


def facts(program: str = "") -> NodeFacts:
    """The facts of this node; `program` is a file whose content is to be the same everywhere."""
    return NodeFacts(
        host=socket.gethostname(),
        machine=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        python=platform.python_version(),
        allranks=allranks.__version__,
        source=_digest_of_source(),
        packages={name: v for name in PACKAGES if (v := _version(name)) is not None},
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=_named_in(Path("/proc/cpuinfo"), "model name"),
        cores=len(os.sched_getaffinity(0)),
        processors=",".join(map(str, sorted(os.sched_getaffinity(0)))),
        memory_bytes=psutil.virtual_memory().total,
        shared_memory_bytes=_free(Path("/dev/shm")),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        gpus=gpus_of_driver(),
        interfaces={one.name: one.address for one in interfaces()},
        clock_s=time.time(),
        program=digest_of(program),
    )


def differences(nodes: dict[str, NodeFacts]) -> list[str]:
    """What is not the same on all nodes and has to be: a line for each, with who has what."""
    compared = {node: found.compared() for node, found in nodes.items()}
    lines = []
    for name in MUST_BE_EQUAL:
        values = {node: found[name] for node, found in compared.items()}
        if len(set(values.values())) > 1:
            told = ", ".join(f"{node} has {value or 'none'}" for node, value in values.items())
            lines.append(f"{_WORDS.get(name, name)}: {told}")
    return lines


_WORDS = {"source": "the source of allranks (digest)", "program": "the program (digest)"}


def digest_of(program: str) -> str | None:
    """The digest of the file that a program is in; `None` where it is no file."""
    try:
        digest = file_sha256(program)
    except OSError as error:
        return f"unreadable ({error.strerror})"
    return None if digest is None else digest[:12]


def _digest_of_source() -> str:
    """One digest of all files of this package."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _named_in(file: Path, name: str) -> str | None:
    """The value after `name` in one of the kernel's files."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(found, None)


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def gpus_of_driver(root: Path = Path("/")) -> list[str]:
    """The names of NVIDIA's devices, as their driver tells them: no framework is asked.

    They are unknown in a container that shows the devices and not what the driver tells.
    """
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    if files:
        return [_named_in(file, "Model") or "unknown" for file in files]
    return ["unknown" for _ in (root / "dev").glob("nvidia[0-9]*")]
