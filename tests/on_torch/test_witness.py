"""The witness: what follows the number of ranks is named within two steps, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import witness_tasks
from allranks.cli.display.following import in_words
from allranks.cli.display.progress import follows_ranks, in_sentences
from allranks.errors import AllranksError, ProgramError, RequestError
from allranks.job.job import Job
from allranks.job.run_folder import read_events
from allranks.launcher.start import Result
from allranks.launcher.world import World
from allranks.torch import Trainer
from allranks.torch.step.user_buffers import UserBuffers
from allranks.torch.witness.observed import SAMPLES
from allranks.torch.witness.witness import LookBudget
from conftest import Train

STEPS = 3
BUFFER = "writes '{}' in its forward pass"
WEIGHT = "forward or backward writes the weight '{}'"
APART = "ranks that must hold the same weights do not"
COUPLED = "the loss of shards .* together and one by one is .* see each other"

NAMED = {  # by one rank and by two
    "HandNorm": BUFFER.format("var"),
    "Codebook": BUFFER.format("code"),
    "Teacher": WEIGHT.format("teacher.weight"),
    "Annealed": r"changes 'passes' \(0 -> [14]\)",
    "CountsInGlobal": "changes 'global passed'",
    "OwnNoise": "draws from 'noise', a generator of its own",
    "OwnMean": "writes 'middle'",
    "OwnMeanByHook": "writes 'first.middle'",
    "Scripted": BUFFER.format("1.running_mean"),
    "PythonInLoss": "loss, weight or backward draws from Python's own generator",
    "Clamped": "the gradient of '.*weight' for shards .* a hook that is not linear",
    "Centred": COUPLED,
    "OwnDraws": "reading samples draws from 'data set rng'",
}
MENDABLE = {  # or equal to one rank, once the engine can do it
    "ShortRows": f"{WEIGHT.format('0.weight')}|{APART}",
    "StepsInBackward": f"{WEIGHT.format('0.weight')}|{APART}",
    "Masked": COUPLED,
    "Drops": COUPLED,
    "PaddedAndDropped": COUPLED,
    "Ignored": r"the weight of shards .* is \d+ and \d+: .* say which of them count with weight",
    "Balanced": "the regularizer is .* after one forward pass|which a forward "
    f"pass has computed|{APART}",
    "Clears": f"^$|{APART}",
    "NoisySteps": f"^$|{APART}",
}


def said(train: Train, task: str, **job: Any) -> tuple[str, Result | None]:
    """All that a short job says of its ranks, and its result if it came to one."""
    job = {"steps": STEPS, "precision": "fp64", **job}
    try:
        result = train(f"witness_tasks:{task}", **job)
    except AllranksError as error:
        return str(error).partition("\n\n")[0], None
    return "; ".join(result.summary["witness"]["found"]), result


@pytest.mark.slow(but=1, most=7)
@pytest.mark.thinned(1, ("task", [*NAMED]), ("ranks", [1, 2]))
def test_what_follows_the_ranks_is_named(task: str, ranks: int, train: Train) -> None:
    text, result = said(train, task, ranks=ranks)
    assert _matches(NAMED[task], text), text
    assert result is not None, "it is a warning"


CUT = [
    *(("fsdp", 2, "Centred"), ("fsdp:reduce=two-bit(threshold=0.01)", 2, "Contrasted")),
    *(("hsdp:shard=2", 4, "Contrasted"), ("fsdp:tensor=2", 4, "Contrasted")),
    *(("tensor", 2, "Contrasted"), ("tensor:data=2", 4, "Contrasted")),
    *(("expert", 2, "ContrastedByExperts"), ("gpipe", 2, "Contrasted")),
    *(("1f1b", 2, "Contrasted"), ("interleaved:chunks=1", 2, "Contrasted")),
    *(("zero-bubble", 2, "Contrasted"), ("mesh:data=2,tensor=2", 4, "Contrasted")),
    *(("mesh:data=2,pipeline=2", 4, "Contrasted"), ("fsdp", 1, "Contrasted")),
]
GRADIENT = r"the gradient of '0.weight' for shards 0, 1, 2, 3, 4, 5, 6, 7 together"


@pytest.mark.slow(most=7)
@pytest.mark.parametrize(("strategy", "ranks", "task"), CUT)
def test_where_passes_communicate_all_ranks_look(
    strategy: str, ranks: int, task: str, train: Train
) -> None:
    """No rank has the weights for a pass by itself; the batch is uneven over the ranks."""
    text, result = said(train, task, strategy=strategy, ranks=ranks)
    assert _matches(COUPLED, text), text
    assert result is not None and result.summary["witness"]["unseen"] == []


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("hsdp", marks=pytest.mark.slow)])
def test_gradients_that_are_summed_within_a_pass_are_compared(strategy: str, train: Train) -> None:
    text, _ = said(train, "ScaledByFrequency", strategy=strategy, ranks=2)
    assert _matches(GRADIENT, text), text


@pytest.mark.slow
def test_a_shard_that_ends_the_look_of_all_ranks_says_what_to_do(train: Train) -> None:
    with pytest.raises(ProgramError, match="ValueError: five samples at least") as raised:
        train("witness_tasks:WantsMany", strategy="fsdp", ranks=2, steps=STEPS)
    assert "--witness off" in str(raised.value)
    text, result = said(train, "WantsMany", ranks=2)
    assert text == "" and result is not None
    assert "ended with ValueError" in result.summary["witness"]["unseen"][0]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("task", MENDABLE)
def test_it_is_named_or_it_is_equal(task: str, train: Train) -> None:
    text, one = said(train, task)
    others, two = said(train, task, ranks=2)
    if one is not None and two is not None and not text and not others:
        assert _distance(one, two) < 1e-10
        return
    assert _matches(MENDABLE[task], others), others
    assert _matches(MENDABLE[task], text), text


def test_a_weight_that_passes_write_is_the_first_cause_of_ranks_apart(train: Train) -> None:
    with pytest.raises(AllranksError, match=r"first in teacher\.weight") as raised:
        train("witness_tasks:Teacher", ranks=3, steps=STEPS, micro_batch=3)
    first = str(raised.value).partition("\n")[0]
    assert first.endswith(f"what does that: {WEIGHT.format('teacher.weight')}: {SAMPLES}.")


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("task", ["HandNorm", "Teacher", "Annealed", "OwnNoise", "OwnDraws"])
def test_bitwise_refuses_before_the_first_update(task: str, train: Train) -> None:
    words = {**NAMED, "OwnDraws": "it draws from a generator of its own, or counts"}[task]
    with pytest.raises(RequestError, match=words) as raised:
        train(f"witness_tasks:{task}", ranks=2, steps=STEPS, bitwise=True)
    assert raised.value.asked == "--bitwise"


def test_what_is_drawn_for_a_shard_alone_is_no_reason_to_refuse(train: Train) -> None:
    """Under bitwise torch's generator is keyed for the shard: the same on one rank and on two."""
    one = said(train, "Drops", bitwise=True)
    two = said(train, "Drops", bitwise=True, ranks=2)
    assert (one[0], two[0]) == ("", "") and one[1] is not None and two[1] is not None
    assert one[1].summary["weights_sha256"] == two[1].summary["weights_sha256"]


def test_generators_in_loader_processes_are_seen_too(train: Train) -> None:
    text, _ = said(train, "OwnDraws", ranks=2, loader_workers=1)
    assert _matches("the loss of shards .* together and one by one", text)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_data_that_differs_on_another_rank_is_found_by_it(strategy: str, train: Train) -> None:
    text, _ = said(train, "OtherNumbers", ranks=2, strategy=strategy)
    assert _matches(
        r"the loss of shard \d, computed again by another rank.*samples are others", text
    )


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("OtherOrder", "first in layer 0: 'parts.one.weight .*' on rank 0, 'parts.two.weight"),
        ("OtherGroups", "first in parameter .*on rank 0, .*on rank 1"),
    ],
)
def test_models_of_another_order_are_refused_at_once(task: str, words: str, train: Train) -> None:
    with pytest.raises(RequestError, match=words):
        train(f"witness_tasks:{task}", ranks=2, steps=STEPS)


def test_stop_ends_the_job_before_the_first_update(train: Train) -> None:
    with pytest.raises(ProgramError, match=r"FollowsRanks.*'code'.*--witness warn") as raised:
        train("witness_tasks:Codebook", ranks=2, steps=STEPS, witness="stop", max_restarts=3)
    assert raised.value.exit_code == 1 and "at step 0" in str(raised.value)
    with pytest.raises(ProgramError, match=r"FollowsRanks.*hook that is not linear"):
        train("witness_tasks:Clamped", steps=STEPS, witness="stop")


# --- no word --------------------------------------------------------------------------------------

UNSEEN_OF_STREAMS = "samples of this data are not read once more"
RIGHT = [
    ("witness_tasks:Right", {}),
    ("witness_tasks:Right", {"micro_batch": 3}),
    ("witness_tasks:Right", {"ranks": 8}),
    ("witness_tasks:Attention", {"ranks": 2}),
    ("witness_tasks:Attention", {"bitwise": True, "ranks": 2}),
    ("witness_tasks:Recurrent", {"ranks": 3}),
    ("witness_tasks:Augmented", {"ranks": 2}),
    ("witness_tasks:Augmented", {"loader_workers": 2, "bitwise": True}),
    ("witness_tasks:Padded", {"ranks": 2}),
    ("contract_tasks:Images", {"ranks": 3}),
    ("contract_tasks:Images", {"strategy": "dp:replicas=3"}),
    ("contract_tasks:Words", {"ranks": 2, "micro_batch": 5}),
    ("contract_tasks:Pairs", {"ranks": 2}),
    ("contract_tasks:Experts", {"ranks": 8, "strategy": "ddp-plain"}),
    ("contract_tasks:Uneven", {"ranks": 2}),
    ("contract_tasks:Pictures", {"ranks": 2, "loader_workers": 1}),
    ("digits", {"precision": "fp32", "ranks": 2}),
    ("digits", {"precision": "bf16"}),
    ("digits", {"precision": "fp16", "bitwise": True}),
    ("contract_tasks:Images", {"precision": "bf16", "ranks": 3}),
    ("witness_tasks:InSingle", {}),
    ("witness_tasks:MadeByHooks", {"bitwise": True}),
    ("witness_tasks:MadeByHooks", {"ranks": 2}),
    ("witness_tasks:MadeByHooks", {"ranks": 2, "strategy": "fsdp"}),
    ("witness_tasks:MadeByHooks", {"ranks": 2, "strategy": "gpipe"}),
    ("witness_tasks:InSingle", {"ranks": 2, "strategy": "fsdp"}),
    ("contract_tasks:Images", {"ranks": 3, "strategy": "fsdp", "precision": "bf16"}),
    ("contract_tasks:Images", {"ranks": 8, "strategy": "hsdp:shard=4", "micro_batch": 3}),
    ("contract_tasks:Words", {"ranks": 4, "strategy": "tensor:data=2", "micro_batch": 5}),
    ("contract_tasks:Uneven", {"ranks": 3, "strategy": "fsdp"}),
    ("contract_tasks:Experts", {"ranks": 8, "strategy": "fsdp"}),
    ("contract_tasks:Mixture", {"ranks": 4, "strategy": "expert"}),
    ("pipeline_tasks:Images", {"ranks": 4, "strategy": "1f1b"}),
    ("pipeline_tasks:Words", {"ranks": 4, "strategy": "mesh:data=2,pipeline=2"}),
]


@pytest.mark.slow(but=1, most=8)
@pytest.mark.parametrize(("task", "job"), RIGHT, ids=lambda value: str(value).replace("/", ""))
def test_right_tasks_hear_no_word(task: str, job: dict[str, Any], train: Train) -> None:
    job = {"steps": 6, "precision": "fp64", **job}
    told = train(task, **job).summary["witness"]
    assert told["found"] == []
    is_stream = task.endswith("Uneven")
    assert (
        all(UNSEEN_OF_STREAMS in text for text in told["unseen"])
        if is_stream
        else (told["unseen"] == [])
    )


@pytest.mark.slow(but=1, most=6)
@pytest.mark.parametrize(
    ("task", "job"),
    [
        ("contract_tasks:Images", {"ranks": 2}),
        ("contract_tasks:Pictures", {"micro_batch": 4}),
        ("contract_tasks:Words", {"ranks": 3, "bitwise": True}),
        ("witness_tasks:Annealed", {}),
        ("witness_tasks:AnnealedLater", {}),
        ("witness_tasks:Masked", {"ranks": 2}),
        ("witness_tasks:InPlace", {}),
        ("witness_tasks:OwnDraws", {}),
        ("witness_tasks:Drops", {"ranks": 2}),
        ("witness_tasks:InPlace", {"ranks": 3, "strategy": "fsdp"}),
        ("contract_tasks:Images", {"ranks": 3, "strategy": "fsdp:offload=cpu"}),
        (
            "contract_tasks:Blocks",
            {"ranks": 2, "strategy": "fsdp", "activation_checkpointing": True},
        ),
        ("contract_tasks:Uneven", {"ranks": 3, "strategy": "fsdp:reduce=two-bit"}),
        ("contract_tasks:Mixture", {"ranks": 2, "strategy": "expert"}),
        ("contract_tasks:Words", {"ranks": 4, "strategy": "tensor:data=2"}),
        ("pipeline_tasks:Images", {"ranks": 2, "strategy": "interleaved:chunks=2"}),
        ("pipeline_tasks:Words", {"ranks": 4, "strategy": "mesh:data=2,pipeline=2"}),
    ],
)
def test_looking_changes_no_bit(task: str, job: dict[str, Any], train: Train) -> None:
    with_it, without = (train(task, **job, steps=8, witness=w) for w in ("warn", "off"))
    assert with_it.summary["weights_sha256"] == without.summary["weights_sha256"]
    assert with_it.summary["train_loss"] == without.summary["train_loss"]
    sent = [run.summary["sent_bytes"]["gradients"] for run in (with_it, without)]
    assert sent[0] == sent[1], "what it sends is of no step"
    cards = [run.summary["card_bytes_per_step"] for run in (with_it, without)]
    assert cards[0] == cards[1]
    assert without.summary["witness"] == {"asked": "off", "found": [], "unseen": [], "looks": 0}


def test_the_result_says_not_equal_where_it_is_not() -> None:
    found = ["the model writes 'code' in its forward pass: …", "forward draws from …"]
    summary = {"user_buffers": ["code", "late"], "user_randomness": ["4"], "bitwise": False}
    told = follows_ranks({**summary, "witness": {"found": found}})
    assert told[:2] == found and told[2].endswith("computed from them: late")
    assert told[3] == "layers that draw for a micro-batch: 4 (--bitwise covers them)"
    nothing = {"user_buffers": [], "user_randomness": ["4"], "bitwise": True}
    assert follows_ranks(nothing) == []


def test_what_was_not_looked_at_is_a_line_of_the_result(train: Train) -> None:
    """Live, of the record, and at the end; a run of which all was seen has no such line."""
    result = train("witness_tasks:Right", strategy="fsdp:reduce=tree", steps=2)
    (unseen,) = result.summary["witness"]["unseen"]
    line = f"the witness could not look at everything: {unseen}"
    assert f"note       {line}" in in_sentences(result.summary).splitlines()
    (event,) = [e for e in read_events(result.run_dir) if e["event"] == "witness"]
    assert in_words(event) == [f"note: {line}"]
    result.summary["witness"]["unseen"] = []
    assert "could not look" not in in_sentences(result.summary)


def test_a_loop_of_ones_own_hears_it(capfd: pytest.CaptureFixture[str]) -> None:
    with Trainer(witness_tasks.Annealed(), Job()) as trainer:
        for batch in trainer.batches(steps=1):
            trainer.step(batch)
    assert (
        "NOT equal on other numbers of ranks: forward or loss changes 'pas"
        in capfd.readouterr().err
    )


def test_every_so_many_steps_it_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that comes later is found by the next look, in the third of these."""
    monkeypatch.setattr("allranks.torch.witness.witness.WITNESS_EVERY", 4)
    with Trainer(witness_tasks.Right(), Job()) as trainer:
        trainer.witness.budget.clock = lambda: 0.0  # a look takes no time
        found = []
        for batch in trainer.batches(steps=9):
            if batch.index == 5:
                weight = trainer.strategy.step.parameters[0]
                weight.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
            trainer.step(batch)
            found.append(len(trainer.witness.testimony.found))
    assert found == [0] * 8 + [1]


def test_looks_take_a_five_hundredth_of_the_time() -> None:
    """With steps of 1 s a second look of 20 s comes after 20,000 of them, the first counts too."""
    for look_s, wanted in ((0.1, [500, 1000, 1500]), (20.0, [20000]), (0.8, [1000, 1500])):
        now, looked = 0.0, []
        budget = LookBudget(lambda: now)  # noqa: B023  read in this turn alone
        budget.begin()
        for step in range(1, 20001 if look_s > 1 else 1501):
            now += 1.0
            if step == 1 or (step % 500 == 0 and budget.allows()):
                with budget.spending():
                    now += look_s
                looked.append(step)
        assert looked == [1, *wanted], look_s


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_the_clock_of_rank_0_decides_for_all(strategy: str, train: Train) -> None:
    """Under others each rank would go its own way, and wait for the rest in vain."""
    result = train("witness_tasks:TimedLooks", strategy=strategy, ranks=2, steps=9)
    assert result.summary["witness"]["looks"] == 3
    assert "the witness computed 3 micro-batches again" in in_sentences(result.summary)


@pytest.mark.parametrize(("attempt", "restarts"), [(0, 0), (1, 1), (2, 1)])
def test_a_restart_does_not_look_twice(attempt: int, restarts: int, tmp_path: Path) -> None:
    """What was found before stands in its result; what another command starts is looked at."""
    again = attempt == restarts == 1
    job = Job(run_dir=str(tmp_path))
    with Trainer(witness_tasks.Codebook(), job) as trainer:
        for batch in trainer.batches(steps=2):
            trainer.step(batch)
        trainer.save()
        found = trainer.witness.testimony.found
    world = World(attempt=attempt, restarts=restarts)
    with Trainer(witness_tasks.Codebook(), job, world=world) as trainer:
        trainer.resume()
        assert (trainer.witness.testimony.found == found) == again
        looked = []
        for batch in trainer.batches(steps=5):
            looked.append(trainer.witness.looks_again_at(batch))
            trainer.step(batch)
        assert trainer.witness.testimony.found == found
        assert trainer.user_buffers == ["code"]
    assert looked == [False, not again, False]


def test_what_other_ranks_saw_written_is_written_here_too() -> None:
    model = nn.Module()
    model.register_buffer("code", torch.zeros(2))
    model.register_buffer("table", torch.zeros(2))
    buffers = UserBuffers(model)
    buffers.agree({"code": "the model writes 'code'", "passes": "a counter"})
    assert buffers.written == {"code"}


def _matches(words: str, text: str) -> bool:
    return re.search(words, text, re.S) is not None


def _distance(one: Result, other: Result) -> float:
    """The largest difference of a tensor of the final weights, relative to its norm."""
    left, right = (load_file(run.run_dir / "weights.safetensors") for run in (one, other))
    return max(float((left[n] - right[n]).norm() / left[n].norm().clamp(min=1e-12)) for n in left)
