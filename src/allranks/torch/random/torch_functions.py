"""Random operators of torch whose numbers belong to the samples while a step passes a model.

Kernels of `aten` for the CPU are replaced (`torch.library`): whoever draws comes by
here, also torch's own C++ below `F.dropout`, attention and recurrent layers, and no other operation
is any slower. Outside of a pass, with a `torch.Generator` of one's own, where activations are parts
of those of one process (`is_part`), and where numbers cannot be keyed (`random_` over more than
2^31 numbers, `poisson`, `binomial`, gamma), the kernel that was replaced is called; what it draws
from torch's generator the witness names. So it is for arguments that torch refuses, in its own
words, and after `torch.manual_seed` in forward: numbers that somebody seeds are those of the seed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from allranks.torch.random import keyed_rng as keyed
from allranks.torch.random.counter import HALF, Finish
from allranks.torch.random.keyed_rng import (
    ALL,
    BY_FUNCTION,
    ROWS,
    Keys,
    mask_of,
    normal,
    threshold,
    uniform,
    unit,
    whole_numbers,
)

MOST = 1 << 31
Draw = Callable[..., Any]


@cache
def catch() -> torch.library.Library:
    """Replace the random kernels of the CPU, once in a process."""
    library = torch.library.Library("aten", "IMPL")
    for name, draw in DRAWN.items():
        before = torch.library.get_kernel(f"aten::{name}", "CPU")
        caught = partial(_caught, name, draw, before)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            library.impl(name, caught, "CPU", with_keyset=True, allow_override=True)
    return library


def _caught(name: str, draw: Draw, before: Any, keyset: Any, *args: Any, **keywords: Any) -> Any:
    here = keyed.keys_here()
    has_generator = any(isinstance(value, torch.Generator) for value in (*args, *keywords.values()))
    is_keyed = here is not None and here.by_function and not here.is_part()
    if here is not None and is_keyed and not has_generator and not here.seeded_by_user():
        keywords.pop("generator", None)
        result = draw(partial(_bits, here, name), *args, **keywords)
        if result is not NotImplemented:
            return result
    return before.call_boxed(keyset, *args, **keywords)


def _bits(
    here: Keys, name: str, like: Tensor, finish: Finish, shape: Any = None, shared: bool = False
) -> Tensor:
    """What `finish` makes of random bits in this shape, by default that of `like`.

    What is `shared` is the same for all samples, an order of as many as dimension 0 has.
    """
    sizes = tuple(like.shape if shape is None else shape)
    samples = here.scope.samples
    if 0 in sizes:  # no number is drawn; the next draw is the next all the same
        here.next_call(BY_FUNCTION)
        return finish(like.new_empty(sizes, dtype=torch.int32))
    call = here.scope.calls.get(BY_FUNCTION, 0)
    operation = f"{name.partition('.')[0].strip('_')}()"
    if shared:
        here.readings.read_order(operation, call, sizes[0], samples)
    kind = ALL if shared else here.readings.read(operation, call, sizes, samples)
    if kind == ROWS:
        of_rows = here.of_rows(BY_FUNCTION, sizes, operation)
        return keyed.drawn(of_rows, sizes[1:], (0,) * (len(sizes) - 1), finish, like)
    if kind == ALL:
        numbers = keyed.drawn(here.of_all(BY_FUNCTION), sizes, (0,) * len(sizes), finish, like)
        return numbers.view(sizes)
    of_samples = here.of_rows(BY_FUNCTION, (samples,), operation)
    others = (sizes[0], *sizes[2:])
    return keyed.drawn(of_samples, others, (0,) * len(others), finish, like).transpose(0, 1)


def bernoulli_of_part(like: Tensor, p: float, whole: Sequence[int], start: int = 0) -> Tensor:
    """What `bernoulli_(p)` draws in one process in the shape `whole`, for the part that is `like`.

    That has all samples, dimension 0, and of dimension 1 what begins at `start`. On an accelerator,
    where nobody else's draws are keyed, ranks draw apart for their parts all the same.
    """
    here = keyed.keys_here()
    is_keyed = here is not None and (here.by_function or not like.is_cpu)
    if here is None or not is_keyed or here.seeded_by_user():
        return torch.empty_like(like).bernoulli_(p)
    below, operation = threshold(p), "bernoulli()"
    here.readings.read(operation, here.scope.calls.get(BY_FUNCTION, 0), whole, here.scope.samples)
    keys = here.of_rows(BY_FUNCTION, whole, operation)
    starts = (start, *[0] * (like.dim() - 2))
    return keyed.drawn(keys, like.shape[1:], starts, lambda b: b.lt(below), like).to(like.dtype)


def _are_probabilities(p: Tensor) -> bool:
    return not p.numel() or bool(((p >= 0) & (p <= 1)).all())  # not so of NaN


def _bernoulli_float(bits: Draw, out: Tensor, p: float = 0.5) -> Any:
    if not 0 <= p <= 1:
        return NotImplemented
    below = threshold(p)
    return out.copy_(bits(out, lambda b: b.lt(below) if p < 1 else torch.ones_like(b)))


def _bernoulli_tensor(bits: Draw, out: Tensor, p: Tensor) -> Any:
    if not _are_probabilities(p):
        return NotImplemented
    return out.copy_(bits(out, unit) < p)


def _bernoulli_out(bits: Draw, p: Tensor, out: Tensor) -> Any:
    if not _are_probabilities(p):
        return NotImplemented
    return out.resize_(p.shape).copy_(bits(p, unit) < p)


def _uniform(bits: Draw, out: Tensor, low: float = 0.0, high: float = 1.0) -> Any:
    if not 0 <= high - low <= torch.finfo(out.dtype).max:
        return NotImplemented
    return out.copy_(bits(out, uniform(low, high, out.dtype)))


def _normal(bits: Draw, out: Tensor, mean: float = 0.0, std: float = 1.0) -> Any:
    if out.is_complex() or not std >= 0:
        return NotImplemented
    return out.copy_(bits(out, normal).mul_(std).add_(mean))


def _normal_of(bits: Draw, mean: Any, std: Any = 1.0) -> Any:
    if not bool((torch.as_tensor(std) >= 0).all()) or torch.is_complex(torch.as_tensor(mean)):
        return NotImplemented
    like = torch.as_tensor(mean) + torch.as_tensor(std)
    return (bits(like, normal) * std + mean).to(like.dtype)


def _exponential(bits: Draw, out: Tensor, rate: float = 1.0) -> Any:
    if not 0 < rate < math.inf:
        return NotImplemented
    return out.copy_(bits(out, lambda b: unit(b).log_().div_(-rate)))


def _geometric(bits: Draw, out: Tensor, p: float) -> Any:
    if not 0 < p < 1:
        return NotImplemented
    return out.copy_(bits(out, lambda b: unit(b).log_().div_(math.log1p(-p)).ceil_()))


def _cauchy(bits: Draw, out: Tensor, median: float = 0.0, sigma: float = 1.0) -> Any:
    if not sigma > 0:
        return NotImplemented

    def finish(b: Tensor) -> Tensor:
        return unit(b).sub_(0.5).mul_(math.pi).tan_().mul_(sigma).add_(median)

    return out.copy_(bits(out, finish))


def _log_normal(bits: Draw, out: Tensor, mean: float = 1.0, std: float = 2.0) -> Any:
    if not std > 0:
        return NotImplemented
    return out.copy_(bits(out, lambda b: normal(b).mul_(std).add_(mean).exp_()))


def _random_from(bits: Draw, out: Tensor, low: int, high: int | None = None) -> Any:
    if high is None or not 0 < high - low <= MOST or not _holds(out.dtype, low, high - 1):
        return NotImplemented
    return out.copy_(bits(out, whole_numbers(low, high)))


def _holds(dtype: torch.dtype, low: int, high: int) -> bool:
    """Whether each whole number of [low, high] is one of this type; torch says where it is not."""
    if dtype == torch.bool:
        return low >= 0 and high <= 1
    if dtype.is_floating_point:
        return max(-low, high) <= 2 / torch.finfo(dtype).eps
    limits = torch.iinfo(dtype)
    return limits.min <= low and high <= limits.max


def _random_to(bits: Draw, out: Tensor, high: int) -> Any:
    return _random_from(bits, out, 0, high)


def _randperm(bits: Draw, n: int, out: Tensor) -> Tensor:
    def finish(b: Tensor) -> Tensor:
        return b.to(torch.int64)

    both = bits(out, finish, (n, 2), shared=True)
    order = (both[:, 0] * (2 * HALF) + both[:, 1] + HALF).argsort(stable=True)
    return out.resize_(n).copy_(order)


def _are_weights(p: Tensor) -> bool:
    return bool((p >= 0).all()) and bool(
        ((total := p.double().sum(-1)) > 0).all() & total.isfinite().all()
    )


def _multinomial(bits: Draw, p: Tensor, samples: int, replacement: bool = False) -> Any:
    if not replacement or samples == 1:
        return NotImplemented  # torch draws from the exponential distribution for it
    if not _are_weights(p):
        return NotImplemented
    sums = p.double().cumsum(-1)
    numbers = bits(p, unit, (*p.shape[:-1], samples)) * sums[..., -1:]
    return torch.searchsorted(sums, numbers.contiguous(), right=True).clamp_(max=p.shape[-1] - 1)


def _rrelu(
    bits: Draw, x: Tensor, noise: Tensor, lower: float, upper: float, training: bool = False
) -> Any:
    if not training:
        return NotImplemented
    slopes = bits(x, uniform(lower, upper, x.dtype))
    noise.copy_(torch.where(x <= 0, slopes, 1.0))
    return x * noise


def _rrelu_in_place(bits: Draw, x: Tensor, *others: Any, **keywords: Any) -> Any:
    result = _rrelu(bits, x, *others, **keywords)
    return result if result is NotImplemented else x.copy_(result)


def _native_dropout(bits: Draw, x: Tensor, p: float, train: bool | None) -> Any:
    if train is False:
        return NotImplemented
    mask = bits(x, mask_of(p, x.dtype))
    return x * mask, mask != 0


DRAWN: dict[str, Draw] = {
    "bernoulli_.float": _bernoulli_float,
    "bernoulli_.Tensor": _bernoulli_tensor,
    "bernoulli.out": _bernoulli_out,
    "uniform_": _uniform,
    "normal_": _normal,
    "normal.Tensor_float": _normal_of,
    "normal.float_Tensor": _normal_of,
    "normal.Tensor_Tensor": _normal_of,
    "exponential_": _exponential,
    "geometric_": _geometric,
    "cauchy_": _cauchy,
    "log_normal_": _log_normal,
    "random_.from": _random_from,
    "random_.to": _random_to,
    "randperm.generator_out": _randperm,
    "multinomial": _multinomial,
    "rrelu_with_noise": _rrelu,
    "rrelu_with_noise_": _rrelu_in_place,
    "native_dropout": _native_dropout,
}
