"""The optimizer state: cut into pieces for the servers, and joined again.

The scheduler has the whole state for checkpoints; a server has that of its pieces. A tensor with as
many numbers as its parameter is cut with it; anything else, such as a step count, is copied. The
header of a message describes the state; the body has the tensors, each at a multiple of 64:

    [{"exp_avg": {"type": "F32", "shape": [5, 4]}, "step": {"value": 3}}, …]    piece by piece
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.launcher.messages import Buffer
from allranks.torch.checkpoint.state import DTYPES, NAMES
from allranks.torch.parameter_server.flat import ALIGNED, WeightPiece, cut

PieceState = dict[str, Any]
Spec = list[dict[str, dict[str, Any]]]
PLAIN = (bool, int, float, str, type(None))


def cut_state(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], pieces: Sequence[WeightPiece]
) -> list[PieceState]:
    """The state of an optimizer of whole `parameters`, cut for each of the pieces."""
    return [
        _cut_one(optimizer.state.get(parameters[p.position], {}), p, parameters) for p in pieces
    ]


def _cut_one(
    state: Mapping[str, Any], piece: WeightPiece, parameters: Sequence[nn.Parameter]
) -> PieceState:
    whole = parameters[piece.position].numel()

    def of_piece(value: Any) -> Any:
        if isinstance(value, Tensor) and not piece.is_whole and value.numel() == whole:
            return cut(value, piece)
        return value

    return {name: of_piece(value) for name, value in state.items()}


@torch.no_grad()
def join_state(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    pieces: Sequence[WeightPiece],
    states: Sequence[PieceState],
) -> None:
    """Copy the `states` of these pieces into the state of an optimizer of whole parameters."""
    for piece, state in zip(pieces, states, strict=True):
        parameter = parameters[piece.position]
        whole_state = optimizer.state[parameter]
        for name, value in state.items():
            is_part = isinstance(value, Tensor) and value.numel() == piece.numbers
            if piece.is_whole or not is_part or value.numel() == parameter.numel():
                whole_state[name] = value
                continue
            there = whole_state.get(name)
            if not isinstance(there, Tensor) or there.numel() != parameter.numel():
                there = whole_state[name] = value.new_empty(parameter.shape)
            cut(there, piece).copy_(value)


def packed(states: Sequence[PieceState]) -> tuple[Spec, list[Buffer]]:
    """The header and the body of a message with these states."""
    spec, body = list[dict[str, dict[str, Any]]](), list[Buffer]()
    for state in states:
        fields: dict[str, dict[str, Any]] = {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensor = value.detach().contiguous()
                if tensor.dtype not in NAMES:
                    raise _not_carried(
                        name, f"a tensor of {str(tensor.dtype).removeprefix('torch.')}"
                    )
                fields[name] = {"type": NAMES[tensor.dtype], "shape": list(tensor.shape)}
                array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
                body += [memoryview(array), bytes(-array.nbytes % ALIGNED)]
            elif isinstance(value, PLAIN):
                fields[name] = {"value": value}
            else:
                raise _not_carried(name, f"a {type(value).__name__}")
        spec.append(fields)
    return spec, body


def unpacked(spec: Spec, body: memoryview) -> list[PieceState]:
    """The states in a message, in new memory."""
    raw = torch.frombuffer(body, dtype=torch.uint8).clone() if len(body) else torch.empty(0)
    at, states = 0, []
    for fields in spec:
        state: PieceState = {}
        for name, field in fields.items():
            if "value" in field:
                state[name] = field["value"]
                continue
            kind, shape = DTYPES[field["type"]], tuple(int(n) for n in field["shape"])
            size = kind.itemsize * torch.Size(shape).numel()
            state[name] = raw[at : at + size].view(kind).view(shape)
            at += size + -size % ALIGNED
        states.append(state)
    return states


def plain_hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The hyperparameters of each group which a message can carry: numbers, strings, lists.

    Others stay on the servers as the task created them.
    """

    def is_plain(value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return all(map(is_plain, value))
        return isinstance(value, PLAIN)

    def plain(value: Any) -> Any:
        return float(value) if isinstance(value, Tensor) and value.numel() == 1 else value

    groups = [{n: plain(v) for n, v in g.items()} for g in optimizer.param_groups]
    return [{n: v for n, v in g.items() if n != "params" and is_plain(v)} for g in groups]


def _not_carried(name: str, kind: str) -> RequestError:
    return RequestError(
        asked="--strategy ps with the optimizer of the task",
        found=f"{kind} in what it keeps as {name!r}",
        why="servers and the scheduler exchange tensors and plain numbers",
        do="another optimizer, or --strategy ddp",
    )
