"""The beginning and the end of torch.distributed.rpc, and its settings."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import urlsplit

import torch.distributed.rpc as theirs

from ... import config
from ...errors import UnsupportedOperation, WorkerLost
from ...net import Deadline
from ...rendezvous import RendezvousPoint, Request, Venue
from ...rendezvous.caller_store import store_address
from ...rpc.calls.default import call_timeout
from ...rpc.calls.holds import drop
from ...rpc.connection.meeting import WorkerMeeting, keys_of
from ...rpc.join import HANDLERS, at_place, checked_settings
from ...store import adopt
from ...torch_terms import BACKEND
from .state import TorchAgent, state, the_agent

#: seconds until what other processes let go of at their end counts as leaked
_SETTLING = 2.0
_PAUSE = 0.01
#: seconds for what torch's Python exchanges between workers that have all come
_EXCHANGE = 60.0
_originals: dict[str, Callable[..., Any]] = {
    name: getattr(theirs, name)
    for name in (
        "_is_current_rpc_agent_set",
        "_get_current_rpc_agent",
        "_set_and_start_rpc_agent",
        "_reset_current_rpc_agent",
        "_cleanup_python_rpc_handler",
        "_delete_all_user_and_unforked_owner_rrefs",
        "_destroy_rref_context",
        "_rref_context_get_debug_info",
        "get_rpc_timeout",
        "_set_rpc_timeout",
    )
}
_originals["init_backend"] = theirs.backend_registry.init_backend
_originals["_wait_all_workers"] = theirs.api._wait_all_workers
_originals["_get_should_profile"] = theirs.api._get_should_profile


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the agent; that of another backend than torch's own is not shoal's business."""
    if backend.name != "TENSORPIPE":
        return _originals["init_backend"](backend, *args, **kwargs)
    return _begin(*args, **kwargs)


def _begin(store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any) -> TorchAgent:
    if not isinstance(rpc_backend_options, theirs.TensorPipeRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}"
        )
    timeout = call_timeout(rpc_backend_options.rpc_timeout, config.RPC_TIMEOUT.get(), "rpc_timeout")
    handlers = max(HANDLERS, rpc_backend_options.num_worker_threads)
    settings = checked_settings(timeout, None, handlers, device_maps=rpc_backend_options.device_maps)
    deadline = Deadline(config.TIMEOUT.get())
    ours = adopt(store)
    # Whoever reads torch's store is trusted by torch: so the workers may agree on their secret in it.
    venue = Venue(
        ours, rank, world_size, job=f"{BACKEND}/rpc", epoch=0, private=True, address=store_address(ours)
    )
    request = Request(urlsplit("store://"), rank, world_size, config.secret(), deadline)
    place = RendezvousPoint.at(venue, request)
    try:
        _check_kind(place, bool(world_size))
        if not world_size:
            return TorchAgent(at_place(place, name, settings), None)
        # Torch counts the meetings of a store itself.
        meeting = WorkerMeeting(
            keys_of(place.store, "meeting", 0), place.here, name, rank, world_size, "shutdown"
        )
        meeting.gather(deadline)
        try:
            agent = TorchAgent(at_place(place, name, settings), meeting)
        except BaseException as error:
            meeting.fail(error)
            raise
        state.agent = agent  # others may call as soon as they have come
        try:
            meeting.join(deadline)
        except BaseException:
            state.agent = None
            agent.shutdown()
            raise
        return agent
    except BaseException:
        place.close()
        raise


def _check_kind(place: RendezvousPoint, fixed: bool) -> None:
    mine = b"fixed" if fixed else b"coming and going"
    if place.store.compare_set("rpc/kind", b"", mine) != mine:
        raise RuntimeError(
            "RPC group mixes statically and dynamically initialized members which is not supported."
        )


def is_current_rpc_agent_set() -> bool:
    return state.agent is not None or _originals["_is_current_rpc_agent_set"]()


def get_current_rpc_agent() -> Any:
    return _originals["_get_current_rpc_agent"]() if state.agent is None else state.agent


def set_and_start_rpc_agent(agent: Any) -> None:
    if isinstance(agent, TorchAgent):
        state.agent = agent
    else:
        _originals["_set_and_start_rpc_agent"](agent)


def reset_current_rpc_agent() -> None:
    if state.agent is None:
        _originals["_reset_current_rpc_agent"]()
    state.agent = None


def wait_all_workers(timeout: float = 0.0) -> None:
    """Wait for all that have joined together; those that come and go wait for nobody.

    Raises:
        WorkerLost: one has died, for which torch's own function waits for ever.
    """
    if state.agent is None:
        _originals["_wait_all_workers"](timeout)
    elif state.agent.meeting is not None:
        deadline = Deadline(call_timeout(timeout, math.inf))
        state.agent.meeting.assemble(state.agent.agent, deadline)
        # All are there, so this takes a moment.
        _originals["_wait_all_workers"](min(max(deadline.remaining(), _PAUSE), _EXCHANGE))


def delete_references(timeout: float = 0.0) -> None:
    """Let go of all objects of others; their owners know when this returns."""
    if state.agent is None:
        _originals["_delete_all_user_and_unforked_owner_rrefs"]()
        return
    agent = state.agent.agent
    for ref in list(state.agent.references):
        ref._delete()
    for ident, owner in agent.references.give_up():
        with contextlib.suppress(WorkerLost):  # with the owner the object is gone too
            agent.ask(owner, drop, ident, agent.worker.incarnation).wait()


def destroy_rref_context(ignore_leak: bool) -> None:
    """Refuse, unless ``ignore_leak``, to end while others hold objects of this worker."""
    if state.agent is None:
        _originals["_destroy_rref_context"](ignore_leak)
        return
    deadline = time.monotonic() + _SETTLING
    while not ignore_leak and (leaks := _held_by_others()):
        if time.monotonic() > deadline:
            raise RuntimeError("Leaking RRef: " + "; ".join(leaks))
        time.sleep(_PAUSE)


def _held_by_others() -> list[str]:
    ledger = the_agent().agent.references.ledger
    return [f"{ident}, made by {owned.made}" for ident, owned in ledger.held().items() if owned.holders]


def rref_context_get_debug_info() -> dict[str, str]:
    """Numbers of references, in torch's form."""
    if state.agent is None:
        info: dict[str, str] = _originals["_rref_context_get_debug_info"]()
        return info
    references = state.agent.agent.references
    held = [owned for owned in references.ledger.held().values() if owned.holders]
    pending = references.pending()
    return {
        "num_owner_rrefs": str(len(held)),
        "num_forks": str(sum(len(owned.holders) for owned in held)),
        "num_pending_users": str(pending),
        "num_pending_futures": str(pending),
    }


def get_rpc_timeout() -> float:
    timeout = the_agent().agent.timeout if state.agent else _originals["get_rpc_timeout"]()
    return 0.0 if timeout == math.inf else timeout


def set_rpc_timeout(timeout: float) -> None:
    if state.agent is None:
        _originals["_set_rpc_timeout"](timeout)
    else:
        state.agent.agent.timeout = call_timeout(timeout, math.inf)


def no_autograd() -> NoReturn:
    """Refuse a context of dist_autograd."""
    raise UnsupportedOperation(
        "torch.distributed.autograd does not work over shoal: no graph goes over a call; send "
        "x.detach(), and gradients as tensors"
    )


def cleanup_python_rpc_handler() -> None:
    if state.agent is None:
        _originals["_cleanup_python_rpc_handler"]()


def get_should_profile() -> bool:
    """Torch's old profiler follows calls through torch's own agents only."""
    return state.agent is None and bool(_originals["_get_should_profile"]())


replacements: dict[str, Callable[..., Any]] = {
    "init_backend": init_backend,
    "_is_current_rpc_agent_set": is_current_rpc_agent_set,
    "_get_current_rpc_agent": get_current_rpc_agent,
    "_set_and_start_rpc_agent": set_and_start_rpc_agent,
    "_reset_current_rpc_agent": reset_current_rpc_agent,
    "_cleanup_python_rpc_handler": cleanup_python_rpc_handler,
    "_wait_all_workers": wait_all_workers,
    "_get_should_profile": get_should_profile,
    "_delete_all_user_and_unforked_owner_rrefs": delete_references,
    "_destroy_rref_context": destroy_rref_context,
    "_rref_context_get_debug_info": rref_context_get_debug_info,
    "get_rpc_timeout": get_rpc_timeout,
    "_set_rpc_timeout": set_rpc_timeout,
}
