"""Facts of a job's task: shape, cost and proof, read in a short-lived forked process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.catalog import ENGINES, FIRST_CHECK, load
from allranks.errors import Interrupted, PlaceError, RequestError
from allranks.job.config import Resolved, threads_per_rank
from allranks.job.job import MADE_ALONE, Job
from allranks.job.limits import checked
from allranks.job.run_folder import rank_events_path, rank_log_path, read_rows
from allranks.launcher.fault_report import first_fault, user_error
from allranks.launcher.plan import LaunchPlan, Resources, Shape, backend_of_keras, devices_seen
from allranks.launcher.processes.leftovers import scratch_folder
from allranks.launcher.processes.process import Process, Processes
from allranks.launcher.supervisor import Signals, supervise
from allranks.launcher.world import Visible
from allranks.strategies.auto import Candidate, Decision, DialRequest, LinkSpeed, ModelFacts, choose

# --- asking --------------------------------------------------------------------------------------
# Call a function in a forked process, which writes one event as its answer and ends.


def answer_of_process(
    server: Processes,
    target: str,
    argument_in: Callable[[str], dict[str, Any]],
    event: str,
    environment: Mapping[str, str],
    *,
    process_name: str,
    if_interrupted: str,
    shared: Path | None = None,
    signals: Signals | None = None,
) -> dict[str, Any]:
    """Run `target` ("module:function") in a forked process; returns the `event` that it writes.

    `argument_in` makes its argument for a temporary run folder, which is created in `shared` if
    that is given. Raises what the function raised; other errors name the process as
    `process_name`, and add `if_interrupted`.
    """
    with scratch_folder(shared) as scratch:
        run_dir = Path(scratch)
        (run_dir / "logs").mkdir()
        log = rank_log_path(run_dir, 0)
        process = Process(0, target, argument_in(scratch), dict(environment), log)
        ended = supervise(server, [process], signals=signals)
        if ended.interrupted:
            raise Interrupted(f"interrupted ({ended.reason}): {if_interrupted}")
        fault = first_fault(ended, run_dir)
        if fault is not None and fault.event:
            raise user_error(fault, ended, run_dir)
        for row in read_rows(rank_events_path(run_dir, 0)):
            if row["event"] == event:
                return dict(row)
        output = log.read_text(errors="replace") if log.exists() else ""
        raise PlaceError(f"{process_name} ended without an answer:\n{output}")


def describe(resources: Resources, job: Job, signals: Signals | None = None) -> Shape:
    """Load the task of `job` in a forked process; returns what the plan needs of it."""
    return Shape(**ask_task(resources, job, "describe", "described", signals)["shape"])


def ask_task(
    resources: Resources, job: Job, function: str, event: str, signals: Signals | None = None
) -> dict[str, Any]:
    """Call a `function` of the engine's worker on `job` in a forked process; returns its `event`.

    It runs where rank 0 would. Raises what the function raised, and leaves no file.
    """
    return answer_of_process(
        resources.server,
        f"{ENGINES[job.engine].worker}:{function}",
        lambda scratch: {**job.to_data(), "run_dir": scratch},
        event,
        {**devices_seen(job, Visible.from_environment()), **backend_of_keras(job)},
        process_name=f"the process that loads {job.program!r}",
        if_interrupted="nothing was started",
        shared=resources.shared(Path(job.run_dir)),
        signals=signals,
    )


# --- dial ----------------------------------------------------------------------------------------
# `--strategy auto`, before the ranks start: a short measurement in one process, then the choice.
#
# The arithmetic is in `strategies.auto`. The outcome is in the plan, in `events.jsonl` and in
# `job.toml`, which has the chosen strategy: a resumed run keeps it.


STEPS = 30
ALONE = "single"


def chosen_by_dial(
    resources: Resources,
    resolved: Resolved,
    job: Job,
    shape: Shape,
    signals: Signals | None = None,
) -> Decision | None:
    """The strategy that `auto` chooses for `job`, or `None` if a strategy was named.

    Raises `RequestError` if the link is not known, and what the measured steps raise.
    """
    request = resolved.dial
    if request is None:
        return None
    link = link_of(request, job)
    facts = _measured(resources, job, shape, link, signals)

    def refusal(candidate: Candidate) -> str:
        try:
            checked(dataclasses.replace(job, strategy=candidate.text))
        except RequestError as error:
            return error.found
        return ""

    return choose(request.text, facts, exact=request.exact, refusal=refusal)


def link_of(request: DialRequest, job: Job) -> LinkSpeed:
    """The speed of the link between the nodes of `job`; raises `RequestError` if it is unknown."""
    options = job.place_spec.options
    if job.nodes == 1:
        if request.link is None:
            return LinkSpeed(source="one machine")
        raise RequestError(
            asked=f"--strategy {request.text}",
            found="one node",
            why="its ranks talk through the memory of one machine, and over no link",
            do="--nodes 2 or more at a place with nodes, or --strategy auto",
        )
    if job.place_spec.name != "simulated":
        if request.link is not None:
            return request.link
        raise RequestError(
            asked=f"--strategy {request.text} --place {job.place}",
            found="a link between the nodes that nobody has named",
            why="what a method saves follows from it, and it is not measured before the start",
            do=f"--strategy {request.text}{',' if ':' in request.text else ':'}link=1gbit",
        )
    there = LinkSpeed(options.get("link", 0.0), 2 * options.get("delay", 0.0), "place")
    chosen = request.link
    if chosen is not None and (chosen.bits_per_s, chosen.one_way_s) != (there.bits_per_s, 0.0):
        raise RequestError(
            asked=f"--strategy {request.text} --place {job.place}",
            found="two links",
            why="simulated nodes are joined by the link that --place says",
            do="--strategy auto: it takes that link",
        )
    return there


def _measured(
    resources: Resources, job: Job, shape: Shape, link: LinkSpeed, signals: Signals | None
) -> ModelFacts:
    """Measure in one process: the size of the model, and a step on one rank's share of a batch."""
    worlds = [rank.world for rank in resources.plan(job, shape).ranks]
    sharing = worlds[0].on_machine or worlds[0].local_size
    threads = threads_per_rank(job, sharing)
    share = {
        "batch_size": max(1, round(shape.batch_size / job.ranks)),
        "shards": max(1, shape.shards // job.ranks),
    }
    alone = dataclasses.replace(_alone(job), threads=threads, task={**job.task, **share})
    measured = ask_task(resources, alone, "measure", "measured", signals)
    of_one_node = [world.node for world in worlds].count(0)
    alike = job.ranks == of_one_node * job.nodes
    busy = max(1.0, sharing * threads / measured["cores"]) if job.device == "cpu" else 1.0
    return ModelFacts(
        parameters=measured["parameters"],
        compute_s=measured["step_s"],
        ranks=job.ranks,
        nodes=job.nodes,
        link=link,
        per_node=of_one_node if alike else 0,
        buffer_bytes=measured["buffer_bytes"],
        shards=shape.shards,
        busy=busy,
        steps=job.steps,
        shapes=tuple(map(tuple, measured["shapes"])),
    )


def _alone(job: Job) -> Job:
    """The same training in one process, for a few steps and without checkpoints."""
    alone = dataclasses.replace(job, **MADE_ALONE, strategy=ALONE, ranks=1, steps=STEPS)
    return dataclasses.replace(alone, eval_every="", early_stop="", until="")


# --- proof ---------------------------------------------------------------------------------------
# The proof of a job: a comparison of its first steps with one process, before it trains.
#
# The comparison is a tool, `tools.check.first`, which is loaded only if a job needs it.


WHOLE_MODEL = ("single", "ddp")
"""Strategies under which every rank holds the model as one process does."""


@dataclass(frozen=True)
class EqualityProof:
    """Whether the first steps of a job equal those of one process; `why` says how, or why not.

    A difference raises `NotEqual` instead, and the job does not start.
    """

    proved: bool
    why: str

    def to_data(self) -> dict[str, Any]:
        return {"proved": self.proved, "why": self.why}

    def __str__(self) -> str:
        return f"proved: {self.why}" if self.proved else f"not proved, because {self.why}"


def first_check(
    resolved: Resolved,
    plan: LaunchPlan,
    resources: Resources,
    signals: Signals,
    announce: Callable[[str], None] = lambda text: None,
) -> EqualityProof | None:
    """The proof of a planned job, before its run folder exists; `None` if it needs none.

    Raises `NotEqual` for a difference. `announce` is called before the comparison.
    """
    if plan.job.strategy_spec.name in WHOLE_MODEL:
        return None
    if plan.job.first_check == "off":
        return EqualityProof(False, "--first-check off left it out")
    proof: EqualityProof = load(FIRST_CHECK)(resolved, plan, resources, signals, announce)
    return proof
