"""The machine of a training: its devices, and the facts that decide the bits of results."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import allranks.torch.accelerator as accelerator
from allranks import __version__
from allranks.errors import RequestError, nearest
from allranks.job.job import Job
from allranks.job.program import program_facts
from allranks.launcher.world import World
from allranks.strategies.roles import TRAINER
from allranks.torch.checkpoint.state import local

OF_THE_HOST = ("torch", "cpu_capability", "threads", "deterministic")
DECIDES_BITS = (*OF_THE_HOST, *accelerator.DECIDES_BITS)
SHARE = "--share-device (several ranks on one: for checks, not for speed)"
TRIED = ("2.11", "2.13", "2.14", "2.15")  # releases of torch that ran the core tests


def device_of(job: Job, world: World) -> torch.device:
    """The device of this rank, made the current one.

    Where another launcher lets each process see one device alone (srun --gpus-per-task=1) that is
    device 0 of all of them; `check_own_device` compares which it is. Who is no rank (a server of
    weights, say) computes on the host.
    """
    index, ranks = world.local_rank, world.local_size
    if world.role != TRAINER:
        index, ranks = world.local_index, world.local_ranks
    if job.device == "cpu" or index < 0:
        return torch.device("cpu")
    sees_one = world.role == TRAINER and ranks > 1 and accelerator.count(job.device) == 1
    check_devices(job, 1 if sees_one else ranks)
    if job.share_device:
        index %= accelerator.count(job.device)
    device = torch.device(job.device, 0 if sees_one else index)
    accelerator.use(device)
    return device


def check_own_device(device: torch.device, world: World, store: Any) -> None:
    """Raise `RequestError` on all ranks where two have one device; every rank calls this.

    Some round trips to the store, where the ranks have accelerators.
    """
    uuid = accelerator.uuid(device) if accelerator.is_accelerator(device) else ""
    if not uuid or world.size == 1:
        return
    first = store.compare_set(f"device/{uuid}", "", str(world.rank)).decode()
    if first != str(world.rank):
        store.set("device/shared", f"ranks {first} and {world.rank} on one and the same device")
    if store.add("device/came", 1) == world.size:
        is_shared = store.check(["device/shared"])
        store.set("device/verdict", store.get("device/shared") if is_shared else "none")
    found = store.get("device/verdict").decode()
    if found != "none":
        raise RequestError(
            asked=f"--device {device.type} on {world.size} ranks",
            found=found,
            why="every rank needs a device of its own",
            do="let each process see another one (srun --gpus-per-task=1), or all of them all, or "
            f"{SHARE}",
        )


def check_devices(job: Job, local_size: int) -> None:
    """Raise `RequestError` unless this node has a device for each of its ranks, or replicas."""
    if job.device == "cpu":
        return
    if job.device not in (known := accelerator.kinds()):
        raise RequestError(
            asked=f"--device {job.device}",
            found="no accelerator of that name in this torch",
            why=f"torch {torch.__version__} has {', '.join(known)}",
            do=nearest(job.device, ("cpu", *known)),
        )
    found, replicas = accelerator.count(job.device), job.strategy_spec.devices_of_a_rank
    if found < (1 if job.share_device else local_size * replicas):
        option = f"--ranks {local_size}" if replicas == 1 else f"--strategy {job.strategy}"
        unit = job.strategy_spec.card.on_a_device
        fits = (
            f"--ranks {found}"
            if replicas == 1
            else f"--strategy {job.strategy_spec.name}:{unit}s={found}"
        )
        shared = f", or {SHARE}" if replicas == 1 else ""
        raise RequestError(
            asked=f"--device {job.device} {option}",
            found=f"{found} {job.device.upper()} devices"
            + ("" if accelerator.is_built_in() else " (a CPU build of torch)")
            + (f" among --devices {job.devices}" if job.devices else ""),
            why=f"every {'rank' if replicas == 1 else unit} needs a device of its own",
            do=f"--device {job.device} {fits}{shared}" if found else "--device cpu",
        )


def notes_on_sharing(job: Job) -> list[str]:
    """What to say where several ranks may have one device."""
    if not job.share_device or job.ranks == 1:
        return []
    return [f"ranks share devices of {job.device}: for checks, not for speed"]


def notes_on_torch() -> list[str]:
    """What to say where no release like this torch has run the tests."""
    version = str(torch.__version__)
    if ".".join(version.split(".")[:2]) in TRIED:
        return []
    return [
        f"torch {version} was not tried with this allranks: {', '.join(TRIED)} were; "
        "`allranks check` shows whether its results are equal"
    ]


@torch.no_grad()
def flip_one_bit(tensor: Tensor, *, largest: bool = False) -> None:
    """A fault on purpose: flip one bit of the mantissa of the first value, as a failing chip would.

    With `largest` of the value that is the largest: the fault is then seen in what follows from it.
    The value is changed where it lies, on any device.
    """
    if (tensor := local(tensor)).numel() == 0:  # this rank has no part of it
        return
    at: tuple[Any, ...] = (0,) * tensor.ndim
    if largest and tensor.ndim:
        at = torch.unravel_index(tensor.abs().argmax(), tensor.shape)
    value = tensor[tuple(int(place) for place in at)].view(1)
    value.view(torch.uint8)[-2].bitwise_xor_(1)


def flipped_backward(parameter: Tensor, run_backward: Callable[[], None]) -> None:
    """Run a backward pass that makes one bit of the gradient of `parameter` wrong."""

    def flipped(gradient: Tensor) -> Tensor:
        gradient = gradient.to_dense() if gradient.is_sparse else gradient.clone()
        flip_one_bit(gradient, largest=True)
        return gradient

    hook = parameter.register_hook(flipped)
    try:
        run_backward()
    finally:
        hook.remove()


def facts(job: Job) -> dict[str, Any]:
    """What decides which bits come out, beside the job; recorded with every checkpoint."""
    return {
        "allranks": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "processor": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        **accelerator.decides_bits(job.device),
        **program_facts(job.program),
    }
