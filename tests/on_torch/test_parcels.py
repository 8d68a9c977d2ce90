"""Tensors that leave in one message come out as they went in, each of its own memory."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from allranks.torch.comm.comm import Comm
from allranks.torch.parallel.pipeline.links import Parcel, orders_of, shape_of
from allranks.torch.parallel.sharded import gradients as gradient_parts
from allranks.torch.parallel.sharded.gradients import ROW, SomeCut, squares_of


def test_a_gradient_may_come_in_any_order_of_its_dimensions() -> None:
    activation = torch.empty(2, 3, 4, 1)
    orders = orders_of(activation)
    assert orders[0] == activation.stride() and len(orders) < 2**8
    for dims in itertools.permutations(range(4)):
        turned = torch.empty([activation.shape[dim] for dim in dims])
        assert turned.permute([dims.index(dim) for dim in range(4)]).stride() in orders
    assert activation.to(memory_format=torch.channels_last).stride() in orders
    assert len(orders_of(torch.empty(1, 2, 1, 2, 1, 2))) == 2  # 720 would be too many


def test_tensors_of_other_types_and_orders_share_a_message() -> None:
    given = [
        torch.arange(3, dtype=torch.uint8),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(5, dtype=torch.complex128),
        torch.empty(0, 2),
        torch.randn(4, 4)[:, ::2],
    ]
    sent = Parcel.of(given)
    assert sum(t.nbytes for t in given) <= sent.message.numel() < sum(t.nbytes + 16 for t in given)
    room = Parcel.room([shape_of(t) for t in sent.tensors], torch.device("cpu"))
    room.message.copy_(sent.message)
    for found, tensor in zip(room.tensors, given, strict=True):
        assert found.dtype == tensor.dtype
        assert found.equal(tensor)
        assert not found._is_view()  # a layer may write into it
    assert room.tensors[1].is_contiguous(memory_format=torch.channels_last)
    room.tensors[1].zero_()
    assert room.tensors[2].equal(given[2])


def test_one_tensor_leaves_from_where_it_lies() -> None:
    tensor = torch.randn(3, 4)
    assert Parcel.of([tensor]).message.data_ptr() == tensor.data_ptr()


def test_a_norm_adds_rows_and_survives_squares_too_large_for_their_type() -> None:
    parameter = nn.Parameter(torch.zeros(3 * ROW + 7, 11))
    gradients = SomeCut([parameter], Comm(), {id(parameter)}, exact=False)
    parameter.grad = torch.randn(parameter.shape)
    exact = math.sqrt(parameter.grad.double().square().sum())
    assert math.isclose(gradients.norm(clips=False, left_out=False), exact, rel_tol=1e-7)
    parameter.grad *= 1e25
    found = gradients.norm(clips=False, left_out=False)
    assert math.isclose(found, exact * 1e25, rel_tol=1e-6)
    parameter.grad[-1, -1] = math.nan
    assert not math.isfinite(gradients.norm(clips=False, left_out=False))


def test_rows_are_the_same_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, in groups of some bytes: the same bits as a norm for each tensor."""
    sizes, kinds = (3, ROW, 2 * ROW + 1, 0, ROW, 17, 5 * ROW), (torch.float32, torch.bfloat16)
    parts = [torch.randn(size).to(kind) for size in sizes for kind in kinds]
    parts[0] = torch.randn(3, dtype=torch.complex64)
    wanted = squares_of(parts, torch.device("cpu"))
    by_hand = sum(torch.view_as_real(p).double().square().sum() for p in parts[:1])
    by_hand += sum(p.double().square().sum() for p in parts[1:])
    assert math.isclose(float(wanted), float(by_hand), rel_tol=1e-6)
    monkeypatch.setattr(gradient_parts, "is_accelerator", lambda device: True)
    for most in (2**26, 3 * ROW * 4):
        monkeypatch.setattr(gradient_parts, "TOGETHER_BYTES", most)
        assert torch.equal(squares_of(parts, torch.device("cpu")), wanted)
