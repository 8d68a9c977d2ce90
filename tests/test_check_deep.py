"""`check --deep` names the operator that computes something else, its module and its line."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

import lying_tasks
from allranks.job.config import resolve
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.tools.check.against_single import Check, CheckPlan, in_one, undisturbed
from allranks.tools.check.compare import FP64, Difference
from allranks.tools.check.operators import compare_operators, match, search_operators
from allranks.tools.check.verdict import Verdict
from allranks.torch.witness import operators
from allranks.torch.witness.operators import recorded_operators
from lying_tasks import LIES

Array = np.ndarray[Any, Any]
ROWS = np.arange(24.0).reshape(6, 4) ** 2


# --- lies -----------------------------------------------------------------------------------------


def made(server: ForkServer, folder: Path, *settings: str, **flags: Any) -> Check:
    flags = {"strategy": "ddp", "ranks": 2, "steps": 2, "precision": "fp64", **flags}
    resolved = resolve("lying_tasks:Lying", flags, settings)
    plan = CheckPlan((flags["ranks"],), flags["ranks"], 8, deep=True)
    return Check(resolved, undisturbed(resolved.job), folder, server, plan)


def assert_named(verdict: Verdict, name: str) -> None:
    assert verdict.equal is False
    found, lie = verdict.deciding.operators, LIES[name]
    assert found is not None
    assert (found.name, found.module, found.phase) == (lie.operator, lie.module, lie.phase), found
    file, line = found.line.split(":")
    source = inspect.getsource(lying_tasks).splitlines()
    assert file == "lying_tasks.py" and line_of(lie.module) in source[int(line) - 1]
    assert found.compared >= found.total - 2 > 50
    if lie.everywhere or "sum of the output" in found.text:
        return  # which rank brings a wrong term into a sum cannot be told
    assert "differs on rank 1:" in found.text
    if name.startswith("element"):
        assert ": 1 of " in found.text


def line_of(module: str) -> str:
    """What the line that calls a module has in it."""
    inner = {"attention": "torch.bmm(", "gate": "Gate.apply(", "Lying.loss()": "error("}
    return inner.get(module, f"self.{module}(")


@pytest.mark.slow(but=1, most=5)
@pytest.mark.parametrize("lie", LIES)
def test_a_kernel_that_lies_is_named(lie: str, server: ForkServer, tmp_path: Path) -> None:
    verdict = made(server, tmp_path, f"lie={lie}").verdict()
    assert_named(verdict, lie)
    assert f"operator: {LIES[lie].operator} in {LIES[lie].module}" in str(verdict)
    data = json.loads(json.dumps(verdict.to_data()))
    assert data["operators"]["name"] == LIES[lie].operator


@pytest.mark.slow(most=3)
@pytest.mark.parametrize(
    ("lie", "flags"),
    [
        ("element: linear", {"strategy": "fsdp"}),
        ("scale: attention", {"strategy": "tensor"}),
        ("reduction: linear", {"micro_batch": 3}),
        ("element: convolution", {"bitwise": True, "precision": "fp32"}),
    ],
)
def test_whatever_a_rank_holds(
    lie: str, flags: dict[str, Any], server: ForkServer, tmp_path: Path
) -> None:
    found = made(server, tmp_path, f"lie={lie}", **flags).verdict().deciding.operators
    assert found is not None and (found.name, found.module) == LIES[lie][:2]


@pytest.mark.slow
def test_the_step_that_differs_is_recorded(server: ForkServer, tmp_path: Path) -> None:
    check = made(server, tmp_path, "lie=reduction: bias", "after=2", steps=4)
    verdict = check.verdict()
    assert verdict.first is not None and verdict.first.step == 2
    assert_named(verdict, "reduction: bias")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_of_honest_kernels_none_is_named(strategy: str, server: ForkServer, tmp_path: Path) -> None:
    """Also not that which computes the accuracy of a rank's own samples."""
    check = made(server, tmp_path, strategy=strategy)
    job, first = check.job, Difference(1, "loss", None, 1.0, "", "")
    found = search_operators(first, job, in_one(job), FP64, check.run)
    assert found.name == "" and "none is named" in str(found)
    assert found.compared > 50 and (found.total == found.compared or strategy != "ddp")


@pytest.mark.slow
def test_an_equal_job_is_not_recorded(server: ForkServer, tmp_path: Path) -> None:
    verdict = made(server, tmp_path).verdict()
    assert verdict.equal and "operator" not in str(verdict)
    assert verdict.to_data()["operators"] is None
    assert not list(tmp_path.rglob("operators"))


# --- the comparison, on records made by hand --------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "way"),
    [
        ([ROWS, ROWS], [ROWS], "same"),
        ([ROWS[:2], ROWS[2:]], [ROWS[:2], ROWS[2:]], "each"),
        ([ROWS[:2], ROWS[2:]], [ROWS], "dim 0"),
        ([ROWS[:2], ROWS[2:4], ROWS[4:]], [ROWS[:3], ROWS[3:]], "dim 0"),
        ([ROWS[:, :1], ROWS[:, 1:]], [ROWS], "dim 1"),
        ([ROWS[[0, 1, 3, 4]], ROWS[[2, 5]]], [ROWS], "dim 0"),  # three samples of two tokens
        ([ROWS / 4, ROWS * 0.75], [ROWS], "sum"),
        ([ROWS.sum(), ROWS[0, 0]], [ROWS.sum()], "sum"),
        ([ROWS[:2], ROWS[4:]], [ROWS], ""),
    ],
)
def test_a_tensor_is_matched(ours: list[Array], theirs: list[Array], way: str) -> None:
    ours, theirs = [np.asarray(a) for a in ours], [np.asarray(a) for a in theirs]
    found = match(ours, theirs, range(len(ours)), 1e-10)
    assert found.kind == way and found.agrees == bool(way)
    if way:
        wrong = [*ours[:-1], ours[-1] + 1e-6 * abs(ROWS).max()]
        assert not match(wrong, theirs, range(len(ours)), 1e-10).agrees


def test_parts_of_what_all_ranks_hold_alike_do_not_add_up() -> None:
    """A kernel that halves its output on two ranks is no sum over the ranks."""
    same = match([ROWS, ROWS], [ROWS], [0, 1], 1e-10)
    halves = [ROWS / 2, ROWS / 2]
    assert match(halves, [ROWS], [0, 1], 1e-10).agrees
    assert not match(halves, [ROWS], [0, 1], 1e-10, [same]).agrees


def test_rounding_to_zero_is_no_difference() -> None:
    inputs = match([ROWS[:2], ROWS[2:]], [ROWS], [0, 1], 1e-10)
    noise = [np.full(4, 1e-13), np.full(4, -1e-13)]
    assert match(noise, [np.full(4, 1e-14)], [0, 1], 1e-10, [inputs]).agrees
    assert not match(noise, [np.full(4, 1e-14)], [0, 1], 1e-10).agrees


def written(folder: Path, *ranks: list[tuple[str, list[Array], list[Array]]]) -> Path:
    """The record of ranks: of each the name, inputs and outputs of its operators."""
    for rank, calls in enumerate(ranks):
        values: dict[str, Array] = {}
        rows = []
        for number, (name, *sides) in enumerate(calls):
            row: dict[str, Any] = {"name": name, "module": "net", "line": f"net.py:{number}"}
            row |= {"phase": "forward", "node": None if "mask" in name else 7, "writes": False}
            row["numbers"] = []
            for side, arrays in zip(("inputs", "outputs"), sides, strict=True):
                for array in arrays:
                    values[array.tobytes().hex()] = array.ravel()
                row[side] = [(array.tobytes().hex(), array.shape) for array in arrays]
            rows.append(row)
        folder.mkdir(exist_ok=True)
        save_file(values, folder / f"rank-{rank:03d}.safetensors")
        record = {"rows": rows, "reached": [7]}
        (folder / f"rank-{rank:03d}.json").write_text(json.dumps(record))
    return folder


def test_the_first_whose_inputs_agree_is_named(tmp_path: Path) -> None:
    """Not what follows from it, nor what only one side runs; both are counted."""
    a, b, wrong = ROWS[:2], ROWS[2:], ROWS[2:] + 1
    one = written(tmp_path / "one", [("aten.a", [ROWS], [ROWS]), ("aten.b", [ROWS], [ROWS])])
    two = written(
        tmp_path / "two",
        [("aten.a", [a], [a]), ("aten.c", [a], [a]), ("aten.b", [a], [a])],
        [("aten.a", [b], [wrong]), ("aten.b", [wrong], [wrong])],
    )
    found = compare_operators(two, one, 1e-10)
    assert (found.name, found.module, found.line) == ("aten.a", "net", "net.py:0")
    assert "inputs agree on both ranks; the output differs on rank 1: 16 of 24" in found.text
    assert (found.compared, found.total, found.unmatched) == (2, 3, "aten.c in net")
    assert compare_operators(one, one, 0.0).name == ""


@pytest.mark.parametrize("is_read", [True, False])
def test_what_has_no_gradient_is_named_if_it_is_read(is_read: bool, tmp_path: Path) -> None:
    mask, wrong = ROWS > 9, ROWS > 99
    read = mask * 2.0 if is_read else ROWS
    one = written(tmp_path / "one", [("mask", [ROWS], [mask]), ("aten.b", [mask], [read])])
    lying = [("mask", [ROWS], [wrong]), ("aten.b", [wrong if is_read else mask], [read])]
    found = compare_operators(written(tmp_path / "two", lying), one, 1e-10)
    assert found.name == ("mask" if is_read else "")


def test_row_numbers_and_shapes_that_fit_in_no_way_are_not_named(tmp_path: Path) -> None:
    """The rows of a rank begin at 0, and a rank may leave some out."""
    numbers = np.arange(6)
    one = written(
        tmp_path / "one", [("aten.nonzero", [ROWS], [numbers]), ("aten.pick", [ROWS], [ROWS[1:]])]
    )
    two = written(
        tmp_path / "two",
        [("aten.nonzero", [ROWS[:3]], [numbers[:3]]), ("aten.pick", [ROWS[:3]], [ROWS[1:3]])],
        [("aten.nonzero", [ROWS[3:]], [numbers[:3]]), ("aten.pick", [ROWS[3:]], [ROWS[4:]])],
    )
    found = compare_operators(two, one, 1e-10)
    assert (found.name, found.compared, found.total) == ("", 1, 2)


# --- the recorder -----------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, x: Tensor, *, factor: Tensor) -> Tensor:
        if factor.dim():
            raise ValueError("no factor")
        return torch.empty_like(x).copy_(x) * factor


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), Doubled()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x), factor=torch.tensor(2.0))


def recorded(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Array]]:
    torch.manual_seed(3)
    model, x = Twice(), torch.ones(2, 3)
    with recorded_operators(folder, 1, model):
        model(x).sum().backward()
    record = json.loads((folder / "rank-001.json").read_text())
    return record["rows"], load_file(folder / "rank-001.safetensors")


def test_calls_and_operators_are_recorded_as_they_end(tmp_path: Path) -> None:
    rows, values = recorded(tmp_path)
    found = [(row["name"], row["module"], row["phase"]) for row in rows]
    second = [n for n, m, p in found if (m, p) == ("second", "forward")]
    assert second == ["aten.empty_like.default", "aten.copy_.default", "aten.mul.Tensor", "module"]
    assert found.index(("module", "first", "forward")) < found.index(("module", "", "forward"))
    assert ("aten.mm.default", "first", "backward") in found
    assert ("aten.sum.default", "recorded()", "forward") in found
    copied = rows[found.index(("aten.copy_.default", "second", "forward"))]
    digest, shape = copied["inputs"][0]
    assert not values[digest].any() and shape == [2, 3]  # what an empty tensor happens to hold
    call = rows[found.index(("module", "second", "forward"))]
    assert [shape for _, shape in call["inputs"]] == [[2, 3], []]  # the keyword too
    assert call["line"].startswith("test_check_deep.py:")


def test_what_is_replaced_is_put_back_after_an_error(tmp_path: Path) -> None:
    before = nn.Module.__call__, torch.autograd.Function.apply
    with pytest.raises(ValueError, match="no factor"), recorded_operators(tmp_path, 0, Doubled()):
        Doubled()(torch.ones(2), factor=torch.ones(2))
    assert (nn.Module.__call__, torch.autograd.Function.apply) == before


def test_values_beyond_the_most_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path / "all")
    monkeypatch.setattr(operators, "MOST_BYTES", 100)
    rows, values = recorded(tmp_path / "some")
    assert 100 < sum(array.nbytes for array in values.values()) < 150
    assert not rows[-1]["inputs"]
    found = compare_operators(tmp_path / "some", tmp_path / "all", 0.0)
    assert 0 < found.compared < found.total == 9
