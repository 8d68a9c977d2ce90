"""Called once torch has been imported in a watched script: puts every recorder in its place."""

from __future__ import annotations

import atexit
import importlib
import os
from typing import Any

from allranks.tools.script_check.record.collectives import Collectives, Losses
from allranks.tools.script_check.record.data import Loaders, Workers
from allranks.tools.script_check.record.facts import Facts, Progress
from allranks.tools.script_check.record.files import Files
from allranks.tools.script_check.record.replicas import Replicas
from allranks.tools.script_check.record.stepping import Schedules, Stepping

WRAPPED = (
    *("torch.distributed", "torch.optim.lr_scheduler", "torch.utils.data.distributed"),
    *("torch.utils.data.dataloader", "torch.nn.parallel", "torch.serialization"),
)


def watch_here(folder: str) -> None:
    """The same where torch is imported already: in the fork of a warm server."""
    install(importlib.import_module("torch"), folder)


def install(torch: Any, folder: str) -> None:
    """Watch this process; facts go to `folder`."""
    for name in WRAPPED:
        importlib.import_module(name)
    assert torch.__file__ is not None
    facts, progress = Facts(folder, os.path.dirname(torch.__file__)), Progress()
    loaders = Loaders(torch, facts, progress)
    replicas = Replicas(torch, facts, progress)
    stepping = Stepping(torch, facts, progress, replicas)
    schedules = Schedules(torch, facts, stepping)
    collectives, losses = Collectives(torch, facts, progress), Losses(torch, facts, progress)
    place = {name: os.environ.get(name.upper()) for name in ("rank", "local_rank", "group_rank")}
    facts.tell("process", **place, torch=str(torch.__version__))
    digests = facts.guarded(replicas.finish)

    def finish() -> None:
        parts = (loaders, schedules, stepping, collectives, losses)
        for part in parts:
            facts.guarded(part.finish)()
        digests()

    others = losses, Workers(torch, facts, progress), Files(torch, facts, progress)
    for recorder in (loaders, replicas, stepping, schedules, *others):
        facts.guarded(recorder.install)()
    if torch.distributed.is_available():
        facts.guarded(collectives.install)(digests)
    atexit.register(finish)
