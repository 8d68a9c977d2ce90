"""Does an optimizer update each number by itself? It is asked, on small weights of its own kind.

Where a rank updates its own rows of a weight, an optimizer that looks at the whole of it (the
length of a layer in LARS and LAMB, the matrix in Muon, rows and columns in Adafactor) computes
something else, and no error shows it. So those groups of parameters are found, and each parameter
of them is updated whole by one rank (`whole_optimizers`), which takes an optimizer that looks
at one parameter at a time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer

from allranks.errors import RequestError
from allranks.torch.optimizers.made import hook_of, is_by_number, no_side_effects

SMALL = (6, 4)  # a weight for an optimizer whose formula is known
LARGE = {1: (330,), 2: (144, 132)}  # for others, by dimensions; of more of them:
KERNELS = (40, 36, 3, 3)
SCALES = [1.0] * 6 + [1e4] * 6  # of the gradients of the steps: some rules come late, some clip
JUMPS = (40, 1_000, 100_000)  # of what counts its steps, each before one more of them
FEW_SCALES = [1.0] * 3 + [1e4]  # on weights of the job's own shapes
MOST = 2**20  # numbers of such a weight: a rule that begins above is not seen
CLOSE = 1e-12  # relative to the largest number, in float64
RATE = 1e-2  # where a group has 0: a schedule sets it later
OTHERS = "an optimizer such as AdamW, SGD or Adagrad"
APART = (
    "each rank updates some of the parameters, which is right only for an optimizer that updates "
    "every parameter by itself"
)


@dataclass(frozen=True)
class WeightParts:
    """How ranks hold a weight of this whole `shape`: in the `parts` of it."""

    shape: tuple[int, ...]
    parts: Callable[[Tensor], list[Tensor]]

    def pieces(self, whole: Tensor) -> list[Tensor]:
        """A part of each shape that has numbers: others are updated as it is."""
        by_shape = {part.shape: part for part in reversed(self.parts(whole)) if part.numel()}
        return list(by_shape.values())


def _in_thirds(dim: int, whole: Tensor) -> list[Tensor]:
    size = whole.shape[dim]
    return list(whole.tensor_split([size - size // 3], dim))


Cuts = Mapping[int, WeightParts]
"""By the `id` of a parameter in the groups of an optimizer."""
NO_CUTS: Cuts = MappingProxyType({})


def groups_of_whole(optimizer: Optimizer, asked: str, cuts: Cuts = NO_CUTS) -> frozenset[int]:
    """The groups whose update of some rows, or columns, is not those of the update of all.

    For each group a copy of the optimizer with its hyper-parameters makes steps on weights of
    random numbers, of as many dimensions as its own, and in the shapes and parts of `cuts`, as
    some rules go by size; the optimizer itself, and all that is trained, is as it was. A rate of 0
    is another one there. Raises `RequestError` for one that cannot be asked, and for such a group
    of an optimizer that does not update each parameter by itself.
    """
    with _nothing_else_changed(optimizer, asked):
        return _groups_of_whole(optimizer, asked, cuts)


def check_no_step_hooks(optimizer: Optimizer, asked: str) -> None:
    """Raise `RequestError` where a step calls what may look at weights that ranks hold in parts."""
    if found := hook_of(optimizer):
        why = "it may look at whole weights, of which a rank has parts or some, and change them"
        raise _refused(optimizer, asked, found, why, "do it in the class of the optimizer")


def check_fused(optimizer: Optimizer, asked: str) -> None:
    """Raise `RequestError` for a fused update that torch does not have of a DTensor."""
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    if is_fused and isinstance(optimizer, (SGD, Adagrad)):
        raise _refused(
            optimizer,
            asked,
            "fused=True",
            "torch has no fused update of it for a weight that ranks hold in parts (a DTensor)",
            "leave fused=True out, or --strategy zero1",
        )


@contextmanager
def _nothing_else_changed(optimizer: Optimizer, asked: str) -> Iterator[None]:
    """Ask within: no hook is called, and nothing changes that was there before."""
    check_no_step_hooks(optimizer, asked)
    if is_by_number(optimizer):  # no code of a user's
        yield
        return
    device = _device_of(optimizer, 0)
    with no_side_effects(device, partial(_refused, optimizer, asked)):
        yield


def _groups_of_whole(optimizer: Optimizer, asked: str, cuts: Cuts) -> frozenset[int]:
    answers: dict[str, bool] = {}  # groups that differ in their rates alone are asked once
    found = []
    for number in _with_parameters(optimizer):
        own = _own_cuts(optimizer, number, cuts)
        key = f"{_kind_of(optimizer, number)} {list(own)}"
        if key not in answers:
            answers[key] = _is_elementwise(optimizer, number, asked, own.values())
        if not answers[key]:
            found.append(number)
    if found:
        if names := sorted(_referring(optimizer)):
            text = f"its attribute {names[0]!r}, which refers to parameters"
            why = "it is given others in their place, which are whole, and must know them as these"
            raise _refused(optimizer, asked, text, why)
        _check_by_parameter(optimizer, asked)
    return frozenset(found)


def check_elementwise(optimizer: Optimizer, asked: str, cuts: Cuts = NO_CUTS) -> None:
    """Raise `RequestError` unless an update of some rows, or columns, is those of the whole's."""
    if groups := groups_of_whole(optimizer, asked, cuts):
        found = f"another update by its group {min(groups)} for a part of a weight"
        raise _refused(optimizer, asked, found, "each rank holds a part of a weight that is cut")


def _own_cuts(optimizer: Optimizer, number: int, cuts: Cuts) -> dict[str, WeightParts]:
    """Those of the weights of a group, one of each shape; torch's own need not be asked on them."""
    if is_by_number(optimizer):
        return {}
    found = (cuts.get(id(p)) for p in optimizer.param_groups[number]["params"])
    some = (cut for cut in found if cut is not None and 0 < math.prod(cut.shape) <= MOST)
    like = ((cut, cut.pieces(torch.empty(cut.shape, device="meta"))) for cut in some)
    return {f"{cut.shape} {[tuple(p.shape) for p in parts]}": cut for cut, parts in like}


def _with_parameters(optimizer: Optimizer) -> list[int]:
    return [number for number, group in enumerate(optimizer.param_groups) if group["params"]]


def _kind_of(optimizer: Optimizer, number: int) -> str:
    group = optimizer.param_groups[number]
    told = {n: v for n, v in group.items() if n not in ("params", "lr", "initial_lr")}
    return f"{told} {_shapes(optimizer, number)}"


def _shapes(optimizer: Optimizer, number: int) -> list[tuple[int, ...]]:
    """The weights on which a group is asked."""
    if is_by_number(optimizer):
        return [SMALL]
    dims = {max(1, p.ndim) for p in optimizer.param_groups[number]["params"]}
    return [LARGE.get(n) or (*KERNELS, *[1] * n)[:n] for n in sorted(dims)]


def _is_elementwise(
    optimizer: Optimizer, number: int, asked: str, own: Iterable[WeightParts]
) -> bool:
    """Whether parts of a weight are updated as the whole is, in shapes of ours and its own."""
    ours = [
        (
            [WeightParts(shape, partial(_in_thirds, dim)) for dim in range(min(2, len(shape)))],
            SCALES,
        )
        for shape in _shapes(optimizer, number)
    ]
    several = [*ours, *(([cut], FEW_SCALES) for cut in own)]
    return all(_is_cut(optimizer, number, cuts, scales, asked) for cuts, scales in several)


def _is_cut(
    optimizer: Optimizer,
    number: int,
    cuts: Sequence[WeightParts],
    scales: Sequence[float],
    asked: str,
) -> bool:
    """Whether parts of a weight are updated as the whole is, however these cut it."""
    drawn = _drawn(optimizer, number, 0, cuts[0].shape, scales)
    (whole,), _ = _asked_steps(optimizer, [number], [drawn], {0}, asked)
    if torch.equal(whole, drawn[0]):
        why = "steps of a copy of it left random weights as they were, so it cannot be asked"
        raise _refused(optimizer, asked, f"no update by its group {number}", why)
    for cut in cuts:
        parts = zip(*map(cut.pieces, drawn), strict=True)
        for part, wanted in zip(parts, cut.pieces(whole), strict=True):
            (found,), _ = _asked_steps(optimizer, [number], [list(part)], {0}, asked)
            if not _is_close(found, wanted):
                return False
    return True


def _is_close(found: Tensor, wanted: Tensor) -> bool:
    largest = max(1.0, float(wanted.abs().max()))
    return torch.allclose(found, wanted, rtol=CLOSE, atol=CLOSE * largest)


def check_by_parameter(optimizer: Optimizer, asked: str, is_any_idle: bool = True) -> None:
    """Raise `RequestError` unless weights without a gradient change nothing for the others.

    That is what a rank sees whose optimizer updates some of the parameters, or none. A copy is
    asked, as above. Where no rank `is_any_idle`, a step without any gradient may raise.
    """
    with _nothing_else_changed(optimizer, asked):
        _check_by_parameter(optimizer, asked, is_any_idle)


def _check_by_parameter(optimizer: Optimizer, asked: str, is_any_idle: bool = True) -> None:
    kinds = {_kind_of(optimizer, n): n for n in reversed(_with_parameters(optimizer))}
    pairs = [(n, s) for n in sorted(kinds.values()) for s in _shapes(optimizer, n) for _ in "12"]
    groups = [number for number, _ in pairs]
    drawn = [_drawn(optimizer, n, seed, shape) for seed, (n, shape) in enumerate(pairs)]
    wanted, values = _asked_steps(optimizer, groups, drawn, range(len(groups)), asked)
    for used in (range(0, len(groups), 2), range(1, len(groups), 2), range(0)):
        try:
            found, others = _asked_steps(optimizer, groups, drawn, used, asked)
        except RequestError:
            if used or is_any_idle:
                raise
            continue
        if others != values:
            text = "hyper-parameters that a step changes by which parameters have a gradient"
            raise _refused(optimizer, asked, text, APART)
        for at, weight in enumerate(found):
            right = wanted[at] if at in used else drawn[at][0]
            if not _is_close(weight, right):
                text = f"in its group {groups[at]} another update where others have no gradient"
                raise _refused(optimizer, asked, text, APART)


def _drawn(
    optimizer: Optimizer,
    number: int,
    seed: int,
    shape: tuple[int, ...],
    scales: Sequence[float] = SCALES,
) -> list[Tensor]:
    """A weight, and gradients for its steps."""
    device = _device_of(optimizer, number)
    generator = torch.Generator().manual_seed(seed)
    factors = [1.0, *([1.0] * 3 if shape == SMALL else scales)]
    numbers = torch.randn(
        len(factors), math.prod(shape), generator=generator, dtype=torch.float64
    ).to(device)
    return [factor * row.view(shape) for factor, row in zip(factors, numbers, strict=True)]


def _device_of(optimizer: Optimizer, number: int) -> torch.device:
    held = [p.device for p in optimizer.param_groups[number]["params"] if not p.is_meta]
    return held[0] if held else torch.device("cpu")


def _asked_steps(
    optimizer: Optimizer,
    groups: Sequence[int],
    drawn: Sequence[list[Tensor]],
    used: Collection[int],
    asked: str,
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """`_stepped`, and a `RequestError` where that raises."""
    try:
        return _stepped(optimizer, groups, drawn, used)
    except RequestError:
        raise
    except Exception as error:
        why = "it is asked how it updates, by steps of a copy on other weights"
        raise _refused(optimizer, asked, f"it raised {error!r}", why) from error


def _stepped(
    optimizer: Optimizer,
    groups: Sequence[int],
    drawn: Sequence[list[Tensor]],
    used: Collection[int],
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Weights in these `groups` after steps, and then the hyper-parameters of the groups.

    Each starts as the first of its `drawn`; those that are `used` have the others as gradients.
    """
    weights = [nn.Parameter(one[0].clone()) for one in drawn]
    first = {number: weights[groups.index(number)] for number in groups}
    memo: dict[int, Any] = {
        id(p): first.get(number, weights[0])
        for number, group in enumerate(optimizer.param_groups)
        for p in group["params"]
    }
    own = object.__new__(type(optimizer))
    kept = {n: v for n, v in vars(optimizer).items() if n not in ("state", "param_groups")}
    own.__dict__ = {name: _copied(value, memo) for name, value in kept.items()}
    own.state = copy.deepcopy(type(optimizer.state)(optimizer.state.default_factory))
    own.param_groups = []
    for number in first:
        given = optimizer.param_groups[number]
        group = {n: _copied(value, memo) for n, value in given.items() if n != "params"}
        if not isinstance(group.get("lr", RATE), Tensor) and not group.get("lr", RATE):
            group["lr"] = RATE
        held = [weight for weight, n in zip(weights, groups, strict=True) if n == number]
        own.param_groups.append({**group, "params": held})
    counters = Counters(own)
    for step in range(1, len(drawn[0])):
        for at in used:
            weights[at].grad = drawn[at][step].clone()
        type(optimizer).step(own)
    if not type(own).step.__module__.startswith("torch.optim."):
        _step_late(own, weights, counters, len(drawn[0]) - 1)
    values = [
        {n: v.tolist() if isinstance(v, Tensor) else v for n, v in group.items() if n != "params"}
        for group in own.param_groups
    ]
    return [weight.detach() for weight in weights], values


def _step_late(own: Optimizer, weights: list[nn.Parameter], counters: Counters, steps: int) -> None:
    """More steps, as if many had been made in between: a rule may begin late.

    A step that raises then, or leaves numbers that are not finite, is undone, and is the last.
    """
    for jump in JUMPS:
        if not counters.jumped(steps, jump):
            return
        before = [weight.detach().clone() for weight in weights]
        with suppress(Exception):
            type(own).step(own)
            if all(weight.isfinite().all() for weight in weights):
                steps += jump + 1
                continue
        with torch.no_grad():
            torch._foreach_copy_(list(weights), before)
        return


class Counters:
    """The numbers of an optimizer that grow by one in each step, from now on."""

    def __init__(self, own: Optimizer) -> None:
        self._places = [vars(own), *own.param_groups]
        self._first = [_numbers(place) for place in self._places]
        self._state = own.state

    def jumped(self, steps: int, by: int) -> bool:
        """Add to those that have grown by `steps`; whether there are any."""
        of_weights = [place for place in self._state.values() if isinstance(place, dict)]
        found = False
        for place, start in (
            *zip(self._places, self._first, strict=True),
            *((place, {}) for place in of_weights),
        ):
            for name, number in _numbers(place).items():
                if number - start.get(name, 0) == steps:
                    place[name], found = place[name] + by, True
        return found


def _numbers(place: dict[str, Any]) -> dict[str, float]:
    kinds = (int, float)
    return {
        name: float(value)
        for name, value in place.items()
        if (isinstance(value, kinds) and not isinstance(value, bool))
        or (isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex())
    }


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A copy, of a hook or a function itself."""
    try:
        return copy.deepcopy(value, dict(memo))
    except TypeError:
        return value


class _CopyMemo(dict[int, Any]):
    """Copies by what they are of, for `deepcopy`; knows whether one of the first was asked for."""

    was = False

    def get(self, key: int, default: Any = None) -> Any:
        self.was = self.was or key in self.first
        return super().get(key, default)

    def __init__(self, copies: dict[int, Any]) -> None:
        super().__init__(copies)
        self.first = frozenset(copies)


def _referring(optimizer: Optimizer) -> list[str]:
    """The attributes of an optimizer, beside its groups and state, that refer to parameters."""
    parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    found = []
    for name, value in vars(optimizer).items():
        asked = _CopyMemo(parameters)
        if name not in ("state", "param_groups"):
            try:
                copy.deepcopy(value, asked)
            except TypeError:
                continue
        if asked.was:
            found.append(name)
    return found


def _refused(
    optimizer: Optimizer, asked: str, found: str, why: str, or_else: str = OTHERS
) -> RequestError:
    return RequestError(
        asked=f"{asked} with {type(optimizer).__name__}",
        found=found,
        why=why,
        do=f"--strategy ddp, or {or_else}",
    )
