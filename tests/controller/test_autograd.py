"""The graph of autograd is on the master, and its operations run on the nodes."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal import UnsupportedOperation
from shoal.controller import Master
from shoal.controller.tensor.autograd import DeviceGuard

NODE = "node:1"


def test_backward_goes_over_the_master_and_two_nodes(master: Master) -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.to("node:0") * 2
    z = (y.to("node:1") ** 2).sum()
    z.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [8, 8, 8]
    assert x.grad.device.type == "cpu"


def test_a_thread_may_begin_with_a_backward_pass(master: Master) -> None:
    x = torch.ones(2, device=NODE, requires_grad=True)
    for run in (lambda loss: loss.backward(), torch.autograd.backward, lambda y: torch.autograd.grad(y, x)):
        loss = (x * x).sum()
        failed: list[BaseException] = []

        def backward(run=run, loss=loss, failed=failed) -> None:  # type: ignore[no-untyped-def]
            try:
                run(loss)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        assert not failed


def test_gradients_accumulate_and_hooks_see_them(master: Master) -> None:
    x = torch.ones(2, device=NODE, requires_grad=True)
    seen = []
    x.register_hook(lambda gradient: seen.append(gradient.device))
    for _ in range(2):
        (x * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6, 6]
    assert seen == [torch.device(NODE)] * 2


def test_views_and_in_place_operations_are_differentiated(master: Master) -> None:
    def run(device: str) -> torch.Tensor:
        x = torch.arange(6.0, device=device, requires_grad=True)
        y = x * 1
        y.view(2, 3)[1].mul_(3)
        y[0] = 7
        y.sum().backward()
        assert x.grad is not None
        return x.grad.cpu()

    assert torch.equal(run(NODE), run("cpu"))


def test_what_was_saved_and_then_written_is_refused(master: Master) -> None:
    x = torch.ones(2, device=NODE, requires_grad=True)
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_functions_checkpoints_and_transforms_are_those_of_torch(master: Master) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            assert ctx.saved_tensors[0].device == torch.device(NODE)
            return gradient * 2

    x = torch.ones(2, device=NODE, requires_grad=True)
    checkpoint(lambda x: Double.apply(x).sin(), x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), torch.cos(torch.full((2,), 2.0)) * 2)
    assert torch.func.grad(lambda x: (x**3).sum())(x.detach()).tolist() == [3, 3]
    assert torch.func.vmap(lambda x: x * 2)(torch.ones(2, 3, device=NODE)).tolist() == [[2] * 3] * 2


def test_a_checkpoint_keeps_the_numbers_of_dropout(master: Master) -> None:
    x = torch.ones(1000, device=NODE, requires_grad=True)
    y = checkpoint(lambda x: nn.functional.dropout(x, 0.5), x, use_reentrant=False)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), y.detach().cpu())


def test_inference_mode_gives_the_same(master: Master) -> None:
    x, layer = torch.randn(2, 3), nn.Linear(3, 4)
    want = layer(x)
    layer = layer.to(NODE)
    with torch.inference_mode():
        got = layer(x.to(NODE)).reshape(-1).cpu()
    assert torch.equal(got, want.detach().reshape(-1))


def test_an_error_of_an_operation_leaves_a_backward_pass(master: Master) -> None:
    assert not hasattr(DeviceGuard(), "__dict__")  # with one, the error would end the process now and then
    embedding = nn.Embedding(4, 2, sparse=True).to(NODE)
    loss = embedding(torch.tensor([1, 2], device=NODE)).sum()
    for run in (
        lambda: loss.backward(retain_graph=True),
        lambda: torch.autograd.grad(loss, embedding.weight),
    ):
        with pytest.raises(UnsupportedOperation, match="nodes hold dense tensors"):
            run()
    x = torch.ones(2, device=NODE, requires_grad=True)
    (x * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3]
