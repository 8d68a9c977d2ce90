"""What `--audit` costs, whether sound runs raise an alarm, and whether planted faults are named.

    python benchmarks/audit.py cost
    python benchmarks/audit.py sound --shards 1000000 --seconds 600
    python benchmarks/audit.py faults --each 20

cost     Two ranks train with every second step audited, so that each audited step stands beside
         the plain one before it: their ratio is what one audit costs, in steps. At the default of
         `--audit-every` that is spread over so many steps; the bar is 1.01.
sound    Two and three ranks train a tiny model with BatchNorm and dropout, each step audited, under
         each strategy in turn, until so many shards were audited or the time is over. Any
         difference is an alarm, and ends the benchmark.
faults   Three ranks train the same, and at random steps one rank that owns or audits the shard has
         a wrong gradient, sample or weight. Each must be named with rank and step, and nothing
         else.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import RECORDS, Comparison, finish_record, order_of, ratio, say, start_record

from allranks.job.run_folder import read_events
from allranks.strategies.audits import AUDIT, Draw, default_every
from allranks.strategies.shards import Shares, even_sizes
from allranks.training.order import random_key

HERE = Path(__file__).resolve().parent
LIMIT_S = 900
SHARDS, RANKS, EVERY, WARM = 8, 2, 2, 20
BAR = 1.01
MODELS = {"MLP": 256, "CNN": 256, "wide MLP": 256}
CONTENDERS = {"ddp --bitwise": ("ddp", "--bitwise"), "ddp": ("ddp",), "zero2": ("zero2",)}
BOTH = ("ddp", "zero1", "zero2", "fsdp")
SOUND = [("ddp-plain",), *((name, *more) for name in BOTH for more in ((), ("--bitwise",)))]
TINY = "tiny"
TINY_BATCH, TINY_SHARDS = 16, 4
FAULTY = {
    ("ddp", "--bitwise"): ("gradient", "sample"),
    ("zero1",): ("gradient", "sample", "weight"),  # a wrong weight is made anew by the update
    ("zero2", "--bitwise"): ("gradient", "sample", "weight"),
    ("fsdp", "--bitwise"): ("gradient", "sample"),
}
FAULTY_RANKS, FAULTY_STEPS = 3, 300


@dataclass(frozen=True)
class Trained:
    """One training: the seconds of its steps, its summary, and its events `audit`."""

    seconds: list[float]
    summary: dict[str, Any]
    alarms: list[dict[str, Any]]


def train(
    model: str, words: Sequence[str], ranks: int, steps: int, folder: Path, *more: str
) -> Trained:
    """Train with audits; `words` are the strategy and its options."""
    with tempfile.TemporaryDirectory(prefix="benchmark-audit-", dir=folder) as name:
        notes, run = Path(name, "times.json"), Path(name, "run")
        command = [_tool("allranks"), "train", f"{HERE / 'audit_task.py'}:Audited", "--strategy"]
        command += [*words, "--ranks", str(ranks), "--steps", str(steps), "--threads", "1"]
        command += ["--witness", "off", "--first-check", "off", "--digest-every", "0", "--json"]
        command += ["--set", f"model_name={model}", "--run-dir", str(run)]
        if model == TINY:
            command += ["--set", f"batch_size={TINY_BATCH}", "--set", f"shards={TINY_SHARDS}"]
        else:
            command += ["--set", f"notes={notes}", "--set", f"shards={SHARDS}"]
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        times = json.loads(notes.read_text()) if notes.exists() else []
        alarms = [row for row in read_events(run) if row["event"] == "audit"]
    seconds = [after - before for before, after in pairwise(times)]
    return Trained(seconds, json.loads(done.stdout.splitlines()[-1]), alarms)


def _tool(name: str) -> str:
    """The command `name` of the environment that runs this script."""
    path = shutil.which(name, path=str(Path(sys.executable).parent))
    if path is None:
        raise SystemExit(f"no command {name!r} beside this python")
    return path


# --- cost ----------------------------------------------------------------------------------------


def pairs_of(seconds: list[float]) -> list[tuple[float, float]]:
    """(audited, plain) of neighbours: step n + 1 is audited where its number divides by `EVERY`."""
    first = WARM - WARM % EVERY
    return [(seconds[at], seconds[at - 1]) for at in range(first, len(seconds), EVERY)]


def compared(pairs: dict[tuple[str, str], list[tuple[float, float]]]) -> list[Comparison]:
    """One audit in steps, and the same at the default."""
    every = default_every(SHARDS, RANKS)
    rows = []
    for (model, contender), of_model in pairs.items():
        what = f"{model}, {contender}, {RANKS} ranks, {SHARDS} shards"
        spread = [((every - 1) * plain + audited, every * plain) for audited, plain in of_model]
        rows.append(ratio(what, "step_s", "audited", "plain", of_model, None))
        rows.append(ratio(what, "step_s", f"--audit-every {every}", "plain", spread, BAR))
    return rows


def cost(asked: argparse.Namespace) -> None:
    """Measure, write the record, print it."""
    settings = {"shards": SHARDS, "ranks": RANKS, "rounds": asked.rounds, "steps": asked.steps}
    record = start_record("audit", settings)
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    audits = ("--audit", "stop", "--audit-every", str(EVERY))
    for turn in range(asked.rounds):
        for model in order_of(list(MODELS), turn):
            for contender in order_of(list(CONTENDERS), turn):
                words = CONTENDERS[contender]
                trained = train(model, words, RANKS, asked.steps, asked.folder, *audits)
                pairs.setdefault((model, contender), []).extend(pairs_of(trained.seconds))
    record["samples"] = {f"{model}, {name}": each for (model, name), each in pairs.items()}
    finish_record(record, compared(pairs), asked.records)


# --- sound runs ----------------------------------------------------------------------------------


def sound(asked: argparse.Namespace) -> None:
    """Count audited shards of sound runs, under each strategy on 2 and 3 ranks in turn."""
    settings = {"shards": asked.shards, "seconds": asked.seconds, "steps": asked.steps}
    record = start_record(
        "audit_sound", {**settings, "batch": TINY_BATCH, "per_batch": TINY_SHARDS}
    )
    begun, counts = time.monotonic(), dict[tuple[str, int], int]()
    cells = [(words, ranks) for ranks in (2, 3) for words in SOUND]
    turn = 0
    while sum(counts.values()) < asked.shards and time.monotonic() - begun < asked.seconds:
        words, ranks = cells[turn % len(cells)]
        more = "--audit", "warn", "--audit-every", "1", "--set", f"seed_of_data={turn}"
        trained = train(TINY, words, ranks, asked.steps, asked.folder, *more)
        audits, name = trained.summary["audits"], " ".join(words)
        counts[name, ranks] = counts.get((name, ranks), 0) + audits["shards"]
        if audits["differed"] or trained.alarms:
            raise SystemExit(f"{name} on {ranks} ranks: a sound run raised an alarm")
        turn += 1
    seconds = time.monotonic() - begun
    total = sum(counts.values())
    say(f"{total} audited shards of sound runs in {seconds:.0f} s, no alarm")
    record["rows"] = [
        {"contender": name, "ranks": ranks, "audited": shards, "alarms": 0}
        for (name, ranks), shards in counts.items()
    ]
    finish_record({**record, "audited": total, "took_s": round(seconds)}, [], asked.records)


# --- faults --------------------------------------------------------------------------------------


def drawn(step: int) -> Draw:
    """The draw of a step, as the ranks draw it."""
    sizes = even_sizes(TINY_BATCH, TINY_SHARDS)
    runs = Shares.even(TINY_SHARDS, FAULTY_RANKS).runs
    draw = Draw.of(random_key(0, step, AUDIT), sizes, runs)
    assert draw is not None
    return draw


def faults(asked: argparse.Namespace) -> None:
    """Plant faults in audited shards; each must be named with rank and step, and nothing else."""
    record = start_record("audit_faults", {"each": asked.each, "ranks": FAULTY_RANKS})
    chance, rows = random.Random(asked.seed), []
    for words, kinds in FAULTY.items():
        steps = chance.sample(range(2, FAULTY_STEPS), asked.each * len(kinds))
        planted = {step: chance.choice(drawn(step)[1:3]) for step in steps}
        kind_of = dict(zip(steps, kinds * asked.each, strict=True))
        inject = " ".join(f"flip@of={kind_of[s]},rank={r},step={s}" for s, r in planted.items())
        more = "--audit", "warn", "--audit-every", "1", "--inject", inject
        trained = train(TINY, words, FAULTY_RANKS, FAULTY_STEPS, asked.folder, *more)
        named = {row["step"]: row["wrong"] for row in trained.alarms}
        for kind in kinds:
            those = [step for step in steps if kind_of[step] == kind]
            right = sum(named.get(step) == planted[step] for step in those)
            row = {"contender": " ".join(words), "of": kind, "planted": len(those), "named": right}
            rows.append(row)
            say(json.dumps(row))
        if named != planted:
            wrong = {step: rank for step, rank in named.items() if planted.get(step) != rank}
            missed = {step: kind_of[step] for step in planted if step not in named}
            say(f"{' '.join(words)}: missed {missed}, named wrongly {wrong}")
    record["rows"] = rows
    say(f"{sum(r['named'] for r in rows)} of {sum(r['planted'] for r in rows)} named")
    finish_record(record, [], asked.records)


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="of the run folders")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("cost")
    part.set_defaults(run=cost)
    part.add_argument("--rounds", type=int, default=3)
    part.add_argument("--steps", type=int, default=120, help="of a training")
    part = parts.add_parser("sound")
    part.set_defaults(run=sound)
    part.add_argument("--shards", type=int, default=10**6, help="to audit")
    part.add_argument("--seconds", type=float, default=600, help="after which none begins")
    part.add_argument("--steps", type=int, default=3000, help="of a training")
    part = parts.add_parser("faults")
    part.set_defaults(run=faults)
    part.add_argument("--each", type=int, default=20, help="faults of a kind in a training")
    part.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    asked.run(asked)


if __name__ == "__main__":
    main()
