"""The scheduler's side of a step: it waits for the parts, decides, and commands the servers.

The code which all strategies share (`SharedStep.apply`) runs here as elsewhere: division,
regularizer, guard, clipping, rates. The gradient stays on the servers; each operation on it is sent
to them as a few numbers (`RemoteGradients`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    join_state,
    packed,
    plain_hyperparameters,
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
    "the loss of each worker is finite; the servers have only the sum of the gradients, so the "
    "samples behind it are not searched for (--strategy ddp does that)"
)


class Leading:
    """The servers of a job, led by this process, whose strategy has the whole model."""

    def __init__(self, strategy: ParameterServer, links: Links) -> None:
        self.strategy, self.links = strategy, links

    def ask_all(
        self, message: dict[str, Any], bodies: Sequence[Sequence[Buffer]] = ()
    ) -> list[tuple[dict[str, Any], memoryview]]:
        """Send a message to all servers and wait for answers; raises `PeerLost` if one is gone."""
        with _is_lost():
            return self.links.ask_all(message, bodies)

    def load(self, version: int, era: int) -> None:
        """Send the weights and the optimizer state of this process to the servers."""
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
        """Load the weights of the servers into the model, and optimizer states if asked."""
        answers = self.ask_all({"do": "fetch", "state": optimizer})
        strategy = self.strategy
        for layout, (answer, body) in zip(strategy.layouts, answers, strict=True):
            if layout.nbytes:
                layout.new(body[: layout.nbytes]).write_to(
                    [p.detach() for p in strategy.parameters]
                )
            if optimizer:
                states = unpacked(answer["kept"], body[layout.nbytes :])
                join_state(strategy.step.optimizer, strategy.parameters, layout.pieces, states)
        keeping = strategy.step.optimizer if optimizer else None
        with _is_lost():
            take_tables(strategy.tables, strategy.parameters, keeping, self.links)

    def put_weights(self) -> None:
        """Send the weights of this process to the servers; no worker may pull meanwhile."""
        weights = [p.detach() for p in self.strategy.parameters]
        bodies: list[list[Buffer]] = []
        for layout in self.strategy.layouts:
            flat = layout.new()
            flat.read_from(weights)
            bodies.append([flat.buffer])
        self.ask_all({"do": "put"}, bodies)


class LeadingInStep(Leading):
    """Synchronous mode: waits for all parts of a step, and lets the servers update."""

    def __init__(self, strategy: ParameterServer, links: Links, service: Service) -> None:
        super().__init__(strategy, links)
        self._service = service
        self._gradients: RemoteGradients | None = None
        self._findings: tuple[BadStepFinding, ...] = ()

    def forward_backward(self, batch: Batch) -> Tally:
        """The tallies of all parts, in their order."""
        step = self.strategy.step
        step.begin(batch)
        self._service.go_on()
        results = self._service.step()
        self._findings = tuple(
            BadStepFinding(**row) for result in results for row in result.report.get("found", ())
        )
        tally = step.layout.tally()
        for result in results:
            tally.tensor.add_(result.tally)
        step.end(batch)
        return tally

    def find_bad_samples(self, batch: Batch, spiked: bool) -> tuple[BadStepFinding, ...]:
        """The samples behind a bad step, as the workers reported them."""
        return self._findings or (BadStepFinding(NOT_SEARCHED),)

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        self._gradients = RemoteGradients(self)
        return local, self._gradients

    @contextmanager
    def updating(self, gradients: Gradients) -> Iterator[None]:
        """Within, parameters have no gradient; afterwards the servers update with theirs."""
        assert isinstance(gradients, RemoteGradients)
        for parameter in gradients.parameters:
            parameter.grad = None
        yield
        gradients.apply()

    def after_update(self, result: StepResult) -> None:
        """Let the servers update, and the workers begin the next step meanwhile."""
        assert self._gradients is not None
        if self.strategy.step.probe is not None:  # it may change weights before the next step
            self._service.pause()
        with _is_lost():
            self.links.send_to_all(self._gradients.update or {"do": "pass"})
            self.publish()
            self._service.close_step()
            self.links.receive_all()

    def publish(self) -> None:
        """Send the settings of the next step to workers, with their work."""
        step = self.strategy.step
        scale = None if step.loss_scale is None else step.loss_scale.value
        settings = {"loss_scale": scale, "regularizer": float(step.regularizers.was)}
        self._service.publish(settings, self.strategy.statistics())


class RemoteGradients(Gradients):
    """The gradient of a step: `factor` times the pieces which the servers have.

    It is not copied to this process; `parameters` have no `.grad`.
    """

    def __init__(self, leading: LeadingInStep) -> None:
        super().__init__(leading.strategy.parameters)
        self._leading = leading
        self.factor = 1.0
        self.unused: list[int] = []
        self.update: dict[str, Any] | None = None
        """The message which makes the servers apply it."""

    def settle(self, unused: Sequence[int]) -> None:
        self.unused = list(unused)

    def follow(self, parameters: list[nn.Parameter]) -> None:
        raise unfrozen_on_the_way(self._leading.strategy.name)

    def scale_(self, factor: float | Tensor) -> None:
        self.factor *= float(factor)

    def add(self, value: Tensor) -> None:
        """Add the gradient of `value`, a function of the weights computed in this process."""
        for parameter in self.parameters:
            parameter.grad = None
        value.backward()
        gradients = [p.grad for p in self.parameters]
        check_no_rows(self.parameters, {table.position for table in self._leading.strategy.tables})
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
        """The whole gradient, fetched from the servers; used by a trace."""
        gradients = [torch.zeros_like(p) for p in self.parameters]
        layouts = self._leading.strategy.layouts
        answers = self._leading.ask_all({"do": "gradients"})
        for layout, (_, body) in zip(layouts, answers, strict=True):
            if layout.nbytes:
                layout.new(body).write_to(gradients)
        unused = set(self.unused)
        return [None if at in unused else g * self.factor for at, g in enumerate(gradients)]

    def norm(self, *, clips: bool, left_out: bool) -> float:
        answers = self._leading.ask_all({"do": "squares", "unused": self.unused})
        squares = math.fsum(float(answer["squares"]) for answer, _ in answers)
        return math.sqrt(squares) * abs(self.factor) if squares >= 0 else math.nan

    def norm_unread(self, *, clips: bool, left_out: bool) -> Tensor:
        return torch.tensor(self.norm(clips=clips, left_out=left_out), dtype=torch.float64)

    def clip_(self, limit: float, norm: float | Tensor) -> None:
        self.factor *= clip_factor(limit, norm)

    def apply(self) -> None:
        """Prepare the update of the servers, with the optimizer's current hyperparameters."""
        groups = plain_hyperparameters(self._leading.strategy.step.optimizer)
        how = {"factor": self.factor, "groups": groups, "unused": self.unused}
        self.update = {"do": "apply", **how}


@contextmanager
def _is_lost() -> Iterator[None]:
    """Within, a broken connection to a server raises `PeerLost`."""
    try:
        yield
    except Disconnected as error:
        raise PeerLost(str(error)) from error
