"""Modules that DDP keeps equal, and optimizer parameters outside of any DDP.

Their digests are taken after steps 1, 8, 64, … and at the end: replicas must have equal ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import ref

from allranks.alive import instances_of
from allranks.tools.script_check.record.facts import (
    MOST_IN_A_WINDOW,
    ScriptFacts,
    StepCounts,
    digest_of,
    random_states,
    wrap,
)

MOST_DRAWS = 8
EVERY_POWER_OF = 8
END = -1


class WatchedDDP:
    """One DDP of this process."""

    def __init__(self, number: int, module: Any) -> None:
        self.number, self.module, self.forwards, self.ended = number, ref(module), 0, False
        self.parameters = {id(p): name for name, p in module.module.named_parameters()}


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
        created, forward = self.facts.guarded(self._created), self.facts.guarded(self._forward)
        drawn, hooked = self.facts.guarded(self._drawn), self.facts.guarded(self._hooked)

        def making(original: Callable[..., Any]) -> Callable[..., Any]:
            def inner(self: Any, *args: Any, **kwargs: Any) -> None:
                original(self, *args, **kwargs)
                created(self)

            return inner

        def running(original: Callable[..., Any]) -> Callable[..., Any]:
            def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
                before = forward(self)
                result = original(self, *args, **kwargs)
                if before:
                    drawn(self, before)
                return result

            return inner

        def hooking(original: Callable[..., Any]) -> Callable[..., Any]:
            def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
                hooked(self)
                return original(self, *args, **kwargs)

            return inner

        wrap(ddp, "__init__", making)
        wrap(ddp, "forward", running)
        wrap(ddp, "register_comm_hook", hooking)

    def _created(self, module: Any) -> None:
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

    def _hooked(self, module: Any) -> None:
        self.facts.write("hooked", id=self.known[id(module)].number, where=self.facts.where())

    def _forward(self, module: Any) -> dict[str, int] | None:
        if not (module.training and self.torch.is_grad_enabled()):
            return None
        replica = self.known[id(module)]
        replica.forwards += 1
        if len(self.progress.forwards) < MOST_IN_A_WINDOW:
            reduces = bool(module.require_backward_grad_sync)
            self.progress.forwards.append((replica.number, reduces))
        device = str(getattr(module, "device", "cpu") or "cpu").partition(":")[0]
        return random_states(self.torch, device) if replica.forwards <= MOST_DRAWS else None

    def _drawn(self, module: Any, before: dict[str, int]) -> None:
        replica = self.known[id(module)]
        device = str(getattr(module, "device", "cpu") or "cpu").partition(":")[0]
        after = random_states(self.torch, device)
        drew = {name: state for name, state in before.items() if after.get(name) != state}
        if drew:
            number, where = replica.forwards, self.facts.where()
            self.facts.write(
                "draws", of="replica", id=replica.number, number=number, before=drew, where=where
            )

    def write_sharded(self) -> None:
        """Write each group over which FSDP shards modules and reduces gradients, once.

        FSDP2 counts only with a mesh of one axis: others may belong to another parallelism.
        """
        module = sys.modules.get("torch.distributed.fsdp")
        if module is None:
            return
        first, second = module.FullyShardedDataParallel, getattr(module, "FSDPModule", None)
        groups = set()
        for thing in instances_of(first):
            ranks = self.torch.distributed.get_process_group_ranks(thing.process_group)
            groups.add(tuple(ranks))
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
        self.facts.write(
            "digest",
            of="replica",
            id=replica.number,
            step=step,
            parameters=self._digests(dict(module.module.named_parameters())),
            buffers=self._digests(buffers),
            forwards=replica.forwards,
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
