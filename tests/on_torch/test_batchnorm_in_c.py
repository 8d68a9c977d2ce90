"""The loops in C of BatchNorm by shard: beside float64, and who runs them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from test_batchnorm import EVEN, by_piece, entered
from torch import Tensor, nn

from allranks.strategies.shards import Piece
from allranks.torch.batchnorm import in_c

NATIVE = Path(in_c.__file__).parent / "native"
COMPILER = shutil.which("cc") or shutil.which("gcc")
LIBRARY = in_c.LIBRARY
MANY = 19  # channels: some at a time, and what is left of them
LONG = 2 * 1024 + 37  # blocks, and what is left of one

pytestmark = pytest.mark.skipif(  # with a compiler, a library that is not there is a failure
    LIBRARY is None and COMPILER is None, reason="no C compiler"
)


class Counted:
    """The library, and how often it was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(LIBRARY, name)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    found = Counted()
    monkeypatch.setattr(in_c, "LIBRARY", found)
    return found


def passed(layer: Any, data: Tensor, above: Tensor) -> tuple[Tensor, ...]:
    """What a layer returns, and the gradients of its input and its weights."""
    output = layer(data)
    return output, *torch.autograd.grad(output, [data, *layer.parameters()], above)


@pytest.mark.parametrize("values", [20, LONG])
def test_both_types_are_what_torch_computes_up_to_their_rounding(
    counted: Counted, values: int
) -> None:
    """Values far from zero: squares that are not around the mean would have lost all digits."""
    layer, plain = nn.BatchNorm1d(MANY), nn.BatchNorm1d(MANY).double()
    for one in (layer, plain):
        entered(one, EVEN)
        for channels in one.parameters():
            torch.nn.init._no_grad_uniform_(channels, 0.5, 1.5, torch.Generator().manual_seed(0))
    plain.load_state_dict(layer.state_dict())
    data = (torch.randn(32, MANY, values) + 500).double()
    above = torch.randn(data.shape).double()
    found = passed(layer, data.float().requires_grad_(), above.float())
    in_doubles = passed(plain, data.requires_grad_(), above)
    assert counted.calls == ["normalise", "derive"] * 2
    output = by_piece(plain, EVEN, data)[0]
    wanted = output, *torch.autograd.grad(output, [data, *plain.parameters()], above)
    for one, other, true, bound in zip(
        found, in_doubles, wanted, (1e-4, 1e-4, 1e-3, 1e-3), strict=True
    ):
        torch.testing.assert_close(other, true, rtol=1e-9, atol=1e-9)
        assert one.dtype == torch.float32
        assert (one.double() - true).abs().max() < bound * true.abs().max()


def test_an_input_without_a_gradient_has_none(counted: Counted) -> None:
    layer = nn.BatchNorm1d(MANY)
    entered(layer, EVEN)
    data = torch.randn(32, MANY, 20)
    layer(data).square().sum().backward()
    assert counted.calls == ["normalise", "derive"] and data.grad is None
    of_weight, of_bias = layer.weight.grad, layer.bias.grad
    assert of_weight is not None and of_bias is not None
    output = by_piece(layer, EVEN, data)[0].detach()
    torch.testing.assert_close(of_weight, (2 * output * output).sum((0, 2)))
    torch.testing.assert_close(of_bias, (2 * output).sum((0, 2)), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    ("data", "threads"),
    [
        (torch.randn(32, 3, 15), 1),
        (torch.randn(32, 3, 16), 2),
        (torch.randn(32, 3, 4, 4).to(memory_format=torch.channels_last), 1),
        (torch.randn(32, 3, 16).bfloat16(), 1),
        (torch._neg_view(torch.randn(32, 3, 16)), 1),
        (torch._efficientzerotensor((32, 3, 16)), 1),
    ],
    ids=["few values", "two threads", "channels last", "16 bits", "negated", "zeros"],
)
def test_what_it_does_not_take_goes_through_torch(
    counted: Counted, monkeypatch: pytest.MonkeyPatch, data: Tensor, threads: int
) -> None:
    layer: nn.Module = (nn.BatchNorm2d if data.ndim == 4 else nn.BatchNorm1d)(3)
    entered(layer, EVEN)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    given = data.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=data.dtype == torch.bfloat16):
        found = layer(given)
    found.sum().backward()
    assert counted.calls == []


def test_shards_of_one_sample_are_not_its_own(counted: Counted) -> None:
    """They are normalised by the running statistics, beside a run of two samples that is in C."""
    layer = nn.BatchNorm1d(3)
    entered(layer, (Piece(0, 0, 2, 2), Piece(1, 0, 1, 1), Piece(2, 0, 1, 1)))
    output = layer(torch.full((4, 3, 20), 3.0, requires_grad=True))
    assert counted.calls == ["normalise"]
    torch.testing.assert_close(output[2:], torch.full((2, 3, 20), 3.0 / (1 + layer.eps) ** 0.5))
    torch.testing.assert_close(output[:2], torch.zeros(2, 3, 20))
    output.sum().backward()
    assert counted.calls == ["normalise", "derive"]


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C compiler")  # compiled before, elsewhere
def test_any_processor_gives_the_same_bits(tmp_path: Path) -> None:
    """Vectors of any width, and none: no sum is in another order, nothing is rounded once less."""
    results = []
    for name, options in (("none", ["-O1", "-DNO_CLONES"]), ("all", ["-O3", "-march=native"])):
        path = tmp_path / f"{name}.so"
        words = [COMPILER, "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=off", *options]
        subprocess.run([*words, str(NATIVE / "norms.c"), "-lm", "-o", str(path)], check=True)
        results.append(_called(ctypes.CDLL(str(path))))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("pieces", "rows", "channels", "values")]


def _called(library: ctypes.CDLL) -> list[Tensor]:
    torch.manual_seed(0)
    shape, given = _Shape(2, 3, MANY, LONG), torch.randn(2, 2 * 3 * MANY * LONG)
    weight, bias, of_weight, of_bias = torch.randn(4, MANY)
    output, found = torch.empty_like(given)
    mean, var, inverse = torch.empty(3, 2 * MANY)

    def at(*tensors: Tensor) -> list[ctypes.c_void_p]:
        return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]

    eps = ctypes.c_double(1e-5)
    library.normalise_float(
        *at(given[0]), shape, *at(weight, bias), eps, *at(output, mean, var, inverse)
    )
    library.derive_float(
        *at(given[1], given[0]), shape, *at(weight, mean, inverse, found, of_weight, of_bias)
    )
    return [output, mean, var, inverse, found, of_weight, of_bias]
