"""What a trainer with torch hands over to the one of the next group, and how that takes it over."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from numbers import Real
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from allranks.checkpoint.folder import committed, step_of
from allranks.checkpoint.format import unflatten
from allranks.errors import PeerLost, ProgramError, RequestError
from allranks.job.resume import CHECKPOINTS
from allranks.torch.checkpoint.plan import local_parts
from allranks.torch.checkpoint.spare import LiveParts
from allranks.torch.checkpoint.state import (
    DTYPES,
    NAMES,
    copied,
    flatten,
    random_streams,
    set_random_streams,
)
from allranks.torch.data.sources import StreamSource
from allranks.torch.model.placement import update_by_nothing
from allranks.torch.state_stream import parts_of
from allranks.torch.witness.replicas import verify
from allranks.training.engine.regroup import (
    CHECKPOINT,
    LOOK_S,
    REPLICAS,
    SPARE,
    START,
    Agreed,
    Handover,
    Position,
    furthest,
)
from allranks.training.record.logs import row_of

if TYPE_CHECKING:
    from allranks.torch.trainer import Trainer

CAUSES = "It was found when they formed a group anew, after another rank had left or joined."


def hand_over(trainer: Trainer) -> Handover:
    """What this rank holds between two steps; takes back what a broken-off step has written.

    No communication, and no copies. Raises `PeerLost` if nothing can take it back.
    """
    step, reached = trainer.strategy.step, trainer.progress.batch_index
    is_cut, state = trainer.strategy.agreement.cuts_state, trainer.course()
    is_between = trainer.last_result is None
    if trainer.in_step and trainer.in_step[0].index >= reached:
        if reached == 0 and not is_cut and trainer.task.overrides("initialise"):
            raise PeerLost(
                "a rank was lost in the first step, before which initialise() of the task has "
                "changed the weights: it cannot be made again, but by a start from the beginning"
            )
        if step.updated_at == reached and not is_cut:
            raise PeerLost(
                "a rank was lost after the update of a step that is not over: it cannot be made "
                "again, but by a start from the last checkpoint"
            )
        is_between = step.updated_at != reached
        reached = trainer.in_step[0].index + 1
        trainer.heartbeat.take_back_save()
        step.user_buffers.undo()
    if not is_cut:
        state |= {
            "strategy": trainer.strategy.state(),
            "written": sorted(step.user_buffers.written),
            "random": random_streams(trainer.device),
            **({} if trainer.world.group < 0 else trainer.callback_states()),
        }
    return Handover(
        callbacks=[] if is_cut else trainer.callbacks,
        heartbeat=trainer.heartbeat,
        faults=trainer.faults,
        state=state,
        is_best=trainer.evaluation_plan.is_best,
        row=None if trainer.last_result is None else row_of(trainer.last_result),
        unheard=None if is_cut else trainer.unheard,
        callbacks_called=trainer.callbacks_called,
        reached=reached,
        steps_again=trainer.steps_again,
        built=None if is_cut else trainer.built,
        optimizer=None if is_cut else (step.rates, trainer.strategy.initial_set),
        data=trainer.task_data.opened_data,
        spare=trainer.spare,
        live=_live(trainer) if is_between and trainer.spare is None else None,
        shard_seconds=trainer.shard_seconds,
    )


def _live(trainer: Trainer) -> LiveParts | None:
    """This rank's part of the state between two steps, if others may have the same; else `None`.

    The states of a stream's shards are lost with a rank.
    """
    opened, done = trainer.task_data.opened, trainer.progress.batch_index
    is_made = done > 0 or not trainer.task.overrides("initialise")
    if opened is None or isinstance(opened.source, StreamSource) or not is_made:
        return None
    replica = trainer.strategy.replica_state()
    if replica is None or trainer.world.group < 0:
        return None
    place, places, state = replica
    callbacks = trainer.callback_states()
    common, tensors = flatten({**state, **trainer.course(), **callbacks}, "common")
    at = done, trainer.world.group, place, places
    return LiveParts(*at, common, local_parts(tensors), callbacks)


def leave(trainer: Trainer, *, planned: bool) -> None:
    """Close the trainer of a group that trains no more; its thread that saves ends first.

    At a `planned` end all ranks are there, and wait for the checkpoint under way; where they hold
    parts of the state they save it first, or exchange copies, if the next group then has all parts.
    A stream to new ranks ends with this step. Otherwise the checkpoint is committed already, or
    given up.
    """
    saving = trainer.saving
    if planned and saving is not None:
        with suppress(PeerLost):
            if trainer.strategy.agreement.cuts_state:
                _wait_for_thread(trainer)
                trainer.refresh_spare()
                spare = trainer.spare
                if spare is None or not spare.survives(trainer.heartbeat.group().members):
                    trainer.save(wait=False, evaluate=False)
                    _wait_for_thread(trainer)
            saving.checkpointer.wait()
    if planned and trainer.stream is not None:
        trainer.stream.end(trainer.progress.batch_index)
    trainer.close(failed=True)
    for parameter in trainer.model.parameters():
        parameter.grad = None  # a part of the buckets of that group
    if saving is not None:
        with suppress(Exception):  # it lost a peer, too
            saving.checkpointer.writers.thread.wait()


def take_over(trainer: Trainer, before: Handover | None) -> Agreed:
    """Bring all ranks of a new group to the same state; every rank calls this, a new one too.

    Gathers a text of each rank. The state is sent only to ranks that are behind. Where ranks hold
    parts of it, all load their copies of them, or the newest checkpoint.
    """
    comm = trainer.comm
    mine = dataclasses.asdict(_position(trainer, before))
    agreed = furthest([Position(**json.loads(t)) for t in comm.gather_texts(json.dumps(mine))])
    if trainer.strategy.agreement.cuts_state:
        return _load(trainer, agreed, None if before is None else before.live)
    state = {} if before is None else before.state
    if agreed.behind:
        state = _handed(trainer, state, agreed)
    _ = trainer.task_data.batches
    if agreed.new:
        trainer.task_data.compare_anew()
    if comm.rank in agreed.new:
        _check_can_join(state["strategy"]["trained"])
    trainer.load_group_state(state, with_callbacks=comm.rank in agreed.behind)
    trainer.strategy.step.user_buffers.written |= set(state["written"])
    trainer.evaluation_plan.is_best = agreed.position.is_best
    if trainer.saving is not None:
        trainer.saving.checkpointer.done_step = agreed.saved
    set_random_streams(state["random"], trainer.device)
    return agreed


def _check_can_join(trained: dict[str, Any]) -> None:
    """Raise `ProgramError` on a new rank, whose optimizer and buckets are those of the start."""
    if trained["made"] != trained["now"]:
        raise ProgramError(
            "a new rank cannot join a training that trains other parameters than at its start "
            "(frozen, unfrozen, or in groups that were added)"
        )


def _load(trainer: Trainer, agreed: Agreed, live: LiveParts | None) -> Agreed:
    """Load what is in memory, or the newest checkpoint; without either all begin anew."""
    _ = trainer.task_data.batches
    if agreed.new:
        trainer.task_data.compare_anew()
    spare, loaded_from = agreed.spare, REPLICAS if trainer.spare is None else SPARE
    assert trainer.saving is not None
    trainer.saving.checkpointer.joins = trainer.comm.rank in agreed.new
    if spare is not None and not spare.missing and spare.step >= agreed.saved:
        is_there = live is not None and (live.step, live.group) == (spare.step, spare.group)
        trainer.load_spare(spare, live if is_there else None)
        trainer.saving.checkpointer.done_step = agreed.saved
    else:
        loaded_from = START if trainer.resume() is None else CHECKPOINT
    return agreed.at(trainer.progress.batch_index, loaded_from)


def _wait_for_thread(trainer: Trainer) -> None:
    """Wait for the thread that saves; raises `PeerLost` if another group trains now."""
    assert trainer.saving is not None
    before = trainer.heartbeat.enter("save")
    while trainer.saving.checkpointer.writers.thread.is_busy:
        trainer.look_at_group(trainer.heartbeat.step)
        sleep(LOOK_S)
    trainer.heartbeat.enter(before)


def compare(trainer: Trainer, agreed: Agreed) -> None:
    """Raise `ReplicasDiffer` if the ranks of a new group hold different weights, or optimizers.

    If only new ranks differ, they alone raise it, and the others raise `PeerLost`.
    """
    verify(trainer.strategy.learner, CAUSES, agreed.unequal, agreed.new)


def make_room(trainer: Trainer) -> None:
    """Let the optimizer of a new rank make the state that it receives, whose memory is then there.

    The first write to a page of memory takes longer than to receive it. An optimizer that cannot
    step by itself has its state made on receipt. Raises `RequestError` for a state that would not
    be received: one that no checkpoint can hold, or numbers that the state dict does not have.
    """
    strategy, step, lost = trainer.strategy, trainer.strategy.step, list[str]()
    optimizer, by_rows = step.optimizer, step.sparse.positions
    parameters = step.parameters[: 1 if strategy.agreement.cuts_state else None]
    with suppress(Exception), strategy.owned():
        update_by_nothing(parameters, optimizer, by_rows)
        again = partial(update_by_nothing, parameters[:1], optimizer, by_rows)
        lost = numbers_not_saved(optimizer, again)
    if lost:
        raise RequestError(
            asked=f"to join a training with the optimizer {type(optimizer).__name__}",
            found=f"its attribute {lost[0]}, which each step changes, and state_dict() lacks",
            why="a new rank receives the state dict, and its updates would be others",
            do="keep it in param_groups, or add it to state_dict() and load_state_dict()",
        )
    flatten(strategy.local_state(), "group")


def numbers_not_saved(optimizer: Optimizer, step: Callable[[], None]) -> list[str]:
    """The attributes that are numbers, that `step` changes, and that its state dict lacks."""
    saved = {n: v if n == "state" else copied(v) for n, v in optimizer.state_dict().items()}
    before = _numbers(optimizer)
    step()
    if _numbers(optimizer) == before:
        return []
    optimizer.load_state_dict(saved)
    after = _numbers(optimizer)
    return [name for name in before if after.get(name) != before[name]]


def _numbers(optimizer: Optimizer) -> dict[str, str]:
    return {
        name: repr(float(value))
        for name, value in vars(optimizer).items()
        if isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }


def _position(trainer: Trainer, before: Handover | None) -> Position:
    folder = Path(trainer.job.run_dir) / CHECKPOINTS
    looks = trainer.comm.rank == 0 and trainer.saving is not None
    newest = committed(folder)[:1] if looks else []
    saved = step_of(newest[0]) if newest else -1
    if before is None or before.is_new:
        streamed = -1 if before is None else before.streamed
        return Position(saved=saved, joins=True, streamed=streamed)
    evaluated = int(before.state["course"]["found_at"])
    at = (before.step, evaluated, before.is_best, before.reached, saved)
    parts = before.live or before.spare
    spares = [] if parts is None else parts.listed()
    compared = before.is_compared, before.joins
    return Position(*at, before.row, before.steps_again, *compared, spares)


def _handed(trainer: Trainer, state: dict[str, Any], agreed: Agreed) -> dict[str, Any]:
    """The state of the rank `source`, on those behind it: a text, and tensors in few messages.

    A new rank receives into the tensors of its own `state` where these are alike, and share no
    memory. Tensors that it has received before (`state_stream`) are not sent again.
    """
    comm, is_source, text = trainer.comm, trainer.comm.rank == agreed.source, ""
    tensors, skeleton = dict[str, torch.Tensor](), None
    if is_source or comm.rank in agreed.new:
        skeleton, tensors = flatten(state, "group")
    parts = parts_of(trainer.model, state["strategy"]) if agreed.is_streamed and tensors else []
    there = {tensor.data_ptr() for part in parts for tensor in part.values()}
    streamed = {path: t for path, t in tensors.items() if t.data_ptr() in there}
    if is_source:
        others = {path: tensor for path, tensor in tensors.items() if path not in streamed}
        forms = [(path, NAMES[t.dtype], list(t.shape)) for path, t in others.items()]
        text = json.dumps([skeleton, forms])
    skeleton, forms = json.loads(comm.gather_texts(text)[agreed.source])
    is_behind = comm.rank in agreed.behind
    if is_behind:
        rooms = _apart(tensors)
        others = {path: _room(rooms.get(path), DTYPES[t], shape) for path, t, shape in forms}
        tensors = {**streamed, **others}
    if is_behind or is_source:
        comm.hand(*others.values(), source=agreed.source, to=agreed.behind)
    return dict(unflatten(skeleton, tensors)) if is_behind else state


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of which each number is in memory of its own: one may be filled, and no other changes.

    An optimizer may begin with one tensor for all weights, or with one number for all of a tensor.
    """
    users = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
    return {
        path: tensor
        for path, tensor in tensors.items()
        if tensor.is_contiguous() and users[tensor.untyped_storage().data_ptr()] == 1
    }


def _room(tensor: torch.Tensor | None, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """This tensor, if it is one of that type and shape, else another one."""
    if tensor is not None and (tensor.dtype, list(tensor.shape)) == (dtype, shape):
        return tensor
    return torch.empty(shape, dtype=dtype)
