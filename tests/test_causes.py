"""Causes: told where undoing one makes a difference vanish, and nowhere else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from allranks.job.config import resolve
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import run_job
from allranks.strategies.mesh import Mesh, replicated_mesh
from allranks.tools.check.causes.cause import ConfirmedCause, Evidence, read_parts
from allranks.tools.check.causes.diagnose import CAUSES, diagnosed
from allranks.tools.check.compare import FP64, RecordedTrace, compare
from launch_host import Host
from planted_faults import PLANTED
from test_planted_faults import SOURCE, check_in_a_copy

SIZES = (3, 3, 2, 1)  # samples of four shards; two ranks have two each
RANK = (0, 0, 1, 1)
NAMES = ("a.bias", "a.weight", "b.weight")
SHAPES = {"a.bias": (4,), "a.weight": (4, 3), "b.weight": (2, 4)}
Tensors = dict[str, Any]


def made(seed: int = 3) -> tuple[list[Tensors], list[float]]:
    """The gradients of the sums of the losses of each shard, and these sums."""
    random = np.random.default_rng(seed)
    gradients = [{name: random.normal(size=SHAPES[name]) for name in NAMES} for _ in SIZES]
    return gradients, list(random.uniform(1, 2, len(SIZES)) * SIZES)


def mixed(factors: list[float]) -> Tensors:
    """The sum of the shards' gradients, each times its factor."""
    gradients, _ = made()
    return {n: sum(f * g[n] for f, g in zip(factors, gradients, strict=True)) for n in NAMES}


RIGHT = [1 / sum(SIZES)] * len(SIZES)


def staged(tensors: Tensors) -> Tensors:
    """As a trace names them: gradients, where a name does not say its stage."""
    return {n if "/" in n else f"gradient/{n}": array for n, array in tensors.items()}


def write_trace(
    folder: Path, step: int, ranks: list[Tensors], rows: Mapping[str, Any], before: Tensors
) -> RecordedTrace:
    """A trace of one step of so many ranks; `ranks` has the gradients of each."""
    for rank, tensors in enumerate(ranks):
        place = folder / "tensors" / (f"rank-{rank:03d}" if rank else "")
        place.mkdir(parents=True, exist_ok=True)
        arrays = staged(tensors)
        save_file({"weight/w": np.zeros(2)}, place / "start.safetensors")
        save_file(arrays, place / f"step-{step:08d}.safetensors")
        if before and step:
            save_file(before, place / f"step-{step - 1:08d}.safetensors")
        digests = {name: array.tobytes().hex() for name, array in arrays.items()}
        usual = {"ids": [], "loss": 1.0, "samples": 9, "weight": 9.0, "learning_rate": 0.1}
        usual |= {"grad_norm": 1.0, "overflow": False, "magnitude": 9.0}
        row = {"step": step, **usual, **rows, "digests": digests}
        lines = [{"step": -1, "digests": {}}, row]
        text = "".join(json.dumps(one) + "\n" for one in lines)
        (folder / f"rank-{rank:03d}.jsonl").write_text(text)
    return RecordedTrace(folder)


def told(
    tmp_path: Path,
    ranks: list[Tensors],
    *,
    mesh: Mesh | None = None,
    step: int = 0,
    before: Tensors | None = None,
    alone: Tensors | None = None,
    **row: Any,
) -> ConfirmedCause | None:
    """The cause of what two ranks have of the gradients beside one process."""
    gradients, losses = made()
    right = write_trace(tmp_path / "one", step, [alone or mixed(RIGHT)], {}, before or {})
    ours = write_trace(tmp_path / "two", step, ranks, row, before or {})
    parts = [
        {"rank": rank, "micro": rank, "shard": shard, "samples": size, "values": size}
        | {"loss": loss, "weight": float(size)}
        for shard, (rank, size, loss) in enumerate(zip(RANK, SIZES, losses, strict=True))
    ]
    (tmp_path / "one" / "parts").mkdir()
    tensors = {
        f"{shard}/gradient/{name}": array
        for shard, own in enumerate(gradients)
        for name, array in own.items()
    }
    save_file(tensors, tmp_path / f"one/parts/step-{step:08d}.safetensors")
    words = {"parts": parts, "if": {}}
    (tmp_path / f"one/parts/step-{step:08d}.json").write_text(json.dumps(words))
    first = compare(right, ours, FP64).first
    assert first is not None
    each = tuple(staged(own) for own in ranks)
    found = read_parts(right.path, step)
    mesh = mesh or replicated_mesh(2)
    facts = {"clip_norm": 0.05}
    return diagnosed(Evidence(first, FP64, mesh, right, ours, each, found, facts))


def alike(tensors: Tensors) -> list[Tensors]:
    return [tensors, tensors]


def times(factor: float, *names: str) -> Tensors:
    right = mixed(RIGHT)
    return {n: a * (factor if n in (names or NAMES) else 1.0) for n, a in right.items()}


@pytest.mark.parametrize(
    ("weight", "cause"), [("a.bias", "update lost"), ("teacher", "weight written by the model")]
)
def test_a_weight_that_stays_is_one_of_the_optimizer_or_of_the_model(
    weight: str, cause: str, tmp_path: Path
) -> None:
    before, moved = {f"weight/{weight}": np.ones(4)}, {f"weight/{weight}": np.arange(4.0)}
    gradients = mixed(RIGHT)
    ours = alike({**gradients, **before})
    found = told(tmp_path, ours, step=1, before=before, alone={**gradients, **moved})
    assert found is not None and found.cause == cause


OWN = [6, 6, 3, 3]  # samples of the rank that has the shard


@pytest.mark.parametrize(
    ("ranks", "cause", "words"),
    [
        (alike(mixed([1 / (2 * n) for n in OWN])), "mean of means", "(6, 3)"),
        (alike(mixed([1 / n for n in OWN])), "mean of means", "the sum of their means"),
        (alike(times(2.0)), "summed, not averaged", "the sum over the 2 ranks"),
        (alike(times(0.5)), "summed, not averaged", "divided once too often"),
        (alike(times(2.0, "a.weight")), "some gradients times ranks", "layer 'a'"),
        (alike(times(0.5, "a.bias")), "some gradients times ranks", "biases"),
        (alike(mixed([1 / 9, 1 / 9, 0, 0])), "part of a rank lost", "rank 1 brings in is lost"),
        (alike(mixed([1 / 6, 1 / 6, 0, 0])), "part of a rank lost", "mean is over the others"),
        (
            [mixed([1 / 9, 1 / 9, 0, 0]), mixed([0, 0, 1 / 9, 1 / 9])],
            "sum over ranks lost",
            "their sum over the 2 ranks was never taken",
        ),
    ],
)
def test_a_cause_is_told_with_its_evidence(
    ranks: list[Tensors], cause: str, words: str, tmp_path: Path
) -> None:
    found = told(tmp_path, ranks)
    assert found is not None and (found.cause, found.or_else) == (cause, ())
    assert words in found.says and found.do
    assert found.residual <= 1e-12 and found.limit == FP64.tensors
    data = found.to_data()
    assert data["confirmed"] and data["evidence"]["left_after_repair"] == found.residual


@pytest.mark.parametrize(
    "factors",
    [
        [1.01 / 9] * 4,  # a factor that no number of the job is
        [1.1 / 9, 1 / 9, 1 / 9, 1 / 9],  # one shard too much
        [1 / 12 + 1e-6, 1 / 12, 1 / 6, 1 / 6],  # nearly a mean of means
        [2.00001 / 9] * 4,  # nearly a sum
    ],
)
def test_what_is_not_confirmed_is_not_told(factors: list[float], tmp_path: Path) -> None:
    assert told(tmp_path, alike(mixed(factors))) is None


def test_parts_that_do_not_add_up_prove_nothing(tmp_path: Path) -> None:
    alone = {name: array + 1e-3 for name, array in mixed(RIGHT).items()}
    means = alike(mixed([1 / (2 * n) for n in OWN]))
    assert told(tmp_path, means, alone=alone) is None


def test_gradients_of_the_step_before(tmp_path: Path) -> None:
    old = {f"gradient/{name}": np.ones(SHAPES[name]) for name in NAMES}
    ours = {name: array + 2 * np.ones(SHAPES[name]) for name, array in mixed(RIGHT).items()}
    found = told(tmp_path, alike(ours), step=1, before=old)
    assert found is not None
    assert (found.cause, found.ratio) == ("gradient of the last step", 2.0)


def test_each_rank_clips_its_own(tmp_path: Path) -> None:
    each = [mixed([1 / 9, 1 / 9, 0, 0]), mixed([0, 0, 1 / 9, 1 / 9])]
    lengths = [np.sqrt(sum((array**2).sum() for array in own.values())) for own in each]
    clipped = [
        {name: array * 0.05 / (length + 1e-6) for name, array in own.items()}
        for own, length in zip(each, lengths, strict=True)
    ]
    ours = {name: clipped[0][name] + clipped[1][name] for name in NAMES}
    found = told(tmp_path, alike(ours))
    assert found is not None and found.cause == "clipped before the sum"


def test_two_causes_of_the_same_numbers_are_both_told(tmp_path: Path) -> None:
    found = told(tmp_path, alike(times(2.0)), micro_batches=[2, 2])
    assert found is not None and found.cause == "summed, not averaged"
    assert any("2 micro-batches" in other for other in found.or_else)
    assert "    or: " in str(found)


# --- the parts of a step ----------------------------------------------------------------------


def test_the_parts_of_a_step_add_up_to_its_gradient(server: ForkServer, tmp_path: Path) -> None:
    """Uneven weights, a regularizer, a frozen weight, and one that two layers use."""
    flags = {"strategy": "single", "precision": "fp64", "steps": 9, "witness": "off"}
    resolved = resolve("contract_tasks:Words", flags, ())
    traced = {"trace": True, "parts_of": 1, "cut_for": 3, "run_dir": str(tmp_path / "run")}
    job = dataclasses.replace(resolved.job, **traced)
    result = run_job(dataclasses.replace(resolved, job=job), server)
    trace = RecordedTrace(result.run_dir / "trace")
    assert trace.steps == [-1, 0, 1]  # no step follows
    parts = read_parts(trace.path, 1)
    assert parts is not None and [len(own) for own in parts.by_rank.values()] == [3, 3, 2]
    row, gradients = trace.ranks[0][1], trace.tensors(1)
    assert parts.weight == row["weight"] != sum(part.values for part in parts.each)
    shared = "embedding.weight"
    for name in (key.removeprefix("gradient/") for key in gradients if key.startswith("gradient/")):
        whole = sum(np.asarray(part.gradient(name)) for part in parts.each) / parts.weight
        added = np.asarray(parts.regularizer.get(name, 0.0))
        assert np.allclose(whole + added, gradients[f"gradient/{name}"], rtol=0, atol=1e-14), name
        assert (added != 0).any() == (name == shared)
    uses = parts.by_use[shared]
    assert len(uses) == 2 and not any(np.allclose(use, 0) for use in uses)
    alone = gradients[f"gradient/{shared}"] - parts.regularizer[shared]
    assert np.allclose(sum(uses) / parts.weight, alone, rtol=0, atol=1e-14)


# --- planted in the engine --------------------------------------------------------------------


def test_the_faults_can_be_planted_and_most_were_met_in_public() -> None:
    assert len(PLANTED) == 30
    assert sum(bool(planted.source) for planted in PLANTED.values()) >= 20
    known = {cause.name for cause in CAUSES}
    for name, planted in PLANTED.items():
        assert planted.cause in known, name
        text = (SOURCE / planted.fault.file).read_text()
        assert text.count(planted.fault.line) == 1, name


ONE_FOR_EACH_CAUSE = list({fault.cause: name for name, fault in PLANTED.items()}.values())


@pytest.mark.slow(most=7)
@pytest.mark.cases(
    "name", ONE_FOR_EACH_CAUSE, exhaustive=sorted(PLANTED.keys() - ONE_FOR_EACH_CAUSE)
)
def test_the_cause_of_a_planted_fault(name: str, host: Host, tmp_path: Path) -> None:
    planted = PLANTED[name]
    code, found, sentences = check_in_a_copy(host, tmp_path, planted.fault)
    assert code == 5
    first, fault = found["first_difference"], planted.fault
    where = first["step"], first["stage"], first["tensor"]
    assert where == (fault.step, fault.stage, fault.tensor)
    assert found["cause"]["name"] == planted.cause
    assert "cause: " in sentences and "confirmed: " in sentences and "do: " in sentences


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["weight decay of every rank", "a schedule that every rank moves on"]
)
def test_bits_that_differ_have_their_cause(name: str, host: Host, tmp_path: Path) -> None:
    """Bits say where; the same ranks in float64, by their own side, say why."""
    fault = PLANTED[name].fault
    fault = dataclasses.replace(fault, options=(*fault.options, "--bitwise", "--steps", "7"))
    code, found, sentences = check_in_a_copy(host, tmp_path, fault)
    assert code == 5, sentences
    assert found["cause"]["name"] == PLANTED[name].cause, sentences
    assert "2 ranks, fp32, bitwise: different, too: " in sentences
