"""How long the ranks of a pipeline wait, and what they stash: a model of schedules in time."""

from __future__ import annotations

from collections.abc import Mapping

from allranks.strategies.pipeline_schedules import Action, Schedule

SECONDS = {"F": 1.0, "B": 2.0}
SPLIT_SECONDS = {"F": 1.0, "B": 1.0, "W": 1.0}
"""What the passes through a stage take if every product of matrices takes equally long."""


def bubble_fraction(name: str, ranks: int, micros: int, chunks: int = 1) -> float:
    """The part of the time in which a rank waits, where all products of matrices take as long.

    (p - 1) / (m + p - 1) for gpipe and 1f1b; with v stages on a rank (p - 1) / (v m + p - 1), for
    micro-batches in whole groups of p; (p - 1) / (3 m + p - 1) for zero-bubble, where m >= p: a
    rank waits (p - 1) (F + B - W) as long as W takes no longer than B.
    """
    parts = 3 if name == "zero-bubble" else chunks
    return (ranks - 1) / (parts * micros + ranks - 1)


def duration(schedule: Schedule, seconds: Mapping[str, float] = SECONDS) -> float:
    """When the last pass ends, if each pass of a kind takes so long and messages nothing.

    Raises `ValueError` for a schedule in which ranks wait for each other for ever.
    """
    ended: dict[Action, float] = {}
    clocks, at = [0.0] * len(schedule), [0] * len(schedule)
    last = max((a.stage for actions in schedule for a in actions), default=0)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                before = needs(action, last)
                if any(needed not in ended for needed in before):
                    break
                start = max([clocks[rank], *(ended[needed] for needed in before)])
                clocks[rank] = start + seconds[action.kind]
                ended[action] = clocks[rank]
                at[rank] += 1
                moved = True
    if any(done < len(actions) for done, actions in zip(at, schedule, strict=True)):
        stuck = [str(a[n]) for n, a in zip(at, schedule, strict=True) if n < len(a)]
        raise ValueError(f"these wait for each other: {', '.join(stuck)}")
    return max(clocks)


def needs(action: Action, last_stage: int) -> tuple[Action, ...]:
    """The passes that must have been made before this one."""
    if action.kind == "F":
        return (Action("F", action.stage - 1, action.micro),) if action.stage else ()
    if action.kind == "W":
        return (Action("B", action.stage, action.micro),)
    own_forward = Action("F", action.stage, action.micro)
    if action.stage == last_stage:
        return (own_forward,)
    return own_forward, Action("B", action.stage + 1, action.micro)


def most_stashed(actions: tuple[Action, ...]) -> int:
    """How many passes of one rank wait for the end of their backward pass, at most."""
    ends = "W" if any(action.kind == "W" for action in actions) else "B"
    now = most = 0
    for action in actions:
        now += (action.kind == "F") - (action.kind == ends)
        most = max(most, now)
    return most
