"""`decoupled`: learners that come and go, and a synchronizer that merges their updates.

The processes of a job are a synchronizer, which leads it, and learners (`--ranks` of them). They
are in no process group: they exchange framed messages (`launcher/messages`), so none blocks when
another one dies.

    learner        service                merging                 trainer of the synchronizer
    train a chunk -> delta, samples   ->  quorum or grace: merge -> metrics, evaluation, checkpoint
    begin again   <- weights, chunk   <-  theta, version, ledger <- loaded after a restart

`work_queue` hands out the samples, so that each counts once in an epoch. `merge` is the arithmetic.
`service` answers learners, each in a thread, and has the learner's end of the connection. `learner`
is their loop. `trainer` is the leader's: a step is a merge, so record, evaluation and checkpoints
are those of every strategy. The launcher restarts a lost learner, which is no failure while `least`
are left. It restarts the synchronizer from its checkpoint, while learners wait for it (`Role`).

This class is the strategy of both: a step of one process alone. Each learner has its own inner
optimizer. A checkpoint has the state of each after its last chunk in the weights
(`service.inner_state`); a restarted learner begins with that of the last checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from allranks.launcher.messages import Buffer
from allranks.strategies.card import Workload
from allranks.torch.data.batch import Batch
from allranks.torch.local_sgd.strategies import refuse_without_whole_steps
from allranks.torch.model.reals import real_type, reals
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.base import Strategy

# --- flat ----------------------------------------------------------------------------------------
# The weights of a model as flat numbers, to be subtracted, merged and sent.
#
#     | parameters | buffers of real numbers | buffers of whole numbers |
#
# The first two have one type of at least 32 bits, so that sums of small changes are not rounded to
# 16 bits; the third is int64. The order is that of the model, the same in all processes.


@dataclass
class Numbers:
    """Flat numbers of one model: `weights` (n,) with the buffers behind them, `counts` (m,)."""

    weights: Tensor
    counts: Tensor

    def copied(self) -> Numbers:
        return Numbers(self.weights.clone(), self.counts.clone())

    @property
    def buffers(self) -> tuple[Buffer, Buffer]:
        """The bytes of both, in place; use them before they change."""
        return _bytes(self.weights), _bytes(self.counts)

    def buffers_of(self, parts: Sequence[slice], tail: int) -> list[Buffer]:
        """The bytes of these parts of the weights, of those from `tail` on, and of the counts."""
        pieces = [self.weights[each] for each in (*parts, slice(tail, None))]
        return [_bytes(piece) for piece in (*pieces, self.counts)]


class FlatModel:
    """A model whose weights are read and written as flat numbers, on the host."""

    def __init__(self, model: nn.Module) -> None:
        self._trained = [p for p in model.parameters() if p.requires_grad]
        parameters = {id(p) for p in model.parameters()}
        buffers = [b for b in model.buffers() if id(b) not in parameters]
        self._real = [b for b in buffers if b.is_floating_point() or b.is_complex()]
        self._whole = [b for b in buffers if not (b.is_floating_point() or b.is_complex())]
        types = {real_type(t.dtype) for t in (*self._trained, *self._real)}
        self.type = torch.float64 if torch.float64 in types else torch.float32
        self.parameters = sum(reals(p).numel() for p in self._trained)
        """The number of trained weights; buffers follow."""
        shapes = [(tuple(t.shape), str(t.dtype)) for t in self._tensors]
        self.digest = hashlib.sha256(repr((shapes, self.type)).encode()).hexdigest()
        """Equal in processes which can exchange numbers."""

    @property
    def _tensors(self) -> list[Tensor]:
        return [*self._trained, *self._real, *self._whole]

    @torch.no_grad()
    def read(self) -> Numbers:
        """A copy of the present weights and buffers."""
        moving = (*self._trained, *self._real)
        real = [reals(t.detach()).reshape(-1).to("cpu", self.type) for t in moving]
        whole = [t.detach().reshape(-1).to("cpu", torch.int64) for t in self._whole]
        weights = torch.cat(real) if real else torch.empty(0, dtype=self.type)
        counts = torch.cat(whole) if whole else torch.empty(0, dtype=torch.int64)
        return Numbers(weights, counts)

    @torch.no_grad()
    def write(self, numbers: Numbers) -> None:
        """Write these numbers into the model."""
        for tensors, flat in (
            ((*self._trained, *self._real), numbers.weights),
            (self._whole, numbers.counts),
        ):
            at = 0
            for tensor in tensors:
                real = reals(tensor.detach())
                real.copy_(flat[at : at + real.numel()].view(real.shape))
                at += real.numel()

    @property
    def nbytes(self) -> int:
        """The number of bytes of a message with all numbers."""
        real = self.parameters + sum(reals(b).numel() for b in self._real)
        return real * self.type.itemsize + 8 * sum(b.numel() for b in self._whole)

    def fragments(self, count: int) -> list[slice]:
        """The parameters, cut into so many parts whose sizes differ by at most one."""
        ends = [round(self.parameters * n / count) for n in range(count + 1)]
        return [slice(*pair) for pair in pairwise(ends)]

    def from_bytes(self, body: memoryview, parameters: int | None = None) -> Numbers:
        """The numbers in a message, in the same memory; of all, or so many `parameters`."""
        left_out = 0 if parameters is None else self.parameters - parameters
        nbytes = self.nbytes - left_out * self.type.itemsize
        if len(body) != nbytes:
            raise ValueError(f"{len(body)} bytes for weights of {nbytes}")
        whole = 8 * sum(b.numel() for b in self._whole)
        flat = torch.frombuffer(body, dtype=torch.uint8)
        cut = len(body) - whole
        integers = flat[cut:].clone()  # a copy, as it may not be aligned
        return Numbers(flat[:cut].view(self.type), integers.view(torch.int64))


def _bytes(tensor: Tensor) -> Buffer:
    array: Any = tensor.numpy()
    return memoryview(array).cast("B") if tensor.numel() else b""


class Decoupled(Strategy):
    """Forward, backward, update, in one process. The synchronizer makes no step."""

    learners = 1
    merged: dict[str, Any] | None = None
    """The synchronizer's state besides the weights; set by its trainer."""

    def prepare(self) -> None:
        task = self.task
        asked = {
            "ema of the task": task.ema is not None,
            "plateau() of the task": task.plateau() is not None,
            "loss_over = 'batch'": task.loss_over == "batch",
        }
        found = "learners that each make steps of their own"
        why = "it depends on every step of the whole job, and no process makes those"
        refuse_without_whole_steps(self.name, asked, found=found, why=why)

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        return local, Gradients(self.step.parameters)

    def workload(self) -> Workload:
        flat = FlatModel(self.model)
        weights = flat.parameters * flat.type.itemsize
        return Workload((weights, flat.nbytes - weights), self.learners, self.task.shards)

    def state(self) -> dict[str, Any]:
        state = super().state()
        return state if self.merged is None else {**state, "merged": self.merged}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.merged = state.get("merged")
