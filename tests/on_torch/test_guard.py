"""Steps that go bad: seen by all ranks alike, undone to the bit,
and whose fault it was is named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import contract_tasks
import guard_tasks
from allranks.errors import BadStep, ProgramError
from allranks.job.job import Job
from allranks.job.run_folder import read_events, read_rows
from allranks.torch import Trainer
from allranks.torch.data.batch import Batch
from allranks.torch.step.gradients import length
from allranks.training.guard import ENOUGH, SKIPPED_IN_A_ROW, WINDOW, Bad, Guard
from allranks.training.order import Order
from conftest import Train
from guard_tasks import BAD, SPIKE_STEP, place_of, spiky_sample

OnRanks = Callable[..., Any]
SETTINGS: list[tuple[int, dict[str, Any]]] = [
    (1, {"strategy": "single"}),
    (1, {"strategy": "ddp"}),
    (3, {"strategy": "ddp"}),
    (3, {"strategy": "ddp:bucket_mb=0.0005"}),
    (3, {"strategy": "ddp-plain"}),
]
BATCH = Batch(7, 0, 7, 24, None, (), np.empty(0, np.int64))


@pytest.mark.slow(but=1, most=2)
@pytest.mark.thinned(1, ("ranks,job", SETTINGS), ("clip", [None, 0.3]))
def test_every_policy_with_every_kind_of_bad_step(
    ranks: int, job: dict[str, Any], clip: float | None, on_ranks: OnRanks
) -> None:
    place = dataclasses.asdict(place_of(BAD, ranks))
    fields = {"clip_norm": clip}
    argument = {"task": "BadImages", "job": job, "place": place, "fields": fields}
    on_ranks(ranks, "guard_tasks:every_policy", argument)


@pytest.mark.slow(most=1)
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_policy_under_bitwise(ranks: int, on_ranks: OnRanks) -> None:
    """A model that writes buffers of its own is refused there."""
    place = dataclasses.asdict(place_of(BAD, ranks))
    argument = {"task": "BadImagesOnly", "job": {"bitwise": True}, "place": place, "fields": {}}
    on_ranks(ranks, "guard_tasks:every_policy", argument)


def by_hand(steps: int) -> dict[str, Tensor]:
    """A plain loop that passes over each batch with the bad sample."""
    task = guard_tasks.BadPlain()
    torch.manual_seed(0)
    model = task.model().double()
    optimizer = task.optimizer(model)
    data = task.train_data()
    order = Order(len(data[0]), task.batch_size, 0, "keep")
    updates = 0
    for step in range(steps):
        chosen = order.batch(*divmod(step, order.steps_per_epoch))
        if BAD in chosen:
            continue
        batch = tuple(tensor[chosen] for tensor in data)
        optimizer.zero_grad()
        task.loss(model(batch[0]), batch).mean().backward()
        optimizer.param_groups[0]["lr"] = 1e-2 * 0.9**updates
        optimizer.step()
        updates += 1
    assert 0 < updates < steps
    return dict(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "job"),
    [
        (1, {"strategy": "single"}),
        (3, {"strategy": "ddp"}),
        (3, {"strategy": "ddp-plain"}),
        (3, {"bitwise": True}),
    ],
    ids=str,
)
def test_a_run_that_skips_is_a_plain_loop_that_skips(
    ranks: int, job: dict[str, Any], on_ranks: OnRanks, tmp_path: Path
) -> None:
    job = {**job, "on_bad_step": "skip", "precision": "fp64", "steps": 14}
    argument = {"task": "BadPlain", "job": job, "out": str(tmp_path)}
    on_ranks(ranks, "guard_tasks:train_and_save", argument)
    wanted = by_hand(14)
    for rank in range(ranks):
        found = load_file(tmp_path / f"rank-{rank}.safetensors")
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)


def told(task: str, ranks: int, on_ranks: OnRanks, out: Path, **job: Any) -> list[list[Any]]:
    """What all ranks were told alike: pairs of the step and the words."""
    job = {"on_bad_step": "skip", "steps": 5, **job}
    argument = {"task": task, "job": job, "out": str(out)}
    on_ranks(ranks, "guard_tasks:messages", argument)
    found = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    assert all(row == found[0] for row in found)
    rows: list[list[Any]] = found[0]
    return rows


@pytest.mark.slow(most=1)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_gradient_that_goes_bad_inside_the_model_is_traced_to_its_sample(
    ranks: int, on_ranks: OnRanks, tmp_path: Path
) -> None:
    place = place_of(BAD, ranks)
    for limit in (None, 2):
        ((step, text),) = told("BadInsideNoBias", ranks, on_ranks, tmp_path, micro_batch=limit)
        assert step == place.step
        assert f"rank {place.rank}: the gradient of sample {BAD} (shard {place.shard})" in text
        assert "not finite for '0.weight', first seen in the gradient at the output of " in text
        assert "module '0'" in text


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("ranks", [1, 3])
def test_of_a_loss_over_the_batch_the_rank_and_its_outputs_are_named(
    ranks: int, on_ranks: OnRanks, tmp_path: Path
) -> None:
    place = place_of(BAD, ranks)
    ((step, text),) = told("BadPairs", ranks, on_ranks, tmp_path)
    assert step == place.step
    assert text.endswith(
        f"; rank {place.rank}: the output of sample {BAD} (shard {place.shard}) is not finite, "
        "first seen in the output of module 'right'"
    )


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_bad_step_of_a_stream_is_not_its_end(
    ranks: int, on_ranks: OnRanks, tmp_path: Path
) -> None:
    """A stream has no sample numbers: the shard, and which of its samples in this step."""
    ((step, text),) = told("BadStream", ranks, on_ranks, tmp_path, steps=8)
    rank = {1: 0, 3: 1}[ranks]
    assert step == 0
    assert text == f"step 0: the loss is nan and the gradient is not finite; rank {rank}: " + (
        "the loss of sample 2 (shard 5) is nan"
    )


def test_a_bad_regularizer_is_nobodys_sample(on_ranks: OnRanks, tmp_path: Path) -> None:
    rows = told("BadRegularizer", 3, on_ranks, tmp_path, steps=1)
    assert rows[0][1].endswith("; the regularizer is inf") or "-inf" in rows[0][1]


def test_a_rank_that_trains_alone_judges_for_itself(on_ranks: OnRanks, tmp_path: Path) -> None:
    place = place_of(BAD, 3)
    job = {"strategy": "independent", "on_bad_step": "skip", "steps": 5}
    argument = {"task": "BadPlain", "job": job, "out": str(tmp_path)}
    on_ranks(3, "guard_tasks:messages", argument)
    for rank in range(3):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert [row[0] for row in found] == [place.step] * (rank == place.rank)
        assert all(f"rank {rank}: the loss of sample {BAD}" in row[1] for row in found)


@pytest.mark.slow(most=1)
@pytest.mark.parametrize(
    ("ranks", "job"),
    [
        (1, {"strategy": "single"}),
        (3, {"strategy": "ddp"}),
        (3, {"strategy": "ddp-plain"}),
        (3, {"bitwise": True}),
    ],
    ids=str,
)
def test_a_gradient_far_longer_than_usual(
    ranks: int, job: dict[str, Any], on_ranks: OnRanks, tmp_path: Path
) -> None:
    def go(policy: str, spike: float | None) -> tuple[list[Any], dict[str, Tensor]]:
        given = {**job, "on_bad_step": policy, "spike": spike, "steps": 30}
        argument = {"task": "Spiky", "job": given, "out": str(tmp_path)}
        on_ranks(ranks, "guard_tasks:train_and_save", argument)
        rows = json.loads((tmp_path / "rank-0.json").read_text())
        return rows, load_file(tmp_path / f"rank-{ranks - 1}.safetensors")

    rows, skipped = go("skip", 10.0)
    ((step, updated, text, _),) = [row for row in rows if row[2]]
    place = place_of(spiky_sample(), ranks, batch_size=4, shards=4)
    assert (step, updated, place.step) == (SPIKE_STEP, False, SPIKE_STEP)
    assert "times the usual" in text
    assert f"; rank {place.rank} adds most, " in text
    assert f", of sample {spiky_sample()} (shard {place.shard})" in text
    rows, warned = go("warn", 10.0)
    assert [row[:2] for row in rows if row[2]] == [[SPIKE_STEP, True]]
    rows, unguarded = go("stop", None)
    assert not [row for row in rows if row[2]]
    for name, tensor in unguarded.items():
        assert torch.equal(warned[name], tensor), "a warning must not change the update"
    assert not all(torch.equal(skipped[name], tensor) for name, tensor in unguarded.items())


def test_a_long_row_of_skipped_steps_ends_the_job() -> None:
    with Trainer(guard_tasks.AlwaysBad(), Job(on_bad_step="skip", steps=30)) as trainer:
        steps = trainer.batches()
        for _ in range(SKIPPED_IN_A_ROW - 1):
            assert not trainer.step(next(steps)).updated
        with pytest.raises(BadStep, match="the last of 20 bad steps in a row"):
            trainer.step(next(steps))


def test_the_row_of_skipped_steps_is_part_of_the_state() -> None:
    guard = Guard("skip")
    for _ in range(SKIPPED_IN_A_ROW - 1):
        guard.decide(BATCH, Bad("the loss is nan"))
    again = Guard("skip")
    again.load_state(json.loads(json.dumps(guard.state())))
    with pytest.raises(BadStep):
        again.decide(BATCH, Bad("the loss is nan"))
    assert guard.judge(1.0, 1.0) is None
    assert guard.skipped_in_a_row == 0


def test_the_window_of_usual_lengths_is_part_of_the_state() -> None:
    guard = Guard("skip", spike=10)
    for _ in range(ENOUGH - 1):
        assert guard.judge(1.0, 1.0) is None
    assert guard.judge(1.0, 50.0) is None, "too few steps to call anything a spike"
    again = Guard("skip", spike=10)
    again.load_state(json.loads(json.dumps(guard.state())))
    for judge in (guard.judge, again.judge):
        assert judge(1.0, 9.9) is None
        spike = judge(1.0, 11.0)
        assert spike is not None and spike.spiked and "11 times the usual 1" in spike.problem


def test_the_usual_length_is_that_of_the_last_good_steps() -> None:
    guard = Guard("skip", spike=10)
    rng = np.random.default_rng(0)
    norms = [float(norm) for norm in rng.uniform(1, 2, 3 * WINDOW)]
    for norm in norms:
        assert guard.judge(1.0, norm) is None
    usual = sorted(norms[-WINDOW:])[WINDOW // 2]
    assert guard.judge(1.0, 10.001 * usual) is not None
    assert guard.state()["norms"] == norms[-WINDOW:], "a spike is not usual"
    assert guard.judge(1.0, 9.999 * usual) is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_length_is_finite_exactly_if_every_element_is(value: float) -> None:
    gradients = [torch.ones(3), torch.ones(2, 2)]
    assert length(gradients) == pytest.approx(7**0.5)
    gradients[1][1, 0] = value
    assert not np.isfinite(length(gradients))
    assert not np.isfinite(length(gradients, torch.float64))
    huge = [torch.full((4,), 1e30)]
    assert length(huge, torch.float64) == pytest.approx(2e30)
    assert length([]) == 0


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_whose_square_is_too_large_is_no_bad_step(clip: float | None) -> None:
    """1e30 is a number in fp32, its square is not."""

    class Huge(contract_tasks.Plain):
        def loss(self, output: Tensor, batch: Any) -> Tensor:
            return output.squeeze(1) * 1e30

        def optimizer(self, model: Any) -> Any:
            return torch.optim.SGD(model.parameters(), lr=1e-30)

    with Trainer(Huge(clip_norm=clip), Job(steps=1)) as trainer:
        result = trainer.step(next(trainer.batches()))
        assert result.bad == "" and result.grad_norm is not None
        assert 1e29 < result.grad_norm < 1e33


def test_sparse_gradients_have_a_length() -> None:
    class Sparse(contract_tasks.Words):
        def model(self) -> Any:
            return torch.nn.Embedding(self.vocabulary, self.vocabulary, sparse=True)

        def regularizer(self, model: Any) -> Any:
            return None

        def inputs(self, batch: Any) -> Any:
            return batch["text"][:, :-1]

        def optimizer(self, model: Any) -> Any:
            return torch.optim.SparseAdam(model.parameters(), lr=1e-2)

    with Trainer(Sparse(), Job(steps=1)) as trainer:
        result = trainer.step(next(trainer.batches()))
        gradient = trainer.strategy.step.parameters[0].grad
        assert gradient is not None and result.grad_norm == pytest.approx(
            float(gradient.to_dense().norm())
        )


@pytest.mark.slow(most=1)
@pytest.mark.parametrize("task", ["Images", "Words", "Experts", "PulledExperts"])
def test_the_length_is_reported_alike_by_every_strategy(
    task: str, on_ranks: OnRanks, tmp_path: Path
) -> None:
    """Clipping, a regularizer on weights that nobody used, and buckets: one number."""
    fields = {"clip_norm": None} if task == "Images" else {}
    norms = {}
    jobs: list[tuple[int, dict[str, Any]]] = [
        *((1, {"strategy": "single"}), (3, {"strategy": "ddp-plain"}), (3, {"strategy": "ddp"})),
        *((3, {"strategy": "ddp:bucket_mb=0.0005"}), (3, {"bitwise": True})),
    ]
    for ranks, job in jobs:
        given = {**job, "precision": "fp64", "steps": 6}
        argument = {"task": task, "fields": fields, "job": given, "out": str(tmp_path)}
        on_ranks(ranks, "guard_tasks:train_and_save", argument)
        rows = json.loads((tmp_path / "rank-0.json").read_text())
        norms[str(job)] = [row[3] for row in rows]
    first, *others = norms.values()
    for other in others:
        assert other == pytest.approx(first, rel=1e-9)


@pytest.mark.slow
def test_the_length_is_the_same_to_the_bit_under_bitwise(train: Train) -> None:
    """A decision hangs on it: whether a step is a spike."""
    found = []
    for ranks in (1, 2, 4):
        result = train("contract_tasks:Words", ranks=ranks, bitwise=True, steps=8)
        rows = read_rows(result.run_dir / "metrics.jsonl")
        found.append([row["grad_norm"] for row in rows])
    assert len(found[0]) == 8
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["Langevin", "NoisyRegularizer"])
def test_random_numbers_of_the_update_are_those_of_all_ranks(task: str, train: Train) -> None:
    digests = set()
    for ranks in (1, 2, 4):
        result = train(f"guard_tasks:{task}", ranks=ranks, bitwise=True, steps=8, verify_every=1)
        digests.add(result.summary["weights_sha256"])
    assert len(digests) == 1


# --- in the ranks of a job -----------------------------------------------------------------


def test_a_job_stops_at_a_bad_step_and_the_report_says_who(train: Train) -> None:
    with pytest.raises(ProgramError) as raised:
        train("contract_tasks:Plain", ranks=2, steps=6, inject="nan@rank=1,step=3", max_restarts=0)
    text = str(raised.value)
    assert raised.value.exit_code == 1
    assert "BadStep: step 3: the loss is nan" in text
    first = Order(contract_tasks.SAMPLES, 24, 0, "keep").batch(0, 3)[12]
    assert f"rank 1: the loss of sample {first} (shard 4) is nan" in text
    assert BadStep.passing is False


def test_a_job_that_skips_goes_on_and_records_it(train: Train) -> None:
    job = {"ranks": 2, "steps": 6, "on_bad_step": "skip"}
    result = train("contract_tasks:Plain", inject="nan@rank=1,step=3", **job)
    assert result.summary["steps"] == 5
    assert np.isfinite(result.summary["train_loss"])
    rows = list(read_rows(result.run_dir / "metrics.jsonl"))
    assert [row["step"] for row in rows] == list(range(6))
    assert [row["step"] for row in rows if "bad" in row] == [3]
    events = [e for e in read_events(result.run_dir) if e["event"] == "bad_step"]
    assert [(e["rank"], e["step"], e["bad"]) for e in events] == [(0, 3, rows[3]["bad"])]
    ((rank, found),) = events[0]["culprits"]
    assert rank == 1 and rows[3]["bad"].endswith(f"; rank 1: {found}")


def test_a_poisoned_loss_over_the_batch_names_the_rank(train: Train) -> None:
    job = {"ranks": 2, "steps": 3, "on_bad_step": "skip", "inject": "nan@rank=1,step=1"}
    result = train("contract_tasks:Pairs", **job)
    ((_, text),) = [
        (row["step"], row["bad"])
        for row in read_rows(result.run_dir / "metrics.jsonl")
        if "bad" in row
    ]
    assert "; rank 1: the output of samples " in text and "rank 0" not in text
