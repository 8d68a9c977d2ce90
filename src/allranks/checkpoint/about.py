"""What the manifest of a checkpoint says beside the state, and the rule for which one is best."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from allranks.checkpoint.files import as_json
from allranks.errors import RequestError


@dataclass(frozen=True)
class About:
    """What the manifest says beside the state. The leader's is written; all of it is plain JSON."""

    job: dict[str, Any] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def frozen(self) -> dict[str, Any]:
        """A copy that later changes do not reach."""
        names = ("job", "progress", "facts", "metrics")
        copy: dict[str, Any] = json.loads(as_json({name: getattr(self, name) for name in names}))
        return copy


def check_best(best: str) -> None:
    """Raise `RequestError` unless it is "", `max:METRIC` or `min:METRIC`."""
    if best and best.partition(":")[0] not in ("max", "min"):
        raise RequestError(
            asked=f"to keep the best checkpoint by {best!r}",
            found="neither max: nor min: before the name of a metric",
            why="whether more is better is not told by a name",
            do="write max:accuracy, or min:loss",
        )
