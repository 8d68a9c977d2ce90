"""torchrun's own flags, so that `allranks run` can stand where `torchrun` stood. Pure.

Each flag is honoured; or accepted with a note, where there is nothing left for it to do; or
refused, with what to use instead. None is passed over in silence. Both spellings are understood
(`--nproc-per-node`, `--nproc_per_node`), and so are the variables PET_…, by which an operator of a
cluster sets the same flags.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from allranks.errors import RequestError

BACKENDS = ("static", "c10d")
COUNTS = ("auto", "cpu", "gpu")


@dataclass(frozen=True)
class Flag:
    """One of torchrun's flags: its words, whether a value follows, what it does here."""

    words: tuple[str, ...]
    meaning: str
    takes_value: bool = True

    @property
    def name(self) -> str:
        """As a Python name: `nproc_per_node`."""
        return self.words[0].removeprefix("--").replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """All words that it can be written with."""
        return tuple(dict.fromkeys((*self.words, f"--{self.name}")))


FLAGS = (
    Flag(("--nproc-per-node",), "Processes per node: a number, cpu, gpu or auto."),
    Flag(("--nnodes",), "Nodes: N, or MIN:MAX."),
    Flag(("--node-rank",), "Which of the nodes this is, from 0."),
    Flag(("--rdzv-backend",), "static or c10d; here they are the same."),
    Flag(("--rdzv-endpoint",), "HOST:PORT where the nodes meet."),
    Flag(("--rdzv-id",), "The name of the job."),
    Flag(("--rdzv-conf",), "KEY=VALUE,…: join_timeout or timeout, in seconds."),
    Flag(("--standalone",), "One node.", takes_value=False),
    Flag(("--max-restarts",), "Start all again after a fault, so many times (default 0)."),
    Flag(("--monitor-interval",), "Accepted: an exit is seen at once."),
    Flag(("--start-method",), "Accepted: the command is started as it is."),
    Flag(("--event-log-handler",), "null only."),
    Flag(("--role",), "ROLE_NAME of all processes."),
    Flag(("--module", "-m"), "The command is a Python module.", takes_value=False),
    Flag(("--no-python",), "The command is a program, whatever its name.", takes_value=False),
    Flag(("--run-path",), "Accepted: see --warm.", takes_value=False),
    Flag(("--log-dir",), "The folder in which the run folder is made."),
    Flag(("--redirects", "-r"), "Ranks whose output goes to their log only."),
    Flag(("--tee", "-t"), "Ranks whose output is shown too."),
    Flag(("--local-ranks-filter",), "Ranks of each node whose output is shown."),
    Flag(("--duplicate-stdout-filters",), "Refused: search the logs."),
    Flag(("--duplicate-stderr-filters",), "Refused: search the logs."),
    Flag(("--master-addr",), "The address of rank 0."),
    Flag(("--master-port",), "The port of rank 0."),
    Flag(("--local-addr",), "The address of this node."),
    Flag(("--logs-specs",), "default only."),
    Flag(("--numa-binding",), "Refused: use numactl."),
    Flag(("--signals-to-handle",), "Accepted: all usual signals are passed on."),
    Flag(("--shutdown-timeout",), "Seconds from a signal to SIGKILL, as --grace."),
    Flag(("--virtual-local-rank",), "Refused.", takes_value=False),
)


@dataclass(frozen=True)
class Asked:
    """What torchrun's flags ask for. `None` and "" stand for what was not said.

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
    local_addr: str = ""
    grace_s: float | None = None
    notes: tuple[str, ...] = field(default=())


def understand(given: Mapping[str, object], environment: Mapping[str, str]) -> Asked:
    """What the flags ask for, by their names as in `Flag.name`; `None` and False are not given.

    Flags go before PET_… in `environment`. Raises `RequestError` for what is refused, and for
    values that torchrun would not take either.
    """
    values = {name: str(value) for name, value in given.items() if value not in (None, False)}
    values |= {n: v for n, v in _from_environment(environment).items() if n not in values}
    _refuse(values)
    least, most = _nodes(values)
    return Asked(
        processes_per_node=_processes(values.get("nproc_per_node", "")),
        least_nodes=least,
        most_nodes=most,
        node_rank=_whole("node_rank", values),
        endpoint=_endpoint(values),
        run_id="" if values.get("rdzv_id") == "none" else values.get("rdzv_id", ""),
        join_timeout_s=_join_timeout(values.get("rdzv_conf", "")),
        max_restarts=_whole("max_restarts", values),
        role_name=values.get("role", ""),
        is_module="module" in values,
        is_program="no_python" in values,
        log_dir=values.get("log_dir", ""),
        shown=_shown(values),
        master_addr=values.get("master_addr", "").strip("[]"),
        master_port=_whole("master_port", values, most=65535),
        local_addr=values.get("local_addr", ""),
        grace_s=_seconds(values),
        notes=_notes(values),
    )


def processes_from(text: str, cpus: int, gpus: int) -> int:
    """How many processes `--nproc-per-node` asks for on a machine with these devices."""
    if text == "gpu" and not gpus:
        raise RequestError(
            asked="--nproc-per-node gpu",
            found="no GPU that this process sees",
            why="there is one process per GPU",
            do="--nproc-per-node with a number, or see what nvidia-smi and "
            "CUDA_VISIBLE_DEVICES say",
        )
    return {"cpu": cpus, "gpu": gpus, "auto": gpus or cpus}.get(text) or int(text)


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What PET_… say, by the names of their flags."""
    found = {}
    for flag in FLAGS:
        value = environment.get(f"PET_{flag.name.upper()}", "")
        if value and (flag.takes_value or value != "0"):
            found[flag.name] = value
    return found


def _refuse(values: Mapping[str, str]) -> None:
    """Raise for flags whose purpose cannot be served here."""
    usual = {"rdzv_backend": (*BACKENDS, ""), "event_log_handler": ("null", "")}
    usual["logs_specs"] = ("default", "")
    for name, (why, do) in _REFUSED.items():
        if name in values and values[name] not in usual.get(name, ()):
            word = f"--{name.replace('_', '-')}"
            value = "" if values[name] == "True" else f" {values[name]}"
            raise RequestError(asked=f"{word}{value}", found="a flag of torchrun", why=why, do=do)
    if "module" in values and "no_python" in values:
        raise RequestError(
            asked="--module --no-python",
            found="both",
            why="a module is run by Python, a program by itself",
            do="leave one away",
        )


_REFUSED = {
    "rdzv_backend": (
        "the nodes of a job meet at an agent of their own, not at a server that somebody keeps",
        "--rdzv-backend c10d with --rdzv-endpoint HOST:PORT of the first node",
    ),
    "event_log_handler": (
        "events are written into the run folder, as lines of JSON",
        "leave it away, and read events.jsonl",
    ),
    "logs_specs": (
        "the output of each rank is written into the run folder, as it is",
        "leave it away, and read logs/rank-000.log",
    ),
    "duplicate_stdout_filters": (
        "the output of each rank is in a log of its own, whole",
        "leave it away, and search the logs: grep PATTERN RUN/logs/*",
    ),
    "duplicate_stderr_filters": (
        "the output of each rank is in a log of its own, whole",
        "leave it away, and search the logs: grep PATTERN RUN/logs/*",
    ),
    "numa_binding": (
        "processes are not bound to processors here",
        "bind them in the command: allranks run … -- sh -c "
        "'exec numactl --cpunodebind=$LOCAL_RANK python train.py'",
    ),
    "virtual_local_rank": (
        "LOCAL_RANK tells local processes apart, for all frameworks alike",
        "leave it away; to hide devices: allranks run … -- sh -c "
        "'CUDA_VISIBLE_DEVICES=$LOCAL_RANK exec python train.py'",
    ),
}


def _nodes(values: Mapping[str, str]) -> tuple[int | None, int | None]:
    """The fewest and the most nodes; `--standalone` is one node, whatever else is said."""
    if "standalone" in values:
        return 1, 1
    if "nnodes" not in values:
        return None, None
    least, _, most = values["nnodes"].partition(":")
    if not (_is_whole(least) and _is_whole(most or least)):
        raise _unreadable("nnodes", values, "a number of nodes, or MIN:MAX")
    low, high = int(least), int(most or least)
    if not 0 < low <= high:
        raise _unreadable("nnodes", values, "at least one node, and MIN is not above MAX")
    return low, high


def _endpoint(values: Mapping[str, str]) -> str:
    return "" if "standalone" in values else values.get("rdzv_endpoint", "")


def _processes(text: str) -> str:
    if text and text not in COUNTS and not (_is_whole(text) and int(text)):
        raise _unreadable(
            "nproc_per_node", {"nproc_per_node": text}, f"a number, or {', '.join(COUNTS)}"
        )
    return text


def _whole(name: str, values: Mapping[str, str], most: int = 1 << 30) -> int | None:
    text = values.get(name)
    if text is None:
        return None
    if not _is_whole(text) or int(text) > most:
        raise _unreadable(name, values, f"a whole number from 0 to {most}")
    return int(text)


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _seconds(values: Mapping[str, str]) -> float | None:
    if "shutdown_timeout" not in values:
        return None
    try:
        seconds = float(values["shutdown_timeout"])
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise _unreadable("shutdown_timeout", values, "a number of seconds")
    return seconds


def _join_timeout(text: str) -> float | None:
    """The seconds that nodes wait for each other; other settings are told of in the notes."""
    settings = dict(part.partition("=")[::2] for part in text.split(",") if part)
    for name in ("join_timeout", "timeout"):
        if name in settings:
            try:
                return float(settings[name])
            except ValueError:
                raise _unreadable("rdzv_conf", {"rdzv_conf": text}, f"{name} in seconds") from None
    return None


def _shown(values: Mapping[str, str]) -> str:
    """Which local ranks are shown: those of --tee; else those of the filter that are not hidden."""
    tee, hidden = (_ranks_of(name, values) for name in ("tee", "redirects"))
    only = values.get("local_ranks_filter", "")
    if only and not all(_is_whole(part.strip()) for part in only.split(",")):
        raise _unreadable("local_ranks_filter", values, "ranks with commas between, like 0,1")
    wanted = {int(part) for part in only.split(",") if part}
    if tee == "all" or (tee and wanted):
        return only or "all"
    if tee:
        return tee
    if hidden == "all":
        return "none"
    if not hidden:
        return only
    left = (wanted or {0}) - {int(part) for part in hidden.split(",")}
    return ",".join(map(str, sorted(left))) or "none"


def _ranks_of(name: str, values: Mapping[str, str]) -> str:
    """The ranks that `3` or `0:3,1:2` names: "all", "0,1", or "" for none."""
    text = values.get(name, "0")
    if text in ("0", "1", "2", "3"):
        return "" if text == "0" else "all"
    found = []
    for part in text.split(","):
        rank, colon, stream = part.partition(":")
        if not (colon and _is_whole(rank) and stream in ("0", "1", "2", "3")):
            raise _unreadable(name, values, "0, 1, 2, 3, or RANK:STREAM,…")
        if stream != "0":
            found.append(rank)
    return ",".join(found)


def _notes(values: Mapping[str, str]) -> tuple[str, ...]:
    """What is accepted and changes nothing, or not all that it says."""
    found = [
        f"--{name.replace('_', '-')}: {note}" for name, note in _NOTED.items() if name in values
    ]
    settings = [part.partition("=")[0] for part in values.get("rdzv_conf", "").split(",") if part]
    idle = [name for name in settings if name not in ("join_timeout", "timeout")]
    if idle:
        found.append(
            f"--rdzv-conf: {', '.join(idle)} would set torch's rendezvous, which is not run"
        )
    for name in ("redirects", "tee"):
        streams = {part.rpartition(":")[2] for part in values.get(name, "0").split(",")}
        if streams & {"1", "2"}:
            found.append(f"--{name}: both streams of a rank go to one log, in order")
    return tuple(found)


_NOTED = {
    "rdzv_backend": "the nodes meet at the first one; torch's rendezvous is not run",
    "monitor_interval": "an exit is seen at once, without looking at intervals",
    "start_method": "the command is started as it is, not by multiprocessing",
    "run_path": "every rank gets a Python of its own; --warm starts from one that has imported",
    "signals_to_handle": "SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are always passed on",
    "log_dir": "the run folder is made in it, with the logs in its folder logs",
}


def _unreadable(name: str, values: Mapping[str, str], kind: str) -> RequestError:
    word = f"--{name.replace('_', '-')}"
    return RequestError(
        asked=f"{word} {values[name]}",
        found=repr(values[name]),
        why=f"{word} takes {kind}",
        do=f"write {word} that way",
    )
