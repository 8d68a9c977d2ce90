"""A queue of chunks of samples for learners, in which each chunk counts once.

The steps of a job are cut into rounds of `every` steps, and the global batch of each step into
`parts`, as ranks would cut it. A chunk is one part of the steps of one round:

    round   steps        part 0    part 1    part 2
    0       0 … every-1  chunk 0   chunk 1   chunk 2
    1       every …      chunk 3   chunk 4   chunk 5

A chunk is free, then assigned to a learner, then done. If its learner is lost, it is free again. If
none is free, an idle learner gets the chunk that another one has had the longest: the first result
counts, and the second one is dropped. So each sample counts once in an epoch, whichever learner
dies, and the end of an epoch does not wait for the slowest. Pure arithmetic, no clock, no thread.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from allranks.checkpoint.checkpointer import read_as
from allranks.checkpoint.folder import committed, step_of, verify_files
from allranks.checkpoint.format import NAME, BadCheckpoint, Manifest, digest, read_manifest
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.job.resume import CHECKPOINTS
from allranks.job.run_folder import JsonLines, rank_events_path, read_rows
from allranks.launcher.heartbeat import Heartbeat
from allranks.launcher.world import World
from allranks.strategies.roles import LEADER


@dataclass(frozen=True)
class Chunk:
    """The steps `first` to `first + steps - 1` of a job, of which one `part` of each batch."""

    number: int
    part: int
    first: int
    steps: int


@dataclass
class Ledger:
    """The chunks of the steps `origin` to `steps` - 1 of a job.

    `owners` are the learners of each assigned chunk, in order.
    """

    steps: int
    every: int
    parts: int
    origin: int = 0
    done: set[int] = field(default_factory=set)
    owners: dict[int, list[int]] = field(default_factory=dict)
    whole: int = 0
    """All chunks below this number are done; `done` has those above alone."""
    steps_of_parts: int = 0
    """The steps of parts that are done: `parts` of them are a step of the job."""

    @property
    def chunks(self) -> int:
        """How many there are."""
        return -(-max(0, self.steps - self.origin) // self.every) * self.parts

    @property
    def steps_done(self) -> int:
        """How many steps of the job were made, by their samples."""
        return self.origin + self.steps_of_parts // self.parts

    @property
    def is_over(self) -> bool:
        return self.whole >= self.chunks

    def chunk(self, number: int) -> Chunk:
        """The chunk of this number."""
        turn, part = divmod(number, self.parts)
        first = self.origin + turn * self.every
        return Chunk(number, part, first, min(self.every, self.steps - first))

    def is_done(self, number: int) -> bool:
        return number < self.whole or number in self.done

    def next_for(
        self,
        learner: int,
        without: Iterable[int] = (),
        *,
        before: int | None = None,
        spare: bool = True,
    ) -> Chunk | None:
        """Assign the next chunk to a learner, and return it; `None` if there is none for it.

        A free chunk of the first round that has one, that of its own part if it is free. `without`
        are chunks that wait for a merge. None that begins with step `before`, or later; and none
        that another one has, unless it may be a `spare`.
        """
        waiting = set(without)
        number = self._free_for(learner, waiting)
        if number is not None and before is not None and self.chunk(number).first >= before:
            number = None
        if number is None and spare:
            number = self._longest_held(learner, waiting)
        if number is None:
            return None
        self.take(learner, number)
        return self.chunk(number)

    def take(self, learner: int, number: int) -> None:
        """Assign this chunk to a learner."""
        holders = self.owners.setdefault(number, [])
        if learner not in holders:
            holders.append(learner)

    def _free_for(self, learner: int, waiting: set[int]) -> int | None:
        free = (
            n
            for n in range(self.whole, self.chunks)
            if n not in self.done and n not in self.owners and n not in waiting
        )
        first = next(free, None)
        if first is None:
            return None
        preferred = first - first % self.parts + learner % self.parts
        is_free = not (self.is_done(preferred) or preferred in self.owners or preferred in waiting)
        return preferred if preferred > first and is_free else first

    def _longest_held(self, learner: int, waiting: set[int]) -> int | None:
        """The longest assigned chunk that only one other learner has."""
        for number, owners in self.owners.items():
            if len(owners) == 1 and learner not in owners and number not in waiting:
                return number
        return None

    def came(self, number: int) -> None:
        """The result of this chunk waits for a merge: it has no owner any more."""
        self.owners.pop(number, None)

    def merged(self, number: int) -> None:
        """The result of this chunk is in the weights."""
        assert not self.is_done(number), "a chunk counts once"
        self.owners.pop(number, None)
        self.done.add(number)
        self.steps_of_parts += self.chunk(number).steps
        while self.whole in self.done:
            self.done.remove(self.whole)
            self.whole += 1

    def lost(self, learner: int) -> list[Chunk]:
        """Remove a lost learner; returns the chunks that are free again."""
        freed = []
        for number, holders in list(self.owners.items()):
            if learner in holders:
                holders.remove(learner)
                if not holders:
                    del self.owners[number]
                    freed.append(self.chunk(number))
        return freed

    def state(self) -> dict[str, Any]:
        """What is done, as plain values: what learners have now they tell again."""
        shape = {"steps": self.steps, "every": self.every, "parts": self.parts}
        return {**shape, "origin": self.origin, "whole": self.whole, "done": sorted(self.done)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned, in the chunks that it was cut into.

        Raises `RequestError` where the job has another end by now, within a round that is done in
        part: its chunks had fewer steps.
        """
        self.every, self.parts = int(state["every"]), int(state["parts"])
        self.origin, then = int(state["origin"]), int(state["steps"])
        self.whole, self.done, self.owners = int(state["whole"]), set(state["done"]), {}
        short_from = (then - self.origin) // self.every * self.parts
        if then != self.steps and (then - self.origin) % self.every:
            if self.whole == short_from + self.parts:  # that job was over
                self.origin, self.whole, self.done = then, 0, set()
            elif self.whole > short_from or any(n >= short_from for n in self.done):
                raise RequestError(
                    asked=f"--steps {self.steps}",
                    found=f"a checkpoint of {then} steps, the last {self.every} of them half done",
                    why="samples that are done would count twice, or others not at all",
                    do=f"--steps {then} first",
                )
        numbers = (*range(self.whole), *self.done)
        self.steps_of_parts = sum(self.chunk(number).steps for number in numbers)


# --- evaluating ----------------------------------------------------------------------------------
# Which checkpoints an evaluator judges while others train: the newest, each once, and the last.
#
# Checkpoints that came and went meanwhile are passed over, and one that is damaged, which is said.
# An evaluator reads the checkpoints of the run folder and changes none; one that is started again
# goes on after what it has said already.


LOOK_S = 0.1
ENDED = ("done", "stopped")

T = TypeVar("T")


class Judged(NamedTuple):
    """What was evaluated: after a rewind the same step may have other weights."""

    step: int
    digest: str


def checkpoints_to_evaluate(
    run_dir: Path,
    world: World,
    heartbeat: Heartbeat,
    read: Callable[[Path, Manifest], T],
    events: JsonLines,
) -> Iterator[tuple[Judged, T]]:
    """Each newest checkpoint: which it is, and what `read` makes of it; until the leader has ended.

    That of the end is among them, although the leader is done by then. The event of an evaluation
    has the step and the digest; of one that is damaged there is the event `checkpoint_skipped`.
    """
    looks = CheckpointWatch(run_dir / CHECKPOINTS, _evaluated_before(run_dir, world.rank), events)
    while True:
        is_last = heartbeat.wants_stop or _has_ended(run_dir, world.attempt)  # before it looks
        heartbeat.enter("exchange")
        for judged, value in looks.newest(read):
            heartbeat.at_step(judged.step)
            heartbeat.enter("evaluate")
            yield judged, value
        if is_last:
            return
        time.sleep(LOOK_S)


def evaluate_checkpoints(
    job: Job,
    world: World,
    heartbeat: Heartbeat,
    events: JsonLines,
    read: Callable[[Path, Manifest], T],
    evaluate: Callable[[int, T], dict[str, float]],
) -> None:
    """Run an evaluator until the leader of `job` has ended; `evaluate(step, value)` gives metrics.

    It does not communicate, so no process waits for it, and its death costs only time.
    """
    events.event("ready", host=socket.gethostname(), role=world.role, index=world.role_index)
    evaluated = 0
    checkpoints = checkpoints_to_evaluate(Path(job.run_dir), world, heartbeat, read, events)
    for judged, value in checkpoints:
        metrics = evaluate(judged.step, value)
        events.event("evaluated", **judged._asdict(), metrics=metrics, best=False)
        evaluated += 1
    events.event("done", evaluated=evaluated)


class CheckpointWatch:
    """Looks at the newest checkpoint in `checkpoints`, and reads each once; `done` were judged."""

    def __init__(self, checkpoints: Path, done: set[Judged], events: JsonLines) -> None:
        self._checkpoints, self._done, self._events = checkpoints, done, events
        self._known = set[object]()

    def newest(self, read: Callable[[Path, Manifest], T]) -> list[tuple[Judged, T]]:
        """The newest checkpoint, if it is whole and was not evaluated yet."""
        folder = self._newest_folder()
        known = None if folder is None else _version_of(folder)
        if folder is None or known is None or known in self._known:
            return []
        try:
            results = self._read(folder, read)
        except (BadCheckpoint, OSError) as error:
            if _version_of(folder) != known:  # it went meanwhile, or another one is in its place
                return []
            results, about = [], {"step": step_of(folder), "path": str(folder), "set_aside": None}
            self._events.event("checkpoint_skipped", problems=[str(error)], **about)
        self._known.add(known)
        return results

    def _newest_folder(self) -> Path | None:
        with suppress(OSError):
            return next(iter(committed(self._checkpoints)), None)
        return None

    def _read(self, folder: Path, read: Callable[[Path, Manifest], T]) -> list[tuple[Judged, T]]:
        manifest = read_manifest(folder)
        judged = Judged(manifest.step, _digest_of(manifest))
        if judged in self._done:
            return []
        problems = verify_files(folder, manifest, manifest.files)
        if problems:
            raise BadCheckpoint("; ".join(problems))
        value: T = read_as(read, folder, manifest)
        self._done.add(judged)
        return [(judged, value)]


def _version_of(folder: Path) -> object:
    """A version that changes with the manifest of a folder; `None` if there is none."""
    try:
        status = (folder / NAME).stat()
    except OSError:
        return None
    return folder.name, status.st_ino, status.st_mtime_ns


def _digest_of(manifest: Manifest) -> str:
    """That of all its files: the same weights, saved again, are the same."""
    digests = sorted(file.blake2b for file in manifest.files.values())
    return digest("".join(digests).encode())


def _evaluated_before(run_dir: Path, rank: int) -> set[Judged]:
    rows = read_rows(rank_events_path(run_dir, rank))
    evaluated = (row for row in rows if row["event"] == "evaluated")
    return {Judged(int(row["step"]), str(row.get("digest"))) for row in evaluated}


def _has_ended(run_dir: Path, attempt: int) -> bool:
    rows = read_rows(rank_events_path(run_dir, LEADER))
    return any(row["event"] in ENDED and row.get("attempt", 0) == attempt for row in rows)
