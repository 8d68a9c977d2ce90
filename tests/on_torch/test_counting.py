"""Bytes are counted at the process group, whoever calls it: DTensor and FSDP2 on three ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_what_torch_sends_itself_is_counted(on_ranks: Callable[..., Any]) -> None:
    on_ranks(3, "counting_workers:what_torch_sends_itself", None)
