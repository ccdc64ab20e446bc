"""The fused cells of LSTM and GRU, which torch has for GPUs only but uses for every device but the CPU.

Each is computed with the operators of which the CPU's own cells are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .operators import special


def _sum(*terms: Tensor | None) -> Tensor:
    first, *rest = [each for each in terms if each is not None]
    for each in rest:
        first = first + each
    return first


@special("aten::_thnn_fused_lstm_cell")
def _lstm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    return _lstm_cell(*args, **kwargs)


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    i, f, g, o = _sum(input_gates, input_bias, hidden_gates, hidden_bias).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


@special("aten::_thnn_fused_lstm_cell_backward_impl")
def _lstm_backward(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    grad_hy, grad_cy, cx, cy, workspace, has_bias = args
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    tanh = cy.tanh()
    grad_o = None if grad_hy is None else grad_hy * tanh
    grad_c = _sum(None if grad_hy is None else grad_hy * o * (1 - tanh * tanh), grad_cy)
    grad_o = torch.zeros_like(o) if grad_o is None else grad_o * o * (1 - o)
    gates = torch.cat(
        [grad_c * g * i * (1 - i), grad_c * cx * f * (1 - f), grad_c * i * (1 - g * g), grad_o], 1
    )
    return gates, grad_c * f, gates.sum(0) if has_bias else None


@special("aten::_thnn_fused_gru_cell")
def _gru(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return _gru_cell(*args, **kwargs)


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    ir, ii, inew = _sum(input_gates, input_bias).chunk(3, 1)
    hr, hi, hnew = _sum(hidden_gates, hidden_bias).chunk(3, 1)
    r, i = (hr + ir).sigmoid(), (hi + ii).sigmoid()
    new = (inew + hnew * r).tanh()
    return (hx - new) * i + new, torch.cat([r, i, new, hx, hnew], 1)


@special("aten::_thnn_fused_gru_cell_backward")
def _gru_backward(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    grad_hy, workspace, has_bias = args
    r, i, new, hx, hnew = workspace.chunk(5, 1)
    grad_new = grad_hy * (1 - i) * (1 - new * new)
    grad_i = grad_hy * (hx - new) * i * (1 - i)
    grad_r = grad_new * hnew * r * (1 - r)
    of_input = torch.cat([grad_r, grad_i, grad_new], 1)
    of_hidden = torch.cat([grad_r, grad_i, grad_new * r], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad_hy * i, *biases
