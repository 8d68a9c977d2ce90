"""Events between two steps of an optimizer: backwards, forwards that reduce, schedules.

A window is the time from one step to the next. Windows of one kind are written once, and counted.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from allranks.alive import instances_of
from allranks.tools.script_check.record.facts import (
    MOST_IN_A_WINDOW,
    ScriptFacts,
    StepCounts,
    digest_of,
    drawn_since,
    leaves_in,
    note_after,
    note_before,
    random_states,
    tensors_in,
    wrap,
)

MOST_PROBED, MOST_KINDS = 64, 200
PROBED_NUMBERS = 16
SCALED_LIMIT = 1000
"""A limit of a thousandth of the scale, or more, is taken for one that is scaled, too."""
MEAN = 1
"""The code that torch's losses save for `reduction="mean"`."""


class Stepping:
    """Optimizers and their schedules."""

    def __init__(
        self, torch: Any, facts: ScriptFacts, progress: StepCounts, replicas: Replicas
    ) -> None:
        self.torch, self.facts, self.progress, self.replicas = torch, facts, progress, replicas
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.steps: Counter[int] = Counter()
        self._open: list[int] = []
        self._windows: dict[tuple[Any, ...], int] = {}
        self._counts: list[int] = []
        self._rates: dict[str, list[Any]] = {}
        self._clip_line: tuple[str, int] | None = None
        self._clipped, self._unscaled = set[int](), set[int]()
        self._finished = False
        self.around: list[Callable[..., Any]] = []
        """For `check --against`: what records the numbers before a step, and after it."""

    def install(self) -> None:
        """Wrap backward and GradScaler; register hooks around the steps of every optimizer."""
        optimizer = sys.modules[self.torch.optim.Optimizer.__module__]
        before, after = self.facts.guarded(self._before), self.facts.guarded(self._after)
        optimizer.register_optimizer_step_pre_hook(before)
        optimizer.register_optimizer_step_post_hook(after)
        for holder in (optimizer.Optimizer, self.torch.nn.Module):
            note_before(holder, "zero_grad", lambda *a, **k: self.progress.lines.clear())
        note_before(self.torch.autograd, "backward", self.facts.guarded(self._begun))
        note_after(self.torch.autograd, "backward", self.facts.guarded(self._backward_done))
        scaler = getattr(getattr(self.torch, "amp", None), "GradScaler", None)
        if scaler is not None:
            note_before(scaler, "scale", self.facts.guarded(self._scaled))
            note_before(scaler, "unscale_", self.facts.guarded(self._unscale))
            note_before(scaler, "step", self.facts.guarded(self._step_scaled))
            module = sys.modules["torch.nn.utils.clip_grad"]
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                clipping = partial(self._clipping, self.facts.guarded(self._clip))
                setattr(self.torch.nn.utils, name, wrap(module, name, clipping))

    def _clipping(
        self, note: Any, original: Any, /, parameters: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function that clips, and note what it did."""
        is_one = isinstance(parameters, self.torch.Tensor)
        parameters = [parameters] if is_one else list(parameters)  # it may be a generator
        norm = original(parameters, *args, **kwargs)
        note(parameters, norm, *args, **kwargs)
        return norm

    def _clip(self, parameters: list[Any], norm: Any, *args: Any, **kwargs: Any) -> None:
        """Note scaled gradients that a limit has changed, unless the limit is scaled, too."""
        scaler, scaled = self.progress.scaler, {id(p) for p in parameters} - self._unscaled
        if scaler is None or not scaled:
            return
        limit: Any = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value"))
        if limit * SCALED_LIMIT < scaler.get_scale() and (norm is None or norm > limit):
            self._clip_line = self.facts.where()
            self._clipped |= scaled

    def _unscale(self, scaler: Any, optimizer: Any) -> None:
        self._unscaled |= _ids_of(optimizer)

    def _step_scaled(self, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Write the first clip of gradients that were still scaled before this step."""
        ids = _ids_of(optimizer) if self._clipped or self._unscaled else set()
        is_plain = type(scaler).unscale_ is self.torch.amp.GradScaler.unscale_  # else not seen
        if is_plain and ids & self._clipped and (scale := scaler.get_scale()) != 1:
            self.facts.write("clipped", where=self._clip_line, scale=scale)
        self._unscaled -= ids
        self._clipped -= ids

    def _scaled(self, scaler: Any, *args: Any, **kwargs: Any) -> None:
        self.progress.scaler = scaler if scaler.is_enabled() else self.progress.scaler

    def number_of(self, optimizer: Any) -> int:
        """The number of an optimizer, in the order of first steps or schedules."""
        return self._numbers.setdefault(optimizer, len(self._numbers))

    def _begun(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        root = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
        self.progress.backwards += 1
        lines, is_probed = self.progress.lines, sum(self._counts) < MOST_PROBED
        if lines and is_probed and self.progress.probes and not any(self._probe() or ()):
            lines.clear()  # gradients were cleared by hand
        if len(lines) < MOST_IN_A_WINDOW:  # a script may never step
            part = self.progress.batch and (*self.progress.batch, self.progress.input)
            lines.append((self.facts.where(), is_plain_mean(root), part))

    def _backward_done(self, *args: Any, **kwargs: Any) -> None:
        progress = self.progress
        if len(progress.lines) > 1 and sum(self._counts) < MOST_PROBED:
            progress.last_gradient = self._probe()

    def _probe(self) -> list[float] | None:
        numbers: list[float] = []
        for parameter in self.progress.probes:
            if parameter.grad is not None and not hasattr(parameter.grad, "to_local"):
                numbers += parameter.grad.detach().reshape(-1)[:PROBED_NUMBERS].tolist()
        return numbers or None

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        number = self.number_of(optimizer)
        if number in self._open:  # its last step raised
            self._open = self._open[: self._open.index(number)]
        self._open.append(number)
        if len(self._open) > 1:  # an optimizer within another, as in ZeroRedundancyOptimizer
            return None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.progress.probes = [parameters[0], parameters[-1]]
        if self.progress.steps == 0:
            self.facts.guarded(self.replicas.write_sharded)()
        if self.steps[number] == 0:
            self._write_optimizer(number, optimizer, parameters)
        return self.around[0](number, optimizer, args, kwargs) if self.around else None

    def _write_optimizer(self, number: int, optimizer: Any, parameters: list[Any]) -> None:
        loose = self.replicas.outside(number, parameters)
        plain = {name: p for name, p in loose.items() if not hasattr(p, "to_local")}
        sent_names = [n for n, p in plain.items() if p.grad.data_ptr() in self.progress.data_ptrs]
        self.facts.write(
            "optimizer",
            id=number,
            name=type(optimizer).__name__,
            where=self.facts.where(),
            replicas=[replica.number for replica in self.replicas.of(parameters)],
            outside={name: list(p.shape) for name, p in plain.items()},
            sent=sent_names,
        )
        self.replicas.digest_loose(number, 0)

    def _write_window(self, number: int) -> None:
        progress = self.progress
        lines = [where for where, *_ in progress.lines]
        probed = progress.last_gradient
        parts = {part for *_, part in progress.lines}
        is_split = len(parts) > 1 or None in parts  # else there are several tasks
        accumulated = len(lines) > 1 == len(set(lines)) and is_split and probed is not None
        is_mean = bool(lines) and all(mean for _, mean, _ in progress.lines)
        gradients = [p.grad for p in progress.probes if p.grad is not None]
        unchanged = probed == self._probe() if accumulated else None
        kind = (
            number,
            len(lines),
            accumulated,
            is_mean and progress.scaler is None,
            unchanged,
            tuple(progress.forwards[:64]),
            any(gradient.data_ptr() in progress.data_ptrs for gradient in gradients),
        )
        if kind not in self._windows:
            if len(self._windows) == MOST_KINDS:
                return
            self._windows[kind] = len(self._counts)
            self._counts.append(0)
            self.facts.write(
                "window",
                id=self._windows[kind],
                optimizer=number,
                step=self.steps[number] + 1,
                where=self.facts.where(),
                backwards=len(lines),
                backward_where=lines[-1] if lines else None,
                accumulated=accumulated,
                is_mean=kind[3],
                unchanged=unchanged,
                forwards=list(kind[5]),
                sent=kind[6],
                batch=progress.batch,
            )
        self._counts[self._windows[kind]] += 1

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        number = self.number_of(optimizer)
        if number in self._open:
            self._open = self._open[: self._open.index(number)]
        if self._open:
            return
        self._write_window(number)  # not before: a closure may have made the last backward
        if self.around:
            self.around[1](number, optimizer)
        self.steps[number] += 1
        self._rates[str(number)] = [group.get("lr", 0.0) for group in optimizer.param_groups]
        self.progress.steps += 1
        self.progress.new_window()
        if is_looked_at(self.steps[number]):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for replica in self.replicas.of(parameters):
                self.replicas.digest(replica, self.steps[number])
            self.replicas.digest_loose(number, self.steps[number])

    def finish(self) -> None:
        """Write how often each kind of window occurred."""
        if not self._finished:
            self._finished = True
            steps = {str(number): count for number, count in self.steps.items()}
            scaled = self.progress.scaler is not None
            rates = {key: [float(rate) for rate in row] for key, row in self._rates.items()}
            counts = {"steps": steps, "scaled": scaled, "rates": rates}
            self.facts.write("counts", windows=self._counts, **counts)


def _ids_of(optimizer: Any) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


class Schedules:
    """Learning-rate schedulers, and their steps relative to those of their optimizers."""

    def __init__(self, torch: Any, facts: ScriptFacts, stepping: Stepping) -> None:
        self.torch, self.facts, self.stepping = torch, facts, stepping
        self._depth = 0
        self._by_scheduler: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        self._all: list[dict[str, Any]] = []

    def install(self) -> None:
        """Wrap `step` and `__init__` of each class; nested calls are the class's own."""
        module, note = self.torch.optim.lr_scheduler, self.facts.guarded(self._note)

        def counted(original: Any, scheduler: Any, /, *args: Any, **kwargs: Any) -> Any:
            if original.__name__ == "step" and self._depth == 0:
                note(scheduler, args, kwargs)
            self._depth += 1
            try:
                return original(scheduler, *args, **kwargs)
            finally:
                self._depth -= 1

        for name, kind in inspect.getmembers(module, inspect.isclass):
            if not issubclass(kind, module.LRScheduler) or kind.__module__ != module.__name__:
                continue
            for method in ("step", "__init__"):
                if method in vars(kind) and not name.startswith("_"):
                    wrap(kind, method, counted)

    def _note(self, scheduler: Any, args: Any, kwargs: Any) -> None:
        name = type(scheduler).__name__
        if name != "ReduceLROnPlateau" and (args or kwargs.get("epoch") is not None):
            return  # an explicit epoch: the number of steps does not matter
        optimizer = self.stepping.number_of(scheduler.optimizer)
        counts = self._by_scheduler.get(scheduler)
        if counts is None:
            counts = {"name": name, "optimizer": optimizer, "where": self.facts.where()}
            counts |= {"between": Counter(), "last": 0, "run": 0, "first": 0, "wrapped": True}
            self._by_scheduler[scheduler] = counts
            self._all.append(counts)
        if counts["wrapped"]:
            counts["wrapped"] = self.facts.where(nearest=True) != self.facts.where()
        now = self.stepping.steps[optimizer]
        if now == 0:
            counts["first"] += 1
            return
        if now != counts["last"] and counts["run"]:
            counts["between"][counts["run"]] += 1
            counts["run"] = 0
        counts["last"], counts["run"] = now, counts["run"] + 1

    def finish(self) -> None:
        """Write for each: its steps before the optimizer's first, and how many came in a row."""
        for number, counts in enumerate(self._all):
            if counts["run"]:
                counts["between"][counts["run"]] += 1
            between = {str(run): count for run, count in counts["between"].items()}
            del counts["last"], counts["run"]
            self.facts.write("scheduler", id=number, **{**counts, "between": between})
        self._all = []


def is_plain_mean(root: Any) -> bool:
    """Whether a loss is a mean over its samples, neither divided nor multiplied since."""
    function = getattr(root, "grad_fn", None)
    if function is None:
        return False
    name = type(function).__name__
    return name.startswith("MeanBackward") or (
        "LossBackward" in name and getattr(function, "_saved_reduction", None) == MEAN
    )


# --- replicas ------------------------------------------------------------------------------------
# Modules that DDP keeps equal, and optimizer parameters outside of any DDP.
#
# Their digests are taken after steps 1, 8, 64, … and at the end: replicas must have equal ones.


MOST_DRAWS, MOST_INPUTS, LEAST_INPUT = 8, 4, 17
EVERY_POWER_OF = 8
END = -1


class WatchedDDP:
    """One DDP of this process."""

    def __init__(self, number: int, module: Any) -> None:
        self.number, self.module, self.forwards, self.ended = number, ref(module), 0, False
        self.parameters = {id(p): name for name, p in module.module.named_parameters()}
        self.reduced = {id(p) for p in module.module.parameters() if p.requires_grad}


class Replicas:
    """All DDPs of this process, and the parameters of optimizers outside of them."""

    def __init__(self, torch: Any, facts: ScriptFacts, progress: StepCounts) -> None:
        self.torch, self.facts, self.progress = torch, facts, progress
        self.known: dict[int, WatchedDDP] = {}
        self._loose: dict[int, dict[str, Any]] = {}
        self._newest: list[Any] = []

    def install(self) -> None:
        """Wrap DDP's constructor, its forward, and `register_comm_hook`."""
        ddp = self.torch.nn.parallel.DistributedDataParallel
        forward, drawn = self.facts.guarded(self._forward), self.facts.guarded(self._drawn)

        def running(original: Any, module: Any, /, *args: Any, **kwargs: Any) -> Any:
            before = forward(module, (args, kwargs))
            result = original(module, *args, **kwargs)
            if before:
                drawn(module, before)
            return result

        note_after(ddp, "__init__", self.facts.guarded(self._created))
        wrap(ddp, "forward", running)
        note_before(ddp, "register_comm_hook", self.facts.guarded(self._hooked))
        join = sys.modules["torch.distributed.algorithms.join"].Join
        note_before(join, "__enter__", lambda join: self.facts.write("joined"))

    def _created(self, result: None, module: Any, /, *args: Any, **kwargs: Any) -> None:
        number = len(self.known)
        self.known[id(module)] = replica = WatchedDDP(number, module)
        self._newest = [module]  # keeps it alive to the end, even if its function has returned
        dist = self.torch.distributed
        group = dist.get_process_group_ranks(module.process_group)
        self.progress.count_collective(is_all=len(group) == dist.get_world_size())
        self.facts.write(
            "replica",
            id=number,
            where=self.facts.where(),
            group=group,
            broadcast_buffers=module.broadcast_buffers,
            tensors=len(replica.parameters),
        )

    def _hooked(self, module: Any, *args: Any, **kwargs: Any) -> None:
        self.facts.write("hooked", id=self.known[id(module)].number, where=self.facts.where())

    def _forward(self, module: Any, inputs: Any) -> dict[str, int] | None:
        if not (module.module.training and self.torch.is_grad_enabled()):
            return None  # Lightning leaves the DDP itself in eval mode after a validation
        replica = self.known[id(module)]
        replica.forwards += 1
        if len(self.progress.forwards) < MOST_IN_A_WINDOW:
            reduces = bool(module.require_backward_grad_sync)
            self.progress.forwards.append((replica.number, reduces))
        leaves = list(leaves_in(inputs, 4))
        tensors = [t for t in tensors_in(self.torch, leaves) if not hasattr(t, "to_local")]
        self.progress.input = tensors[0].data_ptr() if tensors else 0
        if replica.forwards <= MOST_INPUTS:
            kinds = self.torch.Tensor, int, float, str, type(None)
            is_open = all(isinstance(leaf, kinds) for leaf in leaves)
            tensors = [t for t in tensors if is_open and t.dim() and t.numel() >= LEAST_INPUT]
            digests = [digest_of(self.torch, tensor) for tensor in tensors]
            messages = self.progress.large_collectives + self.progress.to_one
            values = {"digests": digests, "sent": messages, "where": self.facts.where()}
            self.facts.write("inputs", id=replica.number, **values)
        watched = replica.forwards <= MOST_DRAWS
        return random_states(self.torch, _device_of(module)) if watched else None

    def _drawn(self, module: Any, before: dict[str, int]) -> None:
        replica = self.known[id(module)]
        if drew := drawn_since(self.torch, before, _device_of(module)):
            number, where = replica.forwards, self.facts.where()
            self.facts.write(
                "draws", of="replica", id=replica.number, number=number, before=drew, where=where
            )

    def write_sharded(self) -> None:
        """Write each group over which FSDP or DeepSpeed reduces gradients, once.

        FSDP2 counts only with a mesh of one axis: others may belong to another parallelism.
        """
        module = sys.modules.get("torch.distributed.fsdp")
        first = getattr(module, "FullyShardedDataParallel", None)
        second = getattr(module, "FSDPModule", None)
        engine = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", None)
        reducing = [thing.process_group for thing in instances_of(first)] if first else []
        reducing += [e.data_parallel_group for e in instances_of(engine)] if engine else []
        groups = {tuple(self.torch.distributed.get_process_group_ranks(g)) for g in reducing}
        for thing in instances_of(second) if second else ():
            meshes = {p.device_mesh for p in thing.parameters() if hasattr(p, "device_mesh")}
            groups |= {tuple(mesh.mesh.tolist()) for mesh in meshes if mesh.ndim == 1}
        for group in sorted(groups):
            self.facts.write("sharded", group=group)

    def of(self, parameters: list[Any]) -> list[WatchedDDP]:
        """The DDPs that hold any of these parameters."""
        ids = {id(parameter) for parameter in parameters}
        return [replica for replica in self._alive() if ids & replica.parameters.keys()]

    def _alive(self) -> list[WatchedDDP]:
        """Replicas that are still alive: ids of freed parameters may be reused."""
        return [replica for replica in self.known.values() if replica.module() is not None]

    def outside(self, optimizer: int, parameters: list[Any]) -> dict[str, Any]:
        """Parameters with a gradient that no DDP holds, by name; later digests use them too."""
        owned = {key for replica in self._alive() for key in replica.parameters}
        loose = [p for p in parameters if id(p) not in owned and p.grad is not None]
        if loose and optimizer not in self._loose:
            names = names_of(self.torch, loose)
            self._loose[optimizer] = {
                names.get(id(p), f"number {i}"): p for i, p in enumerate(loose)
            }
        return self._loose.get(optimizer, {})

    def digest(self, replica: WatchedDDP, step: int) -> None:
        """Write the digests of all tensors of a replica."""
        module = replica.module()
        if module is None:
            return
        buffers = {} if module.broadcast_buffers else dict(module.module.named_buffers())
        named, reduced = dict(module.module.named_parameters()), replica.reduced
        unreduced = [name for name, p in named.items() if p.requires_grad and id(p) not in reduced]
        self.facts.write(
            "digest",
            of="replica",
            id=replica.number,
            step=step,
            parameters=self._digests(named),
            buffers=self._digests(buffers),
            forwards=replica.forwards,
            unreduced=unreduced,
        )

    def digest_loose(self, optimizer: int, step: int) -> None:
        """Write the digests of the optimizer's parameters outside of every DDP."""
        if loose := self._loose.get(optimizer):
            digests = self._digests(loose)
            self.facts.write(
                "digest", of="loose", id=optimizer, step=step, parameters=digests, buffers={}
            )

    def _digests(self, tensors: dict[str, Any]) -> dict[str, int]:
        digests = {name: digest_of(self.torch, tensor) for name, tensor in tensors.items()}
        return {name: value for name, value in digests.items() if value is not None}

    def finish(self) -> None:
        """Write the digests at the end, once: before the group is destroyed, or at exit."""
        for replica in self.known.values():
            if not replica.ended:
                replica.ended = True
                self.digest(replica, END)
        for optimizer in list(self._loose):
            self.digest_loose(optimizer, END)
            del self._loose[optimizer]
        self._newest = []


def _device_of(module: Any) -> str:
    return str(getattr(module, "device", "cpu") or "cpu").partition(":")[0]


def is_looked_at(step: int) -> bool:
    """Whether digests are taken after this step: 1, 8, 64, 512, …"""
    while step > 1 and step % EVERY_POWER_OF == 0:
        step //= EVERY_POWER_OF
    return step == 1


def names_of(torch: Any, parameters: list[Any]) -> dict[int, str]:
    """The longest name of each parameter in any module of this process."""
    wanted = {id(p) for p in parameters}
    names: dict[int, str] = {}
    for thing in instances_of(torch.nn.Module):
        if "_parameters" not in thing.__dict__:
            continue
        for name, parameter in thing.named_parameters():
            if id(parameter) in wanted and len(name) > len(names.get(id(parameter), "")):
                names[id(parameter)] = name
    return names
