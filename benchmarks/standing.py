"""How long ranks of an elastic job stand still: for one that is killed, for one that joins.

    python benchmarks/standing.py

Four ranks of `--strategy ddp` train an MLP with AdamW. In each of `--kills` turns a rank is killed
with SIGKILL, the first and others, and then `allranks scale` starts a new one in its place:

    next_s   from the moment before the signal to the end of the step that was broken off, made
             again, on the last of the others; a step is a part of it
    held_s   for a join, from the end of the last step before it to that of the first one after
             it, on the rank where this is longest, less a step; of `--joins` joins in a run of
             steps that `--inject slow` makes longer, and whose ranks leave by `scale`, and in one
             over two simulated nodes with a link of 1 Gbit/s

A run of each model over shared memory, and one over Gloo. `step_s` is the median of all steps of
the same run. One process is never killed: `task` and `fd` are its threads and open files after the
last change, `task_at_first` and `fd_at_first` those after the first step. `load_1min` is the load
of the machine at the end of the run, with its own ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import RECORDS, Comparison, finish_record, say, start_record, value_s

from allranks.job.run_folder import read_events

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from launch_host import Host, Launch, until  # noqa: E402

RANKS, BAR_S = 4, 0.5
WIDTHS = {"small MLP": 64, "MLP of 12 M weights": 2000, "MLP of 20 M weights": 2565}
JOINS_OF, SLOW_S = "MLP of 12 M weights", 0.4
LINKED, LINK = "MLP of 20 M weights", "simulated:link=1gbit"
BACKENDS = {"shared memory": "", "Gloo": "gloo"}
NOTHING_FOR_S = 0.3


class Run:
    """One training, and what happens to it."""

    def __init__(
        self,
        host: Host,
        folder: Path,
        model: str,
        backend: str,
        slow_s: float,
        place: str = "",
        batch_size: int = 64,
        more_gb: int = 0,
    ) -> None:
        self.host, self.folder, self.run_dir = host, folder, folder / "run"
        self.notes = folder / "notes"
        self.notes.mkdir()
        words = [
            "train",
            str(HERE / "standing_task.py"),
            "--ranks",
            str(RANKS),
            "--steps",
            "1000000",
        ]
        words += ["--strategy", "ddp", "--elastic", f"1:{RANKS}", "--run-dir", str(self.run_dir)]
        words += ["--set", f"notes={self.notes}", "--set", f"width={WIDTHS[model]}"]
        words += ["--set", f"batch_size={batch_size}", "--set", f"more_gb={more_gb}"]
        words += ["--threads", "1", "--witness", "off", "--hang-timeout", "60"]
        words += ["--backend", backend] if backend else []
        words += ["--inject", f"slow@seconds={slow_s},attempt=-1"] if slow_s else []
        words += ["--nodes", "2", "--place", place] if place else []
        self.launch: Launch = host.launch(folder, *words)
        self.rows: list[dict[str, Any]] = []
        self._parsed: dict[Path, tuple[list[dict[str, Any]], int]] = {}
        self.wait(lambda: len(self.steps()) == RANKS, "the first step")
        self.stays = max(self.steps())

    def wait(self, claim: Callable[[], bool], what: str) -> None:
        """Wait until `claim()` is true; an error has the last events, and what the job wrote."""
        try:
            until(claim, what)
        except AssertionError as error:
            known = {"ranks": sorted(self.launch.ranks), "events": read_events(self.run_dir)[-6:]}
            raise AssertionError(f"{self.launch.err}\n{known}\n{error}") from None

    def steps(self) -> dict[int, list[dict[str, Any]]]:
        """The rows of each rank, by its process."""
        return {int(path.stem): self._rows(path) for path in self.notes.glob("*.jsonl")}

    def groups(self) -> list[dict[str, Any]]:
        """The groups that have made a step."""
        files = self.run_dir.glob("events-*.jsonl")
        groups = [row for path in files for row in self._rows(path) if row["event"] == "group"]
        return sorted(groups, key=lambda row: int(row["number"]))

    def _rows(self, path: Path) -> list[dict[str, Any]]:
        """The rows of a file that grows. Each is parsed once: the ranks need the processors."""
        rows, at = self._parsed.get(path, ([], 0))
        with path.open() as file:
            file.seek(at)
            while (line := file.readline()).endswith("\n"):
                rows.append(json.loads(line))
                at = file.tell()
        self._parsed[path] = rows, at
        return rows

    def kill(self, which: int) -> None:
        """Kill a rank, and note how long the others took."""
        before, alive = len(self.groups()), sorted(self.launch.ranks)
        victim = [pid for pid in alive if pid != self.stays][which % (len(alive) - 1)]
        time.sleep(NOTHING_FOR_S)
        at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        self.wait(lambda: len(self.groups()) > before, "a group after a kill")
        step = self.groups()[-1]["step"]

        def ends() -> list[float]:
            rows = {pid: rows for pid, rows in self.steps().items() if pid in alive}
            return [
                next(
                    row["monotonic"] for row in of if row["step"] == step and row["monotonic"] > at
                )
                for pid, of in rows.items()
                if pid != victim and of[-1]["step"] >= step
            ]

        self.wait(lambda: len(ends()) == len(alive) - 1, "the step of the others")
        self.wait(lambda: not Path(f"/proc/{victim}").exists(), "the end of its process")
        self.rows.append({"what": "kill", "next_s": max(ends()) - at})

    def scale(self, ranks: int) -> None:
        """Let ranks join or leave, and note how long the others stood."""
        before = len(self.groups())
        time.sleep(NOTHING_FOR_S)
        order = self.host.launch(self.folder, "scale", str(self.run_dir), "--ranks", str(ranks))
        self.wait(lambda: order.code is not None, "the answer to the order")
        assert order.wait() == 0, order.err
        self.wait(lambda: len(self.groups()) > before, "a group after the order")
        group = self.groups()[-1]
        step, what = group["step"], "join" if group["joined"] else "leave"
        time.sleep(NOTHING_FOR_S)
        gaps = [0.0]
        for rows in self.steps().values():  # a new rank has no step before
            at = {row["step"]: row["monotonic"] for row in rows}
            if step in at and step - 1 in at:
                gaps.append(at[step] - at[step - 1])
        row = {"what": what, "held_s": max(gaps) - self.step_s()}
        self.rows.append(row | {"is_streamed": group.get("streamed", False)})

    def step_s(self) -> float:
        """The median step so far, of all ranks."""
        pairs = (pair for rows in self.steps().values() for pair in pairwise(rows))
        return statistics.median(b["monotonic"] - a["monotonic"] for a, b in pairs)

    def end(self) -> dict[str, Any]:
        """Stop it; returns how many changes there were, and what the first process has open."""
        rows, open_ = self.steps()[self.stays], {"changes": len(self.groups())}
        for name in ("task", "fd"):
            open_ |= {name: rows[-1][name], f"{name}_at_first": rows[0][name]}
        self.launch.signal(signal.SIGTERM)
        self.launch.wait()
        return open_


def measured(host: Host, model: str, backend: str, options: argparse.Namespace) -> dict[str, Any]:
    """The kills of a model, and joins after each."""
    with tempfile.TemporaryDirectory(prefix="benchmark-standing-") as name:
        more = {"batch_size": options.batch_size, "more_gb": options.more_gb}
        run = Run(host, Path(name), model, BACKENDS[backend], 0.0, **more)
        for turn in range(options.kills):
            run.kill(turn)
            run.scale(RANKS)
        return _row(run, f"{model}, {backend}")


def joined(host: Host, backend: str, options: argparse.Namespace, place: str) -> dict[str, Any]:
    """The joins of a model whose steps are long, or of one at a `place` with a slow link."""
    model, slow_s, where = (LINKED, 0.0, LINK) if place else (JOINS_OF, SLOW_S, "longer steps")
    with tempfile.TemporaryDirectory(prefix="benchmark-standing-") as name:
        run = Run(host, Path(name), model, BACKENDS[backend], slow_s, place)
        for _ in range(options.joins):
            run.scale(RANKS - 1)
            run.scale(RANKS)
        return _row(run, f"{model}, {where}, {backend}")


def _row(run: Run, what: str) -> dict[str, Any]:
    step_s, load = run.step_s(), os.getloadavg()[0]
    row = {"what": what, "step_s": step_s, "load_1min": load, "samples": run.rows, **run.end()}
    for name, key in (("kill", "next_s"), ("join", "held_s"), ("leave", "held_s")):
        if values := [each[key] for each in run.rows if each["what"] == name]:
            row |= {f"{name}_median_s": statistics.median(values), f"{name}_most_s": max(values)}
    say(
        "  ".join(f"{k} {v:.3f}" for k, v in row.items() if isinstance(v, float | int))
        + f"  {what}"
    )
    return row


def comparisons(rows: list[dict[str, Any]]) -> list[Comparison]:
    """The kills beside half a second, and the joins of other runs beside a step."""
    found = []
    for row in rows:
        kills = [each["next_s"] for each in row["samples"] if each["what"] == "kill"]
        if kills:
            found.append(value_s(row["what"], "next_s", "allranks", kills, BAR_S))
            continue
        joins = [each["held_s"] for each in row["samples"] if each["what"] == "join"]
        found.append(value_s(row["what"], "held_s", "allranks", joins, row["step_s"]))
    return found


def main() -> None:
    """Measure, write the record, print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="of each model and backend")
    parser.add_argument("--joins", type=int, default=10, help="of long steps, for each backend")
    parser.add_argument("--batch-size", type=int, default=64, help="larger: longer steps, of kills")
    parser.add_argument("--more-gb", type=int, default=0, help="that each rank holds, of kills")
    parser.add_argument("--models", nargs="+", default=["small MLP", "MLP of 20 M weights"])
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    options = parser.parse_args()
    settings = {name: value for name, value in vars(options).items() if name != "records"}
    record = start_record("standing", {**settings, "ranks": RANKS, "slow_s": SLOW_S})
    host, rows = Host(), []
    for backend in options.backends:
        for model in options.models if options.kills else ():
            rows.append(measured(host, model, backend, options))
        if options.joins:
            rows.append(joined(host, backend, options, ""))
    if options.joins and "Gloo" in options.backends:
        rows.append(joined(host, "Gloo", options, LINK))
    host.close()
    record["samples"] = {row["what"]: row.pop("samples") for row in [dict(r) for r in rows]}
    record["rows"] = [{n: v for n, v in row.items() if n != "samples"} for row in rows]
    finish_record(record, comparisons(rows), options.records)


if __name__ == "__main__":
    main()
