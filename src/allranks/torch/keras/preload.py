"""Imported by the fork server only, before a Keras program: Keras on torch, once for all ranks.

Keras reads its backend at import. It would also look for a GPU then, and a process that has done so
cannot be forked into ranks that use one. Each rank sets its device later.
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"
os.environ["KERAS_TORCH_DEVICE"] = "cpu"

from allranks.catalog import load

keras = load("keras")
_ = (keras.optimizers, keras.layers, keras.losses)  # loaded at their first use
