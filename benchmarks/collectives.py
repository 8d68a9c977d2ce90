"""Time per collective between 2, 4 and 8 ranks of one host: ours, Gloo, Open MPI, MPICH.

    python benchmarks/collectives.py
    python benchmarks/collectives.py --ranks 2 --kinds all-reduce --rounds 5

Every library has a set of rank processes of its own (`turns.py`): torch's has Gloo and ours, each
MPI is started by its own launcher, and Open MPI twice, as it comes and without its component `han`,
which makes large sums faster. In a round each library calls for about a tenth of a second, in
turns, while the ranks of the others sleep. Calls are timed in bursts of equal calls that begin at a
barrier; of a burst the slowest rank counts. A round gives the median of its bursts and their least.

Before anything is timed every call has given the right numbers once. The best MPI is that with the
least median of all that were measured: whole arrays and pieces of them, Open MPI and MPICH.

First the machine's own limit: how fast one process copies 25 MB, and two at once.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collectives_calls import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    REDUCE_SCATTER,
    THERE_AND_BACK,
)
from harness import (
    RECORDS,
    Comparison,
    finish_record,
    order_of,
    ratio,
    say,
    start_record,
    value_us,
)
from ranks import start_ranks
from turns import Meeting, RankSet, one_thread, slowest

HERE = Path(__file__).resolve().parent
SIZES = {"1 KB": 2**10, "64 KB": 2**16, "1 MB": 2**20, "25 MB": 25 * 2**20}
OTHERS = (REDUCE_SCATTER, ALL_GATHER, BROADCAST, THERE_AND_BACK)
OTHERS_RANKS, OTHERS_SIZES, OTHERS_ROUNDS = (2, 4), ("1 KB", "1 MB", "25 MB"), 5
WHOLE, PIECES = "whole", ("in 1 MB pieces", "in 256 KB pieces")
TORCH = ("allranks", "allranks, in place", "allranks, torch", "Gloo")
MPIS = {
    "Open MPI": ("prterun", "libmpi.so.40", ()),
    "Open MPI without han": ("prterun", "libmpi.so.40", ("--mca", "coll", "^han")),
    "MPICH": ("mpiexec.hydra", "libmpi.so.12", ()),
}
BARS_US = {2: 1.5, 4: 25.0, 8: 100.0}  # an all-reduce of 1 KB
BESIDE_MPI, BESIDE_GLOO = 1 / 2, 1 / 3  # of their time, for 25 MB
TURN_S = 0.08  # of calls, of each contender in each round
BURST_US = 4000.0
LEAST_BURSTS, MOST_BURSTS = 3, 25


@dataclass
class Measured:
    """Microseconds per call of one contender: the median and the least of each round."""

    calls: int
    bursts: int
    median_us: list[float] = field(default_factory=list)
    least_us: list[float] = field(default_factory=list)


Case = tuple[str, int, str]  # the collective, ranks, the name of a size
Found = dict[Case, dict[str, Measured]]


def start_torch(meeting: Meeting, ranks: int) -> RankSet:
    """Ranks that hold Gloo and ours."""
    store = meeting.folder / f"store-{ranks}"
    arguments = (ranks, meeting.address, str(store))
    started = start_ranks(ranks, _torch_rank, arguments, ["collectives_torch"])
    return meeting.wait_for("torch", started, ranks)


def _torch_rank(rank: int, ranks: int, address: str, store: str) -> None:
    """In a rank's process: this imports torch, which the command itself never does."""
    from collectives_torch import serve  # noqa: PLC0415

    serve(rank, ranks, address, store)


def start_mpi(meeting: Meeting, name: str, ranks: int) -> RankSet:
    """Ranks that an MPI starts by itself, from the wheel in this environment."""
    prefix = Path(sys.prefix)
    launcher, library, options = MPIS[name]
    command = [str(prefix / "bin" / launcher), *options, "-n", str(ranks)]
    environment = {**os.environ, "MPI4PY_LIBMPI": str(prefix / "lib" / library)}
    if launcher == "prterun":  # as `mpirun`, whose name MPICH has, too, calls it
        command[1:1] = ["--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"]
        roots = ("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX")
        environment |= {root: str(prefix) for root in roots}
        environment |= {"PRTE_MCA_schizo_proxy": "ompi", "OMPI_MCA_btl": "self,sm"}
    elif ranks > len(os.sched_getaffinity(0)):
        environment["MPIR_CVAR_POLLS_BEFORE_YIELD"] = "1"  # else it spins while others want to run
    command += [sys.executable, str(HERE / "collectives_mpi.py"), meeting.address]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    return meeting.wait_for(name, [process], ranks)


def contenders_of(case: Case) -> Iterator[tuple[str, str, str]]:
    """(name in the record, the set it belongs to, what its ranks call it)."""
    kind, _, size = case
    for name in TORCH:
        if name != "allranks, in place" or kind in (ALL_REDUCE, REDUCE_SCATTER):
            yield name, "torch", name
    for mpi in MPIS:
        if kind == ALL_REDUCE or mpi != "Open MPI without han":
            yield mpi, mpi, WHOLE
        if kind == ALL_REDUCE and size == "25 MB":
            yield from ((f"{mpi}, {pieces}", mpi, pieces) for pieces in PIECES)


def measure(sets: dict[str, RankSet], case: Case, rounds: int) -> dict[str, Measured]:
    """Every contender's times in `rounds` rounds."""
    kind, ranks, size = case
    places = {name: (sets[of], called) for name, of, called in contenders_of(case)}
    found = {}
    for name, (ranks_of, called) in places.items():
        ranks_of.ask("check", called, kind, SIZES[size])
        ranks_of.ask("time", called, kind, SIZES[size], 1, 1)
        first_us = min(slowest(ranks_of.ask("time", called, kind, SIZES[size], 2, 5)))
        calls = max(1, min(500, round(BURST_US / first_us)))
        bursts = round(TURN_S * 1e6 / (calls * first_us))
        found[name] = Measured(calls, max(LEAST_BURSTS, min(MOST_BURSTS, bursts)))
    for turn in range(rounds):
        for name in order_of(list(places), turn):
            ranks_of, called = places[name]
            one = found[name]
            asked = "time", called, kind, SIZES[size], one.calls, one.bursts
            times = slowest(ranks_of.ask(*asked))
            one.median_us.append(statistics.median(times))
            one.least_us.append(min(times))
    medians = "  ".join(
        f"{name} {statistics.median(one.median_us):.1f}" for name, one in found.items()
    )
    say(f"{kind}, {ranks} ranks, {size}, us: {medians}")
    return found


def measure_all(meeting: Meeting, ranks: Sequence[int], kinds: Sequence[str], rounds: int) -> Found:
    """All cases; the sets of one number of ranks live together."""
    found: Found = {}
    for count in ranks:
        sets = {"torch": start_torch(meeting, count)}
        sets |= {name: start_mpi(meeting, name, count) for name in MPIS}
        for kind, size in itertools.product(kinds, SIZES):
            if kind == ALL_REDUCE:
                found[kind, count, size] = measure(sets, (kind, count, size), rounds)
            elif count in OTHERS_RANKS and size in OTHERS_SIZES:
                fewer = min(rounds, OTHERS_ROUNDS)
                found[kind, count, size] = measure(sets, (kind, count, size), fewer)
        meeting.end_all()
    return found


def copy_limit(meeting: Meeting) -> dict[str, float]:
    """Gigabytes of payload per second, of one process that copies 25 MB and of two at once."""
    nbytes, limit = SIZES["25 MB"], {}
    for count in (1, 2):
        processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "collectives_copy.py"), meeting.address, str(rank)]
            )
            for rank in range(count)
        ]
        copying = meeting.wait_for("copies", processes, count)
        copying.ask(nbytes, 5)
        fastest = slowest(copying.ask(nbytes, 40))
        limit[f"copy_25_mb_{count}_gb_per_s"] = count * nbytes / statistics.median(fastest) / 1e3
        meeting.end_all()
    say("  ".join(f"{name} {value:.1f}" for name, value in limit.items()))
    return limit


def compare(found: Found) -> list[Comparison]:
    """The bars of an all-reduce, and ours beside Gloo and the best MPI: of 64 KB nothing."""
    comparisons = []
    for (kind, ranks, size), contenders in found.items():
        what, best = f"{kind}, {ranks} ranks, {size}", _best_mpi(contenders)
        if size == "64 KB" or (kind != ALL_REDUCE and size != "25 MB"):
            continue
        for ours in (name for name in TORCH[:3] if name in contenders):
            times = contenders[ours].median_us
            if kind == ALL_REDUCE and size == "1 KB":
                bar_us = BARS_US[ranks] if ours == "allranks" else None
                comparisons.append(value_us(what, "call_us", ours, times, bar_us))
            has_bar = kind == ALL_REDUCE and size == "25 MB" and ours != "allranks, torch"
            for other, bar in ((best, BESIDE_MPI), ("Gloo", BESIDE_GLOO)):
                pairs = list(zip(times, contenders[other].median_us, strict=True))
                bar_here = bar if has_bar else None
                comparisons.append(ratio(what, "call_us", ours, other, pairs, bar_here))
    return comparisons


def _best_mpi(contenders: dict[str, Measured]) -> str:
    """The MPI with the least median time here."""
    mpis = [name for name in contenders if name not in TORCH]
    return min(mpis, key=lambda name: statistics.median(contenders[name].median_us))


def rows(found: Found, what: str) -> list[dict[str, Any]]:
    """A row for each collective, number of ranks and contender, with a column for each size."""
    table: dict[tuple[str, str], dict[str, Any]] = {}
    for (kind, ranks, size), contenders in found.items():
        for name, one in contenders.items():
            times = one.median_us if what == "median" else one.least_us
            middle = statistics.median(times) if what == "median" else min(times)
            row = table.setdefault(
                (f"{kind}, {ranks} ranks", name),
                {"what": f"{kind}, {ranks} ranks", "contender": name}
                | {f"{each}, us": None for each in SIZES},
            )
            row[f"{size}, us"] = middle
    return list(table.values())


def main() -> None:
    """Measure, write the record, print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--kinds", nargs="+", default=[ALL_REDUCE, *OTHERS])
    parser.add_argument("--rounds", type=int, default=9, help="of all-reduce; the others: 5")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    asked = parser.parse_args()
    one_thread()
    settings = {"rounds": asked.rounds, "ranks": asked.ranks, "turn_s": TURN_S}
    record = start_record("collectives", settings)
    with Meeting() as meeting:
        record["ceiling"] = copy_limit(meeting)
        found = measure_all(meeting, asked.ranks, asked.kinds, asked.rounds)
    record["rows"], record["least"] = rows(found, "median"), rows(found, "least")
    record["samples"] = {
        ", ".join(map(str, case)): {name: vars(one) for name, one in contenders.items()}
        for case, contenders in found.items()
    }
    finish_record(record, compare(found), asked.records)


if __name__ == "__main__":
    main()
