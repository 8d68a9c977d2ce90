"""The checks of the GPU session that use torch here: NCCL, one rank, and what a step costs."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import gpu
import gpu_tasks
import torch
import torch.distributed as dist
from gpu_checks import (
    HERE,
    NOT_HERE,
    Seen,
    Setting,
    check,
    names_rank_1,
    told_of_a_hang,
    train,
)
from torch.utils.data import DataLoader, IterableDataset

from allranks.job.job import Job
from allranks.torch import Trainer, accelerator
from allranks.torch.comm import Comm
from allranks.torch.groups import flattened, lent
from allranks.torch.groups.pending import TIMEOUT

# --- NCCL -----------------------------------------------------------------------------------------


@check("every type and layout is broadcast; wait() returns at once; a group within is made", 60)
def nccl_of_one_rank(setting: Setting) -> Seen:
    if setting.device != "cuda":
        return Seen(None, {"why": NOT_HERE})

    torch.cuda.set_device(0)
    device, found = torch.device("cuda", 0), {}
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device, timeout=TIMEOUT
    )
    comm, x = Comm(0, 1, device, owns_group=True), torch.arange(8.0, device=device)
    odd = {
        "transposed": torch.zeros(4, 5, device=device).t(),
        "expanded": torch.zeros(1, 5, device=device).expand(4, 5),
        "int16": torch.zeros(4, dtype=torch.int16, device=device),
        "bool": torch.zeros(4, dtype=torch.bool, device=device),
        "complex": torch.zeros(4, dtype=torch.complex128, device=device),
    }

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

    for name, tensor in odd.items():
        attempt(f"broadcast {name}", lambda tensor=tensor: broadcast(tensor))
    attempt("all_reduce", lambda: comm._begin(dist.all_reduce, x).wait())
    attempt("all_gather", lambda: comm.all_gather(torch.empty_like(x), x).wait())
    attempt("reduce_scatter", lambda: comm.reduce_scatter(torch.empty_like(x), x.clone()).wait())
    attempt("all_to_all", lambda: comm.all_to_all(torch.empty_like(x), x, [8], [8]).wait())
    group = lent.borrow((0,), TIMEOUT)
    attempt("a group within", lambda: dist.all_reduce(x, group=group))
    torch.cuda._sleep(1_000_000_000)
    begun = time.perf_counter()
    comm._begin(dist.all_reduce, x).wait()
    found["the host waited, s"] = round(time.perf_counter() - begun, 4)
    torch.cuda.synchronize()
    found["the device worked, s"] = round(time.perf_counter() - begun, 3)
    begun = time.perf_counter()
    comm.leave(failed=True)
    found["aborted in, s"] = round(time.perf_counter() - begun, 2)
    good = all(value == "ok" for value in found.values() if isinstance(value, str))
    return Seen(good and found["the host waited, s"] < found["the device worked, s"] / 2, found)


@check("with two GPUs or more: as on one, and the hang report names rank 1 over NCCL too", 120)
def several_gpus_over_nccl(setting: Setting) -> Seen:
    count = accelerator.count(setting.device) if setting.on_gpu else 0
    if count < 2:
        return Seen(None, {"why": f"{count} GPUs"})
    words = ("--bitwise", "--steps", "8")
    digests = {name: train(setting, name, *words).short() for name in ("Pictures", "Words")}
    found: dict[str, Any] = {}
    for name, wanted in digests.items():
        many = train(setting, name, *words, "--ranks", str(count))  # each on a GPU of its own
        found[name] = many.short() == wanted
    found["hang"] = told = told_of_a_hang(setting, "--ranks", str(count))
    return Seen(all(found.values()) and names_rank_1(told), found)


# --- one rank, in this process --------------------------------------------------------------------


@contextmanager
def trainer_of(setting: Setting, task: Any, **job: Any) -> Iterator[Any]:
    """A trainer in this process that never ends by itself; a CPU computes with one thread."""
    if not setting.on_gpu:
        torch.set_num_threads(1)
    with Trainer(task, Job(device=setting.device, steps=10**9, **job)) as trainer:
        yield trainer


def workloads(setting: Setting) -> Sequence[Any]:
    """Those of `gpu.py`; a step of them is looked into with smaller batches."""

    return gpu.SMALL if setting.small else [replace(w, batch=w.batch // 4) for w in gpu.LARGE]


def launches_of(step: Callable[[], object]) -> dict[str, Any]:
    """Kernels launched by a step, and how long the device works on it."""

    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    rows = profile.key_averages()
    launches = sum(row.count for row in rows if row.key.startswith(("cudaLaunch", "cuLaunch")))
    busy_ms = sum(row.self_device_time_total for row in rows) / 1e3
    return {"launches": launches, "device_ms": round(busy_ms, 2)}


@check("no wait of the host in a step; launches near those by hand (x 1.3)", 120)
def waits_and_launches_of_a_step(setting: Setting) -> Seen:
    device, found = torch.device(setting.device), {}
    good: bool | None = True if setting.on_gpu else None
    for workload in workloads(setting):
        for name, make in gpu.CONTENDERS.items():
            loop = make(workload, device, False)
            for _ in islice(loop, gpu.STEADY if setting.on_gpu else 2):
                pass
            row: dict[str, Any] = {}
            if setting.on_gpu:
                row = {"waits": gpu.waits_of(lambda loop=loop: next(loop))}
                row |= launches_of(lambda loop=loop: next(loop))
            found[f"{workload.name}, {name}"] = row
            loop.close()
        ours, hand = (found[f"{workload.name}, {name}"] for name in ("allranks", "hand"))
        if setting.on_gpu:
            is_near = ours["launches"] <= 1.3 * hand["launches"]
            good = good and is_near and ours["waits"] == 0
    return Seen(good, found)


@check("every precision trains, with and without --bitwise, to finite losses", 60)
def every_precision(setting: Setting) -> Seen:
    found = {}
    precisions = ["fp32", "bf16", "fp16", "fp64", *(["tf32"] if setting.on_gpu else [])]
    for precision in precisions:
        for bitwise in (False, True):
            name = f"{precision}{', bitwise' if bitwise else ''}"
            try:
                job = {"precision": precision, "bitwise": bitwise}
                with trainer_of(setting, gpu_tasks.Pictures(), **job) as trainer:
                    batches = trainer.batches()
                    found[name] = [round(trainer.step(next(batches)).loss, 4) for _ in range(3)]
            except Exception as error:
                found[name] = f"{type(error).__name__}: {str(error)[:200]}"
    refused = [v for v in found.values() if isinstance(v, str)]
    finite = all(abs(x) < 100 for v in found.values() if isinstance(v, list) for x in v)
    return Seen(finite and not refused, found)


@check("in fp64 without dropout 4 losses of the device are those of the CPU, within 1e-9", 60)
def as_on_the_cpu(setting: Setting) -> Seen:
    found: dict[str, Any] = {}
    for dropout in (0.0, 0.2):
        losses = {}
        for where in (setting, replace(setting, device="cpu")):
            task = gpu_tasks.Pictures(dropout=dropout)
            with trainer_of(where, task, precision="fp64") as trainer:
                batches = trainer.batches()
                losses[where.device] = [trainer.step(next(batches)).loss for _ in range(4)]
        pairs = zip(losses[setting.device], losses["cpu"], strict=True)
        found[f"dropout {dropout}"] = max(abs(a / b - 1) for a, b in pairs)
    return Seen(found["dropout 0.0"] < 1e-9 if setting.on_gpu else None, found)


@check("host tensors take at most 1.1 x the time of data on the device; a stream is reported", 60)
def data_of_the_host(setting: Setting) -> Seen:
    workload = workloads(setting)[0]
    data = gpu.data_of(workload)
    size = workload.batch

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for start in range(0, len(data[0]), size):
                yield tuple(tensor[start : start + size] for tensor in data)

    kinds = {
        "on the device": lambda: tuple(tensor.to(setting.device) for tensor in data),
        "host tensors": lambda: data,
        "a loader of whole batches": lambda: DataLoader(Stream(), batch_size=None),
    }
    found = {}
    for name, make in kinds.items():
        task = gpu.task_of(workload, torch.device(setting.device))
        task.train_data = make
        precision = "bf16" if setting.on_gpu else "fp32"
        with trainer_of(setting, task, precision=precision) as trainer:
            batches = trainer.batches()
            times = []
            for _ in range(4 if setting.small else 12):
                begun = time.perf_counter()
                trainer.step(next(batches))
                times.append(time.perf_counter() - begun)
            found[f"{name}, ms"] = round(1e3 * statistics.median(times[len(times) // 2 :]), 2)
    ratio = found["host tensors, ms"] / found["on the device, ms"]
    return Seen(ratio <= 1.1 if setting.on_gpu else None, {**found, "ratio": round(ratio, 3)})


@check("a norm does not follow where a tensor begins at multiples of 128 bytes", 30)
def norm_of_a_view(setting: Setting) -> Seen:
    drawn, differ = torch.Generator().manual_seed(0), {}
    for n in (640, 9216, 100_000, 2_359_296):
        data = torch.randn(n, generator=drawn)
        for offset in (2, 32):  # 8 and 128 bytes
            flat = torch.zeros(n + offset)
            flat[offset:] = data
            own, view = data.to(setting.device), flat.to(setting.device)[offset:]
            a, b = (torch._foreach_norm([one])[0].item() for one in (own, view))
            differ[f"{n} numbers, {4 * offset} bytes on"] = a != b
    aligned = [value for name, value in differ.items() if "128" in name]
    return Seen(not any(aligned), differ)


@check("the tests that are marked `gpu` pass", 100)
def tests_of_gpus(setting: Setting) -> Seen:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/on_torch"]
    limit = 95 if setting.on_gpu else 380
    try:
        done = subprocess.run(
            command, cwd=HERE.parent, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return Seen(False, {"said": f"ran past {limit} s"})
    if "No module named pytest" in done.stderr:
        return Seen(None, {"why": "pytest is not there"})
    last = (done.stdout.strip().splitlines() or [done.stderr[-300:]])[-1]
    said = done.stdout[-600:] + done.stderr[-300:] if done.returncode else ""
    has_told = " passed" in last or done.returncode != 0  # without a device all are skipped
    return Seen(done.returncode == 0 if has_told else None, {"last": last, "said": said})


@check("time of ours over that of a tuned loop: 1.01 uncompiled, 1.05 compiled", 200)
def beside_tuned_loops(setting: Setting) -> Seen:
    torch.backends.cudnn.benchmark = True
    device, found, good = torch.device(setting.device), {}, True
    blocks, steps = (2, 2) if setting.small else (7, 8)
    plan = [
        (workload, compiled)
        for compiled in (False, True)
        for workload in (gpu.SMALL if setting.small else gpu.LARGE)
    ]
    for workload, compiled in plan:
        if compiled and setting.small:
            continue  # the compiler takes minutes on a CPU, and tells nothing of a GPU
        name = f"{workload.name}{', compiled' if compiled else ''}"
        taken = gpu.measure(workload, device, compiled, blocks, steps)
        pairs = zip(taken["allranks"], taken["hand"], strict=True)
        ratio = statistics.median(ours / hand for ours, hand in pairs)
        rates = {
            who: round(workload.batch * workload.units / statistics.median(seconds), 1)
            for who, seconds in taken.items()
        }
        found[name] = {"ratio": round(ratio, 4), "unit": f"{workload.unit}/s", **rates}
        good = good and ratio <= (1.05 if compiled else gpu.BAR)
        with suppress(RuntimeError, AttributeError):
            torch.get_device_module(device).empty_cache()
    return Seen(good if setting.on_gpu else None, found)
