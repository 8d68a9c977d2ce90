"""Random planted faults: how many `allranks bisect` names by step, tensor and operator.

    python benchmarks/bisection.py --faults 100

Each fault is planted by the task of `tests/tasks/bit_flips.py` on one rank: a bit of a weight, of a
gradient or of a moment of the optimizer, of a sample, the state of the generator, or a function
that is off by a bit from a step on. Drawn are kind, step, rank, parameter, strategy and number of
ranks; none is later than the seventh step of nine, so that a later loss has read what it changed.
The sound run of the same job is trained once for each strategy and number of ranks. A step counts
as named if it is that of the fault. A weight that flips after a step, in a copy that is no part of
the state (`zero1`), counts in the next step, which is the first that reads it. An operator counts
if it is the right one of its kind (`OPERATORS`): either the one that computes something else from
equal inputs, or the first that reads what is wrong; these are counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness import RECORDS, finish_record, median_interval, say, start_record

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "tasks"))

from allranks.job.config import resolve  # noqa: E402
from allranks.job.engines import preload_for  # noqa: E402
from allranks.launcher.processes.fork_server_client import ForkServer  # noqa: E402
from allranks.launcher.start import run_job  # noqa: E402
from allranks.tools.bisect import Bisection, bisect  # noqa: E402
from allranks.tools.bisect_step import AFTER_UPDATE  # noqa: E402
from bit_flips import Planted  # noqa: E402

PROGRAM, STEPS = "bit_flips:Planted", 9  # in the fifth, a short batch, not all ranks have samples
KINDS = ("weight", "gradient", "moment", "sample", "generator", "function")
STAGES = {
    "weight": ("state before the step", "weights in the passes", "state after the callbacks"),
    "moment": ("state before the step", "state after the callbacks", "state after the update"),
    "gradient": ("gradient",),
    "sample": ("sample",),
    "generator": ("generator after the callbacks", "state before the step"),
    "function": ("losses",),
}
OPERATORS = {
    "weight": "in {module} (forward)",
    "moment": "of exp_avg of '{parameter}' (update)",
    "gradient": "of gradient of '{parameter}' (accumulation)",
    "sample": "in 0 (forward)",
    "generator": "aten.rand.default in Plant.on_step() (callbacks), bit_flips.py",
    "function": "planted.activation.default in 7 (forward)",
}
"""What is to be named; `module` is that of the parameter."""
STRATEGIES = ("ddp", "ddp", "zero1")


def drawn(seed: int) -> dict[str, Any]:
    """The fault of this number."""
    chance = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    ranks = chance.choice((2, 3))
    fault = {"seed": seed, "kind": kind, "rank": chance.randrange(ranks), "of": chance.randrange(8)}
    at = chance.randrange(101) if kind == "sample" else chance.choice((2, 3, 4, 6, 7))
    strategy = "ddp" if kind == "moment" else chance.choice(STRATEGIES)  # all ranks have moments
    return {**fault, "at": at, "ranks": ranks, "strategy": strategy}


class Faults:
    """Trains sound and faulty runs, and bisects them."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        self.folder, self.server = folder, server
        self.sound: dict[tuple[str, int], Path] = {}

    def train(self, name: str, strategy: str, ranks: int, *settings: str) -> Path:
        """A run, digested every third step, with checkpoints every fourth."""
        flags = {"strategy": strategy, "ranks": ranks, "bitwise": True, "steps": STEPS}
        flags |= {"digest_every": 3, "checkpoint_every": 4, "first_check": "off"}
        flags |= {"witness": "off", "run_dir": str(self.folder / name)}
        run_job(resolve(PROGRAM, flags, settings), self.server)
        return self.folder / name

    def run(self, fault: dict[str, Any]) -> dict[str, Any]:
        """What `bisect` says of a fault."""
        key = fault["strategy"], fault["ranks"]
        if key not in self.sound:
            self.sound[key] = self.train(f"sound-{key[0]}-{key[1]}", *key)
        names = ("at", "rank", "of")
        settings = [f"fault={fault['kind']}", *(f"{name}={fault[name]}" for name in names)]
        faulty = self.train(f"{fault['seed']}", *key, *settings)
        begun = time.monotonic()
        result = bisect(self.sound[key], faulty, self.server)
        seconds = time.monotonic() - begun
        row = {**fault, "seconds": seconds, "step": result.step, "notes": result.notes}
        first = result.first
        if first is not None:
            search = first.operators
            row |= {"stage": first.stage, "tensor": first.tensor, "on": first.ranks}
            row |= {"values": first.values, "operators": search and str(first).splitlines()[3:]}
        return {**row, **self.judged(fault, result)}

    def judged(self, fault: dict[str, Any], result: Bisection) -> dict[str, bool]:
        """Whether step, tensor, rank and operator are right."""
        first, kind = result.first, fault["kind"]
        if result.is_equal or first is None:
            return dict.fromkeys(("is_step", "is_tensor", "is_rank", "computes", "reads"), False)
        at = {fault["at"]}
        if kind in ("weight", "moment", "generator"):
            is_before = first.stage in ("state before the step", "weights in the passes")
            at = {fault["at"] + is_before}
        if kind == "sample":
            at = {self.step_of_sample(fault)}
        is_tensor = first.stage in STAGES[kind]
        parameter = self.parameters[fault["of"] % len(self.parameters)]
        if kind in ("weight", "gradient", "moment"):
            is_tensor = is_tensor and (kind == "moment" or parameter in first.tensor)
        right = OPERATORS[kind].format(parameter=parameter, module=parameter.partition(".")[0])
        if kind == "weight" and parameter == "9.bias" and first.stage in AFTER_UPDATE:
            right = "aten.add_.Tensor in Plant.on_step() (callbacks), bit_flips.py"
        lines = str(first).splitlines()
        return {
            "is_step": result.step in at,
            "is_tensor": is_tensor,
            "is_rank": first.ranks == (fault["rank"],),
            "computes": any(line.startswith("operator: ") and right in line for line in lines),
            "reads": any(line.startswith("first operator ") and right in line for line in lines),
        }

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters of the task, in the order of its model."""
        return [name for name, _ in Planted().model().named_parameters()]

    def step_of_sample(self, fault: dict[str, Any]) -> int:
        """The first step of the sound run that read the sample, as its task wrote it."""
        key = fault["strategy"], fault["ranks"]
        rows = (self.sound[key] / "samples.jsonl").read_text().splitlines()
        read = [json.loads(row) for row in rows]
        return min(row["step"] for row in read if fault["at"] in row["ids"])


def main() -> None:
    """Exit code 1 if a step or a tensor is not named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after that")
    parser.add_argument("--no-record", dest="record", action="store_false", help="leave none here")
    options = parser.parse_args()
    record = start_record("bisection", {n: getattr(options, n) for n in ("faults", "first")})
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT / "tests" / "tasks"), os.getenv("PYTHONPATH")))
    )
    rows, until_s = [], time.monotonic() + options.seconds
    preload = preload_for(PROGRAM, "torch")
    with tempfile.TemporaryDirectory() as folder, ForkServer(preload) as server:
        faults = Faults(Path(folder), server)
        for seed in range(options.first, options.first + options.faults):
            if time.monotonic() > until_s:
                break
            rows.append(faults.run(drawn(seed)))
            row = rows[-1]
            if not (row["is_step"] and row["is_tensor"] and (row["computes"] or row["reads"])):
                say(json.dumps(row))
    checks = {
        "is_step": "step",
        "is_tensor": "tensor",
        "is_rank": "rank",
        "computes": "operator that computes something else",
        "reads": "first operator with other inputs",
    }
    counts = {what: sum(row[name] for row in rows) for name, what in checks.items()}
    kinds = Counter(row["kind"] for row in rows)
    record |= {"faults": len(rows), **{f"{what}_named": n for what, n in counts.items()}}
    record |= {"median_s": median_interval([row["seconds"] for row in rows]).median}
    record["samples"] = rows
    record["rows"] = [
        {"what": "planted faults", "number": len(rows)},
        *({"what": f"{what} named", "number": count} for what, count in counts.items()),
        *({"what": f"of them {kind}", "number": count} for kind, count in sorted(kinds.items())),
    ]
    finish_record(record, [], RECORDS if options.record else Path(tempfile.mkdtemp()))
    sys.exit(0 if counts["step"] == counts["tensor"] == len(rows) else 1)


if __name__ == "__main__":
    main()
