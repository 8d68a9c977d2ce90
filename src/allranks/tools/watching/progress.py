"""Where a rank is in its training: what the recorders tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MOST_IN_A_WINDOW = 1024


@dataclass
class Progress:
    """Counts since the start, and what lies between two steps of an optimizer."""

    backwards: int = 0
    steps: int = 0
    batch: tuple[int, int, int] | None = None
    """Loader, pass and number of the last batch that was taken."""
    begun: tuple[int, int] | None = None
    """Loader and pass that was begun last: its workers are made next."""
    last_pass: tuple[int, int] | None = None
    """Loader and pass of the last pass that came to its end."""
    scaled: bool = False
    """Whether a GradScaler multiplies the loss."""
    meetings: int = 0
    """Collectives of all ranks that this one has come to."""
    is_apart: bool = False
    """Whether it came to one of some ranks alone: then counts of ranks say nothing of order."""
    large_collectives: int = 0
    """Collectives of the script's own on tensors that may be gradients or weights."""
    to_one: int = 0
    """Messages from one rank to another: stages of a pipeline, not replicas."""
    sent: set[int] = field(default_factory=set)
    """Addresses of the tensors in large collectives since the last step."""
    lines: list[tuple[tuple[str, int] | None, bool]] = field(default_factory=list)
    """Of each backward since the last step: its line, and whether its loss is a plain mean."""
    forwards: list[tuple[int, bool]] = field(default_factory=list)
    """Of each forward of a DDP since the last step: which one, and whether it reduces."""
    last_gradient: list[float] | None = None
    """Some numbers of a gradient after the last backward, while micro-batches add up."""
    probes: list[Any] = field(default_factory=list)
    """Parameters whose gradients are looked at."""

    def meet(self, *, is_all: bool) -> None:
        """A collective, of all ranks or of some."""
        self.meetings += 1
        self.is_apart |= not is_all

    def met(self) -> tuple[int, ...] | None:
        """Two ranks with the same had no meeting between them; None if that cannot be told."""
        return None if self.is_apart else (self.meetings, self.backwards, self.steps)

    def new_window(self) -> None:
        """A step was made."""
        self.lines, self.forwards, self.last_gradient = [], [], None
        self.sent.clear()
