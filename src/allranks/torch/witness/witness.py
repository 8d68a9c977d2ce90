"""The witness: reports if the result of a run depends on the number of ranks. On by default.

    names and shapes   of all ranks are compared while a strategy is set up (`same_model`)
    replicas           are compared after the first two steps, at the end, and before weights are
                       written (`replicas`)
    side effects       of the first two steps, besides gradients, are named (`observed`)
    recomputation      in the second step, and in steps whose number is a multiple of
                       `WITNESS_EVERY`, as long as that takes no more than `SHARE_OF_TIME`: one
                       micro-batch whole and shard by shard, by its rank, and one of these shards
                       by the next rank too (`recompute`)

After a restart on the same number of ranks, the witness does not repeat these checks: its findings
are restored from the checkpoint. Counters, generators and draws by function are checked again.

It changes no bit of a training. A finding is a sentence, the same on all ranks. Under `warn` the
training goes on, under `stop` it ends with `FollowsRanks`, and `off` checks nothing. With
`bitwise`, a finding that would break its guarantee raises before the first update.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from allranks.errors import FollowsRanks, RequestError
from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch.data.batch import Batch
from allranks.torch.data.batches import GlobalBatches
from allranks.torch.data.loaders import WholeLoader
from allranks.torch.data.sources import TensorSource
from allranks.torch.strategies.base import Strategy
from allranks.torch.witness.joint_look import JointLook, why_none
from allranks.torch.witness.observed import (
    WRITES_WEIGHT,
    Named,
    Observer,
    Roots,
    Token,
    changed_by_reading,
    hook_makes_again,
    read,
    roots_of_model,
    roots_of_task,
)
from allranks.torch.witness.recompute import OF_TYPES, Offer, Recomputing, SecondLook
from allranks.torch.witness.replicas import CAUSES, verify

WITNESS_EVERY = 500  # steps between two looks, after the first two
SHARE_OF_TIME = 0.002  # of a training, for all of its looks: in fp32 one may last 40 steps in bf16
OBSERVED_STEPS = 2
LONGEST = 400  # characters of a note on a failed check
EARLY_CAUSES = (
    "So early it is the task, most often: it writes weights or clears gradients in forward or "
    "loss, draws from generators of its own in its optimizer, "
    "or lets its regularizer read what forward left."
)
NO_SECOND_FINDING = "no shard was computed again: what was found would change its result"


def say_what_matters(event: str, **values: Any) -> None:
    """Print important events to stderr, for training loops without a display."""
    if event == "witness":
        for text in values["found"]:
            sys.stderr.write(f"allranks: NOT equal on other numbers of ranks: {text}\n")
        for text in values["unseen"]:
            sys.stderr.write(f"allranks: note: the witness could not look at everything: {text}\n")
    if event == "audit":
        sys.stderr.write(f"allranks: {values['text']}\n")
    if event in ("rate_notes", "callback_notes"):
        for text in values["notes"]:
            sys.stderr.write(f"allranks: note: {text}\n")


@dataclass
class Testimony:
    """The report of the witness, the same on all ranks: `found` makes the result depend on the
    number of ranks, `unseen` was not checked.

    `looks` is the number of micro-batches that were recomputed.
    """

    asked: str
    found: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    looks: int = 0

    def to_data(self) -> dict[str, Any]:
        return asdict(self)


class LookBudget:
    """Bounds the time of all looks to `SHARE_OF_TIME` of the training.

    Each rank measures, and the clock of rank 0 decides. The first look is always allowed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._began: float | None = None
        self._spent_s = self._last_s = 0.0
        self.looks = 0

    def begin(self) -> None:
        """Begin a step; time counts from the first one."""
        if self._began is None:
            self._began = self.clock()

    def allows(self) -> bool:
        """Whether one more look, as long as the last, stays within the budget."""
        assert self._began is not None, "a step has begun"
        wanted_s = self._spent_s + self._last_s
        return wanted_s <= SHARE_OF_TIME * (self.clock() - self._began)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Within, a look runs, and its time is counted."""
        began = self.clock()
        yield
        self._last_s = self.clock() - began
        self._spent_s += self._last_s
        self.looks += 1


class Witness:
    """Checks a training; the trainer calls it around the steps that it `observes`, and around those
    whose number is a multiple of `WITNESS_EVERY`, on every rank.

    `report(event, **values)` is called with new findings, on rank 0.
    """

    def __init__(
        self, strategy: Strategy, job: Job, report: Callable[..., None], world: World
    ) -> None:
        self.strategy, self.job, self.report = strategy, job, report
        self._start = [job.run_dir, world.attempt - world.restarts]  # of all its attempts alike
        self._is_restart, self._looked_before = world.restarts + world.group > 0, False
        self._group = world.group
        self.testimony = Testimony(job.witness)
        is_apart = not strategy.agreement.is_one_training and strategy.comm.size > 1
        self.is_on = job.witness != "off" and not is_apart
        self._why_none = why_none(strategy) if strategy.equal_passes else ""
        self.looks_again = not self._why_none
        self.budget = LookBudget()
        self.steps = self._at = 0  # only those around which it was called
        self.every = WITNESS_EVERY
        self.observes = self.is_on
        """Whether the next step is one of the first steps, which are observed."""
        self._before_reading: dict[str, Token] | None = None
        self._read: Named = {}
        self._observer: Observer | None = None

    # --- across a restart -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The findings of this rank that a restart need not repeat."""
        return {
            "start": self._start,
            "ranks": self.strategy.comm.size,
            "looked": self._looked_before or self.steps >= OBSERVED_STEPS,
            "written": sorted(self.strategy.step.user_buffers.written),
            "found": list(self.testimony.found),
            "unseen": list(self.testimony.unseen),
            "looks": self.testimony.looks,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the findings of an earlier attempt of the same start."""
        if not self._is_restart or state["start"] != self._start:
            return
        is_as_before = state["ranks"] == self.strategy.comm.size or self._group > 0
        self._looked_before = state["looked"] and is_as_before
        if self._looked_before and self._group:  # a group formed anew observes nothing twice
            self.steps, self.observes = OBSERVED_STEPS, False
        self.strategy.step.user_buffers.written |= set(state["written"])
        known = self.testimony
        known.found[:] = dict.fromkeys([*state["found"], *known.found])
        known.unseen[:] = dict.fromkeys([*state["unseen"], *known.unseen])
        known.looks += state.get("looks", 0)

    # --- around the reading of the first batch ----------------------------------------------

    def before_reading(self, batches: GlobalBatches) -> None:
        """A batch is read next."""
        if self.is_on and self.steps == 0 and not self._reads_elsewhere(batches):
            with self._unseen_if_it_fails():
                self._before_reading = read(self._roots_of_data(batches))

    def after_reading(self, batches: GlobalBatches) -> None:
        """A batch was read."""
        before, self._before_reading = self._before_reading, None
        if before is not None:
            with self._unseen_if_it_fails():
                self._read = changed_by_reading(before, read(self._roots_of_data(batches)))

    @contextmanager
    def _unseen_if_it_fails(self) -> Iterator[None]:
        """Within, an error of a user's object ends no training, but is recorded as unseen."""
        try:
            yield
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.testimony.unseen.append(f"what passes change was not seen: {reason}"[:LONGEST])

    def _reads_elsewhere(self, batches: GlobalBatches) -> bool:
        """Whether other processes or threads read the data, or every rank reads all of it."""
        source = batches.source
        return isinstance(source, (TensorSource, WholeLoader)) or bool(
            getattr(source, "workers", 0)
        )

    def _roots_of_data(self, batches: GlobalBatches) -> Roots:
        data = getattr(batches.source, "dataset", None)
        return [("data set ", data), *roots_of_task(self.strategy.task)]

    def _roots(self) -> Roots:
        return roots_of_model(self.strategy.model, self.strategy.task)

    # --- around each step -------------------------------------------------------------------

    def looks_again_at(self, batch: Batch) -> bool:
        """Whether shards of the batch are recomputed before its step, if there is time."""
        is_due = self.steps == 1 and not self._looked_before
        is_due |= self.steps > 1 and batch.index % self.every == 0
        return self.is_on and self.looks_again and is_due

    def before_step(
        self, batch: Batch, batches: GlobalBatches | None, settle: Callable[[], None]
    ) -> None:
        """Begin a step. Communicates if shards are recomputed, after the last step is settled.

        `batches` is the source of the batch; `None` if the batch was made by hand.
        """
        if not self.is_on:
            return
        if self.observes:
            if self._observer is None:
                alone = self.strategy.shard_alone
                self._observer = Observer(self.strategy.step, self._roots, alone)
            self._observer.contents = self.steps == 0 and not self._looked_before
            self.strategy.step.on_phase = self._reached
        self._at = batch.index
        self.budget.begin()
        if self.looks_again_at(batch):
            settle()
            if batches is not None and self._has_time():
                with self.budget.spending():
                    self._look_again(batch, batches)

    def after_step(self) -> None:
        """End a step. Communicates after the first two: 32 bytes to each other rank."""
        if not self.is_on:
            return
        self.steps += 1
        self.observes = self.steps < OBSERVED_STEPS
        self.strategy.step.on_phase = None
        if self.steps <= OBSERVED_STEPS and not self._looked_before:
            verify(self.strategy, self._causes(EARLY_CAUSES))

    def compare_replicas(self) -> None:
        """Before weights are written: raise `ReplicasDiffer` unless all ranks hold the same."""
        if self.is_on or self.job.verify_every is not None:
            verify(self.strategy, self._causes())

    def _causes(self, early: str = "") -> str:
        """The likely causes of a drift of replicas, the likeliest first."""
        writes = [text for text in self.testimony.found if WRITES_WEIGHT in text]
        if writes:
            return f"The witness has seen what does that: {'; '.join(writes)}."
        return f"{early} {CAUSES}".strip()

    def _reached(self, where: str) -> None:
        assert self._observer is not None
        if where != "finish":
            with self._unseen_if_it_fails():
                self._observer.reached(where)
            return
        self.strategy.step.on_phase = None  # a bad step is recomputed after this
        local, self._read = {**self._read, **self._observer.findings}, {}
        gather, merged = self.strategy.comm.gather_texts, dict[str, str]()
        for of_rank in self.strategy.comm.gather_values(local):
            for name, sentence in of_rank.items():
                merged.setdefault(name, sentence)
        if merged:
            for name in self._recomputed(self._observer.tensors):
                merged.pop(name, None)
        self.strategy.step.user_buffers.agree(merged)
        findings = list(merged.values())
        readings = self.strategy.step.scope.keys.readings
        findings += readings.agree(gather)
        if self.job.bitwise and findings:
            raise RequestError(
                asked="--bitwise",
                found="; ".join(findings),
                why="equal bits on any number of ranks need passes that leave nothing behind, and "
                "random numbers that belong to a shard",
                do="keep it out of the passes (a callback comes after each step; torch's own "
                "generator and the `random` of augment are keyed), or drop --bitwise",
            )
        is_last = self.steps == OBSERVED_STEPS - 1
        unseen = max(gather(readings.untried())) if is_last else self._why_none
        self._add_findings(self._at, findings, unseen)

    def _recomputed(self, changed: set[str]) -> set[str]:
        """Of the changed tensors of modules, those that hooks recompute from the weights alone.

        Every rank calls this.
        """
        gather = self.strategy.comm.gather_values
        of_all = set[str]().union(*gather(sorted(changed)))
        if not of_all:
            return of_all
        step = self.strategy.step
        with self.strategy.whole_weights(), step.precision.autocast():
            device = step.scope.device
            others = [name for name in changed if not hook_makes_again(step.model, name, device)]
        return of_all.difference(*gather(others))

    def _add_findings(self, step: int, findings: list[str], unseen: str = "") -> None:
        """Record and report new findings; the same on all ranks."""
        known = self.testimony
        new = [text for text in findings if text not in known.found]
        known.found += new
        if unseen and unseen not in known.unseen:
            known.unseen.append(unseen)
        elif not new:
            return
        if self.strategy.comm.rank == 0:
            self.report("witness", step=step, found=new, unseen=[unseen] if unseen else [])
        if new and self.job.witness == "stop":
            raise FollowsRanks(
                f"the result follows the number of ranks: {'; '.join(new)}. Mend the task, or let "
                "it train all the same with --witness warn."
            )

    # --- a shard computed again -------------------------------------------------------------

    def _has_time(self) -> bool:
        """Whether there is time for a look, the same on all ranks; every rank calls this."""
        if self.budget.looks == 0 or self.testimony.found:
            return True
        return bool(self.strategy.comm.gather_values(self.budget.allows())[0])

    def _look_again(self, batch: Batch, batches: GlobalBatches) -> None:
        """Recompute a micro-batch, and compare; every rank calls this."""
        if self.testimony.found:
            self._add_findings(batch.index, [], NO_SECOND_FINDING)
            return
        strategy, turn = self.strategy, batch.index // self.every
        comm = strategy.data if strategy.equal_passes else strategy.comm
        offer = Offer.of(batch, turn)
        offers = comm.gather_texts("" if offer is None else offer.to_text())
        if not any(offers):
            return  # a stream has ended
        self.testimony.looks += 1
        recomputing = Recomputing(strategy.step, batch, self.job.precision)
        known = tuple(map(Offer.from_text, offers))
        roots = self._roots()
        if not self._reads_elsewhere(batches):
            roots += self._roots_of_data(batches)[:1]
        if strategy.equal_passes:
            recomputing.loosen(OF_TYPES.get(strategy.step.precision.compute, 0.0))
            is_short = self.job.micro_batch_trial
            joint = JointLook(strategy, batch, batches, recomputing, turn, known, is_short)
            text, unseen = joint.run_together(roots, exact=self.job.bitwise)
        else:
            look = SecondLook(strategy, batch, batches, recomputing, turn, known)
            text, unseen = self._compared(look, roots)
        self._add_findings(batch.index, [f"step {batch.index}: {text}"] if text else [], unseen)

    def _compared(self, look: SecondLook, roots: Roots) -> tuple[str, str]:
        """The difference between owner and helper of a look, and what was not checked."""
        comm = self.strategy.comm
        answers = comm.gather_values(look.run(comm.rank, roots))
        owner = answers[look.owner]
        helper = answers[look.helper] if look.helper != look.owner else {}
        text = owner.get("differs", "")
        if not text and owner.get("sketch") and helper.get("sketch"):
            text = look.recomputing.sketches_differ(
                look.chosen.shard, owner["sketch"], helper["sketch"], self.job.bitwise
            )
        return text, owner.get("unseen") or helper.get("unseen") or ""
