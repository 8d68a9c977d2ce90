"""The three numbers that say how a global batch is cut: two of them give the third.

train_batch_size = train_micro_batch_size_per_gpu · gradient_accumulation_steps · ranks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from allranks.errors import RequestError

TRAIN, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
KEYS = (TRAIN, MICRO, ACCUMULATION)


@dataclass(frozen=True)
class Batch:
    """Samples of a step over all ranks, samples of one pass on one rank, passes of each rank."""

    train: int
    micro: int
    accumulation: int


def batch_of(data: Mapping[str, Any], path: str, ranks: int) -> Batch | None:
    """What a configuration asks for on so many ranks; `None` where all it says is "auto".

    Numbers that do not fit raise `RequestError`, as DeepSpeed refuses them.
    """
    given = {key: _count(key, data[key], path) for key in KEYS if data.get(key, "auto") != "auto"}
    if not given and any(key in data for key in (TRAIN, MICRO)):
        return None
    train, micro, passes = (given.get(key) for key in KEYS)
    if train is None and micro is None:
        raise RequestError(
            asked=f"--job {path}",
            found=f"neither {TRAIN} nor {MICRO} as a number",
            why=f"{ACCUMULATION} alone does not say how many samples a step has",
            do=f'give one of them, or {TRAIN}: "auto" alone for the batch_size of the task',
        )
    if train is None and micro is not None:
        passes = passes or 1
        train = micro * passes * ranks
    assert train is not None
    if micro is None:
        passes = passes or 1
        micro = train // ranks // passes
    passes = passes or train // micro // ranks
    if train != micro * passes * ranks:
        said = ", ".join(f"{key} = {value}" for key, value in given.items())
        raise RequestError(
            asked=f"{said} in {path}, on {ranks} ranks",
            found=f"{train} is not {micro} · {passes} · {ranks}",
            why=f"{TRAIN} = {MICRO} · {ACCUMULATION} · ranks",
            do="change --ranks or one of them, or leave one of them out: it follows from the rest",
        )
    return Batch(train, micro, passes)


def _count(key: str, value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(
            asked=f"{key} = {value!r} in {path}",
            found=repr(value),
            why=f"{key} is a count of at least 1",
            do=f'give {key} a whole number, or "auto"',
        )
    return value
