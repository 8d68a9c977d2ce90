"""What the tests on a real Slurm share: a cluster for each, fresh, as it is there in half a second.

`make test-cluster` runs them, as root; `make test` does not collect them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from slurm_here import SlurmHere


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path is short enough for sockets in it, which `tmp_path` is not."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        yield Path(folder)


@pytest.fixture
def slurm(no_leaks: None, short_path: Path) -> Iterator[SlurmHere]:
    """A cluster that nobody has used; all that is left in it ends with the test."""
    with closing(SlurmHere(short_path)) as running:
        yield running
        print(running.report())  # pytest shows it when the test has failed
