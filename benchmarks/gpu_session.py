"""What only a GPU can tell of allranks, in one call of at most ten minutes.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_session.py --out FOLDER
    PYTHONPATH=src:benchmarks python benchmarks/gpu_session.py --device cpu --small --out FOLDER

The checks (`gpu_checks.py`, `gpu_one_rank.py`) run one after the other, the most important first,
each in a process of its own with a limit, until the time is over. Each is a line of
`FOLDER/results.jsonl` when it ends; a second call goes on with those that have none. At the end
there is a record (`gpu-session-DATE`), and a page with what was expected of each beside what was
seen. Without a GPU `--device cpu` runs all that is not about one. Needs nothing but a checkout and
what allranks imports; what this torch lacks stands in the first row.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from gpu_checks import CHECKS, Check, Seen, Setting, missing
from harness import finish_record, say, start_record

try:
    import gpu_one_rank  # noqa: F401  its checks are in CHECKS then
except ImportError as error:
    sys.exit(f"not here: {error}; missing: {', '.join(missing()) or 'nothing else'}")

RESULTS, PAGE, LOG = "results.jsonl", "gpu-session.md", "log.txt"
FIRST = (
    "machine",
    "trained_by_the_launcher",
    "bitwise_on_1_2_and_4_ranks",
    "waits_and_launches_of_a_step",
    "nccl_of_one_rank",
    "one_and_several_ranks",
    "beside_tuned_loops",
    "killed_and_gone_on",
    "out_of_memory",
    "as_on_the_cpu",
    "tests_of_gpus",
)
SLOWER_ON_A_CPU = 4  # than the limits of the checks say, which are those of a machine with a GPU
SHORTEST_S = 15.0  # with less time left no check is begun
SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}
WORDS = {True: "yes", False: "**no**", None: "cannot tell here"}


def in_order() -> list[str]:
    """The names of all checks, the most important first."""
    return [*FIRST, *(name for name in CHECKS if name not in FIRST)]


def run_one(check: Check, setting: Setting, out: Path) -> None:
    """In a process of its own: the check, and its line."""
    begun = time.monotonic()
    try:
        seen = check.act(setting)
    except Exception:
        seen = Seen(False, {"raised": traceback.format_exc()[-1500:]})
    _add_row(out, check, setting, seen, time.monotonic() - begun)


def _add_row(out: Path, check: Check, setting: Setting, seen: Seen, seconds: float) -> None:
    row = {
        "check": check.name,
        "device": setting.device,
        "small": setting.small,
        "good": seen.good,
        "expected": check.expected,
        "found": seen.found,
        "seconds": round(seconds, 1),
    }
    with (out / RESULTS).open("a") as file:
        file.write(json.dumps(row, default=str) + "\n")


def rows_of(out: Path, setting: Setting) -> dict[str, dict[str, Any]]:
    """The checks that have been made in this folder, by name; the last of each."""
    path = out / RESULTS
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = [json.loads(line) for line in lines]
    here = (setting.device, setting.small)
    return {row["check"]: row for row in rows if (row["device"], row["small"]) == here}


def run_all(names: list[str], setting: Setting, out: Path, seconds: float) -> None:
    """Each check in its process; one that hangs or crashes is a row as well."""
    end, slower = time.monotonic() + seconds, 1 if setting.on_gpu else SLOWER_ON_A_CPU
    for name in names:
        check, left = CHECKS[name], end - time.monotonic()
        if left < SHORTEST_S:
            say(f"{name}: left out, no time")
            continue
        flags = ["--one", name, "--out", str(out), "--device", setting.device]
        command = [sys.executable, __file__, *flags, *(["--small"] if setting.small else [])]
        begun, limit = time.monotonic(), min(needs := check.limit_s * slower, left)
        with (out / LOG).open("a") as log:
            log.write(f"===== {name}\n")
            log.flush()
            code = run_whole(command, log, limit)
        if code is None and limit < needs:  # that says nothing of it: the next call begins with it
            say(f"{name}: cut off after {limit:.0f} s, no time")
            continue
        ended = f"ran past {limit:.0f} s" if code is None else f"exit {code}: see {LOG}"
        taken = time.monotonic() - begun
        if name not in rows_of(out, setting):
            _add_row(out, check, setting, Seen(False, {"no answer": ended}), taken)
        row = rows_of(out, setting)[name]
        say(f"{WORDS[row['good']]:>16}  {name}  {taken:.0f} s  {_short(row['found'])}")


def run_whole(command: list[str], log: IO[str], limit: float) -> int | None:
    """The exit code, or `None` past the limit; its process group ends with the call."""
    environment = {**SETTINGS, **os.environ}
    process = subprocess.Popen(
        command, stdout=log, stderr=log, env=environment, start_new_session=True
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def page_of(rows: dict[str, dict[str, Any]], record: dict[str, Any], setting: Setting) -> str:
    """The table of expectations and what was seen, for people."""
    machine = record["machine"]
    what = "a rehearsal on a CPU: it says nothing of a GPU" if not setting.on_gpu else "a GPU"
    lines = [
        f"# GPU session on `{setting.device}`",
        "",
        f"This was {what}. {machine['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, "
        f"Python {machine['python']}, torch {machine['packages']['torch']}, commit "
        f"{machine['commit']}.",
        "",
        "| check | expected | as expected | seen | s |",
        "|---|---|---|---|---|",
    ]
    for name in in_order():
        check, row = CHECKS[name], rows.get(name)
        good, seen, seconds = (
            ("left out", "", "")
            if row is None
            else (WORDS[row["good"]], _short(row["found"], 700), f"{row['seconds']:.0f}")
        )
        lines.append(f"| {name} | {check.expected} | {good} | {seen} | {seconds} |")
    return "\n".join([*lines, ""])


def _short(found: dict[str, Any], most: int = 300) -> str:
    text = json.dumps(found, default=str, ensure_ascii=False).replace("|", "\\|")
    text = text.replace("\\n", " ")
    return text if len(text) <= most else f"{text[:most]} …"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small models and few steps")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-session")))
    parser.add_argument("--minutes", type=float, default=9.3, help="for all checks (default 9.3)")
    parser.add_argument("--only", default="", help="names of checks, separated by commas")
    parser.add_argument("--again", action="store_true", help="those too that have an answer")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    setting, out = Setting(given.device, given.small), given.out
    out.mkdir(parents=True, exist_ok=True)
    if given.one:
        run_one(CHECKS[given.one], setting, out)
        return 0
    unknown = set(filter(None, given.only.split(","))) - CHECKS.keys()
    if unknown:
        parser.error(f"no check {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    if given.again:
        (out / RESULTS).unlink(missing_ok=True)
    known = rows_of(out, setting)
    names = [n for n in given.only.split(",") if n] or [n for n in in_order() if n not in known]
    name = f"gpu-session{'-small' if given.small else ''}"
    record = start_record(name, {"device": given.device, "minutes": given.minutes})
    run_all(names, setting, out, given.minutes * 60)
    rows = rows_of(out, setting)
    record["checks"] = [rows[name] for name in in_order() if name in rows]
    (out / PAGE).write_text(page_of(rows, record, setting))
    finish_record(record, [], out)
    return 0 if all(row["good"] is not False for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
