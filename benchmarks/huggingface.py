"""Time per optimizer step of tiny models of transformers, as tasks and by hand, on two ranks.

    python benchmarks/huggingface.py

GPT-2 and Llama, of four layers of 128, on 8 texts of 64 tokens for each rank, in float32 under
`ddp`, beside DistributedDataParallel on Gloo (`huggingface_contenders.py`). Measured as
`step.py` measures, by its own code. Needs `allranks[huggingface]`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from harness import RECORDS
from step import Plan, measure, run_plans

PLANS = tuple(
    Plan(
        name,
        2,
        3,
        ("ddp-global", "ddp-global-again", "allranks"),
        (
            ("allranks", "ddp-global", "ratio", 1.03),
            ("ddp-global-again", "ddp-global", "ratio", None),
        ),
        contenders_in="huggingface_contenders",
    )
    for name in ("tiny GPT-2", "tiny Llama")
)


def main() -> None:
    """Measure, write the record, print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=120, help="rounds")
    parser.add_argument("--sets", type=int, default=3, help="fresh sets of processes")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    options = parser.parse_args()

    def samples_of(plan: Plan) -> Any:
        return measure(plan, options.pairs, options.sets)

    settings = {"pairs": options.pairs, "sets": options.sets}
    run_plans("huggingface", PLANS, settings, samples_of, options.records)


if __name__ == "__main__":
    main()
