"""The inner optimizer of a learner on its way: from the learner into a checkpoint, and back.

    | bytes of the text: u64 | text: JSON | tensors, one behind the other |

A learner keeps what its optimizer was after each chunk that waits for a merge, and after the last
one that is in the weights. A checkpoint has the latter, so that a training that goes on from it
does each step once, with the optimizer that was there before. Nothing of it is a pickle.
"""

from __future__ import annotations

import json
import struct
from math import prod
from typing import Any

import torch
from torch import Tensor

from allranks.checkpoint.format import unflatten
from allranks.errors import RequestError
from allranks.launcher.messages.connection import Buffer
from allranks.torch.checkpoint.state import copied
from allranks.torch.checkpoint.tree import DTYPES, NAMES, flatten
from allranks.torch.strategies.base import Strategy

OPTIMIZER, REST = "optimizer", "rest"
_LENGTH = struct.Struct("!Q")


def largest(weight_bytes: int) -> int:
    """The most bytes of a message about weights of so many."""
    return 16 * weight_bytes + (1 << 20)


def inner_state(strategy: Strategy) -> Any:
    """A copy of what the optimizer keeps now."""
    return copied(strategy.state()[OPTIMIZER])


def load_inner_state(strategy: Strategy, state: Any) -> None:
    """Take up what `inner_state` returned; weights stay as they are."""
    strategy.load_state({**strategy.state(), OPTIMIZER: state})


def with_rest(state: Any, rest: Any) -> Any:
    """The state with what was found and not brought; without any it is the state itself."""
    return state if rest is None else {OPTIMIZER: state, REST: rest}


def owes(state: Any) -> bool:
    """Whether there is anything that was not brought."""
    return REST in state and any(state[REST]["shares"])


def without_rest(state: Any) -> Any:
    """The state alone."""
    return state[OPTIMIZER] if REST in state else state


def packed(state: Any, most_bytes: int) -> list[Buffer]:
    """A state as the pieces of a message; raises `RequestError` for one of too many bytes."""
    skeleton, tensors = flatten(state, OPTIMIZER)
    flat = {path: tensor.cpu().contiguous() for path, tensor in tensors.items()}
    rows = [[path, NAMES[one.dtype], list(one.shape)] for path, one in flat.items()]
    text = json.dumps({"state": skeleton, "tensors": rows}).encode()
    pieces: list[Buffer] = [_LENGTH.pack(len(text)), text, *map(_bytes, flat.values())]
    size = sum(map(len, pieces))
    if size > most_bytes:
        raise RequestError(
            asked="--strategy decoupled:inner=kept",
            found=f"an optimizer that keeps {size} bytes, {most_bytes} at most are sent",
            why="a checkpoint holds what the optimizer of each learner keeps",
            do="--strategy decoupled:inner=anew",
        )
    return pieces


def unpacked(body: memoryview) -> Any:
    """The state in the bytes of a message; raises `ValueError` or `KeyError` for what is none."""
    if len(body) < _LENGTH.size:
        raise ValueError("no state of an optimizer")
    at = _LENGTH.size + _LENGTH.unpack(body[: _LENGTH.size])[0]
    said = json.loads(bytes(body[_LENGTH.size : at]))
    tensors: dict[str, Tensor] = {}
    for path, name, shape in said["tensors"]:
        dtype = DTYPES[name]
        end = at + prod(shape) * dtype.itemsize
        if end > len(body):
            raise ValueError(f"the bytes of {path} are missing")
        raw = torch.tensor([], dtype=torch.uint8)
        if end > at:
            raw = torch.frombuffer(body[at:end], dtype=torch.uint8).clone()  # aligned
        tensors[path] = raw.view(dtype).view(shape)
        at = end
    return unflatten(said["state"], tensors)


def _bytes(tensor: Tensor) -> Buffer:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array) if tensor.numel() else b""
