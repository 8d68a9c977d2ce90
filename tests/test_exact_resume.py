"""Going on is as if nothing had happened: k steps, a stop, k steps elsewhere are 2k steps.

The first half runs on one number of ranks and the second on another. Under `bitwise` the digests
are equal; in float64 weights agree within 1e-10; on as many ranks as before always to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import resume_tasks
from allranks.checkpoint.export import export_weights
from allranks.errors import ProgramError, RequestError
from allranks.job.job import Job
from allranks.job.run_folder import read_events, read_rows
from allranks.launcher.start import Result
from allranks.torch import Trainer
from conftest import Train

PAIRS = [(4, 3), (1, 2), (8, 1), (2, 4), (3, 8)]
MIDDLE, END = 3, 5  # of an epoch of 5 steps: 101 samples by 24
SAME = ("steps", "train_loss", "eval", "weights_sha256")

Whole = Callable[..., Result]


@pytest.fixture(scope="module")
def known() -> dict[Any, Result]:
    return {}


@pytest.fixture
def whole(train: Train, known: dict[Any, Result]) -> Whole:
    """A training of `steps` steps without a break, run once for all tests of this file."""

    def run(program: str, *settings: str, **flags: Any) -> Result:
        key = (program, settings, tuple(flags.items()))
        if key not in known:
            known[key] = train(program, *settings, **flags)
        return known[key]

    return run


def rows(result: Result) -> list[dict[str, Any]]:
    """What the metrics say of each step, but for the time."""
    lines = list(read_rows(result.run_dir / "metrics.jsonl"))
    for line in lines:
        del line["monotonic"]
    return lines


def assert_same(result: Result, wanted: Result, resumed_from: int) -> None:
    """Equal to the bit: weights, loss, evaluation, and every line of the metrics, each once."""
    assert {n: result.summary[n] for n in SAME} == {n: wanted.summary[n] for n in SAME}
    assert result.summary["resumed_from_step"] == resumed_from
    assert wanted.summary["resumed_from_step"] is None
    assert [row["step"] for row in rows(result)] == list(range(len(rows(wanted))))
    assert rows(result) == rows(wanted)


def resumed_event(run_dir: Path) -> dict[str, Any]:
    return [row for row in read_events(run_dir) if row["event"] == "resumed"][-1]


def difference(one: Result, other: Result) -> float:
    """The largest norm-relative difference over all tensors."""
    ours, theirs = (load_file(r.run_dir / "weights.safetensors") for r in (one, other))
    assert ours.keys() == theirs.keys()
    norm = np.linalg.norm
    return max(
        float(norm(ours[n].astype(float) - t) / max(float(norm(t.astype(float))), 1e-12))
        for n, t in theirs.items()
    )


# --- equal bits on any number of ranks ----------------------------------------------------------


@pytest.mark.slow(most=3)
@pytest.mark.thinned(1, ("first,second", PAIRS), ("k", [MIDDLE, END]))
def test_images(first: int, second: int, k: int, train: Train, whole: Whole) -> None:
    """BatchNorm, dropout, clipping, an uneven last batch, AdamW."""
    task = "contract_tasks:Images"
    wanted = whole(task, ranks=1, bitwise=True, steps=2 * k)
    half = train(task, ranks=first, bitwise=True, steps=k, checkpoint_every=100)
    assert half.summary["weights_sha256"] != wanted.summary["weights_sha256"]
    found = train("", run_dir=str(half.run_dir), ranks=second, steps=2 * k)
    assert_same(found, wanted, resumed_from=k)
    assert resumed_event(found.run_dir)["ranks_were"] == first


@pytest.mark.slow(most=4)
@pytest.mark.cases(
    ("task", "settings", "first", "second", "k", "flags"),
    [
        ("contract_tasks:Words", (), 1, 2, END, {}),
        ("contract_tasks:RandomStream", ("epochs=100",), 2, 8, 4, {}),
        ("contract_tasks:Pictures", (), 3, 2, MIDDLE, {"loader_workers": 2}),
        ("contract_tasks:RandomSplit", (), 2, 3, 2, {}),
        ("contract_tasks:Experts", (), 3, 4, MIDDLE, {}),
        ("resume_tasks:OddImages", (), 2, 1, END, {}),
        ("resume_tasks:Grouped", (), 2, 3, MIDDLE, {}),
        ("resume_tasks:Scheduled", (), 3, 2, MIDDLE, {}),
    ],
    exhaustive=[
        ("contract_tasks:Words", (), 4, 3, MIDDLE, {}),
        ("contract_tasks:Uneven", ("epochs=100",), 4, 3, MIDDLE, {}),
        ("contract_tasks:Pictures", (), 1, 4, END, {}),
        ("resume_tasks:OddImages", (), 4, 3, MIDDLE, {}),
    ],
)
def test_every_kind_of_task(
    task: str,
    settings: tuple[str, ...],
    first: int,
    second: int,
    k: int,
    flags: dict[str, Any],
    train: Train,
    whole: Whole,
) -> None:
    """A schedule, a regularizer, tied and frozen weights, streams, loader workers,
    odd optimizers."""
    wanted = whole(task, *settings, ranks=1, bitwise=True, steps=2 * k)
    half = train(task, *settings, ranks=first, bitwise=True, steps=k, checkpoint_every=100, **flags)
    found = train("", run_dir=str(half.run_dir), ranks=second, steps=2 * k)
    assert_same(found, wanted, resumed_from=k)


@pytest.mark.slow
@pytest.mark.thinned(
    1, ("task", ["contract_tasks:Images", "contract_tasks:Uneven"]), ("left", [1, 7])
)
def test_the_epochs_end_where_they_would_have(
    task: str, left: int, train: Train, whole: Whole
) -> None:
    """Stopped in the last epoch or in the first: the same steps and samples, nothing twice."""
    wanted = whole(task, "epochs=2", ranks=1, bitwise=True)
    k = len(rows(wanted)) - left
    half = train(task, "epochs=2", ranks=3, bitwise=True, steps=k, checkpoint_every=100)
    found = train("", run_dir=str(half.run_dir), ranks=2, steps=None)
    assert_same(found, wanted, resumed_from=k)
    again = train("", run_dir=str(half.run_dir))
    assert again.summary["resumed_from_step"] == len(rows(wanted))
    assert rows(again) == rows(wanted)


@pytest.mark.slow
@pytest.mark.cases(("first", "second"), [(4, 3)], exhaustive=[(1, 2)])
def test_a_rank_is_killed_and_the_job_goes_on(
    first: int, second: int, train: Train, whole: Whole, tmp_path: Path
) -> None:
    """The steps after the last checkpoint are done again, and told once."""
    run, fault = str(tmp_path / "run"), "kill@at=save:prune,step=6"  # it is there for certain
    flags = {"ranks": first, "bitwise": True, "checkpoint_every": 3}
    with pytest.raises(ProgramError):
        train("contract_tasks:Images", run_dir=run, steps=12, inject=fault, **flags)
    found = train("", run_dir=run, ranks=second)
    wanted = whole("contract_tasks:Images", ranks=1, bitwise=True, steps=12)
    assert_same(found, wanted, resumed_from=6)


@pytest.mark.slow
def test_many_stops(train: Train, whole: Whole) -> None:
    """A checkpoint of a checkpoint of a checkpoint, each on other ranks."""
    wanted = whole("contract_tasks:Images", ranks=1, bitwise=True, steps=6)
    flags = {"bitwise": True, "checkpoint_every": 1}
    found = train("contract_tasks:Images", ranks=1, steps=1, **flags)
    for steps, ranks in ((2, 3), (3, 8), (4, 2), (5, 5), (6, 4)):
        found = train("", run_dir=str(found.run_dir), ranks=ranks, steps=steps)
        assert found.summary["resumed_from_step"] == steps - 1
    assert_same(found, wanted, resumed_from=5)


@pytest.mark.slow
def test_other_loader_workers_and_other_checkpoints_change_no_bit(
    train: Train, whole: Whole
) -> None:
    task = "contract_tasks:Pictures"
    wanted = whole(task, ranks=1, bitwise=True, steps=2 * MIDDLE)
    half = train(task, ranks=2, bitwise=True, steps=MIDDLE, checkpoint_every=100)
    flags: dict[str, Any] = {"loader_workers": 3, "checkpoint_every": 1, "keep": 1}
    found = train("", run_dir=str(half.run_dir), steps=2 * MIDDLE, **flags)
    assert_same(found, wanted, resumed_from=MIDDLE)
    kept = [path.name for path in (found.run_dir / "checkpoints").iterdir()]
    assert kept == [f"step-{2 * MIDDLE:08d}"]


# --- across skipped steps -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("bad", [1, 4])  # before the stop and after it
def test_a_skipped_step_moves_the_data_and_not_the_schedule(bad: int, train: Train) -> None:
    flags: dict[str, Any] = {"on_bad_step": "skip", "inject": f"nan@step={bad},attempt=-1"}
    task = "resume_tasks:Scheduled"
    wanted = train(task, ranks=1, bitwise=True, steps=6, **flags)
    half = train(task, ranks=3, bitwise=True, steps=3, checkpoint_every=100, **flags)
    found = train("", run_dir=str(half.run_dir), ranks=2, steps=6, inject=flags["inject"])
    assert found.summary["weights_sha256"] == wanted.summary["weights_sha256"]
    assert found.summary["steps"] == wanted.summary["steps"] == 5
    assert [row["step"] for row in rows(found)] == list(range(6))
    rates = [row["learning_rate"] for row in rows(found)]
    assert rates == [row["learning_rate"] for row in rows(wanted)]
    assert rates[bad] == rates[bad + 1]


@pytest.mark.slow
def test_what_is_usual_for_a_gradient_is_not_forgotten(train: Train) -> None:
    """25 steps say how long a gradient is; a spike right after the stop is one all the same."""
    flags: dict[str, Any] = {"on_bad_step": "warn", "spike": 1.0001, "bitwise": True}
    wanted = train("contract_tasks:Plain", ranks=1, steps=50, **flags)
    half = train("contract_tasks:Plain", ranks=2, steps=25, checkpoint_every=100, **flags)
    found = train("", run_dir=str(half.run_dir), ranks=2, steps=50)
    assert any("bad" in row for row in rows(wanted)[25:45])
    assert [("bad" in row) for row in rows(found)] == [("bad" in row) for row in rows(wanted)]


# --- without bitwise ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.thinned(
    1,
    (
        "was,now",
        [
            (("single", 1), ("ddp-plain", 2)),
            (("ddp-plain", 3), ("ddp", 2)),
            (("ddp", 2), ("single", 1)),
            (("ddp", 4), ("ddp:bucket_mb=0.0005", 3)),
            (("ddp", 3), ("ddp:reduce=tree", 8)),
        ],
    ),
    ("task", ["contract_tasks:Images", "contract_tasks:Words"]),
)
def test_other_ranks_and_other_strategies_in_fp64(
    was: tuple[str, int], now: tuple[str, int], task: str, train: Train, whole: Whole
) -> None:
    wanted = whole(task, strategy="single", precision="fp64", steps=2 * MIDDLE)
    flags = {"strategy": was[0], "ranks": was[1], "checkpoint_every": 100}
    half = train(task, precision="fp64", steps=MIDDLE, **flags)
    found = train("", run_dir=str(half.run_dir), strategy=now[0], ranks=now[1], steps=2 * MIDDLE)
    assert difference(found, wanted) < 1e-10
    assert found.summary["train_loss"] == pytest.approx(wanted.summary["train_loss"], rel=1e-10)
    assert found.summary["eval"] == pytest.approx(wanted.summary["eval"], rel=1e-10)
    assert found.summary["steps"] == 2 * MIDDLE


@pytest.mark.slow(but=1)
@pytest.mark.cases(
    ("task", "ranks", "flags"),
    [
        ("contract_tasks:Images", 3, {}),
        ("contract_tasks:Pictures", 2, {"loader_workers": 1}),
        ("resume_tasks:Restless", 3, {}),
        ("resume_tasks:Averaged", 1, {}),
        ("contract_tasks:Words", 2, {"micro_batch": 3, "strategy": "ddp-plain"}),
        ("resume_tasks:Restless", 2, {"strategy": "independent"}),
    ],
    exhaustive=[
        ("contract_tasks:Pairs", 2, {}),
        ("resume_tasks:Restless", 1, {}),
        ("contract_tasks:Plain", 3, {"strategy": "independent"}),
    ],
)
def test_on_as_many_ranks_the_very_same_bits(
    task: str, ranks: int, flags: dict[str, Any], train: Train, whole: Whole, exhaustive: bool
) -> None:
    """Without bitwise; random numbers of user code in forward, from every generator, go on too."""
    flags = {"ranks": ranks, "threads": 1, **flags}
    wanted = whole(task, steps=2 * MIDDLE, **flags)
    if exhaustive:  # going on shows it too: that the same job gives the same bits
        again = train(task, steps=2 * MIDDLE, **flags)
        assert again.summary["weights_sha256"] == wanted.summary["weights_sha256"]
    half = train(task, steps=MIDDLE, checkpoint_every=100, **flags)
    found = train("", run_dir=str(half.run_dir), steps=2 * MIDDLE)
    assert_same(found, wanted, resumed_from=MIDDLE)
    assert resumed_event(found.run_dir)["random_streams_restored"] is True


@pytest.mark.slow
def test_evaluating_touches_no_random_stream(train: Train, whole: Whole) -> None:
    """With an evaluation at each save, or with none: the same training, in one go or in two."""
    task = "resume_tasks:RestlessJudged"
    flags: dict[str, Any] = {"ranks": 2, "threads": 1}
    wanted = whole(task, steps=2 * MIDDLE, **flags)
    saves: dict[str, Any] = {"checkpoint_every": 1, "best": "min:loss"}
    half = train(task, steps=MIDDLE, **saves, **flags)
    found = train("", run_dir=str(half.run_dir), steps=2 * MIDDLE)
    assert found.summary["weights_sha256"] == wanted.summary["weights_sha256"]


@pytest.mark.slow
def test_random_streams_are_not_pretended_on_other_ranks(train: Train) -> None:
    half = train("resume_tasks:Restless", ranks=2, steps=2, checkpoint_every=100)
    found = train("", run_dir=str(half.run_dir), ranks=3, steps=3)
    assert resumed_event(found.run_dir)["random_streams_restored"] is False


def test_independent_trainings_are_refused_on_other_ranks(train: Train) -> None:
    flags = {"strategy": "independent", "checkpoint_every": 100}
    half = train("contract_tasks:Plain", ranks=3, steps=2, **flags)
    with pytest.raises(RequestError) as refused:
        train("", run_dir=str(half.run_dir), ranks=2, steps=4)
    assert refused.value.found == "3 ranks that trained apart"


# --- a loop of one's own --------------------------------------------------------------------------


@pytest.mark.slow(but=1)
@pytest.mark.thinned(
    1,
    ("worker", ["saved_and_resumed", "state_and_load_state"]),
    (
        "task,strategy,ranks",
        [
            ("Images", "ddp", 3),
            ("Words", "ddp-plain", 2),
            ("Uneven", "single", 1),
            ("OddImages", "ddp:reduce=tree", 2),
            ("Restless", "ddp", 2),
            ("Averaged", "single", 1),
        ],
    ),
)
def test_a_trainer_saves_and_resumes(
    worker: str,
    task: str,
    strategy: str,
    ranks: int,
    on_ranks: Callable[..., Any],
    tmp_path: Path,
) -> None:
    job = {"strategy": strategy, "run_dir": str(tmp_path / "run")}
    argument = {"task": task, "job": job, "steps": MIDDLE}
    on_ranks(ranks, f"resume_tasks:{worker}", argument)


# --- an optimizer with two modes ------------------------------------------------------------------

TWO_MODES = "resume_tasks:ScheduleFree"


def test_an_optimizer_with_two_modes_is_evaluated_in_one_and_trained_in_the_other() -> None:
    """By hand; an evaluation leaves no bit of the training otherwise."""
    task = resume_tasks.ScheduleFree()
    with Trainer(task, Job(threads=1, precision="fp64")) as trainer:
        model, optimizer = trainer.strategy.model, trainer.strategy.step.optimizer
        trained: list[torch.Tensor] = []
        for batch in trainer.batches(steps=4):
            trainer.step(batch)
            trained = [p.detach().clone() for p in model.parameters()]
            metrics = trainer.evaluate()
            assert all(map(torch.equal, trained, model.parameters()))
        weights = {name: tensor for name, tensor in trainer.weights()}
        state = trainer.state()
        assert all(map(torch.equal, trained, model.parameters()))
        assert state["strategy"]["optimizer"]["param_groups"][0]["training"] is True
        assert metrics != trainer.task_data.evaluate()
        cast(Any, optimizer).eval()
        assert metrics == trainer.task_data.evaluate()
        assert all(torch.equal(weights[n], p) for n, p in model.named_parameters())
        assert all(torch.equal(weights[n], t) for n, t in state["strategy"]["evaluated"].items())
        trainer.evaluate()  # in the other mode, in which a callback has left it
        for weight, parameter in zip(trained, model.parameters(), strict=True):
            torch.testing.assert_close(weight, parameter.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("ddp", 2), ("fsdp", 2), ("zero1", 3), ("zero2", 2), ("tensor", 2), ("gpipe", 2), ("hsdp", 2)],
)
def test_strategies_evaluate_and_write_what_an_optimizer_with_two_modes_says(
    train: Train, whole: Whole, strategy: str, ranks: int, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"precision": "fp64", "steps": 7}
    one = whole(TWO_MODES, **flags)
    many = train(
        TWO_MODES, strategy=strategy, ranks=ranks, eval_every="3", checkpoint_every=7, **flags
    )
    assert many.summary["eval"] == pytest.approx(one.summary["eval"], rel=1e-10)
    wanted, found = (load_file(r.run_dir / "weights.safetensors") for r in (one, many))
    (checkpoint,) = (many.run_dir / "checkpoints").glob("step-*")
    export_weights(checkpoint, tmp_path / "exported")
    exported = load_file(tmp_path / "exported")
    for name, weight in wanted.items():
        np.testing.assert_allclose(found[name], weight, rtol=1e-10, atol=1e-12)
        assert np.array_equal(exported[name], found[name])


@pytest.mark.slow
def test_an_optimizer_with_two_modes_resumes_in_the_one_it_trains_in(
    train: Train, whole: Whole, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"precision": "fp64", "steps": END, "bitwise": True}
    wanted = whole(TWO_MODES, ranks=2, checkpoint_every=MIDDLE, **flags)
    run_dir = str(tmp_path / "cut")
    first = {**flags, "steps": MIDDLE}
    train(TWO_MODES, ranks=1, checkpoint_every=MIDDLE, run_dir=run_dir, **first)
    again = train(TWO_MODES, ranks=2, checkpoint_every=MIDDLE, run_dir=run_dir, **flags)
    assert_same(again, wanted, MIDDLE)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("settings", "flags", "why"),
    [
        (("ema=0.9",), {}, "two averages"),
        ((), {"strategy": "local-sgd", "ranks": 2}, "train()"),
        ((), {"strategy": "ps", "ranks": 2}, "other processes"),
        (("whole=true",), {"strategy": "zero1", "ranks": 2}, "one rank keeps its state whole"),
    ],
)
def test_an_optimizer_with_two_modes_is_refused_where_its_average_would_be_another(
    train: Train, settings: tuple[str, ...], flags: dict[str, Any], why: str
) -> None:
    with pytest.raises(RequestError, match="two modes") as raised:
        train(TWO_MODES, *settings, steps=1, **flags)
    assert why in str(raised.value)


# --- callbacks ------------------------------------------------------------------------------------

CALLED_BACK = "resume_tasks:CalledBack"


def resumed(train: Train, folder: Path, *settings: str, ranks: tuple[int, int]) -> list[Any]:
    """What callbacks say at the end, and the events, of a run that was stopped and resumed."""
    flags: dict[str, Any] = {"precision": "fp64", "run_dir": str(folder), "checkpoint_every": 3}
    train(CALLED_BACK, f"folder={folder}", *settings, ranks=ranks[0], steps=MIDDLE, **flags)
    run = train(CALLED_BACK, f"folder={folder}", *settings, ranks=ranks[1], steps=END, **flags)
    said = [json.loads((folder / f"end-{rank}.json").read_text()) for rank in range(ranks[1])]
    return [said, list(read_events(run.run_dir))]


@pytest.mark.slow
@pytest.mark.parametrize(("per_rank", "ranks"), [("false", (1, 2)), ("true", (2, 2))])
def test_the_state_of_a_callback_goes_on(
    train: Train, whole: Whole, tmp_path: Path, per_rank: str, ranks: tuple[int, int]
) -> None:
    (tmp_path / "cut").mkdir()
    train(CALLED_BACK, f"folder={tmp_path}", ranks=ranks[1], steps=END, precision="fp64")
    said, events = resumed(train, tmp_path / "cut", f"per_rank={per_rank}", ranks=ranks)
    for rank in range(ranks[1]):
        wanted = json.loads((tmp_path / f"end-{rank}.json").read_text())
        assert said[rank]["calls"] == wanted["calls"] == list(range(END))
        assert said[rank]["rank"] == wanted["rank"] == rank
        for number in ("average", "best"):
            assert said[rank][number] == pytest.approx(wanted[number], rel=1e-10)
    assert not [event for event in events if event["event"] == "callback_notes"]


def test_the_state_of_a_callback_that_is_of_a_rank_goes_on_there_alone(
    train: Train, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="another on each rank"):
        resumed(train, tmp_path, "per_rank=true", ranks=(2, 1))


@pytest.mark.slow
def test_a_callback_without_a_state_is_named_once_and_one_that_cannot_be_saved_is_refused(
    train: Train, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"steps": 4, "checkpoint_every": 2, "ranks": 2}
    run = train(CALLED_BACK, f"folder={tmp_path}", "kind=KeepsAverage", **flags)
    events = [e for e in read_events(run.run_dir) if e["event"] == "callback_notes"]
    ((note,),) = [event["notes"] for event in events]
    assert all(f"KeepsAverage.{name}" in note for name in ("average", "best", "calls"))
    with pytest.raises(RequestError, match="Fraction") as raised:
        train(CALLED_BACK, f"folder={tmp_path}", "kind=Unsaveable", **flags)
    assert "callbacks/Unsaveable/fraction" in str(raised.value)
