"""A cut weight as user code meets it in a pass: whole, by whatever way it gets there.

An attribute, `parameters()`, `state_dict(keep_vars=True)`, `torch.func`: all find a `WholeWeight`.
It has the shape of the whole, and is gathered where an operation needs its numbers, once in a pass:
its type and its device cost no message. Its gradient finds the way back to the part.
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
from allranks.torch.parallel.tensor.exchange import Along, TensorExchange

GRAD: Any = torch.autograd.grad
GRADIENT: Any = vars(torch._C.TensorBase)["grad"].__get__


class WholeWeight(Tensor):
    """The whole of a weight, or a view of it. `collect` gives its numbers; nobody writes them."""

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
        """One with the type and on the device of another tensor."""
        make: Any = Tensor._make_wrapper_subclass
        found: WholeWeight = make(cls, shape, dtype=like.dtype, device=like.device)
        found.collect, found.numbers, found.part = collect, None, None
        return found

    def gathered(self) -> Tensor:
        """The numbers. The ranks compute alike, so all of them ask for it at the same point."""
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
        found = function(*args, **kwargs)
        returns = function._schema.returns
        if any(one.alias_info is not None and not one.alias_info.is_write for one in returns):
            return tree_map_only(Tensor, _view, found)
        return found


class _TrainedWhole(WholeWeight):
    """One whose gradient may be asked for within the pass, where its layer has used the part."""

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
    """Of what is whole; whoever writes to it is refused, too."""
    return WholeWeight.of(numbers.shape, numbers, lambda: numbers)


def _gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """`torch.autograd.grad` by whole weights: by the parts, put together."""
    asked: list[Any] = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    parts = [one.part if isinstance(one, WholeWeight) else None for one in asked]
    roots = [one if part is None else part for one, part in zip(asked, parts, strict=True)]
    found = torch.autograd.grad(outputs, roots, *args, **kwargs)
    return tuple(
        gradient
        if part is None or gradient is None
        else one.exchange.whole(gradient, one.along, one.shape[one.along.dim])
        for one, part, gradient in zip(asked, parts, found, strict=True)
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
        shape, own = list(part.shape), part.detach()
        shape[along.dim] = size
        return kind.of(shape, own, lambda: exchange.all(own, along, size))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return None, None, ctx.exchange.own_part(gradient, ctx.along), None, None
        return None, None, ctx.exchange.own(gradient, ctx.along).contiguous(), None, None


def shown(exchange: TensorExchange, part: Tensor, along: Along, size: int) -> Tensor:
    """The whole of a weight of which a rank holds a part; the same tensor all through a pass."""
    key = id(part), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    found = exchange.weights.get(key)
    if found is None:
        # a transform of torch.func may be over when the weight is used once more
        clear = temporarily_clear_interpreter_stack
        with clear() if _are_functorch_transforms_active() else nullcontext():
            kind = _TrainedWhole if torch.is_grad_enabled() else WholeWeight
            whole: Any = _Shown.apply(kind, exchange, part, along, size)  # type: ignore[no-untyped-call]
        whole.part, whole.exchange, whole.along = part, exchange, along
        if exchange.gathers_at_once:
            whole.gathered()
        found = exchange.weights[key] = whole
    return found


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
