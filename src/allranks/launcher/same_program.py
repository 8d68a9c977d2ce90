"""Whether all ranks have loaded the same program, and the same as in the attempt before.

Every rank writes into its first event the user's files that it loaded, with their digests. Ranks
with different files would train different programs without any error: the job ends, and names
the file. A program that was edited between two attempts is recorded as `program_changed`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.errors import PlaceError
from allranks.job.program import MODULES, PROGRAM, by_name, file_sha256
from allranks.job.run_folder import JsonLines, rank_events_path, read_rows

COMPARE_EVERY_S = 0.5
PATIENCE_S = 60.0
SHOWN = 12  # letters of a digest


@dataclass
class SamePrograms:
    """Compares the program files of all ranks, attempt by attempt."""

    run_dir: Path
    events: JsonLines
    _of_rank: dict[int, dict[str, object]] = field(default_factory=dict)
    _before: dict[str, object] = field(default_factory=dict)
    _looked_at: float = 0.0
    _first_at: float = 0.0

    def begin(self) -> None:
        """Start another attempt."""
        self._before = next(iter(self._of_rank.values()), self._before)
        self._of_rank, self._looked_at = {}, 0.0

    def look(self, attempt: int, hosts: Sequence[str], at_once: bool = False) -> None:
        """Read the new `ready` events of ranks; raises `PlaceError` where files differ."""
        now = time.monotonic()
        all_have = len(self._of_rank) == len(hosts)
        too_late = self._of_rank and now - self._first_at > PATIENCE_S  # some ranks never write it
        if not at_once and (all_have or too_late or now - self._looked_at < COMPARE_EVERY_S):
            return
        self._looked_at = now
        for rank in range(len(hosts)):
            if rank in self._of_rank:
                continue
            for row in read_rows(rank_events_path(self.run_dir, rank)):
                is_now = row["event"] == "ready" and row.get("attempt", 0) == attempt
                if is_now and "machine" in row:  # parameter servers do not write it
                    self._compare(rank, _files(row["machine"]), hosts)

    def edited(self, program: str) -> str:
        """The file of the program, if it is no longer as the ranks have loaded it; else ""."""
        for files in self._of_rank.values():
            return "" if files.get(PROGRAM) == file_sha256(program) else program
        return ""

    def differs(self, ready: dict[str, Any]) -> str:
        """A file that a new rank has loaded otherwise than the others; "" if there is none."""
        first = next(iter(self._of_rank.values()), {})
        return next(iter(_unequal(first, _files(ready["machine"]))), "")

    def _compare(self, rank: int, files: dict[str, object], hosts: Sequence[str]) -> None:
        first = next(iter(self._of_rank), rank)
        if first == rank:
            self._of_rank[rank], self._first_at = files, self._looked_at
            self._record_changes(files)
        unequal = _unequal(self._of_rank[first], files)
        if unequal:
            lines = []
            for name, values in unequal.items():
                pairs = sorted(zip((first, rank), values, strict=True), key=lambda pair: pair[0])
                versions = [f"rank {r}{_on(hosts[r])} has {_shown(digest)}" for r, digest in pairs]
                lines.append(f"  {name}: {', '.join(versions)}")
            raise PlaceError(
                "the ranks have not loaded the same program, and would not compute the same:\n"
                + "\n".join(lines)
                + "\nput the same files on every node, and edit none while a job starts"
            )
        self._of_rank[rank] = files  # only if equal, so that the check at the end raises too

    def _record_changes(self, files: dict[str, object]) -> None:
        changed = _unequal(self._before, files) if self._before else {}
        if changed:
            self.events.event("program_changed", differs={n: list(v) for n, v in changed.items()})


def _files(machine: dict[str, object]) -> dict[str, object]:
    return by_name({name: machine.get(name) for name in (PROGRAM, MODULES)})


def _unequal(was: dict[str, object], now: dict[str, object]) -> dict[str, tuple[object, object]]:
    """Name -> (was, now) of files in both that differ; a rank may import some files later."""
    both = [name for name in was if name in now]
    return {name: (was[name], now[name]) for name in both if was[name] != now[name]}


def _on(host: str) -> str:
    return f" on {host}" if host else ""


def _shown(digest: object) -> str:
    return str(digest)[:SHOWN] if digest else "none"
