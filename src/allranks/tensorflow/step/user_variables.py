"""Variables that a layer writes in its forward pass: they follow what one replica sees.

Found by looking: what no update changes, and is another one after the first step, a layer wrote.
"""

from __future__ import annotations

from typing import Any

from allranks.tensorflow.build import names_of, value_of, values_of
from allranks.tensorflow.step.layers import shard_norms


class OwnWrites:
    """Looks at `model` around its first step; `names` are the variables that were written."""

    def __init__(self, model: Any) -> None:
        self.names: list[str] = []
        self._model, self._before = model, dict[str, Any]()
        self._is_over = False

    def before_step(self) -> None:
        """Remember them. Moving statistics that the engine updates are not among them."""
        if self._is_over:
            return
        ours = [v for n in shard_norms(self._model) for v in (n.moving_mean, n.moving_variance)]
        known = {id(v) for v in (*self._model.trainable_variables, *ours)}
        own = {name: v for name, v in names_of(self._model).items() if id(v) not in known}
        self._before = values_of(own)

    def after_step(self) -> None:
        """Compare them, once."""
        if self._is_over:
            return
        self._is_over = True
        now = names_of(self._model)
        self.names = [n for n, was in self._before.items() if (value_of(now[n]) != was).any()]
        self._before.clear()
