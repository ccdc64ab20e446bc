"""The class that stands in the place of torch's references, over :class:`shoal.rpc.RRef`."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
import torch.distributed.rpc as theirs
from torch._C._distributed_rpc import WorkerInfo
from torch.distributed.rpc.rref_proxy import RRefProxy as _RRefProxy

from ...errors import CallTimeout, UnsupportedOperation
from ...future import Future
from ...rpc import RRef as ShoalRRef
from ...rpc import async_execution
from ...rpc.calls.call import shown_as
from ...rpc.calls.default import UNSET
from ...rpc.codec import pickled as codec
from .packing import Packed, arrived, leaving, pack, unpack
from .state import state, the_agent
from .waiting import CallFuture, torchs_timeout

T = TypeVar("T")
#: the rank of the worker that gave a number, and the number
Id = tuple[int, int]

_torchs = theirs.RRef
RRefProxy: Any = _RRefProxy


class PyRRef:
    """A reference, with torch's methods and messages."""

    _ref: Any
    _deleted = False

    def __init__(self, value: Any, type_hint: object = None) -> None:
        if state.agent is None:
            _torchs(value)  # raises what torch raises
        agent = the_agent()
        self._begin(ShoalRRef(value, agent.agent), agent.new_id())

    @classmethod
    def _of(cls, ref: ShoalRRef[Any], rref_id: Id | None = None, fork_id: Id | None = None) -> PyRRef:
        """A reference that was made by a call, or that came in one."""
        made = TorchRRef.__new__(TorchRRef)
        agent = the_agent()
        rref_id = agent.new_id() if rref_id is None else rref_id
        made._begin(ref, rref_id, None if ref.is_owner() else fork_id or agent.new_id())
        return made

    def _begin(self, ref: ShoalRRef[Any], rref_id: Id, fork_id: Id | None = None) -> None:
        self._ref, self._rref_id, self._fork_id = ref, rref_id, fork_id
        self._type: Any = None
        self._profiling: Any = None
        the_agent().references.add(self)

    # -- the object ----------------------------------------------------------------------------

    def to_here(self, timeout: float = UNSET) -> Any:
        """The object, or a copy of it."""
        self._check_there("call to_here() on it")
        ref = self._ref
        if ref.is_owner():
            return ref.to_here(timeout)
        created = ref.created
        if created is not None and created.done() and isinstance(created.exception(), CallTimeout):
            raise RuntimeError(
                "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner "
                f"node does not exist: {created.exception()}"
            )
        future: Future[Packed] = ref._call(_fetch, timeout, (ref,), {})
        try:
            return unpack(future.wait())
        except CallTimeout as error:
            raise torchs_timeout(error) from error

    def local_value(self) -> Any:
        """The object itself, at its owner."""
        if not self.is_owner():
            agent = the_agent()
            raise RuntimeError(
                f"For UserRRef(rref_id={_shown(self._rref_id)}, fork_id={_shown(self._fork_id)}), "
                f"can't call localValue() on user {agent.get_worker_info()}. "
                f"Call it on owner {self.owner()}"
            )
        return self._ref.local_value()

    def owner(self) -> Any:
        """Torch's ``WorkerInfo`` of the owner."""
        worker = self._ref._owner
        return WorkerInfo(worker.name, worker.rank)

    def owner_name(self) -> str:
        """The name of the owner."""
        name: str = self._ref.owner_name()
        return name

    def is_owner(self) -> bool:
        """Whether this worker keeps the object."""
        owner: bool = self._ref.is_owner()
        return owner

    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows of the object."""
        confirmed: bool = self._ref.confirmed_by_owner()
        return confirmed

    def rpc_sync(self, timeout: float = UNSET) -> Any:
        """The methods of the object."""
        return RRefProxy(self, theirs.rpc_sync, timeout)

    def rpc_async(self, timeout: float = UNSET) -> Any:
        """The methods of the object, each of which gives a future."""
        return RRefProxy(self, theirs.rpc_async, timeout)

    def remote(self, timeout: float = UNSET) -> Any:
        """The methods of the object, each of which gives a reference."""
        return RRefProxy(self, theirs.remote, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Go backward from the object, which must be here."""
        if dist_autograd_ctx_id != -1 or not self.is_owner():
            raise UnsupportedOperation(
                "RRef.backward across workers needs torch.distributed.autograd, which does not work over "
                "shoal: call rref.rpc_sync().backward() where the whole graph is at the owner, and send "
                "gradients as tensors"
            )
        value = self._ref.local_value()
        if not isinstance(value, torch.Tensor):
            raise RuntimeError("RRef should contain a tensor for .backward()")
        value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call, unused-ignore]

    def __str__(self) -> str:
        if self._fork_id is None:
            return f"OwnerRRef({_shown(self._rref_id)})"
        return f"UserRRef(RRefId = {_shown(self._rref_id)}, ForkId = {_shown(self._fork_id)})"

    __repr__ = __str__

    # -- for torch's Python --------------------------------------------------------------------

    def _get_type(self, timeout: float = UNSET, blocking: bool = True) -> Any:
        if self._type is None:
            api = theirs.api
            self._type = (
                api._rref_typeof_on_owner(self, blocking)
                if self.is_owner()
                else api._rref_typeof_on_user(self, timeout, blocking)
            )
        return self._type

    def _get_future(self) -> CallFuture:
        made = self._ref.created if self._ref.created is not None else self._ref.fetch()
        return CallFuture(made, lambda future: future.value())

    def _set_profiling_future(self, future: Any) -> None:
        self._profiling = future

    def _get_profiling_future(self) -> Any:
        return self._profiling

    def _serialize(self) -> tuple[int, Id, Id]:
        self._check_there("call fork an UserRRef")
        return leaving(self._ref), self._rref_id, the_agent().new_id()

    @staticmethod
    def _deserialize(told: tuple[int, Id, Id]) -> PyRRef:
        number, rref_id, fork_id = told
        return PyRRef._of(arrived(number), rref_id, fork_id)

    def __reduce__(self) -> Any:
        if codec.route() is None:
            raise RuntimeError(
                "Can not pickle rref in python pickler, rref can only be pickled when using RPC"
            )
        return PyRRef._of, (self._ref, self._rref_id, the_agent().new_id())

    def _delete(self) -> None:
        """Let go of the object, because RPC ends."""
        self._deleted = self._fork_id is not None

    def _check_there(self, what: str) -> None:
        if self._deleted or self._ref._agent._closed:
            raise RuntimeError(f"{self} has been deleted. Cannot {what} after deletion.")


class TorchRRef(PyRRef, Generic[T]):
    """The class in the place of ``torch.distributed.rpc.RRef``."""


def _shown(ident: Id | None) -> str:
    assert ident is not None
    return f"GloballyUniqueId(created_on={ident[0]}, local_id={ident[1]})"


@shown_as(lambda ref: "a copy of an object")
@async_execution
def _fetch(ref: ShoalRRef[Any]) -> Future[Packed]:
    return ref.fetch().then(lambda future: pack(future.value()))
