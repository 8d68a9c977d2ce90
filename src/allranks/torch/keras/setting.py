"""What Keras keeps for a whole process, put in force for one call and then taken back.

On torch Keras makes tensors on a device of its own choice, a GPU if there is one, and rounds what
it computes to 32 bits, whatever goes in. A job says both itself. Nothing here imports Keras: the
user's program did.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from allranks.errors import RequestError

TYPES = "keras.src.backend.common.dtypes"
ROUNDED = "BIT64_TO_BIT32_DTYPE"


@dataclass(frozen=True)
class KerasSetting:
    """The `device` on which Keras makes tensors, and the type of its numbers."""

    device: str = "cpu"
    floatx: str = "float32"

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Within, Keras does as this says; a policy of mixed precision stays in force."""
        keras: Any = sys.modules["keras"]
        with keras.device(self.device):
            if keras.config.floatx() == self.floatx == "float32":
                yield
                return
            with _of_type(keras, self.floatx):
                yield


@contextmanager
def of_keras_type(floatx: str) -> Iterator[None]:
    """Within, a task of torch makes its Keras layers of this type, if its program has Keras."""
    keras: Any = sys.modules.get("keras")
    backend = getattr(getattr(keras, "backend", None), "backend", None)
    if floatx == "float32" or backend is None or backend() != "torch":
        yield
        return
    with _of_type(keras, floatx):
        yield


@contextmanager
def _of_type(keras: Any, floatx: str) -> Iterator[None]:
    before, policy = keras.config.floatx(), keras.config.dtype_policy()
    rounded: dict[str, str] = getattr(sys.modules.get(TYPES), ROUNDED, {})
    kept = dict(rounded)
    keras.config.set_floatx(floatx)
    if policy.name == before:
        keras.config.set_dtype_policy(floatx)
    try:
        rounded["float64"] = floatx
        if floatx == "float64" != keras.backend.result_type("float64", "float32"):
            raise _rounds(keras)
        yield
    finally:
        rounded.clear()
        rounded.update(kept)
        keras.config.set_floatx(before)
        keras.config.set_dtype_policy(policy)


def _rounds(keras: Any) -> RequestError:
    return RequestError(
        asked="--precision fp64 for a Keras task on the torch engine",
        found=f"Keras {keras.__version__}, which rounds what it computes to 32 bits",
        why="on torch it does as on JAX, and this version has no table that says otherwise",
        do="--engine tensorflow, or --precision fp32",
    )


def check_types(model: Any, floatx: str) -> None:
    """Raise `RequestError` for weights of 32 bits in a job of 64: they would be both by turns."""
    if floatx != "float64":
        return
    for variable in getattr(model, "weights", ()):
        if variable.dtype.startswith("float") and variable.dtype != floatx:
            raise RequestError(
                asked="--precision fp64",
                found=f"the weight {variable.path}, which the model makes as {variable.dtype}",
                why="Keras would compute with it in that type",
                do="leave dtype out of the layers, set no policy of mixed precision, and make "
                "them in model(), with keras imported at the top of the file",
            )
