"""Time per optimizer step, steady state: our loop beside loops written by hand, and by wrappers.

    python benchmarks/step.py              a tiny MLP and a small CNN on 2 ranks
    python benchmarks/step.py --bitwise    equal bits: a small CNN and a gradient-heavy MLP, 4 ranks
    python benchmarks/step.py --against P  this tree beside that in the folder P, a tiny MLP

Every rank is a process that holds all contenders (`contenders.py` says what each does and logs),
on one Gloo group, with one thread. A round gives each contender one block of steps, in turns; a
block begins at a barrier, and its time is that of the slowest rank. What is compared was measured
in the same round, within a second or so: many short blocks, because the noise of a shared machine
comes and goes slowly. Since equal loops differ from process to process, `--sets` fresh sets of
processes share the rounds. Before anything is timed, the first losses of all contenders that train
alike must agree. Objects that live through the measurement are taken out of the garbage
collector's sight, which otherwise runs as usual.

Two trees cannot live in one process: with --against each has a set of its own, and the sets hand on
a turn to each other, A B, B A and so on, so that one waits while the other is timed. `before` is P.

`raw` runs on all ranks at once without communication: the ceiling, measured in the same rounds.
With more ranks than cores, time per step is mostly Gloo's threads waking each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import (
    RECORDS,
    Comparison,
    commit_of,
    difference_us,
    finish_record,
    ratio,
    say,
    start_record,
)
from ranks import start_ranks, wait_for

HERE = Path(__file__).resolve().parent
METRIC = "step_us"
Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Plan:
    """What is measured of one workload: `compared` are (of, over, kind, bar).

    `contenders_in` is the module whose loops they are.
    """

    workload: str
    ranks: int
    block: int
    contenders: tuple[str, ...]
    compared: tuple[tuple[str, str, str, float | None], ...]
    contenders_in: str = "contenders"


WRAPPERS = ("fabric-local", "fabric-global", "accelerate-local", "accelerate-global")
BY_HAND = ("raw", "ddp-local", "ddp-global", "ddp-global-again", "ddp-tuned")

STEP = (
    Plan(
        "tiny MLP",
        2,
        50,
        (*BY_HAND, *WRAPPERS, "allranks", "allranks-8"),
        (
            ("allranks", "ddp-global", "difference_us", 100.0),
            ("allranks-8", "ddp-global", "difference_us", None),
            ("allranks", "ddp-local", "difference_us", None),
            ("allranks", "ddp-tuned", "difference_us", None),
            ("fabric-local", "ddp-local", "difference_us", None),
            ("fabric-global", "ddp-global", "difference_us", None),
            ("accelerate-local", "ddp-local", "difference_us", None),
            ("accelerate-global", "ddp-global", "difference_us", None),
            ("ddp-global-again", "ddp-global", "difference_us", None),
            ("allranks", "raw", "difference_us", None),
        ),
    ),
    Plan(
        "small CNN",
        2,
        5,
        (*BY_HAND, "fabric-global", "accelerate-global", "allranks", "allranks-8"),
        (
            ("allranks", "ddp-global", "ratio", 1.03),
            ("allranks-8", "ddp-global", "ratio", None),
            ("allranks", "ddp-local", "ratio", None),
            ("allranks", "ddp-tuned", "ratio", None),
            ("fabric-global", "ddp-global", "ratio", None),
            ("accelerate-global", "ddp-global", "ratio", None),
            ("ddp-global-again", "ddp-global", "ratio", None),
        ),
    ),
)

BITWISE_CONTENDERS = ("ddp-global", "allranks", "allranks-8", "allranks-bitwise")
BITWISE = tuple(
    Plan(
        workload,
        4,
        block,
        (*BITWISE_CONTENDERS, "allranks-bitwise-N"),
        (
            ("allranks-bitwise", "allranks-8", "ratio", bar),
            ("allranks-bitwise", "ddp-global", "ratio", None),
            ("allranks-bitwise-N", "allranks", "ratio", None),
            ("allranks", "ddp-global", "ratio", None),
        ),
    )
    for workload, block, bar in (("small CNN", 5, 1.15), ("gradient-heavy MLP", 5, None))
)

AGAINST = tuple(
    Plan(
        "tiny MLP",
        ranks,
        50,
        ("raw", "allranks"),
        (
            ("allranks", "before allranks", "difference_us", None),
            ("raw", "before raw", "difference_us", None),
        ),
    )
    for ranks in (2, 1)
)


def measure(plan: Plan, pairs: int, sets: int, against: Path | None = None) -> Samples:
    """Microseconds per step of every contender, one value for each of `pairs` rounds."""
    samples: Samples = {}
    for number in range(sets):
        rounds = pairs // sets + (number < pairs % sets)
        if not rounds:
            continue
        found = _one_set(plan, rounds, pairs * number // sets, against)
        for name, values in found.items():
            samples.setdefault(name, []).extend(values)
        say(
            f"{plan.workload}, {plan.ranks} ranks, set {number + 1}/{sets}: "
            + "  ".join(f"{name} {statistics.median(found[name]):.0f}" for name in found)
        )
    return samples


def _one_set(plan: Plan, rounds: int, first_turn: int, against: Path | None) -> Samples:
    """Run one fresh set of rank processes to its end; with `against`, a second one beside it."""
    trees = {"": HERE.parent} if against is None else {"": HERE.parent, "before ": against}
    preload = ["step_rank"] if against is None else ["torch.distributed"]
    samples: Samples = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-step-") as name:
        folders = [Path(name) / str(number) for number in range(len(trees))]
        for folder in folders:
            folder.mkdir()
            os.mkfifo(folder / "turn")
        ranks = []
        for number, tree in enumerate(trees.values()):
            turns = [str(folder) for folder in (folders[number:] + folders[:number])]
            arguments = (plan, rounds, first_turn, str(tree / "src"), turns)
            ranks += start_ranks(plan.ranks, _rank, arguments, preload)
        wait_for(plan.workload, ranks)
        for prefix, folder in zip(trees, folders, strict=True):
            found: Samples = json.loads((folder / "samples.json").read_text())
            samples |= {prefix + contender: values for contender, values in found.items()}
    return samples


def _rank(
    rank: int, plan: Plan, rounds: int, first_turn: int, source: str, folders: list[str]
) -> None:
    """In a rank's process: what follows imports torch, which the command itself never does."""
    sys.path[:0] = [source, str(Path(source).parent / "benchmarks")]  # each tree knows its names
    from step_rank import measure_as_rank  # noqa: PLC0415

    names, table = list(plan.contenders), plan.contenders_in
    turns = range(first_turn, first_turn + rounds)
    job = plan.workload, plan.ranks, rank, names, plan.block, turns, source, folders
    measure_as_rank(*job, *([] if table == "contenders" else [table]))  # older trees know no other


def compare(plan: Plan, samples: Samples) -> tuple[list[dict[str, Any]], list[Comparison]]:
    """The medians of every contender, and the comparisons that the plan names."""
    what = f"{plan.workload}, {plan.ranks} ranks"
    rows = [
        {"what": what, "contender": name, METRIC: statistics.median(values)}
        for name, values in samples.items()
    ]
    comparisons = []
    for of, over, kind, bar in plan.compared:
        pairs = list(zip(samples[of], samples[over], strict=True))
        if kind == "ratio":
            comparisons.append(ratio(what, METRIC, of, over, pairs, bar))
        else:
            in_s = [(a / 1e6, b / 1e6) for a, b in pairs]
            comparisons.append(difference_us(what, METRIC, of, over, in_s, bar))
    return rows, comparisons


def run_plans(
    name: str,
    plans: Iterable[Plan],
    settings: dict[str, Any],
    samples_of: Callable[[Plan], Any],
    records: Path,
) -> None:
    """Measure each plan with one thread for each rank, write the record, print it."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    record = start_record(name, {**settings, "threads_per_rank": 1})
    record["rows"], record["samples"], comparisons = [], {}, []
    for plan in plans:
        samples = samples_of(plan)
        rows, compared = compare(plan, samples)
        record["rows"] += rows
        table = "" if plan.contenders_in == "contenders" else f", {plan.contenders_in}"
        record["samples"][f"{plan.workload}, {plan.ranks} ranks{table}"] = {METRIC: samples}
        comparisons += compared
    finish_record(record, comparisons, records)


def main() -> None:
    """Measure, write the record, print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bitwise", action="store_true", help="equal bits beside ddp, on 4 ranks")
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    parser.add_argument(
        "--pairs", type=int, help="rounds (default 120; --bitwise 60, --against 300)"
    )
    parser.add_argument("--sets", type=int, default=3, help="fresh sets of processes")
    parser.add_argument("--workload", help="only this one, by the start of its name")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    asked = parser.parse_args()
    pairs = asked.pairs or (300 if asked.against else 60 if asked.bitwise else 120)
    plans = [
        plan
        for plan in (AGAINST if asked.against else BITWISE if asked.bitwise else STEP)
        if plan.workload.startswith(asked.workload or "")
    ]
    name = "against" if asked.against else "bitwise" if asked.bitwise else "step"
    settings = {"pairs": pairs, "sets": asked.sets}
    if asked.against:
        settings["against"] = commit_of(asked.against)

    def samples_of(plan: Plan) -> Any:
        return measure(plan, pairs, asked.sets, asked.against)

    run_plans(name, plans, settings, samples_of, asked.records)


if __name__ == "__main__":
    main()
