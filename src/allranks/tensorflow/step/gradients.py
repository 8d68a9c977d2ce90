"""Arithmetic on the gradients of a replica: a list, with `None` where the loss does not reach."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def or_zeros(gradient: Any, variable: Any) -> Any:
    """The gradient of a variable, or zeros in its shape."""
    return tf.zeros(variable.shape, variable.dtype) if gradient is None else gradient


def times(gradients: list[Any], factor: Any) -> list[Any]:
    """Each gradient times one factor."""
    return [None if g is None else g * tf.cast(factor, g.dtype) for g in gradients]


def added(one: Any, other: Any) -> Any:
    """Their sum, where `None` is nothing."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def length(gradients: list[Any]) -> Any:
    """The length of all gradients together."""
    there = [g for g in gradients if g is not None]
    return tf.linalg.global_norm(there) if there else tf.zeros(())
