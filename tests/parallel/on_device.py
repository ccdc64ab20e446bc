"""A program: data-parallel training on the pretended device, held against the same on the CPU, bit by bit.

Its argument is the backend: "device", or "fake-nccl".

Every rank is a process: autograd has one thread for a device, which waits for the other ranks at the end of
backward.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.parallel import hooks
from shoal.parallel.averaging import average_parameters
from tests.support import pretend_device
from tests.support.pretend_device import PretendRuntime

sys.path.insert(0, str(Path(__file__).parent.parent / "backend" / "thirdparty"))
from tests.parallel.models import batches, fixed, loss_of, mlp
from tests.parallel.training import sgd, train, wrapped
from tests.support.device_engine import use_device_engine
from tests.support.fake_streams import FakeStream
from tests.support.nccl_engine import use_fake_nccl

STEPS = 3

Device = torch.device | str


class Centred(nn.Module):
    """A model with a buffer, and with a layer that every second rank leaves out."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        y = y - self.mean
        return self.last(y if self.skips else self.extra(y))


def trained(
    group: shoal.ProcessGroup,
    device: Device,
    *,
    make: Callable[[], nn.Module] = mlp,
    hook: Callable[..., tuple[Any, Any]] | None = None,
    zero: dict[str, Any] | None = None,
    uneven: bool = False,
    averaged: bool = False,
    copies: int = 0,
    **options: Any,
) -> list[torch.Tensor]:
    net = make().to(device)
    net.skips = bool(group.rank % 2) and options.get("find_unused_parameters", False)
    model = wrapped(group, net, device_ids=[device] * copies or None, **options)
    optimizer: torch.optim.Optimizer = sgd(model)
    if zero is not None:
        kind = shoal.ZeroRedundancyOptimizer
        optimizer = kind(model.parameters(), torch.optim.SGD, group=group, lr=0.1, momentum=0.9, **zero)
    if hook is not None:
        model.register_comm_hook(*hook(group, model, optimizer))
    data = batches(STEPS * group.size)[group.rank :: group.size]
    with shoal.Join([model] if zero is None else [model, optimizer], enable=uneven):
        mine = [(x.to(device), y.to(device)) for x, y in data[: STEPS - uneven * group.rank]]
        train(model, mine, optimizer=lambda _: optimizer)
    if averaged:
        average_parameters(net.parameters(), group)
    return [x.detach().cpu() for x in (*net.parameters(), *net.buffers())]


def centred() -> nn.Module:
    return fixed(Centred().double())


def centred_in_single() -> nn.Module:
    return fixed(Centred())


def branches() -> nn.Module:
    return fixed(Branches().double())


def without_state(hook: Any, *_: Any) -> tuple[None, Any]:
    return None, hook


def power_sgd(group: shoal.ProcessGroup, *_: Any) -> tuple[Any, Any]:
    return hooks.PowerSGDState(group, start_powerSGD_iter=2), hooks.powerSGD_hook


HALF = shoal.MixedPrecision(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16
)

CASES: dict[str, Callable[[shoal.ProcessGroup, Device], list[torch.Tensor]]] = {
    "views": trained,
    "copying": partial(trained, gradient_as_bucket_view=False),
    "buffers": partial(trained, make=centred),
    "unused": partial(trained, make=centred, find_unused_parameters=True),
    "skipped": partial(
        trained, make=centred, find_unused_parameters=True, skip_all_reduce_unused_params=True
    ),
    "static graph": partial(trained, static_graph=True),
    "copies": partial(trained, copies=2),
    "copies, buffers, unused": partial(trained, copies=2, make=centred, find_unused_parameters=True),
    "mixed precision": partial(trained, make=centred_in_single, mixed_precision=HALF),
    "mixed precision, copies": partial(trained, make=centred_in_single, mixed_precision=HALF, copies=2),
    "several streams": partial(trained, make=branches),
    "several streams, copies": partial(trained, make=branches, copies=2),
    "join": partial(trained, uneven=True),
    "averaging": partial(trained, averaged=True),
    **{
        hook.__name__: partial(trained, hook=partial(without_state, hook))
        for hook in (
            hooks.allreduce_hook,
            hooks.fp16_compress_hook,
            hooks.bf16_compress_hook,
            hooks.fp16_compress_wrapper(hooks.allreduce_hook),
            hooks.quantization_pertensor_hook,
            hooks.quantization_perchannel_hook,
        )
    },
    "powerSGD_hook": partial(trained, hook=power_sgd),
    "buffers, hook": partial(trained, make=centred, hook=partial(without_state, hooks.allreduce_hook)),
    "unused, hook": partial(
        trained,
        make=centred,
        find_unused_parameters=True,
        hook=partial(without_state, hooks.allreduce_hook),
    ),
    "zero": partial(trained, zero={}),
    "zero, views": partial(trained, zero={"parameters_as_bucket_view": True}),
    "zero, join": partial(trained, zero={}, uneven=True),
    "zero in backward": partial(
        trained,
        zero={"overlap_with_ddp": True},
        hook=lambda _, *both: (None, hooks.hook_with_zero_step(hooks.allreduce_hook, *both)),
    ),
}


class Branches(nn.Module):
    """Two layers in one bucket, whose backward passes run on different streams, the first of them slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _OnOwnStream.apply(self.last(x), 0.0) + _OnOwnStream.apply(self.first(x), 0.05)
        if y.requires_grad:
            y.register_hook(_rejoin_later)
        return y


class _OnOwnStream(torch.autograd.Function):
    """Runs backward on a new stream from here on, as autograd does where forward ran on one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if gradient.device.type != "cpu":
            stream = _runtime.stream(gradient.device, "branch")
            stream.wait_event(_runtime.record(_default))
            stream.enqueue(partial(time.sleep, ctx.seconds))
            _branches.append(stream)
            _runtime._current.streams[gradient.device] = stream
        return gradient, None


def _rejoin_later(gradient: torch.Tensor) -> None:
    """Let the caller's stream wait for those of backward at its end, as autograd does."""

    def rejoin() -> None:
        while _branches:
            _default.wait_event(_runtime.record(_branches.pop()))
        _runtime._current.streams.pop(gradient.device, None)

    if gradient.device.type != "cpu":
        torch.autograd.Variable._execution_engine.queue_callback(rejoin)


_runtime: PretendRuntime
_default: FakeStream
_branches: list[FakeStream] = []


def main() -> None:
    global _runtime
    _runtime = runtime = pretend_device.make()  # before autograd counts the devices
    share_default_stream(runtime)
    backend = sys.argv[1]
    if backend == "device":
        use_device_engine(runtime)
    else:
        use_fake_nccl(runtime)
    with shoal.init() as group:
        expected = {name: case(group, "cpu") for name, case in CASES.items()}
    with shoal.init(backend=backend) as group:
        for name, case in CASES.items():
            found = case(group, pretend_device.DEVICE)
            for index, (a, b) in enumerate(zip(expected[name], found, strict=True)):
                assert torch.equal(a, b), f"{name}: tensor {index} is\n{b} on the device and\n{a} on the CPU"
        check_that_the_host_does_not_wait(group, runtime)
    assert not runtime.broken(), "the group was closed before its streams had sent what was enqueued"
    print("equal on the device and on the CPU")


def share_default_stream(runtime: PretendRuntime) -> None:
    """Let all threads enqueue on one stream unless they use another: autograd has a thread for the device."""
    global _default
    _default = runtime.stream(pretend_device.DEVICE, "default")
    runtime.current_stream = (  # type: ignore[method-assign]
        lambda device: runtime._current.__dict__.setdefault("streams", {}).get(device) or _default
    )


#: Options of the wrapper with which a training step never blocks the host on the device.
NOT_BLOCKING: dict[str, dict[str, Any]] = {
    "views": {},
    "copying": {"gradient_as_bucket_view": False},
    "unused": {"find_unused_parameters": True},
    "skipped": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    "static graph": {"static_graph": True},
    "mixed precision": {"mixed_precision": HALF},
    "copies": {"device_ids": 2},
    "copies, mixed precision": {"device_ids": 2, "mixed_precision": HALF},
    "hook": {"hook": hooks.fp16_compress_hook},
    "zero": {},
}

#: For some of them, the options of a Join around the steps.
JOINED = {"views": {}, "unused": {"throw_on_early_termination": True}}


def check_that_the_host_does_not_wait(group: shoal.ProcessGroup, runtime: PretendRuntime) -> None:
    """A training step only enqueues work; the host meets the other ranks, and not the device."""
    device = pretend_device.DEVICE
    data = [tuple(x.to(device) for x in batch) for batch in batches(STEPS, dtype=torch.float32)]
    for name, options in NOT_BLOCKING.items():
        net = centred_in_single().to(device)
        net.skips = group.rank == 1 and "find_unused_parameters" in options
        model = wrapped(group, net, **(options | {"device_ids": [device] * options.get("device_ids", 0)}))
        optimizer: torch.optim.Optimizer = sgd(model)
        if name == "zero":
            optimizer = shoal.ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.SGD, group=group, lr=0.1, momentum=0.9
            )
        with shoal.Join([model], enable=name in JOINED, **JOINED.get(name, {})):
            before = runtime.blocked
            for batch in data:
                optimizer.zero_grad()
                with model.no_sync():
                    loss_of(model, batch).backward()
                loss_of(model, batch).backward()
                optimizer.step()
            assert runtime.blocked == before, f"{name}: the host waited for the device in a training step"
        assert {bucket.flat.device for bucket in model._reducer.buckets} == {device}


if __name__ == "__main__":
    main()
