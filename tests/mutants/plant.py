"""Plants each mutant of `mutants.toml` in a copy of the tree, and says which of them survived.

    make test-mutants                             all of them
    make test-mutants OF="step guard"             those of two rooms
    make test-mutants OF="$(git diff --name-only main)"   those of the files that changed

A mutant is one break of one file, and the test that must fail of it. First all these tests run as
the tree is: one that fails without a break shows nothing. Then each mutant is planted in the copy,
its test runs alone, and the file is put back. The tree itself is never touched: a copy has a
virtual environment of its own, in which the package is that of the copy.

Run nothing else of allranks meanwhile: each start ends what a killed job has left behind, and would
hide a mutant that leaves something.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import venv
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("mutants.toml")
NOT_COPIED = (".*", "__pycache__", "runs", "build", "dist", "*.egg-info")
TIMEOUT_S = 240.0
FAILED, PASSED = 1, 0  # what pytest leaves with
KILLED, SURVIVED, BROKEN = "killed", "SURVIVED", "BROKEN"


@dataclass(frozen=True)
class Mutant:
    """One break: in `file` the text `line` becomes `instead`, and `test` must fail of it."""

    room: str
    file: str
    line: str
    instead: str
    test: str

    def planted(self, text: str) -> str:
        """The text of the file with the break; raises `ValueError` where it cannot be made."""
        found = text.count(self.line)
        if found != 1:
            raise ValueError(f"{self.file}: {found} times, not once: {self.line}")
        broken = text.replace(self.line, self.instead)
        if broken == text:
            raise ValueError(f"{self.file}: nothing is broken by {self.instead}")
        compile(broken, self.file, "exec")  # no test fails of a text that is no Python
        return broken

    def __str__(self) -> str:
        return f"{self.room}: {self.file}: {self.line.strip()}  ->  {self.instead.strip()}"


@dataclass(frozen=True)
class Verdict:
    """What came of a mutant; `output` is that of its test."""

    mutant: Mutant
    outcome: str
    seconds: float
    output: str


def read_table(path: Path = TABLE) -> list[Mutant]:
    """All mutants, in the order of the table."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Mutant(room, **row) for room, found in rows.items() for row in found]


def chosen(mutants: Sequence[Mutant], words: Iterable[str]) -> list[Mutant]:
    """Those of the rooms and of the files in `words`; all of them if there are no words."""
    words = set(words)
    return [m for m in mutants if not words or m.room in words or m.file in words]


class Copy:
    """A copy of the tree with a virtual environment of its own, below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.root, self.temporary = folder / "tree", folder / "tmp"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*NOT_COPIED))
        self.temporary.mkdir()
        home = self.root / ".venv"
        venv.create(home, symlinks=True, with_pip=False)
        self.python = home / "bin" / "python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = home / "lib" / version / "site-packages"
        # a folder in such a file is searched, but no .pth in it read: not that of the tree itself
        there = f"{self.root / 'src'}\n{sysconfig.get_path('purelib')}\n"
        (packages / "tree.pth").write_text(there)
        command = home / "bin" / "allranks"
        command.write_text(f"#!{self.python}\nfrom allranks.cli.main import main\n\nmain()\n")
        command.chmod(0o755)
        self._written = count(int(time.time()), 2)  # so that no .pyc is taken for that of another
        self._is_ours()
        environment = {**os.environ, "TMPDIR": str(self.temporary)}
        for name in ("PYTHONPATH", "PYTEST_ADDOPTS", "VIRTUAL_ENV"):
            environment.pop(name, None)
        self._warm = subprocess.Popen(
            [self.python, self.root / "tests" / "mutants" / "warm.py"],
            cwd=self.root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def _is_ours(self) -> None:
        words = [self.python, "-c", "import allranks; print(allranks.__file__)"]
        done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=self.root)
        assert done.stdout.startswith(str(self.root)), done.stdout

    @contextmanager
    def broken(self, mutant: Mutant) -> Iterator[None]:
        """The copy with this mutant in it."""
        path = self.root / mutant.file
        text = path.read_text(encoding="utf-8")
        self._write(path, mutant.planted(text))
        try:
            yield
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        os.utime(path, times=(at := next(self._written), at))

    def run(self, tests: Iterable[str], timeout_s: float) -> tuple[int | None, str]:
        """The exit code of pytest, and what it printed; no code if it did not end in time."""
        log = self.temporary / "output"
        request = {"tests": [*tests], "output": str(log)}
        assert self._warm.stdin is not None
        self._warm.stdin.write(f"{json.dumps(request)}\n".encode())
        self._warm.stdin.flush()
        pid = self._answer(None)["pid"]
        answer = self._answer(timeout_s)
        with suppress(ProcessLookupError):  # what it has left behind, too
            os.killpg(pid, signal.SIGKILL)
        if not answer:
            self._answer(None)
        text = log.read_text(errors="replace") if log.exists() else ""
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(exist_ok=True)
        return answer.get("code"), text

    def _answer(self, timeout_s: float | None) -> dict[str, int]:
        """The next line of the warm process; nothing if it does not come in time."""
        assert self._warm.stdout is not None
        if not select.select([self._warm.stdout], [], [], timeout_s)[0]:
            return {}
        answer: dict[str, int] = json.loads(self._warm.stdout.readline())
        return answer

    def close(self) -> None:
        """End the warm process."""
        assert self._warm.stdin is not None and self._warm.stdout is not None
        self._warm.stdin.close()
        self._warm.wait()
        self._warm.stdout.close()


def judged(copy: Copy, mutant: Mutant, timeout_s: float) -> Verdict:
    """What its test says of one mutant."""
    begun = time.monotonic()
    with copy.broken(mutant):
        code, output = copy.run([mutant.test], timeout_s)
    outcomes = {FAILED: KILLED, None: f"{KILLED} (no end)", PASSED: SURVIVED}
    return Verdict(mutant, outcomes.get(code, BROKEN), time.monotonic() - begun, output)


def stale(mutants: Iterable[Mutant], root: Path = ROOT) -> list[str]:
    """Why a row of the table cannot be planted in the tree, for each of which that is so."""
    found = []
    for mutant in mutants:
        try:
            mutant.planted((root / mutant.file).read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError) as error:
            found.append(f"{mutant.room}: {error}")
    return found


def controlled(copies: Sequence[Copy], mutants: Sequence[Mutant]) -> bool:
    """Whether all of the tests pass as the tree is; says which does not."""
    tests = sorted({mutant.test for mutant in mutants})
    parts = [tests[number :: len(copies)] for number in range(len(copies))]
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(copy.run, part, TIMEOUT_S * len(part))
            for copy, part in zip(copies, parts, strict=True)
            if part
        ]
        ends = [run.result() for run in runs]
    for code, output in ends:
        if code != PASSED:
            print(f"{output}\nwithout any mutant a test fails, so it shows nothing of one")
    return all(code == PASSED for code, _ in ends)


def plant_all(mutants: Sequence[Mutant], jobs: int, timeout_s: float) -> int:
    """The exit code: 0 if every mutant was killed."""
    if not mutants or (wrong := stale(mutants)):
        print("\n".join(wrong) if mutants else "there is no such mutant")
        return 2
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True)
        folder = stack.enter_context(made)
        copies = [Copy(Path(folder, str(job))) for job in range(min(jobs, len(mutants)))]
        for copy in copies:
            stack.callback(copy.close)
        if not controlled(copies, mutants):
            return 2
        free: SimpleQueue[Copy] = SimpleQueue()
        for copy in copies:
            free.put(copy)

        def judge(mutant: Mutant) -> Verdict:
            copy = free.get()
            try:
                verdict = judged(copy, mutant, timeout_s)
            finally:
                free.put(copy)
            print(f"{verdict.outcome:8} {verdict.seconds:5.1f} s  {mutant}", flush=True)
            return verdict

        with ThreadPoolExecutor(len(copies)) as pool:
            verdicts = list(pool.map(judge, mutants))
    left = [verdict for verdict in verdicts if not verdict.outcome.startswith(KILLED)]
    for verdict in left:
        tail = "\n".join(verdict.output.splitlines()[-15:])
        print(f"\n{verdict.outcome}: {verdict.mutant}\n{verdict.mutant.test}\n{tail}")
    print(f"\n{len(verdicts) - len(left)} of {len(verdicts)} killed")
    return 1 if left else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant mutants in a copy; say who survived.")
    parser.add_argument("of", nargs="*", help="rooms, or files as src/allranks/…; all by default")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="for one mutant")
    asked = parser.parse_args()
    return plant_all(chosen(read_table(), asked.of), asked.jobs, asked.timeout_s)


if __name__ == "__main__":
    sys.exit(main())
