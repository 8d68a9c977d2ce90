"""torchrun's own flags, so that `allranks run` can replace `torchrun`. Pure.

`FLAGS` has a row for each: it sets a field of `TorchrunFlags`; or it is accepted with a note, if
it has nothing to do here; or it is refused, with an alternative. None is ignored. Both spellings
are accepted (`--nproc-per-node`, `--nproc_per_node`), and the variables PET_…, by which an
operator of a cluster sets the same flags.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from allranks.errors import RequestError


@dataclass(frozen=True)
class Kind:
    """The values of a flag: a description, a pattern, and `read`, which may raise `ValueError`."""

    takes: str = ""
    pattern: str = ".*"
    read: Callable[[str], Any] = str
    is_switch: bool = False


def _nodes(text: str) -> tuple[int, int]:
    """The fewest and the most nodes."""
    least, most = (int(part or text.split(":")[0]) for part in f"{text}:".split(":")[:2])
    if least > most:
        raise ValueError(text)
    return least, most


def _join_timeout(text: str) -> float | None:
    """The seconds that nodes wait for each other."""
    settings = dict(part.partition("=")[::2] for part in text.split(",") if part)
    seconds = settings.get("join_timeout", settings.get("timeout"))
    return None if seconds is None else float(seconds)


def _streams(text: str) -> str:
    """The ranks that `3` or `0:3,1:2` names: "all", "0,1", or "" for none."""
    if ":" not in text:
        return "" if text == "0" else "all"
    pairs = [part.split(":") for part in text.split(",")]
    return ",".join(rank for rank, stream in pairs if stream != "0")


def _up_to(most: int) -> Kind:
    takes = f"a whole number from 0 to {most}"
    return Kind(takes, "[0-9]+", lambda text: range(most + 1).index(int(text)))


TEXT, SWITCH = Kind(), Kind(read=bool, is_switch=True)
ADDRESS = Kind(read=lambda text: text.strip("[]"))
ID = Kind(read=lambda text: "" if text == "none" else text)
WHOLE, PORT = _up_to(1 << 30), _up_to(65535)
PROCESSES = Kind("a number, or auto, cpu, gpu", "auto|cpu|gpu|0*[1-9][0-9]*|")
NODES = Kind("a number of nodes from 1, or MIN:MAX", "0*[1-9][0-9]*(:[0-9]*)?", _nodes)
SECONDS = Kind("a number of seconds", r"[0-9]+(\.[0-9]*)?|\.[0-9]+", float)
SETTINGS = Kind("join_timeout or timeout in seconds", read=_join_timeout)
STREAMS = Kind("0, 1, 2, 3, or RANK:STREAM,…", "[0-3]|[0-9]+:[0-3](,[0-9]+:[0-3])*", _streams)
RANKS = Kind("ranks with commas between, like 0,1", "( *[0-9]+ *(, *[0-9]+ *)*)?")
BACKEND, NULL, DEFAULT = (Kind(pattern=text) for text in ("static|c10d|", "null|", "default|"))
NOTHING, NO_SWITCH = Kind(pattern="(?!)"), Kind(pattern="(?!)", is_switch=True)


def _one_log(text: str) -> str:
    is_one = re.search("(^|:)[12](,|$)", text)
    return "both streams of a rank go to one log, in order" if is_one else ""


def _not_run(text: str) -> str:
    names = [part.partition("=")[0] for part in text.split(",") if part]
    idle = ", ".join(name for name in names if name not in ("join_timeout", "timeout"))
    return f"{idle} would set torch's rendezvous, which is not run" if idle else ""


@dataclass(frozen=True)
class Flag:
    """One of torchrun's flags: its spellings, its help, its values, and what it does here.

    `field` is the field of `TorchrunFlags` that it sets, `note` a note for the user. `refuse` says
    why other values of torchrun's are refused, and what to do instead.
    """

    words: str
    help: str
    kind: Kind = TEXT
    field: str = ""
    note: str | Callable[[str], str] = ""
    refuse: tuple[str, str] | None = None

    @property
    def word(self) -> str:
        return self.words.split()[0]

    @property
    def name(self) -> str:
        """The Python name: `nproc_per_node`."""
        return self.word.removeprefix("--").replace("-", "_")

    @property
    def is_idle(self) -> bool:
        """Whether it sets nothing here: it is accepted with a note, or refused."""
        return not self.field and bool(self.refuse or (self.note and isinstance(self.note, str)))

    @property
    def spellings(self) -> tuple[str, ...]:
        """All accepted spellings."""
        return tuple(dict.fromkeys((*self.words.split(), f"--{self.name}")))

    def read(self, text: str) -> Any:
        """The parsed value; raises `RequestError`."""
        try:
            if re.fullmatch(self.kind.pattern, text, re.DOTALL):
                return self.kind.read(text)
        except ValueError:
            pass
        value = "a flag of torchrun" if self.refuse else repr(text)
        usual = f"{self.word} takes {self.kind.takes}", f"write {self.word} that way"
        why, do = self.refuse or usual
        words = f"{self.word} {text}" if not self.kind.is_switch else self.word
        raise RequestError(asked=words, found=value, why=why, do=do)

    def note_for(self, text: str) -> str:
        """The note for the user; "" if the flag does the same as in torchrun."""
        note = self.note if isinstance(self.note, str) else self.note(text)
        return note and f"{self.word}: {note}"


NO_FILTER = (
    "the output of each rank is in a log of its own, whole",
    "leave it away, and search the logs: grep PATTERN RUN/logs/*",
)
NO_SERVER = (
    "the nodes of a job meet at an agent of their own, not at a server that somebody keeps",
    "--rdzv-backend c10d with --rdzv-endpoint HOST:PORT of the first node",
)
NO_HANDLER = (
    "events are written into the run folder, as lines of JSON",
    "leave it away, and read events.jsonl",
)
NO_SPECS = (
    "the output of each rank is written into the run folder, as it is",
    "leave it away, and read logs/rank-000.log",
)
NO_BINDING = (
    "processes are not bound to processors here",
    "bind them in the command: allranks run … -- sh -c "
    "'exec numactl --cpunodebind=$LOCAL_RANK python train.py'",
)
NO_VIRTUAL_RANK = (
    "LOCAL_RANK tells local processes apart, for all frameworks alike",
    "leave it away; to hide devices: allranks run … -- sh -c "
    "'CUDA_VISIBLE_DEVICES=$LOCAL_RANK exec python train.py'",
)
ONE_RENDEZVOUS = "the nodes meet at the first one; torch's rendezvous is not run"
AT_ONCE = "an exit is seen at once, without looking at intervals"
NO_START = "the command is started as it is, not by multiprocessing"
OWN_PYTHON = "every rank gets a Python of its own; --warm starts from one that has imported"
OWN_ADDRESS = "the address of a node is found; --interface NAME says over which network"
RUN_FOLDER = "the run folder is made in it, with the logs in its folder logs"
SIGNALS = "SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are always passed on"

# fmt: off
FLAGS = (
    Flag("--nproc-per-node", "Processes per node (default 1).", PROCESSES, "processes_per_node"),
    Flag("--nnodes", "Nodes (default 1).", NODES),
    Flag("--node-rank", "Number of this node, from 0 (default: found).", WHOLE, "node_rank"),
    Flag("--rdzv-backend", "Accepted: both are the same here.", BACKEND, "",
         ONE_RENDEZVOUS, NO_SERVER),
    Flag("--rdzv-endpoint", "Where the nodes meet.", TEXT, "endpoint"),
    Flag("--rdzv-id", "Name of the job.", ID, "run_id"),
    Flag("--rdzv-conf", "join_timeout or timeout, in seconds.", SETTINGS,
         "join_timeout_s", _not_run),
    Flag("--standalone", "One node, whatever else is said.", SWITCH),
    Flag("--max-restarts", "Restarts of all processes after a fault (default 0).", WHOLE,
         "max_restarts"),
    Flag("--monitor-interval", "Accepted: an exit is seen at once.", note=AT_ONCE),
    Flag("--start-method", "Accepted: the command is started as it is.", note=NO_START),
    Flag("--event-log-handler", "Others are refused: events.jsonl has them.", NULL,
         refuse=NO_HANDLER),
    Flag("--role", "ROLE_NAME of all processes.", TEXT, "role_name"),
    Flag("--module -m", "COMMAND is a Python module.", SWITCH, "is_module"),
    Flag("--no-python", "COMMAND is a program, even if it ends in .py.", SWITCH, "is_program"),
    Flag("--run-path", "Accepted: see --warm.", SWITCH, note=OWN_PYTHON),
    Flag("--log-dir", "Make the run folder there (default runs).", TEXT, "log_dir", RUN_FOLDER),
    Flag("--redirects -r", "Ranks whose output goes to their log only.", STREAMS, note=_one_log),
    Flag("--tee -t", "Ranks whose output is shown too.", STREAMS, note=_one_log),
    Flag("--local-ranks-filter", "Ranks of each node whose output is shown.", RANKS),
    Flag("--duplicate-stdout-filters", "Refused: search the logs.", NOTHING, refuse=NO_FILTER),
    Flag("--duplicate-stderr-filters", "Refused: search the logs.", NOTHING, refuse=NO_FILTER),
    Flag("--master-addr", "Address of rank 0 (default: this machine).", ADDRESS, "master_addr"),
    Flag("--master-port", "Port of rank 0 (default: a free one).", PORT, "master_port"),
    Flag("--local-addr", "Accepted: see --interface.", TEXT, note=OWN_ADDRESS),
    Flag("--logs-specs", "Others are refused: the run folder has the logs.", DEFAULT,
         refuse=NO_SPECS),
    Flag("--numa-binding", "Refused: use numactl.", NOTHING, refuse=NO_BINDING),
    Flag("--signals-to-handle", "Accepted: all usual signals are passed on.", note=SIGNALS),
    Flag("--shutdown-timeout", "From a signal to SIGKILL, as --grace.", SECONDS, "grace_s"),
    Flag("--virtual-local-rank", "Refused: LOCAL_RANK differs.", NO_SWITCH, refuse=NO_VIRTUAL_RANK),
)
# fmt: on


@dataclass(frozen=True)
class TorchrunFlags:
    """The values of torchrun's flags. `None` and "" stand for flags that were not given.

    `shown` are the local ranks whose output is shown: "", "all", "none", or "0,2".
    """

    processes_per_node: str = ""
    least_nodes: int | None = None
    most_nodes: int | None = None
    node_rank: int | None = None
    endpoint: str = ""
    run_id: str = ""
    join_timeout_s: float | None = None
    max_restarts: int | None = None
    role_name: str = ""
    is_module: bool = False
    is_program: bool = False
    log_dir: str = ""
    shown: str = ""
    master_addr: str = ""
    master_port: int | None = None
    grace_s: float | None = None
    notes: tuple[str, ...] = ()


def understand(options: Mapping[str, object], environment: Mapping[str, str]) -> TorchrunFlags:
    """Parse flags, by their `Flag.name`; `None` and False stand for flags that are not given.

    Flags override PET_… in `environment`. Raises `RequestError` for refused flags, and for values
    that torchrun would not accept either.
    """
    texts = {name: str(value) for name, value in options.items() if value not in (None, False)}
    texts = {**_from_environment(environment), **texts}
    if "standalone" in texts:  # one node, in spite of other flags
        texts = {**texts, "nnodes": "1", "rdzv_endpoint": ""}
    flags = [flag for flag in FLAGS if flag.name in texts]
    values: dict[str, Any] = {flag.name: flag.read(texts[flag.name]) for flag in flags}
    if "module" in values and "no_python" in values:
        raise RequestError(
            asked="--module --no-python",
            found="both",
            why="a module is run by Python, a program by itself",
            do="leave one away",
        )
    least, most = values.get("nnodes", (None, None))
    return TorchrunFlags(
        **{flag.field: values[flag.name] for flag in flags if flag.field},
        least_nodes=least,
        most_nodes=most,
        shown=_shown(*(values.get(n, "") for n in ("tee", "redirects", "local_ranks_filter"))),
        notes=tuple(filter(None, (flag.note_for(texts[flag.name]) for flag in flags))),
    )


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The values of PET_…, by the names of their flags."""
    texts = {flag: environment.get(f"PET_{flag.name.upper()}", "") for flag in FLAGS}
    return {
        f.name: text for f, text in texts.items() if text and (text != "0" or not f.kind.is_switch)
    }


def _shown(tee: str, hidden: str, only: str) -> str:
    """The local ranks that are shown: those of --tee; else those of the filter, unless hidden."""
    if tee:
        return only or "all" if tee == "all" or only else tee
    if hidden == "all":
        return "none"
    if not hidden:
        return only
    shown = {int(n) for n in (only or "0").split(",")} - {int(n) for n in hidden.split(",")}
    return ",".join(map(str, sorted(shown))) or "none"


def processes_from(text: str, cpus: int, gpus: int) -> int:
    """The number of processes that `--nproc-per-node` means on a machine with these devices."""
    if text == "gpu" and not gpus:
        raise RequestError(
            asked="--nproc-per-node gpu",
            found="no GPU that this process sees",
            why="there is one process per GPU",
            do="--nproc-per-node with a number, or see what nvidia-smi and "
            "CUDA_VISIBLE_DEVICES say",
        )
    return {"cpu": cpus, "gpu": gpus, "auto": gpus or cpus}.get(text) or int(text)
