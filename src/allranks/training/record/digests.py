"""Digests on the way, `digests.jsonl` of a run: a row every so many steps, and at checkpoints.

A row has the digests of the weights, buffers and optimizer after `step` steps, of the gradients and
samples of the last of them, and its loss. Under `--bitwise` the rows are the same on any number of
ranks and under any strategy. `chain` is the SHA-256 of the row and the `chain` of the row before,
so it stands for all rows so far.

Steps that are made again after a fault or a resume should have the rows that they had: a row that
agrees is not written twice, and one that does not is reported, and replaces those from there on. So
the file is only added to, and `read_digests` returns the rows that hold.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.job.run_folder import JsonLines, read_rows
from allranks.strategies.roles import TRAINER

NAME = "digests.jsonl"
STATE = ("weights", "buffers", "optimizer", "own")
"""The digests of a state; `own` is of what each rank has by itself, where ranks train apart."""
OF_STEP = ("gradients", "samples", "loss")
"""What a row has of its last step; `None` where nobody could know it."""

Row = dict[str, Any]


def chain_of(row: Mapping[str, Any], before: str) -> str:
    """The chain at a row, from the chain at the row before; "" if it is the first."""
    content = {name: value for name, value in row.items() if name != "chain"}
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(f"{before}{text}".encode()).hexdigest()


def differing(row: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What is another digest in two rows of one step; what one of them does not have is equal."""
    return [
        name
        for name in (*STATE, *OF_STEP)
        if None not in (row.get(name), other.get(name)) and row[name] != other[name]
    ]


def read_digests(run: Path) -> dict[int, Row]:
    """The rows of a run that hold, by their step, in order."""
    rows: dict[int, Row] = {}
    for row in read_rows(run / NAME):
        if not isinstance(row.get("step"), int) or not isinstance(row.get("chain"), str):
            break  # somebody has damaged the file: what follows is chained to nothing
        _drop_from(rows, row["step"])
        rows[row["step"]] = row
    return rows


def _drop_from(rows: dict[int, Row], step: int) -> None:
    """Forget the rows of this step and later ones; they are in order."""
    while rows and next(reversed(rows)) >= step:
        rows.popitem()


def broken_link(rows: Iterable[Mapping[str, Any]]) -> int | None:
    """The step of the first row whose chain is not that of the rows up to it."""
    before = ""
    for row in rows:
        if row["chain"] != chain_of(row, before):
            return int(row["step"])
        before = str(row["chain"])
    return None


class DigestLog:
    """The file, as the leader writes it; `report(event, **values)` hears of steps that differ.

    It is opened for each row, and closed again: who leads an elastic job may change.
    """

    def __init__(self, run: Path, report: Callable[..., None], *, compares: bool) -> None:
        self.run, self.report, self.compares = run, report, compares
        self._known: dict[int, Row] | None = None

    def add(self, row: Row) -> None:
        """Write a row, unless it is there already."""
        step = int(row["step"])
        if self._known is None:
            self._known = read_digests(self.run)
        was = self._known.get(step)
        if was is not None:
            names = differing(row, was)
            if not names:
                return
            if self.compares:
                now = {name: row[name] for name in names}
                before = {name: was[name] for name in names}
                self.report("digest_differs", step=step, was=before, now=now)
        _drop_from(self._known, step)
        last = next(reversed(self._known.values()), {"chain": ""})
        row = {**row, "chain": chain_of(row, str(last["chain"]))}
        if problem := _append(self.run, row):
            self.report("not_kept", file=NAME, error=problem)
        else:
            self._known[step] = row


def _append(run: Path, row: Row) -> str:
    """Write a row at the end of the file; returns why not, and the file is then as it was."""
    try:
        file = JsonLines(run / NAME)
        file.row(row)
        return "the disk is full" if file.close_with_unwritten() else ""
    except OSError as error:
        return error.strerror or type(error).__name__


def begin_course(run: Path, step: int) -> None:
    """Steps after this one will be others, since the job has changed: their rows hold no more."""
    rows = read_digests(run)
    before = [row for other, row in rows.items() if other <= step]
    if len(before) < len(rows) and (not before or _append(run, before[-1])):
        (run / NAME).unlink()


class StateDigester(Protocol):
    """What an engine can digest; every rank calls each of these."""

    def watch(self, batch: Any) -> None:
        """Digest the gradients and samples of the step on `batch`, which comes next."""

    def digests(self, step: int) -> dict[str, str | None]:
        """The digests of the state after `step` steps, and of the step that was watched."""


@dataclass
class RunDigests:
    """When a rank of `job` digests the state of `trainer`, and what becomes of it.

    Every rank makes one; `log` is the leader's.
    """

    job: Job
    trainer: Any
    digester: StateDigester
    log: DigestLog | None
    _last: int = -1
    _is_over: bool = False
    _is_off: bool = False
    """The state cannot be digested."""

    @staticmethod
    def are_wanted(job: Job, role: str) -> bool:
        """Whether a process of this role digests.

        Not in a check, nor where the ranks do not wait for each other.
        """
        meets = job.strategy_spec.card.agreement.lockstep
        is_asked = job.digest_every > 0 or bool(job.digest_at)
        return is_asked and meets and role == TRAINER and not (job.trace or job.parts_of)

    def is_due(self, step: int) -> bool:
        """Whether a row follows `step` steps; a checkpoint that is requested has one, too.

        Under `--bitwise` so has the last step.
        """
        if self._is_off:
            return False
        if self.job.digest_at or not self.job.digest_every:
            return step in self.job.digest_at
        every = self.job.checkpoint_every
        is_last = self.job.bitwise and step == self.trainer.total_steps
        is_saved = every is not None and step % every == 0
        return is_last or is_saved or step % self.job.digest_every == 0

    def before_step(self, batch: Any) -> None:
        """A step follows."""
        if self.is_due(batch.index + 1):
            with self._off_if_refused():
                self.digester.watch(batch)

    def after_step(self) -> None:
        """A step is over, and all callbacks were called."""
        if self.is_due(self.trainer.progress.batch_index):
            self.write()

    def before_save(self) -> None:
        """A checkpoint of this step follows; at the end the weights may not be those of a step."""
        if self.job.digest_every and not self._is_over:
            self.write()

    def begin(self) -> None:
        """The first step follows: in a replay, compare what was loaded."""
        if self.trainer.progress.batch_index in self.job.digest_at:
            self.write()

    def end(self) -> None:
        """No step follows."""
        if self.job.bitwise and self.job.digest_every:
            self.write()
        self._is_over = True

    @contextmanager
    def _off_if_refused(self) -> Iterator[None]:
        """Within, a state that no checkpoint can hold ends the digests, and no training."""
        try:
            yield
        except RequestError as error:
            if self.job.digest_at:
                raise
            self._is_off = True
            if self.log is not None:
                text = f"no digests of the state are written: {error.found}"
                self.log.report("not_digested", text=text)

    def write(self) -> None:
        """Digest the state as it is, once after each step; every rank calls this."""
        self.trainer.settle()
        progress, result = self.trainer.progress, self.trainer.last_result
        step = progress.batch_index
        if self._is_off or step == self._last:
            return
        self._last = step
        is_of_step = result is not None and result.batch_index == step - 1
        loss = float(result.loss) if is_of_step else math.nan
        with self._off_if_refused():
            row: Row = {"step": step, "epoch": progress.epoch, **self.digester.digests(step)}
            if self.log is not None:
                self.log.add({**row, "loss": loss if math.isfinite(loss) else None})
