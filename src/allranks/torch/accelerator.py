"""The one module that asks for the accelerator: CUDA, XPU, or whatever else torch names.

ROCm comes as "cuda", as torch has it. A backend that is no part of torch comes under the name that
it gave itself (`torch.utils.rename_privateuse1_backend`). Everything is asked of the module of a
device (`torch.get_device_module`), never of `torch.cuda`. Functions that take a device do nothing
on the host, or say so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity

from allranks.job.units import format_bytes

NO_ACCELERATORS = ("cpu", "meta")
ALWAYS_KNOWN = ("cuda", "xpu")  # a build without them counts none
WITH_KERNELS = "cuda"  # what compiles a kernel of ours, and has torch's own of BatchNorm
LARGEST = 8  # sizes of blocks that a report names
SHARES_SINCE = (2, 31)  # NCCL: several ranks on one device
SEEDS = 1 << 64  # generators take seeds of 64 bits
DECIDES_BITS = ("chip", "multiprocessors", "cuda", "cudnn", "nccl")
SHOWN = ("name", "major", "minor", "multi_processor_count", "total_memory", "gcnArchName")


def module_of(device: torch.device | str) -> Any:
    """The module of torch for this kind of device, as `torch.cuda` for cuda."""
    return torch.get_device_module(device if isinstance(device, str) else device.type)


def kinds() -> tuple[str, ...]:
    """The accelerators that `--device` may name with this torch."""
    here = torch.accelerator.current_accelerator()
    return tuple(dict.fromkeys((*ALWAYS_KNOWN, *([here.type] if here is not None else []))))


def is_built_in() -> bool:
    """Whether this build of torch can use any accelerator."""
    return torch.accelerator.current_accelerator() is not None


def is_accelerator(device: torch.device) -> bool:
    """Whether the host only starts the work of this device, and goes on."""
    return device.type not in NO_ACCELERATORS


def holds(tensor: Tensor) -> bool:
    """Whether the tensor lies on an accelerator."""
    return is_accelerator(tensor.device)


def count(kind: str) -> int:
    """How many devices of this kind the process can use."""
    return int(module_of(kind).device_count())


def compile_kernel(source: str, **defaults: Any) -> Callable[..., Tensor]:
    """A kernel for each element, of C++, for a device `WITH_KERNELS`."""
    kernel: Callable[..., Tensor] = torch.cuda.jiterator._create_jit_fn(source, **defaults)
    return kernel


def use(device: torch.device) -> None:
    """Make it the current device of this thread; every thread begins with device 0."""
    if is_accelerator(device):
        module_of(device).set_device(device)


def using(device: torch.device) -> AbstractContextManager[Any]:
    """Within, it is the current device of this thread."""
    if not is_accelerator(device):
        return nullcontext()
    guard: AbstractContextManager[Any] = module_of(device).device(device)
    return guard


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait until all work queued on these devices is done."""
    for device in devices:
        if is_accelerator(device):
            module_of(device).synchronize(device)


def new_stream(device: torch.device) -> Any:
    """A stream in addition to the default one."""
    return module_of(device).Stream(device)


def current_stream(device: torch.device) -> Any:
    """The stream in which this thread's kernels for `device` are queued."""
    return module_of(device).current_stream(device)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Within, work of this thread on the stream's device is queued in `stream`."""
    guard: AbstractContextManager[Any] = module_of(stream.device).stream(stream)
    return guard


def new_event(device: torch.device, *, timed: bool = False) -> Any:
    """An event that is not recorded yet; two timed ones measure what lies between them."""
    return module_of(device).Event(enable_timing=timed)


def recorded_event(device: torch.device) -> Any:
    """An event recorded after all work queued on the device so far; `None` on the host."""
    if not is_accelerator(device):
        return None
    event = new_event(device)
    event.record()
    return event


def pinned(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, which a device reads and writes without blocking the host."""
    return tensor.pin_memory()


def tensor_of(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Numbers of the host on a device: the host does not wait for the copy."""
    host = torch.tensor(numbers)
    return pinned(host).to(device, non_blocking=True) if is_accelerator(device) else host


def pinned_zeros(size: int, dtype: torch.dtype, *, pin: bool) -> Tensor:
    """Zeros on the host, pinned where a device copies to them; raises `RuntimeError`."""
    return torch.zeros(size, dtype=dtype, pin_memory=pin)


def seed(device: torch.device, key: int) -> None:
    """Seed the generator of this device, whichever is current."""
    if is_accelerator(device):
        with using(device):
            module_of(device).manual_seed(key % SEEDS)


def rng_state(device: torch.device) -> Tensor:
    """The state of the generator of this device, as bytes on the host."""
    state: Tensor = module_of(device).get_rng_state(device)
    return state


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Restore the state of the generator of this device."""
    module_of(device).set_rng_state(state, device)


def default_generator(device: torch.device) -> torch.Generator | None:
    """The default generator of `device`; `None` if its backend does not expose one."""
    module = module_of(device)
    generators = getattr(module, "default_generators", None)
    if not generators:
        return None
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = generators[index]
    return generator


def backend_of(device: torch.device) -> str:
    """The backend of a process group whose tensors lie there: "nccl" for cuda, "gloo" for cpu."""
    return dist.get_default_backend_for_device(device)


def nccl_shares_devices(device: torch.device) -> bool:
    """Whether the NCCL that is loaded takes several ranks on one device; RCCL never is asked."""
    is_nccl = device.type == "cuda" and torch.version.hip is None and dist.is_nccl_available()
    return is_nccl and torch.cuda.nccl.version() >= SHARES_SINCE


def chip_name(device: torch.device) -> str:
    """The name that the maker gave the chip, as "NVIDIA H200"; "" for the host."""
    return str(module_of(device).get_device_name(device)) if is_accelerator(device) else ""


def chip(device: torch.device) -> dict[str, Any]:
    """What is known of the chip; nothing for the host."""
    if not is_accelerator(device):
        return {}
    properties = module_of(device).get_device_properties(device)
    return {name: getattr(properties, name) for name in SHOWN if hasattr(properties, name)}


def uuid(device: torch.device) -> str:
    """The unique id of the chip; "" if its backend has none."""
    return str(getattr(module_of(device).get_device_properties(device), "uuid", ""))


def decides_bits(kind: str) -> dict[str, Any]:
    """The chip and the versions of its libraries, which decide bits; all `None` on the host."""
    facts: dict[str, Any] = dict.fromkeys(DECIDES_BITS)
    device = torch.device(kind)
    if not is_accelerator(device):
        return facts
    facts["chip"], known = chip_name(device), chip(device)
    facts["multiprocessors"] = known.get("multi_processor_count")
    if kind == "cuda":  # ROCm too, whose libraries answer under the same names
        facts["cuda"] = torch.version.cuda or torch.version.hip
        facts["cudnn"] = torch.backends.cudnn.version()
        if dist.is_nccl_available():
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def memory_statistics(device: torch.device) -> dict[str, Any]:
    """The statistics of this device's allocator, under its own names; empty if it has none."""
    counted = getattr(module_of(device), "memory_stats", None) if is_accelerator(device) else None
    return dict(counted(device)) if counted is not None else {}


def peak_bytes(device: torch.device) -> int | None:
    """The peak of bytes allocated on this device; `None` if its allocator does not count."""
    peak = memory_statistics(device).get("allocated_bytes.all.peak")
    return None if peak is None else int(peak)


def memory_report() -> str:
    """The memory in use on the current device, by size of blocks; "" if it is not counted."""
    kind = torch.accelerator.current_accelerator()
    counted = {} if kind is None else memory_statistics(kind)
    if kind is None or not counted:
        return ""
    snapshot = getattr(module_of(kind), "memory_snapshot", list)
    blocks = [block for segment in snapshot() for block in segment["blocks"]]
    sizes = Counter(block["size"] for block in blocks if block["state"] == "active_allocated")
    most = sorted(sizes.items(), key=lambda row: -row[0] * row[1])[:LARGEST]
    current, peak, reserved = (
        format_bytes(counted.get(name, 0))
        for name in (
            "allocated_bytes.all.current",
            "allocated_bytes.all.peak",
            "reserved_bytes.all.current",
        )
    )
    lines = [f"held on {chip_name(kind)}: {current} now, {peak} at most, {reserved} reserved"]
    lines += [f"  {count} × {format_bytes(size)}" for size, count in most]
    return "\n".join(lines)


def activities(device: torch.device) -> list[ProfilerActivity]:
    """The activities to profile in a process that trains on `device`."""
    of_kind = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
    activity = of_kind.get(device.type, ProfilerActivity.PrivateUse1)
    is_seen = is_accelerator(device) and activity in torch.profiler.supported_activities()
    return [ProfilerActivity.CPU, *([activity] if is_seen else [])]
