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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.torch.checkpoint.tree import local
from allranks.torch.comm.comm import Comm
from allranks.torch.model.reals import real_type, reals
from allranks.torch.optimizers.elementwise import WeightParts, groups_of_whole
from allranks.torch.optimizers.made import OptimizerArguments
from allranks.torch.parallel.sharded.state import known_to_all
from allranks.torch.parallel.tensor.exchange import Along, part_sizes

ROWS = Along(0)


@dataclass(frozen=True)
class Divided:
    """A parameter with this full `shape`, of which ranks hold parts, cut as by torch.chunk."""

    parameter: nn.Parameter
    shape: torch.Size
    along: Along = ROWS

    def part(self, whole: Tensor, ranks: int, rank: int) -> Tensor:
        """The part of a `rank`: a view, in the order of the local parameter."""
        return self.along.local_view(whole, ranks, rank)

    def cut(self, ranks: int) -> WeightParts:
        """The parts for so many ranks."""
        return WeightParts(tuple(self.shape), partial(self.along.parts, ranks))

    def part_nbytes(self, ranks: int, rank: int) -> int:
        dim, runs = self.along
        rows = runs * part_sizes(self.shape[dim] // runs, ranks)[rank]
        of_a_row = self.shape.numel() // max(1, self.shape[dim])
        return rows * of_a_row * self.parameter.element_size()


class WholeUpdates:
    """The `divided` parameters that are each updated in full by one rank of `comm`.

    `here` maps the name of each to whether this rank updates it. All ranks of `comm` construct
    this, and call every method that communicates.
    """

    def __init__(
        self, comm: Comm, optimizer: Optimizer, divided: Mapping[str, Divided], request: str
    ) -> None:
        self.comm, self.optimizer, self.divided, self.request = comm, optimizer, divided, request
        self.owners = _owners(divided, optimizer, comm.size)
        self.here: dict[str, bool] = {}
        self._arguments: OptimizerArguments | None = None

    def find(self) -> dict[str, bool]:
        """Find the parameters that the optimizer needs in full (`here`); again for new groups.

        A parameter that was updated in full stays so: that is right for any optimizer.
        """
        if self._arguments is None:
            self._arguments = OptimizerArguments(self.optimizer)
        self._arguments.is_new()
        ranks, divided = self.comm.size, self.divided.values()
        cuts = {id(weight.parameter): weight.cut(ranks) for weight in divided}
        groups = groups_of_whole(self.optimizer, self.request, cuts)
        needed = {id(p) for n in groups for p in self.optimizer.param_groups[n]["params"]}
        known = dict(self.here)
        self.here.clear()
        for name, weight in self.divided.items():
            if name in known or id(weight.parameter) in needed:
                self.here[name] = self.owners[name] == self.comm.rank
                if name not in known and self.optimizer.state.get(weight.parameter):
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
        used = [name for name in self.here if self.divided[name].parameter.grad is not None]
        if not used:
            yield
            return
        whole = self._gather(used)
        gradients = {name: self.divided[name].parameter.grad for name in used}
        for name in used:
            self.divided[name].parameter.grad = None
        self._put({self.divided[n].parameter: stand_in for n, stand_in in whole.items()})
        try:
            yield
        finally:
            self._put({stand_in: self.divided[n].parameter for n, stand_in in whole.items()})
            for name in used:
                self.divided[name].parameter.grad = gradients[name]
        self._scatter(used, whole)

    @torch.no_grad()
    def _gather(self, used: list[str]) -> dict[str, nn.Parameter]:
        """The full parameters that this rank owns, with full gradients."""
        outgoing: list[list[Tensor]] = [[] for _ in range(self.comm.size)]
        incoming: list[list[Tensor]] = [[] for _ in range(self.comm.size)]
        whole: dict[str, nn.Parameter] = {}
        for name in used:
            w = self.divided[name]
            part, gradient = local(w.parameter.detach()), w.parameter.grad
            assert gradient is not None, "gathered() asks for those that have one"
            outgoing[self.owners[name]] += [part, local(gradient)]
            if self.here[name]:
                whole[name] = nn.Parameter(part.new_empty(w.shape))
                whole[name].grad = part.new_empty(w.shape)
                attributes = {n: v for n, v in vars(w.parameter).items() if not n.startswith("_")}
                vars(whole[name]).update(attributes)  # attributes that a task has set on it
                for rank, row in enumerate(incoming):
                    pair = whole[name].detach(), whole[name].grad
                    row += [w.part(t, self.comm.size, rank) for t in pair if t is not None]
        self._exchange(outgoing, incoming)
        return whole

    @torch.no_grad()
    def _scatter(self, used: list[str], whole: dict[str, nn.Parameter]) -> None:
        outgoing: list[list[Tensor]] = [[] for _ in range(self.comm.size)]
        incoming: list[list[Tensor]] = [[] for _ in range(self.comm.size)]
        for name in used:
            weight = self.divided[name]
            incoming[self.owners[name]].append(local(weight.parameter.detach()))
            if self.here[name]:
                for rank, row in enumerate(outgoing):
                    row.append(weight.part(whole[name].detach(), self.comm.size, rank))
        self._exchange(outgoing, incoming)

    def _exchange(self, outgoing: Sequence[list[Tensor]], incoming: Sequence[list[Tensor]]) -> None:
        """Send `outgoing[r]` to each rank r, and receive into `incoming[r]`."""
        kinds = {self.divided[name].parameter.dtype for name in self.here}
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

    def complete_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """A training state with meta tensors for optimizer state that other ranks own.

        Every rank calls this; sends names and shapes.
        """
        if not self.here:
            return state
        optimizer = state["optimizer"]
        local_names = [name for name, is_here in self.here.items() if is_here]
        known = known_to_all(optimizer["state"], local_names, self.comm)
        order = [name for group in optimizer["param_groups"] for name in group["params"]]
        ordered = {name: known[name] for name in order if name in known}
        return {**state, "optimizer": {**optimizer, "state": ordered}}

    def most_sent(self) -> int:
        """The bytes that the busiest rank sends for one update of all trained parameters."""
        ranks, sent_bytes = self.comm.size, [0] * self.comm.size
        for name in self.here:
            weight, owner = self.divided[name], self.owners[name]
            if weight.parameter.requires_grad:
                for rank in range(ranks):
                    part = weight.part_nbytes(ranks, rank)
                    if rank != owner:
                        sent_bytes[rank] += 2 * part
                        sent_bytes[owner] += part
        return max(sent_bytes)


def _owners(divided: Mapping[str, Divided], optimizer: Optimizer, ranks: int) -> dict[str, int]:
    """Assign each parameter to the rank with the fewest numbers; frozen parameters come last.

    The same on every rank, and in every job with the same model and optimizer.
    """
    trained = {id(p) for g in optimizer.param_groups for p in g["params"] if p.requires_grad}
    loads, owners = [0] * ranks, {}

    def turn(name: str) -> tuple[bool, int]:
        weight = divided[name]
        return id(weight.parameter) not in trained, -weight.shape.numel()

    for name in sorted(divided, key=turn):
        owners[name] = min(range(ranks), key=lambda rank: loads[rank])
        loads[owners[name]] += divided[name].shape.numel()
    return owners


def _kept_already(asked: str, optimizer: Optimizer, name: str) -> RequestError:
    return RequestError(
        asked=f"{asked} with {type(optimizer).__name__}",
        found=f"what it keeps for {name!r} before its first step with these hyper-parameters",
        why="it was made for a part of the parameter, and one rank updates it whole",
        do="--strategy ddp, or an optimizer that makes its state in its first step, with the "
        "hyper-parameters that it will have",
    )
