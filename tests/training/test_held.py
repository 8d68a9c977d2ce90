"""The most memory that a process held: as the kernel says, by rank, and null where nobody does."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.job.run_folder import read_events
from allranks.training.record.phases import MemoryPeaks, held_at_most, held_in
from conftest import Train


@pytest.mark.slow
def test_the_kernel_is_asked_for_the_peak_and_not_for_what_is_held_now(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n")
    assert held_at_most(7, status) == MemoryPeaks(2 * 2**20, 7)
    status.write_text("Name:\tpython\n")
    assert (
        held_at_most(None, status)
        == held_at_most(None, tmp_path / "none")
        == MemoryPeaks(None, None)
    )
    before = held_at_most().host_bytes
    block = bytearray(b"x" * (before or 0))
    after = held_at_most().host_bytes
    assert before is not None and after is not None and after >= before + len(block) // 2
    del block
    assert held_at_most().host_bytes == after


@pytest.mark.slow
def test_every_rank_says_what_it_held(train: Train) -> None:
    """Also servers and workers; who held 64 MiB more says so."""
    small = held_in(read_events(train("digits", ranks=2, steps=3).run_dir))
    assert sorted(small) == [0, 1] and all(one.device_bytes is None for one in small.values())
    wide = "width=640", "batch_size=16"
    large = held_in(read_events(train("digits", *wide, ranks=2, steps=2, strategy="ddp").run_dir))
    assert all((large[r].host_bytes or 0) > (small[r].host_bytes or 0) + 2**26 for r in (0, 1))
    paced = "slow@rank=2,seconds=0.1 slow@rank=3,seconds=0.1"  # else one does all
    served = train("digits", ranks=2, steps=20, strategy="ps", inject=paced)
    held = held_in(read_events(served.run_dir))
    assert sorted(held) == [0, 1, 2, 3] and all(one.host_bytes for one in held.values())
