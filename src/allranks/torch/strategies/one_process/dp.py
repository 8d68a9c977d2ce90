"""Data parallelism in one process: a replica of the model on every device, a thread for each.

What `torch.nn.DataParallel` does, with the result of one process. In each step

    the weights go out from the first device to every replica, and the rows of a micro-batch with
    them; forward runs in threads; the outputs come back to the first device, where the loss is;
    backward runs through the gathering; the replicas' gradients are added up on the first device.

BatchNorm and dropout belong to the shard, not to the replica: each replica goes through whole
shards, in a scope of its own. Weights are copied and gradients added explicitly, once in a step,
where DataParallel does both through autograd, in every forward pass: there replicas have no weights
of their own, and what a module keeps of its weights is the first device's.

What user code draws in forward (`F.dropout`) comes from the one generator of the process on CPU, by
threads in no fixed order: it is not the same from run to run, and the engine cannot see it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import allranks.torch.accelerator as accelerator
from allranks.errors import explained
from allranks.job.placement import GATHERED, Placed
from allranks.strategies.shards import Micro
from allranks.torch.data.batch import (
    Batch,
    Cut,
    check_first_batch,
    gathered,
    samples_in,
    scattered,
    shares_of,
)
from allranks.torch.data.collate import tensors_in
from allranks.torch.model.layers import Scope, computed_again
from allranks.torch.model.placement import held, row
from allranks.torch.parallel.sharded.gradients import check_no_hooks
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.losses import forward
from allranks.torch.step.passes import UNRELATED, unrelated_input
from allranks.torch.step.step import SharedStep
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.base import Strategy
from allranks.torch.strategies.context import StrategyContext
from allranks.torch.strategies.one_process.model_copy import copy_of, follow

NAME = "inputs and outputs of a micro-batch"
ASKED = "--strategy dp"
CUT = Cut(ASKED, "the replicas")
SEES_ROWS = "each replica has a gradient of its rows alone, and the hook expects that of all"


@dataclass
class Replica:
    """A model on a device, its thread, and the scope that tells its layers whose rows they see."""

    number: int
    device: torch.device
    model: nn.Module
    scope: Scope
    drawn: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:  # always the same thread: libraries keep memory for each
        self.thread = ThreadPoolExecutor(1, f"replica-{self.number}", torch.get_num_threads)

    def enter(self, step: int, share: Micro) -> None:
        """The samples of `share` go through next; what the device draws is keyed by them."""
        with accelerator.using(self.device):
            self.scope.enter(step, share, samples_in(share))

    def entered(self) -> None:
        """Its forward pass is over: backward must not run these layers again."""
        self.drawn = dict(self.scope.calls)

    def check(self) -> None:
        """Raise `RequestError` if backward has run layers again that belong to a shard."""
        if self.scope.moments or self.scope.calls != self.drawn:
            raise computed_again()

    def forget(self) -> None:
        """No step has begun, whatever became of the last one."""
        self.scope.moments.clear()
        self.entered()
        for parameter in self.model.parameters():
            parameter.grad = None


class DP(Strategy):
    """Scatter rows over replicas in this process, gather their outputs, add their gradients up."""

    name = "dp"
    can_be_compiled = False
    has_one_model = False

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._unchecked = check_first_batch(self.task, CUT)  # before data is opened

    def parallelize(self, model: nn.Module) -> nn.Module:
        if self.context.options["replicas"] > 1:
            check_no_hooks(model, ASKED, SEES_ROWS)
        return model

    def watch_gradients(
        self, parameters: list[nn.Parameter], mark: Callable[[int], None]
    ) -> list[RemovableHandle]:
        self._watching = super().watch_gradients(parameters, mark)
        return self._watching

    def prepare(self) -> None:
        count, device = self.context.options["replicas"], self.comm.device
        devices = [device] * count
        if accelerator.is_accelerator(device):
            devices = [torch.device(device.type, number) for number in range(count)]
        self.first = Replica(0, devices[0], self.model, self.context.scope)
        self.copies = [self._copied(k, devices[k]) for k in range(1, count)]
        self.step.forward = self._forward
        self._hooks: list[RemovableHandle] = []
        self._weights_are_out = False
        self._gathered_rows = [Placed(GATHERED, NAME, str(devices[0]), "unknown", None, None)]
        self._gathered_samples = 0

    def _copied(self, number: int, device: torch.device) -> Replica:
        scope = Scope(self.context.scope.seed, device)
        model = copy_of(self.model, device, {id(self.context.scope): scope})
        return Replica(number, device, model, scope)

    def lay_out(self) -> None:
        step = self.step
        held: list[nn.Parameter] = list(step.parameters)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for replica in self.copies:
            weights = dict(replica.model.named_parameters())
            own = [weights[name] for name in step.names]
            held += own
            for position, weight in enumerate(own):
                weight.requires_grad_()  # it may be new
                self._hooks.append(
                    weight.register_post_accumulate_grad_hook(partial(_mark, step, position))
                )
            for number, position in enumerate(step.sparse.positions):
                self._hooks.append(own[position].register_hook(step.sparse.marker(number)))
        step.apart.parameters = held

    def forward_backward(self, batch: Batch) -> Tally:
        for replica in self.copies:
            replica.forget()
        self._weights_are_out = False
        if self.copies:  # an optimizer, or a callback, may have put some there
            engine = (*self._watching, *self.step.sparse.hooks)
            check_no_hooks(self.model, ASKED, SEES_ROWS, engine)
        with explained(UNRELATED, lambda _: unrelated_input(ASKED)):
            return super().forward_backward(batch)

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        for replica in self.copies:
            replica.check()
            _add_gradients(self.step, replica.model)
        return local, Gradients(self.step.parameters)

    def _forward(self, data: Any) -> Any:
        """The output of a micro-batch, on the first device: of its rows, by all replicas."""
        self._send_weights()
        scope = self.context.scope
        pieces, step = scope.pieces, scope.step
        shares = shares_of(pieces, 1 + len(self.copies))
        working = [self.first, *self.copies][: len(shares)]
        devices = [replica.device for replica in working]
        parts = scattered(data, samples_in(pieces), shares, devices, CUT)
        for replica, share in reversed(list(zip(working, shares, strict=True))):
            replica.enter(step, share)  # the first one last: the process draws as in `single`
        outputs = self._in_threads(working, parts)
        for replica in working[1:]:
            scope.take_moments(replica.scope)
            replica.entered()
        output = gathered(outputs, shares, self.first.device, CUT)
        if samples_in(pieces) > self._gathered_samples:
            self._gathered_samples = samples_in(pieces)
            self._gathered_rows = [
                row(GATHERED, f"{what} {number} of a micro-batch", tensor)
                for what, value in (("input", data), ("output", output))
                for number, tensor in enumerate(tensors_in(value))
            ]
        return output

    def _send_weights(self) -> None:
        """Once in a step; later than a trace puts other weights there."""
        if not self._weights_are_out:
            for replica in self.copies:
                follow(replica.model, self.model, replica.device)
            self._weights_are_out = True
        for replica in self.copies:
            replica.check()

    def _in_threads(self, working: list[Replica], parts: list[Any]) -> list[Any]:
        """The outputs of all; raises what the first that failed did, once all are done."""
        is_grad = torch.is_grad_enabled()
        futures = [
            replica.thread.submit(self._run, replica, part, is_grad)
            for replica, part in zip(working, parts, strict=True)
        ]
        wait(futures)
        return [future.result() for future in futures]

    def _run(self, replica: Replica, part: Any, is_grad: bool) -> Any:
        """In a thread of its own, to which device, gradients and arithmetic are carried over."""
        with (
            accelerator.using(replica.device),
            torch.set_grad_enabled(is_grad),
            self.context.precision.autocast(),
        ):
            try:
                return forward(self.task, replica.model, part)
            except Exception as error:
                count = 1 + len(self.copies)
                error.add_note(f"in replica {replica.number} of {count}, on {replica.device}")
                raise

    def placement(self, *, updated: bool) -> list[Placed]:
        """Every replica's weights; on the first device what it gathers too."""
        rows, names = super().placement(updated=updated), self.step.names
        for copy in self.copies:
            rows += held(copy.model, names, None, None, replica=copy.number, updated=updated)
        return rows + self._gathered_rows

    def close(self) -> None:
        """End the threads; the task is as it was."""
        for replica in (self.first, *self.copies):
            replica.thread.shutdown()
        self._unchecked()
        super().close()


def _mark(step: SharedStep, position: int, weight: Tensor) -> None:
    step.mark(position)


def _add_gradients(step: SharedStep, replica: nn.Module) -> None:
    """Add the gradients of a replica to those on the first device, and let go of them."""
    weights = dict(replica.named_parameters())
    if step.changes.late:
        names = {id(parameter): name for name, parameter in step.model.named_parameters()}
        for parameter in step.changes.late:
            step.changes.add(parameter, weights[names[id(parameter)]].grad)
    for name, parameter in zip(step.names, step.parameters, strict=True):
        gradient, weights[name].grad = weights[name].grad, None
        if gradient is None:
            continue
        gradient = gradient.to(parameter.device)
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
