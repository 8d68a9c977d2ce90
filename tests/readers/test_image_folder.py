"""Folders of images: the order of classes and files, the views, and pictures that are damaged."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from allranks.errors import RequestError
from allranks.programs.readers.images import (
    CENTRE,
    DEVIATION,
    MEAN,
    ImageFolder,
    centre_view,
    random_box,
    training_view,
)
from allranks.programs.readers.stream import BadRecord

COLOURS = {"b/2.png": (200, 10, 10), "b/10.PNG": (10, 200, 10), "a/x/1.jpeg": (10, 10, 200)}
ORDER = ["a/x/1.jpeg", "b/10.PNG", "b/2.png"]  # as text, not as numbers


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, colour in COLOURS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), colour).save(tmp_path / name, quality=95)
    (tmp_path / "b" / "notes.txt").write_text("no image")
    return tmp_path


def test_classes_and_files_are_numbered_in_sorted_order(folder: Path) -> None:
    data = ImageFolder(folder, 8)
    assert data.classes == ["a", "b"]
    assert [str(Path(data.path(n)).relative_to(folder)) for n in range(len(data))] == ORDER
    for (image, label), name in zip(data, ORDER, strict=True):
        assert label == (name[0] == "b") and image.shape == (3, 8, 8)
        assert image.dtype == np.float32 and image.flags.c_contiguous
        wanted = (np.array(COLOURS[name]) / 255 - MEAN) / DEVIATION
        assert np.abs(image - wanted[:, None, None]).max() < 0.05  # JPEG is not exact


def gradient(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downwards; blue is 0."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return Image.fromarray(np.stack([x, y, 0 * x], axis=-1).astype(np.uint8))


def test_the_view_for_evaluation_is_the_centre() -> None:
    image = gradient(200, 100)
    view = np.asarray(centre_view(image, 56))
    side = 100 * CENTRE
    assert view.shape == (56, 56, 3)
    assert view[:, :, 0].mean() == pytest.approx(99.5, abs=0.6)
    assert view[:, :, 1].mean() == pytest.approx(49.5, abs=0.6)
    assert np.ptp(view[0, :, 0]) == pytest.approx(side, abs=3)


def test_the_view_for_training_follows_from_its_generator_alone() -> None:
    image = gradient(200, 100)
    views = [np.asarray(training_view(image, 16, generator(seed))) for seed in range(40)]
    np.random.seed(1)
    again = [np.asarray(training_view(image, 16, generator(seed))) for seed in range(40)]
    np.testing.assert_array_equal(views, again)
    assert len({view.tobytes() for view in views}) == 40
    mirrored = sum(int(view[0, 0, 0]) > view[0, -1, 0] for view in views)
    assert 8 < mirrored < 32
    assert all(int(view[-1, 0, 1]) > view[0, 0, 1] for view in views)  # never upside down


@given(width=st.integers(1, 600), height=st.integers(1, 600), seed=st.integers(0, 2**32))
def test_a_random_part_lies_in_the_image(width: int, height: int, seed: int) -> None:
    left, upper, right, lower = random_box(width, height, generator(seed))
    assert 0 <= left < right <= width and 0 <= upper < lower <= height


def test_random_parts_cover_areas_and_shapes_as_published() -> None:
    boxes = np.array([random_box(500, 400, generator(seed)) for seed in range(2000)])
    wide, high = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area = wide * high / (500 * 400)
    assert 0.079 < area.min() < 0.09 and 0.9 < area.max() <= 1
    assert 0.74 < (wide / high).min() < 0.76 and 1.32 < (wide / high).max() < 1.34


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_pictures_of_all_kinds_are_seen_in_three_colours(tmp_path: Path, mode: str) -> None:
    (tmp_path / "c").mkdir()
    ending = "jpg" if mode == "CMYK" else "png"
    gradient(50, 20).convert(mode).save(tmp_path / "c" / f"1.{ending}")
    assert ImageFolder(tmp_path, 8)[0][0].shape == (3, 8, 8)


def damaged(folder: Path) -> Path:
    """The second of the pictures, without its end."""
    path = folder / ORDER[1]
    gradient(64, 64).save(path)
    path.write_bytes(path.read_bytes()[:-60])
    return path


def test_a_damaged_picture_is_named(folder: Path) -> None:
    path = damaged(folder)
    with pytest.raises(BadRecord, match=rf"10.PNG, bytes 0 to {path.stat().st_size}: ") as caught:
        ImageFolder(folder, 8)[1]
    assert caught.value.file == str(path)
    path.write_bytes(b"GIF89a")
    with pytest.raises(BadRecord, match="cannot identify image file"):
        ImageFolder(folder, 8)[1]
    path.unlink()
    data = ImageFolder(folder, 8)
    (folder / ORDER[2]).unlink()
    with pytest.raises(BadRecord, match=r"2.png, byte 0: cannot be read: No such file"):
        data.read(1)


def test_the_next_good_picture_stands_in_for_a_damaged_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged(folder)
    data = ImageFolder(folder, 8, on_bad_record="skip")
    (folder / ORDER[2]).unlink()  # and the next one cannot be read: the first stands in for both
    for number in (1, 2):
        image, label = data.decode(data.read(number), generator(3))
        wanted, _ = data.decode(data.read(0), generator(3))
        np.testing.assert_array_equal(image, wanted)
        assert label == 0
    assert data.bad_records.count == 2 == capsys.readouterr().err.count("bad record passed over")
    assert [Path(e.file).name for e in data.bad_records.listed] == ["10.PNG", "2.png"]


def test_threads_may_share_a_data_set(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged(folder)
    data = ImageFolder(folder, 8, on_bad_record="skip")

    def sample(number: int) -> bytes:
        image, label = data.decode(data.read(number % 3), generator(number))
        return bytes(image) + bytes([label])

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(sample, range(60)))
    assert found == [sample(number) for number in range(60)]
    assert data.bad_records.count == 1 == capsys.readouterr().err.count("passed over")


def test_a_folder_without_pictures_is_no_class(folder: Path) -> None:
    (folder / "c").mkdir()
    with pytest.raises(RequestError, match=r"no file \*.jpg, .* in c"):
        ImageFolder(folder)
    with pytest.raises(RequestError, match=r"no file .* in "):
        ImageFolder(folder / "c")
    with pytest.raises(RequestError, match="nowhere"):
        ImageFolder(folder / "nowhere")
