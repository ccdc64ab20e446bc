"""Operators that are recorded: what a recording depends on, and what it is told of tensors of two places."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal import DeviceMismatch
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


def test_a_layer_gives_the_same_with_gradients_and_without(master: Master) -> None:
    here, x = nn.LSTM(10, 20), torch.randn(4, 3, 10)
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
