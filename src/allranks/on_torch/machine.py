"""The machine under a training: its devices, what decides which bits come out, and how to fix it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from allranks.errors import RequestError
from allranks.job import Job
from allranks.world import World

DECIDES_BITS = ("torch", "cpu_capability", "threads", "deterministic")


def device_of(job: Job, world: World) -> torch.device:
    """The device of this rank, made the current one."""
    if job.device == "cpu":
        return torch.device("cpu")
    check_devices(job, world.local_size)
    torch.cuda.set_device(world.local_rank)
    return torch.device("cuda", world.local_rank)


def check_devices(job: Job, local_size: int) -> None:
    """Raise `RequestError` unless this node has a device for each of its ranks."""
    if job.device != "cuda":
        return
    found = torch.cuda.device_count()
    if found < local_size:
        raise RequestError(
            asked=f"--device cuda --ranks {local_size}",
            found=f"{found} CUDA devices"
            + ("" if torch.version.cuda else " (a CPU build of torch)"),
            why="every rank needs a device of its own",
            do=f"--device cuda --ranks {found}" if found else "--device cpu",
        )


def make_reproducible(job: Job) -> Callable[[], None]:
    """Under `bitwise`: deterministic kernels, one thread. Returns what puts everything back.

    Deterministic mode also fills all memory that is handed out, to show reads of unwritten
    memory; that costs up to a tenth of a step and decides no bit, so it is left out.
    """
    if not job.bitwise:
        return lambda: None
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    torch.set_num_threads(1)

    def undo() -> None:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = filled
        torch.set_num_threads(before[1])

    return undo


def facts(job: Job) -> dict[str, Any]:
    """What decides which bits come out, beside the job; recorded with every checkpoint."""
    return {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "program_sha256": _program_sha256(job.program),
    }


def _program_sha256(program: str) -> str | None:
    """The digest of the file of the task; `None` where the program is a module or a built-in one."""
    path = Path(program if program.endswith(".py") else program.rpartition(":")[0])
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def differing(was: dict[str, Any], now: dict[str, Any], bitwise: bool) -> dict[str, list[Any]]:
    """The facts that are not as they were, name -> [was, is]; raises where bits are promised."""
    found = {name: [was[name], now.get(name)] for name in was if was[name] != now.get(name)}
    deciding = [name for name in DECIDES_BITS if name in found]
    if bitwise and deciding:
        name = deciding[0]
        raise RequestError(
            asked="to go on with --bitwise",
            found=f"{name} is {found[name][1]}; the checkpoint was made with {found[name][0]}",
            why="the bits of a step follow from it",
            do="go on where it was, or start anew without --bitwise and --resume PATH",
        )
    return found
