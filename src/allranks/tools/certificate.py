"""`allranks certify`: a file that says how a run was made. `tools/verify.py` checks it.

A certificate is JSON: the digests of program and data, the versions and the processor, the job, the
rows of `digests.jsonl` with their chain, and the digest of the weights. Each field has a seal, each
row its place in the chain, and the file a digest of all: a change is refused, and named.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from allranks.catalog import TORCH
from allranks.checkpoint.files import as_json
from allranks.errors import RequestError
from allranks.job.job import job_values
from allranks.job.program import MODULES, PROGRAM
from allranks.job.resume import HARMLESS
from allranks.job.run_folder import is_in_use, read_events
from allranks.strategies.card import Exact
from allranks.strategies.resolve import strategy_spec
from allranks.tools.replay import ReplayRequest, WrittenSteps, facts_of, plan_replay
from allranks.tools.report.records import RUNNING, RunOutcome, outcome_of, read_job
from allranks.training.record.digests import NAME as DIGESTS
from allranks.training.record.digests import Row, broken_link

FORMAT = 1
SEAL = 16  # hexadecimal digits
Objection = tuple[str, str, str]  # what a run has, why it cannot be certified for that, what to do
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
                why="a certificate is a new file, replaces none, and no folder is made for it",
                do="name a new file in a folder that is there: -o FILE",
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
    with as_answer_to(f"certify {run}"):
        plan_replay(ReplayRequest(run, 1))
        job = read_job(run)
    events, written = read_events(run), WrittenSteps.read(run)
    outcome, rows = outcome_of(run, events, is_in_use(run)), written.digests
    last, facts = max(written.metrics, default=1), facts_of(events)
    data = [e["data"] for e in events if e["event"] == "data"]
    for text, why, do in chain(
        _objections_to_run(run, job, outcome, rows, last),
        _objections_to_changes(events, {"machine and program": facts, "data": data}),
    ):
        raise RequestError(asked=f"certify {run}", found=text, why=why, do=do)
    assert outcome.summary is not None, "a run that is done has one"
    machine = {name: value for each in facts for name, value in each.items()}
    program = {name: machine.pop(name) for name in list(machine) if is_of_program(name)}
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


def _objections_to_run(
    run: Path, job: dict[str, Any], outcome: RunOutcome, rows: dict[int, Row], last: int
) -> Iterator[Objection]:
    if outcome.state != "done" or outcome.summary is None:
        resume = f"resume it until it is done: allranks train --run-dir {run}"
        do = "wait until it is done" if outcome.state == RUNNING else resume
        yield f"a run that is {outcome.state}", "a certificate has the weights at the end", do
    if not job["bitwise"]:
        why = "its sums depend on the ranks: another machine has other bits, and nothing to compare"
        yield "a run without --bitwise", why, "train with --bitwise"
    if not isinstance(strategy_spec(job["strategy"], int(job["ranks"])).guarantee, Exact):
        why = "its result depends on the number of ranks, and a certificate holds on any"
        yield f"a run of {job['strategy']}", why, "see `allranks strategies` for exact ones"
    if not rows:
        steps = f"it had --digest-every {job['digest_every']}, and made {last} steps"
        do = f"train with --digest-every {max(1, min(last, 500) // 2)}"
        why = f"steps that are made again are compared with them; {steps}"
        yield "a run without digests", why, do
    if (broken := broken_link(rows.values())) is not None:
        why = f"{DIGESTS} was changed after the run: nobody knows what it was"
        yield f"a chain that is broken at step {broken}", why, "train again"


def _objections_to_changes(
    events: list[dict[str, Any]], recorded: dict[str, list[dict[str, Any]]]
) -> Iterator[Objection]:
    """`recorded` has what each rank found of itself, in each attempt."""
    for event in events:
        names = set(event["changes"]) - HARMLESS if event["event"] == "resumed" else set()
        if names:
            text = f"{', '.join(sorted(names))}: changed when it was resumed at {event['step']}"
            yield text, "a certificate has one job for all steps", "train anew"
    for name, all_facts in recorded.items():
        if not any(all_facts):
            why = "a run writes them before its first step"
            yield f"no event with its {name}", why, "train again with this version"
        for before, after in pairwise(all_facts):
            if changed := [n for n in after if n in before and before[n] != after[n]]:
                text = f"{', '.join(changed)}: not the same in all of the run"
                yield text, "a certificate has one of each", "train anew, in one place"


def is_of_program(name: str) -> bool:
    """Whether a recorded fact is the digest of a file of the program."""
    return name in (PROGRAM, MODULES) or name.startswith("module ")


@contextmanager
def as_answer_to(request: str) -> Iterator[None]:
    """A context in which the refusal of a replay is the refusal of this request."""
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
                raise refused(f"{name}: changed: its value and its seal do not agree")
        broken = broken_link(certificate.digests)
        if broken is not None:
            number = next(i for i, row in enumerate(certificate.digests) if row["step"] == broken)
            raise refused(f"digests.{number}: the chain breaks at the row of step {broken}")
        if _sha256({n: value for n, value in data.items() if n != "sha256"}) != data["sha256"]:
            raise refused("sha256: not the digest of the other fields")
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
