"""Input made ahead of the step, by threads: each stage works on another part of the next batches.

    keys --> read (threads) --> decode (threads) --> collate (a thread) --> whoever asks

The order is that of the keys, and what is done with a key depends on nothing but the key, so the
batches are the same as without threads. How much is made ahead is bounded by whoever asks: a batch
is begun when another one is taken. A steady step then takes about as long as the slowest stage.

Threads suit work that waits, or that lets Python go on (decoders of images, NumPy, torch). They
may not touch the generators of the process: those belong to the thread that trains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

PARTS = 8  # of a batch for each thread: what goes from stage to stage at once

T = TypeVar("T")
Key = TypeVar("Key")


def staged(
    batches: Iterable[Sequence[Key]],
    read: Callable[[Key], Any],
    decode: Callable[[Key, Any], Any],
    collate: Callable[[list[Any]], T],
    threads: int,
    ahead: int,
) -> Generator[T]:
    """For each of `batches`, a sequence of keys, its samples collated; in order, each once.

    `threads` read and as many decode; `ahead` batches are under way or ready, beside the one that
    was handed out. What a stage raises is raised here, when its batch is asked for.
    """
    batches = iter(batches)
    with _threads(read=threads, decode=threads, collate=1) as pools:

        def begin(keys: Sequence[Key]) -> Future[T]:
            size = max(1, len(keys) // (threads * PARTS))
            parts = [keys[start : start + size] for start in range(0, len(keys), size)]
            raw = [pools["read"].submit(_read, read, part) for part in parts]
            samples = [
                pools["decode"].submit(_decoded, decode, part, samples_of_part)
                for part, samples_of_part in zip(parts, raw, strict=True)
            ]
            return pools["collate"].submit(_collated, collate, samples)

        under_way = deque(begin(keys) for keys in islice(batches, ahead))
        while under_way:
            batch = under_way.popleft().result()
            under_way.extend(begin(keys) for keys in islice(batches, 1))
            yield batch


def _read(read: Callable[[Key], Any], part: Sequence[Key]) -> list[Any]:
    return [read(key) for key in part]


def _decoded(
    decode: Callable[[Key, Any], Any], part: Sequence[Key], raw: Future[list[Any]]
) -> list[Any]:
    return [decode(key, item) for key, item in zip(part, raw.result(), strict=True)]


def _collated(collate: Callable[[list[Any]], T], parts: list[Future[list[Any]]]) -> T:
    return collate([sample for part in parts for sample in part.result()])


def one_ahead(items: Iterator[T]) -> Generator[T]:
    """The same items; a thread makes the next one while its taker works with this one."""
    with _threads(copy=1) as pools:
        upcoming = pools["copy"].submit(_next, items)
        while item := upcoming.result():
            upcoming = pools["copy"].submit(_next, items)
            yield item[0]


def _next(items: Iterator[T]) -> tuple[T] | tuple[()]:
    """The next item, or nothing at their end: a future cannot raise `StopIteration`."""
    for item in items:
        return (item,)
    return ()


@contextmanager
def _threads(**sizes: int) -> Iterator[dict[str, ThreadPoolExecutor]]:
    """Threads by stage; at the end, work that has not begun is dropped and waiters wake."""
    pools = {stage: ThreadPoolExecutor(n, f"allranks-{stage}") for stage, n in sizes.items()}
    try:
        yield pools
    finally:
        for pool in pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in pools.values():
            pool.shutdown()
