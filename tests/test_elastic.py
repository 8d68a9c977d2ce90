"""Elastic jobs: ranks are lost, the others go on in the same processes, and the result is the same.

What is lost is one step at most. The digests are those of one process that nobody disturbed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from allranks.checkpoint.folder import committed, step_of
from allranks.cli.display.progress import in_sentences
from allranks.errors import PeerLost, ProgramError, RequestError
from allranks.job.config import resolve
from allranks.job.run_folder import leaders_evaluations, read_events, read_rows
from allranks.launcher.attempts import Attempts
from allranks.launcher.fault_report import RankFault
from allranks.launcher.heartbeat import Beat, Group
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.process import Exit, failure_of
from allranks.launcher.start import Result, run_job
from allranks.launcher.supervisor import Ended
from allranks.torch import Trainer, regroup
from allranks.torch.checkpoint.spare import PlacedRank, SpareState
from allranks.torch.checkpoint.state import NAMES, flatten
from allranks.torch.comm.comm import Comm
from allranks.torch.comm.rank_sync import StoreBarrier
from allranks.torch.model.placement import update_by_nothing
from allranks.torch.regroup import hand_over, make_room
from allranks.training.engine.regroup import (
    Handover,
    Position,
    Spare,
    SpareParts,
    furthest,
    newest_spare,
)
from conftest import TASKS

STEPS = 12
FILE = TASKS / "elastic_tasks.py"
PROGRAM = f"{FILE}:Elastic"
Train = Callable[..., Result]


@pytest.fixture(scope="module")
def alone(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One process that nobody disturbs."""
    flags = {"strategy": "ddp", "bitwise": True, "steps": STEPS}
    flags["run_dir"] = str(tmp_path_factory.mktemp("run") / "run")
    return run_job(resolve(PROGRAM, flags), server)


def elastic(train: Train, inject: str, program: str = PROGRAM, **flags: Any) -> Result:
    usual = {"strategy": "ddp", "bitwise": True, "steps": STEPS, "ranks": 3, "elastic": "1:3"}
    return train(program, **{**usual, "inject": inject, **flags})


def groups(result: Result) -> list[dict[str, Any]]:
    return [row for row in read_events(result.run_dir) if row["event"] == "group"]


def evaluations(result: Result) -> list[int]:
    """The steps after which leaders evaluated; they write it again if they evaluated again."""
    events = read_events(result.run_dir)
    return sorted({row["step"] for row in leaders_evaluations(events)})


def assert_undisturbed(result: Result, alone: Result) -> None:
    """The same weights, each step once in the metrics, and no process was started again."""
    assert result.summary["weights_sha256"] == alone.summary["weights_sha256"]
    assert result.summary["restarts"] == 0
    steps = [row["step"] for row in read_rows(result.run_dir / "metrics.jsonl")]
    assert steps == list(range(STEPS))
    assert not list(result.run_dir.glob(".store*"))
    assert not [name for name in os.listdir("/dev/shm") if "allranks" in name]


def assert_steps_heard(result: Result) -> None:
    """Callbacks of the last group's ranks heard each step once, each in one process.

    A rank that had not ended the step before the group received its result: it has not heard it.
    """
    group = groups(result)[-1]
    every, missed = list(range(STEPS)), set()
    for rank in group["members"]:
        rows = list(read_rows(result.run_dir / f"pids-{rank}.jsonl"))
        missed.add(tuple(sorted({*every} - {row["step"] for row in rows})))
        assert len(rows) == len({row["step"] for row in rows})
        assert len({row["pid"] for row in rows}) == 1
    assert () in missed and missed <= {(), (group["step"] - 1,)}


def test_a_rank_is_lost_and_the_others_make_the_step_again(train: Train, alone: Result) -> None:
    result = elastic(train, "kill@rank=1,step=5 fail@rank=2,step=99 fail@rank=7")
    assert_undisturbed(result, alone)
    assert "\n2 ranks at the end: ranks formed another group once, " in in_sentences(result.summary)
    never = {row["text"] for row in read_events(result.run_dir) if row["event"] == "never_due"}
    assert never == {
        "the fault fail@rank=2,step=99 was never due: the job did not come to point 'step' with "
        "step 99",
        "the fault fail@rank=7 was never due: there was no rank 7, of 3",
    }
    (group,) = groups(result)
    assert (group["members"], group["lost"]) == ([0, 2], [1])
    assert group["steps_again"] <= 1  # none if no other rank had begun the step
    assert group["step"] == 5 and group["stood_s"] > 0
    assert result.summary["groups"] == 1 and result.summary["world_size"] == 2
    assert_steps_heard(result)
    for rank in (0, 2):
        rows = list(read_rows(result.run_dir / f"pids-{rank}.jsonl"))
        assert {row["trainers"] for row in rows} == {1}, "one before has memory and sockets still"


def test_what_is_broken_off_is_not_computed_to_its_end(
    train: Train, alone: Result, tmp_path: Path
) -> None:
    """A rank has four passes in each step; it makes one of the step in which the other is lost."""
    task = {"ranks": 2, "elastic": "1:2", "bitwise": True, "strategy": "ddp", "steps": STEPS}
    result = train(f"{FILE}:Interrupted", f"notes={tmp_path}", **task)
    assert_undisturbed(result, alone)
    assert (tmp_path / "passes").read_text().split() == ["0", *8 * ["1"]]


@pytest.mark.slow
def test_callbacks_that_are_called_again_write_no_row_twice(train: Train, alone: Result) -> None:
    """Rank 1 is lost in a callback, which evaluates after each step."""
    result = elastic(train, "kill@rank=1,at=evaluate", f"{FILE}:Evaluated", share="auto")
    assert_undisturbed(result, alone)
    (group,) = groups(result)
    tables = [row for row in read_events(result.run_dir) if row["event"] == "shares"]
    dealt = [(table["step"], len(table["shares"])) for table in tables]
    assert dealt[0] == (0, 3) and (group["step"], 2) in dealt


@pytest.mark.slow
def test_a_slow_rank_is_slow_in_the_next_group(train: Train, alone: Result) -> None:
    inject = "slow@rank=0,per_sample=0.01 kill@rank=1,step=9"
    result = elastic(train, inject, share="auto")
    assert_undisturbed(result, alone)
    tables = [row for row in read_events(result.run_dir) if row["event"] == "shares"]
    first = next(table["shares"] for table in tables if len(table["shares"]) == 2)
    assert first[0] < first[1]


@pytest.mark.slow
def test_the_witness_looks_on_in_a_group_that_formed_anew(train: Train) -> None:
    """It looks every 500 steps; a later group has observed nothing itself."""
    result = elastic(train, "kill@rank=1,step=5", steps=1002, bitwise=False)
    assert result.summary["steps"] == 1002 and result.summary["groups"] == 1


LOSSES = {
    "in the first steps": ("kill@rank=1,step=1", [0, 2]),
    "the leader": ("kill@rank=0,step=5", [1, 2]),
    "the leader, before it writes the row of a step": ("kill@rank=0,step=5,at=stepped", [1, 2]),
    "two at once": ("kill@rank=0,step=5 kill@rank=2,step=5", [1]),
    "one while a group forms": ("kill@rank=1,step=5 kill@rank=0,at=regroup", [2]),
    "one after the other": ("kill@rank=1,step=3 kill@rank=0,step=7", [2]),
    "in an evaluation": ("kill@rank=2,at=evaluate", [0, 1]),
    "the leader in an evaluation": ("kill@rank=0,at=evaluate", [1, 2]),
    "in a save": ("kill@rank=1,at=save:half,step=6", [0, 2]),
    "the leader in a save": ("kill@rank=0,at=save:manifest,step=6", [1, 2]),
    "by an error of its own": ("fail@rank=1,step=5", [0, 2]),
}


@pytest.mark.slow(most=8)
@pytest.mark.parametrize("backend", ["", "gloo"])
@pytest.mark.parametrize("name", LOSSES)
def test_ranks_are_lost_anywhere(train: Train, alone: Result, name: str, backend: str) -> None:
    inject, members = LOSSES[name]
    flags = {"eval_every": "3", "checkpoint_every": 3, "keep": 9}
    result = elastic(train, inject, backend=backend, **flags)
    assert_undisturbed(result, alone)
    assert groups(result)[-1]["members"] == members
    saved = {step_of(folder) for folder in committed(result.run_dir / "checkpoints")}
    assert saved >= {9, 12}  # one that was under way may have been given up
    assert evaluations(result) == [3, 6, 9, 12]


@pytest.mark.slow
def test_an_evaluation_that_a_lost_leader_did_not_write(train: Train, alone: Result) -> None:
    result = elastic(train, "", f"{FILE}:DiesEvaluated", eval_every="3", log="csv")
    assert_undisturbed(result, alone)
    assert evaluations(result) == [3, 6, 9, 12]
    table = (result.run_dir / "evaluations.csv").read_text().splitlines()[1:]
    assert [int(line.split(",")[0]) for line in table] == [3, 6, 9, 12]


@pytest.mark.slow
def test_a_bad_step_that_a_lost_leader_did_not_write(train: Train) -> None:
    """It is made on a rank that was not the leader, before the step is in the metrics."""
    faults = "nan@rank=1,step=4 kill@rank=0,at=stepped,step=4"
    result = elastic(train, faults, on_bad_step="skip", log="csv")
    rows = {row["step"]: row for row in read_rows(result.run_dir / "metrics.jsonl")}
    assert list(rows) == list(range(STEPS))
    events = [row for row in read_events(result.run_dir) if row["event"] == "bad_step"]
    assert [(row["step"], row["rank"], row["bad"]) for row in events] == [(4, 1, rows[4]["bad"])]
    assert events[0]["culprits"] == rows[4]["culprits"] and rows[4]["culprits"][0][0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["", "gloo"])
def test_a_rank_that_is_behind_receives_the_state(
    train: Train, alone: Result, backend: str
) -> None:
    result = elastic(train, "kill@rank=1,step=7", f"{FILE}:Late", backend=backend)
    assert_undisturbed(result, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "loaded"), [("ddp", None), ("fsdp", "checkpoint"), ("fsdp", "spare")]
)
def test_a_planned_group_begins_between_two_steps(
    train: Train, alone: Result, strategy: str, loaded: str | None
) -> None:
    """Under `fsdp` that step is saved by all, though no checkpoint is due, or copied."""
    flags = {"strategy": strategy, "checkpoint_every": 6 if strategy == "ddp" else 20}
    result = elastic(train, "", f"{FILE}:Planned", **flags, spare_state=loaded == "spare")
    assert_undisturbed(result, alone)
    (group,) = groups(result)
    assert (group["step"], group["steps_again"], group["lost"]) == (6, 0, [])
    assert group.get("loaded_from") == loaded


@pytest.mark.slow
def test_what_is_received_is_compared(train: Train) -> None:
    with pytest.raises(ProgramError, match=r"do not: .*formed a group anew"):
        elastic(train, "kill@rank=1,step=7", f"{FILE}:Lies")


CUT = {"checkpoint_every": 3, "keep": 9, "eval_every": "3"}


@pytest.mark.slow(most=2)
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_parts_of_the_state_come_from_the_newest_checkpoint(
    train: Train, alone: Result, strategy: str
) -> None:
    """The leader is lost, later the save of step 9 is given up; then nobody is left to sum with."""
    inject = "kill@rank=0,step=8 kill@rank=1,at=save:half,step=9"
    result = elastic(train, inject, strategy=strategy, **CUT)
    assert_undisturbed(result, alone)
    first, second = groups(result)
    assert first["members"] == [1, 2] and first["step"] in (3, 6), "6 may have been given up"
    assert first["steps_again"] == 9 - first["step"]
    assert (second["members"], second["step"]) == ([2], 6) and second["steps_again"] >= 3
    assert result.summary["steps_again"] == first["steps_again"] + second["steps_again"]
    rows = list(read_rows(result.run_dir / "pids-2.jsonl"))
    assert len({row["pid"] for row in rows}) == 1


@pytest.mark.slow
def test_without_a_checkpoint_they_begin_anew(train: Train, alone: Result) -> None:
    result = elastic(train, "kill@rank=1,step=5", strategy="fsdp")
    assert_undisturbed(result, alone)
    assert result.summary["steps_again"] == 6


SPARED = {
    "the leader": ("zero1", "kill@rank=0,step=5", [1, 2, 3]),
    "after its update": ("fsdp", "kill@rank=1,step=5,at=stepped", [0, 2, 3]),
    "the last, whose copy the first has": ("zero2", "kill@rank=3,step=5", [0, 1, 2]),
    "two that are not neighbours": ("zero1", "kill@rank=0,step=5 kill@rank=2,step=5", [1, 3]),
    "one while a group forms": ("zero2", "kill@rank=1,step=5 kill@rank=3,at=regroup", [0, 2]),
    "one after the other": ("fsdp", "kill@rank=1,step=5 kill@rank=2,step=6", [0, 3]),
    "in an evaluation": ("fsdp", "kill@rank=2,at=evaluate", [0, 1, 3]),
    "of replicas": ("hsdp", "kill@rank=1,step=3 kill@rank=3,step=7", [0, 2]),
    "all but one": ("hsdp", "kill@rank=0,step=3 kill@rank=2,step=3 kill@rank=1,step=7", [3]),
    "in the first step": ("zero1", "kill@rank=2,step=1", [0, 1, 3]),
}


def spared(train: Train, inject: str, strategy: str, **flags: Any) -> Result:
    usual = {"ranks": 4, "elastic": "1:4", "strategy": strategy, "spare_state": True}
    return elastic(train, inject, **{**usual, **flags})


@pytest.mark.slow(most=7)
@pytest.mark.parametrize("name", SPARED)
def test_parts_of_the_state_come_from_copies(train: Train, alone: Result, name: str) -> None:
    """There is no checkpoint, and at most one step is made again for each loss."""
    strategy, inject, members = SPARED[name]
    result = spared(train, inject, strategy, eval_every="5")
    assert_undisturbed(result, alone)
    assert groups(result)[-1]["members"] == members
    for group in groups(result):
        assert (group["loaded_from"], group["parts_lost"]) == ("spare", [])
        assert group["steps_again"] <= 1
    assert not (result.run_dir / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_every", [None, 3])
def test_without_a_part_and_its_copy_the_checkpoint_is_loaded(
    train: Train, alone: Result, checkpoint_every: int | None
) -> None:
    """Ranks 1 and 2 are neighbours: nobody has the part of rank 1."""
    inject = "kill@rank=1,step=7 kill@rank=2,step=7"
    flags = {"checkpoint_every": checkpoint_every, "keep": 9}
    result = spared(train, inject, "fsdp", **flags)
    assert_undisturbed(result, alone)
    group = groups(result)[-1]
    loaded = "start" if checkpoint_every is None else "checkpoint"
    assert (group["loaded_from"], group["parts_lost"]) == (loaded, [1])
    assert group["step"] == (0 if checkpoint_every is None else 6)


def killed_in(step: int, rank: int) -> str:
    """A kill when all others are in that step too: one between two steps hands over no parts."""
    return f"slow@rank={rank},step={step},seconds=0.4 kill@rank={rank},step={step}"


REPLICAS = {
    "one of two, then one of none": (
        f"{killed_in(5, rank=2)} {killed_in(8, rank=0)}",
        PROGRAM,
        [([0, 1, 3], "replicas"), ([1, 3], "start")],
    ),
    "both": ("kill@rank=1,step=7 kill@rank=3,step=7", PROGRAM, [([0, 2], "start")]),
    "one while a group forms": (
        f"{killed_in(5, rank=1)} kill@rank=2,at=regroup",
        PROGRAM,
        [([0, 3], "replicas")],
    ),
    "in an update": ("", f"{FILE}:BreaksOff", [([0, 1, 3], "start")]),
    "callbacks hold other tensors": (
        killed_in(5, rank=2),
        f"{FILE}:KeepsRows",
        [([0, 1, 3], "replicas")],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLICAS)
def test_parts_of_the_state_come_from_replicas(train: Train, alone: Result, name: str) -> None:
    """Each of two parts is on two ranks; what is updated in part is used by nobody."""
    inject, program, expected = REPLICAS[name]
    flags: dict[str, Any] = {"strategy": "hsdp:shard=2", "ranks": 4, "elastic": "1:4"}
    result = elastic(train, inject, program, **flags)
    assert_undisturbed(result, alone)
    every = groups(result)
    if name != "both":  # one may be seen before the other
        assert [(row["members"], row["loaded_from"]) for row in every] == expected
    assert (every[-1]["members"], every[-1]["loaded_from"]) == expected[-1]
    for row in every:
        assert (row["loaded_from"] == "replicas") == (row["steps_again"] <= 1)
        assert bool(row["parts_lost"]) == (row["loaded_from"] == "start" and name != "in an update")


@pytest.mark.slow
def test_no_rank_is_lost_by_what_its_partner_kept_whole(train: Train) -> None:
    """Ranks tell each other the names of what they keep for an optimizer, but not of a lost one."""
    program = f"{FILE}:NeedsWhole"
    alone = train(program, strategy="ddp", bitwise=True, steps=STEPS)
    flags: dict[str, Any] = {"strategy": "hsdp:shard=2", "ranks": 4, "elastic": "1:4"}
    result = elastic(train, "kill@rank=2,step=5", program, **flags)
    assert_undisturbed(result, alone)
    (group,) = groups(result)
    assert (group["members"], group["loaded_from"]) == ([0, 1, 3], "start")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp-plain"])
def test_without_bitwise_it_is_equal_up_to_rounding(train: Train, strategy: str) -> None:
    flags: dict[str, Any] = {"bitwise": False, "precision": "fp64", "strategy": strategy}
    whole = elastic(train, "", **{**flags, "ranks": 1})
    result = elastic(train, "kill@rank=1,step=5", **flags)
    ours, theirs = (load_file(r.run_dir / "weights.safetensors") for r in (result, whole))
    assert all((ours[name] - theirs[name]).abs().max() < 1e-10 for name in theirs)
    assert result.summary["groups"] == 1


@pytest.mark.slow
def test_too_few_are_started_again(train: Train, alone: Result) -> None:
    flags = {"elastic": "3:3", "checkpoint_every": 3}
    result = elastic(train, "kill@rank=1,step=5", max_restarts=1, **flags)
    assert result.summary["restarts"] == 1 and not groups(result)
    assert result.summary["weights_sha256"] == alone.summary["weights_sha256"]
    with pytest.raises(ProgramError, match=r"(?s)rank 1 .*SIGKILL.* 2 would be left"):
        elastic(train, "kill@rank=1,step=5", **flags)


def test_the_model_that_was_trained_is_no_new_one(train: Train) -> None:
    """Without a checkpoint they would begin anew with trained weights."""
    with pytest.raises(ProgramError, match="the model that was trained before"):
        elastic(train, "kill@rank=1,step=5", f"{FILE}:Same", strategy="zero1")


@pytest.mark.parametrize("step", [5, 6])
def test_a_copy_of_another_step_is_not_loaded(step: int) -> None:
    """A rank has two versions, and loads the one that all ranks have agreed on."""
    comm, spares = Comm(device=torch.device("cpu")), SpareState()
    for made in (5, 6):
        state = {"model": {"w": torch.full((3,), float(made))}}
        spares.refresh(PlacedRank(4, 1, comm), made, state, lambda state=state: state)
    version = spares.opened(comm, Spare(step, 1, {4: 0}))
    assert version.parts[4][:4].view(torch.float32).item() == step
    assert version.step == step


def test_the_newest_copies_of_which_no_part_is_missing() -> None:
    """Ranks 4 and 7 are left of 2, 4 and 7; only rank 7 had the new part of rank 2 yet."""

    def spares(new: list[int], old: list[int]) -> list[SpareParts]:
        return [SpareParts(step, 1, [2, 4, 7], p) for step, p in ((6, new), (5, old)) if p]

    first, second = Position(spares=spares([4], [4, 2])), Position(spares=spares([7], [7, 4]))
    assert newest_spare([first, second]) == Spare(5, 1, {4: 0, 2: 0, 7: 1})
    new = Position(spares=spares([7, 2], []))
    assert newest_spare([first, new]) == Spare(6, 1, {4: 0, 7: 1, 2: 1})
    assert newest_spare([Position(), second]) == Spare(6, 1, {7: 1}, (2, 4))
    assert newest_spare([Position()]) is None


def test_no_reason_of_a_loss_is_waited_for_if_another_group_trains() -> None:
    """The group that came to nothing is left at once, whatever the store says in the meantime."""

    def another(*_: Any) -> None:
        raise PeerLost("another group trains")

    store = SimpleNamespace(check=another, get=another)
    barrier = StoreBarrier(store, 0, 2, timedelta(seconds=1))
    assert barrier.why_lost() == ""
    store.check, barrier.glance = lambda keys: pytest.fail("asked"), another
    assert barrier.why_lost() == ""


def test_the_furthest_rank_gives_its_state() -> None:
    positions = [Position(4, -1, reached=5), Position(5, 3), Position(5, 5), Position(5, 5)]
    agreed = furthest(positions)
    assert (agreed.source, agreed.behind, agreed.steps_again) == (2, (0, 1), 0)
    assert agreed.compares and agreed.unequal == (2, 0, 1)
    assert not furthest(positions[2:]).compares
    all_may_differ = furthest([Position(5), Position(5, is_compared=False), Position()])
    assert all_may_differ.compares and not all_may_differ.unequal
    assert furthest([Position(4, reached=5), Position(joins=True)]).new == (1,)
    not_compared = [Position(4, joins=True), Position(3), Position(4)]
    assert furthest(not_compared).source == 2, "what a new rank holds may be wrong"


def test_a_state_that_was_not_compared_is_compared_later() -> None:
    """A rank was lost before all had compared what they received."""
    nothing = dict.fromkeys(field.name for field in fields(Handover))
    state = {"state": {"progress": {"batch_index": 5}}, "is_new": False, "is_compared": True}
    loaded = Handover(**cast(Any, {**nothing, **state, "joins": False}))
    agreed, joins = furthest([Position(5), Position(4)]), replace(loaded, joins=True)
    assert not loaded.after(agreed, loaded).is_compared
    assert joins.after(agreed, loaded).joins, "it is refused alone then, too"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("own", "a DataLoader with its own Counting"),
        ("whole", "which every rank reads whole"),
        ("placed", "goes on from its state_dict"),
        ("shuffled", ""),
        ("weighted", ""),
        ("skips", ""),
        ("both", ""),
    ],
)
def test_data_that_cannot_be_read_from_any_step_is_refused(
    train: Train, data: str, says: str
) -> None:
    flags = {"ranks": 1, "elastic": "1:2", "steps": 2}
    if not says:
        assert train(f"{FILE}:Read", f"data={data}", strategy="ddp", **flags).summary["steps"] == 2
        return
    with pytest.raises(RequestError, match=says) as refused:
        train(f"{FILE}:Read", f"data={data}", strategy="ddp", **flags)
    assert all(f"{part}:" in str(refused.value) for part in ("asked", "found", "why", "do"))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no range": ({"elastic": "2"}, "MIN:MAX"),
    "a number that is none": ({"elastic": "two:3"}, "MIN:MAX"),
    "fewer ranks than MIN": ({"elastic": "4:8"}, "--ranks 4, or --elastic 3:8"),
    "MIN larger than MAX": ({"elastic": "3:1"}, "MIN 3 larger than MAX 1"),
    "a MAX that no machine runs": ({"elastic": "1:300000"}, "MAX 300,000"),
    "more ranks than MAX": ({"elastic": "1:2"}, "--ranks 2, or --elastic 1:3"),
    "a mesh": ({"strategy": "tensor", "ranks": 4, "elastic": "1:4"}, "no group of another size"),
    "residuals": ({"strategy": "ddp:reduce=power-sgd"}, "lost with a rank"),
    "late gradients": ({"strategy": "ddp:late=1"}, "late"),
    "a device": ({"device": "cuda"}, "processors alone"),
    "copies for nobody": ({"strategy": "fsdp", "elastic": "", "spare_state": True}, "no --elastic"),
    "copies of what all have": ({"spare_state": True}, "the whole state already"),
    "a copy on no other rank": ({"strategy": "zero1", "ranks": 1, "spare_state": True}, "ranks 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_elastic_is_refused(name: str, tmp_path: Path) -> None:
    more, said = BAD[name]
    flags = {"strategy": "ddp", "ranks": 3, "elastic": "1:3", "run_dir": str(tmp_path / "run")}
    with pytest.raises(RequestError, match=said) as refused:
        resolve(PROGRAM, {**flags, **more})
    assert all(f"{part}:" in str(refused.value) for part in ("asked", "found", "why", "do"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_error_that_all_ranks_raise_is_no_loss(train: Train, tmp_path: Path) -> None:
    """The first to end with it is not lost, so the last one is not blamed."""
    run = tmp_path / "run"
    with pytest.raises(ProgramError, match=r"do not: rank 1 differs from"):
        elastic(train, "corrupt@rank=1,step=5", verify_every=1, run_dir=str(run))
    assert not [row for row in read_events(run) if row["event"] == "worker_lost"]


@pytest.mark.parametrize(
    ("elastic", "step", "group", "kind"),
    [("1:3", 0, 0, RequestError), ("1:3", 4, 0, ProgramError), ("1:3", 0, 1, ProgramError)],
)
def test_a_bad_request_after_a_step_does_not_remove_the_run(
    tmp_path: Path, elastic: str, step: int, group: int, kind: type
) -> None:
    """`start` removes the folder after a `RequestError`."""
    request = RequestError(asked="to join", found="other data", why="they differ", do="restore it")
    event = {"event": "failed", **failure_of(request, 0, None)}
    attempts = SimpleNamespace(
        first=0,
        folder=SimpleNamespace(path=tmp_path),
        plan=SimpleNamespace(job=SimpleNamespace(elastic=elastic)),
        resources=SimpleNamespace(lost=lambda: ""),
        _table=SimpleNamespace(group=Group(group, -1, (0, 1))),
        _attempt=0,
    )
    ended = Ended({0: Exit(0, 2, 1.0), 1: Exit(1, -9, 2.0)}, frozenset({1}))
    beats = [Beat(rank, 1, step, "compute", 0.0, 0, {}) for rank in range(2)]
    fault = RankFault(0, ended.exits[0], 1.0, event)
    error, rank = Attempts._error(cast(Any, attempts), ended, fault, beats)
    assert type(error) is kind and str(error) == str(request) and rank == 0


class NeedsAll(torch.optim.AdamW):
    """Cannot be called for one parameter at a time."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert all(p.grad is not None for group in self.param_groups for p in group["params"])
        super().step(closure)


class CountsAnd(torch.optim.SGD):
    """Counts its steps, in an attribute or in a group, and may have the attribute in its state."""

    def __init__(self, *words: Any, saves: str = "", **more: Any) -> None:
        super().__init__(*words, **more)
        self.saves, self.steps = saves, torch.zeros(())

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        group = self.param_groups[0]
        if self.saves == "group":
            group["steps"] = group.get("steps", 0) + 1
        else:
            self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        more = {"steps": self.steps} if self.saves == "state" else {}
        return {**super().state_dict(), **more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state.pop("steps", self.steps)
        super().load_state_dict(state)


OF_TORCH = [
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam"),
    *("RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
]


@pytest.mark.parametrize("kind", [*OF_TORCH, "", "group", "state"])
def test_an_optimizer_that_counts_where_no_state_dict_has_it_joins_nobody(kind: str) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    is_of_torch = kind in OF_TORCH
    if is_of_torch and not hasattr(torch.optim, kind):
        pytest.skip("of a later torch")
    make = getattr(torch.optim, kind) if is_of_torch else partial(CountsAnd, saves=kind)
    optimizer = make([weight], lr=0.1)
    by_rows = (0,) if kind == "SparseAdam" else ()
    step = partial(update_by_nothing, [weight], optimizer, by_rows)
    step()
    assert regroup.numbers_not_saved(optimizer, step) == ([] if kind else ["steps"])


@torch.no_grad()
def begin_alike(optimizer: torch.optim.Optimizer) -> None:
    """Let all moments lie in one number, and weights in place of squares, as some optimizers do."""
    zero = torch.zeros(())
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] |= {
            "exp_avg": zero.expand_as(parameter),
            "exp_avg_sq": parameter,
        }


def test_a_new_rank_receives_into_no_memory_that_it_shares() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    begin_alike(optimizer)
    state = {"model": dict(model.named_parameters()), "optimizer": [*optimizer.state.values()]}
    _, rooms = flatten({**state, "other": torch.ones(2)}, "group")
    assert list(regroup._apart(rooms)) == ["group/other"]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, NeedsAll])
def test_a_new_rank_receives_into_memory_that_it_has(kind: type[torch.optim.AdamW]) -> None:
    """What its optimizer could not make alone, it receives into other memory."""

    def trainer() -> Trainer:
        data = torch.ones(8, 2), torch.ones(8, 1)
        return Trainer.from_parts(
            nn.Linear(2, 1),
            lambda model: kind(model.parameters()),
            loss=lambda output, batch: (output - batch[1]).square().sum(1),
            train_data=data,
        )

    with trainer() as trains, trainer() as joins:
        trains.step(next(trains.batches()))
        make_room(joins)
        theirs, own = ({**hand_over(each).state, "random": {}} for each in (trains, joins))
        (skeleton, sends), (_, rooms) = (flatten(state, "group") for state in (theirs, own))
        forms = [(path, NAMES[t.dtype], list(t.shape)) for path, t in sends.items()]
        memory = list[int]()
        comm = SimpleNamespace(
            rank=1,
            gather_texts=lambda text: [json.dumps([skeleton, forms]), text],
            hand=lambda *tensors, **_: memory.extend(t.data_ptr() for t in tensors),
        )
        agreed = furthest([Position(1), Position(joins=True)])
        received = regroup._handed(cast(Any, SimpleNamespace(comm=comm)), own, agreed)
    assert len(memory) == len(sends) == len(flatten(received, "group")[1])
    has_all = set(memory) <= {tensor.data_ptr() for tensor in rooms.values()}
    assert has_all == (kind is not NeedsAll)


@pytest.mark.slow
def test_a_connection_that_breaks_costs_a_step_and_no_rank(train: Train, alone: Result) -> None:
    result = elastic(train, "", f"{FILE}:Unplugged", backend="gloo")
    assert_undisturbed(result, alone)
    (group,) = groups(result)
    assert (group["members"], group["lost"], group["steps_again"]) == ([0, 1, 2], [], 1)


@pytest.mark.slow
def test_a_state_may_take_longer_to_send_than_a_group_to_form(
    on_ranks: Callable[..., Ended],
) -> None:
    on_ranks(2, "leaving_workers:late_hand", "gloo")
