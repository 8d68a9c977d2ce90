"""Batches and outputs of every kind: none is changed by what watches, none loses its type."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

import batch_kinds
from allranks.errors import RequestError
from allranks.job.config import resolve
from allranks.job.job import Job
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.tensorflow.data.nested import arrays_in, joined, mapped
from allranks.tools.check.against_single import CheckPlan, check_against_one
from allranks.torch import Trainer
from allranks.torch.data.collate import copied, map_tensors, split_rows, structure_of, tensors_in
from allranks.torch.data.loaders import rows_between
from allranks.torch.model.precision import Precision
from allranks.torch.model.weights import weights_sha256
from allranks.torch.witness.probing import digest_of
from allranks.torch.witness.trace import write_parts
from batch_kinds import ALL, KINDS, Kinds, Locked, OverBatch, Plain, Shared, of, put
from conftest import Train

CPU = torch.device("cpu")
WRITES = [
    (kind, how)
    for kind in ALL
    for how in ("place", "attribute")
    if how == "place" or kind not in ("tensor", "tuple", "named tuple", "frozen")
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(kind: str) -> Any:
    return ALL[kind](torch.arange(12.0).view(4, 3), torch.arange(4))


def trained(
    kind: str, how: str, *, output: str = "", task: type[Kinds] = Kinds, **job: Any
) -> tuple[str, Any]:
    """The digest of the weights after four steps in this process, and what the witness said."""
    made = task(kind=kind, how=how, output=output)
    with Trainer(made, Job(**{"steps": 4, **job})) as trainer:
        trainer.rehearse()
        for batch in trainer.batches():
            trainer.step(batch)
        return weights_sha256(trainer.weights()), trainer.witness.testimony


@pytest.mark.slow(but=3, most=14)
@pytest.mark.parametrize(("kind", "how"), WRITES)
def test_the_witness_changes_no_batch_that_the_model_writes_on(kind: str, how: str) -> None:
    digest, said = trained(kind, how)
    assert digest == trained(kind, how, witness="off")[0]
    if kind in ("shared", "locked"):
        (unseen,) = said.unseen
        assert "batch_kinds" in unseen, "it says what it could not copy"
    else:
        assert not said.unseen
    if how == "place":
        assert digest == trained(kind, "clean", witness="off")[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_structure_keeps_its_kind_and_what_else_it_has(kind: str) -> None:
    value = made(kind)
    found = map_tensors(lambda t: t + 1, value)
    assert type(found) is type(value)
    assert torch.equal(of(found, "x"), of(value, "x") + 1)
    assert of(made(kind), "y").tolist() == of(value, "y").tolist() == [0, 1, 2, 3]
    assert [t.tolist() for t in tensors_in(found)] == [(t + 1).tolist() for t in tensors_in(value)]
    if kind in ("dict with attributes", "dataclass"):
        assert found.note == "kept"
    if kind == "model output":
        assert found.x is found["x"] and list(found) == ["x", "y"]
    if kind == "default dict":
        assert found["new"] == []


def test_an_object_is_moved_by_its_own_to() -> None:
    class Lengths(Plain):
        def to(self, device: torch.device) -> None:
            self.x = self.x.to(device)

    value = Lengths(torch.zeros(3), torch.arange(3))
    found = Precision(torch.device("meta"), torch.float64).to_device([value])[0]
    assert (found.x.device.type, found.x.dtype) == ("meta", torch.float64)
    assert found.y.device.type == value.x.device.type == "cpu", "it is a copy that was moved"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_cut_cast_and_told_apart_in_every_kind(kind: str) -> None:
    rows = rows_between(made(kind), 1, 3, 4)
    assert type(rows) is type(made(kind)) and of(rows, "y").tolist() == [1, 2]
    double = Precision(CPU, torch.float64).to_device(made(kind))
    assert of(double, "x").dtype == torch.float64 and type(double) is type(made(kind))
    apart = split_rows(made(kind), 4)
    again = apart.rebuilt({n: t[:2] for n, t in apart.tensors.items()}, apart.lists)
    assert type(again) is type(made(kind)) and of(again, "y").tolist() == [0, 1]
    assert digest_of(made(kind)) == digest_of(made(kind))
    other = made(kind)
    of(other, "x")[0] += 1
    assert digest_of(other) != digest_of(made(kind))


@pytest.mark.parametrize("kind", [*KINDS, "arrays"])
def test_a_copy_shares_nothing(kind: str) -> None:
    value = made(kind)
    before, copy = digest_of(value), copied(value)
    of(copy, "x")[0] += 1
    if kind not in ("tensor", "tuple", "named tuple", "frozen"):
        put(copy, "x", None)
    assert digest_of(value) == before and type(copy) is type(value)


def test_two_names_of_one_tensor_stay_one_in_a_copy() -> None:
    tensor = torch.zeros(3)
    copy = copied({"a": tensor, "b": [tensor], "c": Plain(tensor, None)})
    assert copy["a"] is copy["b"][0] is copy["c"].x and copy["a"] is not tensor


def test_what_cannot_be_copied_is_refused_by_its_name() -> None:
    x = torch.zeros(3)
    with pytest.raises(RequestError, match=r"batch_kinds\.Locked: TypeError: cannot pickle"):
        copied([Locked(x, x)])
    with pytest.raises(RequestError, match=r"batch_kinds\.Shared: its copy shares it"):
        copied({"in": Shared(x, x)})


def test_what_cannot_be_made_anew_is_refused_by_its_name() -> None:
    ring = Plain(torch.zeros(3), None)
    ring.y = ring
    for value, found in ((ring, "which holds itself"), ({torch.zeros(3)}, "have no order")):
        with pytest.raises(RequestError, match=found):
            map_tensors(Tensor.double, value)
    assert structure_of(Plain(3, ["text"])) is None, "there is no tensor in it"


def test_lengths_of_a_packed_sequence_stay_what_they_are() -> None:
    packed = pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)])
    found = Precision(CPU, torch.float64).to_device({"packed": packed})["packed"]
    assert type(found) is type(packed) and found.data.dtype == torch.float64
    assert found.batch_sizes.dtype == torch.int64


COUPLED = [kind for kind in KINDS if kind not in ("tensor", "tuple")]


@pytest.mark.slow
@pytest.mark.parametrize("task", [Kinds, OverBatch])
@pytest.mark.parametrize("job", [{"micro_batch": 2}, {"strategy": "dp:replicas=2"}])
def test_every_kind_trains_as_a_tuple_does(task: type[Kinds], job: dict[str, Any]) -> None:
    wanted = trained("tuple", "clean", output="tuple", task=task, **job)[0]
    for kind in COUPLED:
        digest, said = trained(kind, "clean", output=kind, task=task, **job)
        assert digest == wanted, kind
        assert not said.unseen, kind


@pytest.mark.parametrize("kind", COUPLED)
@pytest.mark.slow(most=8)
def test_every_kind_trains_as_a_tuple_does_on_two_ranks(kind: str, train: Train) -> None:
    digests = {
        train(
            "batch_kinds:OverBatch", f"kind={one}", f"output={one}", ranks=2, steps=4, threads=1
        ).summary["weights_sha256"]
        for one in (kind, "tuple")
    }
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dataclass", "user dict", "locked"])
def test_recorders_change_no_batch_that_the_model_writes_on(kind: str, train: Train) -> None:
    recorders = {"log": "csv,phases", "profile": True, "verify_every": 2, "witness": "warn"}
    digests = {
        train("batch_kinds:Kinds", f"kind={kind}", "how=place", steps=4, threads=1, **job).summary[
            "weights_sha256"
        ]
        for job in (recorders, {"witness": "off"})
    }
    assert len(digests) == 1


@pytest.mark.parametrize("kind", ["dataclass", "object", "user dict", "locked"])
def test_parts_of_a_step_are_recorded_from_copies(kind: str, tmp_path: Path) -> None:
    task, written = Kinds(kind=kind, how="place"), kind != "locked"
    with Trainer(task, Job(steps=1)) as trainer:
        (batch,) = trainer.batches()
        before = digest_of([micro.data for micro in batch.micros])
        write_parts(tmp_path, trainer.strategy, batch, Job(cut_for=2))
        assert digest_of([micro.data for micro in batch.micros]) == before
    assert (tmp_path / "parts").exists() == written


@pytest.mark.slow
def test_check_changes_no_batch_that_the_model_writes_on(
    server: ForkServer, tmp_path: Path
) -> None:
    job = resolve("batch_kinds:Kinds", {"strategy": "ddp", "ranks": 2, "steps": 4}, ["how=place"])
    verdict = check_against_one(job, tmp_path, server, CheckPlan((2,), 2, shards=4))
    assert verdict.equal


@pytest.mark.parametrize("kind", ["named tuple", "ordered dict", "user dict", "default dict"])
def test_tensorflow_has_the_kinds_that_it_can_trace(kind: str) -> None:
    columns = {"x": np.arange(12.0).reshape(4, 3), "y": np.arange(4)}
    value = UserDict(columns) if kind == "user dict" else ALL[kind](**columns)  # type: ignore[arg-type]
    found = joined(np.stack, [mapped(np.asarray, value)] * 2)
    wanted = dict if kind == "default dict" else type(value)
    assert type(found) is wanted and of(found, "y").shape == (2, 4)
    assert [array.shape for array in arrays_in(found)] == [(2, 4, 3), (2, 4)]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (batch_kinds.Data(1, 2), "Data, a dataclass"),
        (batch_kinds.Attributes(1, 2), "Attributes, whose class takes no dict"),  # type: ignore[arg-type]
    ],
)
def test_tensorflow_refuses_others_by_their_name(value: Any, found: str) -> None:
    with pytest.raises(RequestError, match=found):
        mapped(np.asarray, [value])
