"""Tensors like others on meta, and what the schema of an operator says of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import allranks.torch.accelerator as accelerator
from allranks.torch.data.collate import tensors_of_arguments
from allranks.torch.deferred_init.program import NotRecordable, View

_BASE: Any = torch.Tensor
# as they are where nobody is recorded: `disguise` replaces them
STORAGE_OF: Callable[[Tensor], torch.UntypedStorage] = _BASE.untyped_storage
is_meta: Callable[[Tensor], bool] = _BASE.is_meta.__get__
device_of: Callable[[Tensor], torch.device] = _BASE.device.__get__

OVERWRITES = {  # in-place operators that leave nothing of what was there
    "bernoulli_",
    "cauchy_",
    "copy_",
    "exponential_",
    "fill_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
    "zero_",
}
KNOWN_LAYOUT = {  # beside factories and pointwise operators: the meta kernel says it right
    "_to_copy",
    "_unsafe_view",
    "addmm",
    "all",
    "amax",
    "amin",
    "any",
    "bmm",
    "cat",
    "clone",
    "constant_pad_nd",
    "empty_like",
    "flip",
    "full_like",
    "index_select",
    "linalg_vector_norm",
    "mean",
    "mm",
    "mv",
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones_like",
    "repeat",
    "stack",
    "sum",
    "tril",
    "triu",
    "zeros_like",
}
LIKE = {"rand_like", "randn_like", "randint_like"}  # which read shapes and no numbers


def bits_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(torch.uint8)


def address_of(storage: torch.UntypedStorage) -> int:
    """What makes a storage that one: on meta, all are at the same place in memory."""
    address: int = storage._cdata
    return address


def twin(real: Tensor) -> Tensor:
    """A tensor on meta that has the layout of a real one, in a storage of its own."""
    storage = torch.UntypedStorage(STORAGE_OF(real).nbytes(), device="meta")
    return View.of(real, -1).on(storage)


def snapshot(real: Tensor) -> Tensor:
    """A copy that nobody can change, of the same layout."""
    if real.layout is not torch.strided:
        return real.detach().clone()
    extent = sum((n - 1) * s for n, s in zip(real.shape, real.stride(), strict=True)) + 1
    if real.is_conj() or real.is_neg():
        return real.detach().resolve_conj().resolve_neg().clone()
    flat = (
        real.detach()
        .as_strided((extent if real.numel() else 0,), (1,), real.storage_offset())
        .clone()
    )
    return flat.as_strided(real.shape, real.stride(), 0)


def exchange(held: Tensor, real: Tensor) -> None:
    """Let the Python object `held` be the tensor `real`; what refers to it keeps doing so."""
    if isinstance(held, nn.Parameter):
        real = nn.Parameter(real, requires_grad=held.requires_grad)
    else:
        real = real.detach().requires_grad_(held.requires_grad)
    if type(real) is not type(held):
        raise NotRecordable(f"a tensor of type {type(held).__name__}")
    vars(real).update(vars(held))
    if type(held) in (Tensor, nn.Parameter):
        # as `torch.utils.swap_tensors`, which forbids views of `held`: they own a part of it
        torch._C._swap_tensor_impl(held, real)
        held.__dict__, real.__dict__ = vars(real), vars(held)
    else:  # a DTensor has more to swap
        torch.utils.swap_tensors(held, real)


def written_by(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors whose numbers the operator changes, as its schema says."""
    return [t for argument, t in _with_schema(func, args, kwargs) if _is_written(argument)]


def overwritten_by(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Those of them that it does not read before."""
    always = func.overloadpacket.__name__ in OVERWRITES and func.namespace == "aten"
    return [
        tensor
        for argument, tensor in _with_schema(func, args, kwargs)
        if _is_written(argument) and (always or argument.is_out)
    ]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _with_schema(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    for position, argument in enumerate(func._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in tensors_of_arguments(given):
            yield argument, tensor


def says_meta(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


def placed(kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """With the real device, where a kernel was told to go where its input is."""
    return {**kwargs, "device": device} if says_meta(kwargs) else kwargs


def generator_of(args: Any, kwargs: dict[str, Any], device: torch.device) -> torch.Generator:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
    if device.type == "cpu":
        return torch.default_generator
    generator = accelerator.default_generator(device)
    if generator is None:
        raise NotRecordable(f"the generator of {device} is not known")
    return generator
