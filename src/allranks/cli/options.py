"""The options that several verbs share: the same words everywhere, and one way to a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from allranks.catalog import ENGINES
from allranks.errors import RequestError
from allranks.job.config import Resolved, resolve
from allranks.job.job import GROUPS, names_in
from allranks.job.job_file import redacted
from allranks.job.place import LOCAL
from allranks.job.units import parse_duration
from allranks.launcher.nodes.join import Rendezvous
from allranks.launcher.places.base import chosen_place

OptionDecorator = Callable[[Callable[..., Any]], Callable[..., Any]]
Options = tuple[OptionDecorator, ...]


class Duration(click.ParamType):  # type: ignore[type-arg]
    """Seconds, or a text like 30m, 1h30m or 1:30:00."""

    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        seconds = parse_duration(str(value))
        if seconds is None:
            self.fail(f"{value!r} is no duration: write 90, 90s, 30m, 1h30m or 1:30:00")
        return seconds


def _option(flag: str, help: str, type: Any = None, **more: Any) -> OptionDecorator:
    """One that is `None` where it is not given: a job file or a resumed run may set it."""
    names = [flag, more.pop("name")] if "name" in more else [flag]
    return click.option(*names, type=type, help=help, **more)


def _switch(flag: str, help: str) -> OptionDecorator:
    return click.option(flag, is_flag=True, default=None, help=help)


SHARED_OPTIONS: Options = (
    _option("--ranks", "World size over all nodes.", int),
    _option("--nodes", "Nodes to use (default 1).", int),
    _option("--place", "local, simulated[:link=1gbit,delay=1ms], or slurm."),
    _option("--engine", f"{' or '.join(ENGINES)} (default: what program and strategy need)."),
    _option("--device", "cpu, cuda (ROCm too), xpu, or another backend of torch."),
    _option("--devices", "Numbers of the devices to use, as 0,1,4,5."),
    _switch("--share-device", "Let ranks share a device (for checks)."),
    _option("--backend", "What ranks talk over: shared_memory (default on CPUs), gloo."),
    _option("--precision", "fp32, tf32, bf16, fp16 or fp64."),
    _option("--loss-scale", "Of fp16: dynamic (default), or a number."),
    _switch("--channels-last", "Images in NHWC order."),
    _option("--compile", "Compile the model: inductor, or another backend."),
    _switch("--activation-checkpointing", "Compute activations of blocks again."),
    _switch("--bitwise", "Equal bits on any ranks."),
    _option("--micro-batch", "Samples through the model at once.", int),
    _option("--loader-workers", "Processes that read data, per rank.", int),
    _option("--steps-per-call", "Steps in one call of TensorFlow (default 1).", int),
    _option("--prefetch", "Batches made ready ahead (default 2).", int),
    _option("--threads", "Threads of each rank.", int),
    _option("--seed", "Seed of everything random (default 0).", int),
    _option("--steps", "Optimizer steps of the job, instead of epochs.", int),
    _option("--set", "Set a field of the task: field=value.", name="settings", multiple=True),
    _option("--optimizer", "In place of the task's: adamw:lr=1e-3,weight_decay=0.01."),
    _option("--schedule", "In place of the task's: warmup-lr:highest=1e-3,steps=1000."),
    _option(
        "--job",
        "Take the job from a TOML file, or from DeepSpeed's JSON; flags go first.",
        name="job_file",
    ),
)

NODE_OPTIONS: Options = (
    _option("--ranks-per-node", "Ranks on each node, instead of --ranks.", int),
    _option("--node-rank", "The number of this node, started by hand.", int),
)

RENDEZVOUS: Options = (
    _option("--rendezvous", "host:port of node 0, where nodes started by hand meet."),
    _option(
        "--id",
        "The secret name of the job ($ALLRANKS_ID) on all nodes.",
        name="key",
        envvar="ALLRANKS_ID",
    ),
    _option("--hosts", "A file of hosts that are reached by ssh."),
    _option("--interface", "The network interface that joins the nodes."),
    _option("--join-timeout", "Seconds until all nodes are there (300).", Duration()),
    _option("--node-timeout", "Seconds of silence: a node is lost (15).", Duration()),
    _switch("--per-rank", "Under Slurm: a task per rank."),
)

TRAINING_OPTIONS: Options = (
    _option("--strategy", "How ranks work together: see `allranks strategies`."),
    _option("--epochs", "Passes over the data (a field of the task).", int),
)

EVALUATION_OPTIONS: Options = (
    _option("--eval-every", "Evaluate after so many steps, or after each `epoch`."),
    _option("--early-stop", "End when max:METRIC or min:METRIC gets no better."),
    _option("--until", "End when an evaluation has it: accuracy=0.97 or min:loss=0.1."),
    _option("--patience", "Evaluations without a better one (default 3).", int),
    _option("--log", "Further files to write: csv, tensorboard, mlflow, phases."),
    _switch("--profile", "Write where a few steps spend."),
)

SAFETY_OPTIONS: Options = (
    _option("--checkpoint-every", "Steps between checkpoints.", int),
    _option("--keep", "How many checkpoints to keep (default 3).", int),
    _option("--best", "Keep the best one too: max:METRIC or min:METRIC."),
    _option("--resume", "auto (default), never, or a run or checkpoint to start from."),
    _option("--max-restarts", "Start again after a fault (default 0).", int),
    _option(
        "--hang-timeout", "Seconds without a sign of life (default 1800; 0: for ever).", type=float
    ),
    _option("--time-limit", "Save and leave after 90, 30m or 1:30:00.", Duration()),
    _option("--on-bad-step", "stop, skip or warn when a step is not finite."),
    _option("--spike", "A step is bad if its gradient is so many times usual.", type=float),
    _option("--verify-every", "Steps between comparisons of all ranks' weights.", int),
    _option("--witness", "warn, stop or off: when the result follows the ranks."),
    _option(
        "--first-check", "Compare the first steps with one process: auto (default), off, or STEPS."
    ),
    _option("--inject", "Break it on purpose: kill@rank=1,step=30.", name="inject", multiple=True),
)


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that decide the result to a command."""
    return _with(SHARED_OPTIONS, command)


def rendezvous_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how several nodes come together to a command."""
    return _with((*NODE_OPTIONS, *RENDEZVOUS), command)


def network_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a command that has its own words for the numbers of nodes and ranks."""
    return _with(RENDEZVOUS, command)


def rendezvous_from(flags: dict[str, Any]) -> tuple[Rendezvous, dict[str, Any]]:
    """The rendezvous of the nodes, and the fields of the job that follow; pops both from `flags`.

    `flags` are those of the command line, `None` where one was not given.
    """
    per_node = flags.pop("ranks_per_node", None)
    names = {
        "rendezvous": "endpoint",
        "join_timeout": "join_timeout_s",
        "node_timeout": "node_timeout_s",
    }
    fields = {names.get(n, n): flags.pop(n) for n in RENDEZVOUS_NAMES}
    rendezvous = Rendezvous(**{name: value for name, value in fields.items() if value is not None})
    implied: dict[str, Any] = {}
    nodes, named = flags.get("nodes") or 1, flags.get("place") or LOCAL
    place = chosen_place(named, rendezvous, nodes)
    if place != named:
        implied["place"] = place
    if per_node is not None:
        implied["ranks"] = _ranks(per_node, nodes, flags.get("ranks"))
    return rendezvous, implied


RENDEZVOUS_NAMES = (
    *("node_rank", "rendezvous", "key", "hosts", "interface", "join_timeout", "node_timeout"),
    "per_rank",
)


def _ranks(per_node: int, nodes: int, ranks: int | None) -> int:
    if ranks is not None and ranks != per_node * nodes:
        raise RequestError(
            asked=f"--ranks {ranks} --ranks-per-node {per_node} --nodes {nodes}",
            found=f"{per_node} on each of {nodes} nodes are {per_node * nodes}",
            why="--ranks counts the ranks of all nodes",
            do=f"leave one of them out, or --ranks {per_node * nodes}",
        )
    return per_node * nodes


def words_of(flags: dict[str, Any], *more: str) -> tuple[str, ...]:
    """The words that describe a job, the same on every node whatever their order was."""
    names = {name for name, value in flags.items() if value not in (None, (), "", False)}
    names -= {"node_rank", "interface", "key", "join_timeout", "as_object", "local_addr", "rdzv_id"}
    names -= {"show"}  # each node chooses whose output it shows
    values = {name: flags[name] for name in sorted(names)}
    if "settings" in values:
        pairs = dict(text.partition("=")[::2] for text in values["settings"])
        values["settings"] = redacted(pairs)
    return (*more, *(f"{name}={value}" for name, value in values.items()))


def training_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that describe a training, wherever it runs, to a command."""
    return _with(
        (*TRAINING_OPTIONS, *SHARED_OPTIONS, *EVALUATION_OPTIONS, *SAFETY_OPTIONS), command
    )


def _with(options: Options, command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command


def resolved_from(program: str | None, flags: dict[str, Any]) -> Resolved:
    """The job that a command line describes; takes `settings` and `job_file` out of `flags`."""
    settings, job_file = flags.pop("settings"), flags.pop("job_file")
    epochs = flags.pop("epochs", None)
    if epochs is not None and flags["steps"] is not None:
        raise click.UsageError("--steps and --epochs say two things about one end: give one")
    if epochs is not None:
        settings = (*settings, f"epochs={epochs}")
    inject = " ".join(flags.pop("inject", ()))
    values = {name: value for name, value in flags.items() if value is not None}
    if epochs is not None:
        values["steps"] = None  # also where a file or the resumed run has some
    if inject:
        values["inject"] = inject
    return resolve(program or "", values, settings, job_file)


# --- grouped help --------------------------------------------------------------------------------
# Help in the groups of a job: what people use first on top, then what, where, numbers, safety.


FIRST = (
    *("--ranks", "--nodes", "--strategy", "--set", "--epochs", "--bitwise", "--run-dir"),
    *("--checkpoint-every", "--max-restarts", "--dry-run"),
)
NO_FIELDS = {  # options that are no field of a job
    "What is trained": ("--job",),
    "Where": (
        *("--slots", "--ranks-per-node", "--hosts", "--rendezvous", "--id", "--node-rank"),
        *("--interface", "--join-timeout", "--node-timeout", "--per-rank"),
    ),
    "Looking": ("--placement", "--deep", "--keep-runs", "--json", "--help"),
}


def option_groups() -> dict[str, list[str]]:
    """The options of all verbs by the titles of their groups, each in one group."""
    groups = {"First of all": list(FIRST)}
    for title, group in GROUPS.items():
        fields = [f"--{name.replace('_', '-')}" for name in names_in(group)]
        groups[title] = [flag for flag in fields if flag not in FIRST]
        groups[title] += NO_FIELDS.get(title, ())
    return groups


class GroupedCommand(click.Command):
    """A command whose options are shown in these groups, and in their order."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = {
            max(option.opts, key=len): row
            for option in self.get_params(ctx)
            if (row := option.get_help_record(ctx)) is not None
        }
        for title, names in option_groups().items():
            shown = [rows[name] for name in names if name in rows]
            if shown:
                with formatter.section(title):
                    formatter.write_dl(shown)
