"""Modules that DDP holds equal, and parameters of optimizers that it does not hold.

Digests of them are taken after steps 1, 8, 64, … and at the end: replicas must have equal ones.
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
        self._kept: list[Any] = []

    def install(self) -> None:
        """Wrap DDP's making, its forward, and the making of a hook that reduces otherwise."""
        ddp = self.torch.nn.parallel.DistributedDataParallel
        made, forward = self.facts.guarded(self._made), self.facts.guarded(self._forward)
        drawn, hooked = self.facts.guarded(self._drawn), self.facts.guarded(self._hooked)

        def making(own: Callable[..., Any]) -> Callable[..., Any]:
            def inner(self: Any, *args: Any, **kwargs: Any) -> None:
                own(self, *args, **kwargs)
                made(self)

            return inner

        def running(own: Callable[..., Any]) -> Callable[..., Any]:
            def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
                before = forward(self)
                result = own(self, *args, **kwargs)
                if before:
                    drawn(self, before)
                return result

            return inner

        def hooking(own: Callable[..., Any]) -> Callable[..., Any]:
            def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
                hooked(self)
                return own(self, *args, **kwargs)

            return inner

        wrap(ddp, "__init__", making)
        wrap(ddp, "forward", running)
        wrap(ddp, "register_comm_hook", hooking)

    def _made(self, module: Any) -> None:
        number = len(self.known)
        self.known[id(module)] = replica = WatchedDDP(number, module)
        self._kept = [module]  # the newest is there at the end, even if its function has returned
        dist = self.torch.distributed
        group = dist.get_process_group_ranks(module.process_group)
        self.progress.meet(is_all=len(group) == dist.get_world_size())
        self.facts.tell(
            "replica",
            id=number,
            where=self.facts.where(),
            group=group,
            broadcast_buffers=module.broadcast_buffers,
            tensors=len(replica.parameters),
        )

    def _hooked(self, module: Any) -> None:
        self.facts.tell("hooked", id=self.known[id(module)].number, where=self.facts.where())

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
            self.facts.tell(
                "draws", of="replica", id=replica.number, number=number, before=drew, where=where
            )

    def tell_sharded(self) -> None:
        """The groups over which FSDP cuts modules and reduces gradients, each once.

        Of FSDP2 only where its mesh has one axis: of several one may be another parallelism's.
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
            cut = [one for one in thing.parameters() if hasattr(one, "device_mesh")]
            meshes = {one.device_mesh for one in cut}
            groups |= {tuple(one.mesh.tolist()) for one in meshes if one.ndim == 1}
        for group in sorted(groups):
            self.facts.tell("sharded", group=group)

    def of(self, parameters: list[Any]) -> list[WatchedDDP]:
        """The DDPs that hold any of these."""
        ids = {id(one) for one in parameters}
        return [replica for replica in self._alive() if ids & replica.parameters.keys()]

    def _alive(self) -> list[WatchedDDP]:
        """Those that are still there: of others the ids of parameters may stand for new ones."""
        return [replica for replica in self.known.values() if replica.module() is not None]

    def outside(self, optimizer: int, parameters: list[Any]) -> dict[str, Any]:
        """Those with a gradient that no DDP holds, by their names; kept for the digests to come."""
        held = {one for replica in self._alive() for one in replica.parameters}
        loose = [p for p in parameters if id(p) not in held and p.grad is not None]
        if loose and optimizer not in self._loose:
            names = names_of(self.torch, loose)
            self._loose[optimizer] = {
                names.get(id(p), f"number {i}"): p for i, p in enumerate(loose)
            }
        return self._loose.get(optimizer, {})

    def digest(self, replica: WatchedDDP, step: int) -> None:
        """Tell the digests of all it holds."""
        module = replica.module()
        if module is None:
            return
        buffers = {} if module.broadcast_buffers else dict(module.module.named_buffers())
        self.facts.tell(
            "digest",
            of="replica",
            id=replica.number,
            step=step,
            parameters=self._digests(dict(module.module.named_parameters())),
            buffers=self._digests(buffers),
            forwards=replica.forwards,
        )

    def digest_loose(self, optimizer: int, step: int) -> None:
        """Tell the digests of what it updates outside of every DDP."""
        if loose := self._loose.get(optimizer):
            found = self._digests(loose)
            self.facts.tell(
                "digest", of="loose", id=optimizer, step=step, parameters=found, buffers={}
            )

    def _digests(self, tensors: dict[str, Any]) -> dict[str, int]:
        found = {name: digest_of(self.torch, tensor) for name, tensor in tensors.items()}
        return {name: value for name, value in found.items() if value is not None}

    def finish(self) -> None:
        """The digests at the end, once: before the group goes, or the process does."""
        for replica in self.known.values():
            if not replica.ended:
                replica.ended = True
                self.digest(replica, END)
        for optimizer in list(self._loose):
            self.digest_loose(optimizer, END)
            del self._loose[optimizer]
        self._kept = []


def is_looked_at(step: int) -> bool:
    """Whether digests are taken after this step: 1, 8, 64, 512, …"""
    while step > 1 and step % EVERY_POWER_OF == 0:
        step //= EVERY_POWER_OF
    return step == 1


def names_of(torch: Any, parameters: list[Any]) -> dict[int, str]:
    """The longest name that a module of this process has for each."""
    wanted = {id(p) for p in parameters}
    found: dict[int, str] = {}
    for thing in instances_of(torch.nn.Module):
        if "_parameters" not in thing.__dict__:
            continue
        for name, parameter in thing.named_parameters():
            if id(parameter) in wanted and len(name) > len(found.get(id(parameter), "")):
                found[id(parameter)] = name
    return found
