"""The exchange between learners: each sends its delta of a fragment, and gets the mean back.

Every learner makes the same calls with the same step numbers. Step 1 is the first step in which
the learners train separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from math import nan
from typing import Any

import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.strategies.mesh import LEARNER
from allranks.torch.comm.comm import Comm, Pending
from allranks.torch.compression.codecs import Codec, ErrorFeedback
from allranks.torch.local_sgd.global_weights import FlatWeights, GlobalWeights
from allranks.torch.model.layers import normalising_layers
from allranks.torch.strategies.base import Strategy
from allranks.torch.task import Task
from allranks.training.progress import NOTHING, RankRequests, StepResult

# --- sums ----------------------------------------------------------------------------------------
# How deltas are summed; the weight of a learner is what it has trained on.
#
# uncompressed  an all-reduce of all numbers
# compressed    every learner encodes its delta plus its residual; all decode the messages of all,
#               in the order of the learners, and so get the same numbers


WEIGHT_BYTES = 8


class Sums:
    """Sums deltas over the learners of `comm`. Sends 2(L-1)/L of their bytes.

    With a `codec` parameters are compressed, buffers not: L-1 times a message.
    """

    def __init__(
        self, comm: Comm, weights: GlobalWeights, codec: Codec | None, decay: float
    ) -> None:
        self.comm = comm
        self.feedback: dict[int, ErrorFeedback] = {}
        self._named: dict[str, int] = {}
        if codec is not None:
            flats = [flat for fragment in weights.fragments for flat in fragment.flats]
            self.feedback = {id(f): ErrorFeedback(codec, f.weights, decay) for f in flats}
            self._named = {", ".join(flat.names): id(flat) for flat in flats}

    def begin(self, flat: FlatWeights, trained: float) -> Pending:
        """Begin the sum of `trained` times the delta; every learner calls this."""
        feedback = self.feedback.get(id(flat))
        if feedback is None:
            return self.comm.all_reduce(flat.compute_delta(trained))
        count = flat.weights.numel()
        if trained:
            message = feedback.encode(flat.compute_delta(1.0)[:count])
        else:  # a learner that trained on nothing keeps its residual for the next exchange
            message = feedback.codec.encode(torch.zeros_like(flat.weights))
        weight = torch.tensor([trained], dtype=torch.float64, device=message.device)
        local = torch.cat([weight.view(torch.uint8), message])
        whole = local.new_empty(self.comm.size * local.numel())
        if self.comm.size == 1:
            whole.copy_(local)
            pending = Pending()
            self._add_up(feedback.codec, flat.delta[:count], whole)
            return pending
        pending = self.comm.all_gather(whole, local)
        pending.then = partial(self._add_up, feedback.codec, flat.delta[:count], whole)
        return pending

    def _add_up(self, codec: Codec, total: Tensor, messages: Tensor) -> None:
        total.zero_()
        for message in messages.view(self.comm.size, -1):
            weight = message[:WEIGHT_BYTES].clone().view(torch.float64).item()
            if weight:
                codec.add_decoded(message[WEIGHT_BYTES:], total, weight)

    def own_state(self) -> dict[str, Any]:
        """The state of this learner alone."""
        return {names: self.feedback[flat].residual for names, flat in self._named.items()}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Load what `own_state` returned for flats of the same tensors."""
        for names, flat in self._named.items():
            residual = state.get(names)
            if residual is not None and residual.shape == self.feedback[flat].residual.shape:
                self.feedback[flat].residual.copy_(residual)


@dataclass(frozen=True)
class LearnerReport:
    """The numbers that a learner sends with its weights, or their sum over all learners.

    `trained` is the weight of its training since its last exchange. `loss`, `weight` and `rate`
    (the inner learning rate) belong to its last step. `samples` counts the samples of that step,
    or in an exchange all samples since the last exchange of the buffers.
    """

    trained: float = 0
    loss: float = 0
    weight: float = 0
    samples: float = 0
    rate: float = 0
    stop: float = 0
    save: float = 0

    @staticmethod
    def of(result: StepResult, requests: RankRequests = NOTHING) -> LearnerReport:
        """The report of a learner after a step."""
        weight = result.weight if result.updated and result.weight > 0 else 0.0
        return LearnerReport(
            loss=result.loss * weight if weight else 0.0,
            weight=weight,
            samples=result.samples,
            rate=result.learning_rate,
            stop=requests.stop,
            save=requests.save,
        )

    def tensor(self, comm: Comm) -> Tensor:
        """All fields, in their order."""
        return torch.tensor(astuple(self), dtype=torch.float64, device=comm.device)

    @property
    def requests(self) -> RankRequests:
        """What the supervisor requests from any learner."""
        return RankRequests.of(self.stop > 0, self.save > 0)

    @property
    def mean_loss(self) -> float:
        return self.loss / self.weight if self.weight else nan


REPORT_BYTES = 7 * 8


def of_all(comm: Comm, result: StepResult) -> LearnerReport:
    """The sum of the reports of all learners for a step; every learner calls this."""
    numbers = LearnerReport.of(result).tensor(comm)
    comm.all_reduce(numbers).wait()
    with comm.reading():
        return LearnerReport(*numbers.tolist())


@dataclass
class UnderWay:
    """The sum of the deltas of a fragment, in flight; it is applied at step `until`."""

    fragment: int
    until: int
    report: Tensor
    pending: list[Pending]
    comm: Comm

    def wait(self) -> LearnerReport:
        """Wait for the sums; returns the sum of all reports."""
        for pending in self.pending:
            pending.wait()
        self.pending = []
        with self.comm.reading():
            return LearnerReport(*self.report.tolist())


class LearnerExchange:
    """In each exchange of L learners, sends a fragment by `sums`, and 2(L-1)/L of a report.

    `options` are those of the strategy. With a `codec` deltas are compressed. `moved` is called
    after an exchange has changed the weights of this learner.
    """

    def __init__(
        self,
        comm: Comm,
        weights: GlobalWeights,
        options: Mapping[str, Any],
        codec: Codec | None,
        moved: Callable[[], None],
    ) -> None:
        self.comm, self.weights, self._moved = comm, weights, moved
        self.every, self.overlap = int(options["every"]), int(options.get("overlap", 0))
        self.mix, decay = float(options.get("mix", 0.0)), float(options.get("decay", 1.0))
        self.sums = Sums(comm, weights, codec, decay)
        self._trained, self._seen = [0.0] * len(weights.fragments), 0
        self._under_way: list[UnderWay] = []

    def meet(self, at: int, result: StepResult, requests: RankRequests) -> LearnerReport | None:
        """After step `at` with `result`, which was counted: send and apply what is due.

        Returns the sum of all reports if a mean was applied.
        """
        report = self._apply_due(at)
        for number in self._due(at):
            self._send(number, at + self.overlap, LearnerReport.of(result, requests))
            report = self._apply_due(at) or report
        return report

    def count(self, result: StepResult) -> None:
        """Count a step of this learner."""
        if result.updated:
            self._trained = [before + result.weight for before in self._trained]
            self._seen += result.samples

    def moves_after(self, at: int) -> bool:
        """Whether something is sent or applied after step `at`."""
        return self.sends_after(at) or any(exchange.until <= at for exchange in self._under_way)

    def sends_after(self, at: int) -> bool:
        """Whether something is sent after step `at`."""
        return bool(self._due(at))

    def meet_finally(self, at: int, rate: float) -> bool:
        """Apply all that is in flight, and exchange what was trained since; step `at` is the last.

        Returns whether the weights have changed.
        """
        moved = self._apply_due(at + self.overlap) is not None
        for number in range(len(self._trained)):
            if at and number not in self._due(at):
                self._send(number, at, LearnerReport(rate=rate))
                moved = self._apply_due(at) is not None or moved
        return moved

    def _due(self, at: int) -> list[int]:
        fragments = self.weights.fragments
        return [n for n, fragment in enumerate(fragments) if at % self.every == fragment.offset]

    def _buffers(self, fragment: int) -> Sequence[FlatWeights]:
        """The buffers that go with a fragment: all of them with the last, weighted by samples."""
        is_last = fragment == len(self.weights.fragments) - 1
        return self.weights.buffers if is_last else ()

    def _flats(self, fragment: int) -> Sequence[FlatWeights]:
        return (*self.weights.fragments[fragment].flats, *self._buffers(fragment))

    def _send(self, fragment: int, until: int, report: LearnerReport) -> None:
        trained, self._trained[fragment] = self._trained[fragment], 0.0
        samples, buffers = 0, self._buffers(fragment)
        if buffers:
            samples, self._seen = self._seen, 0
        numbers = replace(report, trained=trained, samples=samples).tensor(self.comm)
        with torch.no_grad():
            flats = self.weights.fragments[fragment].flats
            pending = [self.sums.begin(flat, trained) for flat in flats]
            pending += [self.sums.begin(flat, samples) for flat in buffers]
        pending.append(self.comm.all_reduce(numbers))
        self._under_way.append(UnderWay(fragment, until, numbers, pending, self.comm))

    def _apply_due(self, at: int) -> LearnerReport | None:
        """Update the global weights by the means that are due, and this learner's from them."""
        report = None
        for exchange in [exchange for exchange in self._under_way if exchange.until <= at]:
            self._under_way.remove(exchange)
            report = exchange.wait()
            if report.trained:
                with torch.no_grad():
                    for flat in self._flats(exchange.fragment):
                        is_buffer = flat in self._buffers(exchange.fragment)
                        mean = flat.delta.div_(report.samples if is_buffer else report.trained)
                        flat.apply_mean(mean, report.rate / self.comm.size, self.mix)
                self._moved()
        return report

    # --- state ----------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        """The state of this learner alone."""
        sums = self.sums.own_state()
        return {"trained": self._trained, "seen": self._seen, "sums": sums}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Load what `own_state` returned, if the number of fragments is the same."""
        if len(state["trained"]) == len(self._trained):
            self._trained = [float(weight) for weight in state["trained"]]
            self._seen = int(state.get("seen", 0))  # older checkpoints have none
            self.sums.load_own_state(state["sums"])

    def state(self) -> list[dict[str, Any]]:
        """The sums in flight, the same on every learner; waits for them."""
        return [
            {
                "fragment": exchange.fragment,
                "until": exchange.until,
                "said": list(astuple(exchange.wait())),
                "found": self._deltas(exchange.fragment),
            }
            for exchange in self._under_way
        ]

    def load_state(self, state: list[dict[str, Any]]) -> None:
        """Load what `state` returned; skips sums of fragments that differ from the current ones."""
        self._under_way = []
        for saved in state:
            number = int(saved["fragment"])
            if (
                number >= len(self.weights.fragments)
                or self._deltas(number).keys() != saved["found"].keys()
            ):
                continue
            for name, view in self._deltas(number).items():
                view.copy_(saved["found"][name])
            report = LearnerReport(*saved["said"]).tensor(self.comm)
            self._under_way.append(UnderWay(number, int(saved["until"]), report, [], self.comm))

    def _deltas(self, fragment: int) -> dict[str, Tensor]:
        flats = self._flats(fragment)
        return {n: v for f in flats for n, v in zip(f.names, f.views(f.delta), strict=True)}


# --- limits --------------------------------------------------------------------------------------
# What a task and a job cannot use with learners that train separately between exchanges.


def for_learners(task: Task, job: Job, strategy: Strategy) -> RequestError | None:
    """The error for a feature that needs all ranks in each step; else `None`."""
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
    unsupported = {
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
    for feature, (is_there, why) in unsupported.items():
        if is_there:
            return _refused(job, feature, why)
    return None


def _refused(job: Job, feature: str, why: str) -> RequestError:
    return RequestError(
        asked=f"--strategy {job.strategy}", found=feature, why=why, do="--strategy ddp"
    )


def check_stream(task: Task, strategy: Strategy) -> None:
    """Raise `RequestError` for a stream that drops the last batch of an epoch."""
    if task.last_batch == "drop" and strategy.mesh.size(LEARNER) > 1:
        raise RequestError(
            asked=f'--strategy {strategy.name} with last_batch = "drop"',
            found="a stream",
            why="no learner knows how many samples the others have left",
            do="--set last_batch=keep, or --strategy ddp",
        )
