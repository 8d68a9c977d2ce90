"""Random schedules of ranks that leave, join, die and stall: each ends with one digest.

    python benchmarks/elastic.py --schedules 1000

Each schedule draws how many ranks a job begins with, their strategy, how the shards are dealt,
whether ranks of `zero1`, `zero2`, `fsdp` and `hsdp` have copies of parts (`--spare-state`), and
what happens to it while it trains: a rank is killed, two are, `allranks scale` asks for another
number, a rank is stopped for a while. The task has BatchNorm and dropout. With `--bitwise` the
digest of the weights at the end must be that of one undisturbed process; without it (every
`--plain-every`-th schedule, in float64) every weight must agree to 1e-10. `--first` is the number
of the first schedule: one number always draws the same schedule, though the moments depend on
the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import RECORDS, finish_record, median_interval, say, start_record
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from launch_host import Host, Launch, until  # noqa: E402

TASK, STEPS, MOST = "contract_tasks:Images", 60, 6
STEP_S = 0.02
TOLERANCE = 1e-10
HSDP = "hsdp:shard=2"
OF_PARTS = ("zero1", "zero2", "fsdp", HSDP)
EXACT = ("ddp", "ddp", "zero1", "zero2", "fsdp", HSDP)
KILL, KILL_TWO, SCALE, STALL = "kill", "kill two", "scale", "stall"


@dataclass(frozen=True)
class Act:
    """What happens `after_s` the last one: to `number` ranks, or the number that `scale` asks."""

    what: str
    after_s: float
    number: int
    chance: float


@dataclass(frozen=True)
class Schedule:
    """A job of `ranks` ranks, with `share`, and what happens to it."""

    seed: int
    ranks: int
    share: str
    strategy: str
    is_plain: bool
    acts: tuple[Act, ...]
    is_spared: bool = False


def drawn(seed: int, plain_every: int) -> Schedule:
    """The schedule of this number."""
    chance = random.Random(seed)
    acts = []
    for _ in range(chance.randint(1, 5)):
        kind = chance.choices((KILL, KILL_TWO, SCALE, STALL), (4, 1, 4, 2))[0]
        acts.append(Act(kind, chance.uniform(0.0, 0.6), chance.randint(1, MOST), chance.random()))
    of_plain = (*EXACT, "ddp-plain")
    is_plain = plain_every > 0 and seed % plain_every == plain_every - 1
    ranks, share = chance.randint(1, MOST), chance.choice(("", "", "auto"))
    strategy = chance.choice(of_plain if is_plain else EXACT)
    ranks += ranks % 2 if strategy == HSDP else 0
    is_spared = strategy in OF_PARTS and ranks > 1 and chance.random() < 0.5
    return Schedule(seed, ranks, share, strategy, is_plain, tuple(acts), is_spared)


def words_of(schedule: Schedule, *, alone: bool = False) -> list[str]:
    """The command line of the job; `alone` is one process that nothing happens to."""
    words = ["train", TASK, "--json", "--steps", str(STEPS), "--set", "batch_size=24"]
    words += ["--precision", "fp64"] if schedule.is_plain else ["--bitwise"]
    if alone:
        return [*words, "--strategy", "single", "--ranks", "1"]
    words += ["--strategy", schedule.strategy, "--ranks", str(schedule.ranks)]
    words += ["--elastic", f"1:{MOST}", "--checkpoint-every", "10", "--max-restarts", "20"]
    words += ["--inject", f"slow@seconds={STEP_S},attempt=-1", "--hang-timeout", "60"]
    words += ["--spare-state"] if schedule.is_spared else []
    return [*words, *(["--share", schedule.share] if schedule.share else [])]


class Schedules:
    """Runs schedules on hosts, two at a time, and compares how each ends."""

    def __init__(self, folder: Path, failed: Path) -> None:
        self.folder, self.failed = folder, failed
        self.wanted: dict[bool, Any] = {}

    def prepare(self, host: Host) -> None:
        """What one undisturbed process ends with, bit by bit and in float64."""
        for is_plain in (False, True):
            schedule = Schedule(0, 1, "", "ddp", is_plain, ())
            place = self.folder / f"alone-{is_plain}"
            place.mkdir()
            run = place / "run"
            launch = host.launch(place, *words_of(schedule, alone=True), "--run-dir", run)
            assert launch.wait() == 0, launch.err
            digest = launch.summary()["weights_sha256"]
            self.wanted[is_plain] = load_file(run / "weights.safetensors") if is_plain else digest

    def run(self, host: Host, schedule: Schedule) -> dict[str, Any]:
        """Make what is drawn happen; returns what came of it."""
        place = self.folder / f"{schedule.seed}"
        place.mkdir()
        begun = time.monotonic()
        launch = host.launch(place, *words_of(schedule), "--run-dir", place / "run")
        until(lambda: launch.code is not None or trains(place), "the first step")
        done = [act.what for act in schedule.acts if self.do(host, launch, place, act)]
        row: dict[str, Any] = {"seed": schedule.seed, "acts": done, "code": launch.wait()}
        row["why"] = self.difference(launch, place, schedule) if row["code"] == 0 else launch.err
        row["seconds"] = time.monotonic() - begun
        if row["code"] == 0:
            summary = launch.summary()
            row |= {n: summary.get(n) for n in ("restarts", "groups", "steps_again", "world_size")}
            kills = sum({KILL: 1, KILL_TWO: 2}.get(act, 0) for act in done)
            if not row["why"] and summary["restarts"] > kills:
                row["why"] = f"{summary['restarts']} restarts after {kills} kills"
        if row["why"]:
            shutil.copytree(place, self.failed / place.name, dirs_exist_ok=True)
        shutil.rmtree(place)
        return row

    def do(self, host: Host, launch: Launch, place: Path, act: Act) -> bool:
        """Do one act; returns whether there was still somebody to do it to."""
        time.sleep(act.after_s)
        if launch.code is not None:
            return False
        if act.what == SCALE:
            words = ("scale", str(place / "run"), "--ranks", str(act.number))
            return host.launch(place, *words).wait() == 0
        ranks = launch.ranks
        if not ranks:
            return False
        count = 2 if act.what == KILL_TWO else 1
        first = int(act.chance * len(ranks))
        victims = [ranks[(first + i) % len(ranks)] for i in range(min(count, len(ranks)))]
        for pid in victims:
            strike(pid, signal.SIGSTOP if act.what == STALL else signal.SIGKILL)
        if act.what == STALL:
            time.sleep(0.2)
            for pid in victims:
                strike(pid, signal.SIGCONT)
        return True

    def difference(self, launch: Launch, place: Path, schedule: Schedule) -> str:
        """How the weights differ from those of one process; "" if they do not."""
        wanted = self.wanted[schedule.is_plain]
        if not schedule.is_plain:
            got = launch.summary()["weights_sha256"]
            return "" if got == wanted else f"digest {got}, and of one process {wanted}"
        weights = load_file(place / "run" / "weights.safetensors")
        worst = max(
            float((weights[n] - t).abs().max() / t.abs().max().clamp(min=1))
            for n, t in wanted.items()
        )
        return "" if worst <= TOLERANCE else f"weights differ by {worst:.2g}"


def trains(place: Path) -> bool:
    """Whether a step of this run is in its metrics, or it has none because it is over."""
    path = place / "run" / "metrics.jsonl"
    return path.is_file() and path.stat().st_size > 0


def strike(pid: int, number: int) -> None:
    """Send a signal to a rank that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def main() -> None:
    """Exit code 1 if any schedule ends otherwise than one process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--plain-every", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--spared", action="store_true", help="only those with --spare-state")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after that")
    parser.add_argument(
        "--failed", type=Path, default=Path(tempfile.gettempdir(), "elastic-failed")
    )
    parser.add_argument("--no-record", dest="record", action="store_false", help="leave none here")
    options = parser.parse_args()
    names = ("schedules", "first", "plain_every", "at_once", "spared")
    record = start_record("elastic", {name: getattr(options, name) for name in names})
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT / "tests" / "tasks"), os.getenv("PYTHONPATH")))
    )
    numbers = range(options.first, options.first + options.schedules)
    until_s = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        schedules = Schedules(Path(folder), options.failed)
        hosts = [Host() for _ in range(options.at_once)]
        schedules.prepare(hosts[0])

        def work(which: int) -> list[dict[str, Any]]:
            rows = []
            for seed in numbers[which :: options.at_once]:
                if time.monotonic() > until_s:
                    break
                schedule = drawn(seed, options.plain_every)
                if options.spared and not schedule.is_spared:
                    continue
                rows.append({**asdict(schedule), **schedules.run(hosts[which], schedule)})
                if rows[-1]["why"]:
                    say(f"schedule {seed}: {rows[-1]['acts']} {rows[-1]['why'][-2000:]}")
                elif len(rows) % 10 == 0:
                    say(f"{len(rows)} schedules of host {which}")
            return rows

        with ThreadPoolExecutor(options.at_once) as threads:
            rows = [row for each in threads.map(work, range(options.at_once)) for row in each]
        for host in hosts:
            host.close()
    wrong = [row for row in rows if row["why"]]
    acts = Counter(act for row in rows for act in row["acts"])
    seconds = median_interval([row["seconds"] for row in rows])
    record |= {"schedules": len(rows), "failed": len(wrong), "acts": dict(acts)}
    record |= {"restarts": sum(row.get("restarts") or 0 for row in rows)}
    record |= {"median_s": seconds.median, "samples": rows}
    record["rows"] = [
        {"what": "schedules", "number": len(rows)},
        {"what": "of them that ended otherwise than one process", "number": len(wrong)},
        *({"what": name, "number": count} for name, count in sorted(acts.items())),
    ]
    finish_record(record, [], RECORDS if options.record else Path(tempfile.mkdtemp()))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
