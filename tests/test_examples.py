"""The examples run as their README says, and show what they say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score
from torch.nn import functional as F

from allranks.cli.main import cli
from allranks.job.program import find_program
from allranks.programs.digits import Digits
from allranks.torch import Task
from allranks.torch.data.batch import Batch
from allranks.torch.trainer import Trainer
from conftest import ROOT, Train
from launch_host import Host

EXAMPLES = ROOT / "examples"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    return tmp_path / "examples"


def test_every_example_is_in_the_list() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    files = [path.name for path in EXAMPLES.iterdir() if path.name != "README.md"]
    assert files and all(f"`{name}`" in listed for name in files if not name.startswith("__"))


@pytest.mark.slow
def test_a_loop_of_ones_own_and_the_same_as_a_task(folder: Path, host: Host) -> None:
    """To the same bits: the loop in one process, the task on two ranks."""
    subprocess.run([sys.executable, "own_loop.py"], cwd=folder, check=True)
    words = ("train", "as_task.py", "--bitwise", "--ranks", "2", "--run-dir", "run")
    task = host.launch(folder, *words)
    assert task.wait() == 0, task.err
    one = load_file(folder / "own_loop.safetensors")
    two = load_file(folder / "run" / "weights.safetensors")
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


@pytest.mark.slow
def test_an_adapter_is_trained_on_two_ranks_and_read_by_peft(folder: Path, host: Host) -> None:
    """On `fsdp`; the model is a tiny one in a folder, and peft puts the adapter onto it again."""
    made = subprocess.run(
        [sys.executable, "-c", "import huggingface_tasks as t; t.save('model', 'texts')"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "tasks")},
        capture_output=True,
    )
    assert made.returncode == 0, made.stderr
    settings = [w for s in ("name=model", "dataset=texts", "batch_size=12") for w in ("--set", s)]
    words = ("train", "fine_tune_lora.py", *settings, "--ranks", "2", "--strategy", "fsdp")
    words += ("--run-dir", "run", "--checkpoint-every", "4", "--first-check", "off")
    trained = host.launch(folder, *words)
    assert trained.wait() == 0, trained.err
    options = ("--to", "adapter", "--format", "huggingface")
    export = host.launch(folder, "checkpoints", "export", "run", *options)
    assert export.wait() == 0, export.err
    weights = load_file(folder / "run" / "weights.safetensors")
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert adapter and all(torch.equal(weights[saved_name(n)], adapter[n]) for n in adapter)
    assert any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)
    base = load_file(folder / "model" / "model.safetensors")
    frozen = "transformer.h.0.ln_1.weight"
    assert torch.equal(weights[f"base_model.model.{frozen}"], base[frozen])


def saved_name(name: str) -> str:
    """The name that the model has for a weight of a file of peft."""
    return name.replace(".weight", ".default.weight")


@pytest.mark.slow
def test_fine_tuning(folder: Path, host: Host) -> None:
    """The body stays as it was given; the new head learns."""
    first = host.launch(folder, "train", "fine_tuning.py:Pretraining", "--run-dir", "first")
    assert first.wait() == 0, first.err
    words = ("--set", "weights=first/weights.safetensors", "--ranks", "2", "--run-dir", "second")
    second = host.launch(folder, "train", "fine_tuning.py:FineTuning", *words, "--json")
    assert second.wait() == 0, second.err
    assert json.loads(second.out.splitlines()[-1])["eval"]["accuracy"] > 0.8
    one, two = (load_file(folder / name / "weights.safetensors") for name in ("first", "second"))
    assert torch.equal(one["body.0.weight"], two["body.0.weight"])
    assert not torch.equal(one["head.weight"], two["head.weight"])


@pytest.mark.slow
def test_a_gan_is_its_plain_loop_with_two_optimizers(folder: Path, train: Train) -> None:
    """In float64 on two ranks, beside a loop that knows two Adams;
    and the points come to the ring."""
    task = find_program(str(folder / "gan.py"), Task)(epochs=1)
    weights = {name: tensor.double() for name, tensor in plain_gan(task).items()}
    found = train(str(folder / "gan.py"), ranks=2, steps=8, precision="fp64")
    for name, tensor in load_file(found.run_dir / "weights.safetensors").items():
        assert (tensor - weights[name]).norm() < 1e-12 * weights[name].norm(), name
    torch.manual_seed(0)
    away, points = task.metrics(task.model()(*task.eval_data()), None)["away_from_ring"]
    trained = train(str(folder / "gan.py"), ranks=2)
    assert trained.summary["eval"]["away_from_ring"] < 0.7 * float(away.detach()) / points


def plain_gan(task: Any) -> dict[str, torch.Tensor]:
    """The weights after 8 steps of a loop with two optimizers, on the batches of the task."""
    torch.manual_seed(0)
    gan = task.model().double()
    rates = (task.lr_generator, gan.generator), (task.lr_critic, gan.critic)
    adams = [torch.optim.Adam(part.parameters(), lr=lr, betas=(0.5, 0.9)) for lr, part in rates]
    for real, noise in batches_of(task, steps=8):
        fake = gan.generator(noise)
        critic = F.softplus(-gan.critic(real)).mean() + F.softplus(gan.critic(fake.detach())).mean()
        of_critic = torch.autograd.grad(critic, list(gan.critic.parameters()))
        told = F.softplus(-gan.critic(fake)).mean()
        of_generator = torch.autograd.grad(told, list(gan.generator.parameters()))
        for part, gradients in ((gan.generator, of_generator), (gan.critic, of_critic)):
            for parameter, gradient in zip(part.parameters(), gradients, strict=True):
                parameter.grad = gradient
        for adam in adams:
            adam.step()
    return dict(gan.state_dict())


def batches_of(task: Any, steps: int) -> list[Any]:
    """The global batches of a task in one process, in float64."""
    with Trainer(task) as trainer:
        found: list[Batch] = list(trainer.batches(steps=steps))
    whole = [[micro.data for leaf in b.leaves for micro in leaf.micros] for b in found]
    return [[torch.cat(parts).double() for parts in zip(*b, strict=True)] for b in whole]


@pytest.mark.slow
def test_mixup_is_the_same_on_any_ranks_and_learns(folder: Path, train: Train) -> None:
    one, two = (
        train(str(folder / "mixup.py"), "epochs=6", ranks=ranks, bitwise=True) for ranks in (1, 2)
    )
    assert one.summary["weights_sha256"] == two.summary["weights_sha256"]
    assert one.summary["eval"]["accuracy"] > 0.9
    plain = train("digits", "epochs=6", bitwise=True)
    assert plain.summary["weights_sha256"] != one.summary["weights_sha256"]


@pytest.mark.slow
def test_the_area_under_the_curve_is_that_of_the_scores(folder: Path, train: Train) -> None:
    one, two = (
        train(str(folder / "auc.py"), "lr=3e-4", ranks=ranks, bitwise=True) for ranks in (1, 2)
    )
    assert one.summary["eval"] == two.summary["eval"] and one.summary["eval"].keys() == {
        *("loss", "accuracy", "auc")
    }
    model, (images, labels) = Digits().model().eval(), Digits().eval_data()
    model.load_state_dict(load_file(one.run_dir / "weights.safetensors"))
    with torch.inference_mode():
        odd = model(images).softmax(dim=1)[:, 1::2].sum(dim=1)
    exact = roc_auc_score(labels % 2, odd)
    assert 0.6 < exact < 0.999 and abs(one.summary["eval"]["auc"] - exact) < 1e-3


@pytest.mark.slow
def test_the_best_weights_are_marked_exported_and_predict(
    folder: Path, train: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    flags = {"eval_every": "epoch", "best": "max:accuracy", "run_dir": "run"}
    train("digits", "lr=0.1", "epochs=4", **flags)
    cli(["checkpoints", "list", "run", "--json"], standalone_mode=False)
    rows = json.loads(capsys.readouterr().out)
    (best,) = (row for row in rows if row["best"])
    assert best["metrics"]["accuracy"] == max(row["metrics"]["accuracy"] for row in rows)
    cli(["checkpoints", "list", "run"], standalone_mode=False)
    (marked,) = (line for line in capsys.readouterr().out.splitlines() if line.endswith("  (best)"))
    assert marked.startswith(best["path"])
    words = ["checkpoints", "export", "run", "--best", "--to", "best.safetensors"]
    cli(words, standalone_mode=False)
    done = subprocess.run(
        [sys.executable, "best_weights.py", "best.safetensors"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"{best['metrics']['accuracy']:.4f} of 360 digits")


STAND_IN = """
import json

def note(name):
    def call(*values, **named):
        with open("said.jsonl", "a") as file:
            file.write(json.dumps([name, *values, named]) + chr(10))
    return call

for name in NAMES.split():
    globals()[name] = note(name)
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("module", "names"),
    [("wandb", "init log finish"), ("mlflow", "start_run log_params log_metrics end_run")],
)
def test_a_tracker_hears_of_every_step_once(
    module: str, names: str, folder: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From rank 0 alone, each step under the number of steps that are done."""
    (folder / f"{module}.py").write_text(STAND_IN.replace("NAMES", repr(names)))
    monkeypatch.chdir(folder)
    train("trackers.py", f"tracker={module}", ranks=2, steps=3, eval_every="2", run_dir="run")
    said = [json.loads(line) for line in Path("said.jsonl").read_text().splitlines()]
    calls = [name for name, *_ in said]
    assert calls[0] == names.split()[0] and calls[-1] == names.split()[-1]
    logged = [(values[0], named["step"]) for _, *values, named in said if "step" in named]
    assert [step for _, step in logged] == [1, 2, 2, 3]
    assert "loss" in logged[0][0] and "evaluation/accuracy" in logged[2][0]
