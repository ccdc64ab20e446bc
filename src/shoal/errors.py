"""The exceptions that shoal raises.

Each docstring describes the error and what to do about it.  All derive from :class:`ShoalError`, and so from
``RuntimeError``.  Some also derive from another built-in error (``ValueError``, ``TimeoutError``, ...), so
that existing handlers work.
"""

from __future__ import annotations

from collections.abc import Sequence


class ShoalError(RuntimeError):
    """The base class of all exceptions of shoal.

    It is a RuntimeError, as are the failures of torch.distributed.
    """


class UsageError(ShoalError, ValueError, TypeError):
    """An argument is invalid, such as a shape, dtype, device, rank, URL or secret.

    It is raised before anything is sent; the group stays usable.  Fix the call: the message says what was
    expected and what was given.

    It is a ValueError, a TypeError and a RuntimeError, because torch.distributed raises one of them for such
    an error.
    """


class UnsupportedOperation(UsageError, NotImplementedError):
    """The combination of operation, dtype and reduction is undefined, or the backend does not support it.

    Examples: MIN of complex numbers, BAND of floats.  ``docs/operations.md`` lists the legal combinations.
    """


class ConfigurationError(UsageError):
    """An environment variable or option has a value that cannot be used.  The message names it."""


# -- wire and stores ---------------------------------------------------------------------------


class WireError(ShoalError, ConnectionError):
    """A connection ended, or received data that violates the protocol."""


class WireTimeout(WireError, TimeoutError):
    """The other side of a connection did not send or receive in time."""


class AuthenticationError(WireError):
    """The other side does not have the job's secret, or one side rejects the other's user, password or
    certificate.

    Set the same ``SHOAL_SECRET`` (or ``SHOAL_SECRET_FILE``) for every process of the job; ``shoal run`` does
    so by itself.
    """


class VersionMismatch(WireError):
    """Two processes use different protocols: they run different builds, or only one of them encrypts.

    Install the same version of shoal everywhere, and set ``SHOAL_TLS`` to the same value for all processes of
    a job and their store.  The message names both sides.
    """


class StoreError(ShoalError):
    """A store could not perform a request, and changed nothing: a value is too large, or the data is lost.

    A lost connection alone is not an error: the store reconnects until the deadline.  The data is lost when
    the server has ended, even if another one was started at the same address.
    """


class StoreTimeout(StoreError, TimeoutError):
    """A key did not appear in time; the message names the missing keys.

    Either the process that should have set them is late or dead, or it uses another namespace (another job id
    or epoch).  It is also raised if the server does not answer; for a change, the message says whether it was
    never sent, or may still be made.  A user-defined store (a ``Backing``) also raises it for a key that
    could not be changed in time; the message then has the number of attempts.
    """


class RendezvousError(ShoalError):
    """The processes of a job could not find each other, or contradict each other.

    Examples: different sizes, a rank given twice, one process too many.
    """


class RendezvousTimeout(RendezvousError, TimeoutError):
    """Some ranks never arrived at the rendezvous; the message names them."""


# -- groups ------------------------------------------------------------------------------------


class _RankError(RuntimeError):
    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class GroupError(ShoalError):
    """The group is broken: all its pending and later operations raise.

    ``agree`` and ``rebuild`` still work, unless this rank has closed the group itself:
    :meth:`shoal.ProcessGroup.rebuild` makes a group of the ranks that can go on.

    In a group with ``scope="pair"`` only one message fails, or all messages between two ranks if one of them
    is lost; the group stays usable.

    After such an error the content of the tensor of an in-place operation is undefined.

    Attributes:
        last_completed: number of the last collective that had completed on this rank together with all
            earlier ones; None: there is none, or the engine does not report it.  Collectives are numbered
            from 0; those issued in callbacks have no number.
    """

    last_completed: int | None = None


class PeerLost(_RankError, GroupError, ConnectionError):
    """One or more members of the group died or can no longer be reached.

    Attributes:
        ranks: all ranks known to be lost, numbered in this group.  It contains this rank itself if the others
            treat it as lost because it was stopped for too long.

    The survivors can go on in a new group: see :meth:`shoal.ProcessGroup.rebuild`.
    """


class RebuildCalled(PeerLost):
    """``agree`` failed because another rank calls :meth:`shoal.ProcessGroup.rebuild`.

    That rank has detected a loss or an error that this rank does not know of yet.

    Attributes:
        ranks: all ranks that this rank knows to be lost, numbered in this group; may be empty.

    No rank has agreed on anything.  Call ``rebuild`` too; the other rank waits for it.
    """


class ProtocolError(_RankError, GroupError, WireError):
    """A member of the group violated the protocol in a message or in shared memory.

    After an invalid message the member is disconnected, and so lost to all groups; after invalid data in
    shared memory the group that read it is broken.  The data is not used.

    Attributes:
        ranks: that member, numbered in this group.

    Its memory is corrupt, or it runs another build, or another program uses its connection.  The other
    members can go on in a group without it.
    """


class CollectiveMismatch(GroupError):
    """The ranks of a group called different operations, or one operation with different arguments.

    The message is a table of the ranks and their calls.  It is a bug in the program: all ranks must submit
    the same numbered operations in the same order.  If the operation has completed on a rank,
    :meth:`shoal.ProcessGroup.close` raises the error there.
    """


class OperationTimeout(_RankError, GroupError, TimeoutError):
    """An operation did not finish within its ``timeout=``.

    It breaks the group, unless the group has ``scope="pair"``: then only the operation fails.

    Attributes:
        ranks: the ranks that did not start the operation, as far as known, numbered in this group.

    If a rank is only slow, use a longer timeout (``docs/timeouts.md``); if it hangs, debug it.
    :meth:`shoal.ProcessGroup.rebuild` makes a group that works again.
    """


class OperationCancelled(GroupError):
    """A send or receive was cancelled on this rank; its tensor is not read or written any more.

    The group stays usable.  The receiver does not see a message that its sender has cancelled.  A message
    that was arriving when its receiver cancelled is dropped.
    """


class GroupAborted(GroupError):
    """A rank called ``abort()`` on the group; the message has the rank and the reason."""


class QuorumLost(_RankError, GroupError, TimeoutError):
    """Too few ranks can be reached to decide for the group, because the others may be running and decide too.

    Attributes:
        ranks: the ranks that this rank has lost, numbered in this group.

    A decision needs more than half of the group, or half of it and the job's store, or all ranks that are not
    known to be dead.  The group is unchanged.  ``SHOAL_QUORUM=any`` treats every lost rank as dead: use it
    only if two parts of a job cannot run separately.
    """


class Evicted(_RankError, GroupError):
    """The others have decided to go on without this rank.

    Attributes:
        ranks: the ranks that go on, numbered in this group.

    They lost it, or it did not vote in time.  It cannot communicate with them any more: exit the process.
    """


class TooFewRanks(GroupError):
    """Fewer ranks would go on than ``rebuild(min_size=...)`` requires.  The group is unchanged."""


class GroupClosed(GroupError):
    """The group was closed, by this rank or by a peer that an operation needs.

    If a peer closed it, the others can go on without that peer: :meth:`shoal.ProcessGroup.rebuild`.  A rank
    that has closed the group itself can neither use nor rebuild it.
    """


class OutOfSharedMemory(GroupError, MemoryError):
    """Shared memory could not be allocated: the machine or the group's limit is exhausted.

    It is raised at allocation; the group stays usable.
    """


class ForkedProcess(ShoalError):
    """An object that belongs to the parent process was used in a forked child, where it does not work.

    Examples: a group, a store, the nodes of a master.  Start workers with the ``spawn`` method, or fork
    before ``shoal.init``.
    """


class OutOfResources(ShoalError, OSError):
    """The operating system refused a resource, such as descriptors or threads.

    Increase the limit that the message names (``ulimit -n`` for descriptors, ``ulimit -u`` for threads).
    """


class WaitTimeout(ShoalError, TimeoutError):
    """``wait(timeout)`` timed out.  The operation is still in progress."""


class InvalidFutureState(ShoalError):
    """A method of a future is not valid in its state.

    ``value()`` and ``exception()`` need a completed future: call ``wait()`` or ``done()`` first.
    ``set_result`` and ``set_exception`` may be called once, and not on a future that an engine completes.
    """


class UnusedParameterError(ShoalError):
    """Parameters were not used for the loss, so their bucket cannot be reduced; the message names them."""


class UnevenInputs(_RankError, ShoalError):
    """Some ranks ran out of batches before others, in a Join with ``throw_on_early_termination=True``.

    Attributes:
        ranks: the ranks that ran out first, numbered in the group of the Join.

    All ranks raise it, in the same step, and the group stays usable.  Give all ranks the same number of
    batches, or remove ``throw_on_early_termination=True``.
    """


class OutOfStep(ShoalError):
    """The ranks ran different numbers of forward passes before a backward pass; the message lists them.

    A rank skipped a backward pass, or ran an additional forward pass in training mode with gradients.
    """


class ModelMismatch(ShoalError):
    """The ranks wrapped different models; the message names rank and parameter."""


class StateDiverged(ShoalError):
    """The ranks of a session of :mod:`shoal.elastic` have different states, or commit different steps.

    All ranks raise it in the same commit, before any parameter changes.  Each rank must create the same
    ``State``, and load the same checkpoint, before the session starts.  Afterwards parameters and optimisers
    must change in the same way on all ranks.
    """


class StateLost(ShoalError):
    """All ranks that had the state of a session of :mod:`shoal.elastic`, or a part of it, are lost.

    For example, all owners of a part of a distributed optimiser are lost.  The message names the parameters.
    Restart from a checkpoint, in a new session.
    """


class LaunchError(ShoalError):
    """The launcher could not start a program, or connect to a host."""


class RemoteError(ShoalError):
    """A function failed in another process: on a rank, or at a called worker.

    The message has the remote tracebacks.  The exception that a call over RPC raises has this one as its
    cause, or is this one if its own type could not be recreated here.

    Attributes:
        worker: name of the called worker; "" for ranks.
        traceback: remote traceback as text; "" if the message has those of several ranks.
    """

    def __init__(self, message: str, worker: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.traceback = traceback


# -- rpc ---------------------------------------------------------------------------------------


class RpcError(ShoalError):
    """A call to another worker failed.  Other calls are not affected.

    It is not retried.  Whether the function ran, and how far, is unknown unless the message has it.
    """


class CallTimeout(RpcError, TimeoutError):
    """A call had no reply within its timeout; the message has its progress, if the callee reported it.

    It is also raised if the connection to the worker timed out, or the worker did not receive a post in time.

    Give a slow function more time by ``peer.options(timeout=...)``.  The call is cancelled at the callee: if
    it had not started it never runs, and a running function can check ``shoal.rpc.current().cancelled()``.
    """


class CallCancelled(RpcError):
    """``cancel()`` was called on the future of a call.

    A call that had not started never runs; a running function continues, unless it checks
    ``shoal.rpc.current().cancelled()``.
    """


class UnknownWorker(RpcError):
    """No worker has joined under a name in time; the message lists the workers that have joined."""


class AgentClosed(RpcError):
    """The agent was closed, by this process or by the called worker.  No more calls are possible."""


class WorkerLost(RpcError, PeerLost):
    """The called worker died, or the connection to it broke before the reply came.

    Attributes:
        worker: its name.
        ranks: empty; workers have names instead of ranks.

    Whether the function ran is unknown.  Calls to other workers are not affected.  A later call reaches the
    worker again if it is running, or a new process that has joined under its name.
    """

    def __init__(self, message: str, worker: str = "", ranks: Sequence[int] = ()) -> None:
        super().__init__(message, ranks)
        self.worker = worker


# -- master and nodes --------------------------------------------------------------------------


class NodeLost(PeerLost):
    """A node of the master-worker mode died, the connection to it broke, or its master was closed.

    Attributes:
        worker: its name.
        ranks: its index.

    Its tensors are lost: operations on them raise this error.  Other nodes are not affected.
    """

    def __init__(self, message: str, worker: str = "", ranks: Sequence[int] = ()) -> None:
        super().__init__(message, ranks)
        self.worker = worker


class DeviceMismatch(ShoalError, ValueError):
    """The tensors of an operation are on several nodes, or on a node and on the master.

    Move them to one device: the message has the necessary ``.to(...)``.  It is not a UsageError, because that
    is a TypeError, which Python would take for a missing operator.
    """


class RecordingMismatch(ShoalError):
    """A recorded step of the master-worker mode cannot be replayed.

    The function waits for a tensor, moves a tensor of the master that is not an argument, or its calls
    differ.  The message names the operator, the line, and the remedy.
    """


class RemoteOpError(RemoteError):
    """An operation that the master issued failed on a node.

    It is raised when the master needs the result, or a value computed from it, and by ``synchronize()``.

    Attributes:
        worker: name of the node.
        traceback: remote traceback as text.
        line: line of the master's program that issued the operation.
    """

    def __init__(self, message: str, worker: str = "", traceback: str = "", line: str = "") -> None:
        super().__init__(message, worker, traceback)
        self.line = line
