"""Imported by the fork server only, before a Keras program: Keras on torch, once for all ranks.

Keras reads its backend when it is imported. It would also look for a GPU then, and a process that
has looked cannot be forked into ranks that use one; on which device it computes each rank says.
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"
os.environ["KERAS_TORCH_DEVICE"] = "cpu"

from allranks.catalog import load

keras = load("keras")
_ = (keras.optimizers, keras.layers, keras.losses)  # loaded when they are first named
