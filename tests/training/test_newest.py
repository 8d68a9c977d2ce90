"""The search for the newest checkpoint as one rank sees it, with what the others find made up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpoint.checkpointer import Loaded, Search
from allranks.checkpoint.format import (
    Manifest,
    SavedFile,
    SavedTensor,
    TensorBox,
    digest,
    rank_file,
    seal,
    step_folder,
    write_manifest,
)
from allranks.errors import ProgramError

RANKS = 4
FILES = [rank_file(rank, RANKS, 0) for rank in range(RANKS)]


@dataclasses.dataclass
class Others:
    """Rank `rank` of four; `found` are the problems that the rest finds in the newest of all."""

    rank: int
    found: list[str]
    newest: str = ""
    words: list[str] = dataclasses.field(default_factory=list)

    @property
    def size(self) -> int:
        return RANKS

    def gather_texts(self, text: str) -> list[str]:
        self.words.append(text)
        said = json.loads(text)
        if not isinstance(said[0], list):  # the list of candidates
            return [text] * RANKS
        _, seen = said
        theirs = json.dumps([self.found if seen == self.newest else [], seen])
        return [text if rank == self.rank else theirs for rank in range(RANKS)]


def commit(checkpoints: Path, step: int) -> str:
    """A checkpoint of four files; the digest of its manifest."""
    folder = step_folder(checkpoints, step)
    folder.mkdir(parents=True)
    for number, name in enumerate(FILES):
        (folder / name).write_bytes(b"1234" * (number + 1))
    manifest = Manifest(
        step=step,
        created=1.5,
        ranks=RANKS,
        files={
            name: SavedFile(4 * (number + 1), digest(b"1234" * (number + 1)))
            for number, name in enumerate(FILES)
        },
        tensors={"w": SavedTensor("F32", (1,), (TensorBox(FILES[0], (0,), (1,)),))},
        values={"common": {}, "own": [None] * RANKS},
    )
    write_manifest(folder, manifest)
    return digest(seal(manifest))


def search(
    tmp_path: Path, ranks: Others, *, joins: bool = False
) -> tuple[Loaded | None, list[str]]:
    """What is loaded, and what is reported."""
    told: list[str] = []

    def report(event: str, **values: Any) -> None:
        told.append(f"{event} {values['step']} {'; '.join(values['problems'])}")

    def read(folder: Path, manifest: Manifest) -> Loaded:
        return Loaded(manifest.step, folder, manifest, {}, None)

    return Search(ranks, tmp_path, read, report, joins=joins).newest([tmp_path]), told


def test_the_newest_is_loaded(tmp_path: Path) -> None:
    commit(tmp_path, 3)
    newest = commit(tmp_path, 12)
    found, told = search(tmp_path, Others(1, [], newest))
    assert found is not None and found.step == 12 and told == []


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_any_rank_finds_wrong_is_wrong_for_all(tmp_path: Path, rank: int) -> None:
    commit(tmp_path, 3)
    newest = commit(tmp_path, 12)
    found, told = search(tmp_path, Others(rank, ["it is torn"], newest))
    assert found is not None and found.step == 3
    assert told == (["checkpoint_skipped 12 it is torn"] if rank == 0 else [])
    assert step_folder(tmp_path, 12).exists() == (rank != 0), "the leader sets it aside"


def test_a_new_rank_with_a_problem_leaves_and_sets_nothing_aside(tmp_path: Path) -> None:
    """The others do not hear of it, and load the same checkpoint without it."""
    commit(tmp_path, 12)
    (step_folder(tmp_path, 12) / FILES[0]).write_bytes(b"torn")
    raised = 0
    for rank in range(RANKS):
        ranks = Others(rank, [])
        try:
            search(tmp_path, ranks, joins=True)
        except ProgramError:
            raised += 1
            assert len(ranks.words) == 1, "the list of candidates"
    assert raised == 1 and step_folder(tmp_path, 12).exists()


@pytest.mark.parametrize("damaged", range(RANKS))
def test_every_file_is_verified_by_somebody(tmp_path: Path, damaged: int) -> None:
    """By one rank alone: the work is shared out, the largest first."""
    commit(tmp_path, 12)
    (step_folder(tmp_path, 12) / FILES[damaged]).write_bytes(b"4321" * (damaged + 1))
    seen = []
    for rank in range(RANKS):
        ranks = Others(rank, [])
        search(tmp_path, ranks)
        problems, _ = json.loads(ranks.words[1])
        seen.append(bool(problems))
        for bad in tmp_path.glob("*.bad-*"):
            bad.rename(step_folder(tmp_path, 12))
    assert seen == [rank == RANKS - 1 - damaged for rank in range(RANKS)]
