"""What the passes of a step change beside gradients: looked at before and after, and named.

The result is the same on any number of ranks because a pass is a function of weights, samples and
keyed random numbers. Whatever else it reads and writes (a counter, a generator, a buffer, a weight)
follows how many passes there are and which samples are in them, and so the number of ranks. In the
first step contents are compared, as versions do not count every way to write; in the second, when
modules hold what the first left on them, only numbers and generators. No pass is added,
and nothing is changed.
"""

from __future__ import annotations

import hashlib
import json
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
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
# Plain state: what a program keeps beside the weights and buffers that torch knows of.
#
# Counters, generators, arrays and tensors among the attributes of modules, of the task, of its data
# set, and of the globals of its program. The witness looks at them before and after what should
# leave them alone (`read`), and puts them back after passes of its own (`Kept`).


Roots = list[tuple[str, Any]]
"""What is looked through: the words before the names in it, and the object."""
Token = tuple[str, Any]
"""The kind of a value (`number`, `generator`, `array`, `tensor`),
and what tells two contents apart."""

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
    """What a random generator would draw next, as bytes; `None` for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state).encode()
    if isinstance(value, np.random.RandomState):
        name, keys, *rest = value.get_state(legacy=True)
        return repr((name, rest)).encode() + np.asarray(keys).tobytes()
    if isinstance(value, random.Random):
        return repr(value.getstate()).encode()
    return None


def roots_of_task(task: Any) -> Roots:
    """The task itself, and what counts or draws among the globals of its program."""
    return [("task.", task), ("global ", plain_globals(task))]


def roots_of_model(model: nn.Module, task: Any) -> Roots:
    """Every module of the model, and the task."""
    named = [(f"{name}." if name else "", module) for name, module in model.named_modules()]
    return [*named, *roots_of_task(task)]


def read(roots: Roots) -> dict[str, Token]:
    """The content of every number, generator, and small array or tensor, by name."""
    found: dict[str, Token] = {}
    for name, value in _walk(roots):
        state = generator_state(value)
        if state is not None:
            found[name] = "generator", hashlib.blake2b(state, digest_size=16).hexdigest()
        elif isinstance(value, NUMBERS) and not isinstance(value, bool):
            found[name] = "number", value
        elif isinstance(value, np.ndarray) and value.nbytes <= MOST_BYTES and value.dtype != object:
            found[name] = "array", (value.shape, hashlib.blake2b(value.tobytes()).hexdigest())
        elif isinstance(value, Tensor) and value.nbytes <= MOST_BYTES and not value.is_sparse:
            with suppress(RequestError):  # of a strategy that lets nobody read it
                content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
                digest = hashlib.blake2b(content.data).hexdigest()
                found[name] = "tensor", (tuple(value.shape), digest)
    return found


def globals_of(task: Any) -> dict[str, Any]:
    """The globals of the program that defines a task; none of a task that comes with allranks."""
    for method in ("loss", "model", "train_data"):
        own: dict[str, Any] = getattr(getattr(type(task), method, None), "__globals__", {})
        if own and not str(own.get("__name__", "")).startswith("allranks."):
            return own
    return {}


def plain_globals(task: Any) -> dict[str, Any]:
    """Those of them that count or draw."""
    return {
        name: value
        for name, value in globals_of(task).items()
        if not name.startswith("__")
        and (isinstance(value, NUMBERS) or generator_state(value) is not None)
    }


def _walk(roots: Roots) -> Iterator[tuple[str, Any]]:
    """Every value below the roots, each object once, containers before what is in them."""
    seen: set[int] = set()
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
        if items is None or id(value) in seen:
            continue
        seen.add(id(value))
        waiting.extend((inner, item, depth + 1, False) for inner, item in items)


def _items(value: Any, name: str) -> list[tuple[str, Any]] | None:
    """What is in a container or an object, with names; `None` for what has no insides."""
    dot = name if not name or name.endswith((".", " ")) else f"{name}."
    if isinstance(value, dict):
        if len(value) > MOST_ITEMS:
            return []
        return [(f"{dot}{key}", item) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        if len(value) > MOST_ITEMS:
            return []
        return [(f"{dot}{number}", item) for number, item in enumerate(value)]
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict):
        return None
    if isinstance(value, nn.Module):
        own = {key: item for key, item in own.items() if key not in MODULE_ATTRIBUTES}
        own.update(value._modules.items())
    return [(f"{dot}{key}", item) for key, item in list(own.items())]


@dataclass(frozen=True)
class Kept:
    """What plain state held at one moment; `put_back` lets it hold that again."""

    undo: tuple[Callable[[], None], ...]

    @classmethod
    def of(cls, roots: Roots, task: Any) -> Kept:
        """Keep what the roots hold now, and the numbers among the globals of the task's program."""
        values = [root for _, root in roots] + [value for _, value in _walk(roots)]
        own = globals_of(task)
        numbers = {n: v for n, v in plain_globals(task).items() if isinstance(v, NUMBERS)}
        undo = [one for value in values if (one := _undo_of(value)) is not None]
        return cls((*undo, lambda: own.update(numbers)))

    def put_back(self) -> None:
        for undo in self.undo:
            undo()


def _undo_of(value: Any) -> Callable[[], None] | None:
    """What gives `value` its content of now back, if it can change in place."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: void(value.set_state(state))
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        numbers = bits.state
        return lambda: setattr(bits, "state", numbers)
    if isinstance(value, np.random.RandomState):
        legacy = value.get_state(legacy=False)
        return lambda: value.set_state(legacy)
    if isinstance(value, random.Random):
        python = value.getstate()
        return lambda: value.setstate(python)
    if isinstance(value, np.ndarray) and value.nbytes <= MOST_BYTES and value.flags.writeable:
        array = value.copy()
        return lambda: np.copyto(value, array)
    if isinstance(value, Tensor) and value.nbytes <= MOST_BYTES and value.is_leaf:
        try:
            tensor = value.detach().clone()
        except RequestError:  # of a strategy that lets nobody read it
            return None
        return lambda: void(value.detach().copy_(tensor))
    return _undo_of_container(value)


def _undo_of_container(value: Any) -> Callable[[], None] | None:
    if isinstance(value, list):
        items = list(value)
        return lambda: value.__setitem__(slice(None), items)
    if isinstance(value, deque):
        return partial(_refill_row, value, list(value))
    if isinstance(value, (dict, set)):
        return _refill(value)
    own = getattr(value, "__dict__", None)
    is_looked_into = isinstance(own, dict) and not isinstance(value, OPAQUE_TYPES)
    return _refill(own) if is_looked_into else None


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


def _differs(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return one.keys() != other.keys() or any(one[key] is not other[key] for key in other)


def void(*_: Any) -> None:
    """Nothing, whatever was done to get there."""


Named = dict[str, str]
"""What was found to change, and a sentence on it."""

LOSS = "loss, weight or backward"
COUNTS = "the result follows the number of passes, and with it the number of ranks"
SAMPLES = "what is written follows the samples and the passes of one rank"
DRAWS = "it is keyed for the micro-batch, and which samples are in one follows the number of ranks"
UNKEYED = "it is keyed for no shard, so what is drawn follows the number of ranks"
WRITES_WEIGHT = "writes the weight"
OWN = "a generator of its own: what it draws follows how many passes there were before"


class Observer:
    """Told by the shared step where it is; `found` is what changed, on this rank.

    `roots()` gives the plain state to look at. Where each shard goes through the model `alone`,
    what is drawn from a generator that is keyed with it belongs to the shard.
    """

    def __init__(
        self, step: SharedStep, roots: Callable[[], Roots], alone: bool, contents: bool
    ) -> None:
        self.step, self.roots, self.alone = step, roots, alone
        self.found: Named = {}
        self.tensors: set[str] = set()  # of what was found, those that are no buffers
        self.contents = contents
        self._changes: dict[str, int] = {}
        self._passes = 0
        self._tensors: dict[tuple[str, str], str] = {}
        self._plain: dict[str, Token] = {}
        self._begun: dict[str, Token] = {}
        self._states: dict[str, bytes] = {}
        self._keyed: set[str] = set()

    def reached(self, where: str) -> None:
        """The step is at `where` (see `SharedStep`)."""
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
                self.found.setdefault(
                    f"{where} {name}", f"{where} draws from {name}'s own generator: {why}"
                )
        self._states = now

    def _generators(self) -> dict[str, bytes]:
        """What each generator of the process would draw next."""
        _, keys, *rest = np.random.get_state(legacy=True)
        states = {
            "Python": repr(random.getstate()).encode(),
            "NumPy": repr(rest).encode() + np.asarray(keys).tobytes(),
            "torch": torch.get_rng_state().numpy().tobytes(),
        }
        if accelerator.is_accelerator(device := self.step.scope.device):
            states["torch"] += accelerator.rng_state(device).numpy().tobytes()
        return states

    def _digests(self) -> Iterator[tuple[tuple[str, str], str]]:
        """(what it is, its name) and the digest of each tensor that is the same on all ranks."""
        model = self.step.model
        bounded = {id(m.weight) for m in model.modules() if isinstance(m, BoundedTable)}
        for name, parameter in model.named_parameters():
            # those the engine writes, alike on all ranks; and those of other ranks
            if id(parameter) not in bounded and not parameter.is_meta:
                yield ("weight", name), digest(parameter)
        for name, buffer in self.step.user_buffers.named():
            yield ("buffer", name), digest(buffer)

    def _compare(self) -> None:
        """The passes are over."""
        if self._tensors:
            now = dict(self._digests())
            written = {n for n, before in self._tensors.items() if now.get(n) != before}
            buffers = self.step.user_buffers
            buffers.written |= {n for n, _ in buffers.named() if ("buffer", n) in written}
            for what, name in sorted(written):
                if what == "weight":
                    weight = f"the weight {name!r}"
                    writes = f"{WRITES_WEIGHT} {name!r}: {SAMPLES}"
                    self.found[weight] = f"forward or backward {writes}"
            for name in sorted(buffers.written):  # those too that hold the same, written once more
                self.found[name] = f"the model writes {name!r} in its forward pass: {SAMPLES}"
        for name, token in self._plain.items():
            before = self._begun.get(name)
            if before is None or before == token:
                continue
            if token[0] == "generator":
                self.found[name] = f"forward or loss draws from {name!r}, {OWN}"
            elif token[0] != "number" and self.contents and token[1][0] == before[1][0]:
                self.tensors.add(name)
                self.found[name] = f"forward or loss writes {name!r}: {SAMPLES}"
            elif token[0] == "number" and self._changes.get(name, 0) > 1:
                change = f"{before[1]} -> {token[1]}"
                self.found[name] = f"forward or loss changes {name!r} ({change}): {COUNTS}"


def hook_makes_again(model: nn.Module, name: str, device: torch.device) -> bool:
    """Whether hooks before forward make this tensor of a module again, the same without an input.

    `nn.utils.weight_norm` and `prune` do: it follows from weights, whatever goes through the model.
    What the hooks do here is put back.
    """
    path, _, own = name.rpartition(".")
    module = dict(model.named_modules()).get(path)
    if module is None or own not in vars(module) or not module._forward_pre_hooks:
        return False
    roots, before = [("", module)], _token_of(module, own)
    kept, buffers = Kept.of(roots, None), [(b, b.detach().clone()) for b in module.buffers()]
    try:
        with kept_random_streams(device), torch.enable_grad():
            for hook in filter(_is_of_user, list(module._forward_pre_hooks.values())):
                hook(module, ())
            return _token_of(module, own) == before
    except Exception:  # one that looks at the inputs
        return False
    finally:
        kept.put_back()
        for buffer, content in buffers:
            buffer.detach().copy_(content)


def _is_of_user(hook: Any) -> bool:
    """Whether it is none of those that gather and count."""
    function = getattr(hook, "func", hook)  # of a partial
    where = getattr(function, "__module__", None) or type(function).__module__
    return not where.startswith(("allranks.", "torch.distributed."))


def _token_of(module: nn.Module, own: str) -> Token | None:
    return read([("", {own: vars(module)[own]})]).get(own)


def told_alike(found: Named, gather: Callable[[str], list[str]]) -> Named:
    """What any rank found, the same on all; every rank calls this."""
    together: Named = {}
    for text in gather(json.dumps(found)):
        for name, sentence in json.loads(text).items():
            together.setdefault(name, sentence)
    return together


def changed_by_reading(before: dict[str, Token], after: dict[str, Token]) -> Named:
    """Generators and counters that reading samples has moved on, each with a sentence."""
    found: Named = {}
    for name, token in after.items():
        was = before.get(name)
        if was is None or was == token:
            continue
        if token[0] == "generator":
            found[name] = f"reading samples draws from {name!r}, {OWN}"
        elif token[0] == "number" and type(token[1]) is int and token[1] > was[1]:
            change = f"{was[1]} -> {token[1]}"
            found[name] = f"reading samples changes {name!r} ({change}): what a rank reads decides"
    return found


def digest_of(values: list[Tensor]) -> str:
    """One digest of several tensors."""
    together = hashlib.blake2b(digest_size=16)
    for value in values:
        together.update(digest(value).encode())
    return together.hexdigest()
