"""Whatever happens to the files of a checkpoint: it is never loaded wrong, and the older one is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allranks.checkpoint.checkpointer import Loaded
from allranks.checkpoint.format import NAME, About, digest, read_layout, read_manifest, step_folder
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.torch import Task, Trainer
from allranks.torch.checkpoint.saving import TorchCheckpointer
from allranks.torch.comm.comm import Comm
from checkpoint_workers import check, own, state

FILE = "rank-000-of-001.a0.safetensors"
Told = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints, of steps 1 and 2."""
    path = tmp_path / "checkpoints"
    checkpointer = TorchCheckpointer(path, Comm())
    for step in (1, 2):
        checkpointer.save(step, state(step), own(step, 0), About(), blocking=True)
    return path


def load(folder: Path, *sources: Path) -> tuple[Loaded | None, Told]:
    told: Told = []
    checkpointer = TorchCheckpointer(
        folder, Comm(), report=lambda event, **values: told.append((event, values))
    )
    return checkpointer.load(list(sources or [folder])), told


def falls_back(folder: Path, *names: str) -> None:
    """Step 2 is skipped, its problem names the file; step 1 comes; step 2 is set aside."""
    loaded, told = load(folder)
    assert loaded is not None and loaded.step == 1
    check(loaded, 0, has_own=True)
    ((event, values),) = told
    assert event == "checkpoint_skipped" and values["step"] == 2
    for name in names:
        assert name in " ".join(values["problems"])
    assert Path(values["set_aside"]).name == "step-00000002.bad-1"
    assert not step_folder(folder, 2).exists()


def region(name: str) -> Callable[[bytes, int], int]:
    """Where in a file: `data_start` is where its header ends."""
    return {
        "length of the header": lambda text, data_start: 0,
        "last byte of the length": lambda text, data_start: 7,
        "begin of the header": lambda text, data_start: 8,
        "middle of the header": lambda text, data_start: data_start // 2,
        "end of the header": lambda text, data_start: data_start - 1,
        "begin of the data": lambda text, data_start: data_start,
        "middle of the data": lambda text, data_start: (data_start + len(text)) // 2,
        "end of the data": lambda text, data_start: len(text) - 1,
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        *("length of the header", "last byte of the length", "begin of the header"),
        *("middle of the header", "end of the header"),
        *("begin of the data", "middle of the data", "end of the data"),
    ],
)
@pytest.mark.parametrize("flip", [0x01, 0x80])
def test_a_flipped_bit_is_found(folder: Path, name: str, flip: int) -> None:
    path = step_folder(folder, 2) / FILE
    text = bytearray(path.read_bytes())
    text[region(name)(text, len(read_layout(path).header))] ^= flip
    path.write_bytes(text)
    falls_back(folder, FILE, "digest")


@pytest.mark.parametrize("at", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_flipped_bit_of_the_manifest_is_found(folder: Path, at: float) -> None:
    """Every single byte of a manifest is tried in test_manifest.py."""
    path = step_folder(folder, 2) / NAME
    text = bytearray(path.read_bytes())
    text[int(at * (len(text) - 1))] ^= 1
    path.write_bytes(text)
    falls_back(folder, NAME)


@pytest.mark.parametrize("name", [FILE, NAME])
@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.999])
def test_a_file_cut_short_is_found(folder: Path, name: str, kept: float) -> None:
    path = step_folder(folder, 2) / name
    text = path.read_bytes()
    path.write_bytes(text[: int(kept * len(text))])
    falls_back(folder, name)


def test_a_longer_file_is_found(folder: Path) -> None:
    with open(step_folder(folder, 2) / FILE, "ab") as file:
        file.write(b"\0")
    falls_back(folder, FILE, "bytes instead of")


def test_a_missing_file_is_found(folder: Path) -> None:
    (step_folder(folder, 2) / FILE).unlink()
    falls_back(folder, f"{FILE}: missing")


@pytest.mark.parametrize("name", [FILE, NAME])
def test_a_file_of_another_step_is_found(folder: Path, name: str) -> None:
    shutil.copy(step_folder(folder, 1) / name, step_folder(folder, 2) / name)
    falls_back(folder, name)


def resealed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Digests that hold, over something that is wrong: no accident,
    but never loaded all the same."""
    path = step_folder(folder, 2)
    values = json.loads((path / NAME).read_bytes())
    values.pop("blake2b")
    change(values)
    content = (path / FILE).read_bytes()
    values["files"][FILE] = {"bytes": len(content), "blake2b": digest(content)}
    body = json.dumps(values)[:-1].encode()
    (path / NAME).write_bytes(body + b',"blake2b":"' + digest(body).encode() + b'"}\n')


def test_a_file_that_is_not_what_the_manifest_says_is_found(folder: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        tensor = values["tensors"]["common/half"]
        tensor["shape"] = [4]
        tensor["chunks"][0]["sizes"] = [4]

    resealed(folder, change)
    falls_back(folder, FILE, "common/half")


def test_a_tensor_of_another_type_is_found(folder: Path) -> None:
    resealed(folder, lambda values: values["tensors"]["common/half"].update(dtype="F16"))
    falls_back(folder, FILE, "common/half")


def test_a_tensor_that_is_not_in_the_file_is_found(folder: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values["tensors"]["common/more"] = values["tensors"]["common/half"]

    resealed(folder, change)
    falls_back(folder, FILE, "common/more")


@pytest.mark.parametrize(
    "values",
    [None, {"common": {}}, {"common": {}, "own": []}, {"common": {"$tensor": "x"}, "own": [None]}],
)
def test_values_that_are_no_state_are_found(folder: Path, values: Any) -> None:
    resealed(folder, lambda manifest: manifest.update(values=values))
    falls_back(folder)


def test_a_header_that_lies_is_found(folder: Path) -> None:
    """The digest is right, and the file is no file of tensors."""
    path = step_folder(folder, 2) / FILE
    text = path.read_bytes()
    path.write_bytes(b"\xff" * 8 + text[8:])
    resealed(folder, lambda values: None)
    falls_back(folder, FILE)


def test_nothing_that_is_whole_is_nothing(folder: Path) -> None:
    for step in (1, 2):
        (step_folder(folder, step) / FILE).unlink()
    loaded, told = load(folder)
    assert loaded is None
    assert [values["step"] for _, values in told] == [2, 1]
    assert load(folder) == (None, []), "set aside: not tried again"


def test_what_lies_elsewhere_is_left_as_it_is(folder: Path, tmp_path: Path) -> None:
    (step_folder(folder, 2) / FILE).write_bytes(b"")
    loaded, told = load(tmp_path / "mine", tmp_path / "nowhere", folder)
    assert loaded is not None and loaded.step == 1
    assert told[0][1]["set_aside"] is None and step_folder(folder, 2).exists()
    single, _ = load(tmp_path / "mine", step_folder(folder, 1))
    assert single is not None and single.step == 1
    assert load(tmp_path / "mine", step_folder(folder, 2))[0] is None
    never, told = load(tmp_path / "mine", step_folder(folder, 9))
    assert never is None and "never committed" in told[0][1]["problems"][0]


def test_a_model_of_another_shape_is_refused(folder: Path) -> None:
    checkpointer = TorchCheckpointer(folder, Comm())
    for template in (torch.zeros(6, dtype=torch.bfloat16), torch.zeros(5)):
        with pytest.raises(RequestError, match="common/half"):
            checkpointer.load([folder], {"common/half": template})
    assert step_folder(folder, 2).exists(), "the checkpoint is not to blame"
    template = torch.zeros(5, dtype=torch.bfloat16)
    loaded = checkpointer.load([folder], {"common/half": template})
    assert loaded is not None and loaded.step == 2 and bool((template == 2).all())


def test_no_pickle_is_read_or_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("save", "load"):
        monkeypatch.setattr(torch, name, None)
    manifest = read_manifest(step_folder(folder, 2))
    assert set(manifest.files) == {FILE}
    assert {path.name for path in step_folder(folder, 2).iterdir()} == {FILE, NAME}
    loaded, _ = load(folder)
    assert loaded is not None and loaded.step == 2


@dataclass(kw_only=True)
class Small(Task):
    batch_size: int = 16

    def model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.1)

    def train_data(self) -> Any:
        return torch.ones(64, 4), torch.zeros(64, dtype=torch.long)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with checkpoints of steps 2 and 4."""
    path = tmp_path_factory.mktemp("run") / "made"
    with Trainer(Small(), Job(run_dir=str(path), checkpoint_every=2, steps=4)) as trainer:
        for batch in trainer.batches():
            trainer.save_if_due(trainer.step(batch))
    return path


def set_in(*keys: Any) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        for key in keys[:-2]:
            values = values[key]
        values[keys[-2]] = keys[-1]

    return change


def reseal(manifest: Path, change: Callable[[Any], None]) -> None:
    values = json.loads(manifest.read_text())
    del values["blake2b"]
    change(values)
    body = json.dumps(values)[:-1].encode()
    manifest.write_bytes(body + b',"blake2b":"' + digest(body).encode() + b'"}\n')


def huge(values: Any) -> None:
    tensor = values["tensors"]["common/model/bias"]
    tensor["shape"] = [1 << 40]
    tensor["chunks"][0] |= {"offsets": [0], "sizes": [1 << 40]}


COMMON = ("values", "common")
LIES = {
    "a shape": huge,
    "moments": set_in(*COMMON, "optimizer", "state", "bias", 7),
    "no parameter": set_in(*COMMON, "optimizer", "state", {"nobody": {}}),
    "guard": set_in(*COMMON, "guard", 7),
    "norms": set_in(*COMMON, "guard", "norms", ["abc"]),
    "course": set_in(*COMMON, "course", []),
    "scores": set_in(*COMMON, "course", "found", {"accuracy": "abc"}),
    "trained": set_in(*COMMON, "trained", "now", {}),
    "model": set_in(*COMMON, "model", None),
    "updates": set_in(*COMMON, "progress", "updates", "abc"),
    "fewer than none": set_in(*COMMON, "progress", "samples_seen", -1),
    "another step": set_in(*COMMON, "progress", "batch_index", 3),
    "streams": set_in("values", "own", 0, "random", "numpy_position", 7),
    "job": set_in("job", "strategy", 0.5),
}


def resumed(folder: Path) -> int | None:
    with Trainer(Small(), Job(run_dir=str(folder), checkpoint_every=2, steps=4)) as trainer:
        return trainer.resume()


@pytest.mark.filterwarnings("ignore:Job.checkpoint_every")
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_under_a_digest_that_holds_is_passed_over(
    run: Path, lie: str, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "run")
    checkpoints = tmp_path / "run/checkpoints"
    reseal(step_folder(checkpoints, 4) / NAME, LIES[lie])
    assert resumed(tmp_path / "run") == 2
    assert (checkpoints / "step-00000004.bad-1").exists()


@pytest.mark.filterwarnings("ignore:Job.checkpoint_every")
def test_where_no_state_can_be_taken_up_nothing_starts_anew_or_is_set_aside(
    run: Path, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "run")
    checkpoints = tmp_path / "run/checkpoints"
    for step in (2, 4):
        reseal(step_folder(checkpoints, step) / NAME, LIES["guard"])
    with pytest.raises(RequestError, match=r"step-00000004\nfound: its state cannot be loaded"):
        resumed(tmp_path / "run")
    assert {path.name for path in checkpoints.iterdir()} == {"step-00000002", "step-00000004"}


@pytest.mark.filterwarnings("ignore:Job.checkpoint_every")
def test_weights_of_another_type_of_number_are_refused(run: Path, tmp_path: Path) -> None:
    """As those of another shape are: `load_state_dict` would round them without a word."""
    shutil.copytree(run, tmp_path / "run")
    folder = step_folder(tmp_path / "run/checkpoints", 4)
    file = folder / FILE
    length = len(read_layout(file).header)
    header = file.read_bytes()[:length]
    entries = json.loads(header[8:])
    entries["common/model/bias"]["dtype"] = "I32"
    text = json.dumps(entries, separators=(",", ":")).encode().ljust(length - 8)
    file.write_bytes(header[:8] + text + file.read_bytes()[length:])

    def lie(values: Any) -> None:
        values["tensors"]["common/model/bias"]["dtype"] = "I32"
        values["files"][FILE]["blake2b"] = digest(file.read_bytes())

    reseal(folder / NAME, lie)
    with pytest.raises(RequestError, match=r"other types of number: bias is torch.float32, was "):
        resumed(tmp_path / "run")
