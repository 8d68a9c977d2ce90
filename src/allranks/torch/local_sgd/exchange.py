"""The meetings of learners: what each has found of a fragment leaves, and comes back as the mean.

Every learner makes the same calls with the same step numbers. Numbers are counted from the first
step in which learners train apart, which is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any

import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.strategies.mesh import LEARNER
from allranks.torch.comm.comm import Comm
from allranks.torch.comm.subgroups import Pending
from allranks.torch.compression.codecs import Codec
from allranks.torch.compression.error_feedback import ErrorFeedback
from allranks.torch.local_sgd.global_weights import FlatWeights, GlobalWeights
from allranks.torch.model.layers import normalising_layers
from allranks.torch.strategies.base import Strategy
from allranks.torch.task import Task
from allranks.training.progress import NOTHING, RankRequests, StepResult

# --- sums ----------------------------------------------------------------------------------------
# How what learners found is summed, weighted by what each has trained on.
#
# as it is     an all-reduce of all numbers
# by messages  every learner encodes what it found and what it has kept, and all decode the
#              messages of all, in the order of the learners: the same numbers on each of them


WEIGHT_BYTES = 8


class Sums:
    """Sums `found` of a flat over the learners of `comm`. Sends 2(L-1)/L of its bytes."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def begin(self, flat: FlatWeights, trained: float) -> Pending:
        """Begin the sum of `trained` times what this learner found; each of them calls this."""
        return self.comm.all_reduce(flat.find(trained))

    def own_state(self) -> dict[str, Any]:
        """What of it is this learner's alone."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Take up what `own_state` returned, of flats of the same tensors."""


class CodedSums(Sums):
    """Parameters by messages of `codec`, buffers as they are. Sends L-1 times a message."""

    def __init__(self, comm: Comm, weights: GlobalWeights, codec: Codec, decay: float) -> None:
        super().__init__(comm)
        flats = [flat for one in weights.fragments for flat in one.flats]
        self.feedback = {id(f): ErrorFeedback(codec, f.weights, decay) for f in flats}
        self._named = {", ".join(flat.names): id(flat) for flat in flats}

    def begin(self, flat: FlatWeights, trained: float) -> Pending:
        feedback = self.feedback.get(id(flat))
        if feedback is None:
            return super().begin(flat, trained)
        count = flat.weights.numel()
        if trained:
            message = feedback.encode(flat.find(1.0)[:count])
        else:  # a learner that found nothing keeps what it has for the next meeting
            message = feedback.codec.encode(torch.zeros_like(flat.weights))
        weight = torch.tensor([trained], dtype=torch.float64, device=message.device)
        own = torch.cat([weight.view(torch.uint8), message])
        whole = own.new_empty(self.comm.size * own.numel())
        if self.comm.size == 1:
            whole.copy_(own)
            pending = Pending()
            self._add_up(feedback.codec, flat.found[:count], whole)
            return pending
        pending = self.comm.all_gather(whole, own)
        pending.then = partial(self._add_up, feedback.codec, flat.found[:count], whole)
        return pending

    def _add_up(self, codec: Codec, found: Tensor, messages: Tensor) -> None:
        found.zero_()
        for message in messages.view(self.comm.size, -1):
            weight = message[:WEIGHT_BYTES].clone().view(torch.float64).item()
            if weight:
                codec.add_decoded(message[WEIGHT_BYTES:], found, weight)

    def own_state(self) -> dict[str, Any]:
        return {names: self.feedback[flat].residual for names, flat in self._named.items()}

    def load_own_state(self, state: dict[str, Any]) -> None:
        for names, flat in self._named.items():
            kept = state.get(names)
            if kept is not None and kept.shape == self.feedback[flat].residual.shape:
                self.feedback[flat].residual.copy_(kept)


@dataclass(frozen=True)
class Said:
    """What a learner says beside its weights, or the sum of it over all learners.

    `trained` is the weight of what it has trained on since it last took part; loss and weight are
    those of its last step, `rate` is the inner rate of that step. `samples` are those of the step,
    or at a meeting all that its buffers have seen since they last took part.
    """

    trained: float = 0
    loss: float = 0
    weight: float = 0
    samples: float = 0
    rate: float = 0
    stop: float = 0
    save: float = 0

    @staticmethod
    def of(
        result: StepResult,
        trained: float = 0,
        samples: int | None = None,
        asked: RankRequests = NOTHING,
    ) -> Said:
        """What a learner says after a step."""
        samples = result.samples if samples is None else samples
        weight = result.weight if result.updated and result.weight > 0 else 0.0
        loss = result.loss * weight if weight else 0.0
        rate, asks = result.learning_rate, (asked.stop, asked.save)
        return Said(trained, loss, weight, samples, rate, *asks)

    def tensor(self, comm: Comm) -> Tensor:
        """All of it, in the order of the fields."""
        numbers = [self.trained, self.loss, self.weight, self.samples]
        numbers += [self.rate, self.stop, self.save]
        return torch.tensor(numbers, dtype=torch.float64, device=comm.device)

    @property
    def asked(self) -> RankRequests:
        """What the supervisor wants of any of them."""
        return RankRequests.of(self.stop > 0, self.save > 0)

    @property
    def mean_loss(self) -> float:
        return self.loss / self.weight if self.weight else nan


SAID_BYTES = 7 * 8


def of_all(comm: Comm, result: StepResult) -> Said:
    """The numbers of a step of all learners; every one calls this."""
    numbers = Said.of(result).tensor(comm)
    comm.all_reduce(numbers).wait()
    with comm.reading():
        return Said(*numbers.tolist())


@dataclass
class UnderWay:
    """The sum over the learners of what they have found of some flats, taken at step `until`."""

    fragment: int
    until: int
    said: Tensor
    pending: list[Pending]
    comm: Comm

    def wait(self) -> Said:
        """The sums are here, and what all have said together."""
        for pending in self.pending:
            pending.wait()
        self.pending = []
        with self.comm.reading():
            return Said(*self.said.tolist())


class LearnerExchange:
    """Sends a fragment, as `sums` does it, and 2(L-1)/L of `Said`, at each meeting of L learners.

    With a `codec` messages stand for what is sent, and what they leave out fades by `decay`.
    `moved` is called after the weights of this learner have become other ones.
    """

    def __init__(
        self,
        comm: Comm,
        weights: GlobalWeights,
        *,
        every: int,
        overlap: int = 0,
        mix: float = 0.0,
        codec: Codec | None = None,
        decay: float = 1.0,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self.comm, self.weights, self.every = comm, weights, every
        self.sums: Sums = Sums(comm) if codec is None else CodedSums(comm, weights, codec, decay)
        self.overlap, self.mix = overlap, mix if overlap else 0.0
        self._moved = moved
        self._trained, self._seen = [0.0] * len(weights.fragments), 0
        self._under_way: list[UnderWay] = []

    def meet(self, at: int, result: StepResult, asked: RankRequests) -> Said | None:
        """After step `at`, which gave `result` and is counted: send and take what is due.

        Returns what all learners said, if something was taken.
        """
        said = self._take(at)
        for number in self._due(at):
            self._send(number, at + self.overlap, result, asked)
            said = self._take(at) or said
        return said

    def count(self, result: StepResult) -> None:
        """This learner has made a step."""
        if result.updated:
            self._trained = [before + result.weight for before in self._trained]
            self._seen += result.samples

    def moves(self, at: int) -> bool:
        """Whether something is sent or taken after step `at`."""
        return self.asks(at) or any(one.until <= at for one in self._under_way)

    def asks(self, at: int) -> bool:
        """Whether something is sent after step `at`."""
        return bool(self._due(at))

    def meet_for_good(self, at: int, rate: float) -> bool:
        """Take all that is under way, and meet over what was trained since; step `at` is the last.

        Returns whether that has moved the weights.
        """
        moved = self._take(at + self.overlap) is not None
        nothing = StepResult(at, 0, nan, 0, 0.0, rate, updated=False)
        for number in range(len(self._trained)):
            if at and number not in self._due(at):
                self._send(number, at, nothing, NOTHING)
                moved = self._take(at) is not None or moved
        return moved

    def _due(self, at: int) -> list[int]:
        fragments = self.weights.fragments
        return [n for n, one in enumerate(fragments) if at % self.every == one.offset]

    def _buffers(self, fragment: int) -> Sequence[FlatWeights]:
        """Those that go with a fragment: all with the last, as what is seen by samples."""
        is_last = fragment == len(self.weights.fragments) - 1
        return self.weights.buffers if is_last else ()

    def _flats(self, fragment: int) -> Sequence[FlatWeights]:
        return (*self.weights.fragments[fragment].flats, *self._buffers(fragment))

    def _send(self, fragment: int, until: int, result: StepResult, asked: RankRequests) -> None:
        trained, self._trained[fragment] = self._trained[fragment], 0.0
        seen, buffers = 0, self._buffers(fragment)
        if buffers:
            seen, self._seen = self._seen, 0
        said = Said.of(result, trained, seen, asked).tensor(self.comm)
        with torch.no_grad():
            flats = self.weights.fragments[fragment].flats
            pending = [self.sums.begin(flat, trained) for flat in flats]
            pending += [self.sums.begin(flat, seen) for flat in buffers]
        pending.append(self.comm.all_reduce(said))
        self._under_way.append(UnderWay(fragment, until, said, pending, self.comm))

    def _take(self, at: int) -> Said | None:
        """Move the global weights by the means that are due, and this learner's to them."""
        said = None
        for one in [one for one in self._under_way if one.until <= at]:
            self._under_way.remove(one)
            said = one.wait()
            if said.trained:
                with torch.no_grad():
                    for flat in self._flats(one.fragment):
                        is_seen = flat in self._buffers(one.fragment)
                        mean = flat.found.div_(said.samples if is_seen else said.trained)
                        flat.take(mean, said.rate / self.comm.size, self.mix)
                self._moved()
        return said

    # --- state ----------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        """What of it is this learner's alone."""
        sums = self.sums.own_state()
        return {"trained": self._trained, "seen": self._seen, "sums": sums}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Take up what `own_state` returned, where there are as many fragments as then."""
        if len(state["trained"]) == len(self._trained):
            self._trained = [float(one) for one in state["trained"]]
            self._seen = int(state.get("seen", 0))  # older checkpoints have none
            self.sums.load_own_state(state["sums"])

    def state(self) -> list[dict[str, Any]]:
        """What is under way, summed over all: the same on every learner; waits for it."""
        return [
            {
                "fragment": one.fragment,
                "until": one.until,
                "said": list(vars(one.wait()).values()),
                "found": self._found(one.fragment),
            }
            for one in self._under_way
        ]

    def load_state(self, state: list[dict[str, Any]]) -> None:
        """Take up what `state` returned; what is of other fragments than here is left out."""
        self._under_way = []
        for one in state:
            number = int(one["fragment"])
            if (
                number >= len(self.weights.fragments)
                or self._found(number).keys() != one["found"].keys()
            ):
                continue
            for name, view in self._found(number).items():
                view.copy_(one["found"][name])
            said = Said(*one["said"]).tensor(self.comm)
            self._under_way.append(UnderWay(number, int(one["until"]), said, [], self.comm))

    def _found(self, fragment: int) -> dict[str, Tensor]:
        flats = self._flats(fragment)
        return {n: v for f in flats for n, v in zip(f.names, f.views(f.found), strict=True)}


# --- limits --------------------------------------------------------------------------------------
# What a task and a job cannot have where learners train apart between two meetings.


def for_learners(task: Task, job: Job, strategy: Strategy) -> RequestError | None:
    """The error for what needs all ranks in each step; `None` for any other job."""
    if LEARNER not in dict(strategy.mesh.axes):
        return None
    if task.ema is not None:  # of one learner, too: its own weights are not what is kept
        return _refused(
            job,
            "a moving average of the weights (ema)",
            "it would be that of one learner: the outer optimizer moves other weights",
        )
    if strategy.mesh.size(LEARNER) == 1:
        return None
    whole = task.batchnorm == "whole" and bool(normalising_layers(strategy.model))
    found = {
        'loss_over = "batch"': (
            task.loss_over == "batch",
            "the loss would need the outputs of all learners in every step",
        ),
        'batchnorm = "whole"': (
            whole,
            "the statistics would need the activations of all learners in every step",
        ),
        "--precision fp16": (
            job.precision == "fp16",
            "each learner would have a loss scale of its own, and a checkpoint holds one",
        ),
        "initialise()": (
            task.overrides("initialise"),
            "it is given the whole first batch, of which a learner has its part",
        ),
    }
    for what, (is_there, why) in found.items():
        if is_there:
            return _refused(job, what, why)
    return None


def _refused(job: Job, found: str, why: str) -> RequestError:
    return RequestError(
        asked=f"--strategy {job.strategy}", found=found, why=why, do="--strategy ddp"
    )


def check_stream(task: Task, strategy: Strategy) -> None:
    """Raise `RequestError` for a stream of which the rest of an epoch is to be dropped."""
    if task.last_batch == "drop" and strategy.mesh.size(LEARNER) > 1:
        raise RequestError(
            asked=f'--strategy {strategy.name} with last_batch = "drop"',
            found="a stream",
            why="no learner knows how many samples the others have left",
            do="--set last_batch=keep, or --strategy ddp",
        )
