"""Draws from a counter: golden values, statistics, and that every way to draw gives the same."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.cuda.jiterator import _CodeParser

from allranks.strategies.shards import Piece, micro_batches
from allranks.torch.build import swap_layers
from allranks.torch.model.layers import Scope
from allranks.torch.random import counter
from allranks.torch.random import counter as kernel
from allranks.torch.random.dropout import ShardDropout, TensorPart
from allranks.torch.random.keyed_rng import drawn, mask_of

SIZES = {0: 4, 1: 4, 2: 3, 3: 1}
CPU = torch.device("cpu")


def bits(keys: counter.Words, *sizes: int) -> np.ndarray:  # type: ignore[type-arg]
    found = counter.on_cpu(keys, sizes, (0,) * len(sizes), lambda bits: bits)
    return counter.unsigned(found.contiguous())


def test_golden_values() -> None:
    """What any later version draws, too: a checkpoint goes on with the masks that it began with."""
    keys = counter.keys_of(7, 3, (Piece(1, 0, 1, 2), Piece(9, 2, 3, 4)))
    assert [[f"{word:08x}" for word in row] for row in keys.tolist()] == GOLDEN_KEYS
    found = bits(keys + counter.place_words(5, 1), 2, 2)
    assert [[f"{word:08x}" for word in row] for row in found.tolist()] == GOLDEN_BITS


GOLDEN_KEYS = [["475ab9f7", "d7e0e381"], ["470bf3d3", "97e740d5"]]
GOLDEN_BITS = [
    ["178299a9", "0974ee3e", "512d6b2a", "e703e93c"],
    ["6b103675", "a2894ebb", "dc88663a", "9a4ee75d"],
]


@pytest.mark.parametrize("sizes", [(), (5,), (3, 5), (70000,), (2, 3, 4, 5), (1, 70000, 1)])
def test_tensor_code_draws_what_numpy_does(sizes: tuple[int, ...]) -> None:
    keys = counter.keys_of(1, 2, (Piece(0, 0, 3, 3),))
    starts = tuple(range(len(sizes)))
    wanted = counter.on_cpu(keys, sizes, starts, lambda bits: bits)
    tensor = torch.from_numpy(keys.view(np.int32))
    assert torch.equal(counter.on_device(tensor, sizes, starts, lambda bits: bits), wanted)


def compiled_for_the_host(folder: Path, source: str = kernel.SOURCE) -> kernel.Kernel:
    """The C++ of the kernel, compiled as it is, with a loop over elements around it."""
    loop = """
    extern "C" void run(long n, int* out, int* a, int* b, int* c, int* d, int below) {
      for (long i = 0; i < n; ++i) out[i] = flags_from<int>(a[i], b[i], c[i], d[i], below);
    }"""
    (folder / "kernel.cpp").write_text(source + loop)
    library = folder / "kernel.so"
    options = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run(["g++", *options, str(folder / "kernel.cpp")], check=True)
    run = ctypes.CDLL(str(library)).run

    def launch(*given: Tensor, below: int) -> Tensor:
        assert all(tensor.dtype == torch.int32 for tensor in given)
        inputs = [tensor.contiguous() for tensor in torch.broadcast_tensors(*given)]
        out = torch.empty_like(inputs[0])
        addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (out, *inputs)]
        run(ctypes.c_long(out.numel()), *addresses, ctypes.c_int(below))
        return out

    return launch


def test_the_kernel_of_a_device_draws_what_tensor_code_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compiled_for_the_host(tmp_path)
    monkeypatch.setitem(kernel.COMPILERS, "cpu", lambda source, below: made)
    kernel._kernel_on.cache_clear()
    keys = torch.from_numpy(counter.keys_of(1, 2, (Piece(0, 0, 3, 3),)).view(np.int32))
    for sizes in ((), (5,), (8,), (3, 5), (2, 3, 4, 5), (6, 1, 1), (1, 65000), (65000, 2)):
        for starts in ((0,) * len(sizes), tuple(range(7, 7 + len(sizes)))):
            for below in (counter.signed(1 << 31), -(1 << 20), 0, (1 << 31) - 1):
                found = kernel.flags_from(keys, sizes, starts, below)
                wanted = counter.on_device(keys, sizes, starts, lambda b, t=below: b.ge(t))
                assert found is not None and found.dtype == torch.bool
                assert torch.equal(found.reshape(3, -1), wanted), (sizes, starts, below)
    assert kernel.flags_from(keys, (1 << 16,), (1,), 0) is None  # left to the tensor code
    assert _CodeParser(kernel.SOURCE).function_name == "flags_from"  # as torch reads it
    kernel._kernel_on.cache_clear()


@pytest.mark.parametrize("fault", ["no compiler", "other bits"])
def test_a_kernel_that_cannot_be_used_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def compile(source: str, below: int) -> kernel.Kernel:
        if fault == "no compiler":
            raise RuntimeError("libnvrtc.so: cannot open shared object file")
        return lambda *given, below: torch.zeros((2, 3, 5, 2), dtype=torch.int32)

    monkeypatch.setitem(kernel.COMPILERS, "cpu", compile)
    kernel._kernel_on.cache_clear()
    keys = torch.zeros((2, 2), dtype=torch.int32)
    said = "cannot be compiled .*libnvrtc" if fault == "no compiler" else "makes other bits"
    with pytest.warns(UserWarning, match=said) as warned:
        assert [kernel.flags_from(keys, (4,), (0,), 0) for _ in range(3)] == [None] * 3
    assert len(warned) == 1
    kernel._kernel_on.cache_clear()


def test_blocks_draw_what_the_whole_does(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = counter.keys_of(1, 2, (Piece(0, 0, 30, 30),))
    whole = bits(keys, 3, 50)
    for block in (7, 150, 1000):
        monkeypatch.setattr(counter, "BLOCK", block)
        assert np.array_equal(bits(keys, 3, 50), whole)


def test_an_element_is_known_by_its_coordinates_alone() -> None:
    """Padding along any dimension changes no draw before it, and no two elements share one."""
    keys = counter.keys_of(1, 2, (Piece(0, 0, 2, 2),))
    for small, large in (((3,), (5,)), ((3, 4), (3, 9)), ((2, 3, 3), (2, 5, 5))):
        within = (slice(None), *(slice(size) for size in small))
        wide = bits(keys, *large).reshape(2, *large)
        assert np.array_equal(wide[within], bits(keys, *small).reshape(2, *small))
    first, rest = counter.coordinates((3, 5, 90, 90), (0,) * 4, CPU)
    assert rest is not None
    assert len(torch.stack((first, rest), 1).unique(dim=0)) == len(first)


STREAMS = {
    "elements": lambda: bits(counter.keys_of(0, 0, (Piece(0, 0, 1, 1),)), 1 << 18).ravel(),
    "a map": lambda: bits(counter.keys_of(0, 0, (Piece(0, 0, 1, 1),)), 64, 64, 64).ravel(),
    "samples": lambda: bits(counter.keys_of(0, 0, (Piece(0, 0, 1 << 16, 1 << 16),)), 1).ravel(),
    "layers": lambda: _places([(layer, 0) for layer in range(1 << 14)]),
    "calls": lambda: _places([(5, call) for call in range(1 << 14)]),
    "steps": lambda: np.concatenate(
        [bits(counter.keys_of(3, step, (Piece(1, 0, 4, 4),)), 4).ravel() for step in range(4096)]
    ),
    "shards": lambda: bits(
        counter.keys_of(3, 1, tuple(Piece(shard, 0, 1, 1) for shard in range(1 << 15))), 2
    ).ravel(),
}


def _places(places: list[tuple[int, int]]) -> np.ndarray:  # type: ignore[type-arg]
    key = counter.keys_of(3, 1, (Piece(0, 0, 1, 1),))
    keys = np.concatenate([key + counter.place_words(*place) for place in places])
    return bits(keys, 4).ravel()


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", STREAMS)
def test_draws_are_uniform_and_independent(name: str) -> None:
    """Along whatever is counted: bytes, each bit, neighbours, runs. Limits are of 5 deviations."""
    stream = STREAMS[name]()
    n = len(stream)
    for shift in range(0, 32, 8):  # chi-square of 256 values, about normal: mean 255, var 510
        counts = np.bincount(stream >> np.uint32(shift) & np.uint32(255), minlength=256)
        chi = ((counts - n / 256) ** 2 / (n / 256)).sum()
        assert abs(chi - 255) < 5 * 510**0.5, shift
    ones = np.unpackbits(stream.view(np.uint8)).reshape(n, 32)
    assert np.abs(ones.mean(0) - 0.5).max() < 5 * 0.5 / n**0.5
    uniform = stream / 2.0**32 - 0.5
    for lag in (1, 2, 3, 4, 8, 64):  # serial correlation
        assert abs((uniform[lag:] * uniform[:-lag]).sum()) < 5 * n**0.5 / 12, lag
        changed = ones[lag:] != ones[:-lag]
        assert np.abs(changed.mean(0) - 0.5).max() < 5 * 0.5 / (n - lag) ** 0.5, lag
    pairs = (stream[:-1] >> np.uint32(28)) * 16 + (stream[1:] >> np.uint32(28))
    counts = np.bincount(pairs, minlength=256)
    chi = ((counts - (n - 1) / 256) ** 2 / ((n - 1) / 256)).sum()
    assert abs(chi - 255) < 5 * 510**0.5


def test_a_bit_of_any_key_or_coordinate_changes_half_of_the_bits() -> None:
    """Strict avalanche: of 4096 pairs that differ in one bit, within 6 deviations of one half."""
    random = np.random.default_rng(0)
    x, second = random.integers(0, 1 << 32, (2, 4096), np.uint32)
    base = counter.mixed(x.copy(), second)
    for word, bit in itertools.product((0, 1), range(32)):
        flip = np.uint32(1 << bit)
        changed = counter.mixed(
            x ^ flip if word == 0 else x.copy(), second ^ flip if word else second
        )
        rate = np.unpackbits((changed ^ base).view(np.uint8)).reshape(4096, 32).mean(0)
        assert np.abs(rate - 0.5).max() < (0.05 if word == 0 else 0.15), (word, bit)


def test_ranks_that_hold_parts_of_an_activation_draw_their_part() -> None:
    layer = nn.Dropout(0.4)
    scope = Scope(0, CPU)
    swap_layers(layer.train(), scope)
    assert isinstance(layer, ShardDropout)
    data = torch.ones(8, 6, 10)
    pieces = (Piece(0, 0, 4, 4), Piece(1, 0, 4, 4))

    def output(input: Tensor, part: TensorPart | None) -> Tensor:
        layer.part_of = lambda tensor: part
        scope.enter(0, pieces, 8)
        return layer(input)  # type: ignore[no-any-return]

    whole = output(data, None)
    assert torch.equal(output(data[:, 2:5], TensorPart(1, 2, 6)), whole[:, 2:5])
    assert torch.equal(output(data[..., 7:], TensorPart(-1, 7, 10)), whole[..., 7:])


class Blocks(nn.Module):
    """Dropout of every kind, a layer called twice, rows that are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dropout(0.3), nn.Dropout1d(0.4)

    def forward(self, input: Tensor) -> Tensor:
        twice = self.first(self.first(input) + 1)
        tokens: Tensor = self.first(twice.flatten(0, 1)).view_as(twice)
        return self.second(tokens)  # type: ignore[no-any-return]


def compared(backend: str) -> None:
    """In every step and for every number of samples; compiled once more for another number."""
    model = Blocks().train()
    scope = Scope(0, CPU)
    swap_layers(model, scope)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for step, limit in ((0, None), (1, 7)):
        for pieces in micro_batches(SIZES, limit):
            count = sum(piece.samples for piece in pieces)
            data = torch.randn(count, 5, 6)
            found = []
            for call in (model, compiled):
                scope.enter(step, pieces, count)
                found.append(call(data))
            torch.testing.assert_close(*found)
            assert torch.equal(found[0] == 0, found[1] == 0), (step, pieces)
    scope.leave()


@pytest.mark.slow
def test_compiled_layers_draw_the_same_without_a_break() -> None:
    compared("eager")


@pytest.mark.slow
def test_compilers_that_change_the_graph_draw_the_same() -> None:
    """In a process of their own: they leave threads and processes behind."""
    code = "import test_draws as t; t.compared('aot_eager'); t.compared('inductor')"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True, timeout=300)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.99, 1.0])
def test_as_much_is_dropped_as_was_asked(rate: float) -> None:
    keys = counter.keys_of(5, 1, (Piece(0, 0, 4000, 4000),))
    mask = drawn(keys, (50,), (0,), mask_of(rate, torch.float64), torch.ones(1))
    wrong = abs(float((mask == 0).double().mean()) - rate)
    assert wrong <= 5 * (rate * (1 - rate) / mask.numel()) ** 0.5
    assert rate in (0, 1) or mask.unique().tolist() == [0, pytest.approx(1 / (1 - rate))]
