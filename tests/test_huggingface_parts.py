"""Folders of `save_pretrained`: each rank reads its parts, with the bits of a model read whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import huggingface_tasks as tasks
from allranks.errors import RequestError
from allranks.huggingface.parts import weights_in
from allranks.job.job import Job
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.torch.model.deferred_init import MetaModel
from allranks.torch.random.keyed_rng import seed_generators
from allranks.torch.trainer import Trainer
from conftest import MODULES
from deferred_workers import measured

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft asks it
]

SEED = 3


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """A fork server that has imported these tasks once."""
    with ForkServer((*MODULES, "huggingface_tasks:__name__")) as running:
        yield running


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread of a progress bar stays."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # transformers sets them
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "1")


def save(name: str, folder: Path, kind: torch.dtype = torch.float32) -> None:
    """Save the model of a task in some shards; that of `BertLabels` has the head of another."""
    torch.manual_seed(7)
    model = getattr(tasks, name)().model()
    if name == "BertLabels":
        model = transformers.BertForMaskedLM(tasks.BertLabels().config())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.to(kind).save_pretrained(folder, max_shard_size="8KB")


def read_whole(name: str, folder: Path) -> dict[str, Tensor]:
    """Parameters and buffers as `from_pretrained` alone makes them, in the state of the job."""
    task = getattr(tasks, name)(name=str(folder))
    seed_generators(SEED)
    torch.manual_seed(SEED)
    kind = getattr(transformers, task.auto)
    model = kind.from_pretrained(folder, config=task.config(), dtype=torch.float32)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("name", ["GPT2", "Llama", "BertLabels", "T5", "ViT", "Mixtral", "LoRA"])
def test_reading_in_parts_is_reading_whole(name: str, tmp_path: Path) -> None:
    """In bfloat16 too, with heads that are drawn and buffers that no file has."""
    save("GPT2" if name == "LoRA" else name, tmp_path, torch.bfloat16)
    task = getattr(tasks, name)(name=str(tmp_path))
    with Trainer(task, Job(strategy="single", seed=SEED)) as trainer:
        model, notes = trainer.model, " ".join(trainer.model_notes)
        found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert model.training
    assert ("every rank reads all" in notes) == (name in ("Mixtral", "LoRA"))
    if name == "LoRA":
        return
    wanted = read_whole(name, tmp_path)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


@pytest.mark.parametrize(
    ("strategy", "ranks", "name"),
    [
        ("fsdp", 2, "GPT2"),
        ("fsdp", 3, "BertLabels"),
        ("hsdp:shard=2", 4, "Llama"),
        ("tensor", 2, "Llama"),
        ("tensor", 3, "BertLabels"),
        ("1f1b", 2, "GPT2"),
        ("1f1b", 3, "BertLabels"),
        ("zero2", 2, "ViT"),
    ],
)
def test_ranks_start_with_the_bits_of_the_folder(
    strategy: str, ranks: int, name: str, train: Callable[..., Any], tmp_path: Path
) -> None:
    """A step at a rate of 0 leaves all weights as they were read."""
    save(name, tmp_path / "model")
    settings = (f"name={tmp_path / 'model'}", "lr=0")
    run = train(
        f"huggingface_tasks:{name}", *settings, strategy=strategy, ranks=ranks, steps=1, seed=SEED
    )
    found = load_file(run.run_dir / "weights.safetensors")
    for key, tensor in read_whole(name, tmp_path / "model").items():
        assert torch.equal(found.get(key, tensor), tensor), key
    assert len(found) > 10


BREAKS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a shard is missing": (lambda folder: shards(folder)[1].unlink(), "not there"),
    "a shard has no such tensor": (
        lambda folder: save_file({"other": torch.zeros(1)}, shards(folder)[1]),
        "no tensor 'transformer",
    ),
    "a shard is cut off": (lambda folder: cut_off(shards(folder)[1]), "Error"),
    "the index is no index": (lambda folder: index(folder).write_text("[]"), "index.json"),
    "there are no weights": (
        lambda folder: [path.unlink() for path in (*shards(folder), index(folder))],
        "neither model.safetensors nor model.safetensors.index.json",
    ),
}


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def index(folder: Path) -> Path:
    return folder / "model.safetensors.index.json"


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize("break_name", BREAKS)
def test_a_broken_folder_is_refused_in_four_parts(break_name: str, tmp_path: Path) -> None:
    save("GPT2", tmp_path)
    spoil, words = BREAKS[break_name]
    spoil(tmp_path)
    task = tasks.GPT2(name=str(tmp_path))
    with pytest.raises(RequestError, match=words) as refused:
        Trainer(task, Job(strategy="single"))
    assert all(f"{part}:" in str(refused.value) for part in ("asked", "found", "why", "do"))


def test_a_model_of_other_sizes_is_refused(tmp_path: Path) -> None:
    save("GPT2", tmp_path)
    with pytest.raises(RequestError, match=r"shape \(16, 16\) there, \(8, 16\) in the model"):
        Trainer(tasks.GPT2(name=str(tmp_path), positions=8), Job(strategy="single"))


def test_a_rank_has_memory_for_its_parts_alone(tmp_path: Path) -> None:
    """Of four layers it holds two, in 16 MB of files; reading them allocates nothing more."""
    torch.manual_seed(0)
    layers = [nn.Linear(1000, 1000) for _ in range(4)]
    whole = dict(nn.Sequential(*layers).named_parameters())
    save_file({n: p.detach() for n, p in whole.items()}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(4)))
    weights = weights_in(tmp_path)
    assert weights is not None
    is_local: Callable[[str], bool] = lambda name: name[0] in "12"  # noqa: E731
    with measured() as peak:
        digests = MetaModel(model).fill(
            model,
            weights,
            tasks.GPT2().init,
            lambda _, target, tensor: target.copy_(tensor),  # type: ignore[arg-type, return-value]
            seed=0,
            device=torch.device("cpu"),
            is_local=is_local,
        )
    size = sum(tensor.nbytes for tensor in whole.values())
    assert size / 2 <= peak.bytes < size / 2 + 2**21
    assert digests.keys() == whole.keys()
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, whole[name]) if is_local(name) else tensor.is_meta, name
