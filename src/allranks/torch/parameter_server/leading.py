"""The scheduler's side of a step: it waits for the parts, decides as one process, tells servers.

What every strategy shares (`SharedStep.apply`) runs here as it does anywhere: division,
regularizer, guard, clipping, rates. The gradient that it handles is on the servers: what is done to
it is said to them in a few numbers (`RemoteGradients`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from allranks.errors import PeerLost
from allranks.launcher.messages.connection import Buffer
from allranks.launcher.nodes.channel import Disconnected
from allranks.torch.data.batch import Batch
from allranks.torch.parameter_server.links import Links
from allranks.torch.parameter_server.service import Service
from allranks.torch.parameter_server.state import (
    cut_state,
    hyper_parameters_said,
    join_state,
    packed,
    unpacked,
)
from allranks.torch.parameter_server.strategy import ParameterServer
from allranks.torch.parameter_server.tables.remote import (
    check_no_rows,
    load_tables,
    take_tables,
)
from allranks.torch.step.gradients import Gradients, clip_factor
from allranks.torch.step.tally import Tally
from allranks.torch.step.trainable import unfrozen_on_the_way
from allranks.training.guard import BadStepFinding
from allranks.training.progress import StepResult

LOOK_S = 0.2
NOT_SEARCHED = (
    "the loss of each worker is finite; the servers have the sum of the gradients alone, so nobody "
    "looks for the samples that did it (--strategy ddp does)"
)


class Leading:
    """The servers of a training, with the strategy that has the model whole in this process."""

    def __init__(self, strategy: ParameterServer, links: Links) -> None:
        self.strategy, self.links = strategy, links

    def ask_all(
        self, message: dict[str, Any], bodies: Sequence[Sequence[Buffer]] = ()
    ) -> list[tuple[dict[str, Any], memoryview]]:
        """Say the same to all servers; raises `PeerLost` where one is gone."""
        with _is_lost():
            return self.links.ask_all(message, bodies)

    def load(self, version: int, era: int) -> None:
        """Let the servers have the weights and the optimizer of this process."""
        strategy, bodies, specs = self.strategy, [], []
        for layout in strategy.layouts:
            flat = layout.new()
            flat.read_from([p.detach() for p in strategy.parameters])
            spec, body = packed(
                cut_state(strategy.step.optimizer, strategy.parameters, layout.pieces)
            )
            specs.append(spec)
            bodies.append([flat.buffer, *body])
        message = {"do": "load", "version": version, "era": era}
        with _is_lost():
            load_tables(strategy.tables, strategy.parameters, strategy.step.optimizer, self.links)
            for server, (spec, body) in enumerate(zip(specs, bodies, strict=True)):
                self.links.send(server, {**message, "kept": spec}, *body)
                self.links.receive(server)

    def take_weights(self, *, optimizer: bool = False) -> None:
        """The model has the weights of the servers from here on."""
        answers = self.ask_all({"do": "fetch" if optimizer else "peek"})
        strategy = self.strategy
        for layout, (answer, body) in zip(strategy.layouts, answers, strict=True):
            if layout.nbytes:
                layout.new(body[: layout.nbytes]).write_to(
                    [p.detach() for p in strategy.parameters]
                )
            if optimizer:
                kept = unpacked(answer["kept"], body[layout.nbytes :])
                join_state(strategy.step.optimizer, strategy.parameters, layout.pieces, kept)
        keeping = strategy.step.optimizer if optimizer else None
        with _is_lost():
            take_tables(strategy.tables, strategy.parameters, keeping, self.links)

    def put_weights(self) -> None:
        """The servers have the weights of this process from here on; nobody pulls meanwhile."""
        weights = [p.detach() for p in self.strategy.parameters]
        bodies: list[list[Buffer]] = []
        for layout in self.strategy.layouts:
            flat = layout.new()
            flat.read_from(weights)
            bodies.append([flat.buffer])
        self.ask_all({"do": "put"}, bodies)

    def forward_backward(self, batch: Batch) -> Tally:
        return self.strategy.compute(batch)

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        return local, Gradients(self.strategy.parameters)

    @contextmanager
    def updating(self, gradients: Gradients) -> Iterator[None]:
        yield

    def after_update(self, result: StepResult) -> None:
        """Nothing is left to do."""


class LeadingInStep(Leading):
    """The same where all parts of a step are waited for. `alive` is called meanwhile."""

    def __init__(
        self,
        strategy: ParameterServer,
        links: Links,
        service: Service,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(strategy, links)
        self._service, self._alive = service, alive
        self._gradients: RemoteGradients | None = None
        self._findings: tuple[BadStepFinding, ...] = ()
        self._squares_come = False

    def forward_backward(self, batch: Batch) -> Tally:
        """The tallies of all parts, in their order."""
        step = self.strategy.step
        step.begin(batch)
        self._service.go_on()
        self._ask_for_squares()
        while (found := self._service.step(LOOK_S)) is None:
            if self._service.calls_back():
                self.call_back()
            self._alive()
        self._findings = tuple(
            BadStepFinding(**row) for brought in found for row in brought.said.get("found", ())
        )
        tally = step.layout.tally()
        for brought in found:
            tally.tensor.add_(brought.tally)
        step.end(batch)
        return tally

    def who(self, batch: Batch, spiked: bool) -> tuple[BadStepFinding, ...]:
        """Who brought a bad step in, as the workers have found themselves."""
        return self._findings or (BadStepFinding(NOT_SEARCHED),)

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        self._gradients = RemoteGradients(self)
        return local, self._gradients

    @contextmanager
    def updating(self, gradients: Gradients) -> Iterator[None]:
        """Within, the optimizer finds no gradient; then the servers update with theirs."""
        assert isinstance(gradients, RemoteGradients)
        for parameter in gradients.parameters:
            parameter.grad = None
        yield
        gradients.apply()

    def after_update(self, result: StepResult) -> None:
        """Let the servers update; whoever waits there for the next version begins with it."""
        assert self._gradients is not None
        if self.strategy.step.probe is not None:  # it may change weights before the next step
            self._service.pause()
        self._service.close_step()
        self.tell(self._gradients.update or {"do": "pass"})

    def tell(self, message: dict[str, Any], *, waits: bool = False) -> None:
        """Say this to all servers, and to workers, by the first one, what the next step is made of.

        Unless this `waits` they do not answer: who is gone is noticed when it is spoken to again.
        """
        step, links = self.strategy.step, self.links
        scale = None if step.loss_scale is None else step.loss_scale.value
        told = {"loss_scale": scale, "regularizer": float(step.regularizers.was)}
        message = {**message, "silent": not waits}
        with _is_lost():
            for server in range(1, len(links.servers)):
                links.send(server, message)
            links.send(0, {**message, "told": told}, self.strategy.statistics())
            if waits:
                links.hear_all()

    # --- the norm -------------------------------------------------------------------------

    def _ask_for_squares(self) -> None:
        """Ask for the norm before it is there: it comes when the last part has.

        A regularizer, and who traces, ask for other things first.
        """
        step = self.strategy.step
        if step.probe is None and not step.regularizers.is_there:
            with _is_lost():
                self.links.say_to_all({"do": "squares", "unused": []})
            self._squares_come = True

    def squares(self, unused: Sequence[int]) -> float:
        """The sum of the squares of the gradient; of parameters that nobody used they are zeros."""
        answers = self._squares_that_come() or self.ask_all({"do": "squares", "unused": unused})
        return math.fsum(float(answer["squares"]) for answer, _ in answers)

    def _squares_that_come(self) -> list[tuple[dict[str, Any], memoryview]] | None:
        """The answers that were asked for; `None` if they were not, or servers were interrupted."""
        if not self._squares_come:
            return None
        with _is_lost():
            answers = self.links.hear_all()
        self._squares_come = False
        return None if any(answer["squares"] is None for answer, _ in answers) else answers

    def call_back(self) -> None:
        """Let those who wait at the servers for the next step ask the scheduler again."""
        with _is_lost():
            self.links.say_to_all({"do": "call_back"})
            self._squares_that_come()
            self.links.hear_all()


class RemoteGradients(Gradients):
    """The gradient of a step, of which each server has its pieces: `factor` times what they have.

    Nothing of it comes here; `parameters` hold none.
    """

    def __init__(self, leading: LeadingInStep) -> None:
        super().__init__(leading.strategy.parameters)
        self._leading = leading
        self.factor = 1.0
        self.unused: list[int] = []
        self.update: dict[str, Any] | None = None
        """What the servers are told to do with it."""

    def settle(self, unused: Sequence[int]) -> None:
        self.unused = list(unused)

    def follow(self, parameters: list[nn.Parameter]) -> None:
        raise unfrozen_on_the_way(self._leading.strategy.name)

    def scale_(self, factor: float | Tensor) -> None:
        self.factor *= float(factor)

    def add(self, value: Tensor) -> None:
        """Add the gradient of a value of the weights, which this process has computed whole."""
        for parameter in self.parameters:
            parameter.grad = None
        value.backward()
        gradients = [p.grad for p in self.parameters]
        check_no_rows(self.parameters, {one.position for one in self._leading.strategy.tables})
        self.unused = [at for at in self.unused if gradients[at] is None]
        bodies: list[list[Buffer]] = []
        for layout in self._leading.strategy.layouts:
            flat = layout.new()
            flat.read_from(gradients)
            bodies.append([flat.buffer])
        self._leading.ask_all({"do": "add", "factor": self.factor}, bodies)
        self.factor = 1.0
        for parameter in self.parameters:
            parameter.grad = None

    def tensors(self) -> list[Tensor | None]:
        """All of it, fetched from the servers: who traces a training asks for that."""
        found = [torch.zeros_like(p) for p in self.parameters]
        layouts = self._leading.strategy.layouts
        answers = self._leading.ask_all({"do": "gradients"})
        for layout, (_, body) in zip(layouts, answers, strict=True):
            if layout.nbytes:
                layout.new(body).write_to(found)
        unused = set(self.unused)
        return [None if at in unused else g * self.factor for at, g in enumerate(found)]

    def norm(self, *, clips: bool, left_out: bool) -> float:
        squares = self._leading.squares(self.unused)
        return math.sqrt(squares) * abs(self.factor) if squares >= 0 else math.nan

    def norm_unread(self, *, clips: bool, left_out: bool) -> Tensor:
        return torch.tensor(self.norm(clips=clips, left_out=left_out), dtype=torch.float64)

    def clip_(self, limit: float, norm: float | Tensor) -> None:
        self.factor *= clip_factor(limit, norm)

    def apply(self) -> None:
        """The servers are to update with it, at the rates that the optimizer has now."""
        groups = hyper_parameters_said(self._leading.strategy.step.optimizer)
        how = {"factor": self.factor, "groups": groups, "unused": self.unused}
        self.update = {"do": "apply", **how}


@contextmanager
def _is_lost() -> Iterator[None]:
    """Within, a server that is gone is a `PeerLost`."""
    try:
        yield
    except Disconnected as error:
        raise PeerLost(str(error)) from error
