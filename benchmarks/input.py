"""The input pipeline: images per second from JPEG files,
and the steady step beside its longest stage.

    python benchmarks/input.py

JPEG files of 500 x 375 pixels and about 100 kB, each read, decoded, cut at random, scaled to 224
and normalised; nothing is trained, so what is measured is the pipeline alone:

    allranks            an `ImageFolder` read by threads (`--loader-workers N`), as tasks get it
    DataLoader          the same files and functions in a plain torch DataLoader with N processes
    DataLoader-again    the same a second time: its distance from itself is the noise

Stages of known length: reading, decoding and computing sleep. A steady step takes as long as the
longest of them (`longest stage`, each measured by itself in the same round: a sleep is never
exact); read in the step it takes their sum.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import RECORDS, Comparison, finish_record, ratio, start_record
from ranks import start_ranks, wait_for

BAR = 1.1
WORKERS = (1, 2)
STAGES = {
    "read = decode = compute": (0.08, 0.08, 0.08),
    "read longest": (0.08, 0.03, 0.03),
    "decode longest": (0.03, 0.08, 0.03),
    "compute longest": (0.03, 0.03, 0.08),
}
IMAGES_PER_S, STEP_S = "images_per_s", "step_s"


def run(what: str, target: Callable[..., None], asked: dict[str, Any]) -> dict[str, Any]:
    """One fresh process to its end; what it has found."""
    with tempfile.TemporaryDirectory(prefix="benchmark-input-") as folder:
        wait_for(what, start_ranks(1, target, (asked, folder), ["input_rank"]))
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
        return found


def _images(rank: int, asked: dict[str, Any], folder: str) -> None:
    """In a process of its own: what follows imports torch, which the command itself never does."""
    from input_rank import measure_images  # noqa: PLC0415

    measure_images(rank, asked, folder)


def _stages(rank: int, asked: dict[str, Any], folder: str) -> None:
    from input_rank import measure_stages  # noqa: PLC0415

    measure_stages(rank, asked, folder)


def compare(
    metric: str, samples: dict[str, dict[str, list[float]]], over: str, bar: float | None
) -> tuple[list[dict[str, Any]], list[Comparison]]:
    """The medians of every contender, and each of them beside `over`."""
    rows, comparisons = [], []
    for what, contenders in samples.items():
        medians = {name: statistics.median(values) for name, values in contenders.items()}
        rows += [{"what": what, "contender": n, metric: value} for n, value in medians.items()]
        for name in (name for name in contenders if name != over):
            pairs = list(zip(contenders[name], contenders[over], strict=True))
            own_bar = bar if name == "allranks" else None
            comparisons.append(ratio(what, metric, name, over, pairs, own_bar))
    return rows, comparisons


def main() -> None:
    """Measure, write the record, print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15, help="rounds")
    parser.add_argument("--images", type=int, default=320, help="files that are made")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    asked = parser.parse_args()
    images = {"pairs": asked.pairs, "images": asked.images, "batch": 32, "block": 8}
    stages = {"pairs": asked.pairs, "batch": 8, "block": 8, "stages": STAGES}
    record = start_record("input", {"images": images, "stages": stages, "threads": 1})
    found = run("JPEG", _images, {**images, "workers": WORKERS})
    record["settings"]["mean_bytes_per_image"] = round(found["bytes"])
    slept = run("stages", _stages, stages)
    of_images, faster = compare(IMAGES_PER_S, found["samples"], "DataLoader", None)
    of_stages, steady = compare(STEP_S, slept["samples"], "longest stage", BAR)
    record["rows"] = [*of_images, *of_stages]
    record["samples"] = {
        **{what: {IMAGES_PER_S: values} for what, values in found["samples"].items()},
        **{what: {STEP_S: values} for what, values in slept["samples"].items()},
    }
    finish_record(record, [*faster, *steady], asked.records)


if __name__ == "__main__":
    main()
