"""Ranks that met in different collectives: which of them stood where, when one failed of it.

In shared memory each says what the other makes. Gloo ends a rank that gets a message of another
size than it waits for, and that rank is seldom the one to blame. The others are asked for their
stacks before they are stopped. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from allranks.errors import FaultKind
from allranks.launcher.processes.process import is_said

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\S+)', re.M)
_THREAD = re.compile(r"^(?:Current t|T)hread 0x", re.M)
_PACKAGE_FOLDER = __file__.rpartition("/launcher/")[0] + "/"
_PUBLIC = re.compile(r"/(?:trainer|comm)\.py$")  # what a task may call, of this package
_CALLS_A_MODULE = "/torch/nn/modules/module.py"
_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen")


def callers_alone(said: str, stacks: Mapping[int, str]) -> dict[int, str]:
    """The ranks that the user's code had called into a collective, with its line; the others not.

    Nobody where ranks did not meet in different collectives, or where all were called alike.
    """
    if not is_said(FaultKind.COLLECTIVE_MISMATCH, said):
        return {}
    places = {rank: place_of_users_collective(stack) for rank, stack in sorted(stacks.items())}
    callers = {rank: place for rank, place in places.items() if place}
    return callers if len(callers) < len(places) else {}


def told_of_mismatch(said: str, rank: int, stacks: Mapping[int, str]) -> list[str]:
    """Who made another collective, or that sizes differ in the same one; nothing else is told.

    `said` is what `rank`, which died, wrote; `stacks` are where all stood: the traceback with which
    they left, or where they waited.
    """
    if not is_said(FaultKind.COLLECTIVE_MISMATCH, said):
        return []
    if alone := callers_alone(said, stacks):
        lines = [f"rank {one} called it: {place}" for one, place in alone.items()]
        return [*lines, f"the others were in {ENGINES}: every rank calls a collective, or none"]
    places = {one: place_of_users_collective(stack) for one, stack in stacks.items()}
    own = places.pop(rank, "")
    odd = {one: place for one, place in sorted(places.items()) if place != own}
    if own and not odd:
        return [f"rank {rank} called it: {own}: does every rank call it, in the same place?"]
    if not odd:
        return [
            "the ranks met in collectives of different sizes: has one of them a model of another "
            "shape, or one collective more?"
        ]
    return [
        f"rank {one} was in another collective: {place or ENGINES}" for one, place in odd.items()
    ]


ENGINES = "one of the engine"


def place_of_users_collective(stack: str) -> str:
    """`mytask.py line 14 in loss`: the user's line that called a collective; "" if none did.

    One of torch, or a method of the trainer, all of whose ranks call it. What a module of the model
    does as it is called is the engine's.
    """
    for thread in _THREAD.split(stack):
        frames = [match.groupdict() for match in _FRAME.finditer(thread)]
        if "most recent call last" in thread:
            frames.reverse()
        has_torch, inner = False, ""
        for frame in frames:
            file = frame["file"]
            has_torch = has_torch or "/torch/distributed/" in file
            if file.endswith(_CALLS_A_MODULE):
                break
            if not (file.startswith(_PACKAGE_FOLDER) or any(p in file for p in _INSTALLED)):
                is_own = inner.startswith(_PACKAGE_FOLDER)
                if _PUBLIC.search(inner) if is_own else has_torch:
                    return f"{file} line {frame['line']} in {frame['name']}"
                break
            inner = file
    return ""
