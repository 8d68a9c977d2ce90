"""Audits a training against silent data corruption: a shard is computed again by another rank.

The owner notes digests of loss, moments and gradients of the very pass that enters the step. The
auditor has read the samples of the shard itself, and computes it before its own passes. Where a
pass gathers weights (`fsdp`), the others make as many short passes, which count for nothing.
The bytes of both digests travel with the tally, those of the auditor with a minus: where the sum is
not zero, all ranks know it before the update, and ask who is wrong.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from allranks.errors import AuditFailed, ComputesWrongly, PeerLost, RequestError
from allranks.job.job import Job
from allranks.launcher.nodes.facts import processor
from allranks.strategies.audits import (
    AUDIT_BYTES,
    AuditVerdict,
    Findings,
    Notes,
    first_difference,
    in_words,
    judged,
)
from allranks.strategies.mesh import SHARD
from allranks.torch.accelerator import chip_name, is_accelerator
from allranks.torch.data.batch import Audited, Batch, Leaf, MicroBatch, micro_for_others
from allranks.torch.data.batches import GlobalBatches
from allranks.torch.data.collate import copied, tensors_in
from allranks.torch.machine import flip_one_bit
from allranks.torch.step.gradients import length_of_each
from allranks.torch.step.passes import SAMPLES_FOR_OTHERS
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.base import Strategy
from allranks.torch.witness.observed import roots_of_model
from allranks.torch.witness.recompute import (
    TOLERANCE,
    USUAL_TOLERANCE,
    leaving_no_trace,
    read_again,
)
from allranks.torch.witness.replicas import digest

ADVICE = (
    "Memory or a chip of that machine may be failing: take it out, and go on from the last "
    "checkpoint"
)


class PassNotes:
    """The digests of the passes of one shard on this rank.

    With `sizes`, also lengths and sums of the results, for ranks whose bits may differ. While it
    `is_open` it covers the passes of that shard.
    """

    def __init__(self, strategy: Strategy, shard: int, *, sizes: bool) -> None:
        self.shard, self.is_open = shard, True
        self._strategy, self._sizes, self._passes = strategy, sizes, 0
        self.notes: Notes = {"inputs": {}, "results": {}, "sizes": {}}

    def covers(self, micro: MicroBatch) -> bool:
        return self.is_open and micro.pieces[0].shard == self.shard

    def noting(
        self, micro: MicroBatch, sums: Tally, run_backward: Callable[[], None]
    ) -> Callable[[], None]:
        self._passes += 1
        number = f", pass {self._passes}" if self._passes > 1 else ""
        inputs = self.notes["inputs"]
        inputs["samples"] = inputs.get("samples", "") + digest(*tensors_in(micro.data))
        draws = digest(torch.get_rng_state())
        inputs["random numbers"] = inputs.get("random numbers", "") + draws
        layout = sums.layout
        results = {f"the loss{number}": sums.tensor[:1]}
        if layout.norms:
            results[f"the moments of BatchNorm{number}"] = sums.tensor[layout.all_moments]
        self._note(results)

        def run() -> None:
            step, weights = self._strategy.step, self._strategy.in_passes()
            names = [f"the gradient of {name!r}{number}" for name in step.names]
            if not self._strategy.equal_passes:
                run_backward()
                self._note({n: _dense(p) for n, p in zip(names, weights, strict=True)})
                return
            # a gradient is summed over the ranks, and gone, before backward ends
            before = step.on_gradient
            step.on_gradient = lambda at: self._note({names[at]: _dense(weights[at])})
            run_backward()
            step.on_gradient, noted = before, self.notes["results"]
            noted.update({name: noted.pop(name) for name in names if name in noted})  # in order

        return run

    @torch.no_grad()
    def _note(self, results: dict[str, Tensor]) -> None:
        for name, tensor in results.items():
            self.notes["results"][name] = digest(tensor + 0)  # -0 + 0 is 0
        if self._sizes:
            lengths = length_of_each(list(results.values()))
            for (name, tensor), size in zip(results.items(), lengths, strict=True):
                self.notes["sizes"][name] = [size, float(tensor.sum(dtype=torch.float64))]

    def write(self, numbers: Tensor) -> None:
        """Add the bytes of one digest of all results, those of an auditor with a minus."""
        total = hashlib.blake2b("".join(self.notes["results"].values()).encode(), digest_size=16)
        row = numbers.new_tensor(list(total.digest()[:AUDIT_BYTES]))
        numbers.add_(row if self.is_open else -row)


def _dense(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if gradient is None:  # not used: as a bucket of zeros
        return torch.zeros_like(parameter)
    return torch.zeros_like(parameter).add_(gradient) if gradient.is_sparse else gradient


class Auditor:
    """Audits the steps of one training; every rank makes one, and calls the same methods.

    The constructor gathers what decides the bits of a pass; `number` is that of this process.
    `report` is called on rank 0 where ranks differ.
    """

    def __init__(
        self, strategy: Strategy, job: Job, report: Callable[..., None], number: int
    ) -> None:
        self.strategy, self.job, self._report, self.number = strategy, job, report, number
        self.batches: GlobalBatches | None = None
        self.counts = {"shards": 0, "differed": 0}  # of what this group of ranks computed again
        device = strategy.comm.device
        facts = [processor(), chip_name(device), torch.get_num_threads(), torch.__version__]
        of_ranks = strategy.data.gather_values(facts)
        is_alike = all(each == of_ranks[0] for each in of_ranks)
        self.notes: list[str] = []
        self.is_exact = is_alike and not job.compile
        self.is_exact &= job.bitwise or not is_accelerator(device)
        if not self.is_exact:
            why = "compiled passes" if job.compile else "other processors or threads on some ranks"
            why = why if job.compile or not is_alike else "no --bitwise on an accelerator"
            self.notes.append(f"audits compare up to rounding, not to the bit: {why}")
        self._tolerance = TOLERANCE.get(job.precision, USUAL_TOLERANCE) / 10
        if self.is_exact:
            self._tolerance = 0.0
        strategy.on_sums = self.compare

    def before_step(self, batch: Batch, batches: GlobalBatches | None) -> None:
        """Before the passes of an audited step, with the step before it settled.

        The auditor computes the shard. Communicates only what the passes of the strategy do.
        """
        step, audited = self.strategy.step, batch.audited
        step.observer = None
        if audited is None:
            return
        self.batches = batches
        reader, draw = self.strategy.data.rank, audited.draw
        notes = self._computed(batch, audited if reader == draw.auditor else None)
        if reader == draw.owner:
            notes = PassNotes(self.strategy, draw.shard, sizes=not self.is_exact)
        step.observer = notes

    def compare(self, batch: Batch, sums: Tally) -> None:
        """Whether owner and auditor have the same, from the sums of a step before its update.

        Communicates only if they differ. Raises `AuditFailed`, `ComputesWrongly` on a rank that is
        to leave, and `PeerLost` on the others.
        """
        step, comm = self.strategy.step, self.strategy.data
        observer, step.observer = step.observer, None
        self.counts["shards"] += 1
        with comm.reading():
            differs = bool(sums.tensor[step.layout.audit].any())
        if differs:
            notes = observer.notes if isinstance(observer, PassNotes) else None
            self._ask(batch, notes)

    def _computed(self, batch: Batch, audited: Audited | None) -> PassNotes | None:
        """Compute the shard on this rank, as its owner does; leaves no trace.

        Without `audited` this rank only makes the passes that others wait for. Where passes
        communicate, every rank calls this.
        """
        strategy, step = self.strategy, self.strategy.step
        if audited is None and not strategy.equal_passes:
            return None
        assert batch.audited is not None
        shard, micros = batch.audited.draw.shard, () if audited is None else audited.micros
        notes = PassNotes(strategy, shard, sizes=not self.is_exact)
        leaves, passes = (Leaf(range(shard, shard + 1), micros),), len(batch.audited.micros)
        spare = micro_for_others(batch, SAMPLES_FOR_OTHERS) if strategy.equal_passes else None
        alone = replace(batch, leaves=leaves, passes=passes, spare=spare)
        with (
            leaving_no_trace(step, roots_of_model(step.model, strategy.task)),
            step.recomputing(None),
            strategy.apart_from_steps(),
        ):
            step.observer = notes
            step.begin(alone)
            step.begin_leaf()
            for micro in micros:
                if strategy.each_pass:
                    for parameter in step.parameters:
                        parameter.grad = None
                step.forward(micro, step.layout.tally())()
            step.for_others.finish(alone, None)
        step.observer, notes.is_open = None, False
        return None if audited is None else notes

    def _read(self, batch: Batch, audited: Audited) -> Audited:
        """The samples of the shard, read by this rank."""
        source: Any = None if self.batches is None else self.batches.source
        step = self.strategy.step
        data = (copied(read_again(source, batch.epoch, [*ids], step)) for ids in audited.to_read())
        return audited.with_data(data)

    # --- who is wrong -----------------------------------------------------------------------

    def _ask(self, batch: Batch, notes: Notes | None) -> None:
        """Find out who is wrong, tell it, and do what `--audit` says; every rank calls this."""
        audited = batch.audited
        assert audited is not None
        draw, comm = audited.draw, self.strategy.data
        if self._tolerance:
            noted = comm.gather_values(notes)
            if not first_difference(noted[draw.owner], noted[draw.auditor], self._tolerance):
                return
        self.counts["differed"] += 1
        computes = (draw.owner, draw.auditor) if draw.third is None else (draw.third,)
        read = self._read(batch, audited) if comm.rank in computes else None
        again = self._computed(batch, read)
        shards = self.strategy.axis(SHARD)
        part = f", part {shards.rank} of {shards.size}" if shards.size > 1 else ""
        weights = self.strategy.model.named_parameters()
        chip = chip_name(comm.device) or processor()
        here = Findings(
            rank=self.number,
            host=socket.gethostname(),
            device=f"{comm.device}, {chip}" if chip else str(comm.device),
            first=notes or {},
            again={} if again is None else again.notes,
            weights={f"{name}{part}": digest(parameter) for name, parameter in weights},
        )
        rows = [Findings(**row) for row in comm.gather_values(asdict(here))]
        verdict = judged(draw, rows, self._tolerance)
        text = in_words(batch.index, draw, verdict, rows)
        if comm.rank == 0:
            row = None if verdict.wrong is None else rows[verdict.wrong]
            self._report(
                "audit",
                step=batch.index,
                **draw._asdict(),
                **{**asdict(verdict), "wrong": row and row.rank},
                host=row and row.host,
                device=row and row.device,
                does=self.job.audit,
                text=text,
            )
        self._act(verdict, text)

    def _act(self, verdict: AuditVerdict, text: str) -> None:
        """Go on, end the job, or let the rank that is wrong leave."""
        if self.job.audit == "warn":
            return
        if self.job.audit == "stop" or verdict.wrong is None:
            raise AuditFailed(f"{text}. {ADVICE}.")
        if verdict.wrong == self.strategy.data.rank:
            raise ComputesWrongly(text)
        raise PeerLost(text)


# --- faults on purpose ---------------------------------------------------------------------------


def with_wrong_samples(batch: Batch) -> Batch:
    """The batch with one bit of each pass of this rank flipped."""

    def flipped(micro: MicroBatch) -> MicroBatch:
        data = copied(micro.data)
        numbers = (tensor for tensor in tensors_in(data) if tensor.is_floating_point())
        if (first := next(numbers, None)) is not None:
            flip_one_bit(first, largest=True)
        return replace(micro, data=data)

    leaves = tuple(replace(e, micros=tuple(map(flipped, e.micros))) for e in batch.leaves)
    audited = batch.audited
    if audited is not None and audited.is_read:
        audited = replace(audited, micros=tuple(map(flipped, audited.micros)))
    return replace(batch, leaves=leaves, audited=audited)


def flipper(strategy: Strategy) -> Callable[[str], None]:
    """Flips a bit of a weight or of a moment, or of the gradients of the next step."""

    def flip(of: str) -> None:
        step = strategy.step
        parameter = step.parameters[0]
        if of == "gradient":
            step.flips = strategy.in_passes()[0]
        elif of == "weight":
            flip_one_bit(parameter, largest=True)
        elif of == "moment":
            state = step.optimizer.state.get(parameter, {}).values()
            moments = (value for value in state if isinstance(value, Tensor) and value.ndim)
            if (moment := next(moments, None)) is None:
                raise RequestError(
                    asked="--inject flip@of=moment",
                    found=f"{type(step.optimizer).__name__} without a state for {step.names[0]!r}",
                    why="a moment is there after the first update, of an optimizer that has some",
                    do="a later step, or another optimizer: --optimizer adam:lr=1e-3",
                )
            flip_one_bit(moment, largest=True)

    return flip
