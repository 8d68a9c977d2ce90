"""`decoupled`: learners that come and go, and a synchronizer that merges what they have found.

The processes of a job are a synchronizer, which leads it, and learners (`--ranks` of them). Neither
is in a process group: they exchange framed messages (`launcher/messages`), so the death of one is
nothing that another waits for.

    learner        service                merging                 trainer of the synchronizer
    train a chunk -> found, samples   ->  quorum or grace: merge -> metrics, evaluation, checkpoint
    begin again   <- weights, chunk   <-  theta, version, ledger <- taken up again after a restart

`ledger` hands out the samples, so that each counts once in an epoch; `merging` is the arithmetic;
`service` answers learners, each in a thread; `learner` is their loop, `wire` its end of the
connection; `trainer` is the leader's, for which a step is a merge, so that record, evaluation and
checkpoints are those of every strategy.
What the launcher does for it: a learner that is lost is no failure while `least` are left, and is
started again; so is the synchronizer, from its checkpoint, while learners wait for it (`Role`).

This class is what both have of a strategy: a step of one process alone. The inner optimizers are
the learners' own; a checkpoint has what each was after its last chunk that is in the weights
(`inner_state`), and a learner that comes again begins with that of the last checkpoint.
"""

from __future__ import annotations

from typing import Any

from allranks.strategies.card import Workload
from allranks.torch.data.batch import Batch
from allranks.torch.decoupled.flat import FlatModel
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.apart.whole_steps import refuse_without_whole_steps
from allranks.torch.strategies.base import Strategy


class Decoupled(Strategy):
    """Forward, backward, update, alone. The synchronizer makes no step; it holds `merged`."""

    name = "decoupled"
    learners = 1
    merged: dict[str, Any] | None = None
    """What of the state is the synchronizer's, beside the weights; set by its trainer."""

    def prepare(self) -> None:
        task = self.task
        asked = {
            "ema of the task": task.ema is not None,
            "plateau() of the task": task.plateau() is not None,
            "loss_over = 'batch'": task.loss_over == "batch",
        }
        found = "learners that each make steps of their own"
        why = "it follows from every step of the whole job, which nobody makes here"
        refuse_without_whole_steps(self.name, asked, found=found, why=why)

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        return local, Gradients(self.step.parameters)

    def messages(self) -> tuple[int, ...]:
        flat = FlatModel(self.model)
        weights = flat.parameters * flat.type.itemsize
        return weights, flat.nbytes - weights

    def promised_bytes(self) -> int:
        work = Workload(self.messages(), self.learners, self.task.shards)
        return self.card.bytes_sent(work, self.context.options)

    def state(self) -> dict[str, Any]:
        state = super().state()
        return state if self.merged is None else {**state, "merged": self.merged}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.merged = state.get("merged")
