"""Strategies of one process: `single`, `mirrored`, `central-storage`, and `tpu`.

`mirrored` keeps a copy of every variable on each device and adds gradients between them;
`central-storage` keeps one of each in host memory. Without GPUs the devices are logical CPUs, which
share the cores: results are the same, and no faster.
"""

from __future__ import annotations

import json
import os

import keras
import tensorflow as tf

from allranks.errors import RequestError
from allranks.tensorflow.comm import ReplicaComm, translated
from allranks.tensorflow.machine import begun, devices_for, take_devices
from allranks.tensorflow.rendezvous import meet
from allranks.tensorflow.strategies.base import BuiltKerasModel, TensorFlowStrategy

HOST = "/cpu:0"


class OneDevice(TensorFlowStrategy):
    """One device. The reference for every other strategy."""

    name = "single"

    def join(self) -> None:
        (device,) = devices_for(self.job, 1)
        is_cpu = self.job.device == "cpu"
        one_device = tf.distribute.OneDeviceStrategy
        self.distribution = tf.distribute.get_strategy() if is_cpu else one_device(device)


class Mirrored(TensorFlowStrategy):
    """A copy of every variable on each device."""

    name = "mirrored"

    def join(self) -> None:
        devices = self._devices()
        # On the CPU two of these in one process would share the keys of their collectives.
        ops = tf.distribute.ReductionToOneDevice() if self.job.device == "cpu" else None
        self.distribution = tf.distribute.MirroredStrategy(devices, cross_device_ops=ops)

    def _devices(self) -> list[str]:
        self.replicas = int(self.options["replicas"])
        self.local_replicas = range(self.replicas)
        return devices_for(self.job, self.replicas)


class CentralStorage(Mirrored):
    """One copy of every variable, in host memory."""

    name = "central-storage"

    def join(self) -> None:
        devices = self._devices()
        self.distribution = tf.distribute.experimental.CentralStorageStrategy(devices, HOST)

    def check(self, built: BuiltKerasModel) -> None:
        """Raise `RequestError` for models and optimizers that write a variable within a replica."""
        drawing = built.swapped["user_randomness"]
        writers = [f"{name}, which draws random numbers" for name in drawing]
        variables = built.model.trainable_variables
        writers += [f"a constraint on {v.path}" for v in variables if v.constraint is not None]
        layers = built.model._flatten_layers()
        writers += [x.name for x in layers if isinstance(x, keras.layers.SpectralNormalization)]
        if isinstance(built.optimizer, keras.optimizers.Nadam):
            writers.append("the optimizer Nadam")
        if writers:
            raise RequestError(
                asked=f"--strategy {self.job.strategy}",
                found=writers[0],
                why="it writes a variable in its own pass, and tf.distribute lets no replica of "
                "this strategy write one",
                do=f"--strategy mirrored:replicas={self.replicas}",
            )


class TPU(TensorFlowStrategy):
    """A replica on every core of a TPU."""

    name = "tpu"

    def join(self) -> None:
        has_tpu = bool(tf.config.list_physical_devices("TPU"))
        devices = "a TPU, which this version was never tried on" if has_tpu else "no TPU"
        raise RequestError(
            asked="--strategy tpu",
            found=devices,
            why="tf.distribute.TPUStrategy runs on the cores of a TPU and on nothing else; what "
            "nobody has run is not offered",
            do="--strategy mirrored on this machine, or multi-worker-mirrored on several",
        )


# --- multi worker --------------------------------------------------------------------------------
# `multi-worker-mirrored`: a replica on every rank, joined by the collectives of TensorFlow.
#
# Every rank runs a server, which the others reach at the address in TF_CONFIG. Sums use a ring over
# gRPC, or NCCL between GPUs. Keras 3's `fit` does not run under this strategy; this engine's loop
# does.


VARIABLE = "TF_CONFIG"
RING, NCCL = "ring", "nccl"


class MultiWorkerMirrored(TensorFlowStrategy):
    """One device on each rank, a copy of every variable on each."""

    name = "multi-worker-mirrored"

    def join(self) -> None:
        world = self.world
        self.replicas, self.local_replicas = world.size, range(world.rank, world.rank + 1)
        how = tf.distribute.experimental.CommunicationImplementation
        wanted = self.options["collective"]
        if wanted == "auto":
            wanted = NCCL if self.job.device == "cuda" else RING
        self.collective_options = tf.distribute.experimental.CommunicationOptions(
            implementation=how.NCCL if wanted == NCCL else how.RING
        )
        take_devices(self.job, 1, world.local_rank, world.local_size)
        self._ports = meet(world)
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = json.dumps(
            {
                "cluster": {"worker": self._ports.addresses},
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
        finally:  # the strategy has read it; child processes are no workers
            os.environ.pop(VARIABLE)
            if before is not None:
                os.environ[VARIABLE] = before
            self._ports.close()
        self.comm = ReplicaComm(world.rank, world.size, self.distribution)

    def leave(self) -> None:
        """Wait for the others, which may still read the last sums from this process."""
        self._ports.part()
