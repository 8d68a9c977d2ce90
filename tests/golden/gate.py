"""Does a change of the code leave what comes out of it as it was?

    python tests/golden/gate.py FOLDER --record     before the change
    python tests/golden/gate.py FOLDER              after it: the same once more, and what differs

Compared are, of each job, the digest of its weights and the names of its events, or the error that
refuses it; the digest after a checkpoint that was recorded is taken up; the help of each verb; and
what `train --dry-run --json` says of each strategy. A job is a strategy of
tests/test_every_strategy.py on 1, 2, 3 or 8 ranks, a task, and a precision (fp32, bf16, or
--bitwise).

Digests follow the processor and the versions of libraries, so a folder belongs to one machine and
is committed nowhere: record it at the commit before the change (`git worktree add`). What a change
means to alter shows here too, and its commit says so.

`--strategies fsdp,zero1` takes these alone, `--sample N` so many jobs, always the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

TESTS = Path(__file__).resolve().parents[1]
ROOMS = [str(TESTS), str(TESTS / "tasks")]
sys.path[:0] = ROOMS
os.environ["PYTHONPATH"] = os.pathsep.join([*ROOMS, *filter(None, [os.getenv("PYTHONPATH")])])

from allranks.catalog import VERBS  # noqa: E402
from allranks.cli.main import cli  # noqa: E402
from allranks.errors import AllranksError  # noqa: E402
from allranks.job.config import resolve  # noqa: E402
from allranks.job.engines import preload_for  # noqa: E402
from allranks.job.run_folder import read_events  # noqa: E402
from allranks.launcher.processes.fork_server_client import ForkServer  # noqa: E402
from allranks.launcher.start import run_job  # noqa: E402
from test_every_strategy import SETTINGS, is_staged, matters  # noqa: E402

RANKS = (1, 2, 3, 8)
TASKS = ("Images", "Words", "Pairs", "Uneven", "Experts", "Sentences", "Mixture")
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "bitwise": {"bitwise": True},
}
STEPS, SAVED_AT = 4, 2
ON_THE_CLOCK = ("decoupled", "ps:backup=1")
"""Strategies whose sums follow which rank is first."""
OF_THE_MACHINE = {"straggler", "slow_start", "gauges"}
"""Events that follow the load of the machine."""

Job = tuple[str, int, str, str]
"""Strategy with options, ranks, task and precision."""


def jobs(names: set[str], sample: int) -> list[Job]:
    settings = [s for name, some in SETTINGS.items() if not names or name in names for s in some]
    found = [
        (strategy, ranks, task, precision)
        for strategy, ranks, task, precision in itertools.product(
            settings, RANKS, TASKS, PRECISIONS
        )
        if matters(strategy, ranks, task) and not strategy.startswith(ON_THE_CLOCK)
    ]
    return random.Random(0).sample(found, sample) if 0 < sample < len(found) else found


def outcome(server: ForkServer, job: Job, run_dir: Path, resume: Path | None = None) -> str:
    """The digest of the weights and the names of events, or the error that ended the job."""
    strategy, ranks, task, precision = job
    module = "pipeline_tasks" if is_staged(strategy) else "contract_tasks"
    flags = {
        "strategy": strategy,
        "ranks": ranks,
        "steps": STEPS,
        "checkpoint_every": SAVED_AT,
        "threads": 1,
        "first_check": "off",
        "run_dir": str(run_dir),
        **({} if resume is None else {"resume": str(resume)}),
        **PRECISIONS[precision],
    }
    try:
        summary = run_job(resolve(f"{module}:{task}", flags, ()), server).summary
    except AllranksError as error:
        return f"exit {error.exit_code}: {error}".replace(str(run_dir), "RUN")
    events = {event["event"] for event in read_events(run_dir)} - OF_THE_MACHINE
    return f"{summary['weights_sha256']} {' '.join(sorted(events))}"


def helps() -> Iterator[tuple[str, str]]:
    """What each verb, and each command below it, prints as its help."""
    runner = CliRunner()
    for verb in VERBS:
        command = cli.get_command(None, verb)  # type: ignore[arg-type]
        for below in ("", *getattr(command, "commands", ())):
            words = [verb, *filter(None, [below]), "--help"]
            yield f"allranks {' '.join(words)}", runner.invoke(cli, words).output


def dry_runs(names: set[str]) -> Iterator[tuple[str, str]]:
    """What is planned for each strategy on two ranks."""
    for name, settings in SETTINGS.items():
        if not names or name in names:
            words = ["train", "digits", "--strategy", settings[0], "--ranks", "2"]
            words += ["--run-dir", "RUN", "--dry-run", "--json"]
            done = CliRunner().invoke(cli, words)
            said = f"{done.output}{done.exception or ''}".replace(os.getcwd(), "HERE")
            yield f"allranks {' '.join(words)}", said


def outcomes(
    names: set[str], sample: int, checkpoints: Path, is_recorded: bool
) -> Iterator[tuple[str, str]]:
    """Every name and outcome; checkpoints are kept, or taken up."""
    yield from helps()
    yield from dry_runs(names)
    with ForkServer(preload_for("contract_tasks:Images", "torch")) as server:
        for job in jobs(names, sample):
            name = " ".join(map(str, job))
            with tempfile.TemporaryDirectory() as folder:
                run_dir = Path(folder, "run")
                yield name, outcome(server, job, run_dir)
                if job[3] != "fp32" or job[1] != 2:
                    continue
                saved = next(run_dir.glob(f"checkpoints/step-*{SAVED_AT}"), None)
                kept = checkpoints / name.replace(" ", "-")
                if saved is not None and not is_recorded:
                    shutil.copytree(saved, kept, dirs_exist_ok=True)
                if kept.exists():
                    yield f"{name}, resumed", outcome(server, job, Path(folder, "resumed"), kept)


def machine() -> dict[str, str]:
    """What digests follow."""
    return {
        "processor": torch.backends.cpu.get_cpu_capability(),
        "architecture": platform.machine(),
        "torch": torch.__version__,
    }


def main() -> None:
    """Exit code 1 if anything has another outcome, 2 if the folder is of another machine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="what was recorded")
    parser.add_argument("--record", action="store_true", help="record it")
    parser.add_argument("--strategies", default="", help="names, with commas between")
    parser.add_argument("--sample", type=int, default=0, help="so many jobs; all where it is 0")
    given = parser.parse_args()
    record, checkpoints = given.folder / "outcomes.json", given.folder / "checkpoints"
    before: dict[str, Any] = {"machine": machine(), "outcomes": {}}
    if given.record:
        given.folder.mkdir(parents=True)
    else:
        before = json.loads(record.read_bytes())
        if before["machine"] != machine():
            parser.error(f"{record} is of {before['machine']}, and this is {machine()}")
    names = {name for name in given.strategies.split(",") if name}
    count = others = 0
    for name, now in outcomes(names, given.sample, checkpoints, not given.record):
        count += 1
        was = before["outcomes"].setdefault(name, now if given.record else "not recorded")
        if was != now:
            others += 1
            print(f"{name}\n    was {was}\n    is  {now}", flush=True)
    if given.record:
        record.write_text(json.dumps(before, indent=1))
    print(f"{count} outcomes, {others} differ")
    sys.exit(1 if others else 0)


if __name__ == "__main__":
    main()
