"""A request for a script, and the same that is watched: the variables that make it so."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from allranks.launcher.scripts.on_path import path_with_hooks
from allranks.launcher.scripts.plan import CommandRequest
from allranks.launcher.scripts.warm import WATCHED_IN

FACTS = "facts"


def watched_request(
    request: CommandRequest, run_dir: str, given: Mapping[str, str]
) -> CommandRequest:
    """The same command in `run_dir`, whose processes write facts to its folder `facts`.

    `given` is the environment that they inherit; what its PYTHONPATH names still stands there.
    """
    environment = (
        *request.environment,
        ("PYTHONPATH", path_with_hooks(given)),
        (WATCHED_IN, os.path.join(run_dir, FACTS)),
    )
    return dataclasses.replace(request, run_dir=run_dir, environment=environment)
