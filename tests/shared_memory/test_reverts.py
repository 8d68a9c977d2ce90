"""Why Gloo took its shared memory back (gloo #458, #490), each cause a test; and other faults.

Names that collide or stay, ranks taken for those of one host, instructions that a processor lacks,
a thread for each wait, several calls in flight. The cases of the C library alone are in
`core_cases.py`; each runs on ranks that were forked without torch.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from core_cases import CASES
from test_threads import COMPILER, NATIVE

from allranks.torch.shared_memory.segment import Segment, host_identity

HERE = Path(__file__).parent
ALONE = {"OPENBLAS_NUM_THREADS": "1"}  # a process that forks has one thread


def passes(*words: str) -> None:
    command = [sys.executable, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | ALONE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", [case.__name__ for case in CASES])
def test_a_case_of_the_library(name: str) -> None:
    passes(str(HERE / "core_cases.py"), name)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize(
    "options",
    [["-O1", "-DNO_CLONES", "-mno-avx"], ["-O3", "-DNO_CLONES", "-march=native"]],
    ids=["no clones, no vectors of 32 bytes", "all that this processor has"],
)
def test_any_processor_gives_the_same_bits(tmp_path: Path, options: list[str]) -> None:
    """The second may multiply and add in one step, which would round once: nothing may."""
    library = tmp_path / "_collectives.so"
    words = [COMPILER, "-std=gnu11", "-pthread", "-shared", "-fPIC", *options]
    words += [f"-I{sysconfig.get_path('include')}", *NATIVE.glob("*.c"), "-o", library]
    subprocess.run(list(map(str, words)), check=True, capture_output=True)
    program = str(HERE / "stress.py")
    passes(program, "--library", str(library), "--calls", "900", "--ranks", "2", "5", "--seed", "9")


def test_segments_of_one_name_are_two_and_no_name_is_made() -> None:
    one, other = (Segment.create(4096, "allranks-group") for _ in range(2))
    assert not [name for name in os.listdir("/dev/shm") if "allranks" in name]
    ctypes.memset(one.address, 7, 4096)
    assert bytes((ctypes.c_char * 4096).from_address(other.address)) == bytes(4096)
    again = Segment.open(one.where, 4096)
    assert bytes((ctypes.c_char * 4096).from_address(again.address)) == bytes([7]) * 4096
    where = one.where
    one.hide()
    with pytest.raises(OSError, match=r"No such file|smaller"):
        Segment.open(where, 4096)
    for segment in (one, other, again):
        segment.unmap()


def test_a_host_is_known_by_itself_not_by_how_many_ranks_there_are() -> None:
    """A process of another network is on another host, whatever else the two have in common."""
    script = "import runpy, sys; print(runpy.run_path(sys.argv[1])['host_identity']())"
    alone = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    possible = subprocess.run([*alone, "true"], capture_output=True, check=False)
    if possible.returncode != 0:
        pytest.skip(f"no network namespace of our own: {possible.stderr.decode().strip()}")
    for before, same in (([], True), (alone, False)):
        command = [*before, sys.executable, "-c", script, str(NATIVE.parent / "segment.py")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        assert (said == host_identity()) is same
        assert said.partition(" ")[0] == host_identity().partition(" ")[0]  # of one boot
