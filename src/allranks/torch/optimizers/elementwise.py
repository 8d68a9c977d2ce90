"""Tests whether an optimizer updates each number by itself, with trial steps on small weights.

If a rank updates only its rows of a weight, an optimizer that reads the whole weight (the length of
a layer in LARS and LAMB, the matrix in Muon, rows and columns in Adafactor) computes a wrong
update, and no error shows it. So such groups of parameters are detected, and one rank updates each
parameter of them whole (`whole_optimizers`). This needs an optimizer that reads one parameter at a
time.
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


def groups_of_whole(optimizer: Optimizer, option: str, cuts: Cuts = NO_CUTS) -> frozenset[int]:
    """The groups in which the update of a part of a weight differs from that of the whole.

    For each group, a copy of the optimizer with its hyper-parameters runs steps on random weights
    with as many dimensions as its own, and in the shapes and parts of `cuts`, as some rules depend
    on size. The optimizer itself and the trained weights are unchanged. A rate of 0 is replaced.
    Raises `RequestError` if an optimizer cannot be tested, and for such a group if it does not
    update each parameter by itself.
    """
    with _nothing_else_changed(optimizer, option):
        return _groups_of_whole(optimizer, option, cuts)


def check_no_step_hooks(optimizer: Optimizer, option: str) -> None:
    """Raise `RequestError` if a step has a hook, which may read weights held in parts."""
    if hook := hook_of(optimizer):
        why = "it may look at whole weights, of which a rank has parts or some, and change them"
        raise _refused(optimizer, option, hook, why, "do it in the class of the optimizer")


def check_fused(optimizer: Optimizer, option: str) -> None:
    """Raise `RequestError` for a fused update that torch does not support for a DTensor."""
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    if is_fused and isinstance(optimizer, (SGD, Adagrad)):
        raise _refused(
            optimizer,
            option,
            "fused=True",
            "torch has no fused update of it for a weight that ranks hold in parts (a DTensor)",
            "leave fused=True out, or --strategy zero1",
        )


@contextmanager
def _nothing_else_changed(optimizer: Optimizer, option: str) -> Iterator[None]:
    """Around trial steps: no hook is called, and no existing tensor changes."""
    check_no_step_hooks(optimizer, option)
    if is_by_number(optimizer):  # no code of a user's
        yield
        return
    device = _device_of(optimizer, 0)
    with no_side_effects(device, partial(_refused, optimizer, option)):
        yield


def _groups_of_whole(optimizer: Optimizer, option: str, cuts: Cuts) -> frozenset[int]:
    answers: dict[str, bool] = {}  # groups that differ in their rates alone are asked once
    numbers = []
    for number in _with_parameters(optimizer):
        group_cuts = _own_cuts(optimizer, number, cuts)
        key = f"{_kind_of(optimizer, number)} {list(group_cuts)}"
        if key not in answers:
            answers[key] = _is_elementwise(optimizer, number, option, group_cuts.values())
        if not answers[key]:
            numbers.append(number)
    if numbers:
        if names := sorted(_referring(optimizer)):
            text = f"its attribute {names[0]!r}, which refers to parameters"
            why = "it is given others in their place, which are whole, and must know them as these"
            raise _refused(optimizer, option, text, why)
        _check_by_parameter(optimizer, option)
    return frozenset(numbers)


def check_elementwise(optimizer: Optimizer, option: str, cuts: Cuts = NO_CUTS) -> None:
    """Raise `RequestError` unless the update of a part of a weight is that of the whole."""
    if groups := groups_of_whole(optimizer, option, cuts):
        text = f"another update by its group {min(groups)} for a part of a weight"
        raise _refused(optimizer, option, text, "each rank holds a part of a weight that is cut")


def _own_cuts(optimizer: Optimizer, number: int, cuts: Cuts) -> dict[str, WeightParts]:
    """The cuts of a group's weights, one of each shape; none for torch's own optimizers."""
    if is_by_number(optimizer):
        return {}
    all_cuts = (cuts.get(id(p)) for p in optimizer.param_groups[number]["params"])
    some = (cut for cut in all_cuts if cut is not None and 0 < math.prod(cut.shape) <= MOST)
    like = ((cut, cut.pieces(torch.empty(cut.shape, device="meta"))) for cut in some)
    return {f"{cut.shape} {[tuple(p.shape) for p in parts]}": cut for cut, parts in like}


def _with_parameters(optimizer: Optimizer) -> list[int]:
    return [number for number, group in enumerate(optimizer.param_groups) if group["params"]]


def _kind_of(optimizer: Optimizer, number: int) -> str:
    group = optimizer.param_groups[number]
    settings = {n: v for n, v in group.items() if n not in ("params", "lr", "initial_lr")}
    return f"{settings} {_shapes(optimizer, number)}"


def _shapes(optimizer: Optimizer, number: int) -> list[tuple[int, ...]]:
    """The shapes of the weights for the trial steps of a group."""
    if is_by_number(optimizer):
        return [SMALL]
    dims = {max(1, p.ndim) for p in optimizer.param_groups[number]["params"]}
    return [LARGE.get(n) or (*KERNELS, *[1] * n)[:n] for n in sorted(dims)]


def _is_elementwise(
    optimizer: Optimizer, number: int, option: str, group_cuts: Iterable[WeightParts]
) -> bool:
    """Whether parts of a weight are updated as the whole is, in our shapes and its own."""
    ours = [
        (
            [WeightParts(shape, partial(_in_thirds, dim)) for dim in range(min(2, len(shape)))],
            SCALES,
        )
        for shape in _shapes(optimizer, number)
    ]
    several = [*ours, *(([cut], FEW_SCALES) for cut in group_cuts)]
    return all(_is_cut(optimizer, number, cuts, scales, option) for cuts, scales in several)


def _is_cut(
    optimizer: Optimizer,
    number: int,
    cuts: Sequence[WeightParts],
    scales: Sequence[float],
    option: str,
) -> bool:
    """Whether parts of a weight are updated as the whole is, however these cut it."""
    drawn = _drawn(optimizer, number, 0, cuts[0].shape, scales)
    (whole,), _ = _trial_steps(optimizer, [number], [drawn], {0}, option)
    if torch.equal(whole, drawn[0]):
        why = "steps of a copy of it left random weights as they were, so it cannot be asked"
        raise _refused(optimizer, option, f"no update by its group {number}", why)
    for cut in cuts:
        parts = zip(*map(cut.pieces, drawn), strict=True)
        for part, wanted in zip(parts, cut.pieces(whole), strict=True):
            (updated,), _ = _trial_steps(optimizer, [number], [list(part)], {0}, option)
            if not _is_close(updated, wanted):
                return False
    return True


def _is_close(tensor: Tensor, wanted: Tensor) -> bool:
    largest = max(1.0, float(wanted.abs().max()))
    return torch.allclose(tensor, wanted, rtol=CLOSE, atol=CLOSE * largest)


def check_by_parameter(optimizer: Optimizer, option: str, is_any_idle: bool = True) -> None:
    """Raise `RequestError` unless weights without a gradient change nothing for the others.

    So it is on a rank whose optimizer updates some of the parameters, or none. Uses a copy, as
    above. If no rank `is_any_idle`, a step without any gradient may raise.
    """
    with _nothing_else_changed(optimizer, option):
        _check_by_parameter(optimizer, option, is_any_idle)


def _check_by_parameter(optimizer: Optimizer, option: str, is_any_idle: bool = True) -> None:
    kinds = {_kind_of(optimizer, n): n for n in reversed(_with_parameters(optimizer))}
    pairs = [(n, s) for n in sorted(kinds.values()) for s in _shapes(optimizer, n) for _ in "12"]
    groups = [number for number, _ in pairs]
    drawn = [_drawn(optimizer, n, seed, shape) for seed, (n, shape) in enumerate(pairs)]
    wanted, values = _trial_steps(optimizer, groups, drawn, range(len(groups)), option)
    for used in (range(0, len(groups), 2), range(1, len(groups), 2), range(0)):
        try:
            updated, others = _trial_steps(optimizer, groups, drawn, used, option)
        except RequestError:
            if used or is_any_idle:
                raise
            continue
        if others != values:
            text = "hyper-parameters that a step changes by which parameters have a gradient"
            raise _refused(optimizer, option, text, APART)
        for at, weight in enumerate(updated):
            right = wanted[at] if at in used else drawn[at][0]
            if not _is_close(weight, right):
                text = f"in its group {groups[at]} another update where others have no gradient"
                raise _refused(optimizer, option, text, APART)


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
    devices = [p.device for p in optimizer.param_groups[number]["params"] if not p.is_meta]
    return devices[0] if devices else torch.device("cpu")


def _trial_steps(
    optimizer: Optimizer,
    groups: Sequence[int],
    drawn: Sequence[list[Tensor]],
    used: Collection[int],
    option: str,
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """`_run_steps`, which raises only `RequestError`."""
    try:
        return _run_steps(optimizer, groups, drawn, used)
    except RequestError:
        raise
    except Exception as error:
        why = "it is asked how it updates, by steps of a copy on other weights"
        raise _refused(optimizer, option, f"it raised {error!r}", why) from error


def _run_steps(
    optimizer: Optimizer,
    groups: Sequence[int],
    drawn: Sequence[list[Tensor]],
    used: Collection[int],
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Weights in these `groups` after steps, and then the hyper-parameters of the groups.

    Each starts as the first of its `drawn`; those that are `used` have the others as gradients.
    """
    weights = [nn.Parameter(tensors[0].clone()) for tensors in drawn]
    first = {number: weights[groups.index(number)] for number in groups}
    memo: dict[int, Any] = {
        id(p): first.get(number, weights[0])
        for number, group in enumerate(optimizer.param_groups)
        for p in group["params"]
    }
    twin = object.__new__(type(optimizer))
    attributes = {n: v for n, v in vars(optimizer).items() if n not in ("state", "param_groups")}
    twin.__dict__ = {name: _copied(value, memo) for name, value in attributes.items()}
    twin.state = copy.deepcopy(type(optimizer.state)(optimizer.state.default_factory))
    twin.param_groups = []
    for number in first:
        group_of_user = optimizer.param_groups[number]
        group = {n: _copied(value, memo) for n, value in group_of_user.items() if n != "params"}
        if not isinstance(group.get("lr", RATE), Tensor) and not group.get("lr", RATE):
            group["lr"] = RATE
        members = [weight for weight, n in zip(weights, groups, strict=True) if n == number]
        twin.param_groups.append({**group, "params": members})
    counters = Counters(twin)
    for step in range(1, len(drawn[0])):
        for at in used:
            weights[at].grad = drawn[at][step].clone()
        type(optimizer).step(twin)
    if not type(twin).step.__module__.startswith("torch.optim."):
        _step_late(twin, weights, counters, len(drawn[0]) - 1)
    values = [
        {n: v.tolist() if isinstance(v, Tensor) else v for n, v in group.items() if n != "params"}
        for group in twin.param_groups
    ]
    return [weight.detach() for weight in weights], values


def _step_late(twin: Optimizer, weights: list[nn.Parameter], counts: Counters, steps: int) -> None:
    """Run more steps with advanced counters, because a rule may begin late.

    A step that then raises, or whose results are not finite, is undone, and is the last.
    """
    for jump in JUMPS:
        if not counts.jumped(steps, jump):
            return
        before = [weight.detach().clone() for weight in weights]
        with suppress(Exception):
            type(twin).step(twin)
            if all(weight.isfinite().all() for weight in weights):
                steps += jump + 1
                continue
        with torch.no_grad():
            torch._foreach_copy_(list(weights), before)
        return


class Counters:
    """The numbers of an optimizer that grow by one in each step, from now on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._places = [vars(optimizer), *optimizer.param_groups]
        self._first = [_numbers(place) for place in self._places]
        self._state = optimizer.state

    def jumped(self, steps: int, by: int) -> bool:
        """Advance the numbers that have grown by `steps`; returns whether there are any."""
        of_weights = [place for place in self._state.values() if isinstance(place, dict)]
        has_any = False
        for place, start in (
            *zip(self._places, self._first, strict=True),
            *((place, {}) for place in of_weights),
        ):
            for name, number in _numbers(place).items():
                if number - start.get(name, 0) == steps:
                    place[name], has_any = place[name] + by, True
        return has_any


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
    """The attributes of an optimizer, besides its groups and state, that refer to parameters."""
    parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    names = []
    for name, value in vars(optimizer).items():
        copies = _CopyMemo(parameters)
        if name not in ("state", "param_groups"):
            try:
                copy.deepcopy(value, copies)
            except TypeError:
                continue
        if copies.was:
            names.append(name)
    return names


def _refused(
    optimizer: Optimizer, option: str, found: str, why: str, or_else: str = OTHERS
) -> RequestError:
    return RequestError(
        asked=f"{option} with {type(optimizer).__name__}",
        found=found,
        why=why,
        do=f"--strategy ddp, or {or_else}",
    )
