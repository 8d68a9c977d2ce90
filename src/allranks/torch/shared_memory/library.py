"""The C library, if it was compiled at installation."""

from __future__ import annotations

from types import ModuleType

from allranks.torch.native.built import built

NOT_BUILT = "the library for it was not compiled where allranks was installed (no C compiler?)"


def library() -> ModuleType | None:
    """The module `_collectives`; `None` if it was not compiled."""
    return built("allranks.torch.shared_memory._collectives")
