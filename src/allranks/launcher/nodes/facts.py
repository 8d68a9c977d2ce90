"""Facts of this node that need no framework: versions, devices, limits, interfaces. Plain data.

The head of a job compares them between the nodes; `allranks doctor` prints them.
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
# The network interfaces of this machine, and a probe of other nodes' addresses.


GREETING = b"allranks "
MOST_AT_ONCE = 256


@dataclass(frozen=True)
class Interface:
    """A network interface that is up: its IPv4 address, and the speed that its driver reports."""

    name: str
    address: str
    speed_mbit: int | None = field(default=None, compare=False)


def interfaces() -> tuple[Interface, ...]:
    """The interfaces of this machine that are up and have an IPv4 address, without loopback."""
    addresses, up = psutil.net_if_addrs(), []
    for name, state in psutil.net_if_stats().items():
        flags = state.flags.split(",")
        ipv4 = [a.address for a in addresses.get(name, ()) if a.family == socket.AF_INET]
        if ipv4 and "up" in flags and "loopback" not in flags:
            up.append(Interface(name, ipv4[0], state.speed or None))
    return tuple(up)


def candidates(first: str, wanted: str = "") -> tuple[Interface, ...]:
    """The interfaces at which other nodes may reach this one, that with address `first` in front.

    With `wanted`, only the interface of that name; raises `RequestError` if there is none.
    """
    there = interfaces()
    if wanted:
        named = tuple(interface for interface in there if interface.name == wanted)
        if not named:
            raise RequestError(
                asked=f"--interface {wanted}",
                found=f"no interface of that name on {socket.gethostname()} that is up",
                why="the ranks of all nodes meet over this interface",
                do=nearest(wanted, [interface.name for interface in there]),
            )
        return named
    if first.startswith("127."):  # nodes on one machine
        return (Interface("lo", first),)
    return tuple(sorted(there, key=lambda interface: interface.address != first))


class Doorbell:
    """A port of this node to which others connect, to find an address at which they reach it."""

    def __init__(self, token: str) -> None:
        self.token = token
        self._socket = socket.create_server(("0.0.0.0", 0))
        self._socket.setblocking(False)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def answer(self) -> None:
        """Greet every caller; never blocks."""
        with suppress(OSError):
            for _ in range(MOST_AT_ONCE):  # bounded: a flood of callers must not block the agent
                caller = self._socket.accept()[0]
                with caller, suppress(OSError):
                    caller.send(GREETING + self.token.encode())

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


class Ringing:
    """Connects to all addresses of other nodes; `bells`: name -> (addresses, port, token)."""

    def __init__(self, bells: Mapping[str, tuple[Sequence[str], int, str]], seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self.reached: dict[str, list[str]] = {name: [] for name in bells}
        self._tried: dict[tuple[str, str], socket.socket] = {}
        self._expected = {name: GREETING + token.encode() for name, (_, _, token) in bells.items()}
        for name, (addresses, port, _) in bells.items():
            for address in addresses:
                caller = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                self._tried[name, address] = caller
                caller.setblocking(False)
                caller.connect_ex((address, port))

    def is_over(self) -> bool:
        """Collect answers; true when all have answered or the time is over. Never blocks."""
        for (name, address), caller in list(self._tried.items()):
            try:
                answer = caller.recv(256)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.ENOTCONN):
                    continue
                answer = b""
            if answer == self._expected[name]:
                self.reached[name].append(address)
            self._tried.pop((name, address)).close()
        if self._tried and time.monotonic() < self._deadline:
            return False
        self.close()
        return True

    def close(self) -> None:
        for caller in self._tried.values():
            caller.close()
        self._tried.clear()


PACKAGES = ("torch", "numpy", "safetensors", "tensorflow", "keras", "jax", "deepspeed", "lightning")
MUST_BE_EQUAL = ("allranks", "source", "python", "program", "torch", "tensorflow", "jax")


@dataclass(frozen=True)
class NodeFacts:
    """One node: its host, its versions, its devices and its limits. Unknown is `None`.

    Simulated nodes on one machine have the same `machine`. `processors` are the numbers of those
    that this process may use.
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
        """The values that must be equal on every node of a job, by name."""
        values: dict[str, str | None] = {**self.packages, "allranks": self.allranks}
        values |= {"source": self.source, "python": self.python, "program": self.program}
        return {name: values.get(name) for name in MUST_BE_EQUAL}


def facts(program: str = "") -> NodeFacts:
    """The facts of this node; `program` is a file whose content must be equal on every node."""
    return NodeFacts(
        host=socket.gethostname(),
        machine=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        python=platform.python_version(),
        allranks=allranks.__version__,
        source=_digest_of_source(),
        packages={name: v for name in PACKAGES if (v := _version(name)) is not None},
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=processor(),
        cores=len(os.sched_getaffinity(0)),
        processors=",".join(map(str, sorted(os.sched_getaffinity(0)))),
        memory_bytes=psutil.virtual_memory().total,
        shared_memory_bytes=_free(Path("/dev/shm")),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        gpus=gpus_of_driver(),
        interfaces={interface.name: interface.address for interface in interfaces()},
        clock_s=time.time(),
        program=digest_of(program),
    )


def differences(nodes: dict[str, NodeFacts]) -> list[str]:
    """A line for each value that must be equal on all nodes and is not, with each node's value."""
    compared = {node: its_facts.compared() for node, its_facts in nodes.items()}
    lines = []
    for name in MUST_BE_EQUAL:
        values = {node: its_facts[name] for node, its_facts in compared.items()}
        if len(set(values.values())) > 1:
            versions = ", ".join(f"{node} has {value or 'none'}" for node, value in values.items())
            lines.append(f"{_WORDS.get(name, name)}: {versions}")
    return lines


_WORDS = {"source": "the source of allranks (digest)", "program": "the program (digest)"}


def digest_of(program: str) -> str | None:
    """The digest of a program's file; `None` if it is no file."""
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


def processor() -> str | None:
    """The name of this machine's processor."""
    return _named_in(Path("/proc/cpuinfo"), "model name")


def _named_in(file: Path, name: str) -> str | None:
    """The value after `name` in one of the kernel's files."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(values, None)


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def gpus_of_driver(root: Path = Path("/")) -> list[str]:
    """The names of the NVIDIA GPUs, read from the driver's files, without a framework.

    They are "unknown" in a container that has the devices but not those files.
    """
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    if files:
        return [_named_in(file, "Model") or "unknown" for file in files]
    return ["unknown" for _ in (root / "dev").glob("nvidia[0-9]*")]
