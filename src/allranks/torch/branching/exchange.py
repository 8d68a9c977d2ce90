"""What the ranks of a line exchange for branches: what these return, and gradients of inputs."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from allranks.errors import RequestError
from allranks.torch.branching.plan import Branch
from allranks.torch.comm.comm import Comm
from allranks.torch.parallel.pipeline.tensor_meta import Looks, flat


class Exchange:
    """The ranks that run branches. `sent` and `reduced` count the bytes of whole tensors that steps
    have broadcast and all-reduced; `known` is what branches return, by what they are given.
    """

    def __init__(self, line: Comm) -> None:
        self.line = line
        self.kind, self.sent, self.reduced = "control", 0, 0
        self.known: dict[Hashable, Looks] = {}

    @contextmanager
    def opened(self, kind: str) -> Iterator[None]:
        """Within, passes go through the model; what they send is of that kind."""
        self.kind = kind
        try:
            yield
        finally:
            self.kind = "control"

    def agree(self, keys: Sequence[tuple[Branch, Hashable]], own: dict[int, Looks]) -> list[Looks]:
        """What each call returns; `own` are those of this rank, by number.

        Sends what was not known yet (`control`).
        """
        for number, looks in own.items():
            branch, key = keys[number]
            known = self.known.get(key)
            if known is not None and known != looks:
                raise _changed(branch, known, looks)
        if any(key not in self.known for _, key in keys):
            mine = json.dumps({number: looks.text for number, looks in own.items()})
            for text in self.line.gather_texts(mine):
                for number, told in json.loads(text).items():
                    self.known[keys[int(number)][1]] = Looks(told)
        return [self.known[key] for _, key in keys]

    def spread(self, tensor: Tensor, home: int) -> None:
        """The tensor of rank `home` on all."""
        if self.kind == "gradients":
            self.sent += tensor.nbytes
        if tensor.numel():
            self.line.broadcast(flat(tensor), source=home, kind=self.kind)

    def sum_(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place."""
        if self.kind == "gradients":
            self.reduced += tensor.nbytes
        self.line.all_reduce(tensor, self.kind).wait()


def _changed(branch: Branch, known: Looks, looks: Looks) -> RequestError:
    return RequestError(
        asked="--strategy branches",
        found=f"{branch.name!r} returned {looks.text} for inputs of the shapes for which it had "
        f"returned {known.text}"[:300],
        why="the other ranks have made room for what came the first time",
        do="let the shapes that a branch returns follow from the shapes of its inputs",
    )
