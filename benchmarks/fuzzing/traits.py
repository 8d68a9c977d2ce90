"""What people do beside the plain task: one trait each, which a drawn task has or has not.

Each changes the numbers of one process, so a strategy that loses it ends with other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils import parametrizations, prune
from torch.optim import SGD, Optimizer

from allranks.training.callback import Callback

WRAPPED = ("functional", "vmap", "weights_outside", "teacher", "object_output", "float32_part")
"""Traits of the model, which is no `nn.Sequential` then."""
EVERYWHERE = ("step_hook", "write_in_optimizer", "thread_init", "object_batch", "modes", "callback")
"""Traits of the task, whatever its model is."""
LAYERS = ("weight_norm", "prune")
"""Traits of the linear layers of a model, where no two share their weights."""
BY_PASSES = ("teacher",)
"""Traits whose numbers follow how many passes a step has: the witness is right to say so."""


@dataclass
class Rows:
    """A batch as an object of one's own."""

    inputs: Tensor
    wanted: Tensor

    def __getitem__(self, number: int) -> Tensor:
        return (self.inputs, self.wanted)[number]

    def to(self, device: Any) -> Rows:
        return Rows(self.inputs.to(device), self.wanted.to(device))


@dataclass
class Output:
    """What a model returns, as an object."""

    values: Tensor
    note: str = "of a model"


class Samples:
    """A data set by number, of the rows of tensors."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        return tuple(tensor[number] for tensor in self.tensors)


def rows_of(samples: list[Any]) -> Rows:
    """Collates samples into an object."""
    inputs, wanted = zip(*samples, strict=True)
    return Rows(torch.stack(inputs), torch.stack(wanted))


# --- the model ----------------------------------------------------------------------------------


class _Functional(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = functional_call(self.net, dict(self.net.named_parameters()), (inputs,))
        return output


class _Ensemble(nn.Module):
    """Two members, whose weights are stacked, and computed at once."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.members = nn.ModuleList([net, deepcopy(net)])
        with torch.no_grad():
            for weight in self.members[1].parameters():
                weight.mul_(0.9)

    def forward(self, inputs: Tensor) -> Tensor:
        named = [dict(member.named_parameters()) for member in self.members]
        stacked = {name: torch.stack([one[name] for one in named]) for name in named[0]}
        shape = self.members[0]
        outputs: Tensor = vmap(lambda weights: functional_call(shape, weights, (inputs,)))(stacked)
        return outputs.mean(0)


class _WeightsOutside(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor) -> Tensor:
        size = torch.stack([weight.square().sum() for weight in self.net.parameters()]).sum()
        output: Tensor = self.net(inputs) * (1 + 0.01 * size)
        return output


class _Teacher(nn.Module):
    """A copy that follows the net, moved within forward."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.teacher = net, deepcopy(net).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                pairs = zip(self.teacher.parameters(), self.net.parameters(), strict=True)
                for slow, fast in pairs:
                    slow.lerp_(fast, 0.2)
        output: Tensor = self.net(inputs) + 0.1 * self.teacher(inputs)
        return output


class _Float32Part(nn.Module):
    """What goes into the net has passed through 32 bits, and so has what comes out."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.net(inputs)
        return output.float().tanh().to(output)


class _Named(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor) -> Output:
        return Output(self.net(inputs))


_WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "functional": _Functional,
    "vmap": _Ensemble,
    "weights_outside": _WeightsOutside,
    "teacher": _Teacher,
    "object_output": _Named,
    "float32_part": _Float32Part,
}


def traits_of(settings: dict[str, Any]) -> tuple[str, ...]:
    """The traits that the task of these settings can have.

    torch computes no LSTM under `vmap`, nor draws there; a GPT and a residual net may be computed
    anew in backward, where `functional_call` is over; `rare` is cut by the names of its layers.
    """
    kind = settings.get("kind", "layers")
    if kind == "sentences":
        return EVERYWHERE
    if kind in ("residual", "rare"):
        return (*EVERYWHERE, *LAYERS)
    no_vmap = kind == "recurrent" or "dropout" in settings
    wrapped = (trait for trait in WRAPPED if trait != "vmap" or not no_vmap)
    return (*EVERYWHERE, *(() if kind == "words" else LAYERS), *wrapped)


def with_trait(trait: str, model: nn.Module) -> nn.Module:
    """The model as the trait has it."""
    if trait == "thread_init":
        with ThreadPoolExecutor(1) as pool:
            for weight in model.parameters():
                pool.submit(_halve, weight).result()
    for layer in [one for one in model.modules() if isinstance(one, nn.Linear)]:
        if trait == "weight_norm":
            parametrizations.weight_norm(layer)
        if trait == "prune":
            prune.l1_unstructured(layer, "weight", 0.3)  # type: ignore[no-untyped-call]
    return _WRAPPERS[trait](model) if trait in WRAPPED else model


def _halve(weight: Tensor) -> None:
    with torch.no_grad():
        weight.copy_(weight / 2)


# --- the optimizer --------------------------------------------------------------------------------


def optimizer_with(
    trait: str, model: nn.Module, make: Callable[[Iterator[nn.Parameter]], Optimizer]
) -> Optimizer:
    """The optimizer as the trait has it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if trait == "write_in_optimizer":
        for weight in trained[:1]:
            nn.init.normal_(weight, std=0.1)
    if trait == "modes":
        return TwoModes(trained, lr=0.05)
    optimizer = make(iter(trained))
    if trait == "step_hook":
        optimizer.register_step_post_hook(_hold_lengths)
    return optimizer


@torch.no_grad()
def _hold_lengths(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.dim() > 1:
                weight.div_(weight.norm(dim=1, keepdim=True).clamp(min=1.0))


class TwoModes(SGD):
    """Schedule-free SGD: gradients at one point, evaluations at an average of others.

    Defazio et al. 2024, arXiv 2405.15682.
    """

    beta = 0.9

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._trains = False

    @torch.no_grad()
    def train(self) -> None:
        if not self._trains:
            self._move(1 - self.beta)
        self._trains = True

    @torch.no_grad()
    def eval(self) -> None:
        if self._trains:
            self._move(1 - 1 / self.beta)
        self._trains = False

    def _move(self, part: float) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if "z" in self.state[weight]:
                    weight.lerp_(self.state[weight]["z"], part)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self._trains:
            raise RuntimeError("call train() before a step")
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["z"], state["steps"] = weight.clone(), torch.zeros(())
                state["steps"] += 1
                share, rate = 1.0 / float(state["steps"]), group["lr"]
                weight.lerp_(state["z"], share)
                weight.add_(weight.grad, alpha=rate * (self.beta * (1 - share) - 1))
                state["z"].sub_(weight.grad, alpha=rate)


# --- a callback -----------------------------------------------------------------------------------


class Counting(Callback):
    """Counts its steps; the rate of the task follows the count."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])
