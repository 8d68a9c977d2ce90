"""BatchNorm of many shards in one pass: beside each shard by itself, as torch computes it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.errors import RequestError
from allranks.strategies.shards import Micro, Piece
from allranks.torch.batchnorm import by_library, in_c
from allranks.torch.batchnorm.shard import RunningStatistics
from allranks.torch.build import swap_layers
from allranks.torch.model.layers import Scope, shard_norms

EVEN = tuple(Piece(shard, 0, 4, 4) for shard in range(8))
UNEVEN = (*(Piece(shard, 0, 3, 3) for shard in range(3)), *(Piece(s, 0, 2, 2) for s in (3, 4)))
WITH_ONES = (*UNEVEN, Piece(5, 0, 1, 1), Piece(6, 0, 1, 1))
PART = (Piece(0, 1, 4, 5), Piece(1, 0, 2, 4))
IDS = ["even", "uneven", "ones", "part"]
SHAPES = {1: (6,), 2: (3, 5), 3: (3, 4, 5), 4: (3, 2, 3, 4)}
KINDS = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}


def by_piece(layer: Any, pieces: Micro, data: Tensor) -> tuple[Tensor, Tensor]:
    """The plain twin: torch's own kernel for each piece. The output, and the moments."""
    moments = data.new_zeros(1 + 2 * layer.num_features)
    outputs = []
    per_sample = len(data) // sum(piece.samples for piece in pieces)
    rows = [piece.samples * per_sample for piece in pieces]
    for piece, part in zip(pieces, data.split(rows), strict=True):
        given = layer.weight, layer.bias
        if piece.shard_size == 1:
            running = layer.running_mean, layer.running_var
            outputs.append(F.batch_norm(part, *running, *given, False, 0.0, layer.eps))
            continue
        found = data.new_zeros(2, layer.num_features)
        outputs.append(F.batch_norm(part, found[0], found[1], *given, True, 1.0, layer.eps))
        moments[0] += piece.samples
        moments[1:].add_(found.flatten(), alpha=piece.samples)
    return torch.cat(outputs), moments


def made(dims: int, affine: bool = True) -> Any:
    layer = KINDS[dims](SHAPES[dims][0], affine=affine).double()
    for values in layer.state_dict().values():
        if values.is_floating_point():
            values.uniform_(0.5, 1.5)
    return layer


def entered(layer: nn.Module, pieces: Micro) -> Scope:
    scope = Scope(0, torch.device("cpu"))
    swap_layers(layer.train(), scope)
    scope.enter(0, pieces, sum(piece.samples for piece in pieces))
    return scope


KERNELS = ["torch's kernels", "torch's kernel for each large one"]


def by_kernels(monkeypatch: pytest.MonkeyPatch, large: int) -> None:
    """As on a device, where shards of so many values go through a kernel each."""
    monkeypatch.setattr(by_library, "DEVICES", {"cpu"})
    monkeypatch.setattr(by_library, "LARGE", large)


@pytest.mark.parametrize(
    "pieces", [EVEN, UNEVEN, WITH_ONES, PART], ids=["even", "uneven", "ones", "part"]
)
@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("last", [False, True], ids=["", "last"])
@pytest.mark.parametrize("library", [in_c.LIBRARY, None, 1 << 16, 24], ids=["in C", "", *KERNELS])
def test_all_shards_in_one_pass_are_each_by_itself(
    monkeypatch: pytest.MonkeyPatch, pieces: Micro, dims: int, last: bool, library: Any
) -> None:
    if isinstance(library, int):
        by_kernels(monkeypatch, library)
    else:
        monkeypatch.setattr(in_c, "LIBRARY", library)
    layer = made(dims, affine=dims != 3 or not last)
    scope = entered(layer, pieces)
    per_sample = 2 if dims == 1 else 1
    count = per_sample * sum(piece.samples for piece in pieces)
    data = torch.randn(count, *SHAPES[dims], dtype=torch.float64) * 3 + 5
    if last and dims > 2:
        data = data.to(memory_format=torch.channels_last if dims == 3 else torch.channels_last_3d)
    elif last and dims == 2:
        data = data.transpose(1, 2).contiguous().transpose(1, 2)  # neither is dense for torch
    above = torch.randn(data.shape, dtype=torch.float64)
    given = [data.requires_grad_(), *layer.parameters()]
    wanted, moments = by_piece(layer, pieces, data)
    gradients = torch.autograd.grad(wanted, given, above)
    output = layer(data)
    torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scope.moments[layer.index], moments, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(output, given, above)
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-11)
    if data.is_contiguous() or dims > 2:
        assert output.stride() == data.stride() == found[0].stride()


@pytest.mark.parametrize("dims", [2, 3])
def test_a_second_derivative(dims: int) -> None:
    layer = made(dims)
    entered(layer, WITH_ONES)
    given = torch.randn(15, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    data = given.movedim(3, 1) if dims == 3 else given.flatten(1, 2).transpose(1, 2)  # not dense

    def penalty(output: Tensor) -> list[Tensor]:
        (first,) = torch.autograd.grad(output.pow(3).sum(), given, create_graph=True)
        return list(torch.autograd.grad(first.pow(2).sum(), [given, layer.weight, layer.bias]))

    for one, other in zip(
        penalty(layer(data)), penalty(by_piece(layer, WITH_ONES, data)[0]), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by the compiler
@pytest.mark.parametrize("affine", [True, False], ids=["affine", ""])
@pytest.mark.parametrize(("pieces", "runs"), [(EVEN, 1), (UNEVEN, 2)], ids=["even", "uneven"])
def test_a_compiler_is_given_a_derivative_of_two_sums(
    pieces: Micro, runs: int, affine: bool
) -> None:
    """Autograd alone finds four over all samples, each a loop over memory of its own."""
    sums: list[int] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes = [n for n in graph.graph.nodes if n.target is torch.ops.aten.sum.dim_IntList]
        sizes = [node.all_input_nodes[0].meta["val"].shape for node in nodes]
        sums.append(sum(len(size) == 5 and size[-1] > 1 for size in sizes))
        return make_boxed_func(graph.forward)

    torch.manual_seed(0)
    layer, twin = made(3, affine), made(3, affine)
    twin.load_state_dict(layer.state_dict())
    scope = entered(layer, pieces)
    scope.lay_out()
    layer.moments = []
    given = torch.randn(scope.samples, *SHAPES[3], dtype=torch.float64, requires_grad=True)
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=keep)
    output = torch.compile(layer, backend=backend)(given)
    expected, moments = by_piece(twin, pieces, given)
    above = torch.randn_like(output)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(layer.moments[0], moments)
    found = torch.autograd.grad(output, [given, *layer.parameters()], above)
    wanted = torch.autograd.grad(expected, [given, *twin.parameters()], above)
    torch.testing.assert_close(found, wanted)
    assert sums == [2 * runs]


def test_a_transform_of_torch_func() -> None:
    layer = made(3)
    entered(layer, WITH_ONES)
    data = torch.randn(15, 3, 2, 2, dtype=torch.float64)
    found, wanted = (
        torch.func.grad(lambda x, norm=norm: norm(x).pow(3).sum())(data)
        for norm in (layer, lambda x: by_piece(layer, WITH_ONES, x)[0])
    )
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_channels_that_it_has_not_are_refused() -> None:
    layer = nn.BatchNorm2d(1, track_running_stats=False)
    entered(layer, EVEN)
    with pytest.raises(RequestError, match="BatchNorm over 1 channels"):
        layer(torch.randn(32, 4, 2, 2))


@pytest.mark.parametrize("large", [None, 1 << 16, 8], ids=["", *KERNELS])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_has_its_statistics_in_fp32(
    monkeypatch: pytest.MonkeyPatch, kind: torch.dtype, large: int | None
) -> None:
    """As torch's own: the weights and the statistics are of fp32, the output is not."""
    if large is not None:
        by_kernels(monkeypatch, large)
    layer = nn.BatchNorm2d(3)
    scope = entered(layer, EVEN)
    data = (torch.randn(32, 3, 4, 4) + 3).to(kind).requires_grad_()
    with torch.autocast("cpu", kind):
        output = layer(data)
    wanted, moments = by_piece(layer, EVEN, data.float())
    assert output.dtype == kind and scope.moments[layer.index].dtype == torch.float32
    torch.testing.assert_close(scope.moments[layer.index], moments)
    torch.testing.assert_close(output, wanted.to(kind))
    above = torch.randn_like(wanted).to(kind)
    (found,) = torch.autograd.grad(output, data, above)
    (gradient,) = torch.autograd.grad(wanted, data, above.float())
    torch.testing.assert_close(found, gradient)


class Kernels(TorchDispatchMode):
    """How many operations came to a kernel; views do not."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = "view", "slice", "select", "detach", "empty", "transpose", "t.", "movedim", "alias"
        self.count += not any(name in str(func) for name in (*views, "permute", "unsqueeze"))
        return func(*args, **kwargs or {})


def launched(shards: int) -> int:
    layer = nn.BatchNorm2d(4)
    entered(layer, tuple(Piece(shard, 0, 2, 2) for shard in range(shards)))
    data = torch.randn(2 * shards, 4, 3, 3, requires_grad=True)
    with Kernels() as kernels:
        layer(data).sum().backward()
    return kernels.count


def test_the_kernels_of_a_layer_do_not_follow_its_shards() -> None:
    assert launched(8) == launched(64) <= 45


def test_running_statistics_of_all_layers_at_once() -> None:
    """Layers with a rate of their own, without one, and one that nothing came through."""
    norms = nn.ModuleList(
        [nn.BatchNorm1d(2, momentum=0.3), nn.BatchNorm1d(3, momentum=None), nn.BatchNorm1d(4)]
    )
    entered(norms, EVEN)
    update = RunningStatistics(shard_norms(norms), torch.zeros(0, dtype=torch.float64))
    means, variances = [], []
    for step in range(3):
        parts = []
        for layer in norms:
            weight = 0.0 if layer is norms[2] else 8.0
            mean, var = torch.rand(2, layer.num_features, dtype=torch.float64) + step
            parts += [torch.tensor([weight]).double(), weight * mean, weight * var]
            if layer is norms[1]:
                means.append(mean)
                variances.append(var)
        before = norms[0].running_mean.clone()
        update.update(torch.cat(parts))
        torch.testing.assert_close(
            norms[0].running_mean, 0.7 * before + 0.3 * (parts[1] / 8).float()
        )
    torch.testing.assert_close(norms[1].running_mean.double(), torch.stack(means).mean(0))
    torch.testing.assert_close(norms[1].running_var.double(), torch.stack(variances).mean(0))
    assert norms[2].running_var.tolist() == [1.0] * 4
    assert [int(layer.num_batches_tracked) for layer in norms] == [3, 3, 0]


def test_a_part_of_one_value_is_refused() -> None:
    layer = nn.BatchNorm1d(3)
    entered(layer, (Piece(0, 0, 1, 4), Piece(1, 0, 4, 4)))
    with pytest.raises(RequestError, match="no variance"):
        layer(torch.randn(5, 3))


@pytest.mark.parametrize("large", [1 << 16, 8], ids=KERNELS)
@pytest.mark.parametrize("last", [False, True], ids=["", "last"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_bits_of_a_shard_do_not_follow_what_goes_through_with_it(
    monkeypatch: pytest.MonkeyPatch, large: int, last: bool, kind: torch.dtype
) -> None:
    """By kernels of torch: with two others, with one, and for a large one alone, as in torch."""
    by_kernels(monkeypatch, large)
    layer = nn.BatchNorm2d(3)
    sizes = (3, 3, 2, 1, 3)  # 3 * 3 * 5 * 7 numbers before the second: no multiple of 128 bytes
    pieces = tuple(Piece(shard, 0, size, size) for shard, size in enumerate(sizes))
    data = torch.randn(sum(sizes), 3, 5, 7).to(kind)
    data = data.to(memory_format=torch.channels_last) if last else data
    parts = data.split(sizes)
    scope = entered(layer, pieces)

    def passed(some: Micro) -> tuple[Tensor, ...]:
        own = torch.cat([parts[piece.shard] for piece in some]).requires_grad_()
        scope.enter(0, some, len(own))
        output = layer(own)
        output.backward(own.detach() * 2)
        assert own.grad is not None
        return output.detach(), own.grad

    whole = [found.split(sizes) for found in passed(pieces)]
    few = [3] if large == 8 else []  # one alone goes through `F.batch_norm`, as large ones do
    for some in ((0, 1), (1, 2), (2, 3), (3, 4), *([shard] for shard in (0, 1, 2, *few))):
        if len(some) == 1 and large != 8:
            continue
        found = passed(tuple(pieces[shard] for shard in some))
        for wanted, one in zip(whole, found, strict=True):
            own = torch.cat([wanted[shard] for shard in some])
            assert torch.equal(one, own), some


def test_a_large_shard_is_read_where_memory_of_its_own_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_kernels(monkeypatch, 8)
    monkeypatch.setattr(by_library, "ALIGNED", 64)  # where memory of a CPU begins
    read = []

    def noted(kernel: Any, *given: Any) -> Any:
        read.extend(t.data_ptr() % by_library.ALIGNED for t in given[:2] if torch.is_tensor(t))
        return kernel(*given)

    for name in ("_batch_norm", "_derivative"):
        monkeypatch.setattr(by_library, name, partial(noted, getattr(by_library, name)))
    layer = nn.BatchNorm2d(3, affine=False)
    entered(layer, UNEVEN)
    whole = torch.empty(13, 3, 5, 7, requires_grad=True)
    assert whole[3:].data_ptr() % by_library.ALIGNED
    layer(whole).sum().backward()
    assert len(read) >= 10 and set(read) == {0}


def test_moments_of_all_layers_are_those_of_each() -> None:
    """Weighted at once, or as soon as somebody asks; a layer that goes through twice counts so."""
    layers = [nn.BatchNorm1d(2), nn.BatchNorm1d(3), nn.BatchNorm1d(3)]
    model = nn.Sequential(*layers)
    scope = Scope(0, torch.device("cpu"))
    swap_layers(model, scope)
    data = [torch.randn(4, layer.num_features) for layer in layers]
    order = [layer.index for layer in shard_norms(model)]

    def passed(*numbers: int) -> None:
        scope.enter(0, (Piece(0, 0, 4, 4),), 4)
        for number in numbers:
            layers[number](data[number])

    wanted = [torch.cat((torch.ones(1), of.mean(0), of.var(0))).mul(4) for of in data]
    for numbers in ((0, 1, 2), (2, 0, 1)):
        passed(*numbers)
        found = scope.moments_of_all(order)
        assert found is not None and not scope.moments
        torch.testing.assert_close(found, torch.cat(wanted))
    for numbers in ((0, 2), (0, 1, 2, 1), (1, 1)):
        passed(*numbers)
        assert scope.moments_of_all(order) is None
        found_by_layer = {order.index(layer): found for layer, found in scope.moments.items()}
        assert found_by_layer.keys() == set(numbers)
        for number, found in found_by_layer.items():
            torch.testing.assert_close(found, wanted[number] * numbers.count(number))
        scope.moments.clear()
