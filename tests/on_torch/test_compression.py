"""Messages of few bytes: what they stand for, how many bytes they are, and what is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from allranks.torch.compression.error_feedback import ErrorFeedback
from allranks.torch.compression.top_k import TopK


def decoded(codec: TopK, flat: Tensor) -> Tensor:
    message = codec.encode(flat)
    assert message.numel() == codec.size_bytes(flat.numel(), flat.element_size())
    found = torch.zeros_like(flat)
    codec.add_decoded(message, found)
    return found


def test_error_feedback_with_decay() -> None:
    """Of two equal ones the first is sent."""
    feedback = ErrorFeedback(TopK(chunk=4, keep=1, bits=0), torch.zeros(4), decay=0.5)
    for kept in ([1.0, 0, 2, 0], [1.5, 0, 3, 0]):
        message = feedback.encode(torch.tensor([1.0, -3, 2, 0]))
        sent = torch.zeros(4)
        feedback.codec.add_decoded(message, sent)
        assert sent.tolist() == [0, -3, 0, 0]
        assert feedback.kept.tolist() == kept


@pytest.mark.parametrize("count", [1, 5, 4096, 4097, 12_345])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_the_largest_of_each_chunk_are_kept(count: int, kind: torch.dtype) -> None:
    flat = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(kind)
    found = decoded(TopK(keep=64, bits=0), flat)
    for given, sent in zip(flat.split(4096), found.split(4096), strict=True):
        least = given.abs().sort(descending=True).values[: min(64, len(given))][-1]
        assert torch.equal(sent, torch.where(given.abs() >= least, given, 0.0))
    assert torch.equal(decoded(TopK(keep=4096, bits=0), flat), flat)


def test_two_bits_are_a_sign_and_one_of_two_magnitudes() -> None:
    flat = torch.tensor([0.9, -0.2, 0.0, -0.9, 0.61, 0.59])
    found = decoded(TopK(chunk=6, keep=4), flat)
    assert found.tolist() == pytest.approx([0.9, 0, 0, -0.9, 0.9, 0.3])


def test_the_bytes_are_those_of_the_paper() -> None:
    """64 of 4,096: 12 bits and 2 bits each, and a scale."""
    assert TopK().size_bytes(4096) == 64 * 14 // 8 + 4
    assert TopK(bits=0).size_bytes(4096) == 64 * 12 // 8 + 64 * 4


def test_all_is_sent_in_the_end() -> None:
    """What was sent and what is kept are together what was given."""
    given = torch.randn(10_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    feedback, sent = ErrorFeedback(TopK(), given), torch.zeros_like(given)
    for _ in range(5):
        feedback.codec.add_decoded(feedback.encode(given), sent)
    assert torch.allclose(sent + feedback.kept, 5 * given)
