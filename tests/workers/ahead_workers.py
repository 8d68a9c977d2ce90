"""Steps that run ahead of their numbers, on CPU: what runs in the ranks, and a counter of waits.

On CPU a read costs nothing, so nothing runs ahead there, unless `READ_AT_ONCE` says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.overrides import TorchFunctionMode

import contract_tasks
from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch import Trainer
from allranks.torch.step import in_flight as steps
from allranks.training.progress import Progress, StepResult
from guard_tasks import Counting

WAITS = {
    *("item", "tolist", "cpu", "numpy", "nonzero", "equal", "allclose", "is_nonzero", "unique"),
    *("tensor", "as_tensor", "new_tensor", "from_numpy"),  # copies to it that are not pinned
    *("__float__", "__bool__", "__int__", "__index__", "__array__", "masked_select"),
}


class HostWaits(TorchFunctionMode):
    """Names each call that would wait for a device. The rows are on the host when they are read."""

    def __init__(self, rows: list[Tensor]) -> None:
        super().__init__()
        self.found: list[str] = []
        self._rows = rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in WAITS and not any(args[0] is row for row in self._rows):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@dataclass(kw_only=True)
class Ahead(contract_tasks.Plain):
    """A fused optimizer, a schedule, clipping, an average, a buffer that forward writes."""

    clip_norm: float | None = 0.5
    ema: float | None = 0.9
    momentum: bool = False
    fused: bool = True

    def model(self) -> nn.Module:
        return nn.Sequential(Counting(), *super().model())  # type: ignore[arg-type]

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.momentum:
            return SGD(model.parameters(), lr=1e-1, momentum=0.9, fused=self.fused)
        return AdamW(model.parameters(), lr=1e-2, fused=self.fused)

    def schedule(self, step: int) -> float:
        return 1 / (1 + step)


@dataclass(kw_only=True)
class Words(contract_tasks.Words):
    """Weights of tokens, a regularizer."""

    clip_norm: float | None = 0.5
    fused: bool = True

    def optimizer(self, model: nn.Module) -> Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        return AdamW(trained, lr=1e-2, fused=self.fused)


class Unfreezes(Ahead):
    """Another layer is trained from step 4 on."""

    def model(self) -> nn.Module:
        model = super().model()
        self.last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
        self.last.requires_grad_(False)
        return model


@dataclass
class Told:
    """What a training gave: weights, results, progress, what the guard keeps, who ran ahead."""

    weights: list[Tensor]
    results: list[StepResult]
    progress: Progress
    guard: dict[str, Any]
    average: dict[str, Tensor] | None
    unread: list[bool]
    rows: int


@contextmanager
def numbers_read(*, late: bool) -> Iterator[None]:
    """Within, numbers are read one step late, or at once."""
    before, steps.READ_AT_ONCE = steps.READ_AT_ONCE, set() if late else {"cpu"}
    try:
        yield
    finally:
        steps.READ_AT_ONCE = before


def trained(
    task: Any, bad: tuple[int, ...] = (), number: int = 12, unfreeze: int = -1, **job: Any
) -> Told:
    """A training whose steps of these numbers are poisoned."""
    results, unread, rows = [], [], []
    with Trainer(task, Job(threads=1, **job), world=World.from_environment()) as trainer:
        if (deferred := trainer.strategy.step.deferred) is not None:
            send = deferred.send
            deferred.send = lambda *of: rows.append(send(*of)) or rows[-1]  # type: ignore
        for batch in trainer.batches(steps=number):
            if batch.index in bad:
                trainer.strategy.step.poison_next()
            if batch.index == unfreeze:
                task.last.requires_grad_(True)
            results.append(trainer.step(batch))
            unread.append(not results[-1].is_read)
        weights = [tensor.detach().clone() for _, tensor in trainer.weights()]
        average = trainer.strategy.step.average
        held = None if average is None else {k: v.clone() for k, v in average.state().items()}
        guard = trainer.guard.state()
        return Told(weights, results, trainer.progress, guard, held, unread, len(rows))


def check_the_same(task: Any, **how: Any) -> None:
    """A training that reads late is one that reads at once, to the bit."""
    with numbers_read(late=False):
        wanted = trained(task(), **how)
    with numbers_read(late=True):
        found = trained(task(), **how)
    assert not any(wanted.unread)
    if task().fused:
        assert sum(found.unread) >= 6
    else:
        assert found.rows >= 6 and not any(found.unread)
    for ours, theirs in zip(found.weights, wanted.weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert [told(r) for r in found.results] == [told(r) for r in wanted.results]
    assert told(found.progress) == told(wanted.progress)
    assert found.guard == wanted.guard
    for name, average in (found.average or {}).items():
        its = (wanted.average or {})[name]
        torch.testing.assert_close(average, its, rtol=1e-6, atol=1e-7, equal_nan=True)


def told(found: Any) -> str:
    """All fields, where nan is nan."""
    kind = StepResult if isinstance(found, StepResult) else Progress
    return str({name: getattr(found, name) for name in kind.__dataclass_fields__})


def same_on_ranks(argument: dict[str, Any]) -> None:
    """Bad steps in a row, among them the last, on ranks that hold the model in this way."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # memory that nobody has written holds nan
    bad = (5, 6, 8, 11) if World.from_environment().rank == 1 else ()
    task = partial(Ahead, **argument["fields"])
    check_the_same(task, bad=bad, strategy=argument["strategy"], on_bad_step="skip")


def learners_meet(_: object) -> None:
    """What one was asked for, and a buffer that forward replaces, reach all with a meeting."""
    world, heard = World.from_environment(), []
    job = Job(threads=1, strategy="local-sgd:every=4", on_bad_step="skip")
    with numbers_read(late=True), Trainer(Ahead(ema=None), job, world=world) as trainer:
        for batch in trainer.batches(steps=8):
            if world.rank == 1 and batch.index == 1:
                trainer.strategy.step.poison_next()
            trainer.heartbeat._all[0] = float(world.rank == 1 and batch.index == 5)
            heard.append(trainer.step(batch).asked.stop)
        assert 7 < dict(trainer.weights())["0.replaced"] < 8, "between 8 steps and 7"
    assert heard == [index == 7 for index in range(8)]


def waits_of(strategy: str) -> None:
    """No step that stays unread waits for a device."""
    torch.set_num_threads(1)
    job = Job(threads=1, strategy=strategy)
    with (
        numbers_read(late=True),
        Trainer(Ahead(), job, world=World.from_environment()) as trainer,
    ):
        found = []
        for batch in trainer.batches(steps=24):
            with HostWaits(trainer._steps.rows._slots) as waits:
                result = trainer.step(batch)
            found.append((result.is_read, waits.found))
        # counts of a full batch are copied once for each of 16 positions
        assert found[-3:] == [(False, [])] * 3, found[-3:]
        assert found[0][1]  # what reads at once is seen
