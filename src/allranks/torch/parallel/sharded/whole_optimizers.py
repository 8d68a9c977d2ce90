"""Updates that need a parameter whole (LARS, LAMB, Muon, Adafactor), where ranks hold parts of it.

    gather     every rank sends its part of weight and gradient to the owner of the parameter
    update     the owner's optimizer has both whole; those of the other ranks find no gradient
    scatter    the owner sends each rank its part of the new weight

Each way is one all-to-all. Owners are set once, the largest parameter first, each to the rank with
the fewest numbers; with what the optimizer keeps for it, which lies whole on the owner, so that an
update costs a rank about 1/N of what it costs one process, in memory and arithmetic. Liu et al.
2025, Muon is Scalable for LLM Training, arXiv 2502.16982, gathers to update, too.
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
    """A parameter of this whole `shape`, of which ranks hold parts, as torch.chunk cuts."""

    parameter: nn.Parameter
    shape: torch.Size
    along: Along = ROWS

    def part(self, whole: Tensor, ranks: int, rank: int) -> Tensor:
        """The part of a `rank`: a view, in the order of what the rank holds."""
        return self.along.own(whole, ranks, rank)

    def cut(self, ranks: int) -> WeightParts:
        """How so many ranks hold it."""
        return WeightParts(tuple(self.shape), partial(self.along.parts, ranks))

    def part_nbytes(self, ranks: int, rank: int) -> int:
        dim, runs = self.along
        rows = runs * part_sizes(self.shape[dim] // runs, ranks)[rank]
        of_a_row = self.shape.numel() // max(1, self.shape[dim])
        return rows * of_a_row * self.parameter.element_size()


class WholeUpdates:
    """The parameters that one rank each of `comm` updates whole, of those that are `divided`.

    `here` says of each by its name whether this rank does. Ranks of `comm` make it, and call all
    that communicates, together.
    """

    def __init__(
        self, comm: Comm, optimizer: Optimizer, divided: Mapping[str, Divided], asked: str
    ) -> None:
        self.comm, self.optimizer, self.divided, self.asked = comm, optimizer, divided, asked
        self.owners = _owners(divided, optimizer, comm.size)
        self.here: dict[str, bool] = {}
        self._asked: OptimizerArguments | None = None

    def find(self) -> dict[str, bool]:
        """Ask the optimizer which parameters it needs whole: `here`; again when groups are new.

        What was whole once stays so: that is right for any optimizer.
        """
        if self._asked is None:
            self._asked = OptimizerArguments(self.optimizer)
        self._asked.is_new()
        ranks, divided = self.comm.size, self.divided.values()
        cuts = {id(one.parameter): one.cut(ranks) for one in divided}
        groups = groups_of_whole(self.optimizer, self.asked, cuts)
        needed = {id(p) for n in groups for p in self.optimizer.param_groups[n]["params"]}
        known = dict(self.here)
        self.here.clear()
        for name, one in self.divided.items():
            if name in known or id(one.parameter) in needed:
                self.here[name] = self.owners[name] == self.comm.rank
                if name not in known and self.optimizer.state.get(one.parameter):
                    raise _kept_already(self.asked, self.optimizer, name)
        return self.here

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within, the optimizer has whole what this rank updates so, and its gradients alone.

        Every rank enters this with the same parameters having a gradient. Sends parts to owners,
        and parts of new weights back. An optimizer with other hyper-parameters is asked again.
        """
        if self._asked is not None and self._asked.is_new():
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
        """The parameters of this rank, whole, with their whole gradients."""
        given: list[list[Tensor]] = [[] for _ in range(self.comm.size)]
        taken: list[list[Tensor]] = [[] for _ in range(self.comm.size)]
        whole: dict[str, nn.Parameter] = {}
        for name in used:
            one = self.divided[name]
            held, gradient = local(one.parameter.detach()), one.parameter.grad
            assert gradient is not None, "gathered() asks for those that have one"
            given[self.owners[name]] += [held, local(gradient)]
            if self.here[name]:
                whole[name] = nn.Parameter(held.new_empty(one.shape))
                whole[name].grad = held.new_empty(one.shape)
                told = {n: v for n, v in vars(one.parameter).items() if not n.startswith("_")}
                vars(whole[name]).update(told)  # what a task has noted on it
                for rank, row in enumerate(taken):
                    pair = whole[name].detach(), whole[name].grad
                    row += [one.part(t, self.comm.size, rank) for t in pair if t is not None]
        self._exchange(given, taken)
        return whole

    @torch.no_grad()
    def _scatter(self, used: list[str], whole: dict[str, nn.Parameter]) -> None:
        given: list[list[Tensor]] = [[] for _ in range(self.comm.size)]
        taken: list[list[Tensor]] = [[] for _ in range(self.comm.size)]
        for name in used:
            one = self.divided[name]
            taken[self.owners[name]].append(local(one.parameter.detach()))
            if self.here[name]:
                for rank, row in enumerate(given):
                    row.append(one.part(whole[name].detach(), self.comm.size, rank))
        self._exchange(given, taken)

    def _exchange(self, given: Sequence[list[Tensor]], taken: Sequence[list[Tensor]]) -> None:
        """Send to each rank what is `given` it, and write what each has sent into the `taken`."""
        kinds = {self.divided[name].parameter.dtype for name in self.here}
        for dtype in sorted(kinds, key=str):
            sent = [[reals(t) for t in row if t.dtype == dtype] for row in given]
            wanted = [[reals(t) for t in row if t.dtype == dtype] for row in taken]
            give_sizes = [sum(t.numel() for t in row) for row in sent]
            take_sizes = [sum(t.numel() for t in row) for row in wanted]
            nothing = torch.empty(0, dtype=real_type(dtype), device=self.comm.device)
            flat = torch.cat([nothing, *(t.reshape(-1) for row in sent for t in row)])
            received = flat.new_empty(sum(take_sizes))
            self.comm.all_to_all(received, flat, take_sizes, give_sizes).wait()
            tensors = [tensor for row in wanted for tensor in row]
            pieces = received.split([tensor.numel() for tensor in tensors])
            for tensor, piece in zip(tensors, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))

    def _put(self, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Let the optimizer have the values for the keys, and what it keeps for these as theirs."""
        by_id = {id(parameter): other for parameter, other in others.items()}
        for group in self.optimizer.param_groups:
            group["params"][:] = [by_id.get(id(p), p) for p in group["params"]]
        for parameter, other in others.items():
            if parameter in self.optimizer.state:
                self.optimizer.state[other] = self.optimizer.state.pop(parameter)

    def told(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state of a training with meta tensors for what others keep whole.

        Every rank calls this; sends their names and shapes.
        """
        if not self.here:
            return state
        optimizer = state["optimizer"]
        own = [name for name, is_here in self.here.items() if is_here]
        kept = known_to_all(optimizer["state"], own, self.comm)
        order = [name for group in optimizer["param_groups"] for name in group["params"]]
        ordered = {name: kept[name] for name in order if name in kept}
        return {**state, "optimizer": {**optimizer, "state": ordered}}

    def most_sent(self) -> int:
        """The bytes that the busiest rank sends for one update of all that is trained."""
        ranks, sent = self.comm.size, [0] * self.comm.size
        for name in self.here:
            one, owner = self.divided[name], self.owners[name]
            if one.parameter.requires_grad:
                for rank in range(ranks):
                    part = one.part_nbytes(ranks, rank)
                    if rank != owner:
                        sent[rank] += 2 * part
                        sent[owner] += part
        return max(sent)


def _owners(divided: Mapping[str, Divided], optimizer: Optimizer, ranks: int) -> dict[str, int]:
    """Each parameter to the rank with the fewest numbers to update; what is not trained comes last.

    The same on every rank, and in every job that makes the same model and optimizer.
    """
    trained = {id(p) for g in optimizer.param_groups for p in g["params"] if p.requires_grad}
    loads, found = [0] * ranks, {}

    def turn(name: str) -> tuple[bool, int]:
        one = divided[name]
        return id(one.parameter) not in trained, -one.shape.numel()

    for name in sorted(divided, key=turn):
        found[name] = min(range(ranks), key=lambda rank: loads[rank])
        loads[found[name]] += divided[name].shape.numel()
    return found


def _kept_already(asked: str, optimizer: Optimizer, name: str) -> RequestError:
    return RequestError(
        asked=f"{asked} with {type(optimizer).__name__}",
        found=f"what it keeps for {name!r} before its first step with these hyper-parameters",
        why="it was made for a part of the parameter, and one rank updates it whole",
        do="--strategy ddp, or an optimizer that makes its state in its first step, with the "
        "hyper-parameters that it will have",
    )
