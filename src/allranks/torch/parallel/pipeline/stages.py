"""Cuts a model into the stages of a pipeline: by its task, or an `nn.Sequential` by costs.

A stage consists of modules of the model and has no weights of its own. Checks that the stages
together hold every weight, and that no layer is new that the engine would have replaced.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from allranks.errors import RequestError
from allranks.strategies.shards import balanced_ends
from allranks.torch.comm.comm import Comm
from allranks.torch.model.layers import OfShard, Scope, Swapped, is_chain, own_kind
from allranks.torch.model.partition import seconds_of
from allranks.torch.model.precision import Precision
from allranks.torch.random.dropout import DROPOUTS
from allranks.torch.task import Task

# --- balance -------------------------------------------------------------------------------------
# The costs of the layers of a chain, to cut it into stages: bytes of weights, or seconds.


Groups = Sequence[Sequence[nn.Module]]
Costs = Callable[[Groups], list[float]]
"""The cost of each group of layers."""


def bytes_of(groups: Groups) -> list[float]:
    """The bytes of the weights of each group."""
    return [float(sum(p.nbytes for layer in group for p in layer.parameters())) for group in groups]


def measured(
    model: nn.Module, task: Task, scope: Scope, precision: Precision, comm: Comm, strategy: str
) -> Costs:
    """Costs in seconds of forward and backward, summed over the ranks of `comm`.

    Every rank calls the returned function on the same groups, and gets the same numbers: it
    measures all layers of the model, and gathers the times of other ranks (`control`).
    """

    def seconds(groups: Groups) -> list[float]:
        times = Counter(id(layer) for group in groups for layer in group)
        layers = {id(layer): layer for group in groups for layer in group}
        asked = f"--strategy {strategy}:by=cost"
        local_seconds = seconds_of(list(layers.values()), model, task, scope, precision, asked)
        rows = [json.loads(text) for text in comm.gather_texts(json.dumps(local_seconds))]
        each = {
            key: sum(of_ranks) / times[key]  # of one of its calls
            for key, of_ranks in zip(layers, zip(*rows, strict=True), strict=True)
        }
        return [sum(each[id(layer)] for layer in group) for group in groups]

    return seconds


FOLLOWS_SHARDS = (*DROPOUTS, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Stages:
    """The stages of a model, in order."""

    def __init__(self, modules: Sequence[nn.Module], model: nn.Module, *, takes_one: bool) -> None:
        self.modules, self.takes_one = list(modules), takes_one
        known = {id(module) for module in model.modules()}
        self._model = model
        self._wrappers = [m for s in modules for m in s.modules() if id(m) not in known]

    def call(self, stage: int, received: Any) -> Any:
        """The output of a stage for the output of the stage before."""
        if self._wrappers and self._wrappers[0].training != self._model.training:
            for module in self._wrappers:
                module.training = self._model.training
        if isinstance(received, tuple) and not self.takes_one:
            return self.modules[stage](*received)
        return self.modules[stage](received)

    def holders(self, parameter: nn.Parameter) -> list[int]:
        """The stages that use a parameter."""
        return [
            number
            for number, stage in enumerate(self.modules)
            if any(other is parameter for other in stage.parameters())
        ]


def stages_of(
    task: Task, model: nn.Module, count: int, asked: str, costs: Costs = bytes_of
) -> Stages:
    """The model in `count` stages; raises `RequestError` if it cannot be cut.

    Calls `costs` if the task does not define stages, and there is more than one.
    """
    task_stages = task.stages(model, count)
    if task_stages is None:
        cut = _cut(model, count, asked, costs)
        _check_shared(cut, model, asked)
        return Stages(cut, model, takes_one=True)
    modules = list(task_stages)
    if len(modules) != count or not all(isinstance(module, nn.Module) for module in modules):
        raise _refused(
            asked,
            f"{len(modules)} stages from stages(model, {count}) of the task",
            f"the ranks hold {count}, and each is an nn.Module",
            f"return {count} modules, or ask for another number of ranks",
        )
    _check(modules, model, asked)
    _check_shared(modules, model, asked)
    return Stages(modules, model, takes_one=False)


def _check(stages: list[nn.Module], model: nn.Module, asked: str) -> None:
    """Check that stages hold all weights of the model, and nothing new."""
    used = {id(parameter) for stage in stages for parameter in stage.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in used:
            raise _refused(
                asked,
                f"{name!r} in none of the stages of the task",
                "every weight is trained where its stage is",
                "give it to the stage that uses it: stages are made of the modules of `model`",
            )
    known = {id(parameter) for parameter in model.parameters()}
    modules = {id(module) for module in model.modules()}
    for stage in stages:
        for module in stage.modules():
            is_new = id(module) not in modules
            if is_new and own_kind(module) in FOLLOWS_SHARDS and not isinstance(module, Swapped):
                raise _not_of_the_model(asked, f"a new {type(module).__name__}")
        if any(id(parameter) not in known for parameter in stage.parameters()):
            raise _not_of_the_model(asked, "a weight that is not one of the model's")


def _check_shared(stages: list[nn.Module], model: nn.Module, asked: str) -> None:
    """Check that no two stages share a layer that counts its calls, in order, in one process."""
    layers: dict[str, nn.Module] = dict(model.named_modules())
    for name in [name for name, module in layers.items() if isinstance(module, OfShard)]:
        layer = layers[name]
        holders = [n for n, stage in enumerate(stages) if any(m is layer for m in stage.modules())]
        if len(holders) > 1:
            raise _refused(
                asked,
                f"the {own_kind(layer).__name__} {name!r} in stages {holders[0]} and {holders[1]}",
                "what it draws or counts follows how often it was called before, and a stage does "
                "not know of its calls in another one",
                "make a layer of its own for each stage",
            )


def _not_of_the_model(asked: str, found: str) -> RequestError:
    return _refused(
        asked,
        f"{found} in the stages of the task",
        "what is trained and saved is the model",
        "make stages of the modules of `model` itself, not of copies or new layers",
    )


def _cut(model: nn.Module, count: int, asked: str, costs: Costs) -> list[nn.Module]:
    """Cut an `nn.Sequential` into stages so that the largest cost is minimal."""
    if count == 1:
        return [model]
    if not is_chain(model):
        raise _refused(
            asked,
            f"a {type(model).__name__}, whose forward does more than call layers in a row",
            "only an nn.Sequential says by itself what comes after what",
            f"write stages(self, model, count) in the task: {count} modules, made of those of "
            "`model`, of which each takes what the one before returns",
        )
    groups: list[list[nn.Module]] = []
    for layer in _layers(model):
        has_weights = any(True for _ in layer.parameters())
        if not groups or (has_weights and any(bytes_of(groups[-1:]))):
            groups.append([])
        groups[-1].append(layer)
    if len(groups) < count:
        raise _refused(
            asked,
            f"an nn.Sequential of {len(groups)} layers with weights",
            f"each of {count} stages needs one",
            f"a pipeline of at most {len(groups)} stages",
        )
    ends = balanced_ends(costs(groups), count)
    return [
        nn.Sequential(*(layer for group in groups[start:end] for layer in group))
        for start, end in zip([0, *ends], ends, strict=False)
    ]


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a chain; inner chains are flattened."""
    layers: list[nn.Module] = []
    for layer in model._modules.values():  # a layer may come twice
        assert layer is not None
        layers += _layers(layer) if is_chain(layer) else [layer]
    return layers


def _refused(asked: str, found: str, why: str, do: str) -> RequestError:
    return RequestError(asked=asked, found=found, why=why, do=do)
