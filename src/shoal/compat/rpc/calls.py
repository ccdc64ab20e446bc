"""A call, and what runs at its other end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.distributed.rpc import internal as _internal

from ...common.wording import in_words
from ...errors import UnsupportedOperation
from ...future import Future
from ...rpc import async_execution
from ...rpc.calls.call import shown_as
from .packing import Packed, pack, packed, unpack
from .reference import PyRRef
from .state import the_agent
from .waiting import CallFuture

internal: Any = _internal


def rpc_builtin(to: Any, name: str, timeout: float, *args: Any, **kwargs: Any) -> CallFuture:
    """Call an operator of torch's by its name, such as ``aten::add``."""
    peer = the_agent().peer(to, timeout)
    return CallFuture(peer.call(_operator, name, args, kwargs), lambda future: future.value())


def rpc_python_udf(
    to: Any, pickled: bytes, tensors: list[torch.Tensor], timeout: float, deferred: bool
) -> CallFuture:
    """Call a function that was pickled with its arguments."""
    what = packed(pickled, tensors)
    peer = the_agent().peer(to, timeout)
    return CallFuture(peer.call(_run_later if deferred else _run, what), _result)


def remote_builtin(to: Any, name: str, timeout: float, *args: Any, **kwargs: Any) -> PyRRef:
    """Like :func:`rpc_builtin`; the result stays there."""
    return PyRRef._of(_connected(to, timeout).remote(_operator, name, args, kwargs))


def remote_python_udf(
    to: Any, pickled: bytes, tensors: list[torch.Tensor], timeout: float, deferred: bool
) -> PyRRef:
    """Like :func:`rpc_python_udf`; the result stays there."""
    what = packed(pickled, tensors)
    peer = _connected(to, timeout)
    return PyRRef._of(peer.remote(_make_later if deferred else _make, what))


def _connected(to: Any, timeout: float) -> Any:
    """A worker whose time for a call does not pass while it is connected to.

    What is late to make an object fails with its reference, as in torch, and there is one of a worker only.
    """
    peer = the_agent().peer(to, timeout)
    agent = the_agent().agent
    agent.line(peer.name, agent.timeout)
    return peer


def torchscript(to: Any, name: str, *_: object, **__: object) -> NoReturn:
    """Refuse a function that TorchScript has compiled."""
    raise UnsupportedOperation(
        f"{name} was compiled by TorchScript, which is not sent over shoal: pass the Python function that it "
        "was made of, or one that calls it"
    )


def _result(future: Future[Packed]) -> Any:
    """The result; raises what the function raised, as torch does."""
    result = unpack(future.value())
    try:
        internal._handle_exception(result)
    except Exception as error:
        kind = next((kind for kind in (ValueError, TypeError) if isinstance(error, kind)), RuntimeError)
        raise kind(in_words(error)) from error
    return result


# -- at the other end ------------------------------------------------------------------------------


def _shown(*_: object) -> str:
    return "a function of torch.distributed.rpc"


@shown_as(lambda name, args, kwargs: name)
def _operator(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    operator, _ = torch._C._jit_get_operation(name)
    return operator(*args, **kwargs)


@shown_as(_shown)
def _run(what: Packed) -> Packed:
    return pack(internal._run_function(unpack(what)))


@shown_as(_shown)
@async_execution
def _run_later(what: Packed) -> Future[Packed]:
    return _later(what, pack)


@shown_as(_shown)
def _make(what: Packed) -> Any:
    made = internal._run_function(unpack(what))
    internal._handle_exception(made)
    return made


@shown_as(_shown)
@async_execution
def _make_later(what: Packed) -> Future[Any]:
    def made(result: Any) -> Any:
        internal._handle_exception(result)
        return result

    return _later(what, made)


def _later(what: Packed, made: Callable[[Any], Any]) -> Future[Any]:
    """A future of ``made(value)`` of the future that a function returns."""
    later: Future[Any] = Future()
    result = internal._run_function(unpack(what))
    if isinstance(result, internal.RemoteException):
        _settle(later, made, lambda: result)
    elif isinstance(result, torch._C.Future):
        result.add_done_callback(lambda future: _settle(later, made, future.value))
    else:
        kind = type(result)
        raise RuntimeError(
            "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but got "
            f"{kind.__module__}.{kind.__qualname__}"
        )
    return later


def _settle(later: Future[Any], made: Callable[[Any], Any], value: Callable[[], Any]) -> None:
    try:
        later.set_result(made(_or_told(value)))
    except BaseException as error:
        later.set_exception(error)


def _or_told(value: Callable[[], Any]) -> Any:
    """A value, or in torch's form what it failed with."""
    return internal._run_function(internal.PythonUDF(value, (), {}))


replacements: dict[str, Callable[..., Any]] = {
    "_invoke_rpc_builtin": rpc_builtin,
    "_invoke_rpc_python_udf": rpc_python_udf,
    "_invoke_remote_builtin": remote_builtin,
    "_invoke_remote_python_udf": remote_python_udf,
    "_invoke_rpc_torchscript": torchscript,
    "_invoke_remote_torchscript": torchscript,
}
