"""Faults on purpose: read strictly, and made where, when and by whom they were asked for."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import RequestError
from allranks.job.faults import ACTIONS, POINTS, Fault, Faults, Injected, parse
from flipping import flip_bit

SOURCE = Path(__file__).parent.parent / "src" / "allranks"


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", []),
        (" \n ", []),
        ("fail", [Fault("fail")]),
        ("kill@rank=2,step=30", [Fault("kill", rank=2, step=30)]),
        ("slow@seconds=0.5,attempt=-1", [Fault("slow", seconds=0.5, attempt=-1)]),
        ("exit@code=7 hang@at=save:write", [Fault("exit", code=7), Fault("hang", at="save:write")]),
    ],
)
def test_what_a_text_describes(text: str, faults: list[Fault]) -> None:
    assert parse(text) == tuple(faults)


@pytest.mark.parametrize(
    ("text", "found", "do"),
    [
        ("kil@rank=1", "no action 'kil'", "did you mean 'kill'?"),
        ("kill@rnak=1", "no value 'rnak'", "did you mean 'rank'?"),
        ("kill@at=stepp", "no point 'stepp'", "did you mean 'step'?"),
        ("kill@rank=one", "'one'", "give rank a value of that type"),
        ("kill@rank=1.5", "'1.5'", "give rank a value of that type"),
        ("kill@seconds", "''", "give seconds a value of that type"),
        ("@", "no action ''", "known: "),
        ("fail fial@step=1", "no action 'fial'", "did you mean 'fail'?"),
    ],
)
def test_a_misspelt_fault_is_refused_in_four_parts(text: str, found: str, do: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse(text)
    assert refused.value.asked.startswith("--inject ") and refused.value.why
    assert refused.value.found.startswith(found) and do in refused.value.do


NAMES = ("rank", "step", "at", "attempt", "seconds", "code", "")
PAIRS = st.builds("{}={}".format, st.sampled_from(NAMES) | st.text(), st.text() | st.integers())


@given(
    st.text()
    | st.builds("{}@{}".format, st.sampled_from(sorted(ACTIONS)), st.lists(PAIRS).map(",".join))
)
def test_hostile_text_is_read_or_refused(text: str) -> None:
    try:
        found = parse(text)
    except RequestError:
        return
    for fault in found:
        assert fault.action in ACTIONS and fault.at in POINTS
        assert isinstance(fault.rank, int) and isinstance(fault.seconds, float)


FAULTS = st.builds(
    Fault,
    action=st.sampled_from(sorted(ACTIONS)),
    rank=st.integers(),
    step=st.integers(),
    at=st.sampled_from(sorted(POINTS)),
    attempt=st.integers(-1, 9),
    seconds=st.floats(allow_infinity=False, allow_nan=False),
    code=st.integers(),
)


@given(st.lists(FAULTS, max_size=4))
def test_a_fault_that_is_written_out_is_read_back(faults: list[Fault]) -> None:
    words = [
        f"{f.action}@rank={f.rank},step={f.step},at={f.at},attempt={f.attempt},"
        f"seconds={f.seconds!r},code={f.code}"
        for f in faults
    ]
    assert parse(" ".join(words)) == tuple(faults)


def test_a_fault_happens_at_its_point_and_step_on_its_rank_in_its_attempt() -> None:
    text = "fail@rank=1,step=3,at=stepped,attempt=2"
    for rank, attempt in ((0, 2), (1, 0), (1, 1)):
        assert Faults.of(text, rank, attempt).faults == ()
    faults = Faults.of(text, 1, 2)
    faults.reach("step", 3)
    faults.reach("stepped", 2)
    with pytest.raises(Injected, match="fail on rank 1 at stepped"):
        faults.reach("stepped", 3)
    faults.reach("stepped", 3)


def test_a_full_disk_stays_full_and_other_faults_happen_once() -> None:
    faults = Faults.of("disk-full@at=save:write fail@at=save:half", 0, 0)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left") as full:
            faults.reach("save:write", 1)
        assert full.value.errno == errno.ENOSPC
    with pytest.raises(Injected):
        faults.reach("save:half", 1)
    faults.reach("save:half", 2)


def test_every_attempt_and_every_step_can_be_meant() -> None:
    faults = Faults.of("slow@seconds=0,attempt=-1", 0, 5)
    assert faults.faults
    for step in range(3):
        faults.reach("step", step)


def test_what_the_engine_gives_is_used() -> None:
    told: list[str] = []
    faults = Faults.of("skip-collective@step=1 nan@step=2", 0, 0)
    faults.leave_out = lambda: told.append("left out")
    faults.poison = lambda: told.append("poisoned")
    for step in range(4):
        faults.reach("step", step)
    assert told == ["left out", "poisoned"]


def test_every_point_is_reached_somewhere_and_no_other() -> None:
    """A point that the engine never calls would be a fault that never happens."""
    called = set()
    for path in SOURCE.rglob("*.py"):
        called |= set(re.findall(r"""(?:reach|_after)\(\s*["']([a-z:]+)["']""", path.read_text()))
    assert called == set(POINTS)


def test_one_bit_of_a_file_is_flipped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes([0, 1, 2, 3]))
    flip_bit(path, 1)
    flip_bit(path, -1)
    assert path.read_bytes() == bytes([0, 0, 2, 2])
