"""Ranks that met in different collectives: which of them stood where, when one failed of it.

In shared memory each says what the other makes. Gloo ends a rank that gets a message of another
size than it waits for, and that rank is seldom the one to blame. The others are asked for their
stacks before they are stopped. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from allranks.errors import FaultKind
from allranks.launcher.processes.foreign import is_said

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\S+)', re.M)
_THREAD = re.compile(r"^(?:Current t|T)hread 0x", re.M)
_PACKAGE_FOLDER = __file__.rpartition("/launcher/")[0] + "/"
_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen")


def told_of_mismatch(said: str, own: str, stacks: Mapping[int, str]) -> list[str]:
    """Who made another collective, or that sizes differ in the same one; nothing else is told.

    `said` is what the rank that died wrote, `own` its stack, `stacks` are those of the others: as
    they stood, or the traceback with which they left.
    """
    if not is_said(FaultKind.COLLECTIVE_MISMATCH, said):
        return []
    its_own = place_of_users_collective(own)
    others = {rank: place_of_users_collective(stack) for rank, stack in stacks.items()}
    odd = {rank: place for rank, place in sorted(others.items()) if place != its_own}
    if not odd:
        return [
            "the ranks met in collectives of different sizes: has one of them a model of another "
            "shape, or one collective more?"
        ]
    return [
        f"rank {rank} was in another collective: {place or ENGINES}" for rank, place in odd.items()
    ]


ENGINES = "one of the engine"


def place_of_users_collective(stack: str) -> str:
    """`mytask.py line 14 in loss`: the user's line that called a collective; "" if none did."""
    for thread in _THREAD.split(stack):
        frames = [match.groupdict() for match in _FRAME.finditer(thread)]
        if "most recent call last" in thread:
            frames.reverse()
        of_torch = [i for i, frame in enumerate(frames) if "/torch/distributed/" in frame["file"]]
        callers = frames[of_torch[0] :] if of_torch else []  # what torch calls may be of ours
        for frame in callers:
            if any(part in frame["file"] for part in _INSTALLED):
                continue
            if frame["file"].startswith(_PACKAGE_FOLDER):
                break  # the engine called it
            return f"{frame['file']} line {frame['line']} in {frame['name']}"
    return ""
