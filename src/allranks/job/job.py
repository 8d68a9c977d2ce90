"""A job: a task plus how to run it, as frozen data. Written into the run folder, read by ranks.

Nothing here acts. `config` builds a job from the command line and a file, a place plans it, the
launcher starts it, and each rank gets the same job as JSON. Below: the fields of a task, and the
job as a TOML file.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from allranks.catalog import TORCH
from allranks.errors import RequestError, nearest
from allranks.job.engines import default_strategy
from allranks.job.place import LOCAL, PlaceSpec, place_spec
from allranks.strategies.choice import TRUTH
from allranks.strategies.resolve import StrategySpec, strategy_spec

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp64")
DEVICES_OF_ALL_ENGINES = ("cpu", "cuda")
DEVICES = (*DEVICES_OF_ALL_ENGINES, "xpu")  # torch knows others, by the names of their backends
LOGS = ("csv", "tensorboard", "mlflow", "phases")
BAD_STEPS = ("stop", "skip", "warn")
WITNESS = ("warn", "stop", "off")
AUDITS = ("stop", "leave", "warn")
AUTO = "auto"
MADE_ALONE: dict[str, Any] = {
    **{"nodes": 1, "place": LOCAL, "share": "", "witness": "off", "log": "", "profile": False},
    **{"resume": "", "inject": "", "checkpoint_every": None, "verify_every": None},
    **{"audit": "", "audit_every": None},
}
"""Values of a job whose steps are made on this machine to be measured or compared. None of them
changes what a step computes."""


@dataclass(frozen=True)
class Training:
    """What is trained, for how long, and how its data comes.

    `engine` is the framework that does the arithmetic; `steps_per_call` is how many steps it makes
    before it returns to Python (TensorFlow). `steps` is the number of optimizer steps (None: until
    the task's epochs are over); `micro_batch` is how many samples one pass of the model takes on
    one rank (None: all that the rank owns); with `micro_batch_trial` (`--micro-batch auto`) the job
    starts again with half of it where a step runs out of memory. `loader_workers` processes read
    data for each rank, and `prefetch` batches are made ready ahead of the step. The job evaluates
    every `eval_every` steps ("100", or "epoch"), and ends when `patience` evaluations in a row have
    not bettered the metric `early_stop` ("max:accuracy"), or as soon as an evaluation is `until`
    ("accuracy=0.97", "min:loss=0.1"). `optimizer` ("adamw:lr=1e-3") and `schedule`
    ("warmup-lr:steps=1000") are taken in place of the task's.
    """

    program: str = ""
    task: dict[str, Any] = field(default_factory=dict)
    engine: str = TORCH
    steps: int | None = None
    seed: int = 0
    micro_batch: int | None = None
    micro_batch_trial: bool = False
    steps_per_call: int = 1
    loader_workers: int = 0
    prefetch: int = 2
    eval_every: str = ""
    early_stop: str = ""
    until: str = ""
    patience: int = 3
    optimizer: str = ""
    schedule: str = ""


@dataclass(frozen=True)
class Where:
    """Which processes train, how they work together, and on which machines.

    `ranks` counts those of all nodes. `place` is this machine ("local"), machines that the user
    names ("hosts"), nodes that are made here ("simulated:link=1gbit"), or those of a Slurm job
    ("slurm"); `nodes` is how many of them. `devices` are the numbers of the devices to use
    ("0,1,4,5"); with `share_device` the ranks of a node take turns at its devices, several on one,
    for checks and not for speed; `threads` are the intra-op threads of a rank (None: the cores
    shared out, 1 under `bitwise`). `backend` is what ranks talk over ("": memory that those of a
    host share, or NCCL between GPUs; "gloo": sockets). `share` is how the shards of a batch are
    dealt to the ranks that read data ("": evenly; "5,2,1"; "HOST=5,DEVICE=2"; "auto": by their
    measured speed).
    """

    strategy: str = ""
    ranks: int = 1
    nodes: int = 1
    place: str = LOCAL
    device: str = "cpu"
    devices: str = ""
    share_device: bool = False
    backend: str = ""
    share: str = ""
    threads: int | None = None


@dataclass(frozen=True)
class Numerics:
    """How the arithmetic is done.

    `bitwise` gives equal bits on any number of ranks; `loss_scale` is that of fp16 ("dynamic", with
    options, or a number); `channels_last` stores images as NHWC; `compile` names a backend of
    torch.compile; `activation_checkpointing` recomputes the activations of repeated blocks.
    """

    precision: str = "fp32"
    bitwise: bool = False
    loss_scale: str = "dynamic"
    channels_last: bool = False
    compile: str = ""
    activation_checkpointing: bool = False


@dataclass(frozen=True)
class Safety:
    """What protects a job: checkpoints, restarts, and looks at its numbers.

    A checkpoint is written every `checkpoint_every` global batches (None: only when the job is
    stopped); the `keep` newest stay, and the one with the `best` metric ("max:accuracy",
    "min:loss"). `resume` is a run folder or a checkpoint to start from. After a fault the ranks
    start again, up to `max_restarts` times; a rank without a sign of life for `hang_timeout`
    seconds (0: for ever) is a fault. With `elastic` ("2:8") the others go on without a rank that is
    lost, as long as 2 are left, and up to 8 may train; with `spare_state` each rank has a copy of
    the part of the state that another one holds. After `time_limit` seconds the job stops as if
    asked to. `on_bad_step` says what happens with a step whose loss or gradient is not finite, or
    whose gradient norm is over `spike` times the recent median. Every `verify_every` steps the
    weights of all ranks are compared; `witness` says what happens when the result is seen to follow
    the number of ranks. With `audit` a rank computes a shard of another one again, every
    `audit_every` steps (None: so that it costs 1 % of the time), and the word says what happens
    when they differ. `first_check` compares the first steps of a job whose strategy cuts the
    model with one process before it trains: "auto" where that is cheap, "off", or so many steps.
    Every `digest_every` steps and at checkpoints (0: never) digests of the state are written, which
    `replay` compares. `inject` lists faults to make on purpose (`allranks.job.faults`).
    """

    checkpoint_every: int | None = None
    keep: int = 3
    best: str = ""
    resume: str = ""
    max_restarts: int = 0
    hang_timeout: float = 1800.0
    elastic: str = ""
    spare_state: bool = False
    time_limit: float | None = None
    on_bad_step: str = "stop"
    spike: float | None = None
    verify_every: int | None = None
    digest_every: int = 500
    witness: str = "warn"
    audit: str = ""
    audit_every: int | None = None
    first_check: str = "auto"
    inject: str = ""


@dataclass(frozen=True)
class Looking:
    """Where the job leaves its records, and which.

    `log` lists further files to write ("csv,tensorboard,mlflow,phases"); `profile` has torch's
    profiler write what a few steps of rank 0 spend their time on.
    """

    run_dir: str = ""
    log: str = ""
    profile: bool = False


@dataclass(frozen=True)
class Tracing:
    """Set by `check` and `replay` alone; no flag and no job file says them.

    `trace` records the insides of every step, of so many steps that their tensors fit in
    `trace_bytes` (0: of all), each from the weights of the trace in `replay`; one process cuts its
    batches as `cut_for` ranks would (0: as its own ranks do). Of step `parts_of` all is recorded
    that tells a cause: the tensors of every rank, or, in one process with `cut_for`, each part of
    the batch by itself, and the loss if `adding` ranks each added the biases in `added_by_each`.
    With `operators`, the inputs and outputs of every operator of that step are recorded.
    `brief` writes no weights at the end, and evaluates the first chunk of the data alone.
    `schedule_steps` is the `total` of the schedule, where the training was given its steps.

    A replay ends after `last_step`, and digests the state after the steps in `digest_at` alone. At
    its last step it does what `look` says: "pdb:before", "shell:after", "record" (for `bisect`).
    With `only_shard` no more than the pass of that shard is made of this step.
    """

    trace: bool = False
    trace_bytes: int = 0
    replay: str = ""
    cut_for: int = 0
    parts_of: int | None = None
    added_by_each: tuple[str, ...] = ()
    adding: int = 1
    operators: bool = False
    brief: bool = False
    schedule_steps: int | None = None
    last_step: int | None = None
    digest_at: tuple[int, ...] = ()
    look: str = ""
    only_shard: int | None = None


GROUPS: dict[str, type] = {
    "What is trained": Training,
    "Where": Where,
    "Numbers": Numerics,
    "Safety": Safety,
    "Looking": Looking,
    "Set by check": Tracing,
}


@dataclass(frozen=True)  # takes the fields of its last base first: these are `GROUPS`, reversed
class Job(Tracing, Looking, Safety, Numerics, Where, Training):
    """Everything that decides how a task is run; the task's own fields are in `task`.

    A job is flat, as its flags are: `Job(strategy="ddp", ranks=2)`. `GROUPS` has its fields in
    groups, in the order in which `--help`, `--dry-run`, job files and the reference show them.
    """

    @cached_property
    def strategy_spec(self) -> StrategySpec:
        """The strategy with its options and processes; the engine's own where none is named."""
        text = self.strategy or default_strategy(self.engine, self.ranks)
        return strategy_spec(text, self.ranks)

    @property
    def nodes_apart(self) -> int:
        """How many of the nodes, the last ones, have no rank."""
        return self.strategy_spec.process_set.nodes_apart if self.strategy else 0

    @cached_property
    def place_spec(self) -> PlaceSpec:
        """The place by its name and options; raises `RequestError` for one that is not known."""
        return place_spec(self.place)

    def grouped(self) -> dict[str, dict[str, Any]]:
        """The values that a user can set, group by group; without the fields of the task."""
        return {
            title: {name: getattr(self, name) for name in names_in(group) if name != "task"}
            for title, group in GROUPS.items()
            if group is not Tracing
        }

    def to_data(self) -> dict[str, Any]:
        """The job as a mapping that JSON and TOML can carry."""
        return dataclasses.asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Job:
        """The job that `to_data` described."""
        return cls(**data)


def names_in(group: type) -> tuple[str, ...]:
    """The names of the fields of one of the `GROUPS`, in their order."""
    return tuple(field.name for field in dataclasses.fields(group))


# --- fields --------------------------------------------------------------------------------------
# The fields of a task: set from text or TOML, checked against their annotations. Pure.
#
# A task is a dataclass, and its fields are its hyper-parameters: `--set lr=3e-4` on the command
# line, `[task]` in a job file. The same words, the same checks and the same errors for both.


def with_settings(task_class: type, settings: dict[str, Any], request: str) -> Any:
    """`task_class(**settings)` with every value checked and converted; raises `RequestError`."""
    hints = typing.get_type_hints(task_class)
    known = {f.name: f for f in dataclasses.fields(task_class) if f.init}
    values = {}
    for name, value in settings.items():
        if name not in known:
            raise RequestError(
                asked=f"--set {name}={value}",
                found=f"no field {name!r} in {task_class.__name__}",
                why="only the annotated fields of the task's dataclass can be set",
                do=nearest(name, known),
            )
        values[name] = read_value(name, value, hints[name])
    missing = [
        name
        for name, f in known.items()
        if name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise RequestError(
            asked=request,
            found=f"no value for {', '.join(missing)}",
            why="these fields of the task have no default",
            do=" ".join(f"--set {name}=…" for name in missing),
        )
    return task_class(**values)


def read_value(name: str, value: Any, annotation: Any, request: str = "") -> Any:
    """`value` (text from the command line, or already typed) as the annotation says.

    `none` is none wherever the annotation allows it, before it is text.
    """
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if is_union else (annotation,)
    for member in sorted(members, key=lambda member: member is not type(None)):
        converted = _convert(value, member)
        if converted is not _NO:
            return converted
    wanted = " or ".join(getattr(m, "__name__", str(m)) for m in members)
    raise RequestError(
        asked=request or f"--set {name}={value}",
        found=f"{value!r}",
        why=f"{name} takes {wanted}",
        do=f"give {name} a value of that type, or leave it at its default",
    )


_NO = object()


def _convert(value: Any, kind: Any) -> Any:
    """The value as `kind`, or `_NO`. Never lossy: 2.5 is no int, True is no float.

    A text that is not finite is no float either: nobody trains with `nan`. A file may have one,
    which a task has as its default.
    """
    if kind is type(None):
        return None if value is None or value == "none" else _NO
    if typing.get_origin(kind) is typing.Literal:
        return next((choice for choice in typing.get_args(kind) if str(choice) == str(value)), _NO)
    if kind is bool:
        return value if isinstance(value, bool) else TRUTH.get(str(value).lower(), _NO)
    if kind not in (int, float, str):
        return _NO
    if isinstance(value, str):
        try:
            read = kind(value)
        except ValueError:
            return _NO
        return _NO if kind is float and not math.isfinite(read) else read
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _NO
    if kind is not float:
        return value if kind is int and isinstance(value, int) else _NO
    try:
        real = float(value)
    except OverflowError:
        return _NO
    return real if real == value or value != value else _NO


# --- job file ------------------------------------------------------------------------------------
# A job as TOML text and back, so that the job of any run folder can be run again.
#
# Values that look like secrets are never written; a job that resumes needs them again.


SCHEMA = 1
FOR_CHECK = names_in(Tracing)
NOT_SETTABLE = ("task", *FOR_CHECK)
HIDDEN = "[redacted]"
_SECRET_WORD = re.compile(  # one word of a name, small letters
    r"(api|access|private|secret|auth|ssh|account)?key|\w*tokens?|\w*secrets?|bearer"
    r"|\w*pass|pwd|pw|cred(ential)?s?|auth(orization)?|jwts?|pats?|cookies?"
    r"|\w*(password|passwd|passphrase)s?"
)
_SECRET_VALUE = re.compile(  # a password in a URL; how common services begin their keys
    r"://[^/\s:@]*:[^/\s@]+@"
    r"|\b(sk-|[sr]k_(live|test)_|gh[pousr]_|github_pat_|glpat-|hf_|xox[abpr]-)[\w-]{8}"
    r"|\b(nvapi-|npm_|pypi-|dckr_pat_|dapi|r8_|AIza|ya29\.)[\w-]{16}"
    r"|\bA[KS]IA[0-9A-Z]{12}|\beyJ[\w-]{10,}\.|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_SECRET_INSIDE = re.compile(  # said by the text itself, which is a command or a list of settings
    r"(?i)\b(bearer|basic)\s+[\w+/.~-]{8}"
    r"|(password|passwd|passphrase|secret|token|jwt|(api|access|account)[_-]?key|_pass|_pwd|_pat)"
    r"\s*=\s*[^\s;&]"
)


def read_job_file(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a job file, and those of its `[task]` table; raises `RequestError`."""
    return job_values(_read(path), path)


def read_given(path: str) -> frozenset[str]:
    """The names of the values that somebody gave, by the `[source]` table of a `job.toml`.

    None where it has no such table, as those that people write.
    """
    sources = _read(path).get("source")
    if not isinstance(sources, dict):
        return frozenset()
    return frozenset(name for name, source in sources.items() if source != "default")


def _read(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(
            asked=f"--job {path}",
            found=str(error) or type(error).__name__,
            why="a job file is TOML text, as `job.toml` in a run folder",
            do="check the path and the line",
        ) from None


def job_values(data: dict[str, Any], path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a job, and those of its task, as `path` has them; raises `RequestError`."""
    data = dict(data)
    schema = data.pop("schema", SCHEMA)
    for name in ("source", "proof"):  # what a run folder says about its job
        data.pop(name, None)
    task = data.pop("task", {})
    if schema != SCHEMA or not isinstance(task, dict):
        raise RequestError(
            asked=f"--job {path}",
            found=f"schema {schema}",
            why=f"this version reads schema {SCHEMA}, with the task's fields in a table [task]",
            do="start from the job.toml of a run folder",
        )
    hints = typing.get_type_hints(Job)
    known = {name: kind for name, kind in hints.items() if name not in NOT_SETTABLE}
    for name, value in data.items():
        if name not in known:
            raise RequestError(
                asked=f"{name} = {value!r} in {path}",
                found=f"no value {name!r} in a job",
                why="a misspelt line must not be passed over",
                do=nearest(name, known),
            )
        if (name, value) != ("micro_batch", AUTO):  # `resolve` makes two values of it
            data[name] = read_value(name, value, known[name], f"{name} = {value!r} in {path}")
    data.pop("run_dir", None)
    return data, task


def redacted(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without the texts that are keys, tokens or passwords, by their names or looks."""
    return {
        name: HIDDEN if isinstance(value, str) and value and _is_secret(name, value) else value
        for name, value in values.items()
    }


def _is_secret(name: str, value: str) -> bool:
    words = re.split(r"[\W_]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    if any(_SECRET_WORD.fullmatch(word) for word in words) or "api_key" in name.lower():
        return True
    return bool(_SECRET_VALUE.search(value) or _SECRET_INSIDE.search(value))


def write_toml(values: dict[str, Any]) -> str:
    """A mapping of plain values and of tables of them as TOML; `None` is left out."""
    plain = {name: value for name, value in values.items() if not isinstance(value, dict)}
    lines = [f"{_key(n)} = {_toml(v)}" for n, v in plain.items() if v is not None]
    for name, table in values.items():
        if isinstance(table, dict):
            lines += ["", f"[{_key(name)}]"]
            lines += [f"{_key(n)} = {_toml(v)}" for n, v in table.items() if v is not None]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text) + '"'
