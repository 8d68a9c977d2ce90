"""Attention that is cut by heads is torch's own, in every form of its arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.torch.comm.comm import Comm
from allranks.torch.parallel.tensor.cutting import cut_model
from allranks.torch.parallel.tensor.exchange import TensorExchange
from allranks.torch.parallel.tensor.plan import default_plan

N, HEADS, T, S, E = 3, 2, 5, 4, 8


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def barred(*shape: int) -> Tensor:
    """A mask of truth values that leaves some key to each query."""
    mask = torch.rand(*shape) < 0.5
    mask[..., 0] = False
    return mask


def nothing_seen(*shape: int) -> Tensor:
    mask = barred(*shape)
    mask[..., 1, :] = True
    return mask


def sequence(m: Any, length: int) -> Tensor:
    return drawn(N, length, E) if m.batch_first else drawn(length, N, E)


def cross(m: Any, **keywords: Any) -> Any:
    return m(sequence(m, T), sequence(m, S), sequence(m, S), **keywords)


def itself(m: Any, **keywords: Any) -> Any:
    x = sequence(m, T)
    return m(x, x, x, **keywords)


def single(m: Any, **keywords: Any) -> Any:
    x = drawn(T, E)
    return m(x, x, x, **keywords)


def one_memory(m: Any) -> Any:
    x, y = sequence(m, T), sequence(m, S)
    return m(x, y, y, need_weights=False)


AHEAD = torch.ones(T, T, dtype=torch.bool).triu(1)
FORMS: dict[str, Callable[[Any], Any]] = {
    "itself": itself,
    "without weights": lambda m: itself(m, need_weights=False),
    "each head's weights": lambda m: itself(m, average_attn_weights=False),
    "another sequence": cross,
    "a memory": one_memory,
    "one sample": single,
    "one sample, masked by head": lambda m: single(m, attn_mask=drawn(HEADS, T, T)),
    "a mask": lambda m: cross(m, attn_mask=barred(T, S)),
    "masks by head": lambda m: cross(m, attn_mask=barred(N * HEADS, T, S), need_weights=False),
    "numbers": lambda m: cross(m, attn_mask=drawn(T, S)),
    "padding": lambda m: cross(m, key_padding_mask=barred(N, S), need_weights=False),
    "both": lambda m: cross(m, attn_mask=barred(T, S), key_padding_mask=barred(N, S)),
    "both by head": lambda m: cross(
        m, attn_mask=drawn(N * HEADS, T, S), key_padding_mask=drawn(N, S)
    ),
    "causal": lambda m: itself(m, attn_mask=AHEAD, is_causal=True, need_weights=False),
    "causal, with weights": lambda m: itself(m, attn_mask=AHEAD, is_causal=True),
    "nothing seen": lambda m: cross(m, attn_mask=nothing_seen(T, S), need_weights=False),
}


def cut(attention: nn.Module, leaves: int = 0) -> Any:
    holder = nn.ModuleDict({"attention": copy.deepcopy(attention)})
    exchange = TensorExchange(Comm(), leaves)
    cut_model(holder, default_plan(holder, 1), exchange)
    return holder["attention"]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("leaves", [0, HEADS])
@pytest.mark.parametrize("form", FORMS)
def test_it_is_torchs_own(form: str, leaves: int, first: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, HEADS, batch_first=first, dtype=torch.float64)
    nn.init.normal_(theirs.in_proj_bias)
    both = []
    for attention in (theirs, cut(theirs, leaves)):
        torch.manual_seed(1)
        output, weights = FORMS[form](attention)
        loss = output.sin().sum() + (0 if weights is None else weights.square().sum())
        loss.backward()
        found = {"output": output, "weights": weights}
        inside = (("in", attention.in_proj_weight), ("bias", attention.in_proj_bias))
        found |= {name: parameter.grad for name, parameter in inside}
        both.append(found | {"out": attention.out_proj.weight.grad})
    for name, wanted in both[0].items():
        if wanted is None:
            assert both[1][name] is None
        else:
            torch.testing.assert_close(both[1][name], wanted, rtol=1e-12, atol=1e-13)
            assert wanted.detach().isfinite().all()


def test_a_fused_kernel_of_evaluation_is_given_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.TransformerEncoderLayer(E, HEADS, 16, batch_first=True, dtype=torch.float64).eval()
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, padding = drawn(N, T, E), barred(N, T)
    with torch.no_grad():
        wanted = model(x, src_key_padding_mask=padding)
    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
        monkeypatch.delattr(torch, name)
    cut_model(model, default_plan(model, 1), TensorExchange(Comm()))
    with torch.no_grad():
        torch.testing.assert_close(model(x, src_key_padding_mask=padding), wanted)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: cross(m, attn_mask=barred(S, T)), "attn_mask of shape"),
        (lambda m: cross(m, attn_mask=barred(N, T, S)), "attn_mask of shape"),
        (lambda m: cross(m, key_padding_mask=barred(N, T)), "key_padding_mask of shape"),
        (lambda m: cross(m, is_causal=True), "without attn_mask"),
    ],
)
def test_masks_that_torch_refuses_are_refused(call: Callable[[Any], Any], message: str) -> None:
    attention = nn.MultiheadAttention(E, HEADS, batch_first=True, dtype=torch.float64)
    with pytest.raises((RuntimeError, AssertionError)):
        call(attention)
    with pytest.raises(RequestError, match=message):
        call(cut(attention))
