"""Branches of one model on different ranks at the same time: towers, paths, heads.

    every rank     the forward of the whole model for the whole batch; all compute the same trunk
    a branch       runs on its home rank; its outputs are broadcast            `branching.run`
    backward       each rank runs that of its branches; gradients of their inputs are summed
    reduce         the tally; gradients of the trunk are the same on all ranks already

Weights of a branch, their gradients and optimizer states are on its home rank alone, with meta
tensors elsewhere, as in a pipeline; those of the trunk are on all ranks. If no branch needs the
output of another, a step takes the time of the trunk and of the slowest rank's branches.
Krizhevsky 2014, One weird trick for parallelizing convolutional neural networks, arXiv 1404.5997.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from allranks.errors import Explained, RequestError
from allranks.strategies.card import Workload
from allranks.strategies.mesh import BRANCH
from allranks.torch.branching.plan import Branch, BranchPlan, holds, plan_of
from allranks.torch.branching.run import BranchContext, BranchExchange, Calls, real, wait_before
from allranks.torch.data.batch import Batch
from allranks.torch.parallel.pipeline.staged import Staged
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.losses import forward
from allranks.torch.step.tally import Tally

ELSEWHERE = re.compile(r"\bmeta\b", re.IGNORECASE)


class Branches(Staged):
    """Runs the branches of this rank. Sends their outputs, gradients of their inputs, the tally."""

    equal_passes = True
    can_be_compiled = False
    takes_batch_loss = True

    def parallelize(self, model: nn.Module) -> nn.Module:
        self.line = self.axis(BRANCH)
        self._hooks: list[RemovableHandle] = []
        self._forwards: list[tuple[nn.Module, Any]] = []
        ranks, asked = self.line.size, f"--strategy {self.name} --ranks {self.comm.size}"
        self.check_task(asked)
        alone = BranchPlan((), (), ())
        self.plan = alone if ranks == 1 else plan_of(self.task, model, ranks, asked)
        holders = self.plan.holders(model, ranks)
        many = {n for n, ranks_of in holders.items() if len(ranks_of) > 1}
        shared = {
            branch.number: [
                p for n, p in model.named_parameters() if n in many and holds(branch.module, p)
            ]
            for branch in self.plan.branches
        }
        self.hold(model, holders, self.layout)
        self.exchange = BranchExchange(self.line)
        scope, exchange = self.context.scope, self.exchange
        self.calls = Calls(BranchContext(exchange, scope, shared, self._running, self._is_apart))
        for branch in self.plan.branches:
            self._intercept(branch)
        for module in self.plan.trunk:
            hook = module.register_forward_pre_hook(wait_before, with_kwargs=True)
            self._hooks.append(hook)
        return model

    def _intercept(self, branch: Branch) -> None:
        """Make a call of the branch wait for those of other branches."""
        module: Any = branch.module
        self._forwards.append((module, vars(module).get("forward")))
        forward = module.forward
        module.forward = lambda *args, **keywords: self.calls.call(branch, forward, args, keywords)

    def _is_apart(self) -> bool:
        return self.step.user_backward.is_on

    @contextmanager
    def _running(self) -> Iterator[None]:
        """The context of this rank's branches: counts the moments of their BatchNorm layers.

        Those of the trunk are the same on all ranks; the first rank counts them.
        """
        scope, counts = self.context.scope, self.step.parts.counts_samples
        if counts or not scope.pieces:
            yield
            return
        before, scope.moments = scope.moments, {}
        try:
            yield
            if not self.step.for_others.is_on:
                self._tally.add(self._tally.tensor.new_zeros(()), 0, 0, scope)
        finally:
            scope.moments = before

    def forward(self, data: Any) -> Any:
        return forward(self.task, self._whole, data)

    def _whole(self, *args: Any, **keywords: Any) -> Any:
        """The output of the model, after all called branches have run."""
        self.calls.begin()
        with Explained(ELSEWHERE, _on_another_rank):
            output = self.step.call(*args, **keywords)
            self.calls.close()
            return real(output)

    # --- a step ---------------------------------------------------------------------------

    def forward_backward(self, batch: Batch) -> Tally:
        self.steps += 1
        with self.exchange.opened("gradients"):
            tally = self._make_passes(batch)
        self.refuse_written_buffers(tuple(f"{branch.name}." for branch in self.plan.branches))
        return tally

    def recompute(self, batch: Batch) -> Tally:
        with self.exchange.opened("control"):
            return self._make_passes(batch)

    def _make_passes(self, batch: Batch) -> Tally:
        """Run every micro-batch through the whole model."""
        for parameter in self.local_params:
            parameter.grad = None
        tally = self._tally = self.step.layout.tally()
        self.step.accumulate(batch, tally)
        return tally

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        self.comm.all_reduce(local.tensor).wait()
        return local, self.gradients()

    def eval_step(self, data: Any, forward: Callable[[Callable[..., Any], Any], Any]) -> Any:
        """The output for data that all ranks have; every rank calls this."""
        return forward(self._whole, data)

    def workload(self) -> Workload:
        """Bytes of a step: outputs of branches, gradients of their inputs, the tally."""
        layout, exchange, steps = self.step.layout, self.exchange, max(1, self.steps)
        tally = layout.size * layout.like.element_size()
        nbytes = round(exchange.broadcast_bytes / steps), round(exchange.reduced_bytes / steps)
        return Workload((*nbytes, tally), self.comm.size, self.task.shards)

    def close(self) -> None:
        """Restore the user's model."""
        for hook in self._hooks:
            hook.remove()
        for module, before in self._forwards:
            vars(module).pop("forward", None)
            if before is not None:
                vars(module)["forward"] = before
        super().close()


def _on_another_rank(line: str) -> RequestError:
    return RequestError(
        asked="--strategy branches",
        found=f"weights of a branch of another rank: {line}",
        why="a branch must be called as a whole, and its weights used only there",
        do="call the module that branches(model) names, or name the parts that are called",
    )
