"""All rules for scripts, and the findings that they draw from the facts of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import RequestError
from allranks.tools.script_check.rules import data, replicas
from allranks.tools.script_check.rules.facts import (
    APART,
    COST,
    FILES,
    NOT_ALL,
    NOTE,
    OUTPUT,
    RESULT,
    Fact,
    Rank,
    ScriptFinding,
    counted_findings,
    in_order,
    line_of,
    place_of,
    read_ranks,
)

# --- files ---------------------------------------------------------------------------------------
# Faults of files and output: a file of several ranks, a file read too early, a repeated line.


READ = "read"


def files_of_several_ranks(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """A path that two or more ranks write: a checkpoint, or a download."""
    writers: dict[tuple[str, str], dict[int, None]] = defaultdict(dict)
    lines: dict[tuple[str, str], tuple[str, int] | None] = {}
    for rank in ranks:
        for fact in rank.all("file"):
            if (how := fact["how"]) != READ:
                writers[fact["path"], how][rank.rank] = None
                lines.setdefault((fact["path"], how), line_of(fact["where"]))
    for (path, how), writing in writers.items():
        if len(writing) < 2 or (how == "open" and (path, "save") in writers):
            continue
        yield ScriptFinding(
            "checkpoint-of-all-ranks" if how == "save" else "file-of-all-ranks",
            FILES,
            lines[path, how],
            f"{path} is written by ranks {', '.join(map(str, writing))}",
            "they write into each other's file: it may be torn, and a reader may meet a part of it",
            "if rank == 0: write it; then a barrier before other ranks read it",
        )


def files_read_too_early(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """A path that one rank writes and another reads, with no collective between them.

    Ranks that lock files are left out: the lock may order them.
    """
    written: dict[tuple[str, tuple[int, ...]], int] = {}
    open_ranks = [rank for rank in ranks if not rank.all("lock")]
    for rank in open_ranks:
        for fact in rank.all("file"):
            if fact["how"] != READ and fact["at"] is not None:
                written.setdefault((fact["path"], tuple(fact["at"])), rank.rank)
    findings = dict[str, ScriptFinding]()
    for rank in open_ranks:
        local_paths = {fact["path"] for fact in rank.all("file") if fact["how"] != READ}
        for fact in rank.all("file"):
            path = fact["path"]
            writer = written.get((path, tuple(fact["at"] or ())))
            if fact["how"] != READ or writer is None or path in local_paths or path in findings:
                continue
            findings[path] = ScriptFinding(
                "read-while-written",
                FILES,
                line_of(fact["where"]),
                f"rank {rank.rank} reads {path}, which rank {writer} writes, and no collective"
                " of all ranks lies between",
                "it may meet a part of the file, an old one, or none",
                "torch.distributed.barrier() after the write, before the others read",
            )
    yield from findings.values()


def lines_of_each_node(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """Lines of the script that the first rank of each node prints, and no other."""
    first = [rank for rank in ranks if rank.last("process", "local_rank", None) == "0"]
    nodes = {rank.last("process", "group_rank", None) for rank in first}
    others = [rank for rank in ranks if rank not in first]
    if len(nodes) < 2 or len(nodes) != len(first) or not others:
        return
    common = _printed_by_all(first)
    spoken = {str(fact["where"]) for rank in others for fact in rank.all("print")}
    common = [fact for fact in common if str(fact["where"]) not in spoken]
    if common:
        yield ScriptFinding(
            "printed-once-per-node",
            OUTPUT,
            line_of(common[0]["where"]),
            f"the first ranks of {len(nodes)} nodes print the same,"
            f" first {common[0]['text']!r}{_more(common)}",
            "nothing to the result; a log holds it once per node, as what is written there is",
            "if dist.get_rank() == 0: print(…), not LOCAL_RANK",
        )


def lines_of_all_ranks(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """Lines of the script that print the same text on every rank."""
    if len(ranks) < 2:
        return
    if common := _printed_by_all(ranks):
        yield ScriptFinding(
            "printed-by-all-ranks",
            OUTPUT,
            line_of(common[0]["where"]),
            f"{len(ranks)} ranks print the same, first {common[0]['text']!r}{_more(common)}",
            "nothing to the result; logs grow with the ranks",
            "if rank == 0: print(…)",
        )


def _printed_by_all(ranks: Sequence[Rank]) -> list[Fact]:
    """The texts that every rank printed from one line, as facts of the first rank."""
    printed = [{(str(f["where"]), f["digest"]): f for f in rank.all("print")} for rank in ranks]
    common = [printed[0][key] for key in printed[0] if all(key in table for table in printed)]
    return [fact for fact in common if fact["text"].strip()]


def _more(common: list[Fact]) -> str:
    places = dict.fromkeys(place_of(line_of(fact["where"])) for fact in common)
    return f", and from {len(places) - 1} more lines" if len(places) > 1 else ""


# --- stepping ------------------------------------------------------------------------------------
# Faults between two steps of an optimizer: schedules, accumulation, gradients not reduced.


SCALE_FREE = (
    *("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam", "Adagrad", "Adadelta", "RMSprop"),
    *("Rprop", "Adafactor", "Muon"),
)
"""Optimizers whose step hardly changes when all gradients are scaled."""


def schedules_too_fast(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """A scheduler that makes several steps for each step of its optimizer."""
    for fact in _schedulers(ranks):
        runs = {int(run): count for run, count in fact["between"].items()}
        often = {run: count for run, count in runs.items() if run > 1}
        if not often or sum(often.values()) * 2 <= sum(runs.values()):
            continue
        if (sum(runs.values()) < 2 and _scaled(ranks)) or fact.get("wrapped"):
            continue  # a library steps on purpose, as Accelerate does once for each rank
        run = max(often, key=lambda length: often[length])
        by_ranks = f", as many as there are ranks ({len(ranks)})" if run == len(ranks) else ""
        yield ScriptFinding(
            "schedule-too-fast",
            RESULT,
            line_of(fact["where"]),
            f"{fact['name']} made {run} steps for one of the optimizer, {often[run]} times"
            f"{by_ranks}",
            f"the learning rate runs through its schedule {run} times as fast as it is written",
            "one scheduler.step() behind each optimizer.step() (or one per epoch), whatever the "
            "ranks and micro-batches",
        )


def schedules_ahead(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """A scheduler that steps before the first step of its optimizer."""
    for fact in _schedulers(ranks):
        steps = ranks[0].last("counts", "steps", {}).get(str(fact["optimizer"]), 0)
        if fact["first"] == 1 and steps and not _scaled(ranks):
            yield ScriptFinding(
                "schedule-ahead",
                RESULT,
                line_of(fact["where"]),
                f"{fact['name']} made a step before the first one of the optimizer",
                "the first value of the schedule is never used, and all others come one step early",
                "optimizer.step() first, then scheduler.step()",
            )


def clips_of_scaled_gradients(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """Gradients that are clipped before GradScaler has unscaled them."""
    for fact in ranks[0].all("clipped")[:1]:
        yield ScriptFinding(
            "clip-before-unscale",
            RESULT,
            line_of(fact["where"]),
            f"gradients were clipped while they were scaled by {fact['scale']:g}",
            "the limit holds for scaled gradients: steps are as many times shorter",
            "scaler.unscale_(optimizer) before the clip",
        )


def undivided_accumulation(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """Micro-batches whose mean losses are added up, and not divided by their number."""
    rank = ranks[0]
    names = {number: fact["name"] for number, fact in rank.by_id("optimizer").items()}
    windows = (window for window in rank.all("window") if window["accumulated"])
    for fact in _one_of_each(window for window in windows if window["is_mean"]):
        if fact["unchanged"] is not True or names.get(fact["optimizer"]) in SCALE_FREE:
            continue
        count = fact["backwards"]
        yield ScriptFinding(
            "accumulation-not-divided",
            RESULT,
            line_of(fact["backward_where"]),
            f"{count} backward passes of a mean loss before one step, and the gradient of the "
            "step is their sum",
            f"steps are {count} times as long as with one batch of the same samples",
            f"(loss / {count}).backward()",
        )


def unreduced_steps(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """Steps whose last micro-batch ran under no_sync: no rank has the gradients of the others."""
    if any(rank.last("collectives", "large", 0) for rank in ranks):
        return  # the script may average weights or gradients itself
    rank = ranks[0]
    windows = [
        fact for fact in rank.all("window") if fact["forwards"] and not fact["forwards"][-1][1]
    ]
    counts = rank.last("counts", "windows", [])
    if windows:
        times = sum(counts[fact["id"]] for fact in windows if fact["id"] < len(counts))
        total = sum(counts)
        yield ScriptFinding(
            "step-without-reduction",
            RESULT,
            line_of(windows[0]["where"]),
            f"{times} of {total} steps were made with the last micro-batch under no_sync; the "
            f"first is step {windows[0]['step']}",
            "gradients of these micro-batches are reduced late or never: replicas drift apart",
            "leave no_sync for the last micro-batch before each step, and for the last of an epoch",
        )


def needless_reductions(ranks: tuple[Rank, ...]) -> Iterator[ScriptFinding]:
    """Gradient accumulation that reduces at every micro-batch."""
    windows = ranks[0].all("window") if len(ranks) > 1 else ()
    for fact in _one_of_each(window for window in windows if window["accumulated"]):
        reduced = [synced for _, synced in fact["forwards"]]
        if len(reduced) == fact["backwards"] and all(reduced):
            yield ScriptFinding(
                "reduced-at-each-micro-batch",
                COST,
                line_of(fact["backward_where"]),
                f"{len(reduced)} reductions of all gradients before one step",
                f"nothing to the result; {len(reduced)} times the communication that it needs",
                "forward and backward of all but the last micro-batch under `with model.no_sync()`",
            )


def _one_of_each(windows: Iterable[Fact]) -> list[Fact]:
    """For each line with a backward, its longest window; one with unchanged gradients first."""
    by_line: dict[str, Fact] = {}
    for fact in sorted(
        windows, key=lambda fact: (fact["unchanged"] is not True, -fact["backwards"])
    ):
        by_line.setdefault(str(fact["backward_where"]), fact)
    return list(by_line.values())


def _schedulers(ranks: tuple[Rank, ...]) -> list[Fact]:
    return [fact for fact in ranks[0].all("scheduler") if fact["name"] != "ReduceLROnPlateau"]


def _scaled(ranks: tuple[Rank, ...]) -> bool:
    """Whether a GradScaler may have skipped steps of the optimizer."""
    return bool(ranks[0].last("counts", "scaled", False))


LOOKED_FOR = (
    data.orders_that_never_change,
    data.samples_of_several_ranks,
    data.samplers_of_other_ranks,
    data.padded_evaluations,
    data.split_by_each_rank,
    replicas.equal_batches,
    data.unequal_batches,
    data.means_of_unequal_targets,
    data.means_of_batch_means,
    data.means_of_ranks,
    replicas.ranks_that_step_unequally,
    replicas.replicas_that_drift,
    replicas.parameters_outside,
    replicas.weights_that_begin_unequal,
    replicas.equal_random_streams,
    replicas.equal_draws_of_workers,
    schedules_too_fast,
    schedules_ahead,
    clips_of_scaled_gradients,
    undivided_accumulation,
    unreduced_steps,
    needless_reductions,
    files_of_several_ranks,
    files_read_too_early,
    lines_of_all_ranks,
    lines_of_each_node,
)
CAUSES = {
    "step-without-reduction": "replicas-drift",
    "unequal-steps": "replicas-drift",
    "same-samples-on-ranks": "equal-batches",
}
"""A finding that explains another, which is then left out."""


@dataclass(frozen=True)
class Watched:
    """The findings of a watched run."""

    ranks: int
    findings: tuple[ScriptFinding, ...]
    unwatched: tuple[str, ...]
    notes: tuple[ScriptFinding, ...] = ()
    doubt: str = ""
    """Why few findings mean little: the ranks did not train, or not together."""

    @property
    def decided(self) -> bool:
        """Whether there is a finding, or all was watched."""
        return bool(self.findings) or not self.unwatched

    def to_data(self) -> dict[str, Any]:
        """As a mapping that JSON can carry."""
        return {
            "ranks": self.ranks,
            "decided": self.decided,
            "findings": [finding.to_data() for finding in self.findings],
            "notes": [note.to_data() for note in self.notes],
            "unwatched": list(self.unwatched),
            "doubt": self.doubt,
        }

    def __str__(self) -> str:
        lines = [str(finding) for finding in (*self.findings, *self.notes)]
        lines += [f"not watched: {reason}" for reason in self.unwatched]
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        missing = f"{NOT_ALL}: please report the lines above" if self.unwatched else ""
        return "\n".join([*lines, f"{self._count} on {ranks}{self._but}{missing}"])

    @property
    def summary(self) -> str:
        """`3 findings`, `nothing found` or `undecided`; and whether all was watched."""
        return self._count + self._but + (NOT_ALL if self.unwatched else "")

    @property
    def _but(self) -> str:
        return f"; {self.doubt}" if self.doubt else ""

    @property
    def _count(self) -> str:
        return counted_findings(len(self.findings), is_all=not self.unwatched)


def watched_in(folder: Path) -> Watched:
    """The findings from the facts in `folder`; raises `RequestError` if there are no facts."""
    ranks = read_ranks(folder)
    if not ranks:
        raise RequestError(
            asked="to watch a script",
            found="no process of it imported torch in the Python of allranks",
            why="only functions of torch are watched, not those of TensorFlow, Keras on it, or JAX",
            do="for Keras, write a task and check that: docs/tensorflow.md. For torch, start it "
            "with the Python that has allranks and torch, without -I, -E or -S",
        )
    all_found = findings_of(ranks)
    findings = tuple(finding for finding in all_found if finding.touches != NOTE)
    notes = all_found[len(findings) :]
    return Watched(len(ranks), findings, _unwatched(ranks), notes, _doubt(ranks))


def findings_of(ranks: tuple[Rank, ...]) -> tuple[ScriptFinding, ...]:
    """Every fault that the facts prove, those that change the result first; then the notes."""
    findings = [finding for look in LOOKED_FOR for finding in look(ranks)]
    names = {finding.name for finding in findings}
    explained = {effect for cause, effect in CAUSES.items() if cause in names}
    return in_order(finding for finding in findings if finding.name not in explained)


def _doubt(ranks: tuple[Rank, ...]) -> str:
    """What the facts say against a verdict as a whole; "" if nothing."""
    if not any(rank.all("window") for rank in ranks):
        return "no optimizer of torch made a step, so no training was watched"
    if len(ranks) > 1 and not any(rank.all("world") for rank in ranks):
        return APART
    return ""


def _unwatched(ranks: tuple[Rank, ...]) -> tuple[str, ...]:
    """The recorders that failed, without duplicates."""
    reasons = [f"{fact['what']}: {fact['why']}" for rank in ranks for fact in rank.all("unwatched")]
    return tuple(dict.fromkeys(reasons))
