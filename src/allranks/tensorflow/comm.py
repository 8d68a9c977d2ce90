"""Communication of the ranks of a TensorFlow job outside its steps: sums of numbers, texts.

It uses the collectives of tf.distribute, so all ranks call it in the same order, from the thread
that trains. With `size` 1 nothing is ever sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from allranks.errors import AllranksError, PeerLost

Numbers = NDArray[np.float64]
LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)


def peer_lost(error: Exception) -> Exception:
    """`PeerLost` for an error of a broken collective; other errors unchanged."""
    if isinstance(error, LOST):
        return PeerLost(f"another process went away: {error.message}")
    return error


def meant_by(error: BaseException) -> BaseException:
    """The cause of an error: one of ours that was raised while a graph was traced, or a lost peer.

    AutoGraph replaces the error that a task, or the engine, has raised by its own.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, AllranksError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return peer_lost(error) if isinstance(error, Exception) else error


@contextmanager
def translated() -> Iterator[None]:
    """Translate errors of TensorFlow into errors of ours."""
    try:
        yield
    except Exception as error:
        meant = meant_by(error)
        if meant is error:
            raise
        raise meant from (error if isinstance(meant, PeerLost) else None)


@dataclass
class ReplicaComm:
    """The ranks that work together, seen from one of them, over `distribution`."""

    rank: int = 0
    size: int = 1
    distribution: Any = None
    _sum: Callable[[Any], Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._sum = tf.function(self._summed, reduce_retracing=True, autograph=False)

    def sum(self, numbers: Numbers) -> Numbers:
        """The sum over all ranks of an array of any shape, the same on all."""
        if self.size == 1:
            return numbers
        with translated():
            flat = self._sum(tf.constant(numbers.reshape(-1), tf.float64))
        whole: Numbers = flat.numpy().reshape(numbers.shape)
        return whole

    def _summed(self, flat: Any) -> Any:
        def sum_replica() -> Any:
            context = tf.distribute.get_replica_context()
            local = tf.identity(flat)  # on the device of the replica
            return context.all_reduce(tf.distribute.ReduceOp.SUM, local)

        sums = self.distribution.run(sum_replica)
        return self.distribution.experimental_local_results(sums)[0]

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order, on every rank."""
        if self.size == 1:
            return [text]
        data = np.frombuffer(text.encode(), np.uint8)
        sizes = np.zeros(self.size)
        sizes[self.rank] = len(data)
        sizes = self.sum(sizes)
        table = np.zeros((self.size, max(1, int(sizes.max()))))
        table[self.rank, : len(data)] = data
        rows = self.sum(table).astype(np.uint8)
        return [bytes(row[: int(n)]).decode() for row, n in zip(rows, sizes, strict=True)]

    def barrier(self) -> None:
        """Return when every rank has called this."""
        self.sum(np.zeros(1))
