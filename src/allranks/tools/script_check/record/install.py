"""Installs all recorders in a watched script, once it has imported torch."""

from __future__ import annotations

import atexit
import builtins
import importlib
import io
import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from typing import Any
from zlib import crc32

from allranks.tools.script_check.record.collectives import MeanLosses, ScriptCollectives
from allranks.tools.script_check.record.data import Loaders, Workers
from allranks.tools.script_check.record.facts import ScriptFacts, StepCounts, note_before
from allranks.tools.script_check.record.stepping import Replicas, Schedules, Stepping
from allranks.tools.script_check.record.steps import (
    OPERATORS_AT,
    STEPS_IN,
    StepOperators,
    StepValues,
)

# --- files ---------------------------------------------------------------------------------------
# Files that a rank writes and reads, lines that it prints, each with the line of the script.


MOST_FILES, MOST_OF_A_FILE, MOST_OF_A_LINE, MOST_LINES = 1000, 8, 8, 200
PASSING = ("/dev/", "/proc/", "/sys/")
CODE = (".py", ".pyc", ".so")
ENDINGS = (".lock", *CODE[1:], ".jsonl.part")
LOCKS, STANDARD = ("fcntl.flock", "fcntl.lockf"), ("<stdout>", "<stderr>", 1, 2)


class FileFacts:
    """Records the files that this process writes and reads, with its position in training."""

    def __init__(self, torch: Any, facts: ScriptFacts, progress: StepCounts) -> None:
        self.torch, self.facts, self.progress = torch, facts, progress
        self._written: Counter[tuple[str, str]] = Counter()
        self._paths: Counter[str] = Counter()
        self._has_locked = False
        self._lines: Counter[Any] = Counter()
        self._inside = False
        caches = (os.path.expanduser("~/.cache"), os.environ.get("XDG_CACHE_HOME"))
        self._caches = tuple(os.path.join(cache, "") for cache in caches if cache)

    def install(self) -> None:
        """Wrap `torch.save` and `print`; add an audit hook for every file that Python opens."""
        opened, locked = self.facts.guarded(self._opened), self.facts.guarded(self._locked)

        def audit_hook(event: str, args: tuple[Any, ...]) -> None:
            if event == "open" and not self._inside and isinstance(args[0], str | os.PathLike):
                self._inside = True
                try:
                    opened(*args)
                finally:
                    self._inside = False
            elif event in LOCKS and not self._has_locked:
                self._has_locked = True
                locked()

        note_before(self.torch, "save", self.facts.guarded(self._saved))
        self.torch.serialization.save = self.torch.save
        note_before(builtins, "print", self.facts.guarded(self._printed))
        sys.addaudithook(audit_hook)

    def _saved(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        name = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)
        if isinstance(name, str | os.PathLike):
            self._write_file("save", name)

    def _opened(self, path: Any, mode: str | None, flags: int) -> None:
        if bool(set(mode) & set("wx")) if mode else bool(flags & os.O_CREAT):
            if not (flags & os.O_APPEND):
                self._write_file("open", path)
        elif not (flags & os.O_APPEND) and not os.fspath(path).endswith(CODE):
            self._write_file("read", path)

    def _locked(self) -> None:
        self.facts.write("lock")

    def _write_file(self, how: str, name: str | os.PathLike[str]) -> None:
        if self._paths[how] >= MOST_FILES:
            return
        path = os.path.realpath(name)
        passing = path.startswith(PASSING) or path.endswith(ENDINGS)
        passing = passing or path.startswith((*self._caches, self.facts.folder))
        count = self._written[how, path]
        if passing or count >= MOST_OF_A_FILE:
            return
        where = self.facts.where()
        if how == "read" and (where is None or path.startswith((sys.prefix, sys.base_prefix))):
            return
        self._written[how, path] += 1
        self._paths[how] += count == 0
        self.facts.write("file", how=how, path=path, where=where, at=self.progress.position())

    def _printed(self, *args: Any, file: Any = None, **kwargs: Any) -> None:
        if file is not None and file is not sys.stdout and file is not sys.stderr:
            return
        stream = file or sys.stdout
        if isinstance(stream, io.TextIOBase) and getattr(stream, "name", None) not in STANDARD:
            return  # redirected: dill reads what dis prints, some ranks write to os.devnull
        where = self.facts.where()
        if self._lines[where] < MOST_OF_A_LINE and self._lines.total() < MOST_LINES:
            self._lines[where] += 1
            text, batch = " ".join(map(str, args)), self.progress.batch
            digest, after = crc32(text.encode()), batch and batch[:2]
            self.facts.write("print", where=where, text=text[:80], digest=digest, after=after)


WRAPPED = (
    *("torch.distributed", "torch.optim.lr_scheduler", "torch.utils.data.distributed"),
    *("torch.utils.data.dataloader", "torch.nn.parallel", "torch.serialization"),
)


def watch_here(folder: str) -> None:
    """`install` where torch is already imported: in the fork of a warm server."""
    install(importlib.import_module("torch"), folder)


def install(torch: Any, folder: str) -> None:
    """Watch this process; facts go to `folder`."""
    for name in WRAPPED:
        importlib.import_module(name)
    assert torch.__file__ is not None
    facts, progress = ScriptFacts(folder, os.path.dirname(torch.__file__)), StepCounts()
    loaders = Loaders(torch, facts, progress)
    replicas = Replicas(torch, facts, progress)
    stepping = Stepping(torch, facts, progress, replicas)
    if at := int(os.environ.get(OPERATORS_AT, "0")):
        operators = StepOperators(torch, facts, at)
        stepping.around = [facts.guarded(operators.before), facts.guarded(operators.after)]
        facts.guarded(stepping.install)()
        facts.guarded(operators.install)()
        return
    schedules = Schedules(torch, facts, stepping)
    collectives = ScriptCollectives(torch, facts, progress)
    losses = MeanLosses(torch, facts, progress)
    place = {name: os.environ.get(name.upper()) for name in ("rank", "local_rank", "group_rank")}
    facts.write("process", **place, torch=str(torch.__version__))
    digests = facts.guarded(replicas.finish)

    def finish(*parts: Any) -> None:
        for part in parts:
            facts.guarded(part.finish)()

    def leave(number: int, frame: object) -> None:
        """Write what is known, and end as without a handler; tensors may be half updated."""
        finish(loaders, schedules, stepping, collectives)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    others = losses, Workers(torch, facts, progress), FileFacts(torch, facts, progress)
    for recorder in (loaders, replicas, stepping, schedules, *others):
        facts.guarded(recorder.install)()
    if most := int(os.environ.get(STEPS_IN, "0")):
        values = StepValues(torch, facts, progress, most)
        stepping.around = [facts.guarded(values.before), facts.guarded(values.after)]
        facts.guarded(values.install)()
    if torch.distributed.is_available():
        facts.guarded(collectives.install)(digests)
    atexit.register(digests)
    atexit.register(finish, loaders, schedules, stepping, collectives, losses)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        with suppress(ValueError):  # torch is imported in a thread
            signal.signal(signal.SIGTERM, leave)
