"""Accelerate's own test scripts, started by `allranks run` on two ranks, on both backends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("accelerate_script.py")
LEFT_OUT = {
    "test_script": [],
    "test_sync": [],
    "test_ops": [],
    "test_ddp_comm_hook": ["test_ddp_comm_hook:BF16"],  # NCCL alone has it
    "test_distributed_data_loop": [
        # on CPUs Accelerate joins no uneven inputs: over Gloo these wait for ever
        "test_can_join_uneven_inputs",
        "test_join_can_override_even_batches",
        "test_join_can_override_for_mixed_type_dataloaders",
        "test_join_raises_warning_for_iterable_when_overriding_even_batches",
        # want torchdata
        "test_stateful_dataloader",
        "test_stateful_dataloader_save_state",
    ],
}
"""By script: what is left out of it. `docs/suites.md` has the other scripts, and why."""


@pytest.mark.slow
@pytest.mark.cases("backend", ["shared_memory"], exhaustive=["gloo"])
@pytest.mark.cases(
    "script", ["test_sync"], exhaustive=[script for script in LEFT_OUT if script != "test_sync"]
)
def test_a_script_of_accelerate_passes(script: str, backend: str, tmp_path: Path) -> None:
    run = [sys.executable, "-m", "allranks.cli.main", "run", "--ranks", "2", "--show", "all"]
    run += ["--shared-memory"] * (backend == "shared_memory")
    command = [*run, "--", sys.executable, str(SCRIPT), script]
    command += ["--without", *LEFT_OUT[script]] if LEFT_OUT[script] else []
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for rank in range(2):
        assert f"[rank {rank}] ended {script}" in ended.stdout
    assert "Distributed environment: DistributedType.MULTI_CPU" in ended.stdout


def test_every_script_stands_in_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "suites.md").read_text()
    for script, left_out in LEFT_OUT.items():
        assert f"| `{script}` | passes | passes |" in page
        assert all(f"`{name.partition(':')[0]}`" in page for name in left_out)
