"""The card of `ps`: servers that hold the weights, workers, and a scheduler. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allranks.errors import RequestError
from allranks.strategies.card import Card, Exact, Option, Reference, Workload
from allranks.strategies.mesh import Agreement
from allranks.strategies.roles import EVALUATOR, WORKER, Role, coming_and_going

SCHEDULER, SERVER = "scheduler", "server"
IN_STEP, OUT_OF_STEP, CHANGES = "sync", "async", "delta"
PLAIN, STALENESS_AWARE = RATES = "plain", "staleness-aware"
NO_RAMP, STAIRCASE, LINE = RAMPS = "none", "staircase", "line"
FIRST_NODE, ALL_NODES, OWN_NODES = SERVERS_ON = "first", "all", "own"
ON_SERVER, ON_WORKER = "server", "worker"
ROWS, WHOLE = "rows", "whole"
ANY = -1
"""No bound of how far workers may be apart."""
OPTIONS_OF = {
    (IN_STEP,): ("backup", "update"),
    (OUT_OF_STEP, CHANGES): ("staleness",),
    (OUT_OF_STEP,): ("rate",),
    (CHANGES,): ("every", "pipeline", "ramp", "ramp_from", "ramp_over"),
}
"""The modes of which these are options; all others are options of every mode."""
NEEDS = {
    "ramp_from": ("ramp", (STAIRCASE, LINE)),
    "ramp_over": ("ramp", (STAIRCASE, LINE)),
}
"""Options that say more of a value of another one, and mean nothing without it."""

OUT_OF_STEP_LOOP = Reference(
    "a loop in one process that takes the gradient of each batch at the weights of the pull before "
    "it, and applies it when it comes, in the same order; `single` when N = 1"
)
CHANGES_LOOP = Reference(
    "a loop in one process in which each worker trains from the weights that it has pulled, and "
    "what that has changed, times the ramp, is added when it comes, in the same order; `single` "
    "when N = 1, without pipeline and ramp"
)


def _pulled_or_pushed(work: Workload, options: Mapping[str, Any]) -> int:
    """The server that holds most sends its weights to each worker; a worker sends its gradients.

    With `update=worker` it sends the sum of the gradients, and nothing where a worker has that.
    """
    server_bytes = work.messages
    if options["mode"] == CHANGES:  # once in `every` steps
        return -(-sum(server_bytes) // int(options["every"]))
    if options["mode"] == OUT_OF_STEP:  # one worker in each step
        return sum(server_bytes)
    return max(parts_of_a_step(work.ranks, options) * max(server_bytes), sum(server_bytes))


def parts_of_a_step(workers: int, options: Mapping[str, Any]) -> int:
    """Into how many parts the global batch of a step is cut."""
    return workers - int(options["backup"]) if options["mode"] == IN_STEP else 1


def _check_together(options: Mapping[str, Any]) -> None:
    """Raise `RequestError` for an option that the mode, or another option, leaves unused."""
    rules = [("mode", modes, name) for modes, names in OPTIONS_OF.items() for name in names]
    rules += [(of, values, name) for name, (of, values) in NEEDS.items()]
    defaults = {option.name: option.default for option in PARAMETER_SERVER_CARD.options}
    for of, values, name in rules:
        if options[name] != defaults[name] and options[of] not in values:
            raise RequestError(
                asked=f"--strategy ps:{name}={options[name]}",
                found=f"{of}={options[of]}",
                why=f"{name} is an option of " + " or ".join(f"{of}={value}" for value in values),
                do=f"{of}={values[0]}, or leave {name} out",
            )


def _roles(ranks: int, options: Mapping[str, Any]) -> tuple[Role, ...]:
    """The ranks are the workers."""
    _check_together(options)
    if parts_of_a_step(ranks, options) < 1:
        raise RequestError(
            asked=f"--strategy ps:backup={options['backup']} --ranks {ranks}",
            found="no worker that is left for a part of its own",
            why="the batch is cut into as many parts as there are workers beyond the backup ones",
            do=f"--ranks {options['backup'] + 1} or more",
        )
    roles = (
        Role(SCHEDULER, 1, resumes=True),
        Role(
            SERVER,
            options["servers"],
            serves=True,
            resumes=True,
            over_nodes=options["servers_on"] == ALL_NODES,
            apart=options["servers_on"] == OWN_NODES,
        ),
        coming_and_going(WORKER, ranks, options),
    )
    if options["evaluator"] == "no":
        return roles
    return (*roles, Role(EVALUATOR, 1, least=0, rejoins=options["rejoins"], outlives_nodes=True))


PARAMETER_SERVER_CARD = Card(
    name="ps",
    summary="Servers hold the weights; workers pull them and push gradients, in step or out of it.",
    take_when="workers differ much in speed (mode=async).",
    guarantee=Exact(),
    bytes_sent=_pulled_or_pushed,
    bytes_formula="in step: the larger of (N - backup) · the weights of a server, and the weights "
    "(update=worker: no more than that; a worker pulls nothing for its second part of a step); "
    "async: weights; delta: weights / every",
    memory="a server: its part of weights, gradients and optimizer, and N more gradients; "
    "a worker: 2 weights + 2 gradients, update=worker: and the optimizer, "
    "delta: 3 weights + 3 gradients + optimizer; the scheduler and the evaluator: weights + "
    "optimizer, and as much again while it saves",
    many_ranks=True,
    agreement=Agreement(lockstep=False),
    roles=_roles,
    parts_of_a_batch=parts_of_a_step,
    options=(
        Option(
            "mode",
            IN_STEP,
            "sync: each step adds what all parts of its batch give; async: what comes is applied; "
            "delta: workers train by themselves, and what that has changed is added when it comes",
            (IN_STEP, OUT_OF_STEP, CHANGES),
            guarantees={OUT_OF_STEP: OUT_OF_STEP_LOOP, CHANGES: CHANGES_LOOP},
        ),
        Option(
            "update",
            ON_SERVER,
            "sync, worker: workers pull the sum of the gradients, and update by themselves",
            (ON_SERVER, ON_WORKER),
        ),
        Option("servers", 1, "processes that hold the weights, beside the workers", at_least=1),
        Option(
            "servers_on",
            FIRST_NODE,
            "which nodes have servers: that of the scheduler and the first worker; all, in turn; "
            "own: the last nodes, each of which has one server and no worker",
            (*SERVERS_ON,),
        ),
        Option(
            "staleness",
            ANY,
            "async: batches by which a worker may be ahead of the slowest one (delta: rounds of "
            "`every` batches); -1: any",
            at_least=ANY,
        ),
        Option(
            "backup",
            0,
            "sync: workers beyond the parts of a batch, who take over what others are slow with",
            at_least=0,
        ),
        Option(
            "rate",
            PLAIN,
            "async: what is done about gradients of old weights",
            (*RATES,),
        ),
        Option("every", 1, "delta: batches that a worker trains on between two pushes", at_least=1),
        Option(
            "pipeline",
            "no",
            "delta, yes: a worker goes on from the answer to the push before, and waits for none",
            ("no", "yes"),
        ),
        Option(
            "ramp",
            "none",
            "delta: how the part of a change that is pushed grows to all of it",
            (*RAMPS,),
        ),
        Option("ramp_from", 0.2, "delta: where the ramp begins", above=0),
        Option(
            "ramp_over", 1024, "delta: pushes in one step of a staircase, or on a line", at_least=1
        ),
        Option(
            "bound",
            1_000_000,
            "numbers from which on a tensor is cut over all servers",
            at_least=1,
        ),
        Option(
            "transport",
            "auto",
            "between a worker and a server: auto is shared memory where they are on one host",
            ("auto", "sockets"),
        ),
        Option(
            "tables",
            ROWS,
            "rows: those of layers with sparse=True lie on the servers alone, and the rows that a "
            "worker looks up travel; whole: they are as any other weight",
            (ROWS, WHOLE),
        ),
        Option("evaluator", "no", "a process that evaluates each checkpoint", ("no", "yes")),
        Option("least", 1, "workers that must be left", at_least=1),
        Option(
            "rejoins",
            3,
            "how often a worker, or the evaluator, that is lost is started again",
            at_least=0,
        ),
        Option(
            "patience_s",
            300.0,
            "seconds for which a process waits for the scheduler or a server that is gone",
            above=0,
        ),
    ),
    paper="Li et al. 2014, Scaling Distributed Machine Learning with the Parameter Server, OSDI; "
    "Ho et al. 2013, stale synchronous parallel; Chen et al. 2016, arXiv 1604.00981 (backup); "
    "CNTK's asynchronous SGD on Multiverso (delta)",
)
