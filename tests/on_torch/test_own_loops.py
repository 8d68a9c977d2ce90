"""A loop of one's own over a trainer: what it would leave out in silence is said,
and what to do."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import contract_tasks
import data_tasks
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.job.run_folder import read_events
from allranks.launcher.processes.ports import Reservation
from allranks.torch import Trainer
from conftest import Train
from contract_tasks import made


def test_a_batch_of_ones_own_is_refused() -> None:
    with (
        Trainer(contract_tasks.Plain()) as trainer,
        pytest.raises(RequestError, match=r"for batch in trainer\.batches") as raised,
    ):
        trainer.step((made(4, 4), made(4)))  # type: ignore[arg-type]
    assert "a tuple" in raised.value.found


def test_the_same_epoch_twice_is_refused_and_the_next_one_trained() -> None:
    with Trainer(contract_tasks.Plain()) as trainer:
        for epochs in (1, 2):
            steps = [trainer.step(batch).batch_index for batch in trainer.batches(epochs=epochs)]
            assert len(steps) == 5
        with pytest.raises(RequestError, match=r"batches\(epochs=2\)"):
            list(trainer.batches(epochs=2))


def test_what_is_trained_already_needs_no_steps() -> None:
    """A loop that is started again after its end has nothing to do, and says nothing."""
    with Trainer(contract_tasks.Plain()) as trainer:
        for batch in trainer.batches(epochs=1):
            trainer.step(batch)
        state = trainer.state()
    with Trainer(contract_tasks.Plain()) as again:
        again.load_state(state)
        assert list(again.batches(epochs=1)) == []


@pytest.mark.parametrize("job", [{"ranks": 4}, {"log": "csv"}, {"devices": "3", "device": "cuda"}])
def test_what_only_the_command_does_is_refused(job: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(job))):
        Trainer(contract_tasks.Plain(), Job(**job))


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}])
def test_one_process_of_several_tasks_is_told_of_srun(
    step: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch script is one process whatever was asked; a step of one task was asked so."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}
    of_step = {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    of_task = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    for name, value in {**job, **(of_step | of_task | step if step else {})}.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True, action="always") as said:
        Trainer(contract_tasks.Plain()).close()
    assert [str(one.message) for one in said if "8 tasks" in str(one.message)] == [
        "this process trains alone, and this job of Slurm asked for 8 tasks: "
        "`srun python SCRIPT` starts one process for each"
    ] * (not step)


def test_what_the_loop_never_did_is_said() -> None:
    job = Job(early_stop="min:loss", eval_every="1")
    with (
        pytest.warns(UserWarning, match=r"early_stop='min:loss'\) did nothing"),
        Trainer(contract_tasks.Images(), job) as trainer,
    ):
        trainer.step(next(trainer.batches()))
    with Trainer(contract_tasks.Images(), job) as trainer:
        trainer.step(next(trainer.batches()))
        trainer.evaluate_if_due()


@pytest.mark.slow
def test_an_evaluation_of_the_leader_alone_is_refused(on_ranks: Callable[..., Any]) -> None:
    on_ranks(2, "own_loop_workers:alone", None)
    on_ranks(2, "own_loop_workers:others_have_left", None)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
@pytest.mark.parametrize("where", ["model", "loss"])
def test_who_loses_a_peer_hears_why_it_left(
    on_ranks: Callable[..., Any], where: str, strategy: str
) -> None:
    on_ranks(2, "own_loop_workers:one_fails", {"where": where, "strategy": strategy})


@pytest.mark.slow
@pytest.mark.parametrize("store", ["file", "port"])
def test_an_evaluation_of_the_leader_alone_on_the_way_is_refused_on_all_ranks(
    on_ranks: Callable[..., Any], store: str
) -> None:
    """The others wait for it in their next step: their wait asks in the store, whichever it is."""
    with Reservation(1) as reserved:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved.ports[0])}
        on_ranks(2, "own_loop_workers:alone_on_the_way", where if store == "port" else {})


# --- samples without numbers --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Plainly", "Bare"])
def test_what_can_only_be_iterated_is_trained_with_alike_on_any_ranks(
    train: Train, kind: str
) -> None:
    program = f"{data_tasks.__file__}:{kind}"
    runs = [train(program, ranks=n, bitwise=True, steps=7) for n in (1, 2, 3)]
    assert len({run.summary["weights_sha256"] for run in runs}) == 1
    (notes,) = [e["notes"] for e in read_events(runs[0].run_dir) if e["event"] == "data_notes"]
    assert "every rank reads all of it" in notes[0]


@pytest.mark.parametrize(
    ("method", "data", "do"),
    [
        ("train_data", lambda: iter(made(8, 4)), "begins anew"),
        ("eval_data", lambda: itertools.count(), "return list"),
        ("eval_data", data_tasks.OnceMore, "return list"),
    ],
)
def test_what_cannot_be_read_again_or_by_number_is_refused(
    method: str, data: Callable[[], Any], do: str
) -> None:
    task = type("Once", (data_tasks.Plain,), {method: lambda self: data()})()
    with Trainer(task) as trainer, pytest.raises(RequestError) as raised:
        trainer.rehearse()
    assert do in raised.value.do


def test_a_metric_that_is_a_mean_already_is_told(train: Train) -> None:
    run = train(f"{data_tasks.__file__}:MeanOfMeans", ranks=2, steps=1)
    (notes,) = [e["notes"] for e in read_events(run.run_dir) if e["event"] == "data_notes"]
    assert any("mean of the means of 3 samples" in note for note in notes)
