"""A broadcast of many tensors: in which messages they go, and that each arrives as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from allranks.torch.comm import comm as communication
from allranks.torch.comm import subgroups as flattened
from allranks.torch.comm.comm import Comm
from counting import calls_of


class _Wire:
    """`dist.broadcast` as NCCL has it: contiguous bytes alone. What rank 0 sends, rank 1 gets."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def __call__(self, tensor: Tensor, **_: Any) -> None:
        assert tensor.dtype == torch.uint8 and tensor.is_contiguous() and tensor.numel()
        self.sent.append(tensor.clone())

    def deliver(self, tensor: Tensor, **_: Any) -> None:
        tensor.copy_(self.sent.pop(0))


def odd_tensors(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    whole = torch.randint(0, 100, (3, 5), dtype=torch.int16)
    return [
        torch.randn(4, 5).t(),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        whole,
        torch.randint(0, 100, (2, 2)).to(torch.uint16),
        torch.rand(7) > 0.5,
        torch.tensor(seed),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(1, 4).expand(3, 4),
        torch.randn(6)[::2],
        torch.empty(0),
        torch.randn(5, dtype=torch.float64),
    ]


def test_a_tensor_more_costs_a_broadcast_no_look_at_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each beside all that wait for the same message: 10,000 tensors are 50 million looks."""
    tensors = [torch.ones(2) for _ in range(200)]
    few, many = (calls_of(lambda n=n: list(flattened.messages_of(tensors[:n]))) for n in (20, 200))
    assert many - few <= 2 * 180
    monkeypatch.setattr(flattened, "MESSAGE_BYTES", 24)
    assert [len(one) for one in flattened.messages_of(tensors[:8])] == [3, 3, 2]


@pytest.mark.parametrize("most", [flattened.MESSAGE_BYTES, 24])
def test_every_type_and_layout_arrives_in_bytes(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    wire, given, got = _Wire(), odd_tensors(1), odd_tensors(2)
    monkeypatch.setattr(flattened, "MESSAGE_BYTES", most)
    monkeypatch.setattr(communication.dist, "broadcast", wire)
    first = Comm(0, 2)
    first.broadcast(*given)
    assert len(wire.sent) == (7 if most > 24 else 10), "a message for each type, if it is not full"
    assert first.sent_bytes["control"] == sum(tensor.nbytes for tensor in given) / 2
    monkeypatch.setattr(communication.dist, "broadcast", wire.deliver)
    Comm(1, 2).broadcast(*got)
    for there, here in zip(given, got, strict=True):
        assert torch.equal(there, here) and there.stride() == here.stride()
    assert wire.sent == []
