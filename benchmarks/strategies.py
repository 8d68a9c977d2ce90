"""Time per optimizer step of the sharded strategies, beside torch's own parts and DeepSpeed.

    python benchmarks/strategies.py

Measured as `step.py` does: every rank is a process that holds all contenders on one Gloo group with
one thread, a round gives each one block of steps, and what is compared was measured in the same
round. `sharded_contenders.py`, `cut_contenders.py` and `peer_contenders.py` say what each does. The
bar is 1.03 of the best other way that keeps as little: `zero1` beside ZeroRedundancyOptimizer and
ZeRO 1 of DeepSpeed, `zero2` beside its ZeRO 2, `fsdp` beside `fully_shard` and its ZeRO 3, `tensor`
beside `parallelize_module`, pipelines beside torch's own pipelining.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from harness import RECORDS
from step import Plan, measure, run_plans

BAR = 1.03
BY_HAND = ("ddp", "ddp-again", "zero-by-hand", "fsdp2-by-hand")
OURS = ("allranks ddp", "allranks zero1", "allranks zero2", "allranks fsdp")
COMPARED = (
    ("allranks ddp", "ddp", "ratio", BAR),
    ("allranks zero1", "zero-by-hand", "ratio", BAR),
    ("allranks zero2", "zero-by-hand", "ratio", BAR),
    ("allranks fsdp", "fsdp2-by-hand", "ratio", BAR),
    ("allranks zero1", "allranks ddp", "ratio", None),
    ("ddp-again", "ddp", "ratio", None),
)
CUT = (
    *("ddp", "ddp-again", "tensor-by-hand", "gpipe-by-hand", "1f1b-by-hand"),
    *("allranks tensor", "allranks gpipe", "allranks 1f1b"),
)
CUT_COMPARED = (
    ("allranks tensor", "tensor-by-hand", "ratio", BAR),
    ("allranks gpipe", "gpipe-by-hand", "ratio", BAR),
    ("allranks 1f1b", "1f1b-by-hand", "ratio", BAR),
    ("ddp-again", "ddp", "ratio", None),
)
PEERS = (
    *("ddp", "ddp-again", "deepspeed zero1", "deepspeed zero2", "deepspeed zero3"),
    *("allranks zero1", "allranks zero2", "allranks fsdp"),
)
PEERS_COMPARED = (
    ("allranks zero1", "deepspeed zero1", "ratio", BAR),
    ("allranks zero2", "deepspeed zero2", "ratio", BAR),
    ("allranks fsdp", "deepspeed zero3", "ratio", BAR),
    ("ddp-again", "ddp", "ratio", None),
)
PLANS = tuple(
    Plan(*where, contenders, compared, contenders_in=table)
    for where in (("gradient-heavy AdamW", 2, 4), ("17 M MLP", 2, 1))
    for contenders, compared, table in (
        ((*BY_HAND, *OURS), COMPARED, "sharded_contenders"),
        (CUT, CUT_COMPARED, "cut_contenders"),
        (PEERS, PEERS_COMPARED, "peer_contenders"),
    )
)


def main() -> None:
    """Measure, write the record, print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=40, help="rounds")
    parser.add_argument("--sets", type=int, default=2, help="fresh sets of processes")
    parser.add_argument("--workload", default="", help="only this one, by the start of its name")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    asked = parser.parse_args()
    plans = [plan for plan in PLANS if plan.workload.startswith(asked.workload)]

    def samples_of(plan: Plan) -> Any:
        return measure(plan, asked.pairs, asked.sets)

    settings = {"pairs": asked.pairs, "sets": asked.sets}
    run_plans("strategies", plans, settings, samples_of, asked.records)


if __name__ == "__main__":
    main()
