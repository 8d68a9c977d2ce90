"""A model of transformers cut for a pipeline: each stage has a run of its layers.

A stage calls the model's own forward, so masks and positions are those of the model. Its first
layer takes what the stage before sent in the place of what forward computed, and its last one ends
forward. Modules that forward calls before the layers return the received tensor on later stages:
nothing reads it. One forward of the whole model shows first which modules these are, and that
nothing else goes from layer to layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from allranks.errors import RequestError

NEVER, BEFORE, AFTER, BETWEEN = "never", "before", "after", "between"


class _Ended(Exception):
    """Forward of a stage has come to the end of its layers."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class ReceivedInput(nn.Module):
    """In the place of a module of another stage: returns what this stage received.

    Its attributes are those of that module, without values: forward may ask for a type.
    """

    def __init__(self, received: list[Tensor], part: nn.Module) -> None:
        super().__init__()
        self.received = received
        empty = {id(t): torch.empty_like(t, device="meta") for t in _tensors_of(part)}
        self.part = (copy.deepcopy(part, empty),)  # in a tuple: its weights are not of this stage

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.received[0].clone()  # which forward may write on

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["part"][0], name)


class EdgeLayer(nn.Module):
    """The first or the last layer of a stage, or both."""

    def __init__(self, layer: nn.Module, received: list[Tensor] | None, *, ends: bool) -> None:
        super().__init__()
        self.layer, self.received, self.ends = layer, received, ends

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.received is not None and args:
            args = (self.received[0], *args[1:])
        elif self.received is not None:
            kwargs["hidden_states"] = self.received[0]
        output = self.layer(*args, **kwargs)
        if self.ends:
            raise _Ended(output[0] if isinstance(output, tuple) else output)
        return output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # such as the kind of attention, which forward asks a layer for
            return getattr(super().__getattr__("layer"), name)


class LayersStage(nn.Module):
    """Stage `number` of `count`: of the list of layers at `path` its share, in order.

    `places` says of modules whether forward calls them before or after the layers.
    """

    def __init__(
        self, model: nn.Module, path: str, number: int, count: int, places: Mapping[str, str]
    ) -> None:
        super().__init__()
        self._received: list[Tensor] = []
        self._places = places
        self._is_first, self._is_last = number == 0, number == count - 1
        layers = _layers(model, path)
        self._share = slice(*(len(layers) * i // count for i in (number, number + 1)))
        stage_layers = layers[self._share]
        if not self._is_first:
            stage_layers[0] = EdgeLayer(stage_layers[0], self._received, ends=False)
        if not self._is_last:
            stage_layers[-1] = EdgeLayer(stage_layers[-1], None, ends=True)
        self.model = self._shell(model, path.split("."), stage_layers)

    def _shell(
        self, module: nn.Module, path: list[str], stage_layers: list[nn.Module], above: str = ""
    ) -> nn.Module:
        """A copy of `module` that shares its parts, but for those of other stages."""
        shell, list_is_here = copy.copy(module), len(path) == 1
        shell._modules = dict(module._modules)
        for name, part in module.named_children():
            place = self._places.get(above + name)
            if place == BEFORE and not self._is_first:
                shell._modules[name] = ReceivedInput(self._received, part)
            elif place in (AFTER, NEVER) and not self._is_last:
                shell._modules[name] = nn.Module()
        inner, prefix = module.get_submodule(path[0]), f"{above}{path[0]}."
        shell._modules[path[0]] = (
            nn.ModuleList(stage_layers)
            if list_is_here
            else self._shell(inner, path[1:], stage_layers, prefix)
        )
        config: Any = getattr(module, "config", None)
        if list_is_here and getattr(config, "layer_types", None):  # forward reads it by the place
            stage_config = copy.copy(config)
            stage_config.layer_types = config.layer_types[self._share]
            shell.config = stage_config
        return shell

    def forward(self, hidden: Tensor | None = None, batch: Any = None, **inputs: Any) -> Any:
        inputs = inputs if batch is None else batch
        self._received[:] = [] if hidden is None else [hidden]
        try:
            return {"logits": self.model(**inputs).logits}
        except _Ended as ended:
            return ended.hidden, inputs
        finally:
            self._received.clear()


class LayerTrace(TorchDispatchMode):
    """Follows a forward: in which order it calls layers, and what it computes with their outputs.

    `problem` is what a pipeline would compute otherwise, or empty.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers, self.calls, self.problem = layers, 0, ""
        self.output: Any = None
        self._is_inside = False
        self._from_layers: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._is_inside:
            self._from_layers |= {id(t): t for t in tree_leaves(result) if isinstance(t, Tensor)}
        elif self._has_other(args, kwargs, self.output if self.is_over else None):
            self._add_problem(f"forward computes with an output of layer {self.calls - 1}")
        return result

    @property
    def is_over(self) -> bool:
        return self.calls >= len(self.layers)

    @property
    def place(self) -> str:
        return AFTER if self.is_over else BETWEEN if self.calls else BEFORE

    def enter(self, number: int, args: Any, kwargs: Any) -> None:
        """Note a call of a layer."""
        if number != self.calls:
            self._add_problem(f"layer {number} is called in the place of layer {self.calls}")
        hidden = args[0] if args else kwargs.get("hidden_states")
        if (self.calls and hidden is not self.output) or self._has_other(args, kwargs, self.output):
            self._add_problem(f"layer {number} takes more than the output of the one before")
        self._is_inside, self.calls = True, self.calls + 1

    def leave(self, output: Any) -> None:
        """Note the end of a layer."""
        self._is_inside, self.output = False, output[0] if isinstance(output, tuple) else output

    def _has_other(self, args: Any, kwargs: Any, but: Any) -> bool:
        leaves = tree_leaves((args, kwargs or {}))
        return any(id(leaf) in self._from_layers and leaf is not but for leaf in leaves)

    def _add_problem(self, text: str) -> None:
        self.problem = self.problem or text


def stages_of(model: nn.Module, count: int, inputs: Mapping[str, Tensor]) -> list[nn.Module]:
    """The stages of a model with one list of layers; raises `RequestError` for others.

    `inputs` are those of a small batch; forward is followed with tensors of their shapes.
    """
    lists = {name: len(_layers(model, name)) for name in _lists_of_layers(model)}
    request = f"a pipeline of {count} stages over a {type(model).__name__}"
    do = "write stages(model, count) in the task, or take another strategy"
    if len(lists) != 1 or min(lists.values()) < count:
        lengths = ", ".join(f"{name} ({length})" for name, length in lists.items())
        why = "a stage is a run of the layers of one, and needs one at least"
        lengths = f"lists of layers: {lengths or 'none'}"
        raise RequestError(asked=request, found=lengths, why=why, do=do)
    (path,) = lists
    with in_evaluation(model):
        places, problem = _places_of(model, path, inputs)
        problem = problem or _difference(model, path, count, places, inputs)
    if problem:
        why = "a stage gets the output of the layer before, and nothing else"
        raise RequestError(asked=request, found=problem, why=why, do=do)
    return _stages(model, path, count, places)


def _stages(model: nn.Module, path: str, count: int, places: Mapping[str, str]) -> list[nn.Module]:
    return [LayersStage(model, path, number, count, places) for number in range(count)]


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Within, nothing is dropped; afterwards each module has its mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _places_of(
    model: nn.Module, path: str, inputs: Mapping[str, Tensor]
) -> tuple[dict[str, str], str]:
    """When forward calls each module beside the layers, and what is in the way of stages."""
    trace, calls = LayerTrace(_layers(model, path)), dict[str, set[str]]()
    names = [n for n in _beside(model, path) if _is_of_one_stage(model.get_submodule(n))]
    hooks: list[Any] = []
    for name in names:
        calls[name] = set()
        for module in model.get_submodule(name).modules():
            note: Any = lambda *_, at=name: calls[at].add(trace.place)  # noqa: E731
            hooks.append(module.register_forward_pre_hook(note))
    for number, layer in enumerate(trace.layers):
        enter = lambda _, args, kwargs, at=number: trace.enter(at, args, kwargs)  # noqa: E731
        hooks.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(layer.register_forward_hook(lambda _, args, output: trace.leave(output)))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            _run(model, inputs, trace)
    except Exception as error:  # forward asks for a value
        trace.problem = trace.problem or f"{type(error).__name__}: {error}"[:300]
    finally:
        for hook in hooks:
            hook.remove()
    problem = trace.problem or ("" if trace.is_over else "a layer is not called")
    for name, when in calls.items():
        if len(when) > 1 or BETWEEN in when:
            problem = problem or f"{name} is called {' and '.join(sorted(when))} the layers"
    return {name: next(iter(when), NEVER) for name, when in calls.items()}, problem


def _run(model: nn.Module, inputs: Mapping[str, Tensor], trace: TorchDispatchMode) -> None:
    """Call forward; of a model without values, with shapes alone."""
    named = [*chain(model.named_parameters(), model.named_buffers())]
    if not any(tensor.is_meta for _, tensor in named):
        with trace:
            model(**inputs)
        return
    shapes = FakeTensorMode(allow_non_fake_inputs=True)
    weights: dict[str, Tensor] = {n: shapes.from_tensor(t.to("meta")) for n, t in named}
    batch = {name: shapes.from_tensor(tensor.to("meta")) for name, tensor in inputs.items()}
    with shapes, trace:
        torch.func.functional_call(model, weights, (), batch)


def _difference(
    model: nn.Module, path: str, count: int, places: Mapping[str, str], inputs: Mapping[str, Tensor]
) -> str:
    """How the stages differ from the model, one after the other; "" if they are equal to the bit.

    A model whose weights have no values yet is not compared.
    """
    if any(tensor.is_meta for tensor in _tensors_of(model)):
        return ""
    first, *others = _stages(model, path, count, places)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            whole, state = model(**inputs).logits, first(**inputs)
            for stage in others:
                state = stage(*state)
    except Exception as error:  # such as a weight of another stage, which has no values here
        return f"stages that fail: {type(error).__name__}: {error}"[:300]
    is_equal = torch.equal(whole, state["logits"])
    return "" if is_equal else "stages that compute something else than the model"


def _beside(model: nn.Module, path: str) -> Iterator[str]:
    """The names of the modules beside those on the path."""
    steps = path.split(".")
    for depth, step in enumerate(steps):
        above = ".".join(steps[:depth])
        for name, _ in model.get_submodule(above).named_children():
            if name != step:
                yield f"{above}.{name}" if above else name


def _is_of_one_stage(part: nn.Module) -> bool:
    """Whether it has weights, or draws random numbers: tables of positions may be in all stages."""
    has_weights = any(True for _ in part.parameters())
    return has_weights or any(isinstance(module, nn.Dropout) for module in part.modules())


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def _layers(model: nn.Module, path: str) -> list[nn.Module]:
    return list(model.get_submodule(path).children())


def _lists_of_layers(model: nn.Module) -> Iterator[str]:
    """The names of the outermost lists of modules of one class."""
    inside = ""
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if isinstance(module, nn.ModuleList) and len({type(part) for part in module}) == 1:
            inside = f"{name}."
            yield name
