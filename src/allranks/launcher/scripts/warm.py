"""`--warm` and `--shared-memory`: start a script in a fork of a server, or with a hook.

With `--warm` the fork server has imported the framework, so a script starts in milliseconds. With
`--shared-memory` a hook patches the framework, with the script unchanged: in a fork before its
first line, else after the script has imported the framework.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from allranks.errors import RequestError
from allranks.launcher.scripts.plan import WARM, CommandRequest, RankCommand, script_position

IN_SCRIPTS = "allranks.torch.shared_memory.backend"
IN_PLACE_OF_GLOO = f"{IN_SCRIPTS}:in_place_of_gloo"
WATCHER, WATCHED_IN = "allranks.tools.script_check.record.install:watch_here", "ALLRANKS_WATCHED"
OUTCOME, OUTCOME_IN = "collectives.json", "ALLRANKS_IN_PLACE_OF_GLOO"
WITHOUT_HOOKS = "IES"  # options of Python with which it reads no PYTHONPATH, or no sitecustomize


def modules_for(request: CommandRequest) -> tuple[str, ...]:
    """The modules that the fork server imports before it starts the first rank."""
    hooks = (IN_SCRIPTS,) if request.shared_memory and request.warm else ()
    return WARM.get(request.warm, ()) + hooks


def check_start(request: CommandRequest) -> None:
    """Raise `RequestError` for a command that cannot be started as requested.

    With `--warm` it must be a script for this Python, because the fork server runs it.
    """
    if not request.warm:
        _check_hooks(request)
        return
    python = shutil.which(request.command[0]) or request.command[0]
    is_ours = os.path.dirname(os.path.abspath(python)) == os.path.dirname(sys.executable)
    name = request.command[0].rpartition("/")[2]
    options = request.command[1 : script_position(request.command)]
    odd = [word for word in options if word not in ("-u", "-m")]
    if not name.startswith("python") or not is_ours or odd or len(request.command) < 2:
        raise RequestError(
            asked=f"--warm {request.warm}",
            found=" ".join([python, *odd]),
            why=f"a script that runs in a fork of {sys.executable} is started by it, "
            "with no options",
            do="allranks run --warm torch … -- train.py, or leave the option away",
        )


def _check_hooks(request: CommandRequest) -> None:
    """Refuse options with which Python reads no `sitecustomize`: it would silently use Gloo."""
    options = request.command[1 : script_position(request.command)]
    letters = {word: word[1:] for word in options if word[:1] == "-" and word[:2] != "--"}
    odd = [word for word, of in letters.items() if set(of) & set(WITHOUT_HOOKS)]
    if request.shared_memory and odd:
        raise RequestError(
            asked="--shared-memory",
            found=" ".join([request.command[0], *odd]),
            why="a Python that is started so imports no sitecustomize, which puts the process "
            "group there",
            do=f"leave {' and '.join(odd)} away",
        )


def argument_of(request: CommandRequest, planned: RankCommand, run_dir: Path) -> dict[str, Any]:
    """The argument of `warm_script`: the script, its words, and the hooks to call before it."""
    position = script_position(planned.command)
    before = {IN_PLACE_OF_GLOO: str(run_dir / OUTCOME)} if request.shared_memory else {}
    if WATCHED_IN in planned.environment:
        before[WATCHER] = planned.environment[WATCHED_IN]
    return {
        "script": planned.command[position],
        "words": list(planned.command[position + 1 :]),
        "is_module": "-m" in planned.command[1:position],
        "before": before,
    }


def outcome_in(run_dir: Path) -> dict[str, str]:
    """The outcome of `--shared-memory` by rank 0: asked, did, why. Read and removed."""
    path = run_dir / OUTCOME
    try:
        outcome: dict[str, str] = json.loads(path.read_text())
    except (OSError, ValueError):  # no process group was made, or making it failed
        return {}
    path.unlink()
    return outcome
