"""Traces of all contexts of the native core in this process: ``shoal.trace`` and ``SHOAL_TRACE``."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from .. import config
from ..common.decoding import MalformedMessage
from ..common.formatting import counted, encodable
from ..common.process_identity import clock_id, machine_id
from ..errors import ConfigurationError, UsageError
from .rank_trace import write_rank_trace
from .spool import MAX_TEXT, SCHEMA, Spool, TracedGroup, TracedRank

logger = logging.getLogger(__name__)

#: seconds between two drains of the core, which keeps 65,536 operations (``cpp/engine/trace.h``)
_DRAIN_INTERVAL_S = 0.05


class TraceSource(Protocol):
    """The part of ``_core.Context`` that is used here."""

    def trace(self, on: bool) -> None: ...

    def take_trace(self) -> tuple[bytes, int]: ...


class TraceableRank(Protocol):
    """The part of :class:`shoal.rendezvous.Membership` that is used here."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def job(self) -> str: ...
    @property
    def job_name(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def meeting(self) -> str: ...
    @property
    def world_name(self) -> str: ...
    @property
    def host(self) -> str: ...


def describe(member: TraceableRank, pid: int) -> TracedRank:
    """Describe a rank in the process ``pid`` of this machine, for a trace that begins now."""
    ranks = member.ranks or range(member.size)
    return TracedRank(
        schema=SCHEMA,
        job=_text(member.job_name),
        epoch=member.epoch,
        meeting=_text(member.world_name),
        rank=ranks[member.rank],
        size=max(ranks) + 1,  # that of the world is not known to links among some of its ranks
        pid=pid,
        host=_text(member.host),
        hostname=_text(machine_id().split("/")[0]),
        clock=clock_id(),
        begun=time.monotonic_ns(),
        realtime=time.time_ns(),
    )


def _text(text: str) -> str:
    return encodable(text)[:MAX_TEXT]


class ContextTrace:
    """The trace of one context, whenever it is on; each native backend has one from its begin to its end.

    Args:
        source: the context.
        member: the rank that the context connects.

    Raises:
        ConfigurationError: the directory ``SHOAL_TRACE`` cannot be created or written to.
    """

    def __init__(self, source: TraceSource, member: TraceableRank) -> None:
        self.source = source
        self.member = member
        self._ranks = member.ranks or tuple(range(member.size))
        #: the open groups
        self.groups: dict[int, TracedGroup] = {}
        _attach(self)

    def add_group(
        self, ident: int, name: str, ranks: Sequence[int], lanes: int, *, internal: bool = False
    ) -> None:
        """Add a group; ``ranks`` are numbered as those of the context.

        The trace does not show an ``internal`` group.
        """
        group = TracedGroup(ident, name, tuple(self._ranks[rank] for rank in ranks), lanes, internal)
        with _lock:
            self.groups[ident] = group
            if _recording is not None:
                _recording.files[self.key].add_group(group)

    def discard_group(self, ident: int) -> None:
        """Forget a group that is closed."""
        with _lock:
            self.groups.pop(ident, None)

    def close(self) -> None:
        """End the trace of this context, after its last operation.  An error is logged."""
        global _recording
        with _lock:
            _attached.pop(id(self), None)
            recording = _recording
            if recording is None:
                return
            file = recording.remove(self)
            ends = recording.ends_with_contexts and not recording.files
            if ends:
                _recording = None
        if ends:
            recording.stop()
        if file is not None:
            try:
                file.finish()
            except OSError as error:
                logger.warning("rank %d: %s", self._ranks[self.member.rank], explain(error))

    @property
    def key(self) -> tuple[str, int, str, int]:
        """Contexts with the same key share a file."""
        member = self.member
        return member.job, member.epoch, member.meeting, self._ranks[member.rank]


class _RankFile:
    """The spool of one rank, and the contexts that write to it.  Used under the lock, but for ``finish``."""

    def __init__(self, directory: Path, context: ContextTrace) -> None:
        self.spool = Spool(directory, describe(context.member, os.getpid()))
        self.contexts: list[ContextTrace] = []
        self._groups: dict[int, TracedGroup] = {}
        self._failed = False

    def add_group(self, group: TracedGroup) -> None:
        if not self._failed and self._groups.get(group.ident) != group:
            self._groups[group.ident] = group
            with self._end_on_error():
                self.spool.add_group(group)

    def drain(self, context: ContextTrace) -> None:
        """Move the operations of a context to the file; end its trace if there is no room for more."""
        records, dropped = context.source.take_trace()
        if not self._failed:
            with self._end_on_error():
                self.spool.add(records, dropped)
        if self._failed or self.spool.full:
            context.source.trace(False)

    @contextlib.contextmanager
    def _end_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed = True
            logger.warning("the trace ends early: %s cannot be written: %s", self.spool.path, error.strerror)

    def finish(self) -> None:
        """Write the trace.

        Raises:
            OSError: it cannot be written.
        """
        self.spool.close()
        finish(self.spool)


def finish(spool: Spool) -> None:
    """Write the trace of a closed spool.

    Raises:
        OSError: it cannot be written.
    """
    try:
        contents = write_rank_trace(spool.path, spool.target)
    except MalformedMessage as error:  # another program has changed the file
        raise OSError(errno.EIO, f"{spool.path} is damaged: {error}", str(spool.target)) from None
    if contents.dropped:
        logger.warning(
            "%s lacks %s%s: trace fewer steps",
            spool.target,
            counted(contents.dropped, "operation"),
            " and all later ones" if contents.truncated else "",
        )


class _RunningTrace:
    """A trace of all contexts of this process, in ``directory``.  Used under the lock, but for ``stop``.

    Args:
        ends_with_contexts: it ends when no context is open.

    Attributes:
        files: the files of the ranks that have open contexts.
    """

    def __init__(self, directory: Path, *, ends_with_contexts: bool) -> None:
        self.ends_with_contexts = ends_with_contexts
        self.files: dict[tuple[str, int, str, int], _RankFile] = {}
        self._directory = directory
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-trace", daemon=True)
        self._thread.start()

    def add(self, context: ContextTrace) -> None:
        """Begin the trace of a context.

        Raises:
            OSError: its file cannot be created.
        """
        file = self.files.get(context.key)
        if file is None:
            file = self.files[context.key] = _RankFile(self._directory, context)
        file.contexts.append(context)
        for group in context.groups.values():
            file.add_group(group)
        context.source.take_trace()  # of an earlier trace
        context.source.trace(True)

    def remove(self, context: ContextTrace) -> _RankFile | None:
        """End the trace of a context; return the file of the rank if this was its last context."""
        file = self.files.get(context.key)
        if file is None or context not in file.contexts:
            return None
        context.source.trace(False)
        file.drain(context)
        file.contexts.remove(context)
        return None if file.contexts else self.files.pop(context.key)

    def remove_all(self) -> list[_RankFile]:
        """End the trace of all contexts; return the files."""
        contexts = [context for file in self.files.values() for context in file.contexts]
        return [file for context in contexts if (file := self.remove(context)) is not None]

    def stop(self) -> None:
        """End the thread; the caller may hold the lock."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def disown(self) -> None:
        """Close the files, in a forked child."""
        for file in self.files.values():
            file.spool.close()

    def _run(self) -> None:
        while not self._stopped.wait(_DRAIN_INTERVAL_S):
            # The garbage collector may close the last group inside a critical section, which waits for this
            # thread.
            if not _lock.acquire(timeout=_DRAIN_INTERVAL_S):
                continue
            try:
                for file in list(self.files.values()):
                    for context in list(file.contexts):
                        file.drain(context)
            finally:
                _lock.release()


@contextlib.contextmanager
def trace(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Write a trace of the operations of all groups of this process, from the begin to the end of a block.

        with shoal.trace("traces"):
            train_step()

    Each rank writes a file ``shoal-<job>-<rank>-<pid>.trace.json``, which https://ui.perfetto.dev opens;
    ``shoal trace merge`` merges those of all ranks.  ``docs/tracing.md`` explains them.  Groups of the
    backends native, mpi and nccl are traced, also those that are created in the block.  ``SHOAL_TRACE``
    traces a whole job.

    Args:
        directory: of the files; created if it does not exist.

    Raises:
        UsageError: the directory cannot be created or written to, or a trace is running.
        OSError: a trace cannot be written at the end of the block.
    """
    try:
        recording = _begin(Path(directory))
    except UsageError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null character
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"trace({str(directory)!r}): files cannot be created there: {reason}; name a directory that this "
            "user may write to"
        ) from None
    try:
        yield
    finally:
        _end(recording)


def _begin(directory: Path) -> _RunningTrace:
    """Begin to trace all contexts."""
    global _recording
    with _lock:
        if config.TRACE.get() is not None:
            raise UsageError(f"trace: {config.TRACE.name} traces the whole program: unset it to trace a part")
        if _recording is not None:
            raise UsageError("trace: another trace is running: leave its with block first")
        config.make_writable(directory)
        recording = _RunningTrace(directory, ends_with_contexts=False)
        try:
            for context in _attached.values():
                recording.add(context)
        except BaseException:
            _discard(recording)
            raise
        _recording = recording
        return recording


def _discard(recording: _RunningTrace) -> None:
    """Undo the begin of a trace."""
    for file in recording.remove_all():
        file.spool.close()
        file.spool.path.unlink(missing_ok=True)
    recording.stop()


def _end(recording: _RunningTrace) -> None:
    """End a trace, and write its files; raises the error of the first one that cannot be written."""
    global _recording
    with _lock:
        if _recording is not recording:
            return  # in a forked child
        files = recording.remove_all()
        _recording = None
    recording.stop()
    failure: OSError | None = None
    for file in files:
        try:
            file.finish()
        except OSError as error:
            failure = failure or OSError(error.errno, explain(error))
    if failure is not None:
        raise failure


def _attach(context: ContextTrace) -> None:
    """Add a new context, which is traced if a trace is running or ``SHOAL_TRACE`` is set."""
    global _recording
    directory = config.writable_directory(config.TRACE)
    with _lock:
        recording = _recording
        if recording is None and directory is not None:
            recording = _RunningTrace(directory, ends_with_contexts=True)
        if recording is not None:
            try:
                recording.add(context)
            except OSError as error:
                if _recording is None:
                    _discard(recording)
                raise ConfigurationError(
                    f"the trace of this rank cannot be created: {error.filename}: {error.strerror}; make "
                    "room for it, or trace into another directory"
                ) from None
        _recording = recording
        _attached[id(context)] = context


def explain(error: OSError) -> str:
    """Return a message about a trace that cannot be written."""
    message = f"the trace {error.filename or ''} cannot be written: {error.strerror or error}"
    if error.errno == errno.ENOENT:  # its directory was deleted
        return message
    return f"{message}; `shoal trace merge` reads the file .trace.spool instead"


def _after_fork_in_child() -> None:
    """Forget the traces of the parent, which owns the files."""
    global _lock, _recording, _attached
    if _recording is not None:
        _recording.disown()
    _lock, _recording, _attached = threading.RLock(), None, {}


# Reentrant: the garbage collector may close a group inside a critical section of the same thread.
_lock = threading.RLock()
_recording: _RunningTrace | None = None
_attached: dict[int, ContextTrace] = {}

os.register_at_fork(after_in_child=_after_fork_in_child)
