"""The job in the checkpoints of a training, and the settings that must be equal to resume.

Each engine saves and loads its own state; here are the other fields, and the reports.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from allranks.checkpoint.checkpointer import Checkpointer, Loaded
from allranks.checkpoint.commit import Ranks
from allranks.checkpoint.format import About, Reach
from allranks.errors import RequestError
from allranks.job.job import Job, redacted
from allranks.job.program import by_name
from allranks.job.resume import (
    CHECKPOINTS,
    HARMLESS,
    Base,
    changed,
    changed_fields,
    checkpoint_folders,
)
from allranks.training.callback import Callback
from allranks.training.record.digests import begin_course
from allranks.training.task_fields import TaskFields, plain_fields, plain_values


class SavedTraining(ABC):
    """The checkpoints of one training, in the run folder of its job. Every rank makes one.

    `task` is as its user has written it. An engine makes the `checkpointer`, which gets `rules`.
    `facts(job)` is what decides which bits come out beside the job, and `deciding` names those of
    which the bits of a step follow. `attempt`, `reach` and `report` are those of a `Checkpointer`.
    """

    checkpointer: Checkpointer
    deciding: ClassVar[tuple[str, ...]]

    def __init__(
        self, task: TaskFields, job: Job, attempt: int, reach: Reach, report: Callable[..., None]
    ) -> None:
        self.task, self.job, self.report = task.as_written, job, report
        self.rules: dict[str, Any] = {"keep": job.keep, "best": job.best, "attempt": attempt}
        self.rules |= {"reach": reach, "report": report}

    @staticmethod
    @abstractmethod
    def facts(job: Job) -> dict[str, Any]:
        """What decides which bits come out, beside the job."""

    @abstractmethod
    def save(self, step: int, other_state: dict[str, Any], metrics: dict[str, float]) -> None:
        """Save the engine's state, and `other_state` of the training; a thread writes it."""

    def prepare(self, other_state: dict[str, Any]) -> None:
        """Once, after a step that is not saved: allocate the memory that saves need."""

    @abstractmethod
    def load(self, load_other_state: Callable[[dict[str, Any]], None]) -> int | None:
        """Load the newest good checkpoint, and pass on the other state; returns its step, if any.

        That of this run folder, else of `job.resume`. If either cannot be loaded, the checkpoint
        before is tried. Raises `RequestError` for the checkpoint of another job.
        """

    @property
    def sources(self) -> list[Path]:
        """Where its checkpoint may lie, its own folder first."""
        own_folder, resumed = Path(self.job.run_dir) / CHECKPOINTS, self.job.resume
        return [own_folder, *(checkpoint_folders(Path(resumed)) if resumed else [])]

    def about(self, other_state: dict[str, Any], metrics: dict[str, float]) -> About:
        """The fields of a manifest besides the state; `other_state` has the progress."""
        fields = {f.name: getattr(self.task, f.name) for f in dataclasses.fields(self.task)}

        def slow() -> dict[str, Any]:
            task = redacted(plain_values(fields))
            return {"job": {**self.job.to_data(), "task": task}, "facts": self.facts(self.job)}

        return About(progress=other_state["progress"], metrics=metrics, slow=slow)

    def check(self, loaded: Loaded) -> ResumeChanges:
        """What has changed since; raises `RequestError` for the checkpoint of another job."""
        saved, was = loaded.manifest, loaded.manifest.job
        base = Base(loaded.path, False, was, was.get("task", {}))
        of_job = {**changed(base, self.job), **changed_fields(base, plain_fields(self.task))}
        facts = self.facts(self.job)
        return ResumeChanges(of_job, differing(saved.facts, facts, self.deciding, self.job.bitwise))

    def load_newest(
        self, rank: int, take: Callable[[Loaded], None], templates: Any = None
    ) -> int | None:
        """Load the newest good checkpoint; returns its step, or `None`. The leader reports it.

        `take` loads what was read; `templates` are tensors to fill in place. Raises `RequestError`
        for the checkpoint of another job, and if the job starts from one and none holds.
        """

        def take_checked(loaded: Loaded) -> None:
            self.check(loaded)
            take(loaded)

        loaded = self.checkpointer.load(self.sources, templates, take_checked)
        if loaded is None and self.job.resume:
            raise RequestError(
                asked=f"--resume {self.job.resume}",
                found="no checkpoint in it whose digests hold",
                why="starting anew instead would pass over what was asked",
                do="see `allranks checkpoints verify` for what is wrong with each",
            )
        if loaded is None:
            return None
        if rank == 0:
            changes = self.check(loaded)
            if self.job.run_dir and (changes.facts or set(changes.job) - HARMLESS):
                begin_course(Path(self.job.run_dir), loaded.step)
            self.report(
                "resumed",
                step=loaded.step,
                path=str(loaded.path),
                ranks_were=loaded.manifest.ranks,
                changes=changes.job,
                differs=changes.facts,
                random_streams_restored=(loaded.rank_state or {}).get("random") is not None,
            )
        return loaded.step


# --- callback states -----------------------------------------------------------------------------
# The state of callbacks, in the checkpoints of a training.
#
# A callback with `state_dict()` and `load_state_dict(state)` has its state in every checkpoint:
# once where it is the same on all ranks, else that of each rank, which goes on only on as many
# ranks. It is loaded after `on_start`, before the first step. One that keeps numbers or tensors
# without these two is named, once.


Contents = Callable[[Callback], dict[str, Any]]


class CallbackStates:
    """The states of `callbacks`, of a rank of `comm`.

    `digest(state, name)` tells two states apart, and raises for what no checkpoint can hold.
    `contents(callback)` is what it keeps, by name. `report(event, **values)` hears the note.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        comm: Ranks,
        digest: Callable[[Any, str], str],
        contents: Contents = lambda callback: {},
        report: Callable[..., None] = lambda event, **values: None,
    ) -> None:
        self._comm, self._digest, self._contents, self._report = comm, digest, contents, report
        self._stateful: dict[str, Any] = {}
        self._others: list[Callback] = []
        for callback in callbacks:
            kind = type(callback)
            if all(hasattr(callback, n) for n in ("state_dict", "load_state_dict")):
                self._stateful[_unused(kind.__qualname__, self._stateful)] = callback
            elif not kind.__module__.startswith("allranks."):
                self._others.append(callback)
        self.is_empty = not (self._stateful or self._others)
        self._at_start: list[dict[str, Any]] | None = None
        self._loaded: dict[str, Any] | None = None

    def begin(self) -> None:
        """The first step follows, `on_start` was called: take up what was loaded."""
        if self._at_start is None:
            self._load()
            self._at_start = [self._contents(callback) for callback in self._others]

    def check(self) -> None:
        """Raise `RequestError` for a state that no checkpoint can hold. No communication."""
        for name, callback in self._stateful.items():
            self._digest(callback.state_dict(), name)

    def state(self) -> dict[str, Any]:
        """`callbacks`, alike on all ranks, and `callbacks_of_rank`; {} if none has a state.

        Every rank calls this. Sends a digest of each state.
        """
        self._load()
        self._note()
        if not self._stateful:
            return {}
        states = {name: callback.state_dict() for name, callback in self._stateful.items()}
        digests = [self._digest(state, name) for name, state in states.items()]
        alike: list[bool] = [True] * len(digests)
        if self._comm.size > 1:
            columns = [text.split() for text in self._comm.gather_texts(" ".join(digests))]
            alike = [len(set(column)) == 1 for column in zip(*columns, strict=True)]
        of_all = dict(zip(states, alike, strict=True))
        return {
            "callbacks": {n: {"state": s} if of_all[n] else {} for n, s in states.items()},
            "callbacks_of_rank": {n: s for n, s in states.items() if not of_all[n]},
        }

    def of_this_rank(self) -> dict[str, Any]:
        """The same, of this rank alone, whatever the others have. No communication."""
        self._load()
        states = {n: {"state": c.state_dict()} for n, c in self._stateful.items()}
        return {"callbacks": states} if states else {}

    def load_state(self, saved: dict[str, Any]) -> None:
        """Take up what `state` returned, now or when the training begins."""
        rank_states, states = saved.get("callbacks_of_rank") or {}, {}
        for name, entry in (saved.get("callbacks") or {}).items():
            if name not in self._stateful:
                continue
            if "state" not in entry and name not in rank_states:
                raise RequestError(
                    asked=f"to resume on {self._comm.size} ranks",
                    found=f"a state of the callback {name} that was another on each rank",
                    why="it belongs to one of the ranks that there were",
                    do="resume on as many ranks as the checkpoint has, or let state_dict() return "
                    "the same on all ranks",
                )
            states[name] = entry["state"] if "state" in entry else rank_states[name]
        self._loaded = states
        if self._at_start is not None:
            self._load()

    def _load(self) -> None:
        loaded, self._loaded = self._loaded or {}, None
        for name, state in loaded.items():
            self._stateful[name].load_state_dict(state)

    def _note(self) -> None:
        """Name once what callbacks have changed since the start and no checkpoint has."""
        if not self._at_start:
            return
        changed = []
        for callback, before in zip(self._others, self._at_start, strict=True):
            now = self._contents(callback)
            names = sorted(name for name in now if name not in before or now[name] != before[name])
            changed += [f"{type(callback).__qualname__}.{name}" for name in names[:3]]
        if changed:
            self._at_start = []
            if self._comm.rank == 0:
                self._report("callback_notes", notes=[f"{', '.join(changed)}: {NOT_SAVED}"])


NOT_SAVED = (
    "in no checkpoint, so a resume begins it anew; state_dict() and load_state_dict(state) of the "
    "callback put it there"
)


def _unused(name: str, names: dict[str, Any]) -> str:
    """The name, or the first free one with a number behind it."""
    number = sum(known.partition("#")[0] == name for known in names)
    return f"{name}#{number}" if number else name


# --- resume checks -------------------------------------------------------------------------------
# Resuming from a checkpoint: where an engine looks for one, and what must be as it was.
#
# `resume` says what of a job may change; here a checkpoint that was loaded is held against the job
# that goes on from it, on every rank alike, before anything of it is taken up.


@dataclass(frozen=True)
class ResumeChanges:
    """What is not as it was, name -> [was, is]: of the job and its task, and of what is around."""

    job: dict[str, list[Any]]
    facts: dict[str, list[Any]]


def differing(
    was: dict[str, Any], now: dict[str, Any], deciding: Iterable[str], bitwise: bool
) -> dict[str, list[Any]]:
    """The facts that are not as they were, name -> [was, is]; raises where bits are promised.

    A module of the user's that is not imported yet may come later: it has not changed.
    """
    was, now = by_name(was), by_name(now)
    names = [name for name in was if name in now or not name.startswith("module ")]
    changes = {name: [was[name], now.get(name)] for name in names if was[name] != now.get(name)}
    name = next((name for name in deciding if name in changes), "")
    if bitwise and name:
        raise RequestError(
            asked="to resume with --bitwise",
            found=f"{name} is {changes[name][1]}; the checkpoint was made with {changes[name][0]}",
            why="the bits of a step follow from it",
            do="resume where it was, or start anew without --bitwise and --resume PATH",
        )
    return changes


def check_ends_later(job: Job, done: int, total: int | None) -> None:
    """Raise `RequestError` where a job asks for fewer steps than it goes on from."""
    if total is None or done <= total:
        return
    limit = f"--steps {job.steps}" if job.steps is not None else f"epochs that are {total} steps"
    raise RequestError(
        asked=f"{limit}, from {job.resume or job.run_dir}",
        found=f"its newest checkpoint, after step {done}",
        why="a training goes on, never back: the result would be that of other steps than asked",
        do=f"--steps {done} or more, or start at an earlier checkpoint in another folder: "
        "--resume RUN/checkpoints/step-…",
    )
