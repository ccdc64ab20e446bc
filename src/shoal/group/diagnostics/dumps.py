"""Dumps: JSON files with the state of a group on one rank, to find the cause of a failure.

``ProcessGroup.dump`` writes one.  With ``SHOAL_DUMP_DIR`` every rank writes one when a group fails: in the
call that raises the failure, or within 50 ms in a thread that polls the groups.  So a rank that hangs outside
shoal writes one too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from ... import config
from ...common.atomic_file import AtomicFile
from ...common.formatting import file_name_part
from ...errors import GroupAborted, GroupError
from ...spec import GroupState
from ...world import open_groups

if TYPE_CHECKING:
    from ..process_group import ProcessGroup

logger = logging.getLogger(__name__)

#: version of the contents
SCHEMA = "shoal.dump/1"
#: seconds between two checks for failed groups
_POLL_INTERVAL_S = 0.05


def directory() -> Path | None:
    """Return the directory ``SHOAL_DUMP_DIR``, which is created if needed, or None if it is not set.

    Raises:
        ConfigurationError: the directory cannot be created, or written to.
    """
    return config.writable_directory(config.DUMP_DIR)


def contents(group: ProcessGroup, failure: GroupError | None = None) -> dict[str, Any]:
    """Return the contents of a dump, as in ``docs/recorder.md``.

    ``failure``: the failure of the group, which may have been closed since; None: ask the channel.
    """
    state = group.state
    if failure is None:
        failure = group._channel.failure()
    else:
        state = GroupState.ABORTED if isinstance(failure, GroupAborted) else GroupState.BROKEN
    recorder = group.recorder
    return {
        "schema": SCHEMA,
        "job": group._world.membership.job_name,
        "group": _label(group),
        "rank": group.rank,
        "ranks": list(group._spec.ranks),
        "state": state,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "now": time.monotonic_ns(),
        "error": None
        if failure is None
        else {
            "type": type(failure).__name__,
            "message": str(failure),
            "ranks": list(getattr(failure, "ranks", ())),
        },
        "entries": [] if recorder is None else recorder.entries(),
        "stacks": stacks(),
    }


def write(group: ProcessGroup, path: str | os.PathLike[str] | None) -> Path:
    """Write a dump; see ``ProcessGroup.dump``."""
    return save(contents(group), path, file_name(group))


def save(contents: dict[str, Any], path: str | os.PathLike[str] | None, name: str) -> Path:
    """Write a JSON file atomically, and return its path.

    Args:
        path: path of the file, or of a directory; None: ``SHOAL_DUMP_DIR``, or the working directory.
        name: name of the file in a directory.
    """
    target = Path(path) if path is not None else directory() or Path()
    if target.is_dir():
        target /= name
    data = msgspec.json.encode(contents)
    with AtomicFile(target, mode=0o600) as draft:
        draft.file.write(data)
        draft.replace()
    return target


def file_name(group: ProcessGroup) -> str:
    """``shoal-<job>-<rank in the world>-<group>-<pid>.json``, with portable characters only."""
    job = group._world.membership.job_name
    words = (job, str(group._spec.ranks[group.rank]), _label(group), str(os.getpid()))
    parts = [file_name_part(each, f"{group._spec.ident:x}") for each in words if each]
    return "-".join(["shoal", *parts]) + ".json"


def _label(group: ProcessGroup) -> str:
    """The name of a group, and that of its world if the job may have others."""
    world = group._world.membership.world_name
    return f"{group.name} of {world}" if world else group.name


def stacks() -> list[dict[str, Any]]:
    """Return the stack of each Python thread, innermost call last, without source lines, which are slow."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        {"thread": names.get(ident, f"thread {ident}"), "frames": _frames(frame)}
        for ident, frame in sys._current_frames().items()
    ]


def _frames(frame: FrameType | None) -> list[str]:
    found = []
    while frame is not None:
        code = frame.f_code
        found.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return found[::-1]


# -- on failure --------------------------------------------------------------------------------


def on_failure(group: ProcessGroup) -> None:
    """Write a dump into ``SHOAL_DUMP_DIR`` if ``group`` has failed and there is none yet.  Never raises."""
    try:
        if config.DUMP_DIR.get() is None:
            return
        # Another thread may see the failure too, and close the group while this one writes.
        failure = group._channel.failure()
        if failure is None:
            return
        with _lock:
            if group in _written:
                return
            _written.add(group)
        path = save(contents(group, failure), directory(), file_name(group))
        logger.warning("rank %d of group %r wrote a dump of the failure to %s", group.rank, group.name, path)
    except Exception as error:
        logger.warning("rank %d of group %r cannot write a dump: %s", group.rank, group.name, error)


def watch(group: ProcessGroup) -> None:
    """Write a dump when ``group`` fails, until it is closed, if ``SHOAL_DUMP_DIR`` is set."""
    global _watcher
    if config.DUMP_DIR.get() is None:
        return
    group._channel.on_failure = partial(_on_channel_failure, weakref.ref(group))
    with _lock:
        if _watcher is None:
            watcher = threading.Thread(target=_poll, name="shoal-dumps", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads: the next call detects a failure
                watcher.start()
                _watcher = watcher


def _watched() -> list[ProcessGroup]:
    return [group for group in open_groups() if group._channel.on_failure is not None]


def _on_channel_failure(reference: weakref.ref[ProcessGroup]) -> None:
    group = reference()
    if group is not None:
        on_failure(group)


def dump_before_close(group: ProcessGroup) -> None:
    """Check ``group`` for a failure before it is closed."""
    if group._channel.on_failure is not None:
        on_failure(group)


def stop_if_idle() -> None:
    """End the thread if no group is watched any more; called after a group was closed."""
    with _lock:
        watcher = None if _watched() else _watcher
    if watcher is not None and watcher is not threading.current_thread():
        _wake.set()
        watcher.join(1.0)


def _poll() -> None:
    global _watcher
    while True:
        if _wake.wait(_POLL_INTERVAL_S):
            _wake.clear()
        with _lock:
            groups = _watched()
            if not groups:
                _watcher = None
                return
        for group in groups:
            on_failure(group)
        del groups


def _after_fork_in_child() -> None:
    global _lock, _wake, _watcher
    _lock, _wake, _watcher = threading.RLock(), threading.Event(), None


# Reentrant: the garbage collector may close a group inside a critical section of the same thread.
_lock = threading.RLock()
_wake = threading.Event()
_watcher: threading.Thread | None = None
_written: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()

os.register_at_fork(after_in_child=_after_fork_in_child)
