"""Finds what the passes of a step change in addition to gradients, and names it.

The result is the same on any number of ranks because a pass is a function of weights, samples and
keyed random numbers. Any other state that it reads and writes (a counter, a generator, a buffer, a
weight) depends on the number of passes and their samples, and so on the number of ranks. In the
first step, contents are compared, as versions do not count every way to write. In the second, when
modules hold what the first step stored on them, only numbers and generators are. No pass is added,
and nothing is changed.
"""

from __future__ import annotations

import hashlib
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import allranks.torch.accelerator as accelerator
from allranks.errors import RequestError
from allranks.torch.checkpoint.state import kept_random_streams
from allranks.torch.model.layers import OF_SWAPPED
from allranks.torch.model.max_norm import BoundedTable
from allranks.torch.random.keyed_rng import BY_FUNCTION
from allranks.torch.step.step import SharedStep
from allranks.torch.witness.replicas import digest

# --- plain state ---------------------------------------------------------------------------------
# Plain state: the state of a program in addition to the weights and buffers that torch knows of.
#
# Counters, generators, arrays and tensors among the attributes of modules, of the task, of its data
# set, and of the globals of its program. The witness reads them before and after code that should
# not change them (`read`), and restores them after its own passes (`plain_state_copy`).


Roots = list[tuple[str, Any]]
"""The objects to search, each after a prefix for the names in it."""
Token = tuple[str, Any]
"""The kind of a value (`number`, `generator`, `array`, `tensor`), and its content or a digest."""

DEEPEST = 4  # attributes of attributes
MOST_ITEMS = 64  # of a container that is looked into
MOST_BYTES = 1 << 20  # of an array or a tensor
MOST_CELLS = 100_000
NUMBERS = (int, float, np.integer, np.floating)
MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) | OF_SWAPPED
OPAQUE_TYPES = (
    *(type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(torch.optim.Optimizer, torch.dtype, torch.device, str, bytes),
)


def generator_state(value: Any) -> bytes | None:
    """The state of a random generator, as bytes; `None` for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state).encode()
    if isinstance(value, np.random.RandomState):
        name, keys, *position = value.get_state(legacy=True)
        return repr((name, position)).encode() + np.asarray(keys).tobytes()
    if isinstance(value, random.Random):
        return repr(value.getstate()).encode()
    return None


def roots_of_task(task: Any) -> Roots:
    """The task itself, and the counters and generators among the globals of its program."""
    return [("task.", task), ("global ", plain_globals(task))]


def roots_of_model(model: nn.Module, task: Any) -> Roots:
    """Every module of the model, and the task."""
    named = [(f"{name}." if name else "", module) for name, module in model.named_modules()]
    return [*named, *roots_of_task(task)]


def read(roots: Roots) -> dict[str, Token]:
    """The content of every number, generator, and small array or tensor, by name."""
    tokens: dict[str, Token] = {}
    for name, value in _walk(roots):
        state = generator_state(value)
        if state is not None:
            tokens[name] = "generator", hashlib.blake2b(state, digest_size=16).hexdigest()
        elif isinstance(value, NUMBERS) and not isinstance(value, bool):
            tokens[name] = "number", value
        elif isinstance(value, np.ndarray) and value.nbytes <= MOST_BYTES and value.dtype != object:
            tokens[name] = "array", (value.shape, hashlib.blake2b(value.tobytes()).hexdigest())
        elif isinstance(value, Tensor) and value.nbytes <= MOST_BYTES and not value.is_sparse:
            with suppress(RequestError):  # a strategy may forbid to read it
                tokens[name] = "tensor", (tuple(value.shape), digest(value))
    return tokens


def globals_of(task: Any) -> dict[str, Any]:
    """The globals of the program that defines a task; none of a task that comes with allranks."""
    for method in ("loss", "model", "train_data"):
        of_program: dict[str, Any] = getattr(getattr(type(task), method, None), "__globals__", {})
        if of_program and not str(of_program.get("__name__", "")).startswith("allranks."):
            return of_program
    return {}


def plain_globals(task: Any) -> dict[str, Any]:
    """The counters and generators among them."""
    return {
        name: value
        for name, value in globals_of(task).items()
        if not name.startswith("__")
        and (isinstance(value, NUMBERS) or generator_state(value) is not None)
    }


def _walk(roots: Roots) -> Iterator[tuple[str, Any]]:
    """Every value below the roots, each object once, containers before what is in them."""
    visited: set[int] = set()
    cells = 0
    waiting = deque((name, root, 0, True) for name, root in roots)
    while waiting and cells < MOST_CELLS:
        name, value, depth, is_root = waiting.popleft()
        cells += 1
        if not is_root:
            yield name, value
        if isinstance(value, (Tensor, np.ndarray)) or generator_state(value) is not None:
            continue
        if (isinstance(value, OPAQUE_TYPES) and not is_root) or depth > DEEPEST:
            continue
        items = _items(value, name)
        if items is None or id(value) in visited:
            continue
        visited.add(id(value))
        waiting.extend((inner, item, depth + 1, False) for inner, item in items)


def _items(value: Any, name: str) -> list[tuple[str, Any]] | None:
    """The items of a container or an object, with names; `None` for other values."""
    dot = name if not name or name.endswith((".", " ")) else f"{name}."
    if isinstance(value, dict):
        if len(value) > MOST_ITEMS:
            return []
        return [(f"{dot}{key}", item) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        if len(value) > MOST_ITEMS:
            return []
        return [(f"{dot}{number}", item) for number, item in enumerate(value)]
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        return None
    if isinstance(value, nn.Module):
        attributes = {key: item for key, item in attributes.items() if key not in MODULE_ATTRIBUTES}
        attributes.update(value._modules.items())
    return [(f"{dot}{key}", item) for key, item in list(attributes.items())]


def plain_state_copy(roots: Roots, task: Any) -> Callable[[], None]:
    """Copy the content of the roots, and the numbers among the globals of the program.

    Returns a function that puts it back.
    """
    values = [root for _, root in roots] + [value for _, value in _walk(roots)]
    of_program = globals_of(task)
    numbers = {n: v for n, v in plain_globals(task).items() if isinstance(v, NUMBERS)}
    undos = [undo for value in values if (undo := _undo_of(value)) is not None]

    def put_back() -> None:
        for undo in undos:
            undo()
        of_program.update(numbers)

    return put_back


def _undo_of(value: Any) -> Callable[[], object] | None:
    """A function that restores the current content of `value`, if it can change in place."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return partial(setattr, bits, "state", bits.state)
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state(legacy=False))
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.ndarray) and value.nbytes <= MOST_BYTES and value.flags.writeable:
        return partial(np.copyto, value, value.copy())
    if isinstance(value, Tensor) and value.nbytes <= MOST_BYTES and value.is_leaf:
        try:
            tensor = value.detach().clone()
        except RequestError:  # a strategy may forbid to read it
            return None
        return lambda: value.detach().copy_(tensor)
    if isinstance(value, list):
        return partial(value.__setitem__, slice(None), list(value))
    if isinstance(value, deque):
        return partial(_refill_row, value, list(value))
    if isinstance(value, (dict, set)):
        return _refill(value)
    attributes = getattr(value, "__dict__", None)
    is_looked_into = isinstance(attributes, dict) and not isinstance(value, OPAQUE_TYPES)
    return _refill(attributes) if is_looked_into else None


def _refill(container: Any) -> Callable[[], None]:
    content = container.copy()

    def put_back() -> None:
        if container != content if isinstance(container, set) else _differs(container, content):
            container.clear()
            container.update(content)

    return put_back


def _refill_row(row: deque[Any], content: list[Any]) -> None:
    row.clear()
    row.extend(content)


def _differs(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return now.keys() != before.keys() or any(now[key] is not before[key] for key in before)


Named = dict[str, str]
"""The name of each changed value, and a sentence about it."""

LOSS = "loss, weight or backward"
COUNTS = "the result follows the number of passes, and with it the number of ranks"
SAMPLES = "what is written follows the samples and the passes of one rank"
DRAWS = "it is keyed for the micro-batch, and which samples are in one follows the number of ranks"
UNKEYED = "it is keyed for no shard, so what is drawn follows the number of ranks"
WRITES_WEIGHT = "writes the weight"
OWN = "a generator of its own: what it draws follows how many passes there were before"


class Observer:
    """Observes the phases of the shared step; `findings` are the changes on this rank.

    `roots()` gives the plain state to read. If each shard goes through the model `alone`, draws
    from a generator that is keyed with it belong to the shard.
    """

    def __init__(self, step: SharedStep, roots: Callable[[], Roots], alone: bool) -> None:
        self.step, self.roots, self.alone = step, roots, alone
        self.findings: Named = {}
        self.tensors: set[str] = set()  # of the findings, those that are no buffers
        self.contents = True
        """Whether contents are compared, too, and not only numbers and generators."""
        self._changes: dict[str, int] = {}
        self._passes = 0
        self._tensors: dict[tuple[str, str], str] = {}
        self._plain: dict[str, Token] = {}
        self._begun: dict[str, Token] = {}
        self._states: dict[str, bytes] = {}
        self._keyed: set[str] = set()

    def reached(self, where: str) -> None:
        """The step is at the phase `where` (see `SharedStep`)."""
        if where == "begin":
            self._passes = 0
            self._tensors = dict(self._digests()) if self.contents else {}
            self._plain = self._begun = read(self.roots())
        elif where == "enter":
            self._end_of_pass()
            self._states = self._generators()
        elif where == "entered":
            now = self._generators()
            self._keyed = {name for name, state in now.items() if state != self._states[name]}
            self._states = now
            self._passes += 1
        elif where == "forward":
            self._drawn("forward")
        elif where == "end":
            self._end_of_pass()
            self._compare()

    def _end_of_pass(self) -> None:
        if not self._passes:
            return
        scope = self.step.scope
        if scope.keys.by_function:
            scope.keys.readings.end_pass(scope.calls.get(BY_FUNCTION, 0))
        if self.step.task.loss_over == "sample":
            self._drawn(LOSS)
        now = read(self.roots())
        for name, (kind, value) in now.items():
            before = self._plain.get(name)
            if kind == "number" and before is not None and before != (kind, value):
                one_more = type(value) is int and value == before[1] + 1
                self._changes[name] = self._changes.get(name, 0) + (2 if one_more else 1)
        self._plain = now

    def _drawn(self, where: str) -> None:
        now = self._generators()
        for name, state in now.items():
            if state != self._states[name] and not (self.alone and name in self._keyed):
                why = DRAWS if name in self._keyed else UNKEYED
                self.findings.setdefault(
                    f"{where} {name}", f"{where} draws from {name}'s own generator: {why}"
                )
        self._states = now

    def _generators(self) -> dict[str, bytes]:
        """The state of each generator of the process."""
        _, keys, *position = np.random.get_state(legacy=True)
        states = {
            "Python": repr(random.getstate()).encode(),
            "NumPy": repr(position).encode() + np.asarray(keys).tobytes(),
            "torch": torch.get_rng_state().numpy().tobytes(),
        }
        if accelerator.is_accelerator(device := self.step.scope.device):
            states["torch"] += accelerator.rng_state(device).numpy().tobytes()
        return states

    def _digests(self) -> Iterator[tuple[tuple[str, str], str]]:
        """(kind, name) and digest of each tensor that must be equal on all ranks."""
        model = self.step.model
        bounded = {id(m.weight) for m in model.modules() if isinstance(m, BoundedTable)}
        for name, parameter in model.named_parameters():
            # without those that the engine writes on all ranks, and those of other ranks
            if id(parameter) not in bounded and not parameter.is_meta:
                yield ("weight", name), digest(parameter)
        for name, buffer in self.step.user_buffers.named():
            yield ("buffer", name), digest(buffer)

    def _compare(self) -> None:
        """After the passes: name each change."""
        if self._tensors:
            now = dict(self._digests())
            written = {n for n, before in self._tensors.items() if now.get(n) != before}
            buffers = self.step.user_buffers
            buffers.written |= {n for n, _ in buffers.named() if ("buffer", n) in written}
            for kind, name in sorted(written):
                if kind == "weight":
                    weight = f"the weight {name!r}"
                    writes = f"{WRITES_WEIGHT} {name!r}: {SAMPLES}"
                    self.findings[weight] = f"forward or backward {writes}"
            for name in sorted(buffers.written):  # even with the same content
                self.findings[name] = f"the model writes {name!r} in its forward pass: {SAMPLES}"
        for name, token in self._plain.items():
            before = self._begun.get(name)
            if before is None or before == token:
                continue
            if token[0] == "generator":
                self.findings[name] = f"forward or loss draws from {name!r}, {OWN}"
            elif token[0] != "number" and self.contents and token[1][0] == before[1][0]:
                self.tensors.add(name)
                self.findings[name] = f"forward or loss writes {name!r}: {SAMPLES}"
            elif token[0] == "number" and self._changes.get(name, 0) > 1:
                change = f"{before[1]} -> {token[1]}"
                self.findings[name] = f"forward or loss changes {name!r} ({change}): {COUNTS}"


def hook_makes_again(model: nn.Module, name: str, device: torch.device) -> bool:
    """Whether hooks before forward recompute this tensor of a module, from weights alone.

    The hooks of `nn.utils.weight_norm` and `prune` do, whatever the input is. Changes that the
    hooks make here are restored.
    """
    path, _, attribute = name.rpartition(".")
    module = dict(model.named_modules()).get(path)
    if module is None or attribute not in vars(module) or not module._forward_pre_hooks:
        return False
    roots, before = [("", module)], _token_of(module, attribute)
    put_back = plain_state_copy(roots, None)
    buffers = [(b, b.detach().clone()) for b in module.buffers()]
    try:
        with kept_random_streams(device), torch.enable_grad():
            for hook in filter(_is_of_user, list(module._forward_pre_hooks.values())):
                hook(module, ())
            return _token_of(module, attribute) == before
    except Exception:  # a hook that reads the inputs
        return False
    finally:
        put_back()
        for buffer, content in buffers:
            buffer.detach().copy_(content)


def _is_of_user(hook: Any) -> bool:
    """Whether a hook is the user's, and not one that gathers or counts."""
    function = getattr(hook, "func", hook)  # of a partial
    where = getattr(function, "__module__", None) or type(function).__module__
    return not where.startswith(("allranks.", "torch.distributed."))


def _token_of(module: nn.Module, attribute: str) -> Token | None:
    return read([("", {attribute: vars(module)[attribute]})]).get(attribute)


def changed_by_reading(before: dict[str, Token], after: dict[str, Token]) -> Named:
    """Generators and counters that reading samples has changed, each with a sentence."""
    findings: Named = {}
    for name, token in after.items():
        was = before.get(name)
        if was is None or was == token:
            continue
        if token[0] == "generator":
            findings[name] = f"reading samples draws from {name!r}, {OWN}"
        elif token[0] == "number" and type(token[1]) is int and token[1] > was[1]:
            change = f"{was[1]} -> {token[1]}"
            findings[name] = f"reading samples changes {name!r} ({change}): it depends on the rank"
    return findings
