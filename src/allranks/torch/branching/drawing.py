"""What user code draws in a branch is apart from what it draws elsewhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

import allranks.torch.accelerator as accelerator
from allranks.torch.model.layers import Scope


@contextmanager
def generators_kept(scope: Scope) -> Iterator[None]:
    """Within, anything may be drawn; afterwards all generators are where they were.

    The rest of the model draws the same on every rank then, whichever branches ran there.
    """
    devices = list(filter(accelerator.is_accelerator, {scope.device, *scope.more_devices}))
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_devices = [accelerator.rng_state(device) for device in devices]
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        for device, state in zip(devices, on_devices, strict=True):
            accelerator.set_rng_state(state, device)
