"""The weights of a model as one safetensors file, written tensor by tensor.

A weight that the model has under two names (tied) stands there under both, and what is not part of
the model's state dict is left out: `model.load_state_dict(load_file(PATH), strict=True)` takes it.
Each tensor is brought to the host, written, and let go of, so no second copy of the model is held;
and since each is written by itself, tensors may share memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn

from allranks.checkpoint.export import digest_of_weights
from allranks.checkpoint.format import (
    COMPLEX,
    PAIR,
    FileTensor,
    as_written,
    lay_out,
)
from allranks.errors import RequestError
from allranks.torch.checkpoint.state import NAMES, saved_names
from allranks.training.record.logs import write_where_room_is


class WeightsFile:
    """Where the weights of `model` go; `write` is called by the rank that writes it.

    `full_like(name, parameter)` has the full shape, if the model holds a part.
    """

    def __init__(
        self, model: nn.Module, full_like: Callable[[str, Tensor], Tensor] = lambda name, part: part
    ) -> None:
        parameters = {name: full_like(name, p.detach()) for name, p in model.named_parameters()}
        named = {**parameters, **dict(model.named_buffers())}
        self.names = saved_names(model)
        tensors = {name: named[first] for first, names in self.names.items() for name in names}
        pairs = sorted(name for name, tensor in tensors.items() if NAMES.get(tensor.dtype) in PAIR)
        self.layout = lay_out(
            {name: _piece(name, tensor) for name, tensor in tensors.items()},
            {COMPLEX: json.dumps(pairs)} if pairs else None,
        )
        self.size_bytes = len(self.layout.header) + self.layout.data_bytes

    def write(self, paths: Iterable[Path], tensors: Iterator[tuple[str, Tensor]]) -> Path:
        """Write the tensors as they come, to the first path with room for all of them; returns it.

        The room is taken before the first tensor is asked for, since they come only once. Raises
        the `OSError` of the first path if none has room.
        """
        start = len(self.layout.header)

        def write(file: BinaryIO) -> None:
            file.write(self.layout.header)
            for name_here, tensor in tensors:
                for name in self.names[name_here]:
                    file.seek(start + self.layout.pieces[name].begin)
                    file.write(_content(tensor))

        return write_where_room_is(paths, self.size_bytes, write)


def _piece(name: str, tensor: Tensor) -> FileTensor:
    if tensor.dtype not in NAMES:
        raise RequestError(
            asked="weights.safetensors",
            found=f"{name!r} of {tensor.dtype}",
            why="the format has no such type of number",
            do="keep it in the model as another type, torch.view_as_real of it for example",
        )
    return as_written(NAMES[tensor.dtype], tuple(tensor.shape))


def _content(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


# --- digest --------------------------------------------------------------------------------------
# Digests in torch, of a model and of a tensor: equal exactly when every bit is equal.


def weights_sha256(tensors: Iterator[tuple[str, Tensor]]) -> str:
    """SHA-256 over name, dtype and contiguous little-endian bytes of each tensor, as they come.

    Give them by name in sorted order (`Strategy.full_state`); one tensor is held at a time.
    """
    return digest_of_weights((name, *_bytes_of(tensor)) for name, tensor in tensors)


def digest_of(tensor: Tensor) -> str:
    """BLAKE2 over dtype and bytes of a tensor that this rank holds whole."""
    kind, content = _bytes_of(tensor)
    return f"{kind} {hashlib.blake2b(content, digest_size=16).hexdigest()}"


def _bytes_of(tensor: Tensor) -> tuple[str, memoryview]:
    return str(tensor.dtype).removeprefix("torch."), _content(tensor)
