"""Talking to Slurm: what this site has, sending a job, following it to its end.

Every command of Slurm runs through `call`, with a time-out; what goes wrong there is a `PlaceError`
that says which command it was and what it answered.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from allranks.errors import EXIT_INTERRUPTED, EXIT_PLACE_FAILED, PlaceError
from allranks.launcher.slurm.live import parse_fields, parse_site_facts
from allranks.launcher.slurm.site import Site

COMMAND_TIMEOUT_S = 60.0  # a busy controller answers late; one that is down never does
POLL_S = 2.0
AFTER_END_S = 10.0  # what the nodes wrote last may reach this machine late
CHUNK_BYTES = 1 << 20
JOB_ID = re.compile(r"([0-9]+)(?:;[^\s;]+)?")
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
ACTIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")
UNKNOWN_JOB = "Invalid job id"


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
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        told = said or f"exit code {done.returncode}"
        raise PlaceError(f"Slurm refused `{' '.join(words[:3])}`: {told}")
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
    write: Callable[[bytes], None],
    tell: Callable[[str], None],
    *,
    poll_s: float = POLL_S,
    after_end_s: float = AFTER_END_S,
) -> JobState | None:
    """Hand on what the job writes to `output`, and tell of its states, until it has ended.

    Returns its last state, or `None` if Slurm had forgotten it before anybody saw its end. A job
    that is put back into the queue is followed on.
    """
    tail = _tail(output)
    last, told = None, ""
    while True:
        state = state_of(job_id)
        last = state or last
        words = _in_words(job_id, state)
        if words != told:
            told = words
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


def _drain(tail: Iterator[bytes], write: Callable[[bytes], None]) -> None:
    while new := next(tail):
        write(new)


def _in_words(job_id: int, state: JobState | None) -> str:
    if state is None:
        return f"job {job_id}: Slurm knows it no more"
    why = f" ({state.reason})" if state.reason not in ("", "None") else ""
    again = f", start {state.restarts + 1}" if state.restarts else ""
    return f"job {job_id}: {state.state.lower()}{why}{again}"
