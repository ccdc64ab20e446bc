"""Every exception that shoal raises, in one tree.

Each docstring says what happened and what to do about it.  All of them derive from
:class:`ShoalError`, and so from ``RuntimeError``; those that are also a kind of another built-in error
(``ValueError``, ``TimeoutError``, ...) derive from that too, so existing handlers keep working.
"""

from __future__ import annotations

from collections.abc import Sequence


class ShoalError(RuntimeError):
    """The root of the tree.  Catch it to catch everything that shoal itself raises.

    A RuntimeError, as the failures of torch.distributed are.
    """


class UsageError(ShoalError, ValueError, TypeError):
    """An argument makes no sense: a shape, dtype, device, rank, URL or secret.

    Raised before anything is sent; the group stays usable.  Fix the call: the message says what
    was expected and what was given.

    A ValueError, a TypeError and a RuntimeError, because torch.distributed raises one or the other of
    them for such a mistake: who catches torch's catches ours.
    """


class UnsupportedOperation(UsageError, NotImplementedError):
    """The combination of operation, dtype and reduction has no meaning, or the backend lacks it.

    Examples: MIN of complex numbers, BAND of floats.  ``docs/operations.md`` lists what is legal.
    """


class ConfigurationError(UsageError):
    """An environment variable or option has a value that cannot be used.  The message names it."""


# -- wire and stores ---------------------------------------------------------------------------


class WireError(ShoalError, ConnectionError):
    """A connection ended or carried something that is not the protocol."""


class WireTimeout(WireError, TimeoutError):
    """The other side of a connection stayed silent, or took nothing, for too long."""


class AuthenticationError(WireError):
    """The other side does not hold the job's secret, or one does not take the other's user, password or
    certificate.

    Give every process of the job the same ``SHOAL_SECRET`` (or the same file in
    ``SHOAL_SECRET_FILE``); ``shoal run`` does so by itself.
    """


class VersionMismatch(WireError):
    """Two processes do not speak the same protocol: they run other builds, or only one of them encrypts.

    Install the same version of shoal everywhere, and set ``SHOAL_TLS`` for all processes of a job and their
    store or for none; the message names both sides.
    """


class StoreError(ShoalError):
    """A store could not do what was asked, and has not done it: a value is too large, or the data is gone.

    A connection that is lost is no error by itself: the store connects again until the deadline.  The data is
    gone when the server has ended, also if another one was started in its place.
    """


class StoreTimeout(StoreError, TimeoutError):
    """A key did not appear in time.  The message names the keys that were missing.

    Either the process that should have set them is late or dead, or it works in another namespace
    (another job id or epoch).  The store's server may also have been silent; if a change was asked for, the
    message says whether it was never sent, or may still be made.  A store of one's own (a ``Backing``) raises
    it too for a key that could not be changed in time; the message then says how often that was tried.
    """


class RendezvousError(ShoalError):
    """The processes of a job could not find each other, or do not agree on who they are.

    A wrong size, a rank given twice, a late-comer to a full group.
    """


class RendezvousTimeout(RendezvousError, TimeoutError):
    """Some ranks never arrived at the rendezvous; the message names them."""


# -- groups ------------------------------------------------------------------------------------


class _OfRanks(RuntimeError):
    """What an error has that names ranks."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class GroupError(ShoalError):
    """Something ended the group.  Every pending and later operation on it raises.

    ``agree`` and ``rebuild`` still work, unless this rank has closed the group itself:
    :meth:`shoal.ProcessGroup.rebuild` makes a group of the ranks that can go on.

    In a group with ``scope="pair"`` it ended one message, and whatever else goes between the two ranks if one
    of them is lost; the group stays usable.

    What an in-place operation leaves in its tensor after such an error is undefined.

    Attributes:
        last_completed: number of the last collective that had completed on this rank together with all
            before it, where the engine tells it; None: none had, or it does not tell.  Collectives are
            numbered from 0; those issued in callbacks have no number.
    """

    last_completed: int | None = None


class PeerLost(_OfRanks, GroupError, ConnectionError):
    """One or more members of the group died or can no longer be reached.

    Attributes:
        ranks: all that are known to be lost when it is raised, numbered in this group.  A rank that the
            others gave up, because it was stopped for too long, finds itself here.

    The survivors can go on in a new group: see :meth:`shoal.ProcessGroup.rebuild`.
    """


class RebuildCalled(PeerLost):
    """``agree`` met a rank that calls :meth:`shoal.ProcessGroup.rebuild`.

    That rank knows of a loss, or had an error, of which this one has not heard yet.

    Attributes:
        ranks: all that this rank knows to be lost, numbered in this group.  May be empty.

    Nothing was agreed on, on any rank.  Call ``rebuild`` too; the other rank waits for it.
    """


class ProtocolError(_OfRanks, GroupError, WireError):
    """A member of the group sent, or wrote into shared memory, what the protocol does not allow.

    If it sent it, the connection to it is cut, so it is lost to every group; if it wrote it, the group whose
    operation read it ends.  Either way it is not used.

    Attributes:
        ranks: that member, numbered in this group.

    Its memory is damaged, or it runs another build, or something else speaks in its place.  The others can
    go on in a group without it.
    """


class CollectiveMismatch(GroupError):
    """The ranks of a group called different operations, or the same one with arguments that differ.

    The message is a table of which rank called what.  It is a bug in the program: all ranks must
    submit the same numbered operations in the same order.  A rank that had finished what it called gets it
    from :meth:`shoal.ProcessGroup.close`.
    """


class OperationTimeout(_OfRanks, GroupError, TimeoutError):
    """An operation did not finish within its ``timeout=``.

    The group is broken by it, unless it has ``scope="pair"``: then the operation alone has ended.

    Attributes:
        ranks: the ranks that never arrived at the operation, as far as known, numbered in this group.

    A rank that is merely slow needs a longer timeout (``docs/timeouts.md``); a rank that hangs needs a
    debugger.  :meth:`shoal.ProcessGroup.rebuild` gives a group that works again.
    """


class OperationCancelled(GroupError):
    """A send or receive was cancelled here; nothing reads or writes its tensor any more.

    The group stays usable.  A message whose sender cancelled it has never been, as far as its receiver can
    tell; one that was arriving when its receiver cancelled is dropped.
    """


class GroupAborted(GroupError):
    """Somebody called ``abort()`` on the group; the message says which rank, and the reason given."""


class QuorumLost(_OfRanks, GroupError, TimeoutError):
    """The ranks that can be reached are too few to decide for the group: the others may live and decide too.

    Attributes:
        ranks: those that this rank has lost, numbered in this group.

    More than half of the group decides, or half of it with the job's store, or all that are not known to be
    dead.  The group is as it was.  ``SHOAL_QUORUM=any`` takes every loss for a death: only where no two parts
    of a job can live apart.
    """


class Evicted(_OfRanks, GroupError):
    """The others have decided to go on without this rank.

    Attributes:
        ranks: those that go on, numbered in this group.

    They had lost it, or it had not voted in time.  It can take no part in what they do from now on: end the
    process.
    """


class TooFewRanks(GroupError):
    """Fewer ranks would go on than ``rebuild(min_size=...)`` asks for.  The group is as it was."""


class GroupClosed(GroupError):
    """The group was closed, here or by the peer an operation needs.

    Where a peer closed it, the others can go on without that peer: :meth:`shoal.ProcessGroup.rebuild`.  A
    rank that closed the group itself can neither send nor rebuild it.
    """


class ForkedProcess(GroupError):
    """A group was used in a child made by ``fork``.

    A forked child inherits no working group.  Start workers with the ``spawn`` method, or fork
    before ``shoal.init``.
    """


class OutOfSharedMemory(GroupError, MemoryError):
    """Shared memory could not be allocated: the machine or the group's limit is exhausted.

    Raised at allocation; the group stays usable.
    """


class OutOfResources(ShoalError, OSError):
    """The operating system refused descriptors, threads or the like.

    Raise the limit that the message names (``ulimit -n`` for descriptors, ``ulimit -u`` for threads).
    """


class WaitTimeout(ShoalError, TimeoutError):
    """``wait(timeout)`` gave up.  Only the waiting ended: the operation goes on."""


class InvalidFutureState(ShoalError):
    """A future was asked for what it does not have yet, or given a result when it needs none.

    ``value()`` and ``exception()`` before completion: call ``wait()`` first, or ask ``done()``.
    ``set_result`` and ``set_exception``: only once, and not on a future that an engine completes.
    """


class UnusedParameterError(ShoalError):
    """Parameters took no part in the loss, so their bucket can never be reduced; they are named."""


class UnevenInputs(_OfRanks, ShoalError):
    """Some ranks ran out of batches before others, in a Join that was told to raise then.

    Attributes:
        ranks: those that ran out first, numbered in the group of the Join.

    Every rank raises it, in the same step, and the group stays usable.  Give all ranks equally many batches,
    or let the Join go on without ``throw_on_early_termination=True``.
    """


class OutOfStep(ShoalError):
    """The ranks ran different numbers of forward passes before a backward pass; each rank's is named.

    A rank left out a backward pass, or ran a forward pass of its own in training mode and with gradients.
    """


class ModelMismatch(ShoalError):
    """The ranks wrapped models that differ; the message names rank and parameter."""


class StateDiverged(ShoalError):
    """The ranks of a session of :mod:`shoal.elastic` hold different states, or commit different steps.

    Every rank raises it in the same commit, before any parameter changes.  Each rank must make the same
    ``State``, and load the same checkpoint, before the session begins; and only what is the same on all ranks
    may change parameters and optimisers.
    """


class StateLost(ShoalError):
    """No rank that lives holds the state of a session of :mod:`shoal.elastic`, or a part of it: all owners of
    a part of a distributed optimiser are lost.  The message names the parameters.

    Start again from a checkpoint, in a new session.
    """


class LaunchError(ShoalError):
    """The launcher could not start what it was asked to start."""


class RemoteError(ShoalError):
    """A function that ran elsewhere failed: on some of several ranks, or at a worker that was called.

    The message holds the tracebacks from there.  The exception that a call over RPC raises has this one as
    its cause, or is this one where its own type could not be rebuilt here.

    Attributes:
        worker: name of the worker that was called; "" where ranks were run.
        traceback: of the exception there, as text; "" where the message holds those of several ranks.
    """

    def __init__(self, message: str, worker: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.traceback = traceback


# -- rpc ---------------------------------------------------------------------------------------


class RpcError(ShoalError):
    """A call to another worker did not come to its end.  Other calls go on.

    Nothing is tried again: whether the function ran, or how far, is known only where the message says it.
    """


class CallTimeout(RpcError, TimeoutError):
    """A call had no reply within its timeout; the message says how far it came, if the callee told.

    Or its worker could not be connected to in time, or took nothing of a post.

    Give a slow function more time, ``peer.options(timeout=...)``.  The callee of a call was told that nobody
    waits any more: one that had not begun never runs, and a function can ask
    ``shoal.rpc.current().cancelled()``.
    """


class CallCancelled(RpcError):
    """``cancel()`` was called on the future of a call.

    A call that had not begun never runs; a function that runs already goes on, unless it asks
    ``shoal.rpc.current().cancelled()``.
    """


class UnknownWorker(RpcError):
    """Nobody has joined under the name of a worker in time; the message lists who has."""


class AgentClosed(RpcError):
    """The agent was closed, here or by the worker that a call was for.  Nothing more can be called."""


class WorkerLost(RpcError, PeerLost):
    """The worker that a call was for died, or the connection to it broke before the reply came.

    Attributes:
        worker: its name.
        ranks: empty; workers are known by names.

    Whether the function ran is not known.  Calls to other workers go on.  A later call reaches the worker
    again if it lives, or a new process that has joined under its name.
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

    Its tensors are gone: whatever uses them raises this.  Other nodes go on.
    """

    def __init__(self, message: str, worker: str = "", ranks: Sequence[int] = ()) -> None:
        super().__init__(message, ranks)
        self.worker = worker


class DeviceMismatch(ShoalError, ValueError):
    """The tensors of an operation are on several nodes, or on a node and on the master.

    Move them to one device: the message has the ``.to(...)`` that does it.  It is no TypeError, as a
    UsageError is: Python would take that for an operator that the operands lack.
    """


class RecordingMismatch(ShoalError):
    """A recorded step of the master-worker mode cannot be replayed.

    The function waits for a tensor inside, moves a tensor of the master that is no argument, or its calls
    are not alike.  The message names the operator, the line, and the remedy.
    """


class RemoteOpError(RemoteError):
    """An operation that the master issued failed on a node.

    Raised where its result, or one that was computed of it, is needed on the master, and by
    ``synchronize()``.

    Attributes:
        worker: name of the node.
        traceback: of the exception there, as text.
        line: of the master's program that issued the operation.
    """

    def __init__(self, message: str, worker: str = "", traceback: str = "", line: str = "") -> None:
        super().__init__(message, worker, traceback)
        self.line = line
