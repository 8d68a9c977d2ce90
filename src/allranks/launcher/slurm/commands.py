"""Talking to Slurm: what this site has, submitting a job, following it to its end.

Every command of Slurm runs through `call`, with a time-out; what goes wrong there is a `PlaceError`
that says which command it was and what it answered.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from allranks.checkpoint.files import write_whole
from allranks.errors import EXIT_INTERRUPTED, EXIT_PLACE_FAILED, PlaceError, RequestError
from allranks.job.job import write_toml
from allranks.launcher.slurm.allocation import expand_nodes
from allranks.launcher.slurm.limits import check_device, check_request, slurm_time
from allranks.launcher.slurm.request import SlurmOptions, SlurmRequest, make_request
from allranks.launcher.slurm.script import render
from allranks.launcher.slurm.site import NumberSource, Partition, Site, load_site, parse_seconds

# --- live ----------------------------------------------------------------------------------------
# A site as Slurm describes itself: the text of `scontrol show`, parsed. Pure.
#
#     scontrol show config                 settings, one a line: `ClusterName = lumi`
#     scontrol --oneliner show partition   a line for each: `PartitionName=gpu MaxTime=3-00:00:00 …`
#     scontrol --oneliner show node      a line for each: `NodeName=g1 CPUTot=40 Gres=gpu:v100:4 …`
#
# A value may have blanks in it (`OS=Linux 5.10.0 #1 SMP`), so a key is a word that begins with a
# capital letter before an `=`. Of the nodes of a partition the largest counts: a job that does not
# fit it fits none.


KEY = re.compile(r"(?:^|\s)([A-Z][\w:/]*)=")
SETTING = re.compile(r"^(\w+)\s*=\s*(.*?)\s*$", re.MULTILINE)
GPUS = re.compile(r"(?:^|,)gpu(?::([^,:()]+))?:([0-9]+)")
NOTHING = ("", "(null)", "N/A", "NONE", "None", "UNLIMITED", "INFINITE")
LEAST_MEMORY_MB = 2  # Slurm reports 1 if it is not configured
SCONTROL = "scontrol"


@dataclass(frozen=True)
class SlurmNode:
    """What one node offers to jobs; `gpu_type` is empty where Slurm names none, or several."""

    cpus: int
    cores: int
    memory_mb: int | None
    gpus: int
    gpu_type: str


def parse_site_facts(config: str, partitions: str, nodes: str, *, as_of: str) -> Site:
    """The site that these three answers describe; raises `PlaceError` if they are none."""
    settings = dict(SETTING.findall(config))
    if "ClusterName" not in settings:
        raise PlaceError(f"`scontrol show config` names no cluster: {config[:200]!r}")
    rows = [parse_fields(line) for line in nodes.splitlines() if line.startswith("NodeName=")]
    offers = {row["NodeName"]: _node(row) for row in rows}
    consumable = "MEMORY" in settings.get("SelectTypeParameters", "").upper()
    counts = [
        _partition(parse_fields(line), offers, consumable)
        for line in partitions.splitlines()
        if line.startswith("PartitionName=")
    ]
    usual = [
        row["PartitionName"]
        for row in map(parse_fields, partitions.splitlines())
        if row.get("Default") == "YES"
    ]
    name = settings["ClusterName"]
    version = settings.get("SLURM_VERSION", "")
    return Site(
        name=name,
        title=f"cluster {name}",
        partitions={partition.name: partition for partition in counts},
        default_partition=usual[0] if usual else "",
        memory_flag="mem",
        sources={SCONTROL: NumberSource("scontrol show", as_of, f"Slurm {version}".strip())},
    )


def site_as_toml(site: Site) -> str:
    """A profile that `--cluster FILE` takes, with what Slurm does not know left for a person."""
    top = {
        "name": site.name,
        "title": site.title,
        "default_partition": site.default_partition or None,
        "account_required": site.account_required,
        "memory_flag": site.memory_flag,
    }
    parts = [
        f"# {site.title}, as Slurm described itself. It does not know modules, containers and "
        "networks:\n# add them as in `allranks cluster show template`.\n\n" + write_toml(top)
    ]
    for name, source in site.sources.items():
        row = {"url": source.url, "as_of": source.as_of, "version": source.version or None}
        parts.append(f"[sources.{_key(name)}]\n{write_toml(dict(row))}")
    for partition in site.partitions.values():
        numbers = partition.numbers()
        limit = numbers.pop("time_limit_s", None)
        if limit is not None:
            numbers["time_limit"] = slurm_time(limit)
        row = {"source": partition.source, **numbers}
        parts.append(f"[partitions.{_key(partition.name)}]\n{write_toml(row)}")
    return "\n".join(parts)


def parse_fields(line: str) -> dict[str, str]:
    """`NodeName=n1 OS=Linux 5.10 CPUTot=4` -> its keys and values, blanks in values kept."""
    marks = list(KEY.finditer(line))
    ends = [mark.start() for mark in marks[1:]] + [len(line)]
    return {mark[1]: line[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=True)}


def _node(row: dict[str, str]) -> SlurmNode:
    cpus = _count(row.get("CPUEfctv")) or _count(row.get("CPUTot")) or 1
    threads = _count(row.get("ThreadsPerCore")) or 1
    memory = _count(row.get("RealMemory")) or 0
    memory -= _count(row.get("MemSpecLimit")) or 0
    gres = [(kind, int(number)) for kind, number in GPUS.findall(row.get("Gres", ""))]
    kinds = Counter(kind for kind, _ in gres)
    return SlurmNode(
        cpus=cpus,
        cores=max(1, cpus // threads),
        memory_mb=memory if memory >= LEAST_MEMORY_MB else None,
        gpus=sum(number for _, number in gres),
        gpu_type=next(iter(kinds)) if len(kinds) == 1 else "",
    )


def _partition(row: dict[str, str], offers: dict[str, SlurmNode], consumable: bool) -> Partition:
    name = row["PartitionName"]
    listed = row.get("Nodes", "")
    try:
        names = () if listed in NOTHING else expand_nodes(listed)
    except RequestError as error:
        raise PlaceError(f"the nodes of partition {name} cannot be read: {error.found}") from None
    nodes = [offers[node] for node in names if node in offers]
    cpus = _largest([node.cpus for node in nodes], _count(row.get("MaxCPUsPerNode")))
    cores = _largest([node.cores for node in nodes], None)
    memory = _largest(
        [node.memory_mb for node in nodes if node.memory_mb is not None],
        _count(row.get("MaxMemPerNode")),
    )
    gpus = max((node.gpus for node in nodes), default=None)
    kinds = {node.gpu_type for node in nodes if node.gpus}
    kind = f"{next(iter(kinds))}:" if len(kinds) == 1 and "" not in kinds else ""
    most = _count(row.get("MaxNodes"))
    return Partition(
        name=name,
        cpus=cpus,
        cores=None if cores is None or cpus is None or cores >= cpus else cores,
        memory_mb=memory,
        memory_share_mb=memory if consumable else None,
        gpus=gpus,
        gpu_request=f"--gres=gpu:{kind}{{count}}",
        min_nodes=max(1, _count(row.get("MinNodes")) or 1),
        max_nodes=min(most or len(nodes), len(nodes)) if nodes else most,
        time_limit_s=parse_seconds(row.get("MaxTime", "")),
        whole_nodes=row.get("OverSubscribe", "").startswith("EXCLUSIVE"),
        source=SCONTROL,
    )


def _largest(values: list[int], most: int | None) -> int | None:
    largest = max(values, default=None)
    return most if largest is None else largest if most is None else min(largest, most)


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,12}", text) else None


def _key(name: str) -> str:
    bare = re.fullmatch(r"[A-Za-z0-9_-]+", name)
    return name if bare else '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


COMMAND_TIMEOUT_S = 60.0  # a busy controller answers late; one that is down never does
POLL_S = 2.0
AFTER_END_S = 10.0  # what the nodes wrote last may reach this machine late
CHUNK_BYTES = 1 << 20
JOB_ID = re.compile(r"([0-9]+)(?:;[^\s;]+)?")
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
ACTIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")
UNKNOWN_JOB = "Invalid job id"
Write = Callable[[bytes], None]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class JobState:
    """One look at a job: Slurm's word for its state, and how it ended, where it has.

    `exit_code` is that of its batch script, `signal` what killed it (0: nothing); both `None` while
    it is unknown. `reason` is why it waits or failed, in Slurm's word.
    """

    state: str
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None
    restarts: int = 0

    @property
    def over(self) -> bool:
        return self.state not in (*WAITING, *ACTIVE)


def call(*words: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """The standard output of one command of Slurm; raises `PlaceError` for all that goes wrong.

    Variables that would change what sbatch reads in a script (`SBATCH_…`) are not handed on.
    """
    environment = {n: v for n, v in os.environ.items() if not n.startswith("SBATCH_")}
    environment["LC_ALL"] = "C.UTF-8"
    try:
        done = subprocess.run(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise PlaceError(f"there is no `{words[0]}` on this machine: is Slurm here?") from None
    except subprocess.TimeoutExpired:
        late = f"`{' '.join(words[:3])}` did not answer within {timeout_s:g} s"
        raise PlaceError(f"{late}: is Slurm's controller up?") from None
    except OSError as error:
        raise PlaceError(f"`{words[0]}` cannot be started: {error}") from None
    if done.returncode != 0:
        output = (done.stderr or done.stdout).decode(errors="replace").strip()
        problem = output or f"exit code {done.returncode}"
        raise PlaceError(f"Slurm refused `{' '.join(words[:3])}`: {problem}")
    return done.stdout.decode(errors="replace")


def is_here() -> bool:
    """Whether this machine has Slurm's commands."""
    return shutil.which("scontrol") is not None


def discover() -> Site:
    """This machine's own site, as Slurm describes it now."""
    config = call("scontrol", "show", "config")
    partitions = call("scontrol", "--oneliner", "show", "partition")
    nodes = call("scontrol", "--oneliner", "show", "node")
    return parse_site_facts(config, partitions, nodes, as_of=time.strftime("%Y-%m-%d"))


def send(script: Path) -> int:
    """Send a batch script; returns the number of the job."""
    answer = call("sbatch", "--parsable", "--export=NONE", str(script)).strip()
    match = JOB_ID.fullmatch(answer.splitlines()[-1]) if answer else None
    if match is None:
        raise PlaceError(f"sbatch took {script}, and named no job: {answer!r}")
    return int(match[1])


def state_of(job_id: int) -> JobState | None:
    """The job as Slurm sees it now; `None` once Slurm has forgotten it, minutes after its end."""
    try:
        text = call("scontrol", "--oneliner", "show", "job", str(job_id))
    except PlaceError as error:
        if UNKNOWN_JOB in str(error):
            return None
        raise
    fields = parse_fields(text)
    state = fields.get("JobState", "").split(" ")[0]
    code, _, signal = fields.get("ExitCode", "").partition(":")
    over = JobState(state).over
    return JobState(
        state=state,
        reason=fields.get("Reason", "").replace("(null)", ""),
        exit_code=int(code) if over and code.isdigit() else None,
        signal=int(signal) if over and signal.isdigit() else None,
        restarts=int(fields["Restarts"]) if fields.get("Restarts", "").isdigit() else 0,
    )


def end_time_of(job_id: int) -> float | None:
    """When the time of this job is over, in seconds since 1970; `None` without a limit.

    For versions before 23.02, which do not tell the job itself (`Allocation.end_time_s`).
    """
    text = call("scontrol", "--oneliner", "show", "job", str(job_id))
    try:
        return datetime.fromisoformat(parse_fields(text).get("EndTime", "")).timestamp()
    except ValueError:  # Unknown
        return None


def follow(
    job_id: int,
    output: Path,
    write: Write,
    tell: Tell,
    *,
    poll_s: float = POLL_S,
    after_end_s: float = AFTER_END_S,
) -> JobState | None:
    """Hand on what the job writes to `output`, and tell of its states, until it has ended.

    Returns its last state, or `None` if Slurm had forgotten it before anybody saw its end. A job
    that is put back into the queue is followed on.
    """
    tail = _tail(output)
    last, reported = None, ""
    while True:
        state = state_of(job_id)
        last = state or last
        words = _in_words(job_id, state)
        if words != reported:
            reported = words
            tell(words)
        _drain(tail, write)
        if state is None or state.over:
            break
        time.sleep(poll_s)
    deadline = time.monotonic() + after_end_s
    while not output.exists() and time.monotonic() < deadline:
        time.sleep(min(poll_s, after_end_s))  # file systems of clusters show it some time after
    _drain(tail, write)
    return last if last is not None and last.over else None


def exit_code_of(state: JobState | None) -> int | None:
    """What `allranks` leaves with for a job that ended so; `None` where it is not known."""
    if state is None:
        return None
    if state.state == "CANCELLED":
        return EXIT_INTERRUPTED
    if state.state in ("COMPLETED", "FAILED") and not state.signal:
        return state.exit_code
    return EXIT_PLACE_FAILED


def _tail(path: Path) -> Iterator[bytes]:
    """What a file has got since the last time, over and over; nothing while it is not there."""
    position = 0
    while True:
        try:
            with path.open("rb") as file:
                file.seek(position)
                new = file.read(CHUNK_BYTES)
        except OSError:
            new = b""
        position += len(new)
        yield new


def _drain(tail: Iterator[bytes], write: Write) -> None:
    while new := next(tail):
        write(new)


def _in_words(job_id: int, state: JobState | None) -> str:
    if state is None:
        return f"job {job_id}: Slurm knows it no more"
    why = f" ({state.reason})" if state.reason not in ("", "None") else ""
    again = f", start {state.restarts + 1}" if state.restarts else ""
    return f"job {job_id}: {state.state.lower()}{why}{again}"


# --- submitting ----------------------------------------------------------------------------------
# A job from its request to its end.


NONE = "none"  # of an option: not even what stands for it otherwise
SCRIPT_MODE = 0o600  # the words of a command may hold what others should not read


@dataclass(frozen=True)
class SlurmScript:
    """A request, its batch script, and where `submit` writes that."""

    site: Site
    request: SlurmRequest
    text: str
    path: Path

    def facts(self) -> dict[str, Any]:
        """What `allranks submit --json` tells of it."""
        return {
            "cluster": self.site.name,
            "partition": self.request.partition,
            "nodes": self.request.nodes,
            "ranks": self.request.ranks,
            "script": str(self.path),
            "output": self.request.output,
            "run_dir": self.request.run_dir,
            "job_id": None,
        }


@dataclass(frozen=True)
class SlurmSubmitter:
    """Submits jobs to one site. `allranks submit` calls nothing else of a scheduler.

    `check` and `write` are pure; another scheduler is another class with these four methods.
    """

    site: Site

    @classmethod
    def of(cls, cluster: str) -> SlurmSubmitter:
        """That of a known site, or of this machine's Slurm where `cluster` is empty."""
        if cluster:
            return cls(load_site(cluster))
        if is_here():
            return cls(discover())
        raise RequestError(
            asked="allranks submit without --cluster",
            found="no Slurm on this machine",
            why="what may be asked for differs from site to site",
            do="type this on a login node, or add --cluster NAME --dry-run to see the script; "
            "`allranks cluster list` has the names",
        )

    def check(self, options: SlurmOptions, device: str, run_dir: str) -> SlurmRequest:
        """What the job asks for, without its command; raises if the site cannot give it."""
        request = make_request(self.site, options, command=(), folder=os.getcwd(), run_dir=run_dir)
        check_request(self.site, options, request)
        check_device(self.site, request, device)
        return request

    def write(self, request: SlurmRequest) -> SlurmScript:
        """The batch script, as text; its place is beside the run folder."""
        return SlurmScript(self.site, request, render(request), Path(f"{request.run_dir}.sbatch"))

    def submit(self, script: SlurmScript) -> int:
        """Put the script on the disk and send it; returns the job's number.

        Only its owner can read it. It is removed if Slurm refuses it.
        """
        _check_files(script.request)
        path = script.path
        created = [parent for parent in path.parents if not parent.exists()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            before = path.read_bytes() if path.exists() else None
            write_whole(path, script.text.encode(), SCRIPT_MODE)
        except OSError as error:
            raise RequestError(
                asked=f"--run-dir {script.request.run_dir}",
                found=str(error),
                why=f"the batch script is written beside it, as {path.name}",
                do="name a folder that can be written",
            ) from None
        try:
            return send(path)
        except BaseException:
            path.unlink()
            if before is not None:
                write_whole(path, before, SCRIPT_MODE)
            with suppress(OSError):  # another process may use them by now
                for parent in created:
                    parent.rmdir()
            raise

    def follow(
        self, job_id: int, output: Path, write: Write, tell: Tell
    ) -> tuple[str | None, int | None]:
        """Hand on output and states until the job has ended; returns its state and exit code.

        Both are `None` if Slurm has forgotten how it ended.
        """
        state = follow(job_id, output, write, tell)
        return None if state is None else state.state, exit_code_of(state)


def _check_files(request: SlurmRequest) -> None:
    """Raise for files that the job would miss; they can be checked here where files are shared."""
    image = request.container[-1] if request.container else ""
    for option, path in (("--venv", request.venv), ("--container", image)):
        file = Path(path, "bin", "activate") if option == "--venv" else Path(path)
        if path and "://" not in path and not file.exists():
            raise RequestError(
                asked=f"{option} {path}",
                found=f"no {file}",
                why="the job would fail for want of it, after its time in the queue",
                do="check the path" + (f"; or {option} {NONE}" if option == "--venv" else ""),
            )
