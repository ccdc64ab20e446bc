"""Torch's own tests of RPC, as they lie in its package, run in ranks that live longer than a test.

Torch starts four processes for each test; here the bodies run in the ranks of a pool, one after another, with
shoal behind ``torch.distributed.rpc``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import io
import logging
import sys
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

import shoal.compat.rpc
from tests.compat.rank import Context
from tests.support.torch_tables import stand_in

#: the classes of torch's that hold tests, and the modules that they lie in
SUITES = {
    "RpcTest": "rpc_test",
    "TensorPipeAgentRpcTest": "rpc_test",
    "ParameterServerTest": "examples.parameter_server_test",
    "ReinforcementLearningRpcTest": "examples.reinforcement_learning_rpc_test",
}
RANKS = 4


@functools.cache
def suite(name: str) -> type[Any]:
    """One of torch's classes of tests, over shoal."""
    stand_in()
    shoal.compat.rpc.install()
    from importlib import import_module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: type[Any] = getattr(
            import_module(f"torch.testing._internal.distributed.rpc.{SUITES[name]}"), name
        )
    return found


def tests_of(name: str) -> list[str]:
    """The names of its tests."""
    return [test for test in dir(suite(name)) if test.startswith("test_")]


def run(context: Context, name: str, test: str) -> str:
    """Run one test on this rank; why it was skipped, or ""."""
    import torch.distributed.rpc as rpc

    case = _case(name)(test)
    case.rank = context.rank
    case.file_name = str(context.scratch / "place")
    _forget()
    written = io.StringIO()
    try:
        # Torch prints what a handler raises.
        with contextlib.redirect_stderr(written), contextlib.redirect_stdout(written), _quiet():
            getattr(case, test)()
    except unittest.SkipTest as skipped:
        return str(skipped)
    finally:
        with contextlib.redirect_stderr(written):
            if rpc._is_current_rpc_agent_set():
                rpc.shutdown(graceful=False)
            if dist.is_initialized():
                dist.destroy_process_group()
        rpc.api._ignore_rref_leak = True
    return ""


@functools.cache
def _case(name: str) -> type[Any]:
    theirs = suite(name)
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
        TensorPipeRpcAgentTestFixture,
    )

    case = type(name, (TensorPipeRpcAgentTestFixture, theirs, TestCase), {"__module__": __name__})
    globals()[name] = case  # where pickle finds it: some tests call their own methods at other ranks
    return case


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings, and what its logger says of failures that its tests make."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        logging.disable(logging.NOTSET)


def _forget() -> None:
    """Undo what tests leave in torch's modules, because torch runs each in new processes."""
    rpc: Any = sys.modules["torch.distributed.rpc"]
    rpc._init_counter = 0  # tests in which one rank meets nobody count on that rank alone
    rpc.backend_registry.BackendType = rpc.BackendType  # without those that tests registered
    module = sys.modules.get("torch.testing._internal.distributed.rpc.rpc_test")
    if module is not None:
        module.VALUE_FUTURE = concurrent.futures.Future()
        module.DONE_FUTURE = concurrent.futures.Future()
        module.foo_add = _foo_add(module)
        module.global_rref = None


@functools.cache
def _foo_add(module: Any) -> Any:
    return module.foo_add
