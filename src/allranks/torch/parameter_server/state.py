"""What an optimizer keeps for its parameters: cut for the servers, and put together again.

The scheduler has the whole of it, as a checkpoint needs it; a server keeps it for its pieces. What
is as long as a piece is cut with it; anything else, such as a count of steps, is the same for all.
In a message the header says what there is, and the body has the tensors, each at a multiple of 64:

    [{"exp_avg": {"type": "float32", "shape": [5, 4]}, "step": {"value": 3}}, …]    piece by piece
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.launcher.messages.connection import Buffer
from allranks.torch.parameter_server.flat import ALIGNED, WeightPiece, cut

Kept = dict[str, Any]
Spec = list[dict[str, dict[str, Any]]]
TYPES = {
    str(t).removeprefix("torch."): t
    for t in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
PLAIN = (bool, int, float, str, type(None))


def cut_state(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], pieces: Sequence[WeightPiece]
) -> list[Kept]:
    """What the optimizer of whole `parameters` keeps, for each of the pieces."""
    return [
        _cut_one(optimizer.state.get(parameters[p.position], {}), p, parameters) for p in pieces
    ]


def _cut_one(
    kept: Mapping[str, Any], piece: WeightPiece, parameters: Sequence[nn.Parameter]
) -> Kept:
    whole = parameters[piece.position].numel()

    def of_piece(value: Any) -> Any:
        if isinstance(value, Tensor) and not piece.is_whole and value.numel() == whole:
            return cut(value, piece)
        return value

    return {name: of_piece(value) for name, value in kept.items()}


@torch.no_grad()
def join_state(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    pieces: Sequence[WeightPiece],
    found: Sequence[Kept],
) -> None:
    """Let the optimizer of whole parameters keep what was found of these pieces of them."""
    for piece, kept in zip(pieces, found, strict=True):
        parameter = parameters[piece.position]
        own = optimizer.state[parameter]
        for name, value in kept.items():
            is_part = isinstance(value, Tensor) and value.numel() == piece.numbers
            if piece.is_whole or not is_part or value.numel() == parameter.numel():
                own[name] = value
                continue
            there = own.get(name)
            if not isinstance(there, Tensor) or there.numel() != parameter.numel():
                there = own[name] = value.new_empty(parameter.shape)
            cut(there, piece).copy_(value)


def packed(kept: Sequence[Kept]) -> tuple[Spec, list[Buffer]]:
    """A header for what is kept, and the body."""
    spec, body = list[dict[str, dict[str, Any]]](), list[Buffer]()
    for one in kept:
        said: dict[str, dict[str, Any]] = {}
        for name, value in one.items():
            if isinstance(value, Tensor):
                held = value.detach().contiguous()
                kind = str(held.dtype).removeprefix("torch.")
                if kind not in TYPES:
                    raise _not_carried(name, f"a tensor of {kind}")
                said[name] = {"type": kind, "shape": list(held.shape)}
                array: Any = held.reshape(-1).view(torch.uint8).numpy()
                body += [memoryview(array), bytes(-array.nbytes % ALIGNED)]
            elif isinstance(value, PLAIN):
                said[name] = {"value": value}
            else:
                raise _not_carried(name, f"a {type(value).__name__}")
        spec.append(said)
    return spec, body


def unpacked(spec: Spec, body: memoryview) -> list[Kept]:
    """What was packed, in memory of its own."""
    raw = torch.frombuffer(body, dtype=torch.uint8).clone() if len(body) else torch.empty(0)
    at, found = 0, []
    for said in spec:
        kept: Kept = {}
        for name, one in said.items():
            if "value" in one:
                kept[name] = one["value"]
                continue
            kind, shape = TYPES[one["type"]], tuple(int(n) for n in one["shape"])
            size = kind.itemsize * torch.Size(shape).numel()
            kept[name] = raw[at : at + size].view(kind).view(shape)
            at += size + -size % ALIGNED
        found.append(kept)
    return found


def hyper_parameters_said(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What the groups of an optimizer say, as far as a message can: numbers, texts, lists of them.

    What cannot be said stays on the servers as the task makes it.
    """

    def said(value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return all(map(said, value))
        return isinstance(value, PLAIN)

    def plain(value: Any) -> Any:
        return float(value) if isinstance(value, Tensor) and value.numel() == 1 else value

    groups = [{n: plain(v) for n, v in g.items()} for g in optimizer.param_groups]
    return [{n: v for n, v in g.items() if n != "params" and said(v)} for g in groups]


def _not_carried(name: str, what: str) -> RequestError:
    return RequestError(
        asked="--strategy ps with the optimizer of the task",
        found=f"{what} in what it keeps as {name!r}",
        why="servers and the scheduler exchange tensors and plain numbers",
        do="another optimizer, or --strategy ddp",
    )
