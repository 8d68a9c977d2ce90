"""What can be named: tables from a name to `module:Class`, and the one place that imports by name.

Adding a strategy is a file, a card and a line here. The command line loads its verbs through here
too, so that asking for help imports nothing but what help needs.
"""

from __future__ import annotations

import importlib
from typing import Any

VERBS = {
    "train": ("allranks.cli.train:train", "Train a task, on this machine or on several nodes."),
    "run": ("allranks.cli.run:run", "Run any script of any framework, unchanged."),
    "submit": ("allranks.cli.submit:submit", "The same as a job of Slurm."),
    "cluster": ("allranks.cli.cluster:cluster", "The sites that submit knows."),
    "check": ("allranks.cli.check:check", "Is the result the same as in one process?"),
    "doctor": ("allranks.cli.doctor:doctor", "Would a run work here, and what is in its way?"),
    "strategies": ("allranks.cli.strategies:strategies", "What each strategy promises."),
    "runs": ("allranks.cli.runs:runs", "The run folders there are."),
    "show": ("allranks.cli.runs:show", "One run: its result, or its first fault."),
    "checkpoints": ("allranks.cli.checkpoints:checkpoints", "The checkpoints of a run."),
}

FUNCTIONS = {
    "check": "allranks.cli.notebook.checking:check",
    "launch": "allranks.cli.notebook.launch:launch",
}
"""What `allranks.NAME` is, loaded when it is first asked for."""

ENGINES = {"torch": "allranks.torch.worker", "tensorflow": "allranks.tensorflow.worker"}

TASKS = {"torch": "allranks.torch.task", "tensorflow": "allranks.training.keras_task"}
"""Where the base class of the tasks of each engine stands."""

WARM = {"torch": "allranks.torch.preload", "tensorflow": "allranks.tensorflow.preload"}
"""What a fork server of each engine imports besides."""

WARM_FOR_KERAS = "allranks.torch.keras.preload"
KERAS_PROGRAMS = ("digits-keras", "mnist-keras")
"""Programs that either engine trains; before the torch engine imports one, Keras is told of it."""

STRATEGIES = {
    "single": "allranks.torch.strategies.single:Single",
    "dp": "allranks.torch.strategies.dp:DP",
    "ddp-plain": "allranks.torch.strategies.ddp_plain:DDPPlain",
    "ddp": "allranks.torch.strategies.ddp:DDP",
    "independent": "allranks.torch.strategies.independent:Independent",
}

TENSORFLOW_STRATEGIES = {
    "single": "allranks.tensorflow.strategies.one_process:Single",
    "mirrored": "allranks.tensorflow.strategies.one_process:Mirrored",
    "central-storage": "allranks.tensorflow.strategies.one_process:CentralStorage",
    "multi-worker-mirrored": "allranks.tensorflow.strategies.multi_worker:MultiWorkerMirrored",
    "parameter-server": "allranks.tensorflow.strategies.parameter_server:ParameterServer",
    "tpu": "allranks.tensorflow.strategies.one_process:TPU",
}

REDUCERS = {
    "mean": "allranks.torch.reducers.mean:Mean",
    "tree": "allranks.torch.reducers.tree:Tree",
    "fp16": "allranks.torch.reducers.half:FP16",
    "bf16": "allranks.torch.reducers.half:BF16",
}

PLACES = {
    "local": "allranks.launcher.places.local:ThisMachine",
    "hosts": "allranks.launcher.places.ssh:SshHosts",
    "simulated": "allranks.launcher.places.simulated:Simulated",
    "slurm": "allranks.launcher.places.slurm:SlurmJob",
}
BY_HAND = "allranks.launcher.places.manual:ManualNodes"
"""Nodes that a user starts one by one: --rendezvous asks for them, and no name of --place."""

PLACE_CHECK = "allranks.launcher.places.base:check_job"

PLANNER = "allranks.torch.checkpoint.dcp"
DISTRIBUTE = "torch.distributed.tensor:distribute_tensor"
"""What only jobs pay for whose ranks hold parts of tensors: importing it takes a second."""

PROGRAMS = {
    "cifar10": "allranks.programs.cifar10:Cifar10",
    "digits": "allranks.programs.digits:Digits",
    "digits-keras": "allranks.programs.digits_keras:DigitsKeras",
    "fashion": "allranks.programs.mnist:Fashion",
    "imagenet": "allranks.programs.imagenet:ImageNet",
    "mnist": "allranks.programs.mnist:Mnist",
    "mnist-keras": "allranks.programs.mnist_keras:MnistKeras",
    "synthetic": "allranks.programs.synthetic:Synthetic",
    "text": "allranks.programs.text:Text",
}


def load(path: str) -> Any:
    """The object that `module:name` names. The name is ours: a failure to import is a bug."""
    module, _, name = path.partition(":")
    imported = importlib.import_module(module)
    return getattr(imported, name) if name else imported


def preload_for(program: str, engine: str = "torch") -> tuple[str, ...]:
    """Modules that the fork server may import before it forks: ours, never a user's file."""
    modules: tuple[str, ...] = (WARM[engine], ENGINES[engine])
    if program in KERAS_PROGRAMS and engine == "torch":
        modules = (*modules, WARM_FOR_KERAS)
    return (*modules, PROGRAMS[program].partition(":")[0]) if program in PROGRAMS else modules
