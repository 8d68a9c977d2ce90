"""The state of a training as arrays by name: the variables of the model, and of its optimizer."""

from __future__ import annotations

from typing import Any

from allranks.errors import RequestError
from allranks.tensorflow.built import Built
from allranks.tensorflow.names import (
    names_of,
    set_values,
    set_weights,
    streams_of,
    unique_names,
    values_of,
)


class State:
    """Reads and sets the variables of what was built."""

    def __init__(self, built: Built) -> None:
        self._built = built
        rate = built.optimizer._learning_rate  # the task makes it, so it stands apart
        self._kept = unique_names(v for v in built.optimizer.variables if v is not rate)
        self._streams = streams_of(built.model)

    def arrays(self) -> dict[str, Any]:
        """What a checkpoint holds of model and optimizer; the same on every rank."""
        made, optimizer = self._built.made_rate, self._built.optimizer
        now = None if made is None else float(optimizer.learning_rate.numpy())
        return {
            "model": values_of(names_of(self._built.model)),
            "streams": values_of(self._streams),
            "optimizer": values_of(self._kept),
            "optimizer_kind": type(optimizer).__name__,
            "rate": {"made": made, "now": now},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take up what `arrays` returned; raises `RequestError` if it is another program's.

        The learning rate goes on from where it was, unless the task now makes another one.
        """
        optimizer = self._built.optimizer
        if state["optimizer_kind"] != type(optimizer).__name__:
            raise RequestError(
                asked="to resume from a checkpoint",
                found=f"{state['optimizer_kind']} in it, {type(optimizer).__name__} in the task",
                why="what one optimizer remembers means nothing to another",
                do="resume with the program as it was, or start anew in another folder",
            )
        set_weights(self._built.model, state["model"])
        set_values(self._streams, state["streams"], "the random streams of the model")
        set_values(self._kept, state["optimizer"], "the state of the optimizer")
        rate = state["rate"]
        if rate["made"] is not None and rate["made"] == self._built.made_rate:
            optimizer.learning_rate = rate["now"]
