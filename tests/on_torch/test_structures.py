"""Batches and outputs of every kind: none is changed by what watches, none loses its type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.torch import Trainer
from allranks.torch.data.loaders import rows_between
from allranks.torch.data.nested import copied, map_tensors, structure_of, tensors_in
from allranks.torch.data.rows import taken_apart
from allranks.torch.model.digest import weights_sha256
from allranks.torch.model.precision import Precision
from allranks.torch.witness.same_data import digest_of
from batch_kinds import ALL, KINDS, Kinds, Locked, Plain, Shared, of, put
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


def trained(kind: str, how: str, *, output: str = "", **job: Any) -> tuple[str, Any]:
    """The digest of the weights after four steps in this process, and what the witness said."""
    task = Kinds(kind=kind, how=how, output=output)
    with Trainer(task, Job(**{"steps": 4, **job})) as trainer:
        trainer.rehearse()
        for batch in trainer.batches():
            trainer.step(batch)
        return weights_sha256(trainer.weights()), trainer.witness.testimony


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


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_cut_cast_and_told_apart_in_every_kind(kind: str) -> None:
    if kind in ("dataclass", "slots"):  # they have a text, which has no rows
        value: Any = made("object")
    else:
        value = made(kind) if kind != "nested" else {"in": [Plain(made("object"), None)]}
    rows = rows_between(value, 1, 3, 4)
    assert type(rows) is type(value) and of(rows, "y").tolist() == [1, 2]
    double = Precision(CPU, torch.float64).to_device(made(kind))
    assert of(double, "x").dtype == torch.float64 and type(double) is type(made(kind))
    apart = taken_apart(made(kind), 4)
    again = apart.put_together({n: t[:2] for n, t in apart.tensors.items()}, apart.lists)
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


@pytest.mark.parametrize("job", [{"ranks": 2}, {"ranks": 1, "micro_batch": 2}])
@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("tensor", "tuple")])
@pytest.mark.slow(but=4)
def test_every_kind_trains_as_a_tuple_does(kind: str, job: dict[str, Any], train: Train) -> None:
    job = {"steps": 4, "precision": "fp64", "threads": 1, **job}
    for task in ("Kinds", "OverBatch"):
        digests = {
            train(f"batch_kinds:{task}", f"kind={one}", f"output={one}", **job).summary[
                "weights_sha256"
            ]
            for one in (kind, "tuple")
        }
        assert len(digests) == 1
