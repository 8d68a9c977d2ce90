"""The placement of a job as a table: what several ranks or replicas hold alike is one line.

Of a job that is only planned, all ranks are set up to find it, without training.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from allranks.catalog import ENGINES
from allranks.errors import Interrupted, PlaceError, RequestError, printable
from allranks.job.place import PARAMETER, Placed, PlacementTotals, RankPlacement, read_placements
from allranks.job.run_folder import rank_log_path
from allranks.job.units import format_bytes, format_count
from allranks.launcher.fault_report import first_fault, user_error
from allranks.launcher.plan import STORE, LaunchPlan, RankPlan
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.leftovers import scratch_folder
from allranks.launcher.processes.process import Process
from allranks.launcher.supervisor import supervise
from allranks.strategies.mesh import DATA, REPLICATE, SHARD, Mesh

UNKNOWN = "unknown"
MANY = ("replica", "part")
"""What one rank may have several of."""


@dataclass(frozen=True)
class Holder:
    """The holder of a tensor: a replica or a part on a rank, and its device."""

    rank: int
    replica: int
    part: int
    device: str


def placement_of(plan: LaunchPlan, server: ForkServer) -> tuple[list[dict[str, Any]], str]:
    """What each rank of a plan would hold, as data and as a table: none of them trains."""
    placements, mesh = place_ranks(plan, server), plan.job.strategy_spec.mesh
    return as_data(placements, mesh), table(placements, mesh)


def as_data(placements: Sequence[RankPlacement], mesh: Mesh) -> list[dict[str, Any]]:
    """What each rank holds, and where it lies on the axes of the mesh."""
    return [
        {**p.to_data(), "place": dict(zip(_axes(mesh), mesh.place(p.rank), strict=True))}
        for p in placements
    ]


def table(placements: Sequence[RankPlacement], mesh: Mesh) -> str:
    """Every tensor, then the totals of each rank; where it lies, if ranks hold other parts."""
    all_rows = [row for placement in placements for row in placement.rows]
    many = [word for word in MANY if len({getattr(row, word) for row in all_rows}) > 1]
    rows = [["held by", "device", "dtype", "shape", "bytes", "name"]]
    shown = [
        (p.rank, replace(row, gradient_bytes=0, optimizer_bytes=0))  # those are in the totals
        for p in placements
        for row in p.rows
    ]
    for row, holders in _folded(shown):
        shape = UNKNOWN
        if row.shape is not None:
            shape = _shape(row.shape)
            if row.whole is not None:
                shape += f" of {_shape(row.whole)}"
        name = row.name if row.kind == PARAMETER else f"{row.name} ({row.kind})"
        size = UNKNOWN if row.bytes is None else format_count(row.bytes)
        rows.append([_who(holders, many), _devices(holders), row.dtype, shape, size, name])
    return "\n".join(
        [*_aligned(rows, {4}), "", *_totals(placements, many), *_where(placements, mesh)]
    )


def _where(placements: Sequence[RankPlacement], mesh: Mesh) -> list[str]:
    """Where each rank lies on the axes of the mesh; nothing where all hold the same."""
    if [name for name, _ in mesh.axes] == [REPLICATE]:
        return []
    rows = [["rank", *_axes(mesh), "together"]]
    for p in placements:
        rows.append([str(p.rank), *map(str, mesh.place(p.rank)), _size(p.all_bytes)])
    return ["", *_aligned(rows, set(range(len(rows[0]))))]


def _axes(mesh: Mesh) -> list[str]:
    """Their names as an option says them: copies that nothing is cut among are along `data`."""
    names = [name for name, _ in mesh.axes]
    return [DATA if name == REPLICATE and SHARD not in names else name for name in names]


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "one number"


def _totals(placements: Sequence[RankPlacement], many: list[str]) -> list[str]:
    """The totals as lines; what is gathered in a step only where something is."""
    totals = [(p.rank, total) for p in placements for total in p.totals]
    gathers = any(total.gathered_bytes != 0 for _, total in totals)
    head = ["held by", "device", "tensors", "gradients", "optimizer", "together"]
    lines = [[*head, "gathered in a step"] if gathers else head]
    for total, holders in _folded(totals):
        sizes = [total.bytes, total.gradient_bytes, total.optimizer_bytes, total.all_bytes]
        sizes += [total.gathered_bytes] if gathers else []
        lines.append([_who(holders, many), _devices(holders), *map(_size, sizes)])
    return _aligned(lines, set(range(2, len(lines[0]))))


def _folded(items: Sequence[tuple[int, Any]]) -> list[tuple[Any, list[Holder]]]:
    """Equal rows of several ranks as one, with all its holders; in order."""
    holders: dict[Placed | PlacementTotals, list[Holder]] = {}
    for rank, thing in items:
        alike = replace(thing, replica=0, part=0, device=thing.device.partition(":")[0])
        holders.setdefault(alike, []).append(Holder(rank, thing.replica, thing.part, thing.device))
    return list(holders.items())


def _who(holders: list[Holder], many: list[str]) -> str:
    """`rank 0`, `ranks 0-3`, `rank 0, replicas 1-2`, `rank 0, part 1`."""
    words = ["rank", *many]
    return ", ".join(_numbers(w, {getattr(holder, w) for holder in holders}) for w in words)


def _devices(holders: list[Holder]) -> str:
    """`cpu`, `cuda:0`, `cuda:0-3`."""
    kind, _, number = holders[0].device.partition(":")
    if not number:
        return kind
    numbers = {int(holder.device.partition(":")[2]) for holder in holders}
    return f"{kind}:{_runs(numbers)}"


def _numbers(word: str, numbers: set[int]) -> str:
    return f"{word}{'s' if len(numbers) > 1 else ''} {_runs(numbers)}"


def _runs(numbers: set[int]) -> str:
    """`0-3`, `0, 2-3`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _size(count: int | None) -> str:
    return UNKNOWN if count is None else format_bytes(count)


def _aligned(rows: list[list[str]], right: set[int]) -> list[str]:
    """Rows of cells as lines, every column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(printable("  ".join(cells).rstrip()))
    return lines


# --- ranks ---------------------------------------------------------------------------------------
# What every rank of a plan would hold, found by setting all ranks up without training.
#
# The ranks join, build the model and create the optimizer, in a temporary folder.


def place_ranks(plan: LaunchPlan, server: ForkServer) -> list[RankPlacement]:
    """What each rank holds; raises the errors of a job whose ranks cannot be set up."""
    if not plan.process_set.are_all_trainers:
        raise RequestError(
            asked=f"--placement with --strategy {plan.job.strategy}",
            found=str(plan.process_set),
            why="ranks are asked what they hold, and here servers hold it, which only serve",
            do="leave --placement out: "
            "a run writes which server has what into placement/ of its folder",
        )
    with scratch_folder() as scratch:
        run_dir = Path(scratch)
        (run_dir / "logs").mkdir()
        secret = secrets.token_hex(32)
        ended = supervise(server, [_process(plan, rank, run_dir, secret) for rank in plan.ranks])
        if ended.interrupted:
            raise Interrupted("interrupted while the ranks were set up; nothing was trained")
        fault = first_fault(ended, run_dir)
        if fault is not None:
            raise user_error(fault, ended, run_dir)
        placements = read_placements(run_dir, plan.job.ranks)
    if len(placements) < plan.job.ranks:
        raise PlaceError(f"{plan.job.ranks} ranks ended well, {len(placements)} wrote placements")
    return placements


def _process(plan: LaunchPlan, rank: RankPlan, run_dir: Path, secret: str) -> Process:
    job = dataclasses.replace(plan.job, run_dir=str(run_dir))
    store = str(run_dir / STORE) if rank.world.store else ""
    world = dataclasses.replace(rank.world, store=store, secret=secret)
    environment = {**rank.environment, **world.variables()}
    log = rank_log_path(run_dir, world.rank)
    target = f"{ENGINES[job.engine].worker}:place"
    argument = job.to_data()
    return Process(world.rank, target, argument, environment, log, defaults=rank.defaults)
