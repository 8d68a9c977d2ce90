"""A checkpoint as a folder of transformers or of peft: plain `from_pretrained` reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

import huggingface_tasks as tasks
from allranks.checkpoint.export import weights_of
from allranks.checkpoint.format import read_manifest, step_folder
from allranks.cli.checkpoints import _export_options, export_model
from allranks.errors import RequestError
from allranks.huggingface.export import check_names, without_weights
from allranks.job.units import parse_bytes
from allranks.launcher.processes.fork_server_client import ForkServer
from test_huggingface import nothing_left, server  # noqa: F401  fixtures

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft asks it
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.usefixtures("nothing_left"),
]
WHOLE = {"dtype": "", "shard_bytes": 5 * 10**9}
Exported = Callable[..., tuple[Path, Path]]


@pytest.fixture
def exported(train: Callable[..., Any], server: ForkServer, tmp_path: Path) -> Exported:  # noqa: F811
    """Train a task for one step, and export its checkpoint; the folder, and that of the run."""

    def call(name: str, strategy: str, ranks: int, **options: Any) -> tuple[Path, Path]:
        flags = {"strategy": strategy, "ranks": ranks, "steps": 1, "checkpoint_every": 1}
        run = train(f"huggingface_tasks:{name}", **flags).run_dir
        folder = step_folder(run / "checkpoints", 1)
        export_model(folder, tmp_path / "model", "huggingface", server, {**WHOLE, **options})
        return tmp_path / "model", run

    return call


def read(task: Any, folder: Path) -> Any:
    """What plain transformers reads, without a name too many or too few."""
    kind = getattr(transformers, task.auto)
    model, names = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(names.values()), names
    return model.eval()


def output(task: Any, model: Any) -> torch.Tensor:
    data = task.train_data()
    torch.manual_seed(0)  # of the masks
    with torch.no_grad():
        return model(**task.inputs(task.collate([data[0], data[1]])))["logits"]


def trained(task: Any, run: Path) -> Any:
    """The model of the task, with the weights at the end of the run."""
    model = task.model()
    model.load_state_dict(load_file(run / "weights.safetensors"))
    return model.eval()


@pytest.mark.parametrize(
    ("name", "strategy", "ranks", "shard_bytes"),
    [
        ("GPT2", "fsdp", 3, 20_000),  # tied weights, in several files
        ("Mixtral", "zero2", 2, 20_000),  # its experts are one tensor, and several in files
        ("Bert", "1f1b", 3, 10**9),  # tied weights in two stages
        ("T5", "tensor", 2, 10**9),  # three names for one weight
        ("ViT", "ddp", 2, 10**9),  # other names in files
    ],
)
def test_transformers_reads_the_model(
    name: str, strategy: str, ranks: int, shard_bytes: int, exported: Exported
) -> None:
    task = getattr(tasks, name)()
    folder, run = exported(name, strategy, ranks, shard_bytes=shard_bytes)
    model = read(task, folder)
    assert torch.equal(output(task, model), output(task, trained(task, run)))
    assert getattr(model.config, "use_cache", None) == getattr(task.config(), "use_cache", None)
    files = sorted(folder.glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes < 10**9)
    assert all(path.stat().st_size < shard_bytes + 10_000 for path in files)
    model.save_pretrained(run / "again")  # by transformers: the same names and bits, once each
    wanted = load_file(run / "again" / "model.safetensors")
    parts = [load_file(path) for path in files]
    assert sum(map(len, parts)) == len(wanted)
    assert all(torch.equal(wanted[name], part[name]) for part in parts for name in part)
    assert transformers.AutoTokenizer.from_pretrained(folder)("w1 w2")["input_ids"] == [5, 6]
    with safe_open(files[0], "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_another_type_of_numbers(exported: Exported) -> None:
    task = tasks.Llama()
    folder, run = exported("Llama", "fsdp", 2, dtype="bfloat16")
    model = read(task, folder)
    assert model.dtype == torch.bfloat16
    assert torch.equal(output(task, model), output(task, trained(task, run).to(torch.bfloat16)))


@pytest.mark.parametrize(
    ("name", "strategy"), [("LoRA", "zero2"), ("TwoAdapters", "fsdp"), ("OwnHead", "tensor")]
)
def test_peft_reads_the_adapters(name: str, strategy: str, exported: Exported) -> None:
    """And nothing else is written; several adapters are in folders, as peft writes them."""
    task = getattr(tasks, name)()
    folder, run = exported(name, strategy, 2)
    whole = trained(task, run)
    base = tasks.GPT2().model()
    base.load_state_dict(
        {
            name.removeprefix("base_model.model.")
            .replace(".base_layer", "")
            .replace(".original_module", ""): tensor
            for name, tensor in whole.state_dict().items()
            if not any(part in name for part in ("lora_", "modules_to_save"))
        }
    )
    found = peft.PeftModel.from_pretrained(base, folder)
    if name == "TwoAdapters":
        found.load_adapter(folder / "second", "second")
        found.base_model.set_adapter(["default", "second"])
    assert torch.equal(output(task, found.eval()), output(task, whole))
    whole.save_pretrained(run / "again")
    for path in (run / "again").rglob("adapter_*"):
        assert path.read_bytes() == (folder / path.relative_to(run / "again")).read_bytes()


def test_what_cannot_be_exported_leaves_nothing(
    train: Callable[..., Any],
    server: ForkServer,  # noqa: F811
    tmp_path: Path,
) -> None:
    """A task of torch alone, a model that is another one by now, and a target that is there."""

    def checkpoint(program: str, *settings: str) -> Path:
        run = train(program, *settings, steps=1, checkpoint_every=1).run_dir
        return step_folder(run / "checkpoints", 1)

    digits, model = checkpoint("digits"), checkpoint("huggingface_tasks:GPT2")
    (tmp_path / "there").mkdir()
    before = set(tmp_path.rglob("*"))
    for folder, target, words in (
        (digits, "one", r"no task of allranks\.huggingface"),
        (model, "there", "a folder is there already"),
        (model, "nowhere/one", "No such file"),
    ):
        with pytest.raises(RequestError, match=words) as refused:
            export_model(folder, tmp_path / target, "huggingface", server, WHOLE)
        assert all(f"{part}:" in str(refused.value) for part in ("asked", "found", "why", "do"))
    with pytest.raises(RequestError, match="keras"):
        export_model(model, tmp_path / "one.keras", "keras", server)
    with pytest.raises(RequestError, match="absent in the checkpoint"):
        check_names(without_weights(tasks.LoRA()), weights_of(read_manifest(model)), tmp_path)
    assert set(tmp_path.rglob("*")) == before


def test_options_are_those_of_the_format() -> None:
    assert parse_bytes("1.5GiB") == 3 * 2**29
    assert [parse_bytes(text) for text in ("5GB", "20KB", "7B")] == [5 * 10**9, 20_000, 7]
    for form, dtype, size, words in (
        ("safetensors", "bfloat16", None, "--format safetensors"),
        ("keras", None, "1GB", "--format keras"),
        ("huggingface", None, "1 giga", "'1 giga'"),
        ("huggingface", None, "0B", "'0B'"),
    ):
        with pytest.raises(RequestError, match=words):
            _export_options(form, dtype, size)
