"""`allranks doctor --gpus`: which promises hold on the GPUs of this machine? Prints nothing.

Each row of `ROWS` is a promise and a function, which trains small tasks on the devices
(`allranks.programs.gpus`) and returns a `RowResult`. If ranks outnumber the devices, they share
them. A row that raises or hangs is recorded, and the next one begins.
"""

from __future__ import annotations

import dataclasses
import datetime
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from allranks.catalog import TORCH
from allranks.checkpoint.files import as_json, write_whole
from allranks.errors import AllranksError, Interrupted, ProgramError, RequestError, Stopped
from allranks.job.config import Resolved, resolve
from allranks.job.engines import check_installed, preload_for
from allranks.launcher.describe import answer_of_process
from allranks.launcher.nodes.facts import facts
from allranks.launcher.places import AgentPlace, Rendezvous, find_place
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import Result, run_job
from allranks.tools.check.against_single import (
    TRACE_BYTES,
    Check,
    CheckedRun,
    CheckPlan,
    undisturbed,
)

PROGRAM = "allranks.programs.gpus"
RECORD, PAGE = "gpus.json", "gpus.md"
SEEN, NOT_SEEN, FAILED = "seen", "not seen", "failed"
ABOUT = ("allranks", "source", "python", "packages", "system", "processor", "cores", "gpus")
VERSIONS = ("allranks", "torch", "cuda", "cudnn", "nccl")
BUDGET_S = 150.0  # no row begins later, but where rows were named
PROBE_S = 60.0
HANG_S = 20.0  # the first kernels of a cold machine take some of it
STANDS_STILL_S = 45.0
MOST_RANKS = 8  # that all tasks can be cut for
STEPS, KILLED_AT, SAVED_EVERY = 8, 5, 3
CLOSE = 1e-9
MOST_LAUNCHES = MOST_TIME = 1.1  # of a loop by hand
WITH_MEMORY = ("cuda", "xpu")  # of their own, which may be filled without harm to the host
LONGEST = 3000  # characters of what an error says


@dataclass(frozen=True)
class RowResult:
    """Whether a promise holds; `good` is `None` if that cannot be tested here, and `why`."""

    good: bool | None
    why: str = ""
    details: dict[str, Any] = field(default_factory=dict)


class References(Check):
    """A check that runs the references in one process once for all strategies of a task."""

    def __init__(self, machine: Machine, resolved: Resolved, ranks: int) -> None:
        plan = CheckPlan((ranks,), ranks, machine.shards, TRACE_BYTES)
        job = undisturbed(resolved.job)
        super().__init__(resolved, job, Path(job.run_dir), machine.server, plan)
        self.machine = machine

    def run(self, name: str, job: Any) -> CheckedRun:
        key = repr(dataclasses.replace(job, run_dir=""))
        if job.ranks > 1 or job.replay:
            return super().run(name, job)
        if key not in self.machine.references:
            self.machine.references[key] = super().run(name, job)
        return self.machine.references[key]

    def clear(self, *runs: CheckedRun) -> None:
        references = self.machine.references.values()
        super().clear(*(run for run in runs if run not in references))


@dataclass
class Machine:
    """Trains on devices of a kind, by one fork server, in run folders below `folder`.

    `count` devices are on each node, `ranks` train on all nodes, and `facts` describe a device.
    `more` has further options of every job of several ranks, such as its place.
    """

    server: ForkServer
    folder: Path
    device: str
    count: int
    ranks: int
    facts: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    words: tuple[str, ...] = ()
    hang_s: float = HANG_S
    references: dict[str, CheckedRun] = field(default_factory=dict)
    probes: dict[str, dict[str, Any] | AllranksError] = field(default_factory=dict)
    _number: int = 0

    def __post_init__(self) -> None:
        self.devices = self.count * int(self.more.get("nodes", 1))
        self.shards = max(MOST_RANKS, self.ranks)

    def on(self, ranks: int) -> str:
        """In words: this number of ranks and their devices."""
        if self._shares(ranks):
            return f"{ranks} ranks share {self.devices} {self.device}"
        return f"{ranks} {'rank' if ranks == 1 else 'ranks'}, {self.device}"

    def _shares(self, ranks: int) -> bool:
        return self.device != "cpu" and ranks > self.devices

    def job(self, task: str, ranks: int, *settings: str, **flags: Any) -> Resolved:
        """A job of a task of `PROGRAM`; ranks that outnumber the devices share them."""
        self._number += 1
        options = {
            **(self.more if ranks > 1 else {}),
            **{"ranks": ranks, "device": self.device, "threads": 1, "steps": STEPS},
            **{"hang_timeout": STANDS_STILL_S, "first_check": "off", "witness": "off"},
            "run_dir": str(self.folder / f"run-{self._number}"),
            **({"share_device": True} if self._shares(ranks) else {}),
            **flags,
        }
        return resolve(f"{PROGRAM}:{task}", options, (f"shards={self.shards}", *settings))

    def run(self, resolved: Resolved) -> Result:
        """Run a job to its end, here or on the nodes."""
        on_nodes = isinstance(find_place(resolved.job.place, self.rendezvous), AgentPlace)
        server = None if on_nodes else self.server
        return run_job(resolved, server, rendezvous=self.rendezvous, words=self.words)

    def train(self, task: str, ranks: int, *settings: str, **flags: Any) -> dict[str, Any]:
        """The summary of a job that ended well."""
        return self.run(self.job(task, ranks, *settings, **flags)).summary

    def failure(self, task: str, ranks: int, **flags: Any) -> str:
        """The report of a job that must fail; "" if it did not."""
        try:
            self.train(task, ranks, **flags)
        except ProgramError as error:
            return str(error)
        return ""

    def probe(self, name: str) -> dict[str, Any]:
        """The result of a probe of `PROGRAM`, which runs in a process of its own."""
        if name not in self.probes:
            try:
                self.probes[name] = ask(self.server, name, self.device)
            except AllranksError as error:  # several rows use one probe
                self.probes[name] = error
        answer = self.probes[name]
        if isinstance(answer, AllranksError):
            raise answer
        return answer

    @cached_property
    def digest_of_one(self) -> str:
        """The weights that one rank makes of `Pictures` under --bitwise."""
        return str(self.train("Pictures", 1, bitwise=True)["weights_sha256"])


def ask(server: ForkServer, name: str, device: str) -> dict[str, Any]:
    """The result of a probe of `PROGRAM`."""
    answer = answer_of_process(
        server,
        f"{PROGRAM}:probe",
        lambda folder: {"run_dir": folder, "probe": name, "device": device, "limit_s": PROBE_S},
        "found",
        {},
        process_name=f"the probe {name!r}",
        if_interrupted="nothing was measured",
    )
    return dict(answer["found"])


# --- the rows -------------------------------------------------------------------------------------


def bits(machine: Machine, ranks: int) -> RowResult:
    many = machine.train("Pictures", ranks, bitwise=True)["weights_sha256"]
    clipped = [
        machine.train("Pictures", n, "clip_norm=0.05", bitwise=True)["weights_sha256"]
        for n in (1, ranks)
    ]
    digests = {"1": machine.digest_of_one, str(ranks): many, "clipped": clipped}
    return RowResult(many == machine.digest_of_one and clipped[0] == clipped[1], details=digests)


def equal(task: str, strategy: str, machine: Machine, ranks: int) -> RowResult:
    """Compare with one process on such a device, in fp64, step by step: as `allranks check`."""
    resolved = machine.job(task, ranks, strategy=strategy, precision="fp64", steps=4)
    (look,) = References(machine, resolved, ranks).in_float64()
    if look.first is not None:
        text = f"{look.first}\n{look.cause or ''}"
        return RowResult(False, text.partition("\n")[0], _end_of(text))
    compared = look.comparison
    return RowResult(True, "", {"largest_difference": compared.largest, "steps": compared.steps})


def kill(machine: Machine, ranks: int) -> RowResult:
    flags = {"checkpoint_every": SAVED_EVERY, "inject": f"kill@rank=1,step={KILLED_AT}"}
    summary = machine.train("Pictures", ranks, bitwise=True, max_restarts=1, **flags)
    again, restarts = summary["weights_sha256"], summary["restarts"]
    good = again == machine.digest_of_one and restarts == 1
    return RowResult(good, "", {"1": machine.digest_of_one, "killed": again, "restarts": restarts})


def hang(machine: Machine, ranks: int) -> RowResult:
    flags = {"hang_timeout": machine.hang_s, "inject": f"hang@rank=1,step={KILLED_AT}"}
    text = machine.failure("Pictures", ranks, steps=400, **flags)
    lines = [line[:140] for line in text.splitlines() if " is missing" in line or " waits " in line]
    names = [line for line in lines if " is missing" in line]
    good = len(names) == 1 and names[0].startswith("rank 1 ")
    return RowResult(
        good, "" if good else "another rank is named, or none", {"lines": lines, **_end_of(text)}
    )


def corrupt(machine: Machine, ranks: int) -> RowResult:
    flags = {"verify_every": 2, "inject": "corrupt@rank=1,step=3"}
    report = machine.failure("Pictures", ranks, **flags)
    return _verdict("must hold the same weights" in report, report)


def memory(machine: Machine, ranks: int) -> RowResult:
    if machine.device not in WITH_MEMORY:
        return RowResult(None, f"{machine.device} may use the memory of the host: not filled")
    text = machine.failure("TooLarge", ranks)
    return _verdict("out of memory" in text and ("held on" in text or not is_cuda(machine)), text)


def _verdict(good: bool, report: str) -> RowResult:
    return RowResult(good, "" if good else "the report does not say so", _end_of(report))


def _end_of(report: str) -> dict[str, Any]:
    return {"said": report[-LONGEST:]}


def is_cuda(machine: Machine) -> bool:
    """Whether torch counts what costs time and memory on the device."""
    return machine.device == "cuda"


def host(machine: Machine, ranks: int) -> RowResult:
    answer = machine.probe("host")
    return RowResult(answer["largest"] < CLOSE, details=answer)


def waits(machine: Machine, ranks: int) -> RowResult:
    return _counted(machine, "waits", lambda ours, hand: ours == 0)


def launches(machine: Machine, ranks: int) -> RowResult:
    return _counted(machine, "launches", lambda ours, hand: ours <= MOST_LAUNCHES * hand)


def _counted(machine: Machine, counter: str, is_good: Callable[[int, int], bool]) -> RowResult:
    """Compare a counter of a step with a hand-written loop; if that has 0, nothing was counted."""
    answer = machine.probe("step")
    ours, hand = (answer[loop].get(counter, 0) for loop in ("allranks", "hand"))
    if not hand:
        return RowResult(None, f"torch counts no {counter} here, not even by hand", answer)
    return RowResult(is_good(ours, hand), details=answer)


def pace(machine: Machine, ranks: int) -> RowResult:
    answer = machine.probe("step")
    if not is_cuda(machine):
        return RowResult(None, f"promised of cuda alone, not of {machine.device}", answer)
    return RowResult(answer["ratio"] <= MOST_TIME, details=answer)


@dataclass(frozen=True)
class Promise:
    """A promise, and the function that tests it.

    `ranks` is the number that it needs: a number, "all", or "even", which divides 8.
    """

    text: str
    look: Callable[[Machine, int], RowResult]
    ranks: int | str = "all"

    def ranks_on(self, machine: Machine) -> int:
        """The number of ranks that it needs on this machine."""
        if isinstance(self.ranks, int):
            return self.ranks
        if self.ranks == "all":
            return machine.ranks
        return max(n for n in (2, 4, MOST_RANKS) if n <= machine.ranks)


def _equal(task: str, strategy: str, ranks: int | str = "all") -> Promise:
    text = f"{strategy} has the result of one process"
    return Promise(text, partial(equal, task, strategy), ranks)


ROWS: dict[str, Promise] = {
    "bits": Promise("--bitwise: equal bits on 1 rank and on several, clipped too", bits),
    "ddp": _equal("Pictures", "ddp"),
    "zero1": _equal("Pictures", "zero1"),
    "fsdp": _equal("Pictures", "fsdp"),
    "kill": Promise("a rank is killed: the job goes on, with the same bits", kill),
    "hang": Promise("a rank stands still: it alone is named", hang),
    "waits": Promise("the host waits for no number of a step (fused optimizer)", waits, 1),
    "launches": Promise(f"a step launches at most {MOST_LAUNCHES} x by hand", launches, 1),
    "pace": Promise(f"a step takes at most {MOST_TIME} x the time by hand", pace, 1),
    "host": Promise(f"fp64: losses of the CPU, within {CLOSE:g}", host, 1),
    "tensor": _equal("Words", "tensor", "even"),
    "1f1b": _equal("Layers", "1f1b", "even"),
    "zero2": _equal("Pictures", "zero2"),
    "hsdp": _equal("Pictures", "hsdp:shard=2", 4),
    "context": _equal("Words", "context", "even"),
    "expert": _equal("ExpertWords", "expert", "even"),
    "mesh": _equal("Layers", "mesh:tensor=2,pipeline=2", 4),
    "tree": _equal("Pictures", "ddp:reduce=tree"),
    "gpipe": _equal("Layers", "gpipe", "even"),
    "zero-bubble": _equal("Layers", "zero-bubble", "even"),
    "corrupt": Promise("a bit of the weights flips on one rank: it is found", corrupt),
    "memory": Promise("no memory is left: the report says so, and what is held", memory, 1),
}


# --- from a setting to rows -----------------------------------------------------------------------


def examine(
    text: str, folder: Path, tell: Callable[[str], None], ranks: int | None = None, **more: Any
) -> dict[str, Any]:
    """Test the rows that `text` names, and return their record, also in `folder` as a page.

    Both files are rewritten after each row, with a line to `tell`; `more` are fields of a
    `Machine`. Raises `RequestError`, and then creates no folder.
    """
    names, record, rows = names_of(text), dict[str, Any](), list[dict[str, Any]]()
    with machine_of(folder, "", ranks, **more) as machine:
        for row in rows_of(machine, names, float("inf") if text else BUDGET_S):
            rows.append(row)
            record = record_of(machine, rows)
            write_whole(folder / RECORD, f"{as_json(record)}\n".encode())
            write_whole(folder / PAGE, page_of(record).encode())
            tell("{verdict:>8}  {name}: {promise} ({on}, {seconds} s)".format(**row))
            tell(row["why"])
    return record


def names_of(text: str) -> list[str]:
    """The rows that a text names, all of them if it is empty; raises `RequestError`."""
    names = [name.strip() for name in text.split(",") if name.strip()] or list(ROWS)
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        raise RequestError(
            asked=f"doctor --gpus {text}",
            found=f"no row {', '.join(unknown)}",
            why="each name is that of a promise",
            do=f"some of {','.join(ROWS)}, or --gpus alone for all",
        )
    return names


@contextmanager
def machine_of(
    folder: Path, device: str = "", ranks: int | None = None, **more: Any
) -> Iterator[Machine]:
    """The devices of this machine, or `device`, ready to train; `more` are fields of a `Machine`.

    Raises `RequestError` if torch has no accelerator; else creates `folder`.
    """
    check_installed(TORCH, PROGRAM)
    with ForkServer((*preload_for(PROGRAM), PROGRAM)) as server:
        facts = ask(server, "devices", device)
        kind, count = facts.pop("device"), facts.pop("count")
        if not count:
            build = "" if facts["is_built_in"] else " (a CPU build)"
            raise RequestError(
                asked="doctor --gpus",
                found=f"no GPU that torch {facts['torch']}{build} can use",
                why="it trains on the GPUs of this machine, to see which promises hold there",
                do="a build of torch for them, and their driver; `allranks doctor` says more",
            )
        usual = min(MOST_RANKS, count * int(more.get("more", {}).get("nodes", 1)))
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".allranks-", dir=folder) as scratch:
            ranks = max(2, ranks or usual)
            yield Machine(server, Path(scratch), kind, count, ranks, facts, **more)


def rows_of(
    machine: Machine, names: Sequence[str], budget_s: float = float("inf")
) -> Iterator[dict[str, Any]]:
    """The rows of these names as they end; none begins after the budget."""
    ends_at = time.monotonic() + budget_s
    for name in names:
        promise, ranks, begun = ROWS[name], ROWS[name].ranks_on(machine), time.monotonic()
        outcome = RowResult(None, f"no time was left; by itself: --gpus={name}")
        if begun < ends_at:
            outcome = result_of(promise, machine, ranks)
        verdict = {True: SEEN, False: FAILED, None: NOT_SEEN}[outcome.good]
        row = {"name": name, "promise": promise.text, "on": machine.on(ranks), "verdict": verdict}
        seconds = round(time.monotonic() - begun, 1)
        yield {**row, "why": outcome.why, "found": outcome.details, "seconds": seconds}


def result_of(promise: Promise, machine: Machine, ranks: int) -> RowResult:
    """The result of a promise. An error of its function is a result; an interrupt is raised."""
    try:
        return promise.look(machine, ranks)
    except (Interrupted, Stopped) as error:  # its checkpoint is gone with the scratch folder
        raise Interrupted("stopped before all rows were looked at") from error
    except RequestError as error:
        return RowResult(None, f"refused: {error.found}", {"said": str(error)})
    except ProgramError as error:
        return RowResult(False, error.cause or str(error).partition("\n")[0], _end_of(str(error)))
    except Exception as error:  # a fault of this row must not end the others
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        return RowResult(False, why, _end_of(traceback.format_exc()))


def record_of(machine: Machine, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record to attach to a bug report."""
    node = facts().to_data()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    devices = {name: getattr(machine, name) for name in ("device", "count", "ranks", "facts")}
    about = {"nodes": machine.more.get("nodes", 1), **{name: node[name] for name in ABOUT}}
    return {"date": date, **about, "devices": devices, "rows": list(rows)}


def page_of(record: dict[str, Any]) -> str:
    """The record as a page of Markdown."""
    devices, rows = record["devices"], record["rows"]
    known = {"allranks": record["allranks"], **devices["facts"]}
    versions = [f"{name} {known[name]}" for name in VERSIONS if known.get(name)]
    counts = Counter(row["verdict"] for row in rows)
    lines = [
        f"# {devices['count']} × {known.get('chip') or devices['device']}, {record['date'][:10]}",
        "",
        ", ".join(versions),
        "",
        ", ".join(f"{counts[verdict]} {verdict}" for verdict in (SEEN, NOT_SEEN, FAILED)),
        "",
    ]
    return "\n".join([*lines, *table_of(rows), ""])


def table_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Rows as a table of Markdown, with columns for a terminal, too."""
    heads = {
        "name": "row",
        "verdict": "verdict",
        "on": "on",
        "promise": "promise",
        "why": "because",
    }
    cells = [list(heads.values())]
    cells += [[row[name][:160].replace("|", "\\|") for name in heads] for row in rows]
    wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = [[c.ljust(width) for c, width in zip(row, wide, strict=True)] for row in cells]
    table.insert(1, ["-" * width for width in wide])
    return [f"| {' | '.join(row)} |" for row in table]
