"""The C library under the sanitizers, its ranks as threads of one process (`threads.c`)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import allranks

HERE = Path(__file__).parent
NATIVE = Path(next(iter(allranks.__path__))) / "torch" / "shared_memory" / "native"
COMPILER = shutil.which("gcc") or shutil.which("cc")
SANITIZERS = {
    "none": ["-O2"],
    # a resolver of clones runs before the sanitizer is there
    "thread": ["-O1", "-g", "-fsanitize=thread", "-DNO_CLONES"],
    "address": ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


def built(folder: Path, options: list[str]) -> Path:
    program = folder / "threads"
    sources = [HERE / "threads.c", *(path for path in NATIVE.glob("*.c") if path.stem != "binding")]
    words = [COMPILER, "-std=gnu11", "-pthread", *options, f"-I{NATIVE}", *sources, "-o", program]
    subprocess.run(list(map(str, words)), check=True, capture_output=True)
    return program


def run(program: Path, *numbers: int) -> None:
    words = [str(program), *map(str, numbers)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "equal\n", "")


@pytest.mark.slow
def test_ranks_that_are_threads_get_equal_sums(tmp_path: Path) -> None:
    program = built(tmp_path, SANITIZERS["none"])
    for ranks in (2, 3, 5):
        run(program, ranks, 300, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_sanitizers_find_nothing(tmp_path: Path, sanitizer: str, exhaustive: bool) -> None:
    program = built(tmp_path, SANITIZERS[sanitizer])
    for seed, ranks in enumerate((2, 3, 4, 6, 8)):
        run(program, ranks, 400 if exhaustive else 150, seed)
