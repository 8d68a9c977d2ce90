"""Codecs and error feedback: golden values, sizes, ties, and that nothing is lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.torch.compression import codecs as kernels
from allranks.torch.compression.codecs import (
    Codec,
    ColumnQuantizer,
    ErrorFeedback,
    FourBit,
    TopK,
    TwoBit,
)
from outer_simulation import four_bits, largest


def decoded(codec: Codec, flat: Tensor) -> Tensor:
    message = codec.encode(flat)
    assert message.dtype == torch.uint8
    assert message.numel() == codec.size_bytes(flat.numel(), flat.element_size())
    found = torch.zeros_like(flat)
    codec.add_decoded(message, found)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("count", "keep", "chunk"),
    [(0, 1, 4), (1, 1, 4), (4, 4, 4), (10, 3, 4), (9, 2, 8), (9000, 64, 4096), (33, 5, 7)],
)
def test_top_k_keeps_what_a_sort_keeps(
    count: int, keep: int, chunk: int, dtype: torch.dtype
) -> None:
    """With ties: there are only nine values."""
    generator = torch.Generator().manual_seed(count)
    flat = torch.randint(-4, 5, (count,), generator=generator).to(dtype) / 3
    assert torch.equal(decoded(TopK(keep, chunk), flat), largest(keep, chunk)(flat))


def test_golden_error_feedback_with_a_decay() -> None:
    flat = torch.tensor([1.0, -3.0, 2.0, 0.0])
    feedback = ErrorFeedback(TopK(1, 4), flat, decay=0.5)
    for residual in ([1.0, 0.0, 2.0, 0.0], [1.5, 0.0, 3.0, 0.0]):
        sent = torch.zeros(4)
        feedback.codec.add_decoded(feedback.encode(flat), sent)
        assert sent.tolist() == [0, -3, 0, 0]
        assert feedback.residual.tolist() == residual


def test_golden_bytes_of_a_message() -> None:
    """-3 at 1 and 2 at 2, then 5 at 4,095 of the next chunk: each 12 bits, low bits first."""
    flat = torch.zeros(2 * 4096)
    flat[1], flat[2], flat[8191], flat[4096 + 3] = -3, 2, 5, 4
    message = TopK(2).encode(flat)
    assert message[:16].view(torch.float32).tolist() == [-3, 2, 4, 5]
    assert message[16:].tolist() == [0x01, 0x20, 0x00, 0x03, 0xF0, 0xFF, 0, 0]
    coded = TopK(2, values="two-bit").encode(flat)  # |-3|, 5 are the larger of their chunks
    scales = coded[:8].view(torch.float32).tolist()
    assert scales == pytest.approx([11 / 10, 19 / 10])
    assert coded[8:].tolist() == [0b10_00_00_11, 0x01, 0x20, 0x00, 0x03, 0xF0, 0xFF, 0]


def test_two_bit_values_are_a_146th_of_every_step_in_fp32() -> None:
    size = TopK(64, values="two-bit").size_bytes(4096 * 1000)
    assert 4 * 4096 * 1000 / size == pytest.approx(16384 / (64 * 1.75 + 4), rel=1e-6)


def test_two_bits_always_leave_less() -> None:
    """Also of numbers whose sizes have nothing to do with each other."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(512, generator=generator) * 10 ** torch.randn(512, generator=generator)
    for part in flat.view(-1, 8):
        left = part - decoded(TopK(8, 8, "two-bit"), part)
        assert left.norm() < part.norm()


@pytest.mark.parametrize("values", ["raw", "two-bit"])
def test_what_was_sent_and_what_is_left_is_what_was_given(values: str) -> None:
    generator = torch.Generator().manual_seed(0)
    given, sent = torch.zeros(100, dtype=torch.float64), torch.zeros(100, dtype=torch.float64)
    feedback = ErrorFeedback(TopK(3, 16, values), given)
    for _ in range(20):
        flat = torch.randn(100, generator=generator, dtype=torch.float64)
        given += flat
        feedback.codec.add_decoded(feedback.encode(flat), sent)
    torch.testing.assert_close(sent + feedback.residual, given, rtol=1e-6, atol=1e-6)
    assert feedback.residual.abs().max() > 0.1
    other = ErrorFeedback(TopK(3, 16, values), given)
    other.residual.copy_(feedback.residual)
    assert torch.equal(other.encode(given), feedback.encode(given))


def test_what_is_not_finite_is_sent_once() -> None:
    flat = torch.tensor([1.0, torch.nan, 2.0, -torch.inf, 0.5, 0.25])
    feedback = ErrorFeedback(TopK(1, 3), flat)
    sent = torch.zeros(6)
    feedback.codec.add_decoded(feedback.encode(flat), sent)
    assert sent.isnan().tolist() == [False, True, *[False] * 4]
    assert sent[3] == -torch.inf
    assert feedback.residual.tolist() == [1, 0, 2, 0, 0.5, 0.25]


@pytest.mark.parametrize(("keep", "chunk"), [(0, 4), (5, 4), (1, 4097), (1, 0)])
def test_what_12_bits_cannot_index_is_refused(keep: int, chunk: int) -> None:
    with pytest.raises(RequestError, match="12 bits"):
        TopK(keep, chunk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 7, 512, 1300])
def test_four_bits_are_the_nearest_power_of_two(count: int, dtype: torch.dtype) -> None:
    """Of numbers of all sizes, among them a chunk of nothing but zeros."""
    generator = torch.Generator().manual_seed(count)
    flat = torch.randn(count, generator=generator).to(dtype)
    flat *= 10 ** torch.randn(count, generator=generator).to(dtype)
    flat[::9], flat[512:1024] = 0, 0
    assert torch.equal(decoded(FourBit(), flat), four_bits(flat))


def test_golden_bytes_of_four_bits() -> None:
    """6 is as far from 8 as from 4, and 1/16 from 1/8 as from nothing: the larger one is sent."""
    flat = torch.tensor([8.0, -6.0, 5.9, 3.0, -0.125, 0.0625, -0.06, 0.0, 1.0])
    message = FourBit().encode(flat)
    assert message[:5].tolist() == [0xF7, 0x66, 0x19, 0x08, 0x04]
    assert message[5:8].tolist() == [0] * 3 and message[8:12].view(torch.float32).item() == 8
    assert message.numel() == FourBit().size_bytes(9) == 16
    assert FourBit().size_bytes(4096) == 4096 // 2 + 4 * 8
    wanted = [8, -8, 4, 4, -0.125, 0.125, 0, 0, 1]
    assert decoded(FourBit(), flat).tolist() == wanted


@pytest.mark.parametrize("what", [torch.nan, torch.inf, -torch.inf])
def test_a_chunk_that_is_not_finite_is_seen_as_such(what: float) -> None:
    flat = torch.ones(1024)
    flat[3] = what
    found = decoded(FourBit(), flat)
    assert not found[:512].isfinite().any() and found[512:].tolist() == [1] * 512
    feedback = ErrorFeedback(FourBit(), flat)
    feedback.encode(flat)
    assert feedback.residual.tolist() == [0] * 1024


# --- the loops in C -----------------------------------------------------------------------


def numbers(count: int, dtype: torch.dtype) -> Tensor:
    """Ties, both zeros and what is not finite among them."""
    found = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    found[::7] = found[0].item()
    found[1::11] = 0.0
    found[2::13] = -0.0
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 9, 4096, 9001])
@pytest.mark.parametrize(
    "codec",
    [TopK(3, 7), TopK(64, 4096, "two-bit"), TwoBit(0.4), FourBit()],
    ids=lambda codec: str(codec)[:40],
)
def test_the_library_gives_the_bytes_of_torch(
    codec: Codec, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernels.LIBRARY is not None
    flat, there = numbers(count, dtype), numbers(count, dtype)
    first = flat[:1024] if isinstance(codec, FourBit) else flat  # its chunks are none then
    first[3::101], first[4::103] = torch.inf, -torch.inf
    alpha = 1 / 3 if isinstance(codec, FourBit) else -0.5  # exact: torch may fuse it
    if isinstance(codec, TwoBit | FourBit):
        first[5::107] = torch.nan
    found = []
    for library in (kernels.LIBRARY, None):
        monkeypatch.setattr(kernels, "LIBRARY", library)
        message, into = codec.encode(flat), there.clone()
        codec.add_decoded(message, into, alpha=alpha)
        found.append((message.tolist(), into))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1].nan_to_num(9), found[1][1].nan_to_num(9))
    assert count < 4096 or found[0][1].isfinite().sum() > count / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 31, 100, 777])
@pytest.mark.parametrize("bits", [1, 2, 8, 16])
def test_the_library_quantises_columns_as_torch_does(
    bits: int, length: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The means and ranges that it adds up in float64 may differ in their last bits."""
    quantizer = ColumnQuantizer(bits)
    columns = numbers(5 * length, dtype).view(5, length)
    columns[3], columns[4, -1] = 0.0, torch.nan
    messages, values, sums = [], [], []
    for library in (kernels.LIBRARY, None):
        monkeypatch.setattr(kernels, "LIBRARY", library)
        messages.append(quantizer.encode(columns))
        values.append(quantizer.decode(messages[0], length, dtype))
        sums.append(columns.clone())
        quantizer.add_decoded(messages[0], sums[-1], alpha=-1)
    assert torch.equal(values[0].nan_to_num(9), values[1].nan_to_num(9))
    assert torch.equal(sums[0].nan_to_num(9), sums[1].nan_to_num(9))
    bounds = [message[:4, -8:].contiguous().view(torch.float32) for message in messages]
    assert torch.allclose(*bounds, rtol=1e-6, atol=1e-7)
    other = quantizer.decode(messages[1], length, dtype)[:4]
    step = (bounds[0][:, 1:] - bounds[0][:, :1]) / quantizer.steps + 1e-6
    assert bool(((values[0][:4] - other).abs() <= 1.001 * step).all())
    if bits == 1:
        assert torch.equal(messages[0][:, :-8], messages[1][:, :-8])


def test_what_does_not_lie_in_one_piece_is_left_to_torch() -> None:
    every, codec = numbers(200, torch.float32), TwoBit(0.4)
    half = every.view(-1, 2)[:, 1]
    assert torch.equal(codec.encode(half), codec.encode(half.clone()))
