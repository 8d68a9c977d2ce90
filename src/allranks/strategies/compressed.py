"""Compressed gradients: the sizes of their messages, as formulae that need no framework.

What codecs make has these sizes, and a card promises them; the bytes that are counted at the
process group are held against them in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from allranks.errors import RequestError
from allranks.strategies.card import Approximate, Guarantee, Option, Picked, Reference, Workload

LARGEST_CHUNK = 4096  # an index has 12 bits
VALUES = ("raw", "two-bit")
AFTER = Option("after", 0, "steps of the plain sum before the first compressed one", at_least=0)
CHOICES: dict[str, tuple[Option, ...]] = {
    "top-k": (
        Option("k", 64, "numbers that are kept of each chunk", at_least=1),
        Option("chunk", LARGEST_CHUNK, "numbers in a chunk, at most 4096", at_least=1),
        Option("values", "raw", "in the gradient's type, or 2 bits and a scale per chunk", VALUES),
        AFTER,
    ),
    "two-bit": (
        Option("threshold", 0.01, "what is sent of a number, or its negative", above=0),
        AFTER,
    ),
    "power-sgd": (
        Option("rank", 1, "of the two factors of a matrix", at_least=1),
        Option("min_rate", 2.0, "a matrix that shrinks less is summed as it is", at_least=0),
        AFTER,
    ),
    "demo": (
        Option("k", 32, "coefficients that are sent of each block", at_least=1),
        Option("chunk", 64, "rows and columns of a block, at most 64", at_least=1),
        Option("beta", 0.999, "what is left of a momentum after a step", at_least=0, below=1),
    ),
    "one-bit": (AFTER,),
    "n-bit": (Option("bits", "4", "of each number", ("2", "4", "8", "16")), AFTER),
}
SIGNED = ("demo",)
"""Those whose sum gives the signs by which weights move, and no more."""
PIECES = ("top-k", "two-bit")
"""Those by which a part of a gradient can be given to its owner alone, as `fsdp` does."""
COLUMNS = Reference(
    "a loop in which each rank quantises the columns of its gradients with what it left out "
    "before, and the sum of these is quantised again with what that left out"
)
GUARANTEES: dict[str, Guarantee] = {
    "top-k": Approximate(
        "k = chunk and values=raw: all is kept",
        {"reduce": f"top-k(k={LARGEST_CHUNK},chunk={LARGEST_CHUNK},values=raw)"},
    ),
    "power-sgd": Approximate(
        "rank is that of every matrix, and min_rate=0",
        {"reduce": f"power-sgd(rank={2**31},min_rate=0)"},
    ),
    "two-bit": Reference(
        "a loop in which each rank keeps what it did not send, and sends the threshold, its "
        "negative or nothing of each number; the sums of these are the gradient"
    ),
    "demo": Reference(
        "a loop in which each rank adds its gradient to a momentum of its own, and takes out of it "
        "the k largest cosine coefficients of each block; weights move by the signs of their sum"
    ),
    "one-bit": COLUMNS,
    "n-bit": COLUMNS,
}
FORMULAS = (
    "top-k: (N-1) · (k per chunk · (itemsize or 1/4, and 1.5) + tally); "
    "two-bit: (N-1) · (1/4 per gradient + tally); "
    "demo: (N-1) · (k per block · (itemsize + 1.5) + tally); "
    "power-sgd: 2(N-1)/N · (rank (rows + columns) numbers per matrix + the rest + tally); "
    "one-bit, n-bit: 2(N-1)/N · (4 ⌈bits · M/32⌉ + 8 per column of M numbers + the rest + tally)"
)
SIMPLE = "top-k, two-bit, demo, power-sgd: b = 2; one-bit, n-bit: b = 2 + 1/N"


def whole_words(size: int) -> int:
    """So many bytes, rounded up to whole 8: the next message is aligned for numbers of any type."""
    return -(-size // 8) * 8


def kept_numbers(count: int, keep: int, chunk: int) -> tuple[int, int]:
    """How many of `count` numbers top-k keeps, and how many chunks they are of."""
    full, remainder = divmod(count, chunk)
    return full * keep + min(remainder, keep), full + (remainder > 0)


def top_k_bytes(count: int, itemsize: int, keep: int, chunk: int, *, two_bit: bool) -> int:
    """Values, or codes and scales, and 12 bits for each index."""
    numbers, chunks = kept_numbers(count, keep, chunk)
    values = -(-numbers // 4) + 4 * chunks if two_bit else itemsize * numbers
    return whole_words(values + -(-numbers * 3 // 2))


def two_bit_bytes(count: int) -> int:
    """Sixteen numbers in a word of 32 bits."""
    return whole_words(4 * -(-count // 16))


def four_bit_bytes(count: int) -> int:
    """Eight numbers in a word of 32 bits, and a scale for each 512 of them."""
    return whole_words(4 * -(-count // 8) + 4 * -(-count // 512))


def is_matrix(shape: tuple[int, ...]) -> bool:
    """Whether a gradient of such a shape has columns."""
    return len(shape) > 1 and 0 not in shape


def column_bytes(length: int, bits: int) -> int:
    """Whole words of 32 bits, and the range of the column."""
    return 4 * -(-length * bits // 32) + 8


def factor_rank(shape: tuple[int, ...], rank: int, min_rate: float) -> int:
    """The rank of the factors of a gradient of such a shape; 0 where it is summed as it is."""
    if not is_matrix(shape):
        return 0
    rows, columns = shape[0], prod(shape[1:])
    rank = min(rank, rows, columns)
    return rank if rows * columns > (rows + columns) * rank * min_rate else 0


def cosine_block(shape: tuple[int, ...], chunk: int) -> tuple[int, int]:
    """Rows and columns of the blocks of a gradient: the largest divisors of its own up to `chunk`.

    A matrix is the first axis by all others; a vector is one row.
    """
    if not is_matrix(shape):
        return 1, _divisor(prod(shape), chunk)
    return _divisor(shape[0], chunk), _divisor(prod(shape[1:]), chunk)


def _divisor(count: int, at_most: int) -> int:
    return next((d for d in range(min(count, at_most), 0, -1) if count % d == 0), 1)


def check_codes(reduce: Picked) -> None:
    """Raise `RequestError` for numbers or coefficients that 12 bits cannot index."""
    if reduce.name == "top-k":
        check_top_k(reduce.options)
    if reduce.name == "demo":
        check_blocks(reduce.options)


def check_blocks(options: Mapping[str, Any]) -> None:
    """Raise `RequestError` for blocks of which 12 bits cannot index a coefficient."""
    keep, chunk = options["k"], options["chunk"]
    if not 1 <= keep <= chunk**2 <= LARGEST_CHUNK:
        raise RequestError(
            asked=f"{keep} coefficients of blocks of {chunk} x {chunk}",
            found=f"k={keep}, chunk={chunk}",
            why="an index has 12 bits, so chunk is at most 64, and k at most chunk times chunk",
            do="for example k=32,chunk=64",
        )


def check_top_k(options: Mapping[str, Any]) -> None:
    """Raise `RequestError` for a chunk or a k that 12 bits cannot index."""
    keep, chunk = options["k"], options["chunk"]
    if not 1 <= keep <= chunk <= LARGEST_CHUNK:
        raise RequestError(
            asked=f"top-k of {keep} in chunks of {chunk}",
            found=f"k={keep}, chunk={chunk}",
            why=f"an index has 12 bits, so 1 <= k <= chunk <= {LARGEST_CHUNK}",
            do="for example k=64,chunk=4096",
        )


def code_bytes(reduce: Picked, count: int, itemsize: int) -> int:
    """The message of `count` numbers by one of `PIECES`."""
    if reduce.name == "two-bit":
        return two_bit_bytes(count)
    keep, chunk, values = (reduce.options[name] for name in ("k", "chunk", "values"))
    return top_k_bytes(count, itemsize, keep, chunk, two_bit=values == "two-bit")


def _counts(work: Workload) -> list[tuple[int, int]]:
    """(numbers, bytes of a number) of the gradients of each message; the tally is in the last."""
    *others, last = work.messages
    sizes = [*others, last - work.tally]
    item = round(sum(sizes) / work.gradients) if work.gradients else 1
    return [(size // item, item) for size in sizes]


def _gathered(work: Workload, sizes: list[int]) -> int:
    return (work.ranks - 1) * (sum(sizes) + whole_words(work.tally))


def coded_sent(name: str) -> Callable[[Workload, Mapping[str, Any]], int]:
    """What every rank gives to all others by one of `PIECES`."""

    def bytes_sent(work: Workload, options: Mapping[str, Any]) -> int:
        reduce = Picked(name, dict(options))
        return _gathered(work, [code_bytes(reduce, n, item) for n, item in _counts(work)])

    return bytes_sent


def demo_bytes(shape: tuple[int, ...], itemsize: int, options: Mapping[str, Any]) -> int:
    """The message of one gradient: the coefficients that are kept of its blocks."""
    block = prod(cosine_block(shape, options["chunk"]))
    keep = min(options["k"], block)
    return top_k_bytes(prod(shape), itemsize, keep, block, two_bit=False)


def demo_sent(work: Workload, options: Mapping[str, Any]) -> int:
    """What every rank gives to all others."""
    item = _counts(work)[0][1]
    return _gathered(
        work, [demo_bytes(shape, item, options) for shapes in work.shapes for shape in shapes]
    )


def power_sgd_sent(work: Workload, options: Mapping[str, Any]) -> int:
    """Two all-reduces: the left factors, then the right ones with all that is no matrix."""
    numbers = 0
    for shape in (shape for shapes in work.shapes for shape in shapes):
        rank = factor_rank(shape, options["rank"], options["min_rate"])
        numbers += rank * (shape[0] + prod(shape[1:])) if rank else prod(shape)
    item = _counts(work)[0][1]
    return round(2 * (work.ranks - 1) / work.ranks * (numbers * item + work.tally))


def columns_sent(work: Workload, options: Mapping[str, Any]) -> int:
    """All stripes but a rank's own, then its stripe to all; the rest is all-reduced."""
    shapes = [shape for message in work.shapes for shape in message]
    bits = int(options.get("bits", 1))
    stripes = sum(
        -(-shape[0] // work.ranks) * column_bytes(prod(shape[1:]), bits)
        for shape in shapes
        if is_matrix(shape)
    )
    numbers = sum(prod(shape) for shape in shapes if not is_matrix(shape))
    uncompressed = numbers * _counts(work)[0][1]
    return round(2 * (work.ranks - 1) * (stripes + (uncompressed + work.tally) / work.ranks))


WAYS = {
    **dict.fromkeys(("one-bit", "n-bit"), columns_sent),
    **{name: coded_sent(name) for name in PIECES},
    "demo": demo_sent,
    "power-sgd": power_sgd_sent,
}
