"""Records the numbers of the first steps of a script, for `check --against` to compare two.

Samples that reached modules in training, and tensors: losses, gradients, numbers of the optimizer,
weights, buffers. It calls no collective and draws no random number. Values go to `steps/PID.bin`,
in 64 bits, as a linear function of each tensor: up to `EXACT` elements themselves (`EXACT_ROW` of
one axis); of more, `BUCKETS` sums of elements, each with the sign of its place in the whole tensor.
So parts of a `DTensor` add up to the whole, and the norm of a difference of sums estimates that of
the difference (count sketch: Charikar, Chen and Farach-Colton 2002).
"""

from __future__ import annotations

import importlib
import math
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

from allranks.alive import instances_of
from allranks.tools.script_check.record.facts import (
    ScriptFacts,
    StepCounts,
    drawn_since,
    note_before,
    random_states,
    tensors_in,
    wrap,
)
from allranks.tools.script_check.record.stepping import names_of

STEPS_IN = "ALLRANKS_STEPS"
"""The variable that asks for it; its value is the number of steps."""
OPERATORS_AT = "ALLRANKS_OPERATORS"
"""The variable that asks for the operators of one step instead; its value is the step, from 1."""
BEFORE, LOSS, GRADIENT = "weight before training", "loss", "gradient"
RATE, WEIGHT, BUFFER = "rate", "weight", "buffer"
EXACT, EXACT_ROW, BUCKETS, SIGNS = 4096, 1 << 17, 256, 1 << 20
MOST_ROWS = 8192  # of one step; of a kind that has more none are written
WITHOUT_EFFECT = ("params", "foreach", "fused", "capturable", "differentiable", "initial_lr")
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def named_once(tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Tensors by their names without wrappers; the second of one name is `name #2`."""
    named: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for name, tensor in tensors:
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        counts[name := name.removeprefix("module.")] += 1
        named[name if counts[name] == 1 else f"{name} #{counts[name]}"] = tensor
    return named


class StepValues:
    """The numbers of the first `most` steps of this process."""

    def __init__(self, torch: Any, facts: ScriptFacts, progress: StepCounts, most: int) -> None:
        self.torch, self.facts, self.progress, self.most = torch, facts, progress, most
        self._parameters: dict[int, dict[str, Any]] = {}
        self._modules: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        self._file: Any = None
        self._states = random_states(torch)
        generator = torch.Generator().manual_seed(1)  # that of the script is left alone
        self._signs = torch.randint(0, 2, (SIGNS,), generator=generator) * 2.0 - 1.0
        self._new_step()

    def _new_step(self) -> None:
        self._losses: list[Any] = []
        self._rows: dict[str, list[int] | None] = defaultdict(list)
        self._tensors: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._autocast: str | None = None
        self._forward: Any = None
        self._depth = 0

    def install(self) -> None:
        """Add hooks to all modules, until the last step that is recorded; wrap backward."""
        module, guarded = importlib.import_module("torch.nn.modules.module"), self.facts.guarded
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are")
        before, after = guarded(self._enter), guarded(self._leave)
        self._handles = [
            module.register_module_forward_pre_hook(before),
            module.register_module_forward_hook(after, with_kwargs=True, always_call=True),
        ]
        note_before(self.torch.autograd, "backward", guarded(self._begun))

    def _is_skipped(self) -> bool:
        """Whether a forward is only traced, or recomputed in a backward pass."""
        is_traced: bool = self.torch.compiler.is_compiling()
        return is_traced or bool(self.torch._C._current_graph_task_id() >= 0)

    def _enter(self, module: Any, args: Any) -> None:
        if self._is_skipped():
            return
        self._depth += 1
        device = next((t.device.type for t in tensors_in(self.torch, args)), "cpu")
        if self.torch.is_autocast_enabled(device):
            self._autocast = str(self.torch.get_autocast_dtype(device))[6:]
        if self._depth == 1 and module.training and self.torch.is_grad_enabled():
            self._modules[module] = None
            self._forward = self._forward or self.facts.where()
            self._add_rows(args)

    def _leave(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self._is_skipped():
            return
        self._depth -= 1
        if self._depth == 0 and module.training and self.torch.is_grad_enabled():
            self._add_rows(kwargs)  # which torch does not give to hooks before a forward

    def _add_rows(self, batch: Any) -> None:
        """Add digests of the rows of tensors that need no gradient, by type and shape."""
        for tensor in tensors_in(self.torch, batch):
            is_plain = not (tensor.requires_grad or hasattr(tensor, "to_local"))
            if is_plain and tensor.dim() and tensor.numel():
                kind = f"{str(tensor.dtype)[6:]} {tuple(tensor.shape[1:])}"
                rows = self._rows[kind]
                if rows is None or len(rows) + len(tensor) > MOST_ROWS:
                    self._rows[kind] = None
                else:
                    flat = tensor.detach().cpu().reshape(len(tensor), -1).contiguous()
                    rows += map(crc32, flat.view(self.torch.uint8).numpy())

    def _begun(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        roots = tensors if isinstance(tensors, list | tuple) else [tensors]
        if self._handles and len(self._losses) < MOST_ROWS:
            self._losses += [r.detach().clone().reshape(()) for r in roots if r.numel() == 1]

    def before(self, number: int, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Record gradients before a step; or after its closure, which computes them."""
        if not self._handles:
            return None
        if number not in self._parameters:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            names = names_of(self.torch, parameters)
            named = [(names.get(id(p), f"number {at}"), p) for at, p in enumerate(parameters)]
            self._parameters[number] = named_once(named)
            self._add_all(BEFORE, self._parameters[number])
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        note = self.facts.guarded(self._gradients)
        if closure is None:
            note(number, optimizer)
            return None

        def with_note() -> Any:
            result = closure()
            note(number, optimizer)
            return result

        return args[:1], {**kwargs, "closure": with_note}

    def _gradients(self, number: int, optimizer: Any) -> None:
        if GRADIENT in self._tensors:  # a closure that is called again, as by LBFGS
            return
        scale = float(getattr(optimizer, "grad_scale", None) or 1.0)  # a fused step unscales itself
        gradients = {name: p.grad for name, p in self._parameters[number].items()}
        self._add_all(GRADIENT, {name: g for name, g in gradients.items() if g is not None}, scale)
        for at, group in enumerate(optimizer.param_groups):
            for name in [name for name in group if name not in WITHOUT_EFFECT]:
                values = group[name] if isinstance(group[name], list | tuple) else [group[name]]
                if all(isinstance(value, int | float | self.torch.Tensor) for value in values):
                    numbers = self.torch.tensor([*map(float, values)], dtype=self.torch.float64)
                    self._add_all(RATE, {f"{name} of group {at}": numbers})

    def after(self, number: int, optimizer: Any) -> None:
        """Write the step, with weights and buffers as it leaves them."""
        if not self._handles:
            return
        drew, self._states = drawn_since(self.torch, self._states), random_states(self.torch)
        scale = self.progress.scaler.get_scale() if self.progress.scaler else 1.0
        if self._losses:
            self._add_all(LOSS, {LOSS: sum(self._losses)}, scale)
        self._add_all(WEIGHT, self._parameters[number])
        buffers = [named for module in self._modules for named in module.named_buffers()]
        self._add_all(BUFFER, named_once({id(b): (name, b) for name, b in buffers}.values()))
        self.facts.write(
            "values",
            optimizer=number,
            name=type(optimizer).__name__,
            file=self._file.name,
            where=self.facts.where(),
            forward=self._forward,
            backward=self.progress.lines[-1][0] if self.progress.lines else None,
            autocast=self._autocast,
            rows=self._rows,
            tensors=self._tensors,
            states={name: self._states[name] for name in drew},
        )
        self._file.flush()
        self._new_step()
        self.most -= 1
        for handle in self._handles if self.most == 0 else ():
            handle.remove()
        self._handles = self._handles if self.most else []

    def _add_all(self, kind: str, tensors: dict[str, Any], scale: float = 1.0) -> None:
        """Write the values of tensors, and note where they stand in the file, in its numbers."""
        if self._file is None:
            folder = os.path.join(self.facts.folder, "steps")
            os.makedirs(folder, exist_ok=True)
            self._file = open(os.path.join(folder, f"{os.getpid()}.bin"), "wb")
        for name, tensor in tensors.items():
            odd = {type(placement).__name__ for placement in getattr(tensor, "placements", ())}
            why = ", ".join(odd - {"Shard", "Replicate", "Partial"})
            why = "a flat part of FSDP" if hasattr(tensor, "_fsdp_flattened") else why
            about = {"name": name, "why": why, "shape": tensor.shape}
            about |= {"dtype": str(tensor.dtype)[6:], "parts": hasattr(tensor, "to_local")}
            if not why:
                begin = self._file.tell() // 8
                values = (self._linear(tensor.detach()) / scale).cpu().numpy()
                self._file.write(memoryview(values))
                about["at"] = begin, begin + len(values)
            self._tensors[kind].append(about)

    def _linear(self, tensor: Any) -> Any:
        """The values of a tensor, or what its local part adds to those of the whole."""
        shape, index, copies, torch = tensor.shape, None, 1, self.torch
        if hasattr(tensor, "to_local"):
            index, copies = self._index_of(tensor)
            tensor = tensor.to_local()
        tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        most = EXACT_ROW if len(shape) == 1 else EXACT
        flat, is_exact = tensor.reshape(-1), math.prod(shape) <= most
        if is_exact and index is None:
            return flat.double()
        wide, signs = flat if flat.dtype is torch.float64 else flat.float(), self._signs
        totals = wide.new_zeros(math.prod(shape) if is_exact else BUCKETS, dtype=torch.float64)
        if index is not None:
            signed = wide if is_exact else wide * signs.to(wide.device)[index % SIGNS]
            return totals.index_add(0, index % len(totals), signed.double() / copies)
        for part in wide.split(SIGNS):
            signed, even = part * signs[: len(part)].to(part.device), len(part) // BUCKETS * BUCKETS
            totals += signed[:even].view(-1, BUCKETS).sum(0, dtype=torch.float64)
            totals[: len(part) - even] += signed[even:]
        return totals

    def _index_of(self, tensor: Any) -> tuple[Any, int]:
        """The places of the local elements in the whole, and how many ranks hold each."""
        find = importlib.import_module("torch.distributed.tensor._utils")
        mesh, placements = tensor.device_mesh, tensor.placements
        local, offset = find.compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        index = self.torch.zeros((), dtype=self.torch.int64, device=tensor.to_local().device)
        for length, start, whole in zip(local, offset, tensor.shape, strict=True):
            places = self.torch.arange(length, device=index.device) + start
            index = index[..., None] * whole + places
        copies = [mesh.size(axis) for axis, p in enumerate(placements) if p.is_replicate()]
        return index.reshape(-1), math.prod(copies)


class StepOperators:
    """The operators of step `at`, from its first forward in training to its optimizer's step."""

    def __init__(self, torch: Any, facts: ScriptFacts, at: int) -> None:
        self.torch, self.facts, self._left = torch, facts, at
        self._recording = ExitStack()

    def install(self) -> None:
        """Wrap calls of modules: a hook of a module is too late to record its own call."""
        start, torch = self.facts.guarded(self._start), self.torch

        def call(original: Any, module: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self._left == 1 and module.training and torch.is_grad_enabled():
                self._left = 0
                start(module)
                return torch.nn.Module.__call__(module, *args, **kwargs)
            return original(module, *args, **kwargs)

        wrap(torch.nn.Module, "__call__", call)

    def _start(self, module: Any) -> None:
        recorder = importlib.import_module("allranks.torch.witness.operators")
        modules = instances_of(self.torch.nn.Module)
        whole = [[*m.modules()] for m in modules if "_modules" in m.__dict__]
        model = max((parts for parts in whole if module in parts), key=len)[0]
        rank, folder = int(os.environ.get("RANK", "0")), Path(self.facts.folder, "operators")
        self._recording.enter_context(recorder.recorded_operators(folder, rank, model))

    def before(self, number: int, optimizer: Any, args: Any, kwargs: Any) -> None:
        """End the record, unless a closure has yet to compute the gradients."""
        self._recording.close()

    def after(self, number: int, optimizer: Any) -> None:
        """Count the step."""
        self._recording.close()
        self._left -= 1
