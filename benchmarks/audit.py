"""What `--audit` costs, and whether sound runs raise an alarm.

    python benchmarks/audit.py

Two ranks train with every second step audited, so that each audited step stands beside the plain
one before it: their ratio is what one audit costs, in steps. At the default of `--audit-every` that
is spread over so many steps; the bar is 1.01. Then three ranks train with every step audited, under
each strategy, a CNN with BatchNorm and dropout: any difference is an alarm, and ends the benchmark.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import RECORDS, Comparison, finish_record, order_of, ratio, say, start_record

from allranks.strategies.audits import default_every

HERE = Path(__file__).resolve().parent
LIMIT_S = 900
SHARDS, RANKS, EVERY, WARM = 8, 2, 2, 20
BAR = 1.01
MODELS = {"MLP": 256, "CNN": 256, "wide MLP": 256}
CONTENDERS = {"ddp --bitwise": ("ddp", "--bitwise"), "ddp": ("ddp",), "zero2": ("zero2",)}
SOUND = {**CONTENDERS, "ddp-plain": ("ddp-plain",), "zero1 --bitwise": ("zero1", "--bitwise")}


def train(model: str, words: tuple[str, ...], ranks: int, steps: int, every: int, folder: Path):
    """One training with audits; returns the seconds of its steps, and its summary."""
    with tempfile.TemporaryDirectory(prefix="benchmark-audit-", dir=folder) as name:
        notes = Path(name, "times.json")
        command = [_tool("allranks"), "train", f"{HERE / 'audit_task.py'}:Audited", "--strategy"]
        command += [*words, "--ranks", str(ranks), "--steps", str(steps), "--threads", "1"]
        command += ["--audit", "stop", "--audit-every", str(every), "--witness", "off", "--json"]
        command += ["--set", f"shards={SHARDS}", "--set", f"model_name={model}"]
        command += ["--set", f"notes={notes}", "--run-dir", str(Path(name, "run"))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        times = json.loads(notes.read_text())
    return [after - before for before, after in pairwise(times)], json.loads(done.stdout)


def pairs_of(seconds: list[float]) -> list[tuple[float, float]]:
    """(audited, plain) of neighbours: step n + 1 is audited where its number divides by `EVERY`."""
    first = WARM - WARM % EVERY
    return [(seconds[at], seconds[at - 1]) for at in range(first, len(seconds), EVERY)]


def _tool(name: str) -> str:
    """The command `name` of the environment that runs this script."""
    path = shutil.which(name, path=str(Path(sys.executable).parent))
    if path is None:
        raise SystemExit(f"no command {name!r} beside this python")
    return path


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


def main() -> None:
    """Measure, write the record, print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120, help="of a training that is timed")
    parser.add_argument("--sound", type=int, default=1000, help="audited steps of a sound run")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="of the run folders")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    asked = parser.parse_args()
    settings: dict[str, Any] = {"shards": SHARDS, "ranks": RANKS, "rounds": asked.rounds}
    settings |= {"steps": asked.steps, "sound": asked.sound}
    record = start_record("audit", settings)
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for turn in range(asked.rounds):
        for model in order_of(list(MODELS), turn):
            for contender in order_of(list(CONTENDERS), turn):
                words = CONTENDERS[contender]
                seconds, _ = train(model, words, RANKS, asked.steps, EVERY, asked.folder)
                pairs.setdefault((model, contender), []).extend(pairs_of(seconds))
    rows = []
    for contender, words in SOUND.items():
        _, summary = train("CNN", words, 3, asked.sound, 1, asked.folder)
        audits = summary["audits"]
        say(f"{contender:>16}: {audits['shards']} shards, {audits['differed']} differed")
        rows.append({"what": "sound run, 3 ranks", "contender": contender, **audits})
        if audits["differed"]:
            raise SystemExit(f"{contender}: a sound run raised an alarm")
    record["rows"] = rows
    record["samples"] = {f"{model}, {name}": each for (model, name), each in pairs.items()}
    finish_record(record, compared(pairs), asked.records)


if __name__ == "__main__":
    main()
