"""Optimizers that need full parameters (LARS, LAMB, Muon, Adafactor), on ranks that hold shards.

    gather     every rank sends its shard of weight and gradient to the owner of the parameter
    update     the owner's optimizer has both in full; other ranks' optimizers see no gradient
    scatter    the owner sends each rank its shard of the new weight

Gather and scatter are one all-to-all each. Owners are assigned once: the largest parameter first,
each to the rank with the fewest numbers. The owner also holds the full optimizer state, so an
update costs a rank about 1/N of what it costs one process, in memory and arithmetic. Liu et al.
2025, Muon is Scalable for LLM Training, arXiv 2502.16982, also gathers to update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.torch.checkpoint.state import local
from allranks.torch.comm.comm import Comm
from allranks.torch.model.reals import real_type, reals
from allranks.torch.optimizers.elementwise import groups_of_whole
from allranks.torch.optimizers.made import OptimizerArguments
from allranks.torch.strategies.layout import Cut


class WholeUpdates:
    """Those of the `named` parameters that are each updated in full by one rank of `comm`.

    The ranks hold them in parts, by `cuts`.

    `here` maps the name of each to whether this rank updates it. All ranks of `comm` construct
    this, and call every method that communicates.
    """

    def __init__(
        self,
        comm: Comm,
        optimizer: Optimizer,
        named: Mapping[str, nn.Parameter],
        cuts: Mapping[str, Cut],
        request: str,
    ) -> None:
        self.comm, self.optimizer, self.cuts, self.request = comm, optimizer, cuts, request
        self.named = {name: named[name] for name in cuts}
        self.owners = _owners(self.named, cuts, optimizer, comm.size)
        self.here: dict[str, bool] = {}
        self._arguments: OptimizerArguments | None = None

    def find(self) -> dict[str, bool]:
        """Find the parameters that the optimizer needs in full (`here`); again for new groups.

        A parameter that was updated in full stays so: that is right for any optimizer.
        """
        if self._arguments is None:
            self._arguments = OptimizerArguments(self.optimizer)
        self._arguments.is_new()
        ranks, named = self.comm.size, self.named.items()
        cuts = {id(parameter): self.cuts[name].parts(ranks) for name, parameter in named}
        groups = groups_of_whole(self.optimizer, self.request, cuts)
        needed = {id(p) for n in groups for p in self.optimizer.param_groups[n]["params"]}
        known = dict(self.here)
        self.here.clear()
        for name, parameter in self.named.items():
            if name in known or id(parameter) in needed:
                self.here[name] = self.owners[name] == self.comm.rank
                if name not in known and self.optimizer.state.get(parameter):
                    raise _kept_already(self.request, self.optimizer, name)
        return self.here

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within, the optimizer has the full parameters that this rank owns, with gradients.

        Every rank enters this with gradients for the same parameters. Sends shards to owners, and
        shards of new weights back. Calls `find` again if hyper-parameters have changed.
        """
        if self._arguments is not None and self._arguments.is_new():
            self.find()
        used = [name for name in self.here if self.named[name].grad is not None]
        if not used:
            yield
            return
        whole = self._gather(used)
        gradients = {name: self.named[name].grad for name in used}
        for name in used:
            self.named[name].grad = None
        self._put({self.named[n]: stand_in for n, stand_in in whole.items()})
        try:
            yield
        finally:
            self._put({stand_in: self.named[n] for n, stand_in in whole.items()})
            for name in used:
                self.named[name].grad = gradients[name]
        self._scatter(used, whole)

    @torch.no_grad()
    def _gather(self, used: list[str]) -> dict[str, nn.Parameter]:
        """The full parameters that this rank owns, with full gradients."""
        outgoing: list[list[Tensor]] = [[] for _ in range(self.comm.size)]
        incoming: list[list[Tensor]] = [[] for _ in range(self.comm.size)]
        whole: dict[str, nn.Parameter] = {}
        for name in used:
            parameter, shape = self.named[name], self.cuts[name].shape
            part, gradient = local(parameter.detach()), parameter.grad
            assert gradient is not None, "gathered() asks for those that have one"
            outgoing[self.owners[name]] += [part, local(gradient)]
            if self.here[name]:
                whole[name] = nn.Parameter(part.new_empty(shape))
                whole[name].grad = part.new_empty(shape)
                attributes = {n: v for n, v in vars(parameter).items() if not n.startswith("_")}
                vars(whole[name]).update(attributes)  # attributes that a task has set on it
                for rank, row in enumerate(incoming):
                    pair = whole[name].detach(), whole[name].grad
                    row += [self._part(name, t, rank) for t in pair if t is not None]
        self._exchange(outgoing, incoming)
        return whole

    @torch.no_grad()
    def _scatter(self, used: list[str], whole: dict[str, nn.Parameter]) -> None:
        outgoing: list[list[Tensor]] = [[] for _ in range(self.comm.size)]
        incoming: list[list[Tensor]] = [[] for _ in range(self.comm.size)]
        for name in used:
            incoming[self.owners[name]].append(local(self.named[name].detach()))
            if self.here[name]:
                for rank, row in enumerate(outgoing):
                    row.append(self._part(name, whole[name].detach(), rank))
        self._exchange(outgoing, incoming)

    def _part(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """The part of a `rank`: a view, in the order of its local parameter."""
        return self.cuts[name].along.local_view(whole, self.comm.size, rank)

    def _exchange(self, outgoing: Sequence[list[Tensor]], incoming: Sequence[list[Tensor]]) -> None:
        """Send `outgoing[r]` to each rank r, and receive into `incoming[r]`."""
        kinds = {self.named[name].dtype for name in self.here}
        for dtype in sorted(kinds, key=str):
            parts = [[reals(t) for t in row if t.dtype == dtype] for row in outgoing]
            wanted = [[reals(t) for t in row if t.dtype == dtype] for row in incoming]
            give_sizes = [sum(t.numel() for t in row) for row in parts]
            take_sizes = [sum(t.numel() for t in row) for row in wanted]
            nothing = torch.empty(0, dtype=real_type(dtype), device=self.comm.device)
            flat = torch.cat([nothing, *(t.reshape(-1) for row in parts for t in row)])
            received = flat.new_empty(sum(take_sizes))
            self.comm.all_to_all(received, flat, take_sizes, give_sizes).wait()
            tensors = [tensor for row in wanted for tensor in row]
            pieces = received.split([tensor.numel() for tensor in tensors])
            for tensor, piece in zip(tensors, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))

    def _put(self, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Replace parameters of the optimizer, keys by values, and move their state."""
        by_id = {id(parameter): other for parameter, other in others.items()}
        for group in self.optimizer.param_groups:
            group["params"][:] = [by_id.get(id(p), p) for p in group["params"]]
        for parameter, other in others.items():
            if parameter in self.optimizer.state:
                self.optimizer.state[other] = self.optimizer.state.pop(parameter)

    def most_sent(self) -> int:
        """The bytes that the busiest rank sends for one update of all trained parameters."""
        ranks, sent_bytes = self.comm.size, [0] * self.comm.size
        for name in self.here:
            parameter, owner = self.named[name], self.owners[name]
            if parameter.requires_grad:
                for rank in range(ranks):
                    numel = self.cuts[name].part_numel(ranks, rank)
                    part = numel * parameter.element_size()
                    if rank != owner:
                        sent_bytes[rank] += 2 * part
                        sent_bytes[owner] += part
        return max(sent_bytes)


def _owners(
    named: Mapping[str, nn.Parameter], cuts: Mapping[str, Cut], optimizer: Optimizer, ranks: int
) -> dict[str, int]:
    """Assign each parameter to the rank with the fewest numbers; frozen parameters come last.

    The same on every rank, and in every job with the same model and optimizer.
    """
    trained = {id(p) for g in optimizer.param_groups for p in g["params"] if p.requires_grad}
    loads, owners = [0] * ranks, {}

    def turn(name: str) -> tuple[bool, int]:
        return id(named[name]) not in trained, -cuts[name].shape.numel()

    for name in sorted(named, key=turn):
        owners[name] = min(range(ranks), key=lambda rank: loads[rank])
        loads[owners[name]] += cuts[name].shape.numel()
    return owners


def _kept_already(asked: str, optimizer: Optimizer, name: str) -> RequestError:
    return RequestError(
        asked=f"{asked} with {type(optimizer).__name__}",
        found=f"what it keeps for {name!r} before its first step with these hyper-parameters",
        why="it was made for a part of the parameter, and one rank updates it whole",
        do="--strategy ddp, or an optimizer that makes its state in its first step, with the "
        "hyper-parameters that it will have",
    )
