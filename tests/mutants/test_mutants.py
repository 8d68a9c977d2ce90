"""The table of mutants fits the text of the source, and who plants them is not easily pleased."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from plant import (
    BROKEN,
    KILLED,
    ROOT,
    SURVIVED,
    TABLE,
    Mutant,
    Verdict,
    chosen,
    judged,
    read_table,
    stale,
)

LEAST = 80
MUTANTS = read_table()


def test_every_mutant_can_be_planted() -> None:
    assert stale(MUTANTS) == []


def test_every_mutant_names_a_test_that_is_there() -> None:
    names: dict[str, set[str]] = {}
    for mutant in MUTANTS:
        file, _, name = mutant.test.partition("::")
        if file not in names:
            body = ast.parse((ROOT / file).read_text()).body
            names[file] = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        assert name.partition("[")[0] in names[file], mutant.test


def test_there_are_many_and_no_two_are_one() -> None:
    found = Counter((mutant.file, mutant.line, mutant.instead) for mutant in MUTANTS)
    assert len(MUTANTS) >= LEAST and max(found.values()) == 1
    assert not any(mutant.file.startswith("tests") for mutant in MUTANTS)


def test_rooms_and_files_choose() -> None:
    (room, file) = MUTANTS[0].room, MUTANTS[0].file
    assert {mutant.room for mutant in chosen(MUTANTS, [room])} == {room}
    assert {mutant.file for mutant in chosen(MUTANTS, [file])} == {file}
    assert chosen(MUTANTS, []) == MUTANTS and chosen(MUTANTS, ["nowhere"]) == []


@pytest.mark.parametrize(
    ("line", "instead", "words"),
    [
        ("x = 3", "x = 4", "0 times"),
        ("x = ", "y = ", "2 times"),
        ("x = 1", "x = 1", "nothing is broken"),
        ("x = 1", "x = (", "never closed"),
    ],
)
def test_a_row_that_cannot_be_planted_is_stale(
    tmp_path: Path, line: str, instead: str, words: str
) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 2\n")
    (problem,) = stale([Mutant("room", "a.py", line, instead, "")], tmp_path)
    assert problem.startswith("room: ") and words in problem
    (missing,) = stale([Mutant("room", "b.py", line, instead, "")], tmp_path)
    assert "b.py" in missing


class FakeCopy:
    """A copy whose tests leave with `code`, and that keeps what was planted when they ran."""

    def __init__(self, code: int | None) -> None:
        self.code, self.planted = code, list[Mutant]()

    def broken(self, mutant: Mutant) -> FakeCopy:
        self.planted.append(mutant)
        return self

    def __enter__(self) -> None:
        """It is broken."""

    def __exit__(self, *error: object) -> None:
        """It is whole again."""

    def run(self, tests: list[str], timeout_s: float) -> tuple[int | None, str]:
        return self.code, f"{tests} {timeout_s}"


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (1, KILLED),
        (0, SURVIVED),
        (2, BROKEN),
        (4, BROKEN),
        (5, BROKEN),
        (None, f"{KILLED} (no end)"),
    ],
)
def test_only_a_test_that_fails_has_killed_a_mutant(code: int | None, outcome: str) -> None:
    """Not one that was not found (4, 5), nor one that could not be loaded (2)."""
    copy = FakeCopy(code)
    mutant = MUTANTS[0]
    verdict = judged(copy, mutant, 5.0)  # type: ignore[arg-type]
    assert isinstance(verdict, Verdict) and verdict.outcome == outcome
    assert copy.planted == [mutant] and verdict.output == f"{[mutant.test]} 5.0"


def test_the_table_is_data_alone() -> None:
    assert TABLE.suffix == ".toml" and TABLE.parent == Path(__file__).parent
