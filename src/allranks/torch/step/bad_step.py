"""Find the cause of a bad step: every rank recomputes its own part, alone, and checks it.

Random draws in a step are keyed, so the results are the same. Findings are gathered as text, so
that every rank can report them: the rank, the shard, the samples, and the first module that went
wrong. Only a bad step pays for this. Weights, buffers and gradients are restored.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from allranks.job.job import Job
from allranks.torch.comm.comm import Comm
from allranks.torch.data.batch import Batch, MicroBatch
from allranks.torch.data.collate import tensors_in
from allranks.torch.step.gradients import length
from allranks.torch.step.step import SharedStep
from allranks.torch.step.user_buffers import put_back
from allranks.torch.strategies.base import Strategy
from allranks.training.guard import BadStepFinding, Guard

# --- watch ---------------------------------------------------------------------------------------
# Watches one forward and backward pass, and names the module where a number is first not finite.
#
# It looks at the output of every module, so it runs only after a bad step.


def bad_rows(tensor: Tensor, samples: int) -> list[int]:
    """The samples, of `samples` along dimension 0, in whose rows something is not finite."""
    if tensor.ndim == 0 or not samples or tensor.shape[0] % samples:
        return []
    fine = torch.isfinite(tensor.detach()).reshape(samples, -1).all(dim=1)
    return [row for row, is_fine in enumerate(fine.tolist()) if not is_fine]


def is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


class FiniteWatch:
    """Within, `output` and `gradient` name the module where each was first not finite.

    `rows` are the samples of the micro-batch, of `samples`, whose gradient was not finite there.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._hooks: list[Any] = []
        self.begin(0)

    def begin(self, samples: int) -> None:
        """A micro-batch of `samples` samples comes next."""
        self.samples = samples
        self.output: str | None = None
        self.gradient: str | None = None
        self.rows: list[int] = []
        self._seen: list[Tensor] = []  # held, so that no two of them have one identity
        self._results: set[int] = set()  # those that are outputs of the whole model

    def __enter__(self) -> Self:
        for name, module in self.model.named_modules():
            self._hooks.append(module.register_forward_hook(self._hook(name)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self.begin(0)

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in tensors_in(output):
                if self.output is None and not is_finite(tensor):
                    self.output = name
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._look_back, name, id(tensor)))
                self._seen.append(tensor)
                if not name:
                    self._results.add(id(tensor))

        return look

    def _look_back(self, name: str, which: int, gradient: Tensor) -> None:
        if self.gradient is None and not is_finite(gradient):
            self.gradient = "" if which in self._results else name
            self.rows = bad_rows(gradient, self.samples)


SHOWN = 8  # samples named in one sentence
FOUND_ENOUGH = 4  # micro-batches of one rank
ALL_FINITE = "each rank's own part is finite: only their sum is not"
NOT_SEARCHED = "no rank holds the weights by itself, so none looks for the samples that did it"
BATCH_FINITE = "the outputs of all ranks are finite: it is the loss over the batch, or its gradient"


def guard_of(strategy: Strategy, job: Job, rank: int) -> Guard:
    """Create the guard of a job, and set it on the step of `strategy`."""
    comm = (
        strategy.comm if strategy.agreement.is_one_training else Comm(device=strategy.comm.device)
    )

    def find(batch: Batch, spiked: bool) -> tuple[BadStepFinding, ...]:
        if strategy.equal_passes:
            return (BadStepFinding(NOT_SEARCHED),)
        return find_culprits(strategy.step, batch, comm, rank, spiked)

    strategy.step.guard = Guard(job.on_bad_step, job.spike, find)
    return strategy.step.guard


def find_culprits(
    step: SharedStep, batch: Batch, comm: Comm, rank: int, spiked: bool
) -> tuple[BadStepFinding, ...]:
    """Find the cause of a bad step; every rank of `comm` calls this. Gathers all findings."""
    local = own_part(step, batch, rank, spiked)
    texts = comm.gather_texts(json.dumps([dataclasses.asdict(finding) for finding in local]))
    findings = [BadStepFinding(**row) for text in texts for row in json.loads(text)]
    if spiked:
        return (max(findings, key=lambda finding: finding.size),) if findings else ()
    nothing = BATCH_FINITE if step.task.loss_over == "batch" else ALL_FINITE
    return tuple(dict.fromkeys(findings)) or (BadStepFinding(nothing),)


def own_part(step: SharedStep, batch: Batch, rank: int, spiked: bool) -> list[BadStepFinding]:
    """The findings in this rank's own part of a bad step; raises nothing."""
    try:
        with _set_aside(step), FiniteWatch(step.model) as watch:
            return _Search(step, batch, rank, watch).run(spiked)
    except Exception as error:  # the others wait for this rank's text
        return [BadStepFinding(f"cannot say: {type(error).__name__}: {error}", rank, is_verb=True)]


@contextmanager
def _set_aside(step: SharedStep) -> Iterator[None]:
    """Within, buffers are as before the step; at the end, everything is restored."""
    gradients = [parameter.grad for parameter in step.parameters]
    on_gradient, step.on_gradient = step.on_gradient, None
    run_model, step.run_model = step.run_model, step.model_alone  # it is the one that is watched
    used, buffers = list(step.used), step.user_buffers.copies()
    step.user_buffers.undo()
    _forget_gradients(step)
    whole = step.scope.whole
    shortens, step.scope.shortens = step.scope.shortens, False
    try:
        with nullcontext() if whole is None else whole.alone():
            yield
    finally:
        step.scope.leave()
        step.scope.moments.clear()
        step.scope.shortens = shortens
        put_back(buffers)
        step.used[:], step.on_gradient, step.run_model = used, on_gradient, run_model
        for parameter, gradient in zip(step.parameters, gradients, strict=True):
            parameter.grad = gradient


def _forget_gradients(step: SharedStep) -> None:
    for parameter in step.parameters:
        parameter.grad = None


@dataclass(frozen=True)
class _Search:
    """The search of one rank."""

    step: SharedStep
    batch: Batch
    rank: int
    watch: FiniteWatch

    def run(self, spiked: bool) -> list[BadStepFinding]:
        if spiked:
            return self._longest()
        shared = self._weights() or self._regularizer()
        if shared:
            return shared
        findings: list[BadStepFinding] = []
        start = 0
        for micro in self.batch.micros:
            self.watch.begin(micro.samples)
            if self.step.task.loss_over == "batch":
                findings += self._outputs(micro, start)
            else:
                findings += self._losses(micro, start)
            self.step.scope.moments.clear()
            start += micro.samples
            if len(findings) >= FOUND_ENOUGH:
                break
        return findings

    def _weights(self) -> list[BadStepFinding]:
        """The first weight that is not finite, as on all ranks: no sample is to blame then."""
        for name, parameter in self.step.model.named_parameters():
            if not is_finite(parameter):
                return [BadStepFinding(f"the weight {name!r} was not finite before this step")]
        return []

    def _regularizer(self) -> list[BadStepFinding]:
        value = self.step.regularizer(self.batch)
        if value is None:
            return []
        if not is_finite(value):
            return [BadStepFinding(f"the regularizer is {float(value)}")]
        if value.requires_grad:
            value.backward()
        bad = self._bad_gradients()
        _forget_gradients(self.step)
        findings = [
            BadStepFinding(f"the gradient of the regularizer is not finite for {n!r}") for n in bad
        ]
        return findings[:1]

    def _losses(self, micro: MicroBatch, start: int) -> list[BadStepFinding]:
        losses, _ = self.step.losses(self.batch, micro)
        if rows := bad_rows(losses, micro.samples):
            bad = losses.detach().reshape(micro.samples, -1)[rows[0]]
            value = float(bad[~torch.isfinite(bad)][0])
            where = _at("output", self.watch.output)
            return [self._finding(f"the loss{self._of(micro, start, rows)} is {value}{where}")]
        _forget_gradients(self.step)
        total = losses.sum()
        total.backward(self.step.scale(self.batch.nominal, total))
        if not (bad_names := self._bad_gradients()):
            return []
        where = _at("gradient at the output", self.watch.gradient)
        of = self._of(micro, start, self.watch.rows)
        return [self._finding(f"the gradient{of} is not finite for {bad_names[0]!r}{where}")]

    def _outputs(self, micro: MicroBatch, start: int) -> list[BadStepFinding]:
        with torch.no_grad():
            output = self.step.output(self.batch, micro)
        for tensor in tensors_in(output):
            if not is_finite(tensor):
                of = self._of(micro, start, bad_rows(tensor, micro.samples))
                return [
                    self._finding(f"the output{of} is not finite{_at('output', self.watch.output)}")
                ]
        return []

    def _longest(self) -> list[BadStepFinding]:
        """How much this rank adds to the gradient, and its sample with the largest loss."""
        if self.step.task.loss_over == "batch" or not self.batch.micros:
            return []
        largest, whose, start = float("-inf"), "", 0
        for micro in self.batch.micros:
            losses, _ = self.step.losses(self.batch, micro)
            total = losses.sum()
            total.backward(self.step.scale(self.batch.nominal, total))
            self.step.scope.moments.clear()
            each = losses.detach().reshape(micro.samples, -1).sum(dim=1)
            if float(each.max()) > largest:
                largest = float(each.max())
                whose = self._of(micro, start, [int(each.argmax())])
            start += micro.samples
        size = length([p.grad for p in self.step.parameters if p.grad is not None])
        text = f"adds most, {size:.4g}; its largest loss is {largest:.4g},{whose}"
        return [BadStepFinding(text, self.rank, size, is_verb=True)]

    def _bad_gradients(self) -> list[str]:
        named = zip(self.step.names, self.step.parameters, strict=True)
        return [name for name, p in named if p.grad is not None and not is_finite(p.grad)]

    def _finding(self, text: str) -> BadStepFinding:
        return BadStepFinding(text, self.rank)

    def _of(self, micro: MicroBatch, start: int, rows: list[int]) -> str:
        """The samples in these rows and their shards; the whole micro-batch for no rows."""
        places = [
            (piece.shard, at) for piece in micro.pieces for at in range(piece.start, piece.stop)
        ]
        shards = sorted({places[row][0] for row in rows or range(len(places))})
        numbers = [int(self.batch.ids[start + row]) for row in rows if len(self.batch.ids)]
        numbers = numbers or [places[row][1] for row in rows]
        some = ", ".join(map(str, numbers[:SHOWN]))
        more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
        samples = f" of {_plural('sample', numbers)} {some}{more}" if rows else ""
        return f"{samples} ({_plural('shard', shards)} {', '.join(map(str, shards))})"


def _plural(word: str, things: list[int]) -> str:
    return f"{word}s" if len(things) > 1 else word


def _at(kind: str, module: str | None) -> str:
    """The module where it was first seen, as a clause."""
    if module is None:
        return ""
    return f", first seen in the {kind} of {f'module {module!r}' if module else 'the model'}"
