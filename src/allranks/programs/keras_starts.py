"""Keras layers with torch's default initial weights, so that twins start alike.

Torch: convolutions and linear layers are uniform within 1 / sqrt(inputs of a unit), biases too
(He et al. 2015, arXiv 1502.01852, with the slope that gives this). Keras' own defaults differ.
Every layer has a name, so that names of weights do not depend on earlier models.
"""

from __future__ import annotations

from typing import Any

import keras


def convolution(inputs: int, outputs: int, size: int, name: str, **keywords: Any) -> Any:
    """A `Conv2D` of `inputs` channels to `outputs`."""
    starts = _starts(inputs * size * size, keywords)
    return keras.layers.Conv2D(outputs, size, name=name, **starts, **keywords)


def linear(inputs: int, outputs: int, name: str) -> Any:
    """A `Dense` layer without an activation."""
    return keras.layers.Dense(outputs, name=name, **_starts(inputs, {}))


def batch_norm(name: str) -> Any:
    """A `BatchNormalization` with torch's momentum: a tenth of each new moment."""
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=name)


def adamw(rate: float) -> Any:
    """AdamW with torch's defaults; Keras adds epsilon before bias correction, torch after."""
    return keras.optimizers.AdamW(rate, weight_decay=1e-2, epsilon=1e-8)


def _starts(fan_in: int, keywords: dict[str, Any]) -> dict[str, Any]:
    bound = fan_in**-0.5
    names = ["kernel_initializer"]
    if keywords.get("use_bias", True):
        names.append("bias_initializer")
    return {name: keras.initializers.RandomUniform(-bound, bound) for name in names}
