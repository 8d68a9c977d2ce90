"""The first check of a job: does it stop what is silently wrong, let pass what is right, and cost?

    python benchmarks/first_check.py --silent
    python benchmarks/first_check.py --sound 200
    python benchmarks/first_check.py --cost

`--silent` trains the tasks of tests/tasks/silent_tasks.py that follow the ranks, each under
strategies that cut the model. Counted is what came of each: stopped before the first update (exit
code 5, or refused), named by the witness and not proved, or proved; of those that were proved the
weights after some steps are compared with one process, and one that differs was missed. `--sound`
draws correct combinations as fuzz.py does, and counts those that are stopped. `--cost` times the
start of `allranks train` with a check, with one that has passed before, and with none.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness import RECORDS, difference_us, finish_record, order_of, say, start_record
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[1]
ROOMS = [str(ROOT / "tests" / "tasks"), str(Path(__file__).resolve().parent / "fuzzing")]
sys.path[:0] = ROOMS

from draw import drawn  # noqa: E402
from hold import PROGRAM, is_sound  # noqa: E402

from allranks.errors import AllranksError, NotEqual, RequestError  # noqa: E402
from allranks.job.config import resolve  # noqa: E402
from allranks.job.engines import preload_for  # noqa: E402
from allranks.launcher.describe import WHOLE_MODEL, first_check  # noqa: E402
from allranks.launcher.processes.fork_server_client import ForkServer  # noqa: E402
from allranks.launcher.start import Result, run_job  # noqa: E402
from test_silent import RIGHT, TASKS, difference  # noqa: E402

STRATEGIES = ("zero1", "zero2", "fsdp", "tensor")
STEPS = 8
EQUAL = 1e-10
STOPPED, REFUSED, NAMED, PROVED, MISSED, BROKEN = (
    *("exit 5", "refused", "not proved", "proved and equal"),
    *("MISSED", "broken"),
)
TASKS_TIMED = {
    "digits": ["digits", "--steps", "20"],
    "text": ["text", "--set", "path=text.txt", "--steps", "20"],
    "GPT of 25 M weights": [
        *("text", "--set", "path=text.txt", "--set", "width=512", "--set", "layers=8"),
        *("--set", "heads=8", "--set", "batch_size=8", "--steps", "4"),
    ],
}


def main() -> None:
    """Exit code 1 if a silent task was missed or a sound one stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--silent", action="store_true", help="tasks that follow the ranks")
    parser.add_argument("--sound", type=int, default=0, help="so many correct combinations")
    parser.add_argument("--cost", action="store_true", help="what it costs")
    parser.add_argument("--rounds", type=int, default=5, help="of --cost")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after that")
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([*ROOMS, *filter(None, [os.getenv("PYTHONPATH")])])
    record = start_record("first_check", vars(given) | {"seconds": str(given.seconds)})
    comparisons, good = [], True
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        if given.silent or given.sound:
            with ForkServer(preload_for(PROGRAM, "torch")) as server:
                if given.silent:
                    record["silent"] = silent(server, given.seconds)
                    good &= not record["silent"]["counts"].get(MISSED)
                if given.sound:
                    record["sound"] = sound(server, given)
                    good &= not record["sound"]["counts"].get(STOPPED)
        if given.cost:
            samples = timed(given.rounds)
            record["samples"] = samples
            for name, rows in samples.items():
                for of in ("checked", "passed before"):
                    pairs = [(row[of], row["off"]) for row in rows]
                    comparisons.append(difference_us(name, "start to end", of, "off", pairs, None))
    finish_record(record, comparisons, RECORDS)
    sys.exit(0 if good else 1)


def trained(server: ForkServer, folder: str, program: str, **flags: Any) -> Result:
    """The result of a job that makes its first check, but for `single`."""
    settings = flags.pop("settings", ())
    resolved = resolve(program, {"run_dir": f"{folder}/run", **flags}, settings)
    return run_job(resolved, server, first_check=first_check)


def silent(server: ForkServer, seconds: float) -> dict[str, Any]:
    """What became of each silent task under each strategy."""
    rows: list[dict[str, Any]] = []
    until = time.monotonic() + seconds
    for name in (name for name in TASKS if name not in RIGHT):
        for strategy in STRATEGIES:
            if time.monotonic() < until:
                what, why = outcome(server, f"silent_tasks:{name}", strategy)
                rows.append({"task": name, "strategy": strategy, "what": what, "why": why})
                say(f"{what:<17} {name} under {strategy}: {why}")
    return {"counts": dict(Counter(row["what"] for row in rows)), "rows": rows}


def outcome(server: ForkServer, program: str, strategy: str) -> tuple[str, str]:
    """What came of one task, and why."""
    flags = {"precision": "fp64", "threads": 1, "steps": STEPS}
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as many:
        try:
            result = trained(server, many, program, ranks=2, strategy=strategy, **flags)
        except NotEqual as error:
            return STOPPED, str(error).splitlines()[1]
        except RequestError as error:
            return REFUSED, error.found
        except AllranksError as error:
            return BROKEN, str(error).splitlines()[0]
        proof = result.summary["proof"]
        alone = trained(server, one, program, **flags)
        size = difference(weights(alone), weights(result))
        apart = f"{size:.1e} after {STEPS} steps"
        if not proof["proved"]:
            return NAMED, f"{apart}: {proof['why']}"
        return (MISSED if size > EQUAL else PROVED), apart


def weights(result: Result) -> dict[str, Any]:
    """The weights that a job has written."""
    return load_file(result.run_dir / "weights.safetensors")


def sound(server: ForkServer, given: argparse.Namespace) -> dict[str, Any]:
    """What the first check says of correct combinations under strategies that cut the model."""
    counts: Counter[str] = Counter()
    wrong, number = [], 0
    until = time.monotonic() + given.seconds
    while counts[PROVED] + counts[STOPPED] < given.sound and time.monotonic() < until:
        one = drawn(given.seed, number)
        number += 1
        leg = one.legs[0]
        if leg.strategy.partition(":")[0] in WHOLE_MODEL or not is_sound(one):
            continue
        flags = {"threads": 1, **one.flags, "strategy": leg.strategy, "ranks": leg.ranks}
        settings = tuple(f"{name}={value}" for name, value in one.settings.items())
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = trained(server, folder, PROGRAM, **flags, steps=3, settings=settings)
                proof = result.summary["proof"]
                what, why = (PROVED if proof["proved"] else NAMED), proof["why"]
            except NotEqual as error:
                what, why = STOPPED, str(error)
            except RequestError as error:
                what, why = REFUSED, error.why
            except AllranksError as error:
                what, why = BROKEN, str(error)
        counts[what] += 1
        if what not in (PROVED, REFUSED):
            say(f"{number}: {what}: {one}: {why}")
            wrong.append({"combination": str(one), "what": what, "why": why})
        if number % 20 == 0:
            say(f"{number}: {dict(counts)}")
    return {"counts": dict(counts), "not_proved": wrong}


def timed(rounds: int) -> dict[str, list[dict[str, float]]]:
    """Seconds of a whole command, by task and contender, in rounds."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.txt").write_bytes(bytes(range(32, 127)) * 4000)
        found: dict[str, list[dict[str, float]]] = {}
        for name, words in TASKS_TIMED.items():
            found[name] = []
            for turn in range(rounds):
                row: dict[str, float] = {}
                for contender in order_of(["checked", "passed before", "off"], turn):
                    row[contender] = seconds_of(words, contender, folder)
                found[name].append(row)
                say(f"{name}: {row}")
        return found


def seconds_of(words: list[str], contender: str, folder: str) -> float:
    """Seconds of one command; what is to have passed before is made to pass, untimed."""
    command = [sys.executable, "-m", "allranks.cli.main", "train", *words]
    command += ["--ranks", "2", "--strategy", "zero2", "--json"]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        if contender == "off":
            command += ["--first-check", "off"]
        if contender == "passed before":
            subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        begun = time.monotonic()
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        return time.monotonic() - begun


if __name__ == "__main__":
    main()
