"""The programs that read images train on small made data, and tell what is missing or damaged."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from allranks.errors import ProgramError, RequestError
from allranks.job.run_folder import read_rows
from allranks.programs.cifar10 import Cifar10
from allranks.programs.imagenet import ImageNet
from allranks.programs.mnist import Fashion, Mnist
from allranks.programs.mnist_data import MNIST
from allranks.programs.readers.arrays import RECORD_BYTES
from allranks.programs.readers.stream import Remote
from conftest import Train
from record_writers import write_idx


def made(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)


def grey_images(folder: Path, samples: int) -> None:
    """IDX files of images whose label is how bright they are."""
    folder.mkdir()
    for part in ("train", "t10k"):
        labels = (np.arange(samples) % 10).astype(np.uint8)
        images = np.minimum(made(samples, 28, 28) // 4 + 19 * labels[:, None, None], 255)
        write_idx(folder / f"{part}-images-idx3-ubyte", images.astype(np.uint8))
        write_idx(folder / f"{part}-labels-idx1-ubyte", labels)


def cifar(folder: Path) -> None:
    folder.mkdir()
    for name, samples in (
        ("data_batch_1.bin", 30),
        ("data_batch_2.bin", 18),
        ("test_batch.bin", 9),
    ):
        records = made(samples, RECORD_BYTES)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.tobytes())


def photographs(folder: Path) -> None:
    """Two classes of small JPEG files, 8 to train on and 4 to evaluate."""
    for part, samples in (("train", 4), ("val", 2)):
        for name in ("cat", "dog"):
            (folder / part / name).mkdir(parents=True)
            for n in range(samples):
                image = Image.fromarray(made(30 + n, 40, 3, seed=n) // 2 + 100 * (name == "cat"))
                image.save(folder / part / name / f"{n}.jpg")


@pytest.mark.slow
@pytest.mark.parametrize("program", ["mnist", "fashion"])
def test_the_digits_and_the_garments(train: Train, tmp_path: Path, program: str) -> None:
    grey_images(tmp_path / program, 64)
    result = train(program, f"data={tmp_path}", "batch_size=16", ranks=2, steps=4).summary
    assert result["steps"] == 4 and result["eval"]["accuracy"] > 0.1


@pytest.mark.slow
def test_cifar10_gives_equal_bits_on_one_and_two_ranks(train: Train, tmp_path: Path) -> None:
    """Augmented, read in the step and beside it, and into a second epoch."""
    cifar(tmp_path / "cifar10")

    def outcome(ranks: int, workers: int) -> tuple[object, ...]:
        flags = {"ranks": ranks, "loader_workers": workers, "bitwise": True, "steps": 3}
        settings = (f"data={tmp_path}", "batch_size=24", "shards=4", "epochs=2")
        summary = train("cifar10", *settings, **flags).summary
        return summary["weights_sha256"], summary["train_loss"], summary["eval"]

    assert outcome(2, 1) == outcome(1, 0)


SMALL = f"{Path(__file__).with_name('small_programs.py')}:Small"
IMAGENET = "batch_size=4", "shards=2", "classes=2", "size=16"


@pytest.mark.slow
def test_imagenet(train: Train, tmp_path: Path) -> None:
    """ResNet-50 on one rank; on several ranks goes a smaller model, below."""
    photographs(tmp_path / "imagenet")
    result = train("imagenet", f"data={tmp_path}", *IMAGENET, steps=1)
    assert result.summary["eval"]["top5_accuracy"] == 1  # of two classes


@pytest.mark.slow
def test_imagenet_draws_the_same_views_on_every_number_of_ranks(
    train: Train, tmp_path: Path
) -> None:
    """By threads or in the step; and other ones in another epoch, and with another seed."""
    photographs(tmp_path / "imagenet")

    def losses(**flags: int) -> list[float]:
        run = train(SMALL, f"data={tmp_path}", *IMAGENET, "lr=0", "epochs=2", bitwise=True, **flags)
        return [row["loss"] for row in read_rows(run.run_dir / "metrics.jsonl")]

    one = losses()
    assert losses(ranks=2, loader_workers=2) == one
    assert losses(seed=1) != one
    assert sum(one[:2]) != pytest.approx(sum(one[2:]), rel=1e-6)  # the same photographs twice


def test_the_rates_of_imagenet_are_those_of_goyal(tmp_path: Path) -> None:
    photographs(tmp_path / "imagenet")
    task = ImageNet(data=str(tmp_path), batch_size=512)  # an epoch is one step
    golden = {0: 1, 1: 1.2, 5: 2, 29: 2, 30: 0.2, 59: 0.2, 60: 0.02, 79: 0.02, 80: 0.002}
    for step, factor in golden.items():
        assert task.schedule(step) == pytest.approx(factor), step


def test_the_rates_of_cifar10_are_those_of_he(tmp_path: Path) -> None:
    cifar(tmp_path / "cifar10")
    task = Cifar10(data=str(tmp_path), batch_size=16, epochs=4)  # 3 steps each
    factors = [1] * 6 + [0.1] * 3 + [0.01] * 3
    assert [task.schedule(step) for step in range(12)] == pytest.approx(factors)


def test_an_augmented_image_is_shifted_and_mirrored(tmp_path: Path) -> None:
    image = made(3, 32, 32).astype(np.float32)
    around = np.zeros((3, 40, 40), np.float32)
    around[:, 4:36, 4:36] = image
    shifted = [around[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    possible = {view.tobytes() for part in shifted for view in (part, part[..., ::-1])}
    seen = set()
    for seed in range(1000):
        view, label = Cifar10().augment((image, 7), np.random.Generator(np.random.Philox(seed)))
        assert view.flags.c_contiguous and label == 7
        seen.add(view.tobytes())
    assert seen == possible


@pytest.mark.slow
def test_a_damaged_photograph_ends_the_job_or_is_counted(train: Train, tmp_path: Path) -> None:
    photographs(tmp_path / "imagenet")
    path = tmp_path / "imagenet" / "train" / "cat" / "2.jpg"
    path.write_bytes(path.read_bytes()[:-400])
    settings = (f"data={tmp_path}", *IMAGENET)
    place = f"{path}, bytes 0 to {path.stat().st_size}: image file is truncated"
    with pytest.raises((RequestError, ProgramError), match=re.escape(place)):
        train(SMALL, *settings, ranks=2, loader_workers=1, steps=2)
    outcomes = set()
    for ranks in (1, 2):
        flags = {"ranks": ranks, "loader_workers": ranks - 1, "steps": 2, "bitwise": True}
        run = train(SMALL, *settings, "on_bad_record=skip", **flags)
        outcomes.add(run.summary["weights_sha256"])
        logs = "".join(log.read_text() for log in (run.run_dir / "logs").glob("rank-*.log"))
        assert f"bad record passed over: {place}" in logs
    assert len(outcomes) == 1


def test_missing_data_is_named(train: Train, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=re.escape(f"no {tmp_path}/imagenet/train")):
        train("imagenet", f"data={tmp_path}", steps=1)
    for task, files in (
        (Mnist, ["mnist/train-images-idx3-ubyte", "mnist/train-images-idx3-ubyte.gz"]),
        (Fashion, ["fashion/train-images-idx3-ubyte"]),
        (Cifar10, ["cifar10/test_batch.bin", "cifar10/cifar-10-binary.tar.gz"]),
    ):
        with pytest.raises(RequestError) as caught:
            task(data=str(tmp_path), download=False).train_data()
        for file in files:
            assert str(tmp_path / file) in caught.value.found


def test_without_a_network_all_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = "http://127.0.0.1:9"
    grey_images(tmp_path / "mnist", 10)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").unlink()  # the others are taken as they are
    here = tuple(Remote(f"{nobody}/{r.name}", r.digest) for r in MNIST.published)
    monkeypatch.setattr(Mnist, "collection", dataclasses.replace(MNIST, published=here))
    with pytest.raises(RequestError) as caught:
        Mnist(data=str(tmp_path)).train_data()
    assert "t10k-labels-idx1-ubyte.gz (md5:ec29112d" in caught.value.do
    assert caught.value.do.count("md5:") == 1
    shutil.rmtree(tmp_path / "mnist")
    with pytest.raises(RequestError) as caught:
        Mnist(data=str(tmp_path)).eval_data()
    assert caught.value.do.count("md5:") == 4 and str(tmp_path / "mnist") in caught.value.do


def test_a_packed_file_has_to_be_the_published_one(tmp_path: Path) -> None:
    (tmp_path / "fashion").mkdir()
    write_idx(tmp_path / "fashion" / "train-labels-idx1-ubyte.gz", made(4))
    with pytest.raises(RequestError, match="25c81989df183df01b3e8a0aad5dffbe"):
        Fashion(data=str(tmp_path), download=False).train_data()


def test_classes_have_to_agree(tmp_path: Path) -> None:
    photographs(tmp_path / "imagenet")
    with pytest.raises(RequestError, match="--set classes=2"):
        ImageNet(data=str(tmp_path)).train_data()
    (tmp_path / "imagenet" / "val" / "dog").rename(tmp_path / "imagenet" / "val" / "cow")
    with pytest.raises(RequestError, match="cow, dog"):
        ImageNet(data=str(tmp_path), classes=2).eval_data()
