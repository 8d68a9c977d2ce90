"""The rows of the GPU session that are for us alone, beside those of `allranks doctor --gpus`:
NCCL's own groups, and speed beside tuned loops.

    python benchmarks/gpu_parts.py FOLDER DEVICE ROW,ROW      as `gpu_session.py` starts it

Whatever a row does to torch or to the device is over with this process.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu
import torch
import torch.distributed as dist
from gpu_session import add_row
from torch.utils.data import DataLoader, IterableDataset

from allranks.job.job import Job
from allranks.programs.gpus import GpuWorkload, Pictures, by_trainer, devices, measure, task_of
from allranks.programs.models.gpt import GPT2_124M, gpt
from allranks.tools.doctor import gpus
from allranks.tools.doctor.gpus import Machine, Promise, RowResult, is_cuda, rows_of
from allranks.torch import Trainer
from allranks.torch.comm import subgroups as flattened
from allranks.torch.comm.comm import TIMEOUT, Comm

NO_TIME = "times of a rehearsal say nothing"

# --- NCCL -----------------------------------------------------------------------------------------


def library(machine: Machine, ranks: int) -> RowResult:
    """What is loaded, and what decides whether ranks share a device over it."""
    found = {**devices(machine.device), "LD_PRELOAD": os.environ.get("LD_PRELOAD", "")}
    found["python"] = sys.version.split()[0]
    return RowResult(True, details=found)


def nccl_alone(machine: Machine, ranks: int) -> RowResult:
    """Every message and group of one rank, whose group is bound to its device."""
    if not is_cuda(machine):
        return RowResult(None, "not on this device")
    torch.cuda.set_device(0)
    device, found = torch.device("cuda", 0), dict[str, Any]()
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device, timeout=TIMEOUT
    )
    comm, x = Comm(0, 1, device, owns_group=True), torch.arange(8.0, device=device)

    def attempt(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
            torch.cuda.synchronize()
            found[name] = "ok"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:120]}"

    def broadcast(tensor: Any) -> None:  # as `Comm.broadcast`, which sends nothing to itself
        for ahead in flattened.messages_of([tensor]):
            message = flattened.packed(ahead, read=True)
            comm._begin(dist.broadcast, message, group_src=0).wait()
            flattened.unpack(message, ahead)

    odd = {
        "transposed": torch.zeros(4, 5, device=device).t(),
        "expanded": torch.zeros(1, 5, device=device).expand(4, 5),
        "int16": torch.zeros(4, dtype=torch.int16, device=device),
        "bool": torch.zeros(4, dtype=torch.bool, device=device),
        "complex": torch.zeros(4, dtype=torch.complex128, device=device),
    }
    for name, tensor in odd.items():
        attempt(f"broadcast {name}", lambda tensor=tensor: broadcast(tensor))
    acts: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm._begin(dist.all_reduce, x).wait(),
        "all_gather": lambda: comm.all_gather(torch.empty_like(x), x).wait(),
        "reduce_scatter": lambda: comm.reduce_scatter(torch.empty_like(x), x.clone()).wait(),
        "all_to_all": lambda: comm.all_to_all(torch.empty_like(x), x, [8], [8]).wait(),
        "exchange": lambda: [one.wait() for one in comm.exchange([], [], 1)],
        "counting_group": lambda: dist.all_reduce(x, group=comm.counting_group("control")),
        "duplicate": lambda: comm.duplicate().leave(),
        "barrier": comm.barrier,
    }
    for name, act in acts.items():
        attempt(name, act)
    torch.cuda._sleep(1_000_000_000)
    begun = time.perf_counter()
    comm._begin(dist.all_reduce, x).wait()
    host_s = time.perf_counter() - begun
    torch.cuda.synchronize()
    device_s, begun = time.perf_counter() - begun, time.perf_counter()
    comm.leave(failed=True)
    found |= {"host_s": host_s, "device_s": device_s, "aborted_s": time.perf_counter() - begun}
    good = all(value == "ok" for value in found.values() if isinstance(value, str))
    return RowResult(good and host_s < device_s / 2, details=found)


# --- speed ----------------------------------------------------------------------------------------


def _gpt2(dropout: float) -> GpuWorkload:
    shape = replace(GPT2_124M, dropout=dropout)
    return replace(gpu.LARGE[1], name=f"GPT-2, dropout {dropout:g}", make_model=lambda: gpt(shape))


WORKLOADS = {  # and how many of the kernels by hand a step may launch
    "gpt2": (_gpt2(0.0), 1.1),
    "gpt2-dropout": (_gpt2(0.1), 1.1),
    "resnet50": (gpu.LARGE[0], 1.15),
    "resnet50-8-shards": (replace(gpu.LARGE[0], shards=8), 2.0),
}


def _workload(name: str, machine: Machine, part: int) -> GpuWorkload:
    """A workload with `part` of its batch; on a CPU a small one."""
    if is_cuda(machine):
        return replace(WORKLOADS[name][0], batch=WORKLOADS[name][0].batch // part)
    return replace(gpu.SMALL[0 if "resnet" in name else 1], shards=WORKLOADS[name][0].shards)


def counts(name: str, machine: Machine, ranks: int) -> RowResult:
    device = torch.device(machine.device)
    steps = 10 if is_cuda(machine) else 1
    found = measure(_workload(name, machine, 4), device, False, 1, steps)
    if not is_cuda(machine):
        return RowResult(None, NO_TIME, found)
    ours, hand = found["allranks"], found["hand"]
    good = ours["waits"] == 0 and ours["launches"] <= WORKLOADS[name][1] * hand["launches"]
    return RowResult(good, details=found)


def ratio(name: str, compiled: bool, machine: Machine, ranks: int) -> RowResult:
    if compiled and not is_cuda(machine):
        return RowResult(None, "the compiler takes minutes on a CPU, and tells nothing of a GPU")
    torch.backends.cudnn.benchmark = True
    workload, device = _workload(name, machine, 1), torch.device(machine.device)
    blocks, steps = (6, 8) if is_cuda(machine) else (2, 1)
    taken = {n: f["seconds"] for n, f in measure(workload, device, compiled, blocks, steps).items()}
    pairs = zip(taken["allranks"], taken["hand"], strict=True)
    middle = statistics.median(ours / hand for ours, hand in pairs)
    rates = {
        f"{who}, {workload.unit}/s": workload.batch * workload.units / statistics.median(seconds)
        for who, seconds in taken.items()
    }
    found = {"ratio": round(middle, 4), **rates}
    if not is_cuda(machine):
        return RowResult(None, NO_TIME, found)
    return RowResult(middle <= (1.05 if compiled else gpu.BAR), details=found)


def witness(machine: Machine, ranks: int) -> RowResult:
    """The first steps, in which the witness looks, beside steady ones."""
    loop = by_trainer(_workload("gpt2", machine, 4), torch.device(machine.device), False)
    times = []
    for _ in range(24 if is_cuda(machine) else 4):
        begun = time.perf_counter()
        next(loop)
        times.append(time.perf_counter() - begun)
    loop.close()  # type: ignore[attr-defined]
    found = {"first_s": times[:4], "steady_s": statistics.median(times[-4:])}
    return RowResult(None, "told, not judged", found)


# --- one rank -------------------------------------------------------------------------------------


def precisions(bitwise: bool, machine: Machine, ranks: int) -> RowResult:
    found: dict[str, Any] = {}
    for precision in ("fp32", "bf16", "fp16", "fp64", *(["tf32"] if is_cuda(machine) else [])):
        try:
            job = Job(device=machine.device, steps=3, precision=precision, bitwise=bitwise)
            with Trainer(Pictures(), job) as trainer:
                found[precision] = [trainer.step(batch).loss for batch in trainer.batches()]
        except Exception as error:
            found[precision] = f"{type(error).__name__}: {str(error)[:200]}"
    good = all(
        isinstance(losses, list) and all(abs(loss) < 100 for loss in losses)
        for losses in found.values()
    )
    return RowResult(good, details=found)


def data(machine: Machine, ranks: int) -> RowResult:
    """A step with samples of the device, of the host, and of a loader of whole batches."""
    workload, device = _workload("resnet50", machine, 4), torch.device(machine.device)
    tensors, size = workload.sample(4 * workload.batch, None), workload.batch

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for start in range(0, len(tensors[0]), size):
                yield tuple(tensor[start : start + size] for tensor in tensors)

    kinds: dict[str, Callable[[], Any]] = {
        "device": lambda: tuple(tensor.to(device) for tensor in tensors),
        "host": lambda: tensors,
        "loader": lambda: DataLoader(Stream(), batch_size=None),
    }
    found = {}
    for name, make in kinds.items():
        task = task_of(workload, device)
        task.train_data = make  # type: ignore[method-assign]
        job = Job(device=machine.device, precision="bf16", steps=12 if is_cuda(machine) else 2)
        times = []
        with Trainer(task, job) as trainer:
            for batch in trainer.batches():
                begun = time.perf_counter()
                trainer.step(batch)
                times.append(time.perf_counter() - begun)
        found[f"{name}_ms"] = round(1e3 * statistics.median(times[len(times) // 2 :]), 2)
    good = found["host_ms"] <= 1.1 * found["device_ms"]
    return RowResult(good if is_cuda(machine) else None, "" if is_cuda(machine) else NO_TIME, found)


def norm(machine: Machine, ranks: int) -> RowResult:
    drawn, differ = torch.Generator().manual_seed(0), {}
    for n in (640, 9216, 100_000, 2_359_296):
        numbers = torch.randn(n, generator=drawn)
        for offset in (2, 32):  # 8 and 128 bytes
            flat = torch.zeros(n + offset)
            flat[offset:] = numbers
            own, view = numbers.to(machine.device), flat.to(machine.device)[offset:]
            a, b = (torch._foreach_norm([one])[0].item() for one in (own, view))
            differ[f"{n} numbers, {4 * offset} bytes on"] = a != b
    aligned = [value for name, value in differ.items() if "128" in name]
    return RowResult(not any(aligned), details=differ)


OWN: dict[str, Promise] = {
    "library": Promise("torch, its device and its NCCL are told", library, 1),
    "nccl": Promise("NCCL of one rank: every message and group; wait() returns", nccl_alone, 1),
    "norm": Promise("a norm follows no address at multiples of 128 bytes", norm, 1),
    "witness": Promise("how long the witness looks", witness, 1),
    "data": Promise("samples of the host: at most 1.1 x the time of the device's", data, 1),
    "precisions": Promise("every precision trains", partial(precisions, False), 1),
    "precisions-bitwise": Promise("the same under --bitwise", partial(precisions, True), 1),
    **{
        f"counts-{name}": Promise(
            f"{workload.name}: no wait, at most {most} x launches", partial(counts, name), 1
        )
        for name, (workload, most) in WORKLOADS.items()
    },
    **{
        f"ratio-{name}{'-compiled' * compiled}": Promise(
            f"{name}{', compiled' * compiled}: the time of a tuned loop",
            partial(ratio, name, compiled),
            1,
        )
        for compiled in (False, True)
        for name in ("gpt2", "resnet50")
    },
}


def main() -> None:
    out, device, names = sys.argv[1:]
    gpus.ROWS.update(OWN)
    with gpus.machine_of(Path(out), device) as machine:
        for row in rows_of(machine, names.split(",")):
            add_row(Path(out), device, row)


if __name__ == "__main__":
    main()
