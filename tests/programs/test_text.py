"""The program `text`: it learns, the same on any number of ranks,
from every byte of a file once."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from allranks.errors import RequestError
from allranks.job.job import with_settings
from allranks.job.program import find_program
from allranks.programs.text import Text
from allranks.torch.task import Task
from conftest import Train

MEGABYTE = 1_000_000
SMALL = ("context=32", "width=32", "layers=2", "heads=2")


def made_text(size: int) -> bytes:
    """A language of 40 words, of which each is followed by one of six: structure at two levels."""
    draw = random.Random(0)
    syllables = [c + v for c in "bcdfghklmnprst" for v in "aeiou"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(40)]
    followers = {word: draw.sample(words, 6) for word in words}
    text, length, word = [], 0, words[0]
    while length < size:
        word = followers[word][min(int(draw.expovariate(1)), 5)]
        text.append(word + draw.choices((" ", ", ", ".\n"), (18, 1, 1))[0])
        length += len(text[-1])
    return "".join(text).encode()[:size]


def unigram_entropy(text: bytes) -> float:
    """The loss, in nats per byte, of a model that knows how frequent each byte is and no more."""
    counts = np.bincount(np.frombuffer(text, np.uint8))
    shares = counts[counts > 0] / len(text)
    return float(-(shares * np.log(shares)).sum())


@pytest.fixture(scope="session")
def text() -> bytes:
    return made_text(MEGABYTE)


def task(tmp_path: Path, content: bytes, **fields: Any) -> Text:
    path = tmp_path / "some.txt"
    path.write_bytes(content)
    return Text(path=str(path), **fields)


# --- it trains --------------------------------------------------------------------------------


@pytest.mark.slow
def test_four_ranks_learn_more_than_how_frequent_each_byte_is(
    train: Train, tmp_path: Path, text: bytes
) -> None:
    path = tmp_path / "made.txt"
    path.write_bytes(text)
    shape = ("context=16", "width=64", "layers=1", "heads=4", "dropout=0")
    learning = ("batch_size=64", "lr=0.01", "warmup_steps=5", "validation=0.004")
    summary = train("text", f"path={path}", *shape, *learning, ranks=4, steps=60).summary
    assert summary["world_size"] == 4 and summary["steps"] == 60
    assert summary["eval"]["loss"] < 0.75 * unigram_entropy(text)
    assert summary["eval"]["bits_per_byte"] == pytest.approx(summary["eval"]["loss"] / math.log(2))


@pytest.mark.slow
def test_two_ranks_end_with_the_bits_of_one(train: Train, tmp_path: Path, text: bytes) -> None:
    """With dropout, clipping and an uneven last batch:
    81 windows are 3 batches of 24 and one of 9."""
    path = tmp_path / "short.txt"
    path.write_bytes(text[:2900])
    fields = (f"path={path}", *SMALL, "batch_size=24", "warmup_steps=2", "total_steps=6")
    one, two = (
        train("text", *fields, ranks=ranks, bitwise=True, steps=5).summary for ranks in (1, 2)
    )
    assert two["weights_sha256"] == one["weights_sha256"]
    assert two["eval"] == one["eval"]
    assert one["user_randomness"] == []


# --- what it reads ----------------------------------------------------------------------------


@settings(max_examples=30)
@given(content=st.binary(min_size=4, max_size=300), context=st.integers(1, 20))
def test_an_epoch_predicts_every_byte_once(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, context: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    assume(len(content) > context)
    windows = task(folder, content, context=context, validation=0.0).train_data()
    inputs, targets = windows[:, :-1].flatten(), windows[:, 1:].flatten()
    assert bytes(inputs.tolist()) == content[: len(inputs)]
    assert bytes(targets.tolist()) == content[1 : 1 + len(targets)]
    assert 0 <= len(content) - 1 - len(targets) < context


def test_what_is_held_out_is_the_end_of_the_file(tmp_path: Path) -> None:
    content = bytes(range(250))
    some = task(tmp_path, content, context=5, validation=0.2)
    learnt, held_out = some.train_data(), some.eval_data()
    assert held_out is not None
    assert set(learnt.flatten().tolist()) <= set(range(200))
    assert held_out[0].tolist() == [200, 201, 202, 203, 204, 205]
    assert task(tmp_path, content, context=5, validation=0.0).eval_data() is None


def test_the_file_is_mapped_and_not_copied(tmp_path: Path, text: bytes) -> None:
    some = task(tmp_path, text, context=8, validation=0.0)
    windows = some.train_data()
    assert windows.numel() > windows.untyped_storage().nbytes() == len(text)
    windows[:] = 0
    assert Path(some.path).read_bytes() == text


@pytest.mark.parametrize(
    ("content", "fields", "found"),
    [
        (None, {}, "no regular file of that name in "),
        (b"", {}, "ValueError: cannot mmap an empty file"),
        (b"x" * 128, {"validation": 0.0}, "128 bytes, of which 0 are held out"),
        (b"x" * 300, {}, "300 bytes, of which 30 are held out"),
        (b"x" * 300, {"validation": 0.9}, "300 bytes, of which 270 are held out"),
    ],
)
def test_a_useless_file_is_refused(
    tmp_path: Path, content: bytes | None, fields: dict[str, Any], found: str
) -> None:
    some = Text(path=str(tmp_path), **fields) if content is None else None
    with pytest.raises(RequestError) as refused:
        (some or task(tmp_path, content or b"", **fields)).train_data()
    assert refused.value.found.startswith(found)
    assert all(refused.value.to_data().values())


def test_fields_that_cannot_be_are_refused(tmp_path: Path) -> None:
    program = find_program("text", Task)
    with pytest.raises(RequestError, match="no value for path"):
        with_settings(program, {}, "to train text")
    with pytest.raises(RequestError, match="part of the file that is held out"):
        Text(path="x", validation=1.0)
    with pytest.raises(RequestError, match="a warm-up as long as the whole"):
        Text(path="x", warmup_steps=10, total_steps=10)
    with pytest.raises(ValueError, match="no multiple of heads"):
        Text(path="x", width=30, heads=4)


# --- how it learns ----------------------------------------------------------------------------


def test_only_matrices_decay() -> None:
    some = Text(path="x", context=8, width=16, layers=1, heads=2, weight_decay=0.3)
    model = some.model()
    decayed, others = some.optimizer(model).param_groups
    assert decayed["weight_decay"] == 0.3 and others["weight_decay"] == 0.0
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)].rsplit(".", 1)[1] for p in decayed["params"]} == {"weight"}
    assert all(p.ndim == 1 for p in others["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def test_the_rate_rises_and_falls_to_a_tenth() -> None:
    falling = Text(path="x", warmup_steps=10, total_steps=110)
    assert [falling.schedule(n) for n in (0, 5, 10, 60, 110, 500)] == pytest.approx(
        [0, 0.5, 1, 0.55, 0.1, 0.1]
    )
    steady = Text(path="x", warmup_steps=4)
    assert [steady.schedule(n) for n in (1, 4, 10_000)] == [0.25, 1, 1]
    assert Text(path="x", warmup_steps=0).schedule(0) == 1


def test_the_loss_is_one_value_for_each_byte() -> None:
    some = Text(path="x", context=4, width=16, layers=1, heads=2)
    batch = torch.randint(256, (3, 5), dtype=torch.uint8)
    losses = some.loss(some.model()(some.inputs(batch)), batch)
    assert losses.shape == (3, 4)
    assert float(losses.detach().mean()) == pytest.approx(math.log(256), abs=0.3)
