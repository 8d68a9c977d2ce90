"""What the pretended device refuses, and what it counts: called in a process that has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import allranks.torch.accelerator as accelerator
from pretended import streams
from pretended.backend import install
from pretended.record import Misuse, watch
from pretended.streams import NAME, Stream

DEVICE = torch.device("privateuseone", 0)  # as torch calls it until it has a name


def on_other_stream(tensor: Tensor) -> tuple[Stream, Tensor]:
    """A stream beside the default one, and what it made of `tensor`."""
    other = accelerator.new_stream(DEVICE)
    other.wait_stream(accelerator.current_stream(DEVICE))
    with accelerator.on_stream(other):
        return other, tensor + 1


def _write_while_read(tensor: Tensor) -> None:
    on_other_stream(tensor)
    tensor.zero_()


MISUSES: dict[str, Callable[[Tensor], Any]] = {
    r"tensors of cpu and pretended:0": lambda t: t + torch.ones(3),
    r"tensors of pretended:0 and pretended:1": lambda t: t + torch.ones(3, device=f"{NAME}:1"),
    r"numpy\(\)": lambda t: t.detach().numpy(),
    r"pin_memory\(\)": lambda t: t.pin_memory(),
    r"mul.* reads what another stream writes": lambda t: on_other_stream(t)[1] * 2,
    r"tolist reads what another stream writes": lambda t: on_other_stream(t)[1].tolist(),
    r"copy reads what another stream writes": lambda t: on_other_stream(t)[1].cpu(),
    r"zero_.* writes what another stream uses": _write_while_read,
}
WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool((t > 0).all()),
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "to device, of memory that is not pinned": lambda t: torch.ones(3).to(DEVICE),
    "the same, whatever is asked": lambda t: torch.ones(3).to(DEVICE, non_blocking=True),
    "new_tensor": lambda t: t.new_tensor([1.0, 2.0]),
    "nonzero": lambda t: t.nonzero(),
    "a row by a number of the host": lambda t: t[torch.tensor([0])],
    "synchronize": lambda t: accelerator.synchronize([DEVICE]),
    "an event": lambda t: accelerator.current_stream(DEVICE).record_event().synchronize(),
}
NO_WAITS: dict[str, Callable[[Tensor], Any]] = {
    "pinned": lambda t: accelerator.pinned(torch.ones(3)).to(DEVICE, non_blocking=True),
    "to the host, beside": lambda t: t.to("cpu", non_blocking=True),
    "a number of the host": lambda t: t + torch.tensor(2.0),
    "a view": lambda t: t[1:].view(2, 1),
    "an event of another stream": lambda t: accelerator.current_stream(DEVICE).wait_event(
        accelerator.new_stream(DEVICE).record_event()
    ),
}


def are_told(argument: None) -> None:
    """Each by itself, on a tensor that is there."""
    install()
    for message, misuse in MISUSES.items():
        with pytest.raises(Misuse, match=message):
            misuse(torch.ones(3, device=DEVICE))
    for calls, count in ((WAITS, 1), (NO_WAITS, 0)):
        for name, call in calls.items():
            tensor = torch.ones(3, device=DEVICE)
            with watch() as watched:
                call(tensor)
            assert len(watched.of("wait")) == count, (name, watched.told)
    _an_event_is_enough()
    _what_arrives_late()
    _memory_given_away()


def _an_event_is_enough() -> None:
    """What is waited for may be used."""
    streams.given_away.clear()  # of the misuses
    tensor = torch.ones(3, device=DEVICE)
    other, more = on_other_stream(tensor)
    accelerator.current_stream(DEVICE).wait_stream(other)
    more.record_stream(accelerator.current_stream(DEVICE))
    assert (more * 2).tolist() == [4.0] * 3 and streams.given_away == []


def _what_arrives_late() -> None:
    """A copy that the host goes beside is no number before the host has waited for it."""
    arriving = torch.ones(3, device=DEVICE).to("cpu", non_blocking=True)
    event = accelerator.current_stream(DEVICE).record_event()
    assert arriving.isnan().all()
    event.synchronize()
    assert arriving.tolist() == [1.0] * 3


def _memory_given_away() -> None:
    """Freed where another stream may still read it, and taken again, unless recorded."""
    for is_recorded in (True, False):
        tensor = torch.ones(3, device=DEVICE)
        other, _ = on_other_stream(tensor)
        if is_recorded:
            tensor.record_stream(other)
        del tensor
        torch.ones(3, device=DEVICE)  # takes what is free
        assert bool(streams.given_away) is not is_recorded
