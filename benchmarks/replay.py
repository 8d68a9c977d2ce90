"""Random steps of random runs, made again by `allranks replay`; and what digests cost.

    python benchmarks/replay.py --replays 50

Each run draws a strategy, 2 to 4 ranks, how often it digests and saves, and ranks that are killed
on the way; some of them are stopped and resumed on other ranks. Its task has BatchNorm and dropout,
and all but `local-sgd` train with `--bitwise`. Then a step is drawn and replayed: every digest and
every loss on the way must be that of the run. Last, digests are timed beside the steps of a model
with AdamW: their cost at the default of one in 500 steps must be below 0.5 %.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import RECORDS, Comparison, finish_record, median_interval, say, start_record
from torch import Tensor, nn

from allranks.job.job import Job
from allranks.torch import Task
from allranks.torch.trainer import Trainer
from allranks.torch.witness.digests import StateDigests

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from launch_host import Host  # noqa: E402

TASK, STEPS = "contract_tasks:Images", 40
STRATEGIES = ("ddp", "zero1", "fsdp", "1f1b", "local-sgd:every=4")
BAR, EVERY = 0.005, Job().digest_every


def words_of(chance: random.Random, strategy: str) -> list[str]:
    """The command line of a run that is killed once or twice on its way."""
    ranks = chance.choice((2, 2) if strategy == "1f1b" else (2, 3, 4))
    kills = sorted(chance.sample(range(3, STEPS - 1), chance.randint(1, 2)))
    inject = " ".join(
        f"kill@rank={chance.randrange(ranks)},step={step},attempt={attempt}"
        for attempt, step in enumerate(kills)
    )
    words = ["train", TASK, "--json", "--steps", str(STEPS), "--first-check", "off"]
    words += ["--strategy", strategy, "--ranks", str(ranks), "--inject", inject]
    words += ["--max-restarts", "3", "--digest-every", str(chance.randint(2, 9))]
    words += ["--checkpoint-every", str(chance.randint(3, 15)), "--keep", "9"]
    return [*words, *([] if strategy.startswith("local") else ["--bitwise"])]


def replayed(host: Host, folder: Path, seed: int) -> dict[str, Any]:
    """Train, perhaps resume on other ranks, replay a step; the row says what came of it."""
    chance, strategy = random.Random(seed), STRATEGIES[seed % len(STRATEGIES)]
    place = folder / str(seed)
    place.mkdir()
    words, run, steps = words_of(chance, strategy), place / "run", STEPS
    row: dict[str, Any] = {"seed": seed, "strategy": strategy, "words": words, "resumed": False}
    launch = host.launch(place, *words, "--run-dir", run)
    assert launch.wait() == 0, launch.err
    row["restarts"] = launch.summary()["restarts"]
    if chance.random() < 0.5:
        steps += 10
        more = ["--steps", str(steps), "--json"]
        if strategy in ("ddp", "zero1", "fsdp"):
            more += ["--ranks", str(chance.choice((2, 3, 4)))]
        launch = host.launch(place, "train", "--run-dir", run, *more)
        assert launch.wait() == 0, launch.err
        row["resumed"] = True
    step = row["step"] = chance.randint(1, steps)
    begun = time.monotonic()
    launch = host.launch(place, "replay", run, "--step", str(step), "--json")
    row["code"] = launch.wait()
    row["seconds"] = time.monotonic() - begun
    if row["code"] in (0, 5):
        row = {**launch.summary(), **row}
    else:
        row["why"] = str(launch.err)
    return row


@dataclass(kw_only=True)
class Layers(Task):
    """A model of `width`, whose steps are short for its size: 32 samples, AdamW."""

    batch_size: int = 32
    width: int = 1024

    def model(self) -> nn.Module:
        wide = [nn.Linear(self.width, self.width) for _ in range(8)]
        return nn.Sequential(*(layer for one in wide for layer in (one, nn.ReLU())))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train_data(self) -> tuple[Tensor, Tensor]:
        return torch.randn(256, self.width), torch.randn(256, self.width)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).square().mean(1)


def share_of_time(width: int, rounds: int) -> list[float]:
    """Seconds of a digest, by those of the steps from one to the next, of each round."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    task, shares = Layers(width=width), []
    with Trainer(task, Job(steps=10 * rounds + 3, witness="off")) as trainer:
        digests, step_s, digest_s = StateDigests(trainer.strategy), [], 0.0
        for batch in trainer.batches():
            last = batch.index % 10 == 0
            begun = time.perf_counter()
            if last:
                digests.watch(batch)
            trainer.step(batch)
            if last:
                digests.digests(batch.index + 1)
            seconds = time.perf_counter() - begun
            if not last:
                step_s.append(seconds)
            elif len(step_s) > 3:
                usual = statistics.median(step_s)
                digest_s = max(0.0, seconds - usual)
                shares.append(digest_s / (EVERY * usual))
                step_s = []
    return shares


def main() -> None:
    """Exit code 1 if a replay has other digests than its run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=20, help="of the cost")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after that")
    parser.add_argument("--no-record", dest="record", action="store_false", help="leave none here")
    options = parser.parse_args()
    names = ("replays", "first", "rounds")
    record = start_record("replay", {name: getattr(options, name) for name in names})
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT / "tests" / "tasks"), os.getenv("PYTHONPATH")))
    )
    until_s, rows, host = time.monotonic() + options.seconds, [], Host()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.first, options.first + options.replays):
            if time.monotonic() > until_s:
                break
            rows.append(replayed(host, Path(folder), seed))
            if not rows[-1].get("equal"):
                say(f"replay {seed}: {rows[-1]}")
    host.close()
    costs = {width: share_of_time(width, options.rounds) for width in (64, 1024)}
    comparisons = [
        Comparison(
            what=f"8 layers of {width}, one process",
            kind="ratio",
            metric=f"a digest every {EVERY} steps",
            of="digest",
            over="steps",
            interval=median_interval(shares),
            bar=BAR,
        )
        for width, shares in costs.items()
    ]
    wrong = [row for row in rows if not row.get("equal")]
    by_strategy = Counter(row["strategy"] for row in rows)
    record |= {"replays": len(rows), "failed": len(wrong), "strategies": dict(by_strategy)}
    record |= {"digests": sum(len(row.get("digests", ())) for row in rows)}
    record |= {"steps_again": sum(row["step"] - row.get("from_step", 0) for row in rows)}
    record |= {"restarts": sum(row["restarts"] for row in rows)}
    record |= {"resumed": sum(row["resumed"] for row in rows)}
    record |= {"median_s": median_interval([row["seconds"] for row in rows]).median}
    record |= {"samples": rows}
    record["rows"] = [
        {"what": "replays", "number": len(rows)},
        {"what": "of them with another digest or loss than the run", "number": len(wrong)},
        *({"what": name, "number": count} for name, count in sorted(by_strategy.items())),
    ]
    finish_record(record, comparisons, RECORDS if options.record else Path(tempfile.mkdtemp()))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
