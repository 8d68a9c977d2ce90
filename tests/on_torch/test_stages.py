"""Input made ahead: the same batches in the same order, no more of them than asked,
none left over."""

from __future__ import annotations

import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor
from torch.utils.data import Subset

import allranks.torch.accelerator as accelerator
import input_tasks
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.torch import Trainer
from allranks.torch.data.batch import Batch, Cutting
from allranks.torch.data.batches import GlobalBatches
from allranks.torch.data.copying import Copying
from allranks.torch.data.open_data import open_data
from allranks.torch.model.precision import Precision
from allranks.training.prefetch import one_ahead, staged
from allranks.training.progress import Progress
from conftest import Train
from input_tasks import CountedRows, MapRows, StagedRows, stage_threads

PATIENCE_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    """Wait for what has to come, however slow the machine is."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.002)


# --- the stages themselves ----------------------------------------------------------------------


@settings(max_examples=40)
@given(
    sizes=some.lists(some.integers(0, 60), max_size=6),
    threads=some.integers(1, 3),
    ahead=some.integers(1, 4),
)
def test_every_key_goes_through_all_stages_once_in_order(
    sizes: list[int], threads: int, ahead: int
) -> None:
    keys = iter(range(1000))
    batches = [[next(keys) for _ in range(size)] for size in sizes]
    made = staged(batches, str, lambda key, raw: (key, raw), tuple, threads, ahead)
    assert list(made) == [tuple((key, str(key)) for key in batch) for batch in batches]


def test_the_stages_work_at_the_same_time() -> None:
    """Read, decode and the one who computes meet for every batch: none can wait for another."""
    meeting, batches = threading.Barrier(3), 6

    def read(batch: int) -> int:
        if batch >= 2:
            meeting.wait(PATIENCE_S)
        return batch

    def decode(batch: int, raw: int) -> int:
        if 1 <= batch < batches - 1:
            meeting.wait(PATIENCE_S)
        return raw

    computed = []
    for (batch,) in staged([[n] for n in range(batches)], read, decode, tuple, 1, 2):
        if batch < batches - 2:
            meeting.wait(PATIENCE_S)
        computed.append(batch)
    assert computed == list(range(batches))


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_more_is_read_than_was_asked_for(ahead: int) -> None:
    alive = input_tasks.Alive()
    batches = [range(5)] * 7
    made_ahead = staged(batches, lambda key: alive.come(), lambda key, raw: key, list, 2, ahead)
    for number, made in enumerate(made_ahead):
        until(lambda: alive.read == 5 * min(number + 1 + ahead, 7))  # noqa: B023  now and here
        time.sleep(0.01)  # time for more, if there were
        assert alive.most <= 5 * (ahead + 1)
        alive.go(len(made))
    assert alive.read == 35


@pytest.mark.parametrize("stage", ["read", "decode", "collate"])
def test_an_error_comes_when_its_batch_does_with_where_it_was_raised(stage: str) -> None:
    error = RequestError(asked="a", found="b", why="c", do="d")

    def fails(at: str, value: Any) -> Any:
        if at == stage and value in (5, [5]):
            raise error
        return value

    made = staged(
        [[n] for n in range(9)],
        lambda key: fails("read", key),
        lambda key, raw: fails("decode", raw),
        lambda samples: fails("collate", samples),
        threads=2,
        ahead=4,
    )
    assert [next(made) for _ in range(5)] == [[0], [1], [2], [3], [4]]
    with pytest.raises(RequestError) as raised:
        next(made)
    assert raised.value is error
    assert "in fails" in "".join(traceback.format_exception(raised.value))
    assert not stage_threads()


def test_whoever_stops_early_does_not_wait_for_what_was_not_begun() -> None:
    begun: list[int] = []

    def read(key: int) -> int:
        begun.append(key)
        time.sleep(0.01)
        return key

    made = staged([[0], range(400), range(400)], read, lambda key, raw: raw, list, 2, 2)
    assert next(made) == [0]
    made.close()
    assert not stage_threads()
    assert len(begun) < 400


def test_the_next_item_is_made_while_the_last_one_is_in_use() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(4):
            made.append(number)
            yield number
        raise LookupError("after the last")

    taken = one_ahead(items())
    for number in range(3):
        assert next(taken) == number
        until(lambda: len(made) == min(number + 2, 4))  # noqa: B023  now and here
        time.sleep(0.005)
        assert len(made) <= number + 2
    assert next(taken) == 3
    with pytest.raises(LookupError, match="after the last"):
        next(taken)
    assert not stage_threads()


# --- the batches of a job -----------------------------------------------------------------------


class Copied(GlobalBatches):
    """As on CUDA, where a thread brings the next batch to the device."""

    _copies_ahead = True


def batches_of(
    data: Any,
    *,
    workers: int,
    kind: type[GlobalBatches] = GlobalBatches,
    rank: int = 0,
    ranks: int = 1,
    micro_batch: int | None = None,
    **changes: Any,
) -> GlobalBatches:
    task = input_tasks.Staged()
    opened = open_data(data, task, 5, workers, "train_data")
    fields = {
        "source": opened.source,
        "cutting": Cutting(8, rank, ranks, micro_batch, shard_alone=False),
        "batch_size": 24,
        "last_batch": "keep",
        "seed": 5,
        "precision": Precision(torch.device("cpu"), torch.float64),
        **changes,
    }
    return kind(**fields)


def rows_of(batches: Iterator[Batch]) -> list[Tensor]:
    return [micro.data[0] for batch in batches for micro in batch.micros]


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(("micro_batch", "prefetch"), [(None, 2), (7, 1), (3, 4)])
def test_threads_change_nothing(micro_batch: int | None, prefetch: int) -> None:
    changes = {"micro_batch": micro_batch, "prefetch": prefetch, "rank": 1, "ranks": 3}
    plain = batches_of(StagedRows(), workers=0, **changes).after(Progress(), 2, None)
    ahead = batches_of(StagedRows(), workers=2, **changes).after(Progress(), 2, None)
    wanted, found = rows_of(plain), rows_of(ahead)
    assert sum(map(len, wanted)) == sum(map(len, found))
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    copied = batches_of(MapRows(CountedRows()), workers=1, kind=Copied, **changes)
    alone = batches_of(MapRows(CountedRows()), workers=0, **changes)
    pairs = zip(*(rows_of(b.after(Progress(), 2, None)) for b in (copied, alone)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    second = len(wanted) // 2
    assert not torch.equal(wanted[0].sort().values, wanted[second].sort().values), "not random"


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("reader", "micro_batch", "prefetch"),
    [
        *((reader, *pair) for reader in ("threads", "processes") for pair in [(None, 1), (6, 2)]),
        ("threads", None, 3),
        ("processes, copied", None, 2),
        ("processes, copied", 6, 3),
    ],
)
def test_no_more_than_prefetch_batches_and_the_one_in_use_are_there(
    reader: str, micro_batch: int | None, prefetch: int
) -> None:
    rows = CountedRows()
    data: Any = rows if reader == "threads" else MapRows(rows)
    kind = Copied if reader.endswith("copied") else GlobalBatches
    changes = {"micro_batch": micro_batch, "prefetch": prefetch, "kind": kind}
    batches = batches_of(data, workers=1, **changes)
    assert not batches.note
    for batch in batches.after(Progress(), 2, None):
        time.sleep(0.002)
        rows.alive.go(batch.own_samples)
    assert rows.alive.read == 2 * input_tasks.SAMPLES
    assert 24 < rows.alive.most <= 24 * (prefetch + 1)


def test_more_processes_than_batches_ahead_are_told() -> None:
    batches = batches_of(MapRows(CountedRows()), workers=4)
    assert batches.note == (
        "4 loader processes make a batch each: 4 batches are read ahead, not --prefetch 2"
    )


def test_what_is_read_ends_with_the_trainer() -> None:
    for data in (StagedRows(), MapRows(CountedRows())):
        task = input_tasks.Staged()
        task.train_data = lambda data=data: data  # type: ignore[method-assign, misc]
        with Trainer(task, Job(precision="fp64", loader_workers=2, prefetch=3)) as trainer:
            batches = trainer.batches()
            trainer.step(next(batches))
            assert stage_threads() or multiprocessing.active_children()
        assert not stage_threads() and not multiprocessing.active_children()
        assert next(batches, None) is None


class Refusing(StagedRows):
    """Its last sample is refused."""

    def decode(self, raw: Any, random: Any) -> Any:
        if raw is self.rows[-1] or (raw == self.rows[-1]).all():
            raise RequestError(asked="the last row", found="nothing", why="a test", do="leave it")
        return super().decode(raw, random)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_staged", [True, False])
def test_a_refusal_stays_one_wherever_it_is_raised(workers: int, is_staged: bool) -> None:
    data: Any = Refusing() if is_staged else MapRows(Refusing())  # type: ignore[arg-type]
    batches = batches_of(data, workers=workers).after(Progress(), 1, None)
    with pytest.raises(RequestError, match="leave it") as raised:
        list(batches)
    assert raised.value.asked == "the last row"


def test_a_part_of_a_staged_data_set_is_staged() -> None:
    numbers = [7, 3, 50]
    part: Any = Subset(Subset(StagedRows(), range(10, 90)), numbers)  # type: ignore[arg-type]
    (found,) = rows_of(batches_of(part, workers=1).after(Progress(), 1, None))
    order = torch.tensor(numbers)[batches_of(part, workers=0)._own_order().batch(0, 0)]
    clean = torch.from_numpy(StagedRows().rows)[10 + order]
    assert torch.allclose(found, clean, atol=1.0) and not torch.allclose(found, clean, atol=1e-3)


class Undisciplined(StagedRows):
    """Draws from torch's own generator, as torchvision's transforms do."""

    def decode(self, raw: Any, random: Any) -> Any:
        row, target = super().decode(raw, random)
        return row + torch.rand(4), target


def test_a_staged_data_set_that_draws_from_the_process_is_refused() -> None:
    task = input_tasks.Staged()
    task.train_data = Undisciplined  # type: ignore[method-assign]
    refused = pytest.raises(RequestError, match="generators of Python, NumPy or torch")
    with Trainer(task, Job(precision="fp64", loader_workers=1)) as trainer, refused:
        trainer.rehearse()


@pytest.mark.slow
def test_training_is_the_same_with_threads_and_without(train: Train) -> None:
    """Equal bits on other ranks, with other threads, and across an evaluation by threads."""
    flags = {"bitwise": True, "precision": "fp64", "steps": 7}
    runs = [
        train("input_tasks:Staged", ranks=ranks, loader_workers=workers, **flags, **more)
        for ranks, workers, more in (
            (1, 0, {}),
            (2, 2, {"eval_every": "3"}),
            (3, 1, {"prefetch": 4}),
        )
    ]
    digests = {run.summary["weights_sha256"] for run in runs}
    assert len(digests) == 1 and None not in digests
    assert len({run.summary["eval"]["loss"] for run in runs}) == 1


class _Stream:
    """A stream of a device that tells what waits for what."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def record_event(self) -> str:
        self.said.append("recorded")
        return "event"

    def wait_event(self, event: str) -> None:
        self.said.append(f"waits for the {event}")


def test_what_computes_waits_for_data_that_was_made_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Made and cast by a thread in its own stream; training may go on in another."""
    said: list[str] = []
    copying = Copying(Precision(torch.device("cpu"), torch.float32))
    copying._stream = object()
    monkeypatch.setattr(accelerator, "holds", lambda tensor: True)
    monkeypatch.setattr(accelerator, "current_stream", lambda device: _Stream(said))
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: said.append("kept"))
    begun = copying.begin({"x": torch.ones(2, dtype=torch.float64)})
    assert said == ["recorded"]
    assert copying.finish(begun)["x"].dtype == torch.float32
    assert said == ["recorded", "waits for the event", "kept"]


@pytest.mark.gpu
def test_a_batch_is_copied_beside_the_computation() -> None:
    precision = Precision(torch.device("cuda", 0), torch.float32)
    copying = Copying(precision)
    wanted = [torch.full((1000, 1000), float(n), dtype=torch.float64) for n in range(20)]
    sums = []
    for begun in one_ahead(copying.begin({"x": tensor}) for tensor in wanted):
        data = copying.finish(begun)
        assert data["x"].dtype == torch.float32 and data["x"].is_cuda
        torch.cuda._sleep(1_000_000)
        sums.append(data["x"].mean())
        del data
    assert [float(found) for found in sums] == list(range(20))
