"""One hash seed for all processes of a job: the order of a set of texts is the same in each.

Python hashes texts with a seed of its own in each process, so what is made in the order of a set
(class numbers, layers) differs from process to process and from run to run. Every fork server, on
whatever node, is started with the same `PYTHONHASHSEED`, and what it forks inherits it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping

from allranks.errors import RequestError

VARIABLE = "PYTHONHASHSEED"
USUAL = "0"
RANDOM = "random"
SEEDS = 2**32


def hash_seed(environment: Mapping[str, str] | None = None) -> str:
    """That of a job started in this environment: its own number, or 0.

    `PYTHONHASHSEED=random` asks for another one with each call; the job still has one.
    """
    given = (os.environ if environment is None else environment).get(VARIABLE, "")
    if given == RANDOM:
        return str(random.SystemRandom().randrange(1, SEEDS))
    return given or USUAL


def check_hash_seed(wanted: str) -> None:
    """Raise `RequestError` if the environment of this node says another one than the job has."""
    given = os.environ.get(VARIABLE, "")
    if given not in ("", RANDOM, wanted):
        raise RequestError(
            asked=f"{VARIABLE}={given} on this node",
            found=f"{VARIABLE}={wanted} where the job was started",
            why="sets of texts would have another order on this node than on the others",
            do=f"set {VARIABLE} to the same number on all nodes, or on none",
        )
