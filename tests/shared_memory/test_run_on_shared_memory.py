"""`allranks run --shared-memory`: a script that asks for Gloo, unchanged, in shared memory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.job.run_folder import read_rows

SCRIPTS = Path(__file__).parent.parent / "scripts"


def run(
    folder: Path, script: str, *flags: str, words: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "allranks.cli.main", "run", "--ranks", "2", *flags]
    return subprocess.run(
        [*command, "--run-dir", str(folder), "--", *(words or (str(SCRIPTS / script),))],
        capture_output=True,
        text=True,
        check=False,
    )


def losses(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return re.findall(r"loss (\S+) -> (\S+)", done.stdout)


@pytest.mark.slow
@pytest.mark.cases("script", ["fsdp2.py"], exhaustive=["ddp.py"])
def test_a_script_that_asks_for_gloo_trains_alike_in_shared_memory(
    script: str, tmp_path: Path
) -> None:
    there, over_gloo = tmp_path / "shared", tmp_path / "gloo"
    found = losses(run(there, script, "--shared-memory"))
    assert found and found == losses(run(over_gloo, script, "--warm=torch"))
    rows = read_rows(there / "events.jsonl")
    (told,) = [row for row in rows if row["event"] == "collectives"]
    assert (told["asked"], told["did"], told["why"]) == ("shared_memory", "shared_memory", "")
    assert not (there / "collectives.json").exists()
    assert "shared_memory = true" in (there / "job.toml").read_text()


@pytest.mark.slow
def test_without_a_name_it_is_that_of_a_cpu(tmp_path: Path) -> None:
    script = tmp_path / "unnamed.py"
    script.write_text(
        "import torch.distributed as dist\nfrom torch.distributed import init_process_group\n"
        "init_process_group()\nprint(dist.get_backend(), dist.new_group(backend='gloo').name())\n"
        "dist.barrier()\n"  # nobody leaves while the others still connect to it
        "dist.destroy_process_group()\n"
    )
    done = run(tmp_path / "run", str(script), "--shared-memory")
    assert done.stdout == "shared_memory gloo\n", done.stderr


@pytest.mark.slow
def test_the_script_imports_torch_itself_and_its_children_as_well(tmp_path: Path) -> None:
    """What it sets for torch before it imports it is heard; a shell may start it."""
    script = tmp_path / "sets.py"
    script.write_text(
        "import os, sys\nassert 'torch' not in sys.modules\nos.environ['OMP_NUM_THREADS'] = '2'\n"
        "import torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "print(torch.get_num_threads(), dist.get_backend())\ndist.destroy_process_group()\n"
    )
    done = run(
        tmp_path / "run", "", "--shared-memory", words=("sh", "-c", f"{sys.executable} {script}")
    )
    assert done.stdout == "2 shared_memory\n", done.stderr


@pytest.mark.slow
def test_a_python_without_hooks_is_refused_and_one_without_allranks_is_told(tmp_path: Path) -> None:
    script = tmp_path / "says.py"
    script.write_text("import sys\nprint('at work')\n")
    done = run(tmp_path / "run", "", "--shared-memory", words=(sys.executable, "-I", str(script)))
    assert done.returncode == 2 and "do:    leave -I away" in done.stderr
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "allranks.py").write_text("")
    script.write_text("import torch\n")
    done = run(tmp_path / "other", str(script), "--shared-memory")
    assert (
        "collectives: gloo, because" in done.stderr and "'allranks' is not a package" in done.stderr
    )


@pytest.mark.slow
def test_it_is_of_torch(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "ddp.py", "--shared-memory", "--warm", "tensorflow")
    assert done.returncode == 2
    assert "leave one of the two away" in done.stderr
