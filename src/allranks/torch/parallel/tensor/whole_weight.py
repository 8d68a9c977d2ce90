"""A cut weight as user code sees it in a pass: in full.

Attributes, `parameters()`, `state_dict(keep_vars=True)` and `torch.func` all return a
`WholeWeight`. It has the full shape, and is gathered when an operation needs its values, once in a
pass: to read its dtype or device costs no message. Its gradient goes back to the part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _disabled_torch_function_impl
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_map_only

from allranks.errors import RequestError
from allranks.torch.parallel.tensor.exchange import TensorExchange
from allranks.torch.strategies.layout import Along

GRAD: Any = torch.autograd.grad
GRADIENT: Any = vars(torch._C.TensorBase)["grad"].__get__


class WholeWeight(Tensor):
    """A full weight, or a view of it. `collect` returns its values; it is read-only."""

    if TYPE_CHECKING:
        collect: Callable[[], Tensor]
        part: Tensor | None
        exchange: TensorExchange
        along: Along
        numbers: Tensor | None

    _is_param = True  # for isinstance(weight, nn.Parameter)
    __torch_function__: Any = _disabled_torch_function_impl

    @classmethod
    def of(cls, shape: Sequence[int], like: Tensor, collect: Callable[[], Tensor]) -> WholeWeight:
        """A full weight with the dtype and device of another tensor."""
        make: Any = Tensor._make_wrapper_subclass
        weight: WholeWeight = make(cls, shape, dtype=like.dtype, device=like.device)
        weight.collect, weight.numbers, weight.part = collect, None, None
        return weight

    def gathered(self) -> Tensor:
        """The values. All ranks run the same code, so all call this at the same point."""
        if self.numbers is None:
            self.numbers = self.collect()
        return self.numbers

    def numpy(self, *, force: bool = False) -> Any:
        """A copy, as an array."""
        return self.gathered().detach().clone().numpy(force=force)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for argument, value in zip(function._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, WholeWeight):
                raise written_to(str(function))
        args, kwargs = tree_map_only(WholeWeight, WholeWeight.gathered, (args, kwargs or {}))
        output = function(*args, **kwargs)
        returns = function._schema.returns
        if any(spec.alias_info is not None and not spec.alias_info.is_write for spec in returns):
            return tree_map_only(Tensor, _view, output)
        return output


class _TrainedWhole(WholeWeight):
    """A full weight whose gradient may be requested within the pass."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is GRAD:
            return _gradients(*args, **(kwargs or {}))
        if function == GRADIENT:
            raise _gradient_read()
        return _disabled_torch_function_impl(function, types, args, kwargs or {})


def _view(numbers: Tensor) -> WholeWeight:
    """A read-only view of a full weight."""
    return WholeWeight.of(numbers.shape, numbers, lambda: numbers)


def _gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """`torch.autograd.grad` for full weights: computed for the parts, then gathered."""
    weights: list[Any] = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    parts = [weight.part if isinstance(weight, WholeWeight) else None for weight in weights]
    roots = [weight if part is None else part for weight, part in zip(weights, parts, strict=True)]
    gradients = torch.autograd.grad(outputs, roots, *args, **kwargs)
    return tuple(
        gradient
        if part is None or gradient is None
        else weight.exchange.whole(gradient, weight.along, weight.shape[weight.along.dim])
        for weight, part, gradient in zip(weights, parts, gradients, strict=True)
    )


class _Shown(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kind: type[WholeWeight],
        exchange: TensorExchange,
        part: Tensor,
        along: Along,
        size: int,
    ) -> Tensor:
        ctx.exchange, ctx.along = exchange, along
        shape, local = list(part.shape), part.detach()
        shape[along.dim] = size
        return kind.of(shape, local, lambda: exchange.all(local, along, size))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return None, None, ctx.exchange.own_part(gradient, ctx.along), None, None
        return None, None, ctx.exchange.local_part(gradient, ctx.along).contiguous(), None, None


def shown(exchange: TensorExchange, part: Tensor, along: Along, size: int) -> Tensor:
    """The full weight of a part; the same tensor during a whole pass."""
    key = id(part), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    weight = exchange.weights.get(key)
    if weight is None:
        # the weight may be used again after a transform of torch.func has ended
        clear = temporarily_clear_interpreter_stack
        with clear() if _are_functorch_transforms_active() else nullcontext():
            kind = _TrainedWhole if torch.is_grad_enabled() else WholeWeight
            whole: Any = _Shown.apply(kind, exchange, part, along, size)  # type: ignore[no-untyped-call]
        whole.part, whole.exchange, whole.along = part, exchange, along
        if exchange.gathers_at_once:
            whole.gathered()
        weight = exchange.weights[key] = whole
    return weight


def written_to(how: str) -> RequestError:
    return RequestError(
        asked="a cut weight in forward or loss of the model",
        found=f"it is written there, by {how}",
        why="each rank holds a part of it, and sees the whole as a copy that nobody takes back",
        do="write weights in a callback or in the optimizer, leave the layer out of tensor_plan(), "
        "or --strategy ddp",
    )


def _gradient_read() -> RequestError:
    return RequestError(
        asked="the gradient of a cut weight in forward or loss of the model",
        found="its .grad is read there, by the task or by zero_grad()",
        why="backward puts the gradient of a part onto the part, and the whole has none",
        do="torch.autograd.grad, leave the layer out of tensor_plan(), or --strategy ddp",
    )
