"""Operators that are recorded: what a recording depends on, and what it is told of tensors of two places."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal import DeviceMismatch, UnsupportedOperation
from shoal.controller import Master

NODE = "node:0"


def _attention(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def test_a_recording_is_none_of_the_autocast_of_this_process(master: Master) -> None:
    x = torch.randn(1, 2, 5, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _attention(x).dtype == torch.bfloat16
        assert _attention(x.to(NODE)).dtype == torch.float32
    assert torch.equal(_attention(x.to(NODE)).cpu(), _attention(x))


def test_a_recording_follows_the_settings_of_attention(master: Master) -> None:
    x = torch.randn(1, 2, 9, 8).bfloat16()
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    results = []
    try:
        for allow in (False, True):
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allow)
            with sdpa_kernel(SDPBackend.MATH):
                results.append(_attention(x))
                assert torch.equal(_attention(x.to(NODE)).cpu(), results[-1])
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)
    assert not torch.equal(*results)


@pytest.mark.parametrize(("width", "layers"), [(2, 2), (10, 2), (64, 1)])
def test_a_layer_gives_the_same_with_gradients_and_without(master: Master, width: int, layers: int) -> None:
    here, x = nn.LSTM(width, 2 * width, num_layers=layers), torch.randn(4, 3, width)
    want = here(x)[0].detach()
    with torch.no_grad():
        inferred = here(x)[0]
    there, x = here.to(NODE), x.to(NODE)
    for _ in range(2):
        assert torch.equal(there(x)[0].detach().cpu(), want)
        with torch.no_grad():
            assert torch.equal(there(x)[0].cpu(), inferred)


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.GRUCell])
def test_weights_that_stayed_here_are_named(master: Master, make: type[nn.Module]) -> None:
    module, x = make(3, 4), torch.randn(2, 3)
    with pytest.raises(DeviceMismatch, match="on cpu"):
        module(x.to(NODE))
    with pytest.raises(DeviceMismatch, match="on cpu"):
        module.to(NODE)(x)


def test_an_encoder_that_takes_nested_tensors_is_refused_in_words(master: Master) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    x, padding = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False, False, False]])
    nested = nn.TransformerEncoder(layer, 1).eval().to(NODE)
    with torch.no_grad(), pytest.raises(UnsupportedOperation, match="enable_nested_tensor=False"):
        nested(x.to(NODE), src_key_padding_mask=padding.to(NODE))
    dense = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    with torch.no_grad():
        want = dense(x, src_key_padding_mask=padding)
        got = dense.to(NODE)(x.to(NODE), src_key_padding_mask=padding.to(NODE))
    assert torch.equal(got.cpu(), want)
