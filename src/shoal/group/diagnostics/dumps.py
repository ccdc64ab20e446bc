"""Dumps: files of what one rank knew of a group at one moment, for finding the cause of a failure.

``ProcessGroup.dump`` writes one.  With ``SHOAL_DUMP_DIR`` every rank writes one when a group fails: in the
call that hears of it, or within 50 ms in a thread that looks after the groups.  So a rank that is stuck
somewhere else and makes no call any more writes one too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from ... import config
from ...common.atomic_file import AtomicFile
from ...errors import ConfigurationError, GroupAborted, GroupError
from ...world import living
from .watched import Watched

logger = logging.getLogger(__name__)

#: The version of the contents; it changes with their meaning.
SCHEMA = "shoal.dump/1"
#: seconds between two looks at whether a group has failed
_LOOK = 0.05
#: characters of a job's or a group's name in the name of a file
_LONGEST = 60


def directory() -> Path | None:
    """The directory that ``SHOAL_DUMP_DIR`` names, which is made if it is not there; None without one.

    Raises:
        ConfigurationError: it cannot be made, or written to.
    """
    given = config.DUMP_DIR.get()
    if given is None:
        return None
    path = Path(given)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{config.DUMP_DIR.name}={given!r} cannot be made: {error}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigurationError(f"{config.DUMP_DIR.name}={given!r} cannot be written to")
    return path


def contents(group: Watched, failure: GroupError | None = None) -> dict[str, Any]:
    """The contents of a dump: see ``docs/recorder.md``.

    Args:
        failure: what has ended the group, which may be closed meanwhile; None: look.
    """
    state = group.state
    if failure is None:
        failure = group._channel.failure()
    else:
        state = "aborted" if isinstance(failure, GroupAborted) else "broken"
    recorder = group.recorder
    return {
        "schema": SCHEMA,
        "job": group._world.membership.job,
        "group": group.name,
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


def write(group: Watched, path: str | os.PathLike[str] | None) -> Path:
    """Write a dump; see ``ProcessGroup.dump``."""
    return save(contents(group), path, file_name(group))


def save(contents: dict[str, Any], path: str | os.PathLike[str] | None, name: str) -> Path:
    """Write a file of JSON, which appears whole or not at all; its path.

    Args:
        path: of the file, or of a directory; None: ``SHOAL_DUMP_DIR``, or the working directory.
        name: of the file in a directory.
    """
    target = Path(path) if path is not None else directory() or Path()
    if target.is_dir():
        target /= name
    data = msgspec.json.encode(contents)
    with AtomicFile(target, mode=0o600) as draft:
        draft.file.write(data)
        draft.replace()
    return target


def file_name(group: Watched) -> str:
    """``shoal-<job>-<rank in the world>-<group>-<pid>.json``, of characters that every file system takes."""
    words = (group._world.membership.job, str(group._spec.ranks[group.rank]), group.name, str(os.getpid()))
    return "-".join(["shoal", *(word(each, f"{group._spec.ident:x}") for each in words if each)]) + ".json"


def word(text: str, ident: str = "") -> str:
    """``text`` as a part of a file's name; what is too long is cut, and ``ident`` follows."""
    found = re.sub(r"[^A-Za-z0-9_.]+", "_", text)
    return found if len(found) <= _LONGEST else f"{found[:_LONGEST]}_{ident}"


def stacks() -> list[dict[str, Any]]:
    """The stack of each Python thread, the innermost call last, without source lines: reading takes long."""
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


def on_failure(group: Watched) -> None:
    """Write a dump into ``SHOAL_DUMP_DIR`` if ``group`` has failed and there is none yet.  Never raises."""
    try:
        if config.DUMP_DIR.get() is None:
            return
        # Another thread may hear of it too, and close the group while this one writes.
        failure = group._channel.failure()
        if failure is None:
            return
        with _lock:
            if group in _written:
                return
            _written.add(group)
        path = save(contents(group, failure), directory(), file_name(group))
        logger.warning(
            "rank %d of group %r wrote what it knows of the failure to %s", group.rank, group.name, path
        )
    except Exception as error:
        logger.warning("rank %d of group %r cannot write a dump: %s", group.rank, group.name, error)


def watch(group: Watched) -> None:
    """Look after ``group`` until it is closed, if ``SHOAL_DUMP_DIR`` is set."""
    global _watcher
    if config.DUMP_DIR.get() is None:
        return
    group._channel.on_failure = partial(_heard, weakref.ref(group))
    with _lock:
        if _watcher is None:
            watcher = threading.Thread(target=_look, name="shoal-dumps", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads: a failure is seen by the next call
                watcher.start()
                _watcher = watcher


def _watched() -> list[Watched]:
    return [group for group in living() if group._channel.on_failure is not None]


def _heard(reference: weakref.ref[Watched]) -> None:
    group = reference()
    if group is not None:
        on_failure(group)


def closing(group: Watched) -> None:
    """``group`` is about to be closed: have a last look at it."""
    if group._channel.on_failure is not None:
        on_failure(group)


def closed() -> None:
    """A group was closed.  The thread ends with the last group."""
    with _lock:
        watcher = None if _watched() else _watcher
    if watcher is not None and watcher is not threading.current_thread():
        _wake.set()
        watcher.join(1.0)


def _look() -> None:
    global _watcher
    while True:
        if _wake.wait(_LOOK):
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
_written: weakref.WeakSet[Watched] = weakref.WeakSet()

os.register_at_fork(after_in_child=_after_fork_in_child)
