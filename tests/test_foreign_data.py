"""Data that people have already: what is taken of it, what the job does itself, what is said."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import contract_tasks
import data_tasks
import foreign_tasks
from allranks.errors import RequestError
from allranks.job.run_folder import read_events
from allranks.torch.data.batch import Batch, Cutting
from allranks.torch.data.batches import GlobalBatches
from allranks.torch.data.open_data import open_data
from allranks.torch.data.sources import TensorSource
from allranks.torch.model.precision import Precision
from allranks.training.progress import Progress
from conftest import Train
from contract_tasks import SAMPLES
from foreign_tasks import Lengths, Shuffled, named

NOISY = contract_tasks.NoisyRows()
LIBRARIES = ["stand-in"] + ["datasets"] * (importlib.util.find_spec("datasets") is not None)


def batches_of(
    data: Any,
    *,
    rank: int = 0,
    ranks: int = 1,
    workers: int = 0,
    micro_batch: int | None = None,
    **changes: Any,
) -> GlobalBatches:
    opened = open_data(data, changes.pop("task", foreign_tasks.Named()), 5, workers, "train_data")
    fields = {
        "source": opened.source,
        "order": opened.order,
        "shuffles": opened.shuffles,
        "cutting": Cutting(8, rank, ranks, micro_batch, shard_alone=False),
        "batch_size": 24,
        "last_batch": "keep",
        "seed": 5,
        "precision": Precision(torch.device("cpu"), torch.float64),
        **changes,
    }
    return GlobalBatches(**fields)


def rows_in(batches: Iterator[Batch]) -> list[Tensor]:
    """The rows of this rank, one tensor for each step."""
    return [torch.cat([m.data["row"] for m in b.micros] or [torch.empty(0, 4)]) for b in batches]


START = Progress()


def steps_of(data: Any, done: Progress = START, **changes: Any) -> list[Tensor]:
    return rows_in(batches_of(data, **changes).after(done, 2, None))


LOADERS: dict[str, Callable[[], Any]] = {
    "an order of the job": lambda: DataLoader(NOISY, 7, shuffle=True, collate_fn=named),
    "a sampler": lambda: DataLoader(
        NOISY, 7, sampler=WeightedRandomSampler([1.0, 0.0] * 50 + [1.0], 90), collate_fn=named
    ),
    "a batch sampler": lambda: DataLoader(NOISY, batch_sampler=Lengths(), collate_fn=named),
    "a whole": lambda: DataLoader(Shuffled(), 24, collate_fn=named),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("kind", LOADERS)
def test_ranks_share_a_loader_out_and_going_on_is_as_if_nothing_had_happened(kind: str) -> None:
    whole = steps_of(LOADERS[kind]())
    parts = [steps_of(LOADERS[kind](), rank=rank, ranks=3, micro_batch=5) for rank in range(3)]
    for step, rows in enumerate(whole):
        assert torch.equal(torch.cat([part[step] for part in parts]), rows)
    half = len(whole) // 2
    assert not torch.equal(whole[0], whole[half]), "every epoch is another one"
    for epoch, step in ((0, 2), (0, half), (1, 1)):
        index = epoch * half + step
        rest = steps_of(LOADERS[kind](), Progress(epoch, step, index))
        assert len(rest) == len(whole) - index
        assert all(torch.equal(a, b) for a, b in zip(rest, whole[index:], strict=True))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", list(LOADERS)[:3])
def test_loader_workers_read_what_a_loader_holds(kind: str) -> None:
    alone, helped = steps_of(LOADERS[kind]()), steps_of(LOADERS[kind](), workers=2)
    assert all(torch.equal(a, b) for a, b in zip(alone, helped, strict=True))


def test_a_plain_loader_is_the_data_set_in_the_order_of_the_job() -> None:
    found = batches_of(LOADERS["an order of the job"]())
    task = type("Collating", (foreign_tasks.Named,), {"collate": lambda self, rows: named(rows)})()
    wanted = batches_of(NOISY, task=task)
    for a, b in zip(
        found.after(Progress(), 2, None), wanted.after(Progress(), 2, None), strict=True
    ):
        assert a.ids.tolist() == b.ids.tolist()
        assert torch.equal(a.micros[0].data["row"], b.micros[0].data["row"])


def test_a_loader_over_tensors_is_read_as_tensors() -> None:
    inputs, targets = contract_tasks.Plain().train_data()
    loader = DataLoader(TensorDataset(inputs, targets), 7, shuffle=True)
    opened = open_data(loader, contract_tasks.Plain(), 0, 0, "train_data")
    assert isinstance(opened.source, TensorSource) and "SequentialSampler" not in opened.note
    (batch,) = opened.source.batches([(0, np.array([3, 1]))])
    assert torch.equal(batch[0], inputs[[3, 1]]) and torch.equal(batch[1], targets[[3, 1]])


def test_the_order_of_a_sampler_is_kept() -> None:
    weighted = list(batches_of(LOADERS["a sampler"]()).after(Progress(), 1, None))
    numbers = [int(number) for batch in weighted for number in batch.ids]
    assert [batch.nominal for batch in weighted] == [24, 24, 24, 18]
    assert len(numbers) == 90 and not any(number % 2 for number in numbers)

    bucketed = list(batches_of(LOADERS["a batch sampler"]()).after(Progress(), 1, None))
    assert sorted(batch.nominal for batch in bucketed) == sorted(Lengths.sizes)
    assert sorted(n for batch in bucketed for n in batch.ids.tolist()) == list(range(SAMPLES))

    fixed = DataLoader(NOISY, batch_sampler=[[3, 1], [2]], collate_fn=named)
    assert [b.ids.tolist() for b in batches_of(fixed).after(Progress(), 1, None)] == [[3, 1], [2]]


def test_a_loader_keeps_its_own_generator_keyed() -> None:
    """One that it was made with is keyed by the job, as those of the process are."""

    def drawn(seed: int) -> list[list[int]]:
        own = torch.Generator().manual_seed(seed)
        sampler = SubsetRandomSampler(range(30), generator=own)
        loader = DataLoader(NOISY, 7, sampler=sampler, collate_fn=named)
        return [b.ids.tolist() for b in batches_of(loader).after(Progress(), 2, None)]

    assert drawn(1) == drawn(2)
    assert sorted(drawn(1)[0] + drawn(1)[1]) == list(range(30)) and drawn(1)[0] != drawn(1)[2]


def test_an_epoch_of_unknown_length_is_known_at_its_end() -> None:
    batches = batches_of(LOADERS["a whole"]())
    known = [batches.steps_per_epoch for _ in batches.after(Progress(), 2, None)]
    assert known == [None] * 4 + [5] * 6
    dropping = type("Dropping", (foreign_tasks.Named,), {})(last_batch="drop")
    batches = batches_of(LOADERS["a whole"](), task=dropping, last_batch="drop")
    assert [b.nominal for b in batches.after(Progress(), 1, None)] == [24] * 4


# --- the epoch ------------------------------------------------------------------------------------


class OfEpoch(Dataset[Any]):
    """Rows that say which epoch their data set is at."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"row": torch.full((4,), float(self.epoch))}


class InStages(OfEpoch):
    def read(self, number: int) -> int:
        return self.epoch

    def decode(self, raw: int, random: Any) -> dict[str, Tensor]:
        return {"row": torch.tensor([raw, raw, self.epoch, self.epoch], dtype=torch.float32)}


class OfEpochTensors(TensorDataset):
    set_epoch = OfEpoch.set_epoch

    def __getitem__(self, number: int) -> Any:
        return {"row": torch.full((4,), float(self.epoch))}


class Collating:
    """A `collate_fn` with an epoch of its own."""

    epoch = -1
    set_epoch = OfEpoch.set_epoch

    def __call__(self, samples: list[Any]) -> Any:
        return {"row": torch.full((len(samples), 4), float(self.epoch))}


class Chained(IterableDataset[Any], OfEpoch):
    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(SAMPLES))


OF_EPOCH: dict[str, Callable[[], Any]] = {
    "a data set": OfEpoch,
    "in stages": InStages,
    "a part of one in stages": lambda: Subset(InStages(), range(SAMPLES)),
    "a part of a part": lambda: Subset(ConcatDataset([OfEpoch(), OfEpoch()]), range(150, 180)),
    "tensors that read otherwise": lambda: OfEpochTensors(torch.zeros(SAMPLES)),
    "a loader": lambda: DataLoader(OfEpoch(), 7, shuffle=True),
    "a sampler": lambda: DataLoader(OfEpoch(), 7, sampler=SubsetRandomSampler(range(60))),
    "a collate_fn": lambda: DataLoader(NOISY, 7, collate_fn=Collating()),
    "a chain": lambda: DataLoader(ChainDataset([Chained()]), 24),
    "a bare chain": lambda: ChainDataset([Chained()]),
}


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", OF_EPOCH)
def test_a_data_set_is_at_the_epoch_that_is_read(kind: str, workers: int) -> None:
    if "chain" in kind and workers:
        workers = 0
    data = OF_EPOCH[kind]()
    batches = batches_of(data, workers=workers, prefetch=4)
    for done in (START, Progress(1, 1, 1)):  # from the start, and as after a resume
        for batch in batches.after(done, 3, None):
            (micro,) = batch.micros
            assert micro.data["row"].unique().tolist() == [batch.epoch]
            if isinstance(data, OfEpoch) and not workers:  # the witness, and an evaluation
                (again,) = batches.source.batches([(0, np.array([3]))])  # type: ignore[union-attr]
                assert again["row"].unique().tolist() == [0]
                shared = open_data(data, foreign_tasks.Named(), 5, 0, "eval_data").source
                (other,) = shared.batches([(7, np.array([3]))])  # type: ignore[union-attr]
                assert other["row"].unique().tolist() == [7]


# --- two that collate -----------------------------------------------------------------------------


class TwoCollates(foreign_tasks.Named):
    def collate(self, samples: list[Any]) -> Any:
        return "task"

    def eval_collate(self, samples: list[Any]) -> Any:
        return "evaluation"


class OneCollate(foreign_tasks.Named):
    collate = TwoCollates.collate


def loads(samples: list[Any]) -> Any:
    return "loader"


@pytest.mark.parametrize(
    ("task", "name", "loader", "collated"),
    [
        (OneCollate(), "train_data", DataLoader(NOISY), "task"),
        (OneCollate(), "eval_data", DataLoader(NOISY), "task"),
        (OneCollate(), "eval_data", DataLoader(NOISY, collate_fn=loads), "loader"),
        (OneCollate(), "train_data", DataLoader(NOISY, collate_fn=loads), None),
        (TwoCollates(), "train_data", NOISY, "task"),
        (TwoCollates(), "eval_data", NOISY, "evaluation"),
        (TwoCollates(), "eval_data", torch.ones(SAMPLES, 4), "evaluation"),
        (TwoCollates(), "eval_data", DataLoader(NOISY), "evaluation"),
        (TwoCollates(), "eval_data", DataLoader(NOISY, collate_fn=loads), None),
        (foreign_tasks.Named(), "train_data", DataLoader(NOISY, collate_fn=loads), "loader"),
    ],
)
def test_samples_are_collated_by_what_is_nearest_to_them(
    task: Any, name: str, loader: Any, collated: str | None
) -> None:
    if collated is None:
        with pytest.raises(RequestError, match="leave one of them out"):
            open_data(loader, task, 0, 0, name)
        return
    opened = open_data(loader, task, 0, 0, name)
    (batch,) = opened.source.batches([(0, np.array([3, 1]))])  # type: ignore[union-attr]
    assert batch == collated
    if isinstance(loader, DataLoader):
        words = {"task": " collate()", "evaluation": "eval_collate()", "loader": "collate_fn"}
        assert words[collated] in opened.note


@pytest.mark.parametrize("data", [NOISY, TensorDataset(contract_tasks.made(SAMPLES, 4))])
def test_a_loader_that_does_not_shuffle_keeps_the_order(data: Any) -> None:
    for loader in (
        DataLoader(data, 7),
        DataLoader(data, 7, sampler=DistributedSampler(data, 2, 0, shuffle=False)),
    ):
        batches = batches_of(loader, ranks=2, rank=1, task=contract_tasks.Plain())
        first, *_, last = list(batches.after(Progress(), 2, None))
        assert first.ids.tolist() == list(range(12, 24)) and last.ids.tolist() == [100]
        assert batches.steps_by_number("ps") == 5
    assert "shuffle=False" in open_data(loader, contract_tasks.Plain(), 0, 0, "train_data").note


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class Texts(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        return iter(["a", "b"])


class Ragged(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([{"row": torch.ones(24, 4), "other": torch.ones(3)}])


class Augmenting(foreign_tasks.Named):
    def augment(self, sample: Any, random: Any) -> Any:
        return sample


class Nothing(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([])

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("loader", "what", "changes"),
    [
        (lambda: DataLoader(Shuffled(), 7), "--set batch_size=7", {}),
        (lambda: DataLoader(NOISY, batch_sampler=[[1] * 30]), "--set batch_size=30", {}),
        (lambda: DataLoader(Shuffled(), 24), "--loader-workers 2", {"workers": 2}),
        (lambda: DataLoader(Shuffled(), 24), "augment", {"task": Augmenting()}),
        (lambda: DataLoader(NOISY, 7, sampler=Endless()), "__len__", {}),
        (lambda: DataLoader(NOISY, 7, sampler=["a", "b"]), "whole numbers", {}),  # type: ignore[arg-type]
        (lambda: DataLoader(NOISY, batch_sampler=Nothing()), "Nothing", {}),
        (lambda: DataLoader(Texts(), 24), "let it give tensors", {}),
        (lambda: DataLoader(Ragged(), None), "not one of 24 rows", {}),
    ],
)
def test_loaders_that_cannot_be_shared_out_are_refused(
    loader: Callable[[], Any], what: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match="DataLoader") as raised:
        list(batches_of(loader(), **changes).after(Progress(), 1, None))
    assert what in str(raised.value)


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(Shuffled(), 24),
        lambda: DataLoader(NOISY, 24, sampler=SubsetRandomSampler(range(9))),
        lambda: DataLoader(NOISY, 24, sampler=RandomSampler(NOISY, num_samples=9)),
    ],
)
def test_only_whole_data_sets_are_evaluated(loader: Callable[[], Any]) -> None:
    with pytest.raises(RequestError, match="Subset"):
        open_data(loader(), foreign_tasks.Named(), 0, 0, "eval_data")


@pytest.mark.slow
def test_each_loader_says_what_is_not_as_it_was(train: Train) -> None:
    """On two ranks as on one, bit by bit; and the one who handed it in hears what was replaced."""
    flags = {"bitwise": True, "precision": "fp64", "steps": 7}
    runs = [
        train(f"foreign_tasks:{program}", ranks=ranks, eval_every="epoch", **flags)
        for program, ranks in (("AsAWhole", 1), ("AsAWhole", 2), ("ByNumber", 2))
    ]
    assert runs[0].summary["weights_sha256"] == runs[1].summary["weights_sha256"]
    for run, told in zip(
        runs[1:], ("every rank reads all of it", "batch_size=24 over all ranks"), strict=True
    ):
        events = list(read_events(run.run_dir))
        ((training, evaluated),) = [row["notes"] for row in events if row["event"] == "data_notes"]
        assert training.startswith("train_data() is a DataLoader") and told in training
        assert evaluated.startswith("eval_data() is a DataLoader")
        assert [row["step"] for row in events if row["event"] == "evaluated"] == [5]


def test_ranks_that_would_draw_different_epochs_are_told_apart(train: Train) -> None:
    with pytest.raises(RequestError, match="not the same on all ranks"):
        train("foreign_tasks:WithoutLaw", ranks=2, precision="fp64", steps=2)


def test_a_sampler_with_a_state_is_told_that_it_is_not_saved(train: Train) -> None:
    told = []
    for flags in ({}, {"checkpoint_every": 1}):
        run = train("foreign_tasks:InBucketsWithAState", steps=1, **flags)
        events = [e for e in read_events(run.run_dir) if e["event"] == "data_notes"]
        told.append(any("Remembering has a state_dict" in n for e in events for n in e["notes"]))
    assert told == [False, True]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("loads", [False, True])
def test_a_stream_that_shards_itself_is_told_to_leave_it(train: Train, loads: bool) -> None:
    with pytest.raises(RequestError, match="leave the sharding by rank out") as raised:
        train("foreign_tasks:ShardsItself", f"loads={loads}", ranks=2, steps=2)
    assert ("a DataLoader over a OfItsRank" in str(raised.value)) is loads
    assert "a OfItsRank" in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_hugging_face_data_set_is_read_as_any_other(train: Train, library: str) -> None:
    """Equal bits with the rows of a tensor, on one rank and on two, with workers and without."""
    flags = {"bitwise": True, "steps": 7}
    task = f"library={library}"
    alone = train("foreign_tasks:HuggingFace", task, loader_workers=1, **flags)
    pair = train("foreign_tasks:HuggingFace", task, ranks=2, **flags)
    plain = train("foreign_tasks:InMemory", **flags)
    digests = {run.summary["weights_sha256"] for run in (alone, pair, plain)}
    assert len(digests) == 1
    assert alone.summary["eval"] == pair.summary["eval"] == plain.summary["eval"]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("sampled", ["false", "true"])
def test_a_loader_that_drops_its_last_batch_is_taken_at_its_word(
    train: Train, sampled: str
) -> None:
    program = f"{data_tasks.__file__}:Full"
    run = train(program, f"sampled={sampled}", ranks=2)
    assert run.summary["steps"] == SAMPLES // 24
    (notes,) = [row["notes"] for row in read_events(run.run_dir) if row["event"] == "data_notes"]
    assert "drop_last=True" in notes[0]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`datasets`; what it sets in the environment goes with the test."""
    for name in ("PYTORCH_NVML_BASED_CUDA_CHECK", "KMP_DUPLICATE_LIB_OK"):
        monkeypatch.setenv(name, "1")
    pytest.importorskip("datasets")
    importlib.import_module("datasets.distributed")
    return importlib.import_module("datasets")


def numbered(files: list[int]) -> Iterator[dict[str, int]]:
    for file in files:
        yield from ({"number": 100 * file + i} for i in range(20 + file))


def stream_of(files: range, library: Any) -> Any:
    return library.IterableDataset.from_generator(numbered, gen_kwargs={"files": [*files]})


STREAMS: dict[str, Callable[[Any], Any]] = {
    "files": lambda library: stream_of(range(8), library),
    "fewer files than shards": lambda library: stream_of(range(3), library),
    "fewer files, through map": lambda library: stream_of(range(3), library).map(lambda row: row),
    "batches through map": lambda library: stream_of(range(8), library).map(
        lambda rows: {"number": [n + 1 for n in rows["number"]]}, batched=True, batch_size=7
    ),
    "filter": lambda library: stream_of(range(8), library).filter(lambda row: row["number"] % 3),
    "a mixture": lambda library: library.interleave_datasets(
        [stream_of(range(8), library), stream_of(range(8, 16), library)],
        probabilities=[0.3, 0.7],
        seed=1,
        stopping_strategy="all_exhausted_without_replacement",
    ),
    "a buffer": lambda library: stream_of(range(8), library).shuffle(seed=3, buffer_size=10),
}


def ranks_of(data: Any, ranks: int) -> list[GlobalBatches]:
    return [batches_of(data, rank=rank, ranks=ranks) for rank in range(ranks)]


def read_on(ranks: list[GlobalBatches], done: Progress, steps: int | None = None) -> Iterator[Any]:
    """The place and the numbers of each global batch of two epochs, as trainers read them."""
    for parts in zip(*(rank.after(done, 2, steps) for rank in ranks), strict=True):
        rows = [int(n) for b in parts for micro in b.micros for n in micro.data["number"]]
        for rank in ranks:
            rank.exhausted = not rows
        if rows:
            yield (parts[0].epoch, parts[0].step_in_epoch), rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_of_datasets_does_not_depend_on_ranks(kind: str, library: Any) -> None:
    """It goes on from the states of two ranks on three."""
    data = STREAMS[kind](library)
    whole = list(read_on(ranks_of(data, 1), START))
    for epoch in (0, 1):
        numbers = [n for (e, _), rows in whole if e == epoch for n in rows]
        assert sorted(numbers) == sorted(row["number"] for row in data)
    for index in (0, 2, len(whole) - 2):
        (epoch, step), _ = whole[index]
        two, three = ranks_of(data, 2), ranks_of(data, 3)
        assert list(read_on(two, START, index)) == whole[:index]
        states = two[0].states_of_shards(epoch, step) | two[1].states_of_shards(epoch, step)
        assert len(states) == (0 if kind == "a buffer" or not step else 8)
        for rank in three:
            rank.load_states_of_shards(epoch, step, states)
        assert list(read_on(three, Progress(epoch, step, index))) == whole[index:]


@pytest.mark.slow
def test_a_state_is_gone_on_with_and_nothing_is_read_again(library: Any) -> None:
    read: list[int] = []
    data = stream_of(range(8), library).map(lambda row: read.append(row["number"]) or row)
    (first,), (second,) = ranks_of(data, 1), ranks_of(data, 1)
    list(read_on([first], START, 4))
    before = [*read]
    read.clear()
    second.load_states_of_shards(0, 4, first.states_of_shards(0, 4))
    list(read_on([second], Progress(0, 4, 4), 5))
    assert len(before) == 96 and len(read) == 24 and not {*before} & {*read}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data, library: data.shuffle(buffer_size=10), "without a seed"),
        (lambda data, library: library.interleave_datasets([data, data], [0.5, 0.5]), "without a"),
        (
            lambda data, library: library.distributed.split_dataset_by_node(data, 0, 2),
            "split by node already",
        ),
    ],
)
def test_a_stream_that_ranks_would_read_apart_is_refused(
    change: Callable[[Any, Any], Any], words: str, library: Any
) -> None:
    with pytest.raises(RequestError, match=words):
        batches_of(change(stream_of(range(8), library), library))
    batches_of(stream_of(range(8), library).shuffle(seed=0))
