"""The facts that the ranks of a watched script wrote, read from their folder."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.job.run_folder import read_rows
from allranks.launcher.scripts.on_path import path_with_hooks
from allranks.launcher.scripts.plan import WATCHED_IN, CommandRequest
from allranks.tools.script_check.record.steps import OPERATORS_AT, STEPS_IN

Fact = Mapping[str, Any]
WORKERS = "workers"
END = -1
"""The step of digests that were taken at the end."""


@dataclass(frozen=True)
class Rank:
    """The facts that one rank wrote, in order."""

    rank: int
    facts: tuple[Fact, ...]

    def all(self, kind: str) -> list[Fact]:
        """Its facts of a kind."""
        return [fact for fact in self.facts if fact["fact"] == kind]

    def by_id(self, kind: str, name: str = "id") -> dict[int, Fact]:
        """Its facts of a kind by number; the last of each number."""
        return {fact[name]: fact for fact in self.all(kind)}

    def last(self, kind: str, name: str, default: Any) -> Any:
        """A value of the last fact of a kind."""
        facts = self.all(kind)
        return facts[-1].get(name, default) if facts else default


def read_facts(path: Path) -> Iterator[Fact]:
    """The facts of one process, up to a line that is not whole: it may have been killed there."""
    with suppress(ValueError):
        yield from read_rows(path)


def read_ranks(folder: Path) -> tuple[Rank, ...]:
    """The ranks by number; of several processes with one number, the one with the most facts.

    Numbers are those of the process group. If no process created one, they are the launcher's.
    """
    read = ((path, tuple(read_facts(path))) for path in sorted(folder.glob("*.jsonl")))
    processes = [(*facts, *_of_workers(path)) for path, facts in read if facts]
    grouped = any(_rank_in_group(facts) is not None for facts in processes)
    by_rank: dict[int, tuple[Fact, ...]] = {}
    for facts in processes:
        rank = _rank_in_group(facts) if grouped else facts[0].get("rank")
        if rank is not None and len(facts) > len(by_rank.get(int(rank), ())):
            by_rank[int(rank)] = facts
    return tuple(Rank(rank, facts) for rank, facts in sorted(by_rank.items()))


def _of_workers(path: Path) -> list[Fact]:
    """The facts of the loader workers of this process."""
    files = sorted((path.parent / WORKERS).glob(f"{path.stem}-*.jsonl"))
    return [fact for file in files for fact in read_facts(file)]


def _rank_in_group(facts: Iterable[Fact]) -> int | None:
    ranks = [fact["rank"] for fact in facts if fact["fact"] == "world"]
    return ranks[-1] if ranks else None


def line_of(value: Any) -> tuple[str, int] | None:
    """A place in the script, as JSON has it."""
    return None if value is None else (str(value[0]), int(value[1]))


def groups_of_replicas(ranks: tuple[Rank, ...]) -> list[tuple[int, list[Rank]]]:
    """The number of each DDP with the ranks of its group that hold it, at least two."""
    groups = []
    known = {rank.rank: rank for rank in ranks}
    for leader in ranks:
        for number, fact in leader.by_id("replica").items():
            members = [known[rank] for rank in fact["group"] if rank in known]
            alike = [
                member
                for member in members
                if member.by_id("replica").get(number, {}).get("where") == fact["where"]
            ]
            if leader.rank == min(fact["group"]) and len(alike) > 1:
                groups.append((number, alike))
    return groups


def groups_that_reduce(ranks: tuple[Rank, ...]) -> list[list[Rank]]:
    """The groups in which gradients are reduced: by a DDP or FSDP, else by the script itself.

    A DDP has one axis of a mesh; ranks along another axis may have the same samples.
    """
    groups = {tuple(rank.rank for rank in group): group for _, group in groups_of_replicas(ranks)}
    known = {rank.rank: rank for rank in ranks}
    for fact in (fact for rank in ranks for fact in rank.all("sharded")):
        if len(fact["group"]) > 1 and known.keys() >= set(fact["group"]):
            groups[tuple(fact["group"])] = [known[rank] for rank in fact["group"]]
    by_hand = any(fact["sent"] for rank in ranks for fact in rank.all("window"))
    return list(groups.values()) or ([list(ranks)] if by_hand and len(ranks) > 1 else [])


LEAST_DRAWS = 2
NOT_ALL = ", but not all was watched"
"""Follows the verdict of a watched run in which a recorder failed."""
APART = "the ranks made no process group of torch, so each may train a copy of its own"
"""Of a script that several ranks run, and that does not connect them."""


def counted_findings(count: int, *, is_all: bool) -> str:
    """`3 findings`, or `nothing found`, which is no pass if not all was watched."""
    if count:
        return f"{count} finding{'s' if count > 1 else ''}"
    return "nothing found" if is_all else "undecided: nothing found"


BY_RANK = (
    "torch.manual_seed(seed + rank) once the model is made; docs/checking_in_detail.md says where, "
    "for each framework"
)
States = dict[Any, dict[str, int]]
"""The states of the generators that drew, by the draw at which they are compared."""


def equal_draws(tables: Iterable[States]) -> dict[str, int]:
    """The generators whose draws had equal states in all tables, and how many draws these were.

    None for a single table.
    """
    known = list(tables)
    if len(known) < 2:
        return {}
    is_equal: dict[str, list[bool]] = defaultdict(list)
    for key in set.intersection(*map(set, known)):
        states = [table[key] for table in known]
        for name in set.intersection(*map(set, states)):
            is_equal[name].append(len({state[name] for state in states}) == 1)
    alike = {name: len(equal) for name, equal in sorted(is_equal.items()) if all(equal)}
    return {name: count for name, count in alike.items() if count >= LEAST_DRAWS}


# --- finding -------------------------------------------------------------------------------------
# A finding: a fault of a script, where it is, what it does to the result, and what to do.


RESULT, FILES, COST, OUTPUT, NOTE = "result", "files", "cost", "output", "note"
ORDER = (RESULT, FILES, COST, OUTPUT, NOTE)


@dataclass(frozen=True)
class ScriptFinding:
    """One fault of a script; `touches` is what it affects: the result, files, cost or output.

    That of a note is `NOTE`: the run does not prove the fault.
    """

    name: str
    touches: str
    where: tuple[str, int] | None
    found: str
    effect: str
    fix: str

    def to_data(self) -> dict[str, Any]:
        """As a mapping that JSON can carry."""
        values = dataclasses.asdict(self)
        file, line = self.where or (None, None)
        values.pop("where")
        return {**values, "file": file, "line": line}

    def __str__(self) -> str:
        lead = f"{place_of(self.where)}: {self.name} ({self.touches})"
        return f"{lead}\n  found:  {self.found}\n  effect: {self.effect}\n  fix:    {self.fix}"


def place_of(where: tuple[str, int] | None) -> str:
    """`train.py:12`, relative to the working folder if it is below it."""
    if where is None:
        return "(no line of the script)"
    near = os.path.relpath(where[0])
    return f"{where[0] if near.startswith('..') else near}:{where[1]}"


def in_order(findings: Iterable[ScriptFinding]) -> tuple[ScriptFinding, ...]:
    """Findings without duplicates: those that affect the result first, then by place."""
    once = dict.fromkeys(findings)
    return tuple(sorted(once, key=lambda f: (ORDER.index(f.touches), f.where or ("", 0))))


def names_among(names: Iterable[str], most: int = 3) -> str:
    """Some of the names, and how many more there are."""
    all_names = list(names)
    more = len(all_names) - most
    return ", ".join(all_names[:most]) + (f" and {more} more" if more > 0 else "")


# --- started -------------------------------------------------------------------------------------
# A request for a script, and its watched form: the environment variables that enable recording.


FACTS = "facts"


def watched_request(
    request: CommandRequest, run_dir: str, inherited: Mapping[str, str], steps: int = 0, at: int = 0
) -> CommandRequest:
    """The same command in `run_dir`, whose processes write facts to its folder `facts`.

    `inherited` is their environment; the entries of its PYTHONPATH are kept. The numbers of the
    first `steps` steps are recorded, for `check --against`; or, with `--deep`, nothing but the
    operators of step `at`, without torch.compile.
    """
    environment = (
        *request.environment,
        *(((STEPS_IN, str(steps)),) if steps else ()),
        *(((OPERATORS_AT, str(at)), ("TORCHDYNAMO_DISABLE", "1")) if at else ()),
        ("PYTHONPATH", path_with_hooks(inherited)),
        (WATCHED_IN, os.path.join(run_dir, FACTS)),
    )
    return dataclasses.replace(request, run_dir=run_dir, environment=environment)
