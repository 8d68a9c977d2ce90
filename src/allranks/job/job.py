"""A job: a task plus how to run it, as frozen data. Written into the run folder, read by ranks.

Nothing here acts. `config` builds a job from the command line and a file, a place plans it, the
launcher starts it, and each rank gets the same job as JSON.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from allranks.catalog import TORCH
from allranks.job.engines import default_strategy
from allranks.job.place import LOCAL, PlaceSpec, place_spec
from allranks.strategies.resolve import StrategySpec, strategy_spec

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp64")
DEVICES = ("cpu", "cuda")
LOGS = ("csv", "tensorboard")
BAD_STEPS = ("stop", "skip", "warn")
WITNESS = ("warn", "stop", "off")


@dataclass(frozen=True)
class Job:
    """Everything that decides how a task is run; the task's own fields are in `task`.

    `engine` is the framework that does the arithmetic, and `steps_per_call` how many steps it makes
    before it comes back to Python (TensorFlow).

    Where: `place` is this machine ("local"), machines that the user names ("hosts"), nodes that are
    made here ("simulated:link=1gbit"), or those of a Slurm job ("slurm"); `nodes` of them.

    Sizes: `ranks` over all nodes; `steps` optimizer steps of the job (None: until the epochs of
    the task are over); `micro_batch` samples through the model at once on one rank (None: all
    that the rank owns); `threads` intra-op threads of a rank (None: the cores shared out, 1 under
    `bitwise`); `loader_workers` processes that read data for each rank.

    What protects it: a checkpoint after every `checkpoint_every` global batches (None: only when it
    is stopped), of which the `keep` newest stay, and the one with the `best` metric
    ("max:accuracy", "min:loss"). `resume` is a run folder or checkpoint to start from. After a
    fault the ranks are started again up to `max_restarts` times; one without a sign of life for
    `hang_timeout` seconds (0: for ever) is a fault. After `time_limit` seconds the job stops as if
    asked to. `on_bad_step` says what happens with a step whose loss or gradient is not finite, or
    whose gradient is `spike` times longer than usual; every `verify_every` steps the weights of all
    ranks are compared. `witness` says what happens when the result is seen to follow the number of
    ranks. `inject` lists faults to make on purpose (`allranks.job.faults`).

    How the arithmetic is done: `loss_scale` of fp16 ("dynamic", with options, or a number);
    `channels_last` images; `compile` by that backend of torch.compile; `activation_checkpointing`
    keeps no activations of repeated blocks. `devices` are the numbers of those to use ("0,1,4,5");
    `prefetch` batches are made ready ahead of the step.

    What is learnt on the way: an evaluation every `eval_every` steps ("100", or "epoch"); the
    training ends when `patience` of them in a row have not bettered the metric `early_stop`
    ("max:accuracy"); `log` lists further files to write ("csv,tensorboard"); `profile` has torch's
    profiler write what a few steps of rank 0 spend their time on.

    Set by `check` alone: `trace` records the insides of every step, of so many steps that their
    tensors fit in `trace_bytes` (0: of all), each from the weights of the trace in `replay`; one
    process cuts its batches as `cut_for` ranks would (0: as its own ranks do).
    """

    program: str = ""
    task: dict[str, Any] = field(default_factory=dict)
    engine: str = TORCH
    strategy: str = ""
    ranks: int = 1
    nodes: int = 1
    place: str = LOCAL
    device: str = "cpu"
    precision: str = "fp32"
    bitwise: bool = False
    micro_batch: int | None = None
    seed: int = 0
    steps: int | None = None
    threads: int | None = None
    loader_workers: int = 0
    prefetch: int = 2
    steps_per_call: int = 1
    devices: str = ""
    loss_scale: str = "dynamic"
    channels_last: bool = False
    compile: str = ""
    activation_checkpointing: bool = False
    eval_every: str = ""
    early_stop: str = ""
    patience: int = 3
    log: str = ""
    profile: bool = False
    checkpoint_every: int | None = None
    keep: int = 3
    best: str = ""
    resume: str = ""
    max_restarts: int = 0
    hang_timeout: float = 1800.0
    time_limit: float | None = None
    on_bad_step: str = "stop"
    spike: float | None = None
    verify_every: int | None = None
    witness: str = "warn"
    inject: str = ""
    run_dir: str = ""
    trace: bool = False
    trace_bytes: int = 0
    replay: str = ""
    cut_for: int = 0

    @cached_property
    def strategy_spec(self) -> StrategySpec:
        """The strategy with its options and processes; the engine's own where none is named."""
        text = self.strategy or default_strategy(self.engine, self.ranks)
        return strategy_spec(text, self.ranks)

    @cached_property
    def place_spec(self) -> PlaceSpec:
        """The place by its name and options; raises `RequestError` for one that is not known."""
        return place_spec(self.place)

    def to_data(self) -> dict[str, Any]:
        """The job as a mapping that JSON and TOML can carry."""
        return dataclasses.asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Job:
        """The job that `to_data` described."""
        return cls(**data)
