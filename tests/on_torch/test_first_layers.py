"""Forward passes that begin while weights still come: what they wait for, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Event
from typing import Any, cast

import pytest
import torch
from test_batchnorm import EVEN, entered
from torch import Tensor, nn
from torch.nn import functional as F

from allranks.launcher.nodes.channel import Disconnected
from allranks.torch.batchnorm import in_c
from allranks.torch.parameter_server.flat import Flat, FlatLayout
from allranks.torch.parameter_server.placement import Piece
from allranks.torch.parameter_server.working.arriving import Arriving, FirstLayers

COMES_S = 20.0


class Waits:
    """Notes what is waited for, by name, beside what is called: in `seen`."""

    def __init__(self, model: nn.Module) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        self.seen: list[Any] = []

    def wait_for(self, positions: Iterable[int]) -> None:
        if found := [self.names[n] for n in positions]:
            self.seen.append(found)

    def wait_for_all(self) -> None:
        self.seen.append("all")


class Reads(nn.Module):
    """Reads a weight of its last layer first, and can leave a layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(3, 3) for _ in range(3))
        self.never = nn.Linear(3, 3)
        self.leaves_out = False

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.last.weight.t()[:3])
        x = self.first(x)
        if not self.leaves_out:
            x = self.middle(x)
        return cast(Tensor, self.last(x)).exp()


def test_each_weight_is_waited_for_before_the_call_in_which_it_is_read_first() -> None:
    model, data = Reads(), torch.ones(2, 3)
    waits = Waits(model)
    passes = FirstLayers(model, list(model.parameters()), cast(Any, waits))
    wanted = model(data)
    assert torch.equal(passes(lambda: model(data)), wanted)
    assert waits.seen == ["all"], "the first pass is watched, with all weights"
    waits.seen.clear()
    assert torch.equal(passes(lambda: model(data)), wanted)
    assert waits.seen == [
        *(["never.weight", "never.bias"], ["last.weight"], ["first.weight", "first.bias"]),
        *(["middle.weight", "middle.bias"], ["last.bias"], "all"),
    ]
    waits.seen.clear()
    model.leaves_out = True
    passes(lambda: model(data))
    assert waits.seen[3:] == ["all", "all"], "another call than that of the first pass"
    waits.seen.clear()
    model(data)
    passes.close()
    assert not waits.seen and not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("library", [in_c.LIBRARY, None], ids=["in C", ""])
def test_what_batchnorm_reads_is_seen_also_where_a_loop_in_c_reads_it(
    monkeypatch: pytest.MonkeyPatch, library: Any
) -> None:
    monkeypatch.setattr(in_c, "LIBRARY", library)
    model, data = nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3)), torch.randn(32, 3, 20)
    entered(model, EVEN)
    waits = Waits(model)
    passes = FirstLayers(model, list(model.parameters()), cast(Any, waits))
    for _ in range(2):
        waits.seen.clear()
        passes(lambda: model(data))
    assert waits.seen == [["0.weight", "0.bias"], ["1.weight", "1.bias"], "all"]


class Sends:
    """Sends weights in two parts, the second one when it `may`; loses the link in place of it."""

    def __init__(self, flat: Flat, first: int, *, is_lost: bool = False) -> None:
        self.numbers = bytes(flat.buffer)
        self.first, self.is_lost, self.may = first, is_lost, Event()

    def fill(self, server: int, memory: memoryview, came: Callable[[int], None]) -> None:
        memory[: self.first] = self.numbers[: self.first]
        came(self.first)
        if not self.may.wait(COMES_S) or self.is_lost:
            raise Disconnected(f"server {server} is gone")
        memory[self.first :] = self.numbers[self.first :]
        came(len(memory))

    def shut(self) -> None:
        """Nothing comes any more."""


@pytest.mark.parametrize("is_lost", [False, True])
def test_forward_begins_before_the_last_weights_have_come(is_lost: bool) -> None:
    """They come once the first layer has been passed; a link that breaks then is an error."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    parameters, data = list(model.parameters()), torch.ones(2, 3)
    layout = FlatLayout(
        [Piece(n, 0, p.numel(), 0, is_whole=n != 2) for n, p in enumerate(parameters)], parameters
    )
    wanted_weights = layout.new()
    wanted_weights.read_from([torch.full_like(p, 0.5) for p in parameters])
    flat = layout.new()
    flat.be_memory_of(parameters)
    sends = Sends(wanted_weights, layout.starts[2], is_lost=is_lost)
    arriving = Arriving([flat], parameters, cast(Any, sends))
    passes = FirstLayers(model, parameters, arriving)
    passes(lambda: model(data))
    model[0].register_forward_hook(lambda *_: sends.may.set())
    try:
        arriving.come(0, flat.buffer)
        if is_lost:
            with pytest.raises(Disconnected, match="server 0"):
                passes(lambda: model(data))
            return
        output = passes(lambda: model(data))
        assert torch.equal(output, torch.full((2, 2), 0.5 + 4 * 0.5 * 2.0))
        assert all(torch.equal(p, torch.full_like(p, 0.5)) for p in parameters)
    finally:
        arriving.close()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_has_no_calls_of_its_own() -> None:
    """What it reads is waited for before the call that came before it."""
    model = nn.Sequential(nn.Linear(3, 4), cast(nn.Module, torch.jit.script(nn.Linear(4, 2))))
    waits, data = Waits(model), torch.ones(2, 3)
    passes = FirstLayers(model, list(model.parameters()), cast(Any, waits))
    for _ in range(2):
        passes(lambda: model(data))
    passes.close()
    assert waits.seen[1:] == [["0.weight", "0.bias", "1.weight", "1.bias"], "all"]
