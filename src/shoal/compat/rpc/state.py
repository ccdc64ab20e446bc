"""The agent that stands behind torch.distributed.rpc in this process."""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from typing import Any

from torch._C._distributed_rpc import WorkerInfo

from ...errors import RpcError, ShoalError
from ...net import Deadline
from ...rpc import Agent, Peer
from ...rpc.calls.default import call_timeout
from ...rpc.connection.meeting import WorkerMeeting

#: seconds that the end takes at least, however little was given for it
_SHORT = 0.5
#: seconds for the end of an agent whose others are not waited for
_LOCAL_END = 10.0


class TorchAgent:
    """A worker, with the methods that torch's agents have.

    Args:
        meeting: of the fixed number of workers that it is one of; None: they come and go.
    """

    def __init__(self, agent: Agent, meeting: WorkerMeeting | None) -> None:
        self.agent = agent
        self.meeting = meeting
        self._graceful = False
        self._locals = itertools.count()
        #: the references that this process holds
        self.references: weakref.WeakSet[Any] = weakref.WeakSet()

    # -- torch's -------------------------------------------------------------------------------

    @property
    def is_static_group(self) -> bool:
        return self.meeting is not None

    def get_worker_info(self, worker: str | int | None = None) -> Any:
        """Torch's ``WorkerInfo`` of a worker: its name, or its rank; None: this one."""
        me = self.agent.worker
        if worker is None or worker == me.name:
            return WorkerInfo(me.name, me.rank)
        names = [] if self.meeting is None else self.meeting.names
        if isinstance(worker, int) and 0 <= worker < len(names):
            return WorkerInfo(names[worker], worker)
        if worker in names:
            return WorkerInfo(worker, names.index(worker))
        try:
            found = self.agent.peer(worker, timeout=0.0)
        except RpcError as error:
            what = "id" if isinstance(worker, int) else "name"
            raise RuntimeError(
                f"name:{me.name},rank:{me.rank} could not find destination {what} {worker}: {error}"
            ) from error
        return WorkerInfo(found.name, found.id)

    def get_worker_infos(self) -> list[Any]:
        """Torch's ``WorkerInfo`` of all workers, this one among them."""
        if self.meeting is not None:
            return [WorkerInfo(name, rank) for rank, name in enumerate(self.meeting.names)]
        return [self.get_worker_info(), *(WorkerInfo(peer.name, peer.id) for peer in self.agent.peers())]

    def get_debug_info(self) -> dict[str, str]:
        """The counts of :meth:`shoal.rpc.Agent.stats`, in torch's form."""
        return {f"agent.{what}": str(number) for what, number in self.agent.stats().items()}

    def join(self, shutdown: bool = False, timeout: float = 0.0) -> None:
        """Wait until all workers have come here, and no call is pending at any of them."""
        deadline = Deadline(call_timeout(timeout, math.inf))
        if self.meeting is not None:
            self.meeting.part(self.agent, deadline)
        elif self.agent.settle(deadline) is None:
            raise RuntimeError(f"{self.agent!r} has calls pending after {timeout} s")
        self._graceful = shutdown

    def shutdown(self) -> None:
        """End the agent."""
        try:
            if self.meeting is not None and not self._graceful:
                with contextlib.suppress(ShoalError):  # the store is gone: so are the others
                    self.meeting.leave()
        finally:
            self.agent.close(_LOCAL_END, graceful=self._graceful)

    # -- inside --------------------------------------------------------------------------------

    def peer(self, to: Any, timeout: float) -> Peer:
        """The worker that torch's ``WorkerInfo`` names, for calls with a timeout of torch's."""
        return Peer(self.agent, to.name, call_timeout(timeout, self.agent.timeout), to.id)

    def new_id(self) -> tuple[int, int]:
        """The rank of this worker and a number that it has given to nothing else."""
        return self.agent.worker.rank, next(self._locals)


class _RpcState:
    agent: TorchAgent | None = None


state = _RpcState()


def the_agent() -> TorchAgent:
    """The agent.

    Raises:
        RuntimeError: there is none.
    """
    if state.agent is None:
        raise RuntimeError(
            "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling "
            "`rpc.init_rpc`)?"
        )
    return state.agent
