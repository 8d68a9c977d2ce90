"""Random combinations, each held against one process.

    python benchmarks/fuzz.py --combinations 1000 --seed 0

Model, strategy, options, ranks, optimizer, uneven batches, micro-batches, and a checkpoint that
another strategy takes up on other ranks are drawn (`fuzzing/draw.py`); the weights after six steps
are compared with those of `single`. A clear refusal is an answer: those are counted by their
reason. What differs or breaks is made smaller, and `--scripts FOLDER` gets a script that shows it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from harness import RECORDS, finish_record, say, start_record

ROOM = Path(__file__).resolve().parent / "fuzzing"
sys.path.insert(0, str(ROOM))

from draw import Combination, drawn  # noqa: E402
from hold import (  # noqa: E402
    EQUAL,
    PROGRAM,
    REFUSED,
    ROUNDED,
    TOLD,
    Holder,
    Verdict,
    script_of,
    shrunk,
)
from team import Teams  # noqa: E402

from allranks.job.engines import preload_for  # noqa: E402
from allranks.launcher.processes.fork_server_client import ForkServer  # noqa: E402


def main() -> None:
    """Exit code 1 if anything differs or breaks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--combinations", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after that")
    parser.add_argument(
        "--command-every", type=int, default=25, help="by the command, each of so many"
    )
    parser.add_argument("--scripts", type=Path, help="a folder for scripts that show what fails")
    parser.add_argument("--no-record", dest="record", action="store_false", help="leave none here")
    given = parser.parse_args()
    said = {
        name: value
        for name, value in vars(given).items()
        if name not in ("scripts", "seconds", "record")
    }
    record = start_record("fuzz", said)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOM), os.getenv("PYTHONPATH"))))
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()  # what passes a first check is no user's
    with ForkServer((*preload_for(PROGRAM, "torch"), "member")) as server, Teams(server) as teams:
        holder = Holder(server, teams, command_every=given.command_every)
        record |= Fuzz(given, server, holder).run()
    finish_record(record, [], RECORDS if given.record else Path(tempfile.mkdtemp()))
    sys.exit(1 if record["failed"] else 0)


class Fuzz:
    """What became of all of them, so far."""

    def __init__(self, given: argparse.Namespace, server: ForkServer, holder: Holder) -> None:
        self.given, self.server, self.holder = given, server, holder
        self.verdicts, self.refusals = Counter[str](), Counter[str]()
        self.equal_by, self.refused_by = defaultdict(Counter[str]), Counter[str]()
        self.told = defaultdict[str, Counter[str]](Counter[str])
        self.failed: list[dict[str, Any]] = []
        self.rounded: dict[str, float] = {}
        self.largest, self.began = defaultdict[str, float](float), time.monotonic()

    def run(self) -> dict[str, Any]:
        """One after the other, until there are as many as asked, or no time is left."""
        given = self.given
        for number in range(given.first, given.first + given.combinations):
            if time.monotonic() - self.began > given.seconds:
                break
            one = drawn(given.seed, number)
            verdict = self.holder.held(one, number)
            self.verdicts[verdict.what] += 1
            self._count(one, verdict)
            if verdict.fails:
                self._show(number, one, verdict)
            if (done := sum(self.verdicts.values())) % 100 == 0:
                each = (time.monotonic() - self.began) / done
                say(f"{done}: {dict(self.verdicts)}, {each:.3f} s each")
        return self._found()

    def _count(self, one: Combination, verdict: Verdict) -> None:
        names = sorted({leg.strategy.partition(":")[0] for leg in one.legs})
        if verdict.what == REFUSED:
            self.refusals[verdict.why] += 1
            self.refused_by.update(names)
        elif verdict.what == TOLD:
            self.told[one.settings["trait"]][verdict.why[:200]] += 1
        elif verdict.what == ROUNDED:
            self.rounded[str(one)] = verdict.difference
        elif verdict.what == EQUAL:
            precision = one.flags.get("precision", "fp64")
            self.largest[precision] = max(self.largest[precision], verdict.difference)
            self.equal_by["strategy"].update(names)
            self.equal_by["model"][one.settings.get("kind", "layers")] += 1
            self.equal_by["optimizer"][one.settings.get("by", "sgd")] += 1
            self.equal_by["trait"][one.settings.get("trait", "none")] += 1
            self.equal_by["ranks"].update({str(leg.ranks) for leg in one.legs})
            self.equal_by["setting"].update(one.settings.keys() | one.flags.keys())
            self.equal_by["legs"][str(len(one.legs))] += 1
            self.equal_by["bits in" if "bitwise" in one.flags else "numbers in"][precision] += 1

    def _show(self, number: int, one: Combination, verdict: Verdict) -> None:
        """Say what fails, make it smaller, and write a script of that."""
        say(f"{number}: {verdict.what}: {one}: {verdict.why} {verdict.difference:.3g}")
        least, found = shrunk(one, verdict, self.server)
        say(f"    {least}: {found.why} {found.difference:.3g}")
        self.failed.append({"number": number, "combination": str(least), "why": found.why})
        if self.given.scripts is not None:
            self.given.scripts.mkdir(parents=True, exist_ok=True)
            script = self.given.scripts / f"fuzz_{self.given.seed}_{number}.py"
            script.write_text(script_of(least, found))

    def _found(self) -> dict[str, Any]:
        return {
            "verdicts": dict(self.verdicts),
            "equal_by": {what: dict(by.most_common()) for what, by in self.equal_by.items()},
            "refused_by_strategy": dict(self.refused_by.most_common()),
            "refusals": dict(self.refusals.most_common()),
            "told": {trait: dict(by) for trait, by in self.told.items()},
            "by_the_command": self.holder.commanded,
            "warm_ranks_alone_say_so": self.holder.disagreements,
            "largest_difference": dict(self.largest),
            "rounded": self.rounded,
            "seconds": round(time.monotonic() - self.began, 1),
            "failed": self.failed,
        }


if __name__ == "__main__":
    main()
