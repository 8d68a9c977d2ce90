"""What the plugin calls: `SameOnRanks` compares worlds of ranks, `run_body` runs a test on one.

Errors are raised so that pytest shows the line of the test: a difference as `NotSame`, a rank that
failed as `ProgramError`, what cannot be as `RequestError`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from allranks.errors import AllranksError
from allranks.testing import undo
from allranks.testing.causes import Differing, cause_of
from allranks.testing.compare import (
    Limits,
    NotSame,
    RecordedWorld,
    TensorDifference,
    check,
    first_difference,
)
from allranks.testing.on_rank import TestCall
from allranks.testing.worlds import SkippedOnRank, Worlds, carried, rules_of

FLOAT64, OWN = "float64", "own"


def run_body(
    worlds: Worlds, function: Any, values: dict[str, Any], numbers: Any, options: dict[str, Any]
) -> tuple[str, str]:
    """Run the body of a test on ranks: why it failed, and why it was skipped; "" if it was not."""
    name, backend, timeout = function.__name__, options.pop("backend"), options.pop("timeout")
    try:
        check(
            f"@pytest.mark.ranks{tuple(numbers)} of {name}",
            "its body runs once for each number of ranks, in processes that are told their rank",
            ("ranks" not in values, "no argument `ranks`", f"def {name}(ranks): …"),
            (bool(options), f"{[*options]}", "known options: backend, timeout"),
            *rules_of(numbers, backend, _seconds(timeout), 1),
        )
        count = values.pop("ranks")
        worlds.run(_call(carried(function, values, wide=False), backend, timeout), count)
    except AllranksError as error:
        return str(error), ""
    except SkippedOnRank as skipped:
        return "", str(skipped)
    return "", ""


def _seconds(timeout: Any) -> Any:
    return float(timeout) if isinstance(timeout, str) else timeout  # pytest's files have texts


def _call(function: bytes, backend: str, timeout: Any, **more: Any) -> TestCall:
    path, timeout_s = list(sys.path), _seconds(timeout)
    return TestCall(function=function, path=path, backend=backend, timeout_s=timeout_s, **more)


class SameOnRanks:
    """The fixture `same_on_ranks`; `options` are the backend and the timeout of pytest's files."""

    def __init__(self, worlds: Worlds, options: dict[str, Any]) -> None:
        self._worlds, self._options = worlds, options

    def __call__(
        self,
        step: Callable[[int, int], Any],
        ranks: Sequence[int] = (1, 2),
        steps: int = 1,
        *,
        precision: str = "",
        bitwise: bool = False,
        tolerance: float | None = None,
        backend: str = "",
        timeout: float | None = None,
    ) -> None:
        """Call `step(rank, world)` on each number of ranks, `steps` times, and compare the tensors.

        The first of `ranks` is the reference. `step` returns tensors, arrays and numbers by name,
        nested if you like; it may also be a generator that yields them, once a step. A tensor is a
        copy of the whole on each rank, a DTensor, `shard(…)` or `samples(…)`.

        `precision` is "float64", where what would be 32 bits wide has 64, or "own". Tensors are
        equal to 1e-10 of their norm in 64 bits, and to the square root of a rounding in others;
        `tolerance` is another bound, `bitwise` allows no difference and keeps the precision.

        Raises `NotSame` with the first step and tensor, `ProgramError` with the traceback of the
        rank that failed first or stood still for `timeout` seconds, and `RequestError`.
        """
        __tracebackhide__ = True
        precision = precision or (OWN if bitwise else FLOAT64)
        backend = backend or self._options["backend"]
        timeout = self._options["timeout"] if timeout is None else timeout
        check(
            f"same_on_ranks({getattr(step, '__name__', step)}, …)",
            "a step function is called on each rank, and its tensors are compared step by step",
            (not callable(step), "no function", "give a function step(rank, world)"),
            (type(steps) is not int or steps < 1, f"steps={steps!r}", "steps=5"),
            (precision not in (FLOAT64, OWN), f"precision={precision!r}", '"float64" or "own"'),
            (tolerance is not None and not 0 <= tolerance < 1, f"tolerance={tolerance!r}", "1e-6"),
            *rules_of(
                ranks if isinstance(ranks, Sequence) else [ranks], backend, _seconds(timeout), 2
            ),
        )

        def run(change: str, size: int) -> RecordedWorld:
            wide = change == undo.ROUNDING or precision == FLOAT64
            more = {"steps": steps, "precision": FLOAT64 if wide else OWN, "undo": change}
            call = _call(carried(step, {}, wide=wide), backend, timeout, **more)
            return RecordedWorld(self._worlds.run(call, size))

        reference, limits = run("", ranks[0]), Limits(bitwise, tolerance)
        for size in ranks[1:]:
            candidate = run("", size)
            difference = first_difference(reference, candidate, limits)
            if difference is not None:
                differing = Differing(reference, candidate, difference, limits)
                kind, cause = cause_of(differing, partial(_if_it_runs, run))
                raise NotSame(difference, kind, cause, _text(difference, reference, size, cause))


def _if_it_runs(
    run: Callable[[str, int], RecordedWorld], change: str, size: int
) -> RecordedWorld | None:
    """A world in which something is undone; `None` if it fails so."""
    try:
        return run(change, size)
    except AllranksError:
        return None


def _text(d: TensorDifference, reference: RecordedWorld, size: int, cause: str) -> str:
    """The message of a difference."""
    place, by = "the whole", ": "
    if d.ranks:
        agree = [str(rank) for rank in range(size) if rank not in d.ranks]
        place = " and ".join(f"rank {rank}" for rank in d.ranks)
        place += f" (rank {', '.join(agree)} agrees)" if agree else ""
    if d.size < float("inf"):
        by = f", by {d.size:.3g} of its norm; {d.limit:.2g} is allowed. "
    ranks = f"{reference.size} rank{'s' if reference.size > 1 else ''}"
    return (
        f"step {d.step}, tensor {d.tensor!r}: not the same on {size} ranks as on {ranks}\n"
        f"differs: {place}{by}{d.text}\n"
        f"cause:   {cause or 'unknown: nothing that was undone makes the difference vanish'}"
    )
