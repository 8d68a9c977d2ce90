"""The gradients of a step where backward has left them: all there, dense, and how long they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer, SparseAdam

from allranks.errors import RequestError
from allranks.torch.accelerator import holds
from allranks.torch.model.reals import real_type, reals
from allranks.torch.parallel.data.reducer import exact_norm

ROW = 4096  # numbers whose squares are added in their own type
LONG = 2**20


class Gradients:
    """The gradient of a step, summed over all ranks, in the `.grad` of `parameters`.

    `flats`, if any, hold the same numbers and nothing else, in fewer tensors. The norm that clips
    is `exact` where bits must not follow how many ranks hold the gradient. With `are_dense` each
    parameter has a gradient, and it is dense. Every rank makes the same calls, because those of a
    strategy that cuts its weights communicate.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        flats: Sequence[Tensor] = (),
        *,
        exact: bool = False,
        are_dense: bool = False,
    ) -> None:
        self.parameters, self.flats, self.exact = parameters, list(flats), exact
        self._are_dense = are_dense
        self.known_norms: Tensor | None = None
        """Sums over ranks from which a norm follows, until gradients change."""

    def local_parts(self) -> list[Tensor]:
        """The tensors of this rank."""
        return gradients_of(self.parameters)

    def settle(self, unused: Sequence[int]) -> None:
        """Let every parameter have a gradient, but the `unused` ones."""
        for position in unused:  # as in one process: no gradient, not one of zeros
            self.parameters[position].grad = None
        if not self._are_dense:
            make_dense(self.parameters, len(unused))

    def follow(self, parameters: list[nn.Parameter]) -> None:
        """Be the gradient of these: other ones are trained than the step began with."""
        self.parameters, self.flats, self.known_norms = parameters, [], None

    def add(self, value: Tensor) -> None:
        """Add the gradient of `value`, which every rank has computed alike from whole weights."""
        value.backward()
        self.known_norms = None

    def tensors(self) -> list[Tensor | None]:
        """What this rank holds of the gradient of each parameter; `None` where there is none."""
        return [parameter.grad for parameter in self.parameters]

    def scale_(self, factor: float | Tensor) -> None:
        """Multiply all of it."""
        multiply_(self.flats or self.local_parts(), factor)
        self.known_norms = None

    def sign_(self) -> None:
        """Let their signs be all that is left of them; what is not a number stays so."""
        for tensor in self.flats or self.local_parts():
            tensor.sign_()

    def norm(self, *, clips: bool, left_out: bool) -> float:
        """Its length, the same on every rank; not finite exactly if one of its elements is not.

        `clips` asks for what torch clips by. With `left_out` some gradients may not be in `flats`,
        so the norm is that of the parameters' gradients.
        """
        if clips and self.exact:
            return exact_norm(gradients_of(self.parameters))
        return norm_of(self.parameters, [] if left_out else self.flats, clips=clips)

    def norm_unread(self, *, clips: bool, left_out: bool) -> Tensor:
        """The same where the device has it; not finite also where squares are too large."""
        flats = [] if left_out else self.flats
        return total_norm(norms_of(self.parameters, flats, clips=clips))

    def clip_(self, limit: float, norm: float | Tensor) -> None:
        """Scale it down to the length `limit` if its `norm` is more."""
        clip_grads_with_norm_(self.parameters, limit, as_tensor(norm, self.parameters[0]))


def clip_factor(limit: float, norm: float | Tensor) -> float:
    """What torch multiplies a gradient of this length by; not a number where the norm is none."""
    factor = limit / (float(norm) + 1e-6)
    return 1.0 if factor > 1 else factor


def multiply_(tensors: list[Tensor], factor: float | Tensor) -> None:
    """All of them in as few launches as there are types."""
    if isinstance(factor, Tensor):
        for kind, device in {(tensor.dtype, tensor.device) for tensor in tensors}:
            alike = [t for t in tensors if (t.dtype, t.device) == (kind, device)]
            torch._foreach_mul_(alike, factor.to(device, real_type(kind)))
    elif tensors:
        torch._foreach_mul_(tensors, factor)


def multiplied(tensors: list[Tensor | None], factor: float | Tensor | None) -> list[Tensor | None]:
    """The same, or copies that are multiplied."""
    if factor is None:
        return tensors
    return [None if tensor is None else tensor * factor for tensor in tensors]


def as_tensor(norm: float | Tensor, like: Tensor) -> Tensor:
    """A norm of the type that torch would have it in, where the tensor lies. Copies nothing."""
    if isinstance(norm, Tensor):
        return norm.to(real_type(like.dtype))
    return torch.full((), norm, dtype=real_type(like.dtype), device=like.device)


def run_backward(total: Tensor, gradient: Tensor) -> None:
    """`total.backward(gradient)`, for a gradient of the same shape and type.

    Before each pass torch looks whether they are, which takes 12 us, as long as a layer. What asks
    to be called in its place (`__torch_function__`) is.
    """
    if type(total) is not Tensor:
        total.backward(gradient)
        return
    how = {"allow_unreachable": True, "accumulate_grad": True}
    _engine_run_backward((total,), (gradient,), False, False, (), **how)


@dataclass(slots=True)
class Backward:
    """A backward pass that is yet to be made: from `ends`, whose gradients these are."""

    ends: Sequence[Tensor]
    gradients: Sequence[Tensor]

    def __call__(self) -> None:
        if len(self.ends) == 1:
            run_backward(self.ends[0], self.gradients[0])
        elif self.ends:
            torch.autograd.backward(self.ends, self.gradients)


def gradients_of(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Those that are there."""
    return [p.grad for p in parameters if p.grad is not None]


def all_gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    """The gradient of every parameter; raises `RequestError` if one is not there any more."""
    for parameter in parameters:
        if parameter.grad is None:
            raise gradient_taken(parameter)
    return gradients_of(parameters)


def make_dense(parameters: list[nn.Parameter], unused: int) -> None:
    """Let every gradient but the `unused` be there, and dense, as those in buckets always are."""
    there = 0
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            there += 1
            if gradient.is_sparse:
                parameter.grad = gradient.to_dense()
    if there + unused != len(parameters):
        all_gradients(parameters)


def norm_of(parameters: list[nn.Parameter], flats: list[Tensor], *, clips: bool) -> float:
    """The length of the gradient; not finite exactly if one of its elements is not.

    `flats`, if any, hold the same numbers in fewer tensors; `clips` asks for what torch clips by.
    """
    norm = read(norms_of(parameters, flats, clips=clips))
    return norm if math.isfinite(norm) else length(gradients_of(parameters), torch.float64)


def norms_of(parameters: list[nn.Parameter], flats: list[Tensor], *, clips: bool) -> list[Tensor]:
    """Norms of parts of the gradient, whose norm is that of all; does not wait for the device."""
    if clips:
        return [get_total_norm(gradients_of(parameters))]
    if flats:
        return [norm for flat in flats for norm in _norms_of(flat)]
    return lengths(gradients_of(parameters))


def total_norm(norms: list[Tensor]) -> Tensor:
    """The norm of several, on the device, in 64 bits."""
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    first = norms[0].device
    total: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(first) for norm in norms]), dtype=torch.float64
    )
    return total


def read(norms: list[Tensor]) -> float:
    """The norm of several; waits for the device once."""
    if len(norms) == 1:
        return norms[0].item()
    if not norms or not holds(norms[0]):
        return math.hypot(*(norm.item() for norm in norms))
    return float(total_norm(norms))


def gradient_taken(parameter: Tensor) -> RequestError:
    """The error for a `.grad` that somebody else has set."""
    return RequestError(
        asked="the gradient that a step has summed",
        found=f"something has replaced `.grad` of a parameter of shape {tuple(parameter.shape)}",
        why="the engine sums gradients over micro-batches and ranks, where backward leaves them",
        do="leave `.grad` alone in backward: no zero_grad() and no optimizer in a hook",
    )


def length(gradients: list[Tensor], kind: torch.dtype | None = None) -> float:
    """The norm of all `gradients` together, each squared and summed as `kind` if given."""
    return read(lengths(gradients, kind))


def length_of_each(gradients: Sequence[Tensor | None]) -> list[float]:
    """The norm of each by itself, 0.0 of none; of all short ones in one call."""
    short = {
        place: g
        for place, g in enumerate(gradients)
        if type(g) is Tensor and g.layout is torch.strided and not _is_long(g)
    }
    sizes = [0.0 if g is None or n in short else length([g]) for n, g in enumerate(gradients)]
    norms = torch._foreach_norm([*short.values()]) if short else ()
    for place, norm in zip(short, norms, strict=True):
        sizes[place] = norm.item()
    return sizes


def lengths(gradients: list[Tensor], kind: torch.dtype | None = None) -> list[Tensor]:
    """Norms whose squares add up to that of all."""
    if not gradients:
        return []
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    if kind is not None:
        dense = [g.to(torch.promote_types(g.dtype, kind)) for g in dense]
    long = [norm for g in dense if _is_long(g) for norm in _norms_of(g)]
    short = [g for g in dense if not _is_long(g)]
    return [*(torch._foreach_norm(short) if short else ()), *long]


def _norms_of(gradient: Tensor) -> list[Tensor]:
    """One norm, or two if the gradient is long.

    A CPU adds squares one after the other: in 32 bits, a sum of millions loses a thousandth, that
    of a short row almost nothing. Devices add in pairs.
    """
    if not _is_long(gradient):
        return [torch.linalg.vector_norm(gradient)]
    as_it_lies = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
    flat, end = gradient.permute(as_it_lies).reshape(-1), gradient.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:end].view(-1, ROW), dim=1)
    tail = [torch.linalg.vector_norm(flat[end:])] if end < flat.numel() else []
    return [torch.linalg.vector_norm(rows), *tail]


def _is_long(gradient: Tensor) -> bool:
    return gradient.numel() >= LONG and not holds(gradient)


# --- sparse --------------------------------------------------------------------------------------
# Sparse gradients (`nn.Embedding(sparse=True)`): the same on one rank and on many.
#
# Gradients are summed dense, and the optimizers of torch take them so: for SGD and Adagrad that is
# the same update. `SparseAdam`, and an optimizer of the task's own that may look at `is_sparse`,
# are given what a plain loop gives them: the rows that some sample of the global batch touched.
# Which rows these are rides on the tally, a number for each row.


def wanting_rows(
    model: nn.Module, optimizer: Optimizer, parameters: list[nn.Parameter]
) -> set[int]:
    """The ids of the parameters whose gradient the optimizer is to have as rows."""
    if isinstance(optimizer, SparseAdam):
        return {id(parameter) for parameter in parameters}
    if type(optimizer).__module__.startswith("torch.optim"):
        return set()
    return {id(weight) for weight in tables_of(model)}


def tables_of(model: nn.Module) -> list[Tensor]:
    """The weights whose gradients come as rows."""
    tables = [m for m in model.modules() if getattr(m, "sparse", False) is True]
    weights = [table._parameters.get("weight") for table in tables]
    return [weight for weight in weights if weight is not None]


def one_number_a_row(gradient: Tensor) -> Tensor:
    """A hook that adds up a row which several samples touch, before the pass is added."""
    return gradient.coalesce() if gradient.is_sparse else gradient


class SparseRows:
    """Which rows of the parameters of `optimizer` a step touches. `is_apart` says not to look;
    the rows of those that are `served`, by their ids, lie elsewhere, and are counted there. With
    `exact` each pass adds one number to a row, as where its gradient is dense: a row that several
    samples touch is added up first."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        parameters: list[nn.Parameter],
        is_apart: Callable[[], bool],
        served: frozenset[int] = frozenset(),
        exact: bool = False,
    ) -> None:
        wanting = wanting_rows(model, optimizer, parameters) - served
        self.positions = [i for i, p in enumerate(parameters) if id(p) in wanting]
        self.parameters = [parameters[i] for i in self.positions]
        self.counts = [parameter.shape[0] for parameter in self.parameters]
        self.touched = [reals(p.detach()).new_zeros(p.shape[0]) for p in self.parameters]
        self._kind = type(optimizer).__name__
        self._is_apart = is_apart
        self.hooks = [
            parameter.register_hook(self.marker(number))
            for number, parameter in enumerate(self.parameters)
        ]
        if exact:
            trained = {id(parameter) for parameter in parameters}
            tables = {id(w): w for w in tables_of(model) if id(w) in trained}
            self.hooks += [table.register_hook(one_number_a_row) for table in tables.values()]

    def marker(self, number: int) -> Callable[[Tensor], None]:
        """A hook that notes the rows of a gradient of parameter `number` of these."""

        def mark(gradient: Tensor) -> None:
            if self._is_apart():
                return
            if not gradient.is_sparse:
                raise _not_sparse(self._kind, self.parameters[number])
            rows = self.touched[number]
            rows.index_fill_(0, gradient._indices()[0].to(rows.device), 1)

        return mark

    def forget(self) -> None:
        """No row has been touched."""
        for rows in self.touched:
            rows.zero_()

    def hand_over(self, touched: list[Tensor]) -> None:
        """Leave in `.grad` the touched rows alone; `touched` is summed over all ranks."""
        for parameter, marks in zip(self.parameters, touched, strict=True):
            if parameter.grad is None or parameter.grad.is_sparse:
                continue
            dense = parameter.grad
            rows = marks.nonzero().flatten().to(dense.device)
            if int(dense.count_nonzero()) != int(dense[rows].count_nonzero()):
                raise _not_sparse(self._kind, parameter)
            parameter.grad = torch.sparse_coo_tensor(
                rows[None], dense[rows], dense.shape, is_coalesced=True, check_invariants=False
            )


def _not_sparse(optimizer: str, parameter: Tensor) -> RequestError:
    return RequestError(
        asked=f"{optimizer} for a parameter of shape {tuple(parameter.shape)}",
        found="a gradient that is not of some rows alone",
        why="it is updated row by row, where a sample has touched it",
        do="give it parameters of nn.Embedding(sparse=True) alone, used in no other way and in no "
        "regularizer; or take sparse=True away and use a dense optimizer",
    )
