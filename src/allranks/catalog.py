"""Tables from names to `module:Class`, and the only function that imports by name.

A new strategy needs a file, a card and a line here; a new engine needs a row of `ENGINES`. The
command line also loads its verbs from here, so that `--help` imports little.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VERBS = {
    "new": ("allranks.cli.templates.new:new", "Write a task to start from."),
    "train": ("allranks.cli.train:train", "Train a task, on this machine or on several nodes."),
    "sweep": ("allranks.cli.sweep:sweep", "Train once for each combination of values."),
    "run": ("allranks.cli.run:run", "Run any script of any framework, unchanged."),
    "submit": ("allranks.cli.submit:submit", "The same as a job of Slurm."),
    "cluster": ("allranks.cli.cluster:cluster", "The sites that submit knows."),
    "check": ("allranks.cli.check:check", "Is the result the same as in one process?"),
    "doctor": ("allranks.cli.doctor:doctor", "Would a run work here, and what is in its way?"),
    "strategies": ("allranks.cli.strategies:strategies", "What each strategy promises."),
    "runs": ("allranks.cli.runs:runs", "The run folders there are."),
    "show": ("allranks.cli.runs:show", "One run: its result, or its first fault."),
    "scale": ("allranks.cli.runs:scale", "More or fewer ranks for a job that runs."),
    "join": ("allranks.cli.runs:join", "One more rank for a job that runs."),
    "replay": ("allranks.cli.runs:replay", "A step of a run again, in one process."),
    "certify": ("allranks.cli.runs:certify", "A file that says how a run was made."),
    "verify": ("allranks.cli.runs:verify", "Steps of such a file again: do they hold?"),
    "bisect": ("allranks.cli.runs:bisect", "The first step at which two runs differ."),
    "bench": ("allranks.cli.bench:bench", "How fast, by strategy and number of ranks."),
    "report": ("allranks.cli.report:report", "A page to look at, of one run or several."),
    "checkpoints": ("allranks.cli.checkpoints:checkpoints", "The checkpoints of a run."),
}

FUNCTIONS = {
    "check": "allranks.cli.api:check",
    "launch": "allranks.cli.api:launch",
}
"""The function behind `allranks.NAME`, loaded on first use."""

TORCH, TENSORFLOW = "torch", "tensorflow"


@dataclass(frozen=True)
class Extra:
    """Required packages, the extra of allranks that installs them, and a module to preload."""

    name: str = ""
    packages: tuple[str, ...] = ()
    preload: str = ""


@dataclass(frozen=True)
class Engine:
    """A framework that does the arithmetic, as the other parts see it.

    `worker` is the module of its ranks, `preload` a further module for the fork server. A program
    belongs to the engine if it is one of `programs`, or imports `Task` from a module in `tasks`.
    `alone` and `many` are the default strategies for one rank and for several. `guests` are engines
    whose tasks it also trains, with their requirements. `lacks` are unsupported fields of a job,
    with the reason; `traces`: whether it records the insides of steps, which `check` compares;
    `exports` are functions that write a whole model, by their format.
    """

    name: str
    title: str
    worker: str
    preload: str
    tasks: tuple[str, ...]
    task: str
    models: str
    alone: str
    many: str
    needs: Extra = Extra()
    programs: tuple[str, ...] = ()
    guests: Mapping[str, Extra] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)
    traces: bool = False
    exports: Mapping[str, str] = field(default_factory=dict)


ENGINES = {
    TORCH: Engine(
        name=TORCH,
        title="torch",
        worker="allranks.torch.worker",
        preload="allranks.torch.preload",
        tasks=("allranks.torch", "allranks.torch.task", "allranks.huggingface"),
        task="a torch task",
        models="models of torch",
        alone="single",
        many="ddp",
        guests={TENSORFLOW: Extra("keras", ("keras",), "allranks.torch.keras.preload")},
        lacks={"steps_per_call": "it comes back to Python with every step"},
        traces=True,
        exports={"huggingface": "allranks.huggingface.export:main"},
    ),
    TENSORFLOW: Engine(
        name=TENSORFLOW,
        title="TensorFlow",
        worker="allranks.tensorflow.worker",
        preload="allranks.tensorflow.preload",
        tasks=("allranks.tensorflow", "allranks.training.keras_task"),
        task="a Keras task",
        models="Keras models",
        alone="single",
        many="multi-worker-mirrored",
        needs=Extra("tensorflow", ("tensorflow", "keras")),
        programs=("digits-keras", "mnist-keras"),
        lacks={
            **dict.fromkeys(
                ("optimizer", "schedule"), "a Keras task compiles its model with an optimizer"
            ),
            "bitwise": "tf.distribute has no fixed order of sums, so they follow the replicas",
            "compile": "its steps are graphs of TensorFlow already",
            "share_device": "TensorFlow takes all of the memory of a device for one process",
            "channels_last": "a Keras model says by itself in which order it takes images",
            "activation_checkpointing": "Keras has no way to it that "
            "works in a graph of TensorFlow",
            "profile": "its profiler is torch's",
            "share": "tf.distribute gives every replica as many samples",
            "verify_every": "replicas of tf.distribute are one variable, which it keeps equal",
            "digest_every": "only the state of torch is digested",
            **dict.fromkeys(("audit", "audit_every"), "it computes passes of torch again"),
            "witness": "it looks into the passes of torch; of TensorFlow, `check` alone tells",
        },
        traces=True,
        exports=dict.fromkeys(("keras", "saved-model"), "allranks.tensorflow.export:main"),
    ),
}
"""The first one trains every program that belongs to no other engine."""

STRATEGIES = {
    TORCH: {
        "single": "allranks.torch.parallel.data.single:Single",
        "dp": "allranks.torch.strategies.dp:DP",
        "model-parallel": "allranks.torch.strategies.model_parallel:ModelParallel",
        "ddp-plain": "allranks.torch.parallel.data.ddp_plain:DDPPlain",
        "ddp": "allranks.torch.parallel.data.ddp:ddp",
        "zero1": "allranks.torch.parallel.sharded.zero:ZeRO1",
        "zero2": "allranks.torch.parallel.sharded.zero:ZeRO2",
        "fsdp": "allranks.torch.parallel.sharded.fsdp:fsdp",
        "hsdp": "allranks.torch.parallel.sharded.fsdp:HSDP",
        "branches": "allranks.torch.branching.branches:Branches",
        **dict.fromkeys(
            ("gpipe", "1f1b", "interleaved"), "allranks.torch.parallel.pipeline.strategy:Pipeline"
        ),
        "zero-bubble": "allranks.torch.parallel.pipeline.strategy:ZeroBubble",
        "independent": "allranks.torch.local_sgd.strategies:Independent",
        "tensor": "allranks.torch.parallel.tensor.strategy:Tensors",
        "context": "allranks.torch.parallel.context.strategy:ContextParallel",
        "mesh": "allranks.torch.parallel.mesh:ThreeAxes",
        "expert": "allranks.torch.parallel.expert.strategy:Experts",
        "local-sgd": "allranks.torch.local_sgd.strategies:LocalSGD",
        "slowmo": "allranks.torch.local_sgd.strategies:SlowMomentum",
        "block-momentum": "allranks.torch.local_sgd.strategies:BlockMomentumFiltering",
        "diloco": "allranks.torch.local_sgd.strategies:DiLoCo",
        "sparse-loco": "allranks.torch.local_sgd.strategies:SparseLoCo",
        "decoupled": "allranks.torch.elastic.strategy:Decoupled",
        "ps": "allranks.torch.parameter_server.strategy:ParameterServer",
    },
    TENSORFLOW: {
        "single": "allranks.tensorflow.strategies.one_process:OneDevice",
        "mirrored": "allranks.tensorflow.strategies.one_process:Mirrored",
        "central-storage": "allranks.tensorflow.strategies.one_process:CentralStorage",
        "multi-worker-mirrored": "allranks.tensorflow.strategies.one_process:MultiWorkerMirrored",
        "parameter-server": "allranks.tensorflow.strategies.parameter_server:ParameterServerChief",
        "tpu": "allranks.tensorflow.strategies.one_process:TPU",
    },
}

REDUCERS = {
    "mean": "allranks.torch.parallel.data.reducer:Mean",
    "tree": "allranks.torch.parallel.data.tree:Tree",
    "fp16": "allranks.torch.parallel.data.half:fp16",
    "bf16": "allranks.torch.parallel.data.half:bf16",
    "ring": "allranks.torch.parallel.data.point_to_point:ring",
    "halving-doubling": "allranks.torch.parallel.data.point_to_point:halving_doubling",
    "binary-tree": "allranks.torch.parallel.data.point_to_point:binary_tree",
    "star": "allranks.torch.parallel.data.point_to_point:star",
    "hierarchical": "allranks.torch.parallel.data.point_to_point:hierarchical",
    "top-k": "allranks.torch.parallel.data.compressed.gathered:top_k",
    "two-bit": "allranks.torch.parallel.data.compressed.gathered:two_bit",
    "demo": "allranks.torch.parallel.data.compressed.gathered:demo",
    "power-sgd": "allranks.torch.parallel.data.compressed.power_sgd:power_sgd",
    "one-bit": "allranks.torch.parallel.data.compressed.columns:one_bit",
    "n-bit": "allranks.torch.parallel.data.compressed.columns:n_bit",
}

PLACES = {
    "local": "allranks.launcher.places:ThisMachine",
    "hosts": "allranks.launcher.places.ssh:SshHosts",
    "simulated": "allranks.launcher.places.simulated:Simulated",
    "slurm": "allranks.launcher.places.slurm:SlurmJob",
}
BY_HAND = "allranks.launcher.places.ssh:ManualNodes"
"""Nodes that a user starts one by one: --rendezvous asks for them, and no name of --place."""

PLACE_CHECK = "allranks.launcher.places:check_job"
FIRST_CHECK = "allranks.tools.check.first:first_check"

NODES = "allranks.launcher.nodes.cluster"
"""What only jobs on several nodes load."""

PROGRAMS = {
    "cifar10": "allranks.programs.cifar10:Cifar10",
    "clicks": "allranks.programs.clicks:ClickThrough",
    "digits": "allranks.programs.digits:Digits",
    "digits-keras": "allranks.programs.keras_programs:DigitsKeras",
    "fashion": "allranks.programs.mnist:Fashion",
    "imagenet": "allranks.programs.imagenet:ImageNet",
    "mnist": "allranks.programs.mnist:Mnist",
    "mnist-keras": "allranks.programs.keras_programs:MnistKeras",
    "synthetic": "allranks.programs.synthetic:Synthetic",
    "text": "allranks.programs.text:Text",
}


def load(path: str) -> Any:
    """The object at `module:name`. Names are ours, so a failed import is a bug."""
    module, _, name = path.partition(":")
    imported = importlib.import_module(module)
    return getattr(imported, name) if name else imported
