"""`allranks certify` and `allranks verify`: a file that says how a run was made, and its check.

A certificate is JSON: the digests of program and data, the versions and the processor, the job, the
rows of `digests.jsonl` with their chain, and the digest of the weights. Each field has a seal, each
row its place in the chain, and the file a digest of all: a change is refused, and named.

`verify` makes chosen steps again. It unpacks the certificate into a temporary run folder, links one
checkpoint of the run into it, and replays that folder. So the rows that are compared are those of
the certificate, and the run is only read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import allranks
from allranks.catalog import PROGRAMS, TORCH
from allranks.checkpoint.export import verified
from allranks.checkpoint.files import as_json
from allranks.checkpoint.folder import committed, step_of
from allranks.checkpoint.format import BadCheckpoint
from allranks.errors import RequestError
from allranks.job.job import HIDDEN, Job, job_values, write_toml
from allranks.job.program import INSTALLED, MODULES, PROGRAM, by_name, file_sha256
from allranks.job.resume import CHECKPOINTS, HARMLESS
from allranks.job.run_folder import JsonLines, is_in_use, read_events, read_rows
from allranks.launcher.describe import ask_task
from allranks.launcher.places import Rendezvous
from allranks.launcher.plan import LocalMachine
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.leftovers import scratch_folder
from allranks.launcher.start import resources_for
from allranks.strategies.card import Exact
from allranks.strategies.resolve import strategy_spec
from allranks.tools.replay import UNDISTURBED, Replayed, ReplayRequest, plan_replay, replay
from allranks.tools.report.records import outcome_of, read_job
from allranks.training.record.digests import NAME as DIGESTS
from allranks.training.record.digests import OF_STEP, STATE, Row, broken_link, read_digests
from allranks.training.record.logs import METRICS

FORMAT = 1
SEAL = 16  # hexadecimal digits
NOT_OF_THE_JOB = ("source", "proof", "run_dir")  # what job.toml has besides
TEXT, NUMBER, MAYBE = (str,), (int,), (str, type(None))
FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "job": {"engine": TEXT, "program": TEXT, "strategy": TEXT, "ranks": NUMBER, "bitwise": (bool,)},
    "result": {"run": TEXT, "steps": NUMBER, "weights_sha256": MAYBE},
    "program": {"name": TEXT, PROGRAM: MAYBE},
    "machine": {},
    "data": {},
}
"""What the sections must have, and of which types; a large model has no digest at the end."""
OF_ROW: dict[str, tuple[type, ...]] = {
    **{"step": NUMBER, "epoch": NUMBER, "weights": TEXT, "chain": TEXT},
    **dict.fromkeys(("buffers", "optimizer", "gradients", "samples"), MAYBE),
    "loss": (float, type(None)),
}
"""A row has `None` for what there is not: the row of a checkpoint on request has no gradients."""
LIMITS = (
    "not proved: nothing is known of other steps, and a digest of 64 bits tells faults, not "
    "somebody who means to deceive"
)


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The sections of a certificate. `digests` are the rows of the run that hold, in order."""

    program: dict[str, Any]
    data: dict[str, Any]
    machine: dict[str, Any]
    job: dict[str, Any]
    result: dict[str, Any]
    digests: list[Row]

    @property
    def rows(self) -> dict[int, Row]:
        """The rows by their step."""
        return {int(row["step"]): row for row in self.digests}

    def __str__(self) -> str:
        """The file: sorted, one field a line."""
        body = {"certificate": FORMAT, **vars(self), "seals": _seals(vars(self))}
        return json.dumps({**body, "sha256": _sha256(body)}, indent=1, sort_keys=True) + "\n"

    def write(self, target: Path) -> None:
        """Write the file; raises `RequestError` if something is there, or it cannot be written."""
        try:
            with open(target, "x", encoding="utf-8") as file:
                file.write(str(self))
        except OSError as error:
            raise RequestError(
                asked=f"certify -o {target}",
                found=error.strerror or type(error).__name__,
                why="a certificate is a new file, and replaces none",
                do="name another file: -o FILE",
            ) from None


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The fields in a value that have no fields, with their paths."""
    if not isinstance(value, (dict, list)) or not value:
        yield path, value
        return
    for name, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(item, f"{path}.{name}")


def _seals(sections: dict[str, Any]) -> dict[str, str]:
    """A digest of each field but the rows, which are chained, by its path."""
    leaves = (
        leaf for name in sections if name != "digests" for leaf in _leaves(sections[name], name)
    )
    return {path: _sha256([path, value])[:SEAL] for path, value in leaves}


# --- certify -------------------------------------------------------------------------------------


def certify(run: Path) -> Certificate:
    """The certificate of a run that is done; raises `RequestError`. Nothing is started."""

    def refused(text: str, why: str, do: str) -> RequestError:
        return RequestError(asked=f"certify {run}", found=text, why=why, do=do)

    with _as_answer_to(f"certify {run}"):
        plan_replay(ReplayRequest(run, 1))
        job = read_job(run)
    events, rows = read_events(run), read_digests(run)
    outcome = outcome_of(run, events, is_in_use(run))
    if outcome.state != "done" or outcome.summary is None:
        do = f"wait for its end, or resume it: allranks train --run-dir {run}"
        raise refused(f"a run that is {outcome.state}", "a certificate names the weights", do)
    if not job["bitwise"]:
        why = "its sums depend on the ranks: another machine has other bits, and nothing to compare"
        raise refused("a run without --bitwise", why, "train with --bitwise")
    if not isinstance(strategy_spec(job["strategy"], int(job["ranks"])).guarantee, Exact):
        why = "its result depends on the number of ranks, and a certificate holds on any"
        raise refused(
            f"a run of {job['strategy']}", why, "see `allranks strategies` for exact ones"
        )
    last = max((int(row["step"]) + 1 for row in read_rows(run / METRICS)), default=1)
    if not rows:
        steps = f"it had --digest-every {job['digest_every']}, and made {last} steps"
        why = f"steps that are made again are compared with them; {steps}"
        do = f"train with --digest-every {max(1, min(last, 500) // 2)}"
        raise refused("a run without digests", why, do)
    broken = broken_link(rows.values())
    if broken is not None:
        why = f"{DIGESTS} was changed after the run: nobody knows what it was"
        raise refused(f"a chain that is broken at step {broken}", why, "train again")
    for event in events:
        names = set(event["changes"]) - HARMLESS if event["event"] == "resumed" else set()
        if names:
            text = f"{', '.join(sorted(names))}: changed when it was resumed at {event['step']}"
            raise refused(text, "a certificate has one job for all steps", "train anew")
    facts = [by_name(e["machine"]) for e in events if e["event"] == "ready" and "machine" in e]
    data = [e["data"] for e in events if e["event"] == "data"]
    for name, all_facts in (("machine and program", facts), ("data", data)):
        if not any(all_facts):
            why = "a run writes them before its first step"
            raise refused(f"no event with its {name}", why, "train again with this version")
        for before, after in pairwise(all_facts):
            if changed := [n for n in after if n in before and before[n] != after[n]]:
                text = f"{', '.join(changed)}: not the same in all of the run"
                raise refused(text, "a certificate has one of each", "train anew, in one place")
    machine = {name: value for each in facts for name, value in each.items()}
    program = {name: machine.pop(name) for name in list(machine) if _is_of_program(name)}
    result = {"steps": max(last, *rows), "weights_sha256": outcome.summary["weights_sha256"]}
    sections = {
        "program": {"name": job["program"], **program},
        "data": data[-1],
        "machine": machine,
        "job": {name: value for name, value in job.items() if name not in NOT_OF_THE_JOB},
        "result": {"run": str(run.absolute()), **result},
        "digests": list(rows.values()),
    }
    return Certificate(**json.loads(as_json(sections)))


def _is_of_program(name: str) -> bool:
    return name in (PROGRAM, MODULES) or name.startswith("module ")


@contextmanager
def _as_answer_to(request: str) -> Iterator[None]:
    """Errors of a replay are answers to this request."""
    try:
        yield
    except RequestError as error:
        raise RequestError(asked=request, found=error.found, why=error.why, do=error.do) from None


# --- read ----------------------------------------------------------------------------------------


def read_certificate(path: Path) -> Certificate:
    """The certificate in a file; raises `RequestError`, which names the field that was changed."""

    def refused(text: str, why: str = "it is not what `allranks certify` wrote") -> RequestError:
        do = "ask for the file again, or write one: allranks certify RUN"
        return RequestError(asked=f"verify {path}", found=text, why=why, do=do)

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refused(f"no certificate: {error.strerror}", "a certificate is a file") from None
    except (ValueError, RecursionError) as error:
        raise refused(f"no JSON: {error}") from None
    if not isinstance(data, dict) or "certificate" not in data:
        raise refused("no certificate: it has no field `certificate`")
    if data["certificate"] != FORMAT or isinstance(data["certificate"], bool):
        why = f"this version reads format {FORMAT}"
        raise refused(f"certificate = {data['certificate']!r}: another format", why)
    try:
        names = [f.name for f in dataclasses.fields(Certificate)]
        certificate = Certificate(**{name: data[name] for name in names})
        seals, now = data["seals"], _seals(vars(certificate))
        for name in sorted({*seals, *now}):
            if seals.get(name) != now.get(name):
                raise refused(f"{name}: not the value, or not the seal, that it had")
        broken = broken_link(certificate.digests)
        if broken is not None:
            number = next(i for i, row in enumerate(certificate.digests) if row["step"] == broken)
            raise refused(f"digests.{number}: the chain breaks at the row of step {broken}")
        if _sha256({n: value for n, value in data.items() if n != "sha256"}) != data["sha256"]:
            raise refused("sha256: not the digest of the rest")
        if odd := next(_odd_fields(certificate), ""):
            raise refused(odd)
        job_values(certificate.job, str(path))
        return certificate
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise refused(f"{type(error).__name__}: {error}") from None


def _odd_fields(certificate: Certificate) -> Iterator[str]:
    """What is not as `certify` writes it, though its seals are right."""
    tables = [(name, getattr(certificate, name), kinds) for name, kinds in FIELDS.items()]
    rows = certificate.digests
    for path, table, kinds in (*tables, *((f"digests.{i}", r, OF_ROW) for i, r in enumerate(rows))):
        if not isinstance(table, dict) or not table:
            yield f"{path}: no fields"
        for name, kind in kinds.items():
            if name not in table:
                yield f"{path}.{name}: not there"
            elif type(table[name]) not in kind:
                yield f"{path}.{name}: {table[name]!r} is of another type"
    steps = [row["step"] for row in rows]
    if not steps or any(step >= after for step, after in pairwise([-1, *steps])):
        yield "digests: no rows of one step after the other"
    if certificate.result["steps"] < steps[-1]:
        yield f"result.steps: {certificate.result['steps']}, and a row of step {steps[-1]}"
    if certificate.program["name"] != certificate.job["program"]:
        yield "program.name: not the program of the job"
    if certificate.job["engine"] != TORCH:
        yield f"job.engine: {certificate.job['engine']!r}, whose steps have no digests"


# --- verify --------------------------------------------------------------------------------------


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
        rows = ", ".join(map(str, self.rows))
        where = "one process" if self.ranks == 1 else f"{self.ranks} ranks"
        text = f"rows {rows}, made from {begin} on {where}: "
        if self.differs is None:
            return text + "hold"
        step, names = self.differs
        at = "the checkpoint itself" if step == self.start else f"step {step}"
        return text + f"FAIL: {at} has other {', '.join(names)}"


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
        weights = {True: "hold", False: "FAIL: others", None: "not made again"}[self.weights_hold]
        return "\n".join(
            [
                *(f"note: {note}" for note in self.notes),
                f"{rows} rows of digests, of which {self.reachable} can be reached",
                *map(str, self.stretches),
                f"the weights at the end: {weights}",
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
    with ExitStack() as stack, _as_answer_to(f"verify {request.path}"):
        values, task = job_values(certificate.job, str(request.path))
        shown = {name: value for name, value in task.items() if value != HIDDEN}
        alone = {**values, **UNDISTURBED, "ranks": 1, "strategy": "single", "digest_every": 1}
        job = Job(**alone, task=shown)
        if server is None:
            resources = stack.enter_context(resources_for(job, Rendezvous()))
            assert isinstance(resources, LocalMachine), "the job was put on this machine"
            server = resources.server
        if values["strategy"] == "single" and request.ranks > 1:
            several = {**certificate.job, "strategy": "ddp"}  # which has the same rows
            certificate = dataclasses.replace(certificate, job=several)
        _check_surroundings(request, certificate, ask_task(LocalMachine(server), job, *ASK))
        for start in sorted({origin[row] for row in chosen}):
            rows = tuple(row for row in chosen if origin[row] == start)
            with scratch_folder() as folder:
                _unpack(certificate, Path(folder), starts[start])
                replayed = replay(ReplayRequest(Path(folder), rows[-1], request.ranks), server)
            result.stretches.append(_stretch(certificate, start, rows, replayed))
    return result


ASK = ("surroundings", "surroundings")


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
    notes = []
    if request.run is not None and not run.is_dir():
        raise request.refused(f"--run {run}: no such folder", "it has the checkpoints", "check it")
    try:
        folders = committed(run / CHECKPOINTS)
    except (OSError, ValueError):  # the name is the certificate's
        folders = []
    for folder in folders:
        try:
            if step_of(folder) in certificate.rows:
                verified(folder)
                starts[step_of(folder)] = folder
        except (BadCheckpoint, OSError) as error:
            notes.append(f"the checkpoint {folder.name} does not hold: {error}")
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


HERE = Path(allranks.__file__).parent


def _check_surroundings(
    request: VerifyRequest, certificate: Certificate, answer: dict[str, Any]
) -> None:
    """Raise `RequestError` if machine, program or data are others than those of the run.

    A module that is not imported before the first step is not looked at.
    """
    facts = by_name(answer["machine"])
    program = {n: value for n, value in certificate.program.items() if n != "name"}
    machine = {name: value for name, value in facts.items() if not _is_of_program(name)}
    for was, now, why, do in (
        (certificate.machine, machine, OF_MACHINE, "verify it where these are as they were"),
        (
            program,
            {n: facts[n] for n in program if n in facts},
            "other code makes other steps",
            "check out the version of the run",
        ),
        (certificate.data, answer["data"], "other data make other steps", "verify with its data"),
    ):
        lines = [
            f"{certificate.program['name'] if name == PROGRAM else name} is {_short(now.get(name))}"
            f" here, {_short(was.get(name))} in the certificate"
            for name in {**was, **now}
            if was.get(name) != now.get(name) and (name in now or not name.startswith("module "))
        ]
        if lines:
            raise request.refused("; ".join(lines), why, do)


OF_MACHINE = "the bits of a step follow from the processor and the libraries"


def _short(value: Any) -> str:
    """A value in a message; of a digest its first digits."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(item)}" for name, item in value.items())
    return value[:12] + "…" if isinstance(value, str) and len(value) > 24 else str(value)


def _unpack(certificate: Certificate, folder: Path, checkpoint: Path | None) -> None:
    """Make a run folder of a certificate, with links to the files of at most one checkpoint."""
    (folder / "job.toml").write_text(write_toml(certificate.job))
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
    for step in rows:
        if step not in replayed.rows:
            wrong.setdefault(step, ["digests: none was written"])
    for step in certificate.rows.keys() & replayed.rows.keys():
        row, again = certificate.rows[step], replayed.rows[step]
        # The replay knows nothing of the step before its start, nor the run of the gradients of a
        # step after which a checkpoint was requested.
        known = [n for n in OF_STEP if row[n] is not None or row["gradients"] is not None]
        names = (*STATE, *(known if step > start else ()))
        absent = [n for n in names if (row.get(n) is None) != (again.get(n) is None)]
        if absent:
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
