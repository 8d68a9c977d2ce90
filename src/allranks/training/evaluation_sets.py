"""Several sets to evaluate on: `eval_data()` may return a dict from a name to the data of a set.

    {"same": (images, labels), "shifted": ShiftedDigits()}   ->   same/accuracy, shifted/accuracy

A dict of tensors or arrays is one set, whose batches are dicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allranks.errors import RequestError


def sets_of(data: Any) -> dict[str, Any]:
    """The sets by their names; one that has no name is under ""; raises `RequestError`."""
    if type(data) is not dict or all(hasattr(value, "shape") for value in data.values()):
        return {"": data}
    wrong = [name for name in data if not isinstance(name, str) or not name or "/" in name]
    arrays = [name for name, value in data.items() if hasattr(value, "shape")]
    if wrong or arrays:
        raise RequestError(
            asked="eval_data() of the task: several sets",
            found=f"the name {wrong[0]!r}" if wrong else f"{arrays[0]!r} is a tensor, others not",
            why="metrics are called NAME/METRIC, and a dict of tensors alone is one set",
            do="give each set a text without / for a name"
            if wrong
            else f"write {{{arrays[0]!r}: (tensor,), …}}",
        )
    return dict(data)


def named(name: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of the set `name` as they are reported."""
    return {f"{name}/{metric}" if name else metric: value for metric, value in metrics.items()}
