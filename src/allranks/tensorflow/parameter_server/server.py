"""What a worker or a server of a job with servers runs: TensorFlow's own server, until it is ended.

The chief sends it graphs and asks for variables; nothing of the training is decided here. Beside it
this process beats, so that one which stands still is seen, and makes the faults that were asked for
when the chief has come to their step, if the chief is on this node.

TensorFlow's server listens on all addresses of the machine, which it lets nobody change, and knows
no secret: whoever can reach the port can use it. So this strategy is for machines and networks
that only trusted people can reach.
"""

from __future__ import annotations

import os
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import tensorflow as tf

from allranks.checkpoint.array_snapshot import read_checkpoint
from allranks.checkpoint.format import Manifest
from allranks.job.config import threads_per_rank
from allranks.job.faults import Faults
from allranks.job.job import Job
from allranks.job.run_folder import JsonLines
from allranks.launcher.heartbeat import Heartbeat
from allranks.launcher.world import World
from allranks.strategies.roles import LEADER, WORKER, ProcessSet
from allranks.tensorflow.build import build, set_weights
from allranks.tensorflow.data.task_data import KerasTaskData
from allranks.tensorflow.machine import set_arithmetic, take_devices
from allranks.tensorflow.rendezvous import meet
from allranks.tensorflow.strategies.one_process import OneDevice
from allranks.training import work_queue
from allranks.training.keras_task import Task

CHIEF, SERVER = "chief", "server"
TENSORFLOW_JOB_NAMES = {CHIEF: "chief", WORKER: "worker", SERVER: "ps"}
FAIL_FAST = {"GRPC_FAIL_FAST": "use_caller"}
"""Makes a call to a process that is gone fail, instead of waiting until it is there again."""

BEAT_S = 0.02


def cluster_of(process_set: ProcessSet, addresses: list[str]) -> dict[str, list[str]]:
    """The addresses by TensorFlow's names of the roles; an evaluator is in no cluster."""
    cluster: dict[str, list[str]] = {}
    for member, address in zip(process_set.members, addresses, strict=True):
        if member.role.name in TENSORFLOW_JOB_NAMES:
            cluster.setdefault(TENSORFLOW_JOB_NAMES[member.role.name], []).append(address)
    return cluster


def serve(job: Job, world: World, events: JsonLines) -> NoReturn:
    """Be a worker or a server of `job` until the supervisor ends this process."""
    heartbeat = Heartbeat(world.heartbeat, world.number)
    os.environ.update(FAIL_FAST)
    if job.device == "cuda" and world.role == WORKER:
        take_devices(job, 1, world.role_index, job.ranks)
    else:
        tf.config.set_visible_devices([], "GPU")
    ports = meet(world)
    cluster = cluster_of(job.strategy_spec.process_set, ports.addresses)
    threads = threads_per_rank(job, world.on_machine or world.local_size)
    _ = tf.distribute.Server(
        tf.train.ClusterSpec(cluster),
        job_name=TENSORFLOW_JOB_NAMES[world.role],
        task_index=world.role_index,
        protocol="grpc",
        config=tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=threads,  # in one operation
            inter_op_parallelism_threads=max(threads, world.size),  # for calls of all processes
        ),
    )
    ports.close()
    events.event("ready", host=socket.gethostname(), role=world.role, index=world.role_index)
    _beat(heartbeat, Faults.of(job.inject, world.rank, world.restarts))


def _beat(heartbeat: Heartbeat, faults: Faults) -> NoReturn:
    """Show life, and keep up with the step of the chief."""
    reached = None
    while True:
        heartbeat.enter("compute")
        now = heartbeat.step_of(LEADER)
        if now >= 0:
            reached = now - 1 if reached is None else reached
            heartbeat.at_step(now)
        while reached is not None and reached < now:
            reached += 1
            faults.reach("step", reached)
        time.sleep(BEAT_S)


# --- evaluator -----------------------------------------------------------------------------------
# The evaluator of a job with servers: it judges each checkpoint while the training goes on.
#
# It evaluates the weights of each newest checkpoint in one process, each sample once, and writes
# the event `evaluated`. Which checkpoints those are, `training/work_queue.py` says.


def evaluate_checkpoints(task: Task, job: Job, world: World, events: JsonLines) -> None:
    """Evaluate the checkpoints of `job` until its chief is done."""
    heartbeat = Heartbeat(world.heartbeat, world.number)
    meet(world).close()  # it serves nothing, but the others wait for all
    set_arithmetic(job)
    alone = OneDevice(task, job, world)
    built = build(task, job, alone)
    data = KerasTaskData(task, job, alone, built.model)

    def evaluate(step: int, weights: Any) -> dict[str, float]:
        set_weights(built.model, weights)
        return data.evaluate(partial(heartbeat.enter, "evaluate"))

    work_queue.evaluate_checkpoints(job, world, heartbeat, events, _weights, evaluate)
    data.close()


def _weights(folder: Path, manifest: Manifest) -> Any:
    return read_checkpoint(folder, manifest).common["model"]
