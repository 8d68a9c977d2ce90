"""What the variables of a model are called in a checkpoint, and their values as arrays and back.

A name is the path that Keras gives a variable: `sequential/dense_1/kernel`. Keras counts the layers
of a process, so the same model made a second time there has other numbers in its paths (`dense_3`).
Where names differ by such numbers alone, variables are taken in their order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from allranks.errors import RequestError

Array = NDArray[Any]
_COUNTED = re.compile(r"_[0-9]+(?=[_/@]|$)")


def names_of(model: Any) -> dict[str, Any]:
    """The weights of a Keras model, trained or not, by name; in the order of the model."""
    return unique_names(model.weights)


def streams_of(model: Any) -> dict[str, Any]:
    """The other variables of a model: the states from which its layers draw random numbers."""
    weights = {id(variable) for variable in model.weights}
    return unique_names(v for v in model.variables if id(v) not in weights)


def unique_names(variables: Iterable[Any]) -> dict[str, Any]:
    """Keras variables by path; where two have the same, the later ones get `@` and their place."""
    found: dict[str, Any] = {}
    for place, variable in enumerate(variables):
        name = str(variable.path)
        found[f"{name}@{place}" if name in found else name] = variable
    return found


def values_of(variables: Mapping[str, Any]) -> dict[str, Array]:
    """Copies of the values of variables; of one that lies on several devices, the first's."""
    return {name: value_of(variable) for name, variable in variables.items()}


def value_of(variable: Any) -> Array:
    """A copy of the value of a Keras variable, or of one of TensorFlow."""
    return copies_of(variable, 1)[0]


def copies_of(variable: Any, count: int) -> list[Array]:
    """Copies of the values of a variable on the first `count` devices of this process.

    What is there once is the same for all of them.
    """
    inner = getattr(variable, "value", variable)
    inner = inner() if callable(inner) else inner
    held = getattr(inner, "values", None)
    held = held if isinstance(held, (tuple, list)) else [inner] * count
    return [np.array(tf.convert_to_tensor(one)) for one in held[:count]]


def set_weights(model: Any, arrays: Mapping[str, Array]) -> None:
    """Give the weights of a model the values that `values_of(names_of(model))` once had."""
    set_values(names_of(model), arrays, "the weights of the model")


def set_values(variables: Mapping[str, Any], arrays: Mapping[str, Array], what: str) -> None:
    """Give every variable its array. Raises `RequestError`, before any is set, if they do not fit.

    `what` says in the error what they are.
    """
    pairs = _paired(variables, arrays, what)
    for name, variable, array in pairs:
        shape, dtype = tuple(variable.shape), tf.as_dtype(variable.dtype).name
        if (shape, dtype) != (array.shape, array.dtype.name):
            found = f"{name} is {array.dtype.name} {array.shape} there, and {dtype} {shape} here"
            raise _unlike(what, found)
    for _, variable, array in pairs:
        variable.assign(array)


def _paired(
    variables: Mapping[str, Any], arrays: Mapping[str, Array], what: str
) -> list[tuple[str, Any, Array]]:
    if variables.keys() == arrays.keys():
        return [(name, variable, arrays[name]) for name, variable in variables.items()]
    if [_uncounted(name) for name in variables] != [_uncounted(name) for name in arrays]:
        found = next(
            iter([*(arrays.keys() - variables.keys()), *(variables.keys() - arrays.keys())])
        )
        where = "not in the model" if found in arrays else "not in the checkpoint"
        raise _unlike(what, f"{found} is {where}")
    both = zip(variables.items(), arrays.values(), strict=True)
    return [(name, variable, array) for (name, variable), array in both]


def _uncounted(name: str) -> str:
    return _COUNTED.sub("", name)


def _unlike(what: str, found: str) -> RequestError:
    return RequestError(
        asked=f"to take {what} from a checkpoint",
        found=found,
        why="weights of another name, shape or type are those of another model",
        do="build the model as it was when they were saved, or start afresh",
    )
