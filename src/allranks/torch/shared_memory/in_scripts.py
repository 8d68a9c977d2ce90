"""In a script of `allranks run --shared-memory`: torch's process group is one of shared memory.

The script is unchanged: its `init_process_group("gloo")`, or without a backend on a machine without
accelerators, creates a group of this backend. Subgroups have the same backend, unless the script
asks for Gloo by name.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import allranks.torch.accelerator as accelerator
from allranks.torch.shared_memory.backend import outcome_of, register, replace
from allranks.torch.shared_memory.posting import BACKEND

GLOO = ("gloo", "cpu:gloo")


def in_place_of_gloo(outcome: str) -> None:
    """Install it before the script begins; rank 0 writes the `BackendChoice` to `outcome`."""
    register()
    replace(c10d, "init_process_group", functools.partial(_init_process_group, outcome))


def _init_process_group(
    outcome: str, original: Callable[..., Any], backend: Any = None, *args: Any, **kwargs: Any
) -> None:
    if not _is_meant(backend, kwargs):
        original(backend, *args, **kwargs)
        return
    original(BACKEND, *args, **kwargs)
    choice = outcome_of()
    if dist.get_rank() == 0 and choice is not None:
        with open(f"{outcome}.part", "w") as file:
            json.dump(choice.to_data(), file)
        os.replace(f"{outcome}.part", outcome)


def _is_meant(backend: Any, more: dict[str, Any]) -> bool:
    if backend is None:
        has_device = any(accelerator.count(kind) for kind in accelerator.kinds())
        return not has_device and more.get("device_id") is None
    return str(backend).lower() in GLOO
