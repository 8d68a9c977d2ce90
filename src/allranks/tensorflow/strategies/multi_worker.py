"""`multi-worker-mirrored`: a replica on every rank, joined by the collectives of TensorFlow.

Every rank runs a server of its own, which the others reach at the address in TF_CONFIG; sums go
round a ring over gRPC, or through NCCL between GPUs. Keras' own `fit` does not run under this
strategy with Keras 3; the loop of this engine does.
"""

from __future__ import annotations

import json
import os

import tensorflow as tf

from allranks.tensorflow.comm import Comm, translated
from allranks.tensorflow.machine import begun, take_devices
from allranks.tensorflow.rendezvous import meet
from allranks.tensorflow.strategies.base import Strategy

VARIABLE = "TF_CONFIG"
RING, NCCL = "ring", "nccl"


class MultiWorkerMirrored(Strategy):
    """One device on each rank, a copy of every variable on each."""

    name = "multi-worker-mirrored"

    def join(self) -> None:
        world = self.world
        self.replicas, self.own = world.size, range(world.rank, world.rank + 1)
        how = tf.distribute.experimental.CommunicationImplementation
        wanted = self.context.options["collective"]
        if wanted == "auto":
            wanted = NCCL if self.job.device == "cuda" else RING
        self.collective_options = tf.distribute.experimental.CommunicationOptions(
            implementation=how.NCCL if wanted == NCCL else how.RING
        )
        take_devices(self.job, 1, world.local_rank, world.local_size)
        self._held = meet(world)
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = json.dumps(
            {
                "cluster": {"worker": self._held.addresses},
                "task": {"type": "worker", "index": world.rank},
            }
        )
        try:
            with translated():
                self.distribution = tf.distribute.MultiWorkerMirroredStrategy(
                    communication_options=self.collective_options
                )
        except RuntimeError as error:
            raise begun(self.job, str(error)) from error
        finally:  # the strategy has read it; what this process starts is no worker
            os.environ.pop(VARIABLE)
            if before is not None:
                os.environ[VARIABLE] = before
            self._held.close()
        self.comm = Comm(world.rank, world.size, self.distribution)

    def leave(self) -> None:
        """Wait for the others: what they read of the last sums, they read from this process."""
        self._held.part()
