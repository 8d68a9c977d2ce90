"""`--strategy auto`, before the ranks start: a short measurement in one process, then the choice.

The arithmetic is in `strategies.dial`. The outcome is in the plan, in `events.jsonl` and in
`job.toml`, which has the chosen strategy: a resumed run keeps it.
"""

from __future__ import annotations

import dataclasses

from allranks.errors import RequestError
from allranks.job.config import Resolved, threads_per_rank
from allranks.job.job import Job
from allranks.job.limits import checked
from allranks.job.place import LOCAL
from allranks.launcher.plan import Shape
from allranks.launcher.preparing.describing import asked_of_task
from allranks.launcher.resources import Resources
from allranks.launcher.signals import Signals
from allranks.strategies.dial.candidates import Candidate
from allranks.strategies.dial.choosing import Decision, choose
from allranks.strategies.dial.facts import Facts
from allranks.strategies.dial.link import Link
from allranks.strategies.dial.request import DialRequest

STEPS = 30
ALONE = "single"


def turned(
    resources: Resources,
    resolved: Resolved,
    job: Job,
    shape: Shape,
    signals: Signals | None = None,
) -> Decision | None:
    """The decision on `job`, or `None` where its strategy was named.

    Raises `RequestError` where the link is not known, and what the measured steps raise.
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


def link_of(request: DialRequest, job: Job) -> Link:
    """What joins the nodes of `job`; raises `RequestError` where nobody says it."""
    options = job.place_spec.options
    if job.nodes == 1:
        if request.link is None:
            return Link(source="one machine")
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
    there = Link(options.get("link", 0.0), 2 * options.get("delay", 0.0), "place")
    said = request.link
    if said is not None and (said.bits_per_s, said.one_way_s) != (there.bits_per_s, 0.0):
        raise RequestError(
            asked=f"--strategy {request.text} --place {job.place}",
            found="two links",
            why="simulated nodes are joined by the link that --place says",
            do="--strategy auto: it takes that link",
        )
    return there


def _measured(
    resources: Resources, job: Job, shape: Shape, link: Link, signals: Signals | None
) -> Facts:
    """What one process finds out: the size of the model, and a step on the share of one rank."""
    worlds = [rank.world for rank in resources.plan(job, shape).ranks]
    sharing = worlds[0].on_machine or worlds[0].local_size
    threads = threads_per_rank(job, sharing)
    share = {
        "batch_size": max(1, round(shape.batch_size / job.ranks)),
        "shards": max(1, shape.shards // job.ranks),
    }
    alone = dataclasses.replace(_alone(job), threads=threads, task={**job.task, **share})
    found = asked_of_task(resources, alone, "measure", "measured", signals)
    of_one_node = [world.node for world in worlds].count(0)
    alike = job.ranks == of_one_node * job.nodes
    busy = max(1.0, sharing * threads / found["cores"]) if job.device == "cpu" else 1.0
    return Facts(
        parameters=found["parameters"],
        compute_s=found["step_s"],
        ranks=job.ranks,
        nodes=job.nodes,
        link=link,
        per_node=of_one_node if alike else 0,
        buffer_bytes=found["buffer_bytes"],
        shards=shape.shards,
        busy=busy,
        steps=job.steps,
        shapes=tuple(map(tuple, found["shapes"])),
    )


def _alone(job: Job) -> Job:
    """The same training in one process: a few steps, of which nothing is kept."""
    return dataclasses.replace(
        job,
        strategy=ALONE,
        ranks=1,
        nodes=1,
        place=LOCAL,
        steps=STEPS,
        witness="off",
        resume="",
        inject="",
        log="",
        profile=False,
        checkpoint_every=None,
        verify_every=None,
        eval_every="",
        early_stop="",
        until="",
    )


def note_of(decision: Decision) -> str:
    """The decision as a note of the plan."""
    return f"{decision.asked} -> {decision.did}: {decision.why}"
