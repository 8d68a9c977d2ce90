"""What codecs take of a gradient: the loops in C beside those in torch, and beside a plain copy.

    python benchmarks/packing.py
    python benchmarks/packing.py --millions 25 --rounds 9
    python benchmarks/packing.py --of parameters --rounds 41

`parameters`: what `zero` takes to pack the gradients of a ResNet-50 for many ranks, and to unpack
its weights, in processor time. Tensors of torch's meta device have no memory, and its two calls
that copy are left out there, as torch makes up their shapes in Python: what remains is what the
host of a GPU does before it launches them. On the CPU the copies are in it.

Of codecs: one thread, numbers in float32. `encode` is from numbers to a message, `add` from a
message back into numbers that are there. All ways of a codec are timed in each round, in turn. A
copy of as many numbers (read once, written once) is what memory gives at most; encoding reads them
at least once, and adding reads and writes them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from harness import RECORDS, Comparison, finish_record, order_of, ratio, say, start_record
from torch import Tensor

from allranks.programs.models.vision import resnet50
from allranks.torch.compression import codecs as kernels
from allranks.torch.compression.codecs import ColumnQuantizer, FourBit, TopK, TwoBit
from allranks.torch.parallel.data.half import packed_buckets

COLUMN = 4096
COPY, C, TORCH = "copy", "C", "torch"
MEMORY_BAR = 4.0  # of a copy: numbers are read twice and written once, and some are looked at
FEW, MANY, RANKS_BAR = 8, 64, 1.2
BUCKET_BYTES = 25 * 2**20
Calls = dict[str, Callable[[], object]]


def main() -> None:
    """One record with the seconds of each call and the ratio of each pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--of", choices=("codecs", "parameters"), default="codecs")
    given = parser.parse_args()
    torch.set_num_threads(1)
    record = start_record("packing", vars(given))
    time_of = time_of_codecs if given.of == "codecs" else time_of_parameters
    compared = time_of(record, given.millions, given.rounds)
    finish_record(record, compared, RECORDS)


def time_of_parameters(record: dict[str, Any], millions: int, rounds: int) -> list[Comparison]:
    """Few and many ranks in turn; only processor time, as others may be busy on this machine."""
    few, many = f"{FEW} ranks", f"{MANY} ranks"
    samples: dict[str, dict[str, list[float]]] = {}
    compared: list[Comparison] = []
    for device, bar in (("meta", RANKS_BAR), ("cpu", None)):
        calls: Calls = {few: packing_of(device, FEW), many: packing_of(device, MANY)}
        what = f"ResNet-50 packed and unpacked on {device}"
        found = samples[what] = {name: [] for name in calls}
        for turn in range(-1, rounds):
            for name in order_of(list(calls), max(turn, 0)):
                begun = time.process_time()
                with launching_nothing() if device == "meta" else nullcontext():
                    calls[name]()
                if turn >= 0:
                    found[name].append(time.process_time() - begun)
        least = {name: min(seconds) for name, seconds in found.items()}
        say(f"{what}: " + ", ".join(f"{n} {s * 1e3:.1f} ms at least" for n, s in least.items()))
        pairs = list(zip(found[many], found[few], strict=True))
        compared.append(ratio(what, "processor seconds", many, few, pairs, bar))
    record["samples"] = samples
    return compared


@contextmanager
def launching_nothing() -> Iterator[None]:
    """Within, what copies all columns of a bucket at once copies none."""
    names = ("_chunk_cat", "split_with_sizes_copy")
    with patch.multiple(torch, **{name: lambda *_, **__: None for name in names}):
        yield


def packing_of(device: str, ranks: int) -> Callable[[], object]:
    """What rank 0 of so many does to its buckets in a step; on meta as on a GPU."""
    with torch.device(device):
        parameters = list(resnet50().parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    buckets, _ = packed_buckets(parameters[::-1], BUCKET_BYTES, ranks)

    def step() -> None:
        for bucket in buckets:
            gradients = [parameter.grad for parameter in bucket.parameters]
            at_once = device == "meta" and not bucket.is_alone
            (bucket.packed_at_once if at_once else bucket.packed)(gradients)
            room = bucket.room()
            list(bucket.parts(bucket.section_of(0), 0))
            (bucket.unpack_at_once if at_once else bucket.unpack)(room)

    return step


def time_of_codecs(record: dict[str, Any], millions: int, rounds: int) -> list[Comparison]:
    """All ways of each call of a codec in turn."""
    assert kernels.LIBRARY is not None, "the library was not compiled"
    library = kernels.LIBRARY
    numbers = torch.randn(millions * (1 << 20), generator=torch.Generator().manual_seed(0))
    calls = calls_of(numbers.view(-1, COLUMN))
    samples: dict[str, dict[str, list[float]]] = {}
    for what, call in calls.items():
        ways: Calls = {C: call, TORCH: call, COPY: partial(torch.clone(numbers).copy_, numbers)}
        found = samples[what] = {name: [] for name in ways}
        for turn in range(-1, rounds):
            for name in order_of(list(ways), max(turn, 0)):
                kernels.LIBRARY = None if name == TORCH else library
                begun = time.perf_counter()
                ways[name]()
                if turn >= 0:  # the first round is for the memory
                    found[name].append(time.perf_counter() - begun)
        best = {name: min(seconds) for name, seconds in found.items()}
        say(f"{what}: " + ", ".join(f"{n} {s * 1e3:.1f} ms" for n, s in best.items()))
    record["samples"] = samples
    compared: list[Comparison] = []
    for what, found in samples.items():
        for over, bar in ((TORCH, None), (COPY, MEMORY_BAR)):
            pairs = list(zip(found[C], found[over], strict=True))
            compared.append(ratio(what, "seconds", C, over, pairs, bar))
    return compared


def calls_of(columns: Tensor) -> Calls:
    """What is timed: there and back, of each codec."""
    flat, into, calls = columns.view(-1), torch.zeros_like(columns), Calls()
    for bits in (1, 4):
        quantizer = ColumnQuantizer(bits)
        message = quantizer.encode(columns)
        calls[f"{bits} bit, encode"] = partial(quantizer.encode, columns)
        calls[f"{bits} bit, add"] = partial(quantizer.add_decoded, message, into)
    for name, codec in {
        "two-bit": TwoBit(0.5),
        "four-bit": FourBit(),
        "top-k of 64, 2 bits": TopK(64, 4096, "two-bit"),
    }.items():
        calls[f"{name}, encode"] = partial(codec.encode, flat)
        calls[f"{name}, add"] = partial(codec.add_decoded, codec.encode(flat), into.view(-1))
    return calls


if __name__ == "__main__":
    main()
