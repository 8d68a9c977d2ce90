"""What codecs take of a gradient: the loops in C beside those in torch, and beside a plain copy.

    python benchmarks/packing.py
    python benchmarks/packing.py --millions 25 --rounds 9

One thread, numbers in float32. `encode` is from numbers to a message, `add` from a message back
into numbers that are there. All ways of a codec are timed in each round, in turn. A copy of as
many numbers (read once, written once) is what memory gives at most; encoding reads them at least
once, and adding reads and writes them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from harness import RECORDS, Comparison, finish_record, order_of, ratio, say, start_record
from torch import Tensor

from allranks.torch.compression import kernels
from allranks.torch.compression.columns import ColumnQuantizer
from allranks.torch.compression.four_bit import FourBit
from allranks.torch.compression.top_k import TopK
from allranks.torch.compression.two_bit import TwoBit

COLUMN = 4096
COPY, C, TORCH = "copy", "C", "torch"
MEMORY_BAR = 4.0  # of a copy: numbers are read twice and written once, and some are looked at
Calls = dict[str, Callable[[], object]]


def main() -> None:
    """One record with the seconds of each call and the ratio of each pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    record = start_record("packing", vars(given))
    assert kernels.LIBRARY is not None, "the library was not compiled"
    library = kernels.LIBRARY
    numbers = torch.randn(given.millions * (1 << 20), generator=torch.Generator().manual_seed(0))
    calls = calls_of(numbers.view(-1, COLUMN))
    samples: dict[str, dict[str, list[float]]] = {}
    for what, call in calls.items():
        ways: Calls = {C: call, TORCH: call, COPY: partial(torch.clone(numbers).copy_, numbers)}
        found = samples[what] = {name: [] for name in ways}
        for turn in range(-1, given.rounds):
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
    finish_record(record, compared, RECORDS)


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
