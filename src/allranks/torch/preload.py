"""Imported by the fork server only: makes torch load now what every rank would load later.

The first optimizer of a process imports torch's compiler front end, two seconds of work. Made here
once, before the fork, it costs each rank nothing. No parallel region runs, so a fork stays safe.
"""

from __future__ import annotations

import os
from contextlib import suppress

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.optim import SGD

from allranks.catalog import REDUCERS, STRATEGIES, TORCH, load
from allranks.torch.shared_memory.backend import register

SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
for path in (*STRATEGIES[TORCH].values(), *REDUCERS.values()):
    load(path)
register()  # looks through all modules for functions of torch that it replaces
with suppress(OSError):  # that import makes a cache; who compiles makes it again
    os.rmdir(default_cache_dir())
