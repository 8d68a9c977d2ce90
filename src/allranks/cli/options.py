"""The options that several verbs share: the same words everywhere, and one way to a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import click

from allranks.errors import RequestError
from allranks.job.config import Resolved, resolve
from allranks.job.job import (
    AUDITS,
    BAD_STEPS,
    GROUPS,
    LOGS,
    PRECISIONS,
    WITNESS,
    Job,
    names_in,
    redacted,
)
from allranks.job.place import LOCAL
from allranks.job.units import parse_duration
from allranks.launcher.places import Rendezvous, chosen_place

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
Options = tuple[Decorator, ...]
PLACES = "local, slurm or simulated[:link=1gbit] (default local)."


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """A value that `parse` reads, or refuses by `None`; `refusal` says what to write."""

    def __init__(self, name: str, parse: Callable[[str], Any], refusal: str) -> None:
        self.name, self.parse, self.refusal = name, parse, refusal

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        parsed = self.parse(str(value))
        if parsed is None:
            self.fail(f"{value!r} is {self.refusal}")
        return parsed


DURATION = Parsed("time", parse_duration, "no duration: write 90, 90s, 30m, 1h30m or 1:30:00")
DEFAULTS = {f.name: f.default for kind in (Job, Rendezvous) for f in dataclasses.fields(kind)}


def _option(flag: str, help: str, type: Any = None, **more: Any) -> Decorator:
    """One that is `None` where it is not given: a job file or a resumed run may set it.

    Its help ends with the default of the field that it sets.
    """
    name = flag.removeprefix("--").replace("-", "_")
    names = [flag, more.pop("name")] if "name" in more else [flag]
    default = DEFAULTS.get(name, DEFAULTS.get(f"{name}_s"))
    return click.option(*names, type=type, help=_with_default(help, default), **more)


def _with_default(help: str, value: Any) -> str:
    """`Seed.` -> `Seed (default 0).`; a value that stands for "not given" is not shown."""
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    is_shown = isinstance(value, (int, float, str)) and shown and "default" not in help
    return f"{help.removesuffix('.')} (default {shown})." if is_shown else help


def _switch(flag: str, help: str) -> Decorator:
    return click.option(flag, is_flag=True, default=None, help=help)


SHARED_OPTIONS: Options = (
    _option("--ranks", "Ranks (processes) over all nodes.", int),
    _option("--nodes", "Nodes to use.", int),
    _option("--place", PLACES),
    _option("--engine", "Framework (default: the program's)."),
    _option("--device", "cpu, cuda (ROCm too), xpu, others of torch."),
    _option("--devices", "Devices of each node: 0,1,4,5 (default: all)."),
    _switch("--share-device", "Let several ranks share a device, to try things."),
    _option("--backend", "Between ranks (default shared_memory on CPUs, NCCL on GPUs)."),
    _option("--share", "Shards of each rank: 5,2,1, or auto by speed (default: even)."),
    _option("--precision", f"{', '.join(PRECISIONS)}."),
    _option("--loss-scale", "For fp16: dynamic, or a number."),
    _switch("--channels-last", "Images in NHWC order."),
    _option("--compile", "Compile with this backend, as inductor (default: none)."),
    _switch("--activation-checkpointing", "Recompute activations: needs less memory."),
    _switch("--bitwise", "Same bits on any number of ranks."),
    _option("--micro-batch", "Samples per forward pass, or auto (default: all of a rank)."),
    _option("--loader-workers", "Processes that load data, per rank.", int),
    _option("--steps-per-call", "Steps in one call of TensorFlow.", int),
    _option("--prefetch", "Batches to load ahead.", int),
    _option("--threads", "Threads of each rank (default: its share of the cores).", int),
    _option("--seed", "Seed of all random numbers.", int),
    _option("--steps", "Stop after N steps (default: the task's epochs).", int),
    _option("--set", "Set a field of the task; may be repeated.", name="settings", multiple=True),
    _option("--optimizer", "As adamw:lr=1e-3,eps=1e-6 (default: the task's)."),
    _option("--schedule", "As warmup-lr:highest=1e-3,steps=1000 (default: the task's)."),
    _option("--job", "Options in TOML or DeepSpeed's JSON; flags win.", name="job_file"),
)

NODE_OPTIONS: Options = (
    _option("--ranks-per-node", "Ranks on each node, instead of --ranks.", int),
    _option("--node-rank", "Number of this node, if you start each by hand.", int),
)

RENDEZVOUS: Options = (
    _option("--rendezvous", "Where nodes started by hand meet: on node 0."),
    _option(
        "--id",
        "Secret name of the job, on all nodes (default $ALLRANKS_ID).",
        name="key",
        envvar="ALLRANKS_ID",
    ),
    _option("--hosts", "A file of hosts, which are reached by ssh."),
    _option("--interface", "Network interface between the nodes (default: found)."),
    _option("--join-timeout", "Wait so long until all nodes are there.", DURATION),
    _option("--node-timeout", "A node silent for so long is lost.", DURATION),
    _switch("--per-rank", "Under Slurm: one task per rank, not per node."),
)

TRAINING_OPTIONS: Options = (
    _option("--strategy", "See `allranks strategies` (default in torch: single or ddp)."),
    _option("--epochs", "Passes over the data (default: the task's).", int),
)

EVALUATION_OPTIONS: Options = (
    _option("--eval-every", "Evaluate so often (default: at the end)."),
    _option("--early-stop", "Stop when this metric stops improving (see --patience)."),
    _option("--until", "Stop when an evaluation reaches accuracy=0.97 or min:loss=0.1."),
    _option("--patience", "For --early-stop: evaluations without improvement.", int),
    _option("--log", f"Also write {', '.join(LOGS)} (default none)."),
    _switch("--profile", "Write where a few steps spend their time (torch's profiler)."),
)

SAFETY_OPTIONS: Options = (
    _option("--checkpoint-every", "Steps between checkpoints (default: when stopped).", int),
    _option("--keep", "How many checkpoints to keep.", int),
    _option("--best", "Also keep the checkpoint that is best by it."),
    _option("--resume", "Start from RUN, or anew (default auto: --run-dir)."),
    _option("--max-restarts", "Restarts after a fault.", int),
    _option("--hang-timeout", "Seconds without progress that count as a hang; 0: never.", float),
    _option("--elastic", "Go on while MIN:MAX ranks are there, without a restart."),
    _switch("--spare-state", "Copy each rank's part of the state to another rank (--elastic)."),
    _option("--time-limit", "Save and stop after 30m or 1:30:00 (default none).", DURATION),
    _option("--on-bad-step", "When loss or gradient is not finite."),
    _option(
        "--spike",
        "Also bad: SPIKE times the median gradient norm (default: any is fine).",
        float,
    ),
    _option(
        "--verify-every", "Compare the weights of all ranks every N steps (default never).", int
    ),
    _option("--digest-every", "Write digests every N steps, and at checkpoints; 0: never.", int),
    _option("--witness", "If a result is seen to depend on the number of ranks."),
    _option("--audit", "Compute shards again on other ranks: stop, leave or warn (default: none)."),
    _option("--audit-every", "Steps from audit to audit (default: for 1 % of the time).", int),
    _option("--first-check", "Compare the first N steps with one process, before training."),
    _option(
        "--inject",
        "Cause a fault, to test recovery: kill@rank=1,step=30.",
        name="inject",
        multiple=True,
    ),
)


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


def with_options(options: Options, command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with these options, in their order."""
    for option in reversed(options):
        command = option(command)
    return command


job_options = partial(with_options, SHARED_OPTIONS)
"""Adds the options that decide the result to a command."""
rendezvous_options = partial(with_options, (*NODE_OPTIONS, *RENDEZVOUS))
"""Adds the options that say how several nodes come together to a command."""
network_options = partial(with_options, RENDEZVOUS)
"""The same for a command that has its own words for the numbers of nodes and ranks."""
training_options = partial(
    with_options, (*TRAINING_OPTIONS, *SHARED_OPTIONS, *EVALUATION_OPTIONS, *SAFETY_OPTIONS)
)
"""Adds the options that describe a training, wherever it runs, to a command."""


def typed_options(context: click.Context) -> list[str]:
    """The names of the options that were typed."""
    typed = click.core.ParameterSource.COMMANDLINE
    return [name for name in context.params if context.get_parameter_source(name) == typed]


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
    "Looking": ("--placement", "--deep", "--keep-runs", "--json", "--help", "--help-all"),
}


def option_groups() -> dict[str, list[str]]:
    """The options of all verbs by the titles of their groups, each in one group."""
    groups = {"First of all": list(FIRST)}
    for title, group in GROUPS.items():
        fields = [f"--{name.replace('_', '-')}" for name in names_in(group)]
        groups[title] = [flag for flag in fields if flag not in FIRST]
        groups[title] += NO_FIELDS.get(title, ())
    return groups


COMMON = frozenset(
    (
        *FIRST,
        *("--steps", "--seed", "--micro-batch", "--eval-every", "--optimizer", "--job"),
        *("--place", "--device", "--slots", "--precision", "--activation-checkpointing"),
        *("--best", "--resume", "--time-limit", "--log", "--deep", "--keep-runs", "--json"),
    )
)


class Verb(click.Command):
    """A command whose help fits on one screen, with each default; `--help-all` has all options.

    `groups` are the titles and their options, in their order; `common` those that `--help` shows.
    Without them there is one group, and `--help` shows all. `meanings` replace the help of options.
    """

    def __init__(
        self,
        *words: Any,
        groups: Mapping[str, Sequence[str]] | None = None,
        common: Set[str] | None = None,
        meanings: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(*words, **more)
        self.context_settings.setdefault("help_option_names", ["-h", "--help"])
        self._groups, self._common = groups, common
        for option in self.params:
            if isinstance(option, click.Option):
                option.help = (meanings or {}).get(option.opts[0], option.help)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        hidden = self._common is None
        text = "Show all options, by group."
        flags: Any = {"is_flag": True, "is_eager": True, "expose_value": False, "hidden": hidden}
        all_of_them = click.Option(["--help-all"], callback=_show_all, help=text, **flags)
        return [*super().get_params(ctx), all_of_them]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [o for o in self.get_params(ctx) if isinstance(o, click.Option) and not o.hidden]
        rows = {max(option.opts, key=len): _row(option, ctx) for option in options}
        for title, names in (self._groups or {"Options": list(rows)}).items():
            shown = [rows[name] for name in names if name in rows and self._is_shown(name, ctx)]
            if shown:
                with formatter.section(title):
                    formatter.write_dl(shown, col_max=34)

    def _is_shown(self, name: str, ctx: click.Context) -> bool:
        common = self._common
        return common is None or name in common or name in HELPS or SHOWS_ALL in ctx.meta


HELPS = ("--help", "--help-all")
SHOWS_ALL = "allranks.help_all"


def _show_all(ctx: click.Context, option: click.Parameter, is_given: bool) -> None:
    if is_given:
        ctx.meta[SHOWS_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _row(option: click.Option, ctx: click.Context) -> tuple[str, str]:
    """An option as help shows it: one spelling, and the values that it takes; what it does."""
    names = sorted((name for name in option.opts if "_" not in name), key=len)
    takes = "" if option.is_flag else f" {_values(option, ctx)}"
    text = option.help or ""
    return f"{', '.join(names)}{takes}", text if option.is_flag else _with_default(
        text, option.default
    )


VALUES = {
    "DIR": "--keep-runs",
    "FIELD=VALUE": "--set",
    "FILE": "--job --hosts --program --out --trace --to",
    "HOST:PORT": "--rendezvous --rdzv-endpoint",
    "MEMORY": "--mem --mem-per-cpu --mem-per-gpu",
    "METRIC=VALUE": "--until",
    "MIN:MAX": "--elastic",
    "N": "--max-restarts --node-rank",
    "N,N": "--ranks",
    "N|MIN:MAX": "--nnodes",
    "N|cpu|gpu|auto": "--nproc-per-node",
    "N|epoch": "--eval-every",
    "NAME|FILE": "--cluster",
    "OPTION=A,B": "--sweep",
    "RANKS": "--show --local-ranks-filter",
    "ROLE=N,...": "--roles",
    "SECONDS": "--hang-timeout --grace --signal --peer-limit --shutdown-timeout",
    "auto|never|RUN": "--resume",
    "auto|off|N": "--first-check",
    "max|min:METRIC": "--early-stop --best",
    "shared_memory|gloo|nccl": "--backend",
    "torch|tensorflow": "--warm --engine",
    "|".join(AUDITS): "--audit",
    "|".join(BAD_STEPS): "--on-bad-step",
    "|".join(WITNESS): "--witness",
}
"""What help shows as the value of options; of all others the last word of their name."""
METAVARS = {flag: shown for shown, flags in VALUES.items() for flag in flags.split()}


def _values(option: click.Option, ctx: click.Context) -> str:
    name = max(option.opts, key=len)
    if isinstance(option.type, click.Choice):
        return "|".join(map(str, option.type.choices))
    if option.metavar or option.type is DURATION:
        return option.make_metavar(ctx)
    is_whole = isinstance(option.type, type(click.INT))
    return "N" if is_whole else METAVARS.get(name, name.rpartition("-")[2].upper())
