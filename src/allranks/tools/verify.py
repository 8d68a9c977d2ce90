"""`allranks verify`: steps of a certificate made again, and whether they hold.

The certificate is unpacked into a temporary run folder, with links to one checkpoint of the run,
and that folder is replayed. So the rows that are compared are those of the certificate, and the run
is only read.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import allranks
from allranks.catalog import PROGRAMS
from allranks.checkpoint.folder import committed, step_of
from allranks.errors import RequestError
from allranks.job.job import HIDDEN, Job, job_values, write_toml
from allranks.job.program import INSTALLED, PROGRAM, by_name, file_sha256
from allranks.job.resume import CHECKPOINTS
from allranks.job.run_folder import JsonLines
from allranks.launcher.describe import ask_task
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.leftovers import scratch_folder
from allranks.tools.certificate import Certificate, as_answer_to, is_of_program, read_certificate
from allranks.tools.replay import (
    UNDISTURBED,
    Replayed,
    ReplayRequest,
    holding,
    machine_for,
    replay,
)
from allranks.training.record.digests import NAME as DIGESTS
from allranks.training.record.digests import OF_STEP, STATE

LIMITS = (
    "not proved: nothing is known of other steps, and a digest of 64 bits tells faults, not "
    "somebody who means to deceive"
)
HERE = Path(allranks.__file__).parent


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """What is asked: to draw `steps` rows, each at most `within` steps after a start.

    Steps start at the beginning, and at the checkpoints of `run`; `None` is the folder that the
    certificate names. They are drawn by the chain and `seed`, and made on `ranks` (0: one process).
    """

    path: Path
    run: Path | None = None
    steps: int = 5
    ranks: int = 0
    within: int = 1000
    seed: str = ""

    def refused(self, text: str, why: str, do: str) -> RequestError:
        """The error for this request."""
        return RequestError(asked=f"verify {self.path}", found=text, why=why, do=do)


@dataclass(frozen=True)
class VerifiedSteps:
    """Steps that were made again from the state after `start` steps, up to `rows`.

    `differs` has the first step with other digests, and which they are.
    """

    start: int
    rows: tuple[int, ...]
    ranks: int
    differs: tuple[int, tuple[str, ...]] | None
    weights_sha256: str | None

    def __str__(self) -> str:
        begin = f"the checkpoint of step {self.start}" if self.start else "the beginning"
        is_one = len(self.rows) == 1
        rows = f"{'row' if is_one else 'rows'} of step {', '.join(map(str, self.rows))}"
        where = "one process" if self.ranks == 1 else f"{self.ranks} ranks"
        result = "holds" if is_one else "hold"
        if self.differs is not None:
            step, names = self.differs
            at = "the checkpoint itself" if step == self.start else f"step {step}"
            result = f"FAIL: {at} has other {', '.join(names)}"
        return f"{rows}, made again from {begin} on {where}: {result}"


@dataclass
class Verified:
    """What a verification has shown."""

    certificate: Certificate
    reachable: int
    notes: list[str]
    stretches: list[VerifiedSteps] = field(default_factory=list)

    @property
    def steps_made(self) -> int:
        """How many steps were made again: stretches do not overlap."""
        return sum(max(stretch.rows) - stretch.start for stretch in self.stretches)

    @property
    def weights_hold(self) -> bool | None:
        """Whether the weights at the end are those of the run; `None` if nobody has made them."""
        expected = self.certificate.result["weights_sha256"]
        digests = [s.weights_sha256 for s in self.stretches if s.weights_sha256]
        return digests[-1] == expected if digests else None

    @property
    def holds(self) -> bool:
        """Whether all that was made again is as the certificate says."""
        return self.weights_hold is not False and not any(s.differs for s in self.stretches)

    def to_data(self) -> dict[str, Any]:
        return {
            "holds": self.holds,
            "weights_hold": self.weights_hold,
            "rows": len(self.certificate.digests),
            "reachable": self.reachable,
            "steps": self.certificate.result["steps"],
            "steps_made": self.steps_made,
            "stretches": [dataclasses.asdict(stretch) for stretch in self.stretches],
            "notes": self.notes,
        }

    def __str__(self) -> str:
        steps, rows = int(self.certificate.result["steps"]), len(self.certificate.digests)
        share = self.steps_made / max(steps, 1)
        weights = {True: "hold", False: "FAIL: they are others", None: "not made again"}
        return "\n".join(
            [
                *(f"note: {note}" for note in self.notes),
                f"{rows} rows of digests, of which {self.reachable} can be reached",
                *map(str, self.stretches),
                f"the weights at the end: {weights[self.weights_hold]}",
                f"{'holds' if self.holds else 'DOES NOT HOLD'}: {self.steps_made} of {steps} "
                f"steps were made again ({share:.1%})",
                LIMITS,
            ]
        )


def verify(request: VerifyRequest, server: ForkServer | None = None) -> Verified:
    """Make chosen steps again; raises `RequestError` for what cannot be compared.

    Without `server` one is started.
    """
    certificate = read_certificate(request.path)
    _check_program(request, certificate.program)
    starts, notes = _starts(request, certificate)
    origin = {row: max(s for s in starts if s < row) for row in certificate.rows if row > 0}
    reachable = [row for row in sorted(origin) if row - origin[row] <= request.within]
    if not reachable:
        near = min((row - start for row, start in origin.items()), default=0)
        raise request.refused(
            f"no row of digests within {request.within} steps after a start; the nearest is {near}",
            "steps are made from the beginning, or from a checkpoint",
            f"--within {near}, or the folder with the checkpoints: --run RUN",
        )
    chosen = drawn(reachable, request.steps, f"{certificate.digests[-1]['chain']}{request.seed}")
    if reachable[-1] == certificate.result["steps"]:
        chosen = sorted({*chosen, reachable[-1]})  # so that the weights are compared
    result = Verified(certificate, len(reachable), notes)
    with ExitStack() as stack:
        stack.enter_context(as_answer_to(f"verify {request.path}"))
        job = _job_that_loads(certificate)
        machine = stack.enter_context(machine_for(job, server))
        answer = ask_task(machine, job, "surroundings", "surroundings")
        _check_surroundings(request, certificate, answer)
        for start in sorted({origin[row] for row in chosen}):
            rows = tuple(row for row in chosen if origin[row] == start)
            with scratch_folder() as folder:
                _unpack(certificate, Path(folder), starts[start], request.ranks)
                again = ReplayRequest(Path(folder), rows[-1], request.ranks)
                replayed = replay(again, machine.server)
            result.stretches.append(_stretch(certificate, start, rows, replayed))
    return result


def _job_that_loads(certificate: Certificate) -> Job:
    """The job of one process that loads the program and its data, to look at them."""
    values, task = job_values(certificate.job, "the certificate")
    alone = {**values, **UNDISTURBED, "ranks": 1, "strategy": "single", "digest_every": 1}
    return Job(**alone, task={name: value for name, value in task.items() if value != HIDDEN})


def drawn(rows: list[int], count: int, seed: str) -> list[int]:
    """One row of each of `count` parts of the rows, which are as long as each other."""
    count, generator = min(count, len(rows)), random.Random(seed)
    cuts = [part * len(rows) // count for part in range(count + 1)]
    return [rows[generator.randrange(first, end)] for first, end in pairwise(cuts)]


def _starts(
    request: VerifyRequest, certificate: Certificate
) -> tuple[dict[int, Path | None], list[str]]:
    """From where steps can be made, by the steps before; and notes."""
    run = request.run or Path(certificate.result["run"])
    starts: dict[int, Path | None] = {0: None}
    notes: list[str] = []
    if request.run is not None and not run.is_dir():
        raise request.refused(
            f"--run {run}: no such folder", "it has the checkpoints", "name the folder of the run"
        )
    try:
        folders = committed(run / CHECKPOINTS)
    except (OSError, ValueError):  # the name is the certificate's
        folders = []
    known = (folder for folder in folders if step_of(folder) in certificate.rows)
    starts |= {step_of(folder): folder for folder in holding(known, notes)}
    if len(starts) == 1:
        notes.append("no checkpoint of the run is there: steps are made from the beginning")
    return starts, notes


def _check_program(request: VerifyRequest, program: dict[str, Any]) -> None:
    """Raise `RequestError` for another program than that of the run, before any of it is executed.

    Looked at are its file, or its module with the packages around it, if they are a user's.
    """
    for name, path in _files_of(program["name"]):
        if any(part in INSTALLED for part in path.parts) or HERE in path.parents:
            continue
        now, was = None, program.get(name)
        with suppress(OSError):
            now = file_sha256(str(path))
        if now is None or now != was:
            raise request.refused(
                f"{path} is {_short(now) if now else 'not a file'} here, {_short(was)} in the "
                "certificate: nothing of it was executed",
                "other code makes other steps, and may do anything",
                "check out the version of the run, where the job names it",
            )


def _files_of(program: str) -> Iterator[tuple[str, Path]]:
    """The files that are executed when a program is imported, by the names of their digests."""
    place = program if program.endswith(".py") else program.rpartition(":")[0]
    if place.endswith(".py"):
        yield PROGRAM, Path(place)
    elif program not in PROGRAMS:
        folders: Any = [str(Path.cwd())]
        for name in accumulate(place.split("."), "{}.{}".format):
            spec = PathFinder.find_spec(name, folders)
            if spec is None and "." not in name:  # as `import` looks for it
                specs = (finder.find_spec(name, None) for finder in sys.meta_path)
                spec = next((spec for spec in specs if spec is not None), None)
            folders = [] if spec is None else spec.submodule_search_locations or []
            if spec is None or spec.origin is not None:  # a folder without a file executes nothing
                yield f"module {name}", Path(name if spec is None else str(spec.origin))


def _check_surroundings(
    request: VerifyRequest, certificate: Certificate, answer: dict[str, Any]
) -> None:
    """Raise `RequestError` if machine, program or data are others than those of the run.

    A module that is not imported before the first step is not looked at.
    """
    facts = by_name(answer["machine"])
    machine = {name: value for name, value in facts.items() if not is_of_program(name)}
    names = {PROGRAM, *certificate.program.keys() & facts.keys()}
    was_program, program = ({n: of.get(n) for n in names} for of in (certificate.program, facts))
    for was, now, why, do in (
        (
            certificate.machine,
            machine,
            "the bits of a step follow from the processor and the libraries",
            "verify it where these are as they were",
        ),
        (was_program, program, "other code makes other steps", "check out the version of the run"),
        (certificate.data, answer["data"], "other data make other steps", "verify with its data"),
    ):
        lines = [
            f"{certificate.program['name'] if name == PROGRAM else name} is {_short(now.get(name))}"
            f" here, {_short(was.get(name))} in the certificate"
            for name in {**was, **now}
            if was.get(name) != now.get(name)
        ]
        if lines:
            raise request.refused("; ".join(lines), why, do)


def _short(value: Any) -> str:
    """A value in a message; of a digest its first digits."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(item)}" for name, item in value.items())
    return value[:12] + "…" if isinstance(value, str) and len(value) > 24 else str(value)


def _unpack(certificate: Certificate, folder: Path, checkpoint: Path | None, ranks: int) -> None:
    """Make a run folder of a certificate, with links to the files of at most one checkpoint.

    A job of one process becomes one of `ddp`, which has the same rows, where `ranks` are several.
    """
    is_single = certificate.job["strategy"] == "single" and ranks > 1
    job = {**certificate.job, "strategy": "ddp"} if is_single else certificate.job
    (folder / "job.toml").write_text(write_toml(job))
    with JsonLines(folder / DIGESTS) as file:
        for row in certificate.digests:
            file.row(row)
    if checkpoint is not None:
        there = folder / CHECKPOINTS / checkpoint.name
        there.mkdir(parents=True)
        for source in checkpoint.iterdir():
            (there / source.name).symlink_to(source.absolute())


def _stretch(
    certificate: Certificate, start: int, rows: tuple[int, ...], replayed: Replayed
) -> VerifiedSteps:
    """What the replay of the steps from `start` to the last of `rows` has shown."""
    wrong = {step: list(names) for step, names in replayed.differs}
    for step in set(rows) - replayed.rows.keys():
        wrong.setdefault(step, ["digests: none was written"])
    for step in certificate.rows.keys() & replayed.rows.keys():
        row, again = certificate.rows[step], replayed.rows[step]
        # The replay knows nothing of the step before its start, nor the run of the gradients of a
        # step after which a checkpoint was requested.
        known = [n for n in OF_STEP if row[n] is not None or row["gradients"] is not None]
        names = (*STATE, *(known if step > start else ()))
        if absent := [n for n in names if (row.get(n) is None) != (again.get(n) is None)]:
            wrong[step] = [*wrong.get(step, []), *absent]
    first = min(wrong.items(), default=None)
    is_end = rows[-1] == certificate.result["steps"]
    return VerifiedSteps(
        start=start,
        rows=rows,
        ranks=replayed.plan.job.ranks,
        differs=None if first is None else (first[0], tuple(first[1])),
        weights_sha256=replayed.weights_sha256 if is_end else None,
    )
