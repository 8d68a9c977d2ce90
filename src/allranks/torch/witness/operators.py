"""The operators of one step of a rank, with their inputs and outputs: what `check --deep` compares.

An operator is what reaches torch's dispatcher, but no view, and nothing that neither a module nor
the user's code calls (buckets, sums over ranks). In backward it has the module and line whose
forward made its node of the graph. Calls of modules, and both passes of an `autograd.Function`, are
recorded too, in case the operators within have no counterpart. They are wrapped for the step:
torch's hooks of all modules miss keywords, and functions have no hooks.

With an optimizer (`bisect`) the rest of the step is recorded, too: what adds up the gradients of
the passes, clips them and updates the weights, by the name of the tensor; what callbacks call; and
the state of the generator as an input of what draws from it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd import Function
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

import allranks
from allranks.torch.checkpoint.state import local
from allranks.torch.model.reals import reals

MOST_BYTES = 2**29  # of the values of one rank; operators beyond are counted, not recorded
OURS = (str(path) for path in Path(allranks.__file__).parent.iterdir() if path.name != "programs")
LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(torch.__file__).parents[1]), *OURS, "<")


def storable(tensor: Tensor) -> Tensor:
    """A copy, in a type that NumPy has too."""
    real = reals(tensor.resolve_neg())
    short = real.dtype in (torch.bfloat16, torch.float16)
    return real.to("cpu", torch.float32 if short else real.dtype, copy=True).contiguous()


def write_record(folder: Path, name: str, record: Any, tensors: dict[str, Tensor]) -> None:
    """Write a record to `name.json`, and its tensors to `name.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record))
    save_file(tensors, folder / f"{name}.safetensors")


@contextmanager
def recorded_operators(
    folder: Path, rank: int, model: nn.Module, optimizer: Optimizer | None = None
) -> Iterator[OperatorRecorder]:
    """Within, the operators of this process are recorded; `model` names modules and tensors.

    With `optimizer` also those between and after the passes, as `OperatorRecorder.phase` says.
    """
    recorder, call = OperatorRecorder(model, optimizer), nn.Module.__call__
    apply = Function.__dict__["apply"]
    names = {id(module): name for name, module in model.named_modules()}

    def call_recorded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder.modules.append(names.get(id(module), type(module).__name__))
        try:
            return recorder.call("module", call, (module, *args), kwargs)
        finally:
            recorder.modules.pop()

    def apply_recorded(cls: Any, *args: Any, **kwargs: Any) -> Any:
        output = recorder.call(f"{cls.__name__}.forward", apply.__func__, (cls, *args), kwargs)
        recorder.watch_backward(f"{cls.__name__}.backward", output)
        return output

    nn.Module.__call__ = call_recorded  # type: ignore[method-assign]
    Function.apply = classmethod(apply_recorded)  # type: ignore[assignment]
    try:
        with recorder:
            yield recorder
    finally:
        nn.Module.__call__, Function.apply = call, apply  # type: ignore[method-assign]
    write_record(folder, f"rank-{rank:03d}", recorder.record, recorder.values)


class OperatorRecorder(TorchDispatchMode):
    """The record: rows of operators, as they end, and the nodes that backward comes to.

    `phase` is "" in the passes; then `after_passes` sets it, and the tensors whose operators count.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record: dict[str, list[Any]] = {"rows": [], "reached": []}
        self.values: dict[str, Tensor] = {}
        self.modules: list[str] = []
        self.phase = ""
        self._optimizer = optimizer
        self._trained = [] if optimizer is None else [*model.named_parameters()]
        self._tensors_of: dict[Place, str] = {}
        self._computed = WeakTensorKeyDictionary()  # of each the name of a parameter
        self._parts: Mapping[str, str] = {}
        self._origins: dict[int, tuple[str, str] | None] = {}
        self._bytes = 0

    def after_passes(
        self, phase: str, named: Mapping[str, Tensor], parts: Mapping[str, str]
    ) -> None:
        """From here on record what reads or writes the tensors `named`, and what users call.

        `parts` says which part of a parameter this rank has.
        """
        self.phase, self._parts = phase, parts
        self._computed = WeakTensorKeyDictionary()
        self._tensors_of = {place_of(t): name for name, t in named.items() if t.numel()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if {*types} - {Tensor, nn.Parameter}:
            return func(*args, **kwargs)
        origin, node = self._origin()
        if origin is None and self._trained:
            return self._between(func, args, kwargs)
        if origin is None or func.is_view:
            return func(*args, **kwargs)
        inputs = self._tensors((args, kwargs, self._drawn_from(func, kwargs)))
        output = func(*args, **kwargs)
        if func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            output.zero_()  # what its memory held before is no input of what is written to it
        written = _written(func, args)
        more = {"writes": bool(written), "numbers": _numbers((args, kwargs))}
        self._row(str(func), origin, inputs, [output, written], node=node, **more)
        return output

    def _between(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator that neither a module nor the user calls: a row for each tensor.

        It is recorded if it reads or writes a tensor with a name, or what was computed of one.
        """
        calls = [*_calls_of_one(args)]
        read = {name: kwarg for name, kwarg in kwargs.items() if name != "out"}
        names = [self._name_of((call, read)) for call in calls]
        is_read_out = func is torch.ops.aten._local_scalar_dense.default
        rows = [] if func.is_view or is_read_out else [n for n, name in enumerate(names) if name]
        inputs = {number: self._tensors((calls[number], read)) for number in rows}
        output = func(*args, **kwargs)
        has_each = isinstance(output, list | tuple) and len(output) == len(calls)
        outputs = [output] if len(calls) == 1 else output if has_each else [None] * len(calls)
        for name, tensors in zip(names, outputs, strict=True):
            for tensor in tree_leaves(tensors) if name else ():
                if isinstance(tensor, Tensor):
                    self._computed[tensor] = _parameter_in(name)
        for number in rows:
            name, written = names[number], _written(func, calls[number])
            origin = name, self._parts.get(_parameter_in(name), "")
            more = {"writes": bool(written), "numbers": _numbers((calls[number], read))}
            more |= {"phase": self.phase or "accumulation"}
            self._row(str(func), origin, inputs[number], [outputs[number], written], **more)
        return output

    def _name_of(self, tree: Any) -> str:
        """The name of the first tensor that has one; "" of others."""
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        if not self.phase:
            gradients = {id(p.grad): name for name, p in self._trained if p.grad is not None}
            names = [gradients[id(tensor)] for tensor in tensors if id(tensor) in gradients]
            return f"gradient of {names[0]!r}" if names else ""
        places = [place_of(tensor) for tensor in tensors]
        names = [self._tensors_of[place] for place in places if place in self._tensors_of]
        names += [f"a value of {self._computed[t]}" for t in tensors if t in self._computed]
        return names[0] if names else ""

    def _drawn_from(self, func: Any, kwargs: Any) -> Any:
        """The state of the generator that an operator draws from, where that is recorded."""
        if self._optimizer is None or torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        return (kwargs.get("generator") or torch.default_generator).get_state()

    def call(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call, and record the call like an operator."""
        (origin, _), inputs = self._origin(), self._tensors((args, kwargs))
        output = call(*args, **kwargs)
        self._row(name, origin, inputs, output, numbers=_numbers((args, kwargs)))
        return output

    def watch_backward(self, name: str, output: Any) -> None:
        """Record backward of the function that has made `output`."""
        origin, _ = self._origin()
        nodes: set[Any] = {getattr(tensor, "grad_fn", None) for tensor in tree_leaves(output)}
        for node in nodes - {None}:
            inputs: list[Any] = []
            node.register_prehook(lambda gradients, to=inputs: to.append(self._tensors(gradients)))
            node.register_hook(lambda grads, _, of=inputs: self._row(name, origin, of.pop(), grads))

    def _origin(self) -> tuple[tuple[str, str] | None, int | None]:
        """Module and user's line of what runs now, in backward those of its node; its new node."""
        if (running := torch._C._current_autograd_node()) is not None:
            nodes: list[Any] = [running]
            while nodes:
                node = nodes.pop()
                if (number := node._sequence_nr()) not in self.record["reached"]:
                    self.record["reached"].append(number)
                    nodes += [following for following, _ in node.next_functions if following]
            if not self.modules:
                return self._origins.get(running._sequence_nr()), None
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
            frame = frame.f_back
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""
        module = f"{frame.f_code.co_qualname}()" if frame else None
        module = self.modules[-1] if self.modules else module
        origin = None if module is None else (module, line)
        last = torch._C._autograd._get_sequence_nr() - 1
        is_new = last not in self._origins or not torch.is_grad_enabled()
        self._origins.setdefault(last, origin)
        return origin, last if is_new else None

    def _row(self, name: str, origin: Any, inputs: Any, outputs: Any, **more: Any) -> None:
        if origin is None or not inputs:
            return
        tensors = {"inputs": inputs, "outputs": self._tensors(outputs)}
        tensors = tensors if self._bytes <= MOST_BYTES else {"inputs": [], "outputs": []}
        phase = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        phase = self.phase or phase
        row = {"name": name, "module": origin[0], "line": origin[1], "phase": phase, **tensors}
        self.record["rows"].append({"node": None, "writes": True, "numbers": [], **row, **more})

    def _tensors(self, tree: Any) -> list[tuple[str, list[int]]]:
        """Digest and shape of each tensor, whose values are kept."""
        tensors = []
        with torch.no_grad(), _disable_current_modes():
            for tensor in tree_leaves(tree):
                if isinstance(tensor, Tensor) and not tensor.is_meta:
                    part = storable(local(tensor.detach().to_dense()))
                    digest = f"{hashlib.sha256(part.numpy().tobytes()).hexdigest()} {part.dtype}"
                    if digest not in self.values and self._bytes <= MOST_BYTES:
                        self.values[digest] = part.view(-1)
                        self._bytes += part.nbytes
                    tensors.append((digest, list(part.shape)))
        return tensors


def _numbers(tree: Any) -> list[str]:
    """Arguments that are numbers, such as the divisor of a mean, in words."""
    return [repr(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, int | float)]


# --- between the passes and after them -----------------------------------------------------------

Place = tuple[int, int]


def place_of(tensor: Tensor) -> Place:
    """Where a tensor lies, and how many numbers it has: views of it have the same place."""
    return local(tensor).data_ptr(), local(tensor).numel()


def _parameter_in(name: str) -> str:
    """The parameter in the name of one of its tensors: of "exp_avg of '0.weight'" the last word."""
    return name.rpartition(" of ")[2]


def _calls_of_one(args: Any) -> Iterator[Any]:
    """The arguments of an operator; of one over lists as of calls for one tensor each."""
    lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    if not lists:
        yield args
        return
    count = len(lists[0])
    for number in range(count):
        yield [a[number] if isinstance(a, list | tuple) and len(a) == count else a for a in args]


def _written(func: Any, args: Any) -> list[Any]:
    """The arguments that an operator writes to."""
    pairs = zip(func._schema.arguments, args, strict=False)
    return [a for kind, a in pairs if kind.alias_info and kind.alias_info.is_write]
