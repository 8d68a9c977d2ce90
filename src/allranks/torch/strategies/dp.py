"""Data parallelism in one process: a replica of the model on every device, a thread for each.

It does what `torch.nn.DataParallel` does, with the result of one process. In each step

    the first device sends the weights to every replica, and the rows of a micro-batch; forward runs
    in threads; the outputs are gathered on the first device, which computes the loss; backward runs
    through the gather; the gradients of the replicas are added on the first device.

BatchNorm and dropout belong to the shard, not to the replica: each replica gets whole shards, in a
separate scope. Weights are copied and gradients added explicitly, once in a step. DataParallel does
both through autograd in every forward pass: there replicas have no weights of their own, and
references of a module to its weights are those of the first device.

On CPU, random numbers of user code in forward (`F.dropout`) come from the one generator of the
process, by threads in no fixed order: they differ from run to run, and the engine cannot detect it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import allranks.torch.accelerator as accelerator
from allranks.errors import Explained, RequestError
from allranks.job.place import GATHERED, Placed
from allranks.strategies.shards import Micro
from allranks.torch.data.batch import (
    Batch,
    ShareUse,
    check_first_batch,
    gathered,
    samples_in,
    scattered,
    shares_of,
)
from allranks.torch.data.collate import tensors_in
from allranks.torch.model.layers import Scope, computed_again
from allranks.torch.model.placement import placed_tensors, row
from allranks.torch.parallel.sharded.gradients import check_no_hooks
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.losses import forward
from allranks.torch.step.passes import UNRELATED, unrelated_input
from allranks.torch.step.step import SharedStep
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.base import Strategy, StrategyContext

# --- model copy ----------------------------------------------------------------------------------
# A copy of a model on another device, made once and updated in each step.
#
# Its weights are separate leaves, so all references of a module to them are those of the copy: an
# RNN's list of weights, a tied weight, `parameters()` inside forward.


PLAIN = (bool, int, float, str, type(None))
CONSTANT = (*PLAIN, complex, bytes, type, torch.dtype, torch.device)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def copy_of(model: nn.Module, device: torch.device, instead: dict[int, Any]) -> nn.Module:
    """A copy of the model with weights and buffers on `device`.

    `instead` maps the ids of objects to their replacements in the copy.
    """
    if any(hasattr(module, "_flatten_layers") for module in model.modules()):
        raise RequestError(
            asked=f"a second replica of {type(model).__name__}",
            found="a Keras model",
            why="Keras copies a model by writing and reading it, with weights of other names",
            do="--strategy ddp, or with --engine tensorflow --strategy mirrored",
        )
    _check_hooks(model)
    memo = dict(instead)
    for parameter in model.parameters():
        weight = parameter.detach().to(device, copy=True)
        memo[id(parameter)] = nn.Parameter(weight, parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to(device, copy=True)
    try:
        for parameter in model.parameters():  # its class and its attributes
            copied = memo[id(parameter)]
            copied.__class__ = type(parameter)
            vars(copied).update(copy.deepcopy(vars(parameter), memo))
        replica = copy.deepcopy(model, memo)
    except Exception as error:
        raise RequestError(
            asked=f"a second replica of {type(model).__name__}",
            found=f"{type(error).__name__}: {error}",
            why="every replica is a copy of the model, and it cannot be copied",
            do="keep in it what copy.deepcopy can copy, or use --strategy ddp",
        ) from error
    for module in replica.modules():
        if isinstance(module, nn.RNNBase):  # cuDNN wants its weights in one piece of memory
            module.flatten_parameters()
    return replica


@torch.no_grad()
def follow(replica: nn.Module, model: nn.Module, device: torch.device) -> None:
    """Copy weights, buffers, modes and plain values of the model to its replica on `device`."""
    for mine, theirs in zip(replica.modules(), model.modules(), strict=True):
        plain = {n: value for n, value in vars(theirs).items() if isinstance(value, PLAIN)}
        vars(mine).update(plain)
        for name, weight in theirs._parameters.items():
            copied = mine._parameters[name]
            if weight is not None and copied is not None:
                copied.copy_(weight)
                noted = {n: v for n, v in vars(weight).items() if isinstance(v, PLAIN)}
                vars(copied).update(noted)
                copied.requires_grad_(weight.requires_grad)
        for name, buffer in theirs._buffers.items():
            mine._buffers[name] = _followed(mine._buffers.get(name), buffer, device)


def _followed(mine: Tensor | None, theirs: Tensor | None, device: torch.device) -> Tensor | None:
    """The buffer of a replica, copied from the model, in the same memory if it fits."""
    if mine is None or theirs is None or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return None if theirs is None else theirs.detach().to(device, copy=True)
    return mine.copy_(theirs)


def _check_hooks(model: nn.Module) -> None:
    """Raise `RequestError` for a module hook with state: all replicas would share it, or each would
    have a copy."""
    modules = set(model.modules())
    for name, module in model.named_modules():
        hooks = [hook for kind in HOOKS for hook in getattr(module, kind).values()]
        if any(_keeps(hook, modules) for hook in hooks):
            raise RequestError(
                asked=f"a second replica of {type(model).__name__}",
                found=f"a hook on the module {name!r} that keeps something of its own",
                why="the replicas run in threads, each with modules of its own: they would write "
                "to one object, or to copies that nobody reads",
                do="let forward of the model return it, or --strategy ddp",
            )


def _keeps(hook: Callable[..., Any], modules: set[nn.Module]) -> bool:
    """Whether a hook has state outside of modules of the model. Hooks of torch have none."""
    if isinstance(hook, partial):
        values = (*hook.args, *hook.keywords.values())
        return _keeps(hook.func, modules) or not all(map(_is_constant, values))
    if isinstance(hook, MethodType):
        return hook.__self__ not in modules
    if isinstance(hook, FunctionType):
        cells = [cell.cell_contents for cell in hook.__closure__ or ()]
        return not all(map(_is_constant, (*cells, *(hook.__defaults__ or ()))))
    return not type(hook).__module__.startswith("torch.")


def _is_constant(value: Any) -> bool:
    if isinstance(value, FunctionType):
        return not _keeps(value, set())
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_constant, value))
    return isinstance(value, CONSTANT)


NAME = "inputs and outputs of a micro-batch"
ASKED = "--strategy dp"
CUT = ShareUse(ASKED, "the replicas")
SEES_ROWS = "each replica has a gradient of its rows alone, and the hook expects that of all"


@dataclass
class Replica:
    """A model on a device, its thread, and the scope that tells its layers their samples."""

    number: int
    device: torch.device
    model: nn.Module
    scope: Scope
    drawn: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:  # always the same thread: libraries have memory for each
        self.thread = ThreadPoolExecutor(1, f"replica-{self.number}", torch.get_num_threads)

    def enter(self, step: int, share: Micro) -> None:
        """Set the samples of the next pass, which are the key of random numbers."""
        with accelerator.using(self.device):
            self.scope.enter(step, share, samples_in(share))

    def entered(self) -> None:
        """End the forward pass: backward must not run these layers again."""
        self.drawn = dict(self.scope.calls)

    def check(self) -> None:
        """Raise `RequestError` if backward has run layers again that belong to a shard."""
        if self.scope.moments or self.scope.calls != self.drawn:
            raise computed_again()

    def forget(self) -> None:
        """Reset the replica before a step."""
        self.scope.moments.clear()
        self.entered()
        for parameter in self.model.parameters():
            parameter.grad = None


class DP(Strategy):
    """Scatter rows over replicas in this process, gather their outputs, add their gradients up."""

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
        parameters: list[nn.Parameter] = list(step.parameters)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for replica in self.copies:
            weights = dict(replica.model.named_parameters())
            local = [weights[name] for name in step.names]
            parameters += local
            for position, weight in enumerate(local):
                weight.requires_grad_()  # it may be new
                self._hooks.append(
                    weight.register_post_accumulate_grad_hook(partial(_mark, step, position))
                )
            for number, position in enumerate(step.sparse.positions):
                self._hooks.append(local[position].register_hook(step.sparse.marker(number)))
        step.user_backward.parameters = parameters

    def forward_backward(self, batch: Batch) -> Tally:
        for replica in self.copies:
            replica.forget()
        self._weights_are_out = False
        if self.copies:  # an optimizer, or a callback, may have added some
            engine = (*self._watching, *self.step.sparse.hooks)
            check_no_hooks(self.model, ASKED, SEES_ROWS, engine)
        with Explained(UNRELATED, lambda _: unrelated_input(ASKED)):
            return super().forward_backward(batch)

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        for replica in self.copies:
            replica.check()
            _add_gradients(self.step, replica.model)
        return local, Gradients(self.step.parameters)

    def forward(self, data: Any) -> Any:
        """The output of a micro-batch on the first device, computed by all replicas."""
        self._send_weights()
        scope = self.context.scope
        pieces, step = scope.pieces, scope.step
        shares = shares_of(pieces, 1 + len(self.copies))
        working = [self.first, *self.copies][: len(shares)]
        devices = [replica.device for replica in working]
        parts = scattered(data, samples_in(pieces), shares, devices, CUT)
        for replica, share in reversed(list(zip(working, shares, strict=True))):
            replica.enter(step, share)  # the first one last: the process draws as in `single`
        is_grad = torch.is_grad_enabled()
        works = [partial(self._run, *pair, is_grad) for pair in zip(working, parts, strict=True)]
        outputs = in_threads([replica.thread for replica in working], works)
        for replica in working[1:]:
            scope.merge_moments(replica.scope)
            replica.entered()
        output = gathered(outputs, shares, self.first.device, CUT)
        if samples_in(pieces) > self._gathered_samples:
            self._gathered_samples = samples_in(pieces)
            self._gathered_rows = [
                row(GATHERED, f"{side} {number} of a micro-batch", tensor)
                for side, value in (("input", data), ("output", output))
                for number, tensor in enumerate(tensors_in(value))
            ]
        return output

    def _send_weights(self) -> None:
        """Copy weights once in a step, after a trace may have replaced them."""
        if not self._weights_are_out:
            for replica in self.copies:
                follow(replica.model, self.model, replica.device)
            self._weights_are_out = True
        for replica in self.copies:
            replica.check()

    def _run(self, replica: Replica, part: Any, is_grad: bool) -> Any:
        """Run in the replica's thread, with the device, grad mode and autocast of the caller."""
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
        """The weights of every replica, and gathered tensors on the first device."""
        rows, names = super().placement(updated=updated), self.step.names
        for each in self.copies:
            replica = each.number
            rows += placed_tensors(each.model, names, None, None, replica=replica, updated=updated)
        return rows + self._gathered_rows

    def close(self) -> None:
        """End the threads, and restore the task."""
        for replica in (self.first, *self.copies):
            replica.thread.shutdown()
        self._unchecked()
        super().close()


def in_threads(
    threads: Sequence[ThreadPoolExecutor], works: Sequence[Callable[[], Any]]
) -> list[Any]:
    """The results of all works; after all have ended, raises the first error."""
    futures = [thread.submit(work) for thread, work in zip(threads, works, strict=True)]
    wait(futures)
    return [future.result() for future in futures]


def _mark(step: SharedStep, position: int, weight: Tensor) -> None:
    step.mark(position)


def _add_gradients(step: SharedStep, replica: nn.Module) -> None:
    """Move the gradients of a replica to those on the first device."""
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
