"""The cards of the strategies that the TensorFlow engine alone has. Plain data, no framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allranks.strategies.card import Card, Exact, Option, Reference, Workload, replicas_of
from allranks.strategies.cards.data_parallel import RING, no_bytes, ring_bytes
from allranks.strategies.roles import EVALUATOR, Role

PAPER = "Abadi et al. 2016, TensorFlow, arXiv 1605.08695"
REPLICAS = "how many: on GPU 0, 1, …, or on logical devices of the CPU"


def _pull_and_push(work: Workload, options: Mapping[str, Any]) -> int:
    """A worker pulls every weight and pushes every gradient, once for each step."""
    return 2 * sum(work.messages)


def _served(ranks: int, options: Mapping[str, Any]) -> tuple[Role, ...]:
    """The ranks are the workers: one that dies is done without, as long as another one is left."""
    roles = (
        Role("chief", 1),
        Role("worker", ranks, least=1, serves=True),
        Role("server", options["servers"], serves=True),
    )
    return (*roles, Role(EVALUATOR, 1, least=0)) if options["evaluator"] == "yes" else roles


TENSORFLOW_CARDS = (
    Card(
        name="mirrored",
        summary="One process, a replica of the model per device: tf.distribute.MirroredStrategy.",
        take_when="one TensorFlow process has several devices.",
        guarantee=Exact(),
        bytes_sent=no_bytes,
        bytes_formula=f"0 (between the devices: {RING}, N replicas)",
        memory="weights + gradients + optimizer on every device",
        many_ranks=False,
        devices_of_a_rank=replicas_of,
        options=(Option("replicas", 2, REPLICAS, at_least=1),),
        paper=PAPER,
    ),
    Card(
        name="multi-worker-mirrored",
        summary="A replica on every rank, summed by collectives: MultiWorkerMirroredStrategy.",
        take_when="the model fits on every rank: the default on several.",
        guarantee=Exact(),
        bytes_sent=ring_bytes,
        bytes_formula=RING,
        memory="weights + gradients + optimizer on every rank",
        many_ranks=True,
        options=(
            Option(
                "collective", "auto", "who sums: auto is nccl on GPUs", ("auto", "ring", "nccl")
            ),
        ),
        paper=PAPER,
    ),
    Card(
        name="central-storage",
        summary="One process, the weights in host memory, a replica of the work on every device.",
        take_when="devices have little memory for variables.",
        guarantee=Exact(),
        bytes_sent=no_bytes,
        bytes_formula="0 (between host and devices: N · (weights + gradients))",
        memory="weights + optimizer once, in host memory; gradients on every device",
        many_ranks=False,
        devices_of_a_rank=replicas_of,
        options=(Option("replicas", 2, REPLICAS, at_least=1),),
        paper=PAPER,
    ),
    Card(
        name="parameter-server",
        summary="Weights on servers; workers pull and push on their own: ParameterServerStrategy.",
        take_when="workers differ in speed, or come and go.",
        guarantee=Reference(
            "a loop that takes the gradient of each batch at weights that lack up to "
            "(N - 1) + (in_flight · N - 1) of the updates before it, and applies them one by one; "
            "`single` when N = 1"
        ),
        bytes_sent=_pull_and_push,
        bytes_formula="2 · weights, from and to each worker",
        roles=_served,
        parts_of_a_batch=lambda ranks, options: 1,
        memory="weights + optimizer once, over the servers; weights + gradients on every worker",
        many_ranks=True,
        options=(
            Option("servers", 1, "processes that hold the weights, beside the workers", at_least=1),
            Option(
                "partition",
                "none",
                "how large variables are cut over the servers",
                ("none", "fixed", "min-size", "max-size"),
            ),
            Option(
                "part_kb",
                256.0,
                "KiB of a part: at least under min-size, at most under max-size",
                above=0,
            ),
            Option(
                "in_flight",
                2,
                "batches for each worker that are handed out and not done",
                at_least=1,
            ),
            Option("evaluator", "no", "a process that evaluates each checkpoint", ("no", "yes")),
        ),
        paper="Li et al. 2014, Scaling Distributed Machine Learning with "
        "the Parameter Server, OSDI",
    ),
    Card(
        name="tpu",
        summary="A replica on every core of a TPU: tf.distribute.TPUStrategy. Needs a TPU.",
        take_when="you have a TPU to try it on: until then it is refused.",
        guarantee=Reference("nothing: it is refused, as no TPU was at hand to try it"),
        bytes_sent=no_bytes,
        bytes_formula="0 over the network of the hosts",
        memory="weights + gradients + optimizer on every core",
        many_ranks=False,
        paper=PAPER,
    ),
)
