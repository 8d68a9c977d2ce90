"""`allranks checkpoints`: what can be resumed, whether it holds, and the weights of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from allranks.checkpoint.format import NAME, About, read_manifest, step_folder
from allranks.cli.main import main
from allranks.job.job import Job
from allranks.launcher.supervisor import Ended
from allranks.torch.checkpoint.saving import TorchCheckpointer
from allranks.torch.comm.comm import Comm

Door = Callable[..., tuple[int, str, str]]
FILE = "rank-000-of-001.a0.safetensors"


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Door:
    """`door(*words)`: the exit code,
    standard output and standard error of `allranks checkpoints`."""

    def call(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["allranks", "checkpoints", *map(str, words)])
        code: Any = 0
        try:
            main()
        except SystemExit as left:
            code = left.code
        return int(code), *capsys.readouterr()

    return call


def weights(step: int) -> dict[str, torch.Tensor]:
    return {
        "0.weight": torch.full((2, 3), float(step)),
        "a/b@~1": torch.full((3,), step, dtype=torch.bfloat16),
        "7": torch.tensor(step),
        "mask": torch.tensor([True, False]),
        "none": torch.empty(0, 2),
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 10 and 20."""
    path = tmp_path / "run"
    checkpointer = TorchCheckpointer(path / "checkpoints", Comm())
    for step in (10, 20):
        common = {"model": weights(step), "optimizer": {"state": {0: torch.zeros(9)}}}
        checkpointer.save(step, common, None, About(metrics={"accuracy": step / 100}))
    checkpointer.close()
    return path


def damage(run: Path, step: int) -> Path:
    path = step_folder(run / "checkpoints", step) / FILE
    text = bytearray(path.read_bytes())
    text[-1] ^= 1
    path.write_bytes(text)
    return path


def test_list_tells_what_is_there(door: Door, run: Path) -> None:
    (run / "checkpoints" / "step-00000030").mkdir()
    step_folder(run / "checkpoints", 10).rename(run / "checkpoints" / "step-00000010.bad-1")
    code, out, _ = door("list", run)
    assert code == 0
    newest, dead, aside = out.splitlines()
    assert "step-00000020" in newest and "× 1" in newest and "accuracy 0.2000" in newest
    assert "step-00000030" in dead and dead.endswith("not committed")
    assert "step-00000010.bad-1" in aside and aside.endswith("set aside")
    rows = json.loads(door("list", run, "--json")[1])
    assert [row["state"] for row in rows] == ["committed", "not committed", "set aside"]
    manifest = read_manifest(step_folder(run / "checkpoints", 20))
    assert rows[0]["bytes"] == manifest.bytes and rows[0]["metrics"] == {"accuracy": 0.2}
    assert rows[0]["created"] == manifest.created and rows[0]["step"] == 20
    for path in (run / "checkpoints", step_folder(run / "checkpoints", 20)):
        assert json.loads(door("list", path, "--json")[1])[0] == rows[0]


def test_verify_reads_every_digest(door: Door, run: Path) -> None:
    code, out, _ = door("verify", run)
    assert code == 0 and out.count("holds") == 2
    bad = damage(run, 10)
    code, out, _ = door("verify", run)
    good_line, bad_line = out.splitlines()
    assert code == 5 and good_line.endswith("holds")
    assert str(bad.parent) in bad_line and bad.name in bad_line and "digest" in bad_line
    (step_folder(run / "checkpoints", 20) / NAME).write_bytes(b"{}")
    code, out, _ = door("verify", run, "--json")
    assert code == 5 and [len(row["problems"]) for row in json.loads(out)] == [1, 1]
    assert "bad: manifest.json is torn" in door("list", run)[1]


def test_export_writes_the_weights_with_the_names_of_the_model(
    door: Door, run: Path, tmp_path: Path
) -> None:
    for step, words in ((20, []), (10, ["--step", "10"])):
        target = tmp_path / f"{step}.safetensors"
        code, out, _ = door("export", run, "--to", target, *words, "--json")
        assert code == 0 and json.loads(out)["bytes"] == target.stat().st_size
        found, wanted = load_file(target), weights(step)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "10.safetensors", "20.safetensors"}


@pytest.mark.slow
def test_export_puts_the_chunks_of_ranks_together(
    door: Door, on_ranks: Callable[..., Ended], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    on_ranks(3, "checkpoint_workers:save_sharded", {"folder": str(folder)})
    assert door("export", folder, "--to", tmp_path / "w.safetensors")[0] == 0
    found = load_file(tmp_path / "w.safetensors")
    assert torch.equal(found["rows"], 2 * torch.arange(28.0).view(7, 4))
    assert torch.equal(found["columns"], 2 * torch.arange(27.0).view(3, 9))
    assert torch.equal(found["whole"], 2 * torch.arange(5.0))
    assert torch.equal(found["few"], 2 * torch.arange(3.0))


def test_export_verifies_first(door: Door, run: Path, tmp_path: Path) -> None:
    bad = damage(run, 20)
    target = tmp_path / "weights.safetensors"
    code, _, err = door("export", run, "--to", target)
    assert code == 5 and bad.name in err and "digest" in err and not target.exists()
    assert door("export", run, "--to", target, "--step", "10")[0] == 0


@pytest.mark.parametrize("there", ["file", "link"])
def test_export_never_writes_over_a_file(door: Door, run: Path, tmp_path: Path, there: str) -> None:
    target = tmp_path / "weights.safetensors"
    if there == "file":
        target.write_text("mine")
    else:
        target.symlink_to(tmp_path / "nowhere")
    code, _, err = door("export", run, "--to", target)
    assert code == 2 and "a file is there already" in err
    assert target.is_symlink() or target.read_text() == "mine"


@pytest.mark.parametrize(
    "words",
    [
        ["list", "nowhere"],
        ["verify", "nowhere"],
        ["export", "nowhere", "--to", "x"],
        ["export", "run", "--to", "x", "--step", "15"],
        ["export", "run", "--to", "no/such/folder"],
    ],
)
def test_what_is_not_there_is_refused(
    door: Door, run: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    code, out, err = door(*words)
    assert code == 2 and out == ""
    assert all(part in err for part in ("asked:", "found:", "why:", "do:"))


def test_no_framework_is_needed(run: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom allranks.cli.main import cli\n"
        "for words in sys.argv[1].split(';'):\n"
        "    cli(['checkpoints', *words.split()], standalone_mode=False)\n"
        "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)\n"
    )
    words = f"list {run};verify {run};export {run} --to {tmp_path / 'weights'}"
    subprocess.run([sys.executable, "-c", code, words], check=True)


def test_a_keras_model_comes_of_the_tensorflow_engine_alone(door: Door, tmp_path: Path) -> None:
    checkpointer = TorchCheckpointer(tmp_path / "checkpoints", Comm())
    about = About(job=Job("digits", engine="torch", strategy="single").to_data())
    checkpointer.save(10, {"model": weights(10)}, None, about)
    checkpointer.close()
    before = set(tmp_path.iterdir())
    for form, name in (("keras", "m.keras"), ("saved-model", "served")):
        code, _, err = door("export", tmp_path, "--to", tmp_path / name, "--format", form)
        assert code == 2 and "a run of the torch engine" in err and "--format safetensors" in err
    code, _, err = door("export", tmp_path, "--to", tmp_path / "model.h5", "--format", "keras")
    assert code == 2 and "a name without .keras" in err
    damage(tmp_path, 10)
    code, _, err = door("export", tmp_path, "--to", tmp_path / "m.keras", "--format", "keras")
    assert code == 5 and "digest" in err and set(tmp_path.iterdir()) == before
    assert door("export", tmp_path, "--to", tmp_path / "w", "--format", "onnx")[0] == 2
