"""The default group: the one piece of state that belongs to the process and not to an object.

One per process, seen by all its threads.  Ranks that are threads of one process therefore use the object
API, in which every rank holds its own group.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import TypeAlias

from ..errors import UsageError
from ..group import ProcessGroup
from ..group.group_argument import NON_GROUP_MEMBER, adopted, default_groups, not_ours

#: The type of the argument ``group``: None means the default group.
GroupLike: TypeAlias = ProcessGroup | int | None


class _DefaultGroup:
    """The default group, and the arguments that it was made with."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changing = False
        self.world: ProcessGroup | None = None
        #: name of the backend, as the user gave it
        self.backend = ""
        #: number of groups made since, the default group included
        self.groups = 0

    @contextlib.contextmanager
    def founding(self) -> Iterator[None]:
        """A block in which this thread, and no other, makes the default group."""
        with self._lock:
            if self.world is not None:
                raise UsageError(
                    f"init_process_group on rank {self.world.rank}: there is a default group already "
                    f"({self.world!r}); call destroy_process_group() before making another one"
                )
            if self._changing:
                raise UsageError(
                    "init_process_group: another thread of the process is making the default group just now; "
                    "one call makes it for all threads"
                )
            self._changing = True
        try:
            yield
        finally:
            self._changing = False

    def found(self, world: ProcessGroup, backend: str) -> None:
        """From now on ``world`` is the default group."""
        with self._lock:
            self.world, self.backend, self.groups = world, backend, 1

    def replace(self, world: ProcessGroup) -> None:
        """``world`` is what has become of the default group."""
        with self._lock:
            self.world = world

    def count(self) -> None:
        """Another group was made."""
        with self._lock:
            self.groups += 1

    def forget(self) -> ProcessGroup:
        """From now on there is no default group.  Returns the one there was."""
        with self._lock:
            world, self.world, self.backend, self.groups = self.world, None, "", 0
        if world is None:
            raise _no_group("destroy_process_group")
        return world


state = _DefaultGroup()
default_groups.append(lambda: state.world)


class _World(type):
    """Gives classes the attribute ``WORLD``."""

    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group; None without one."""
        return state.world


class group(metaclass=_World):
    """``group.WORLD`` is the default group, a :class:`shoal.ProcessGroup`; None before it was made."""


class GroupMember(metaclass=_World):
    """``WORLD`` as in :class:`group`; ``NON_GROUP_MEMBER`` stands for a group that this rank is not in."""

    NON_GROUP_MEMBER = NON_GROUP_MEMBER


def default_group(operation: str) -> ProcessGroup:
    """The default group, for the function ``operation``.

    Raises:
        UsageError: there is none.
    """
    world = state.world
    if world is None:
        raise _no_group(operation)
    return world


def member_group(group: GroupLike, operation: str) -> ProcessGroup | None:
    """The group that a function works on; None, with a warning, if this rank is not in it.

    Raises:
        UsageError: there is no default group, or ``group`` is something else.
    """
    if group is None:
        return default_group(operation)
    if (pg := adopted(group)) is not None:
        return pg
    if is_absent(group):
        warnings.warn(
            f"{operation} on global rank {default_group(operation).rank}: this rank is not in the given "
            "group, so nothing is done",
            stacklevel=3,
        )
        return None
    raise not_a_group(operation, group)


def is_absent(group: object) -> bool:
    """Whether ``group`` stands for one that this rank is not in."""
    return isinstance(group, int) and group == NON_GROUP_MEMBER


def not_a_group(operation: str, group: object) -> UsageError:
    """The error for something that is no group of ours."""
    return not_ours(group, f"{operation}{_here()}")


def _no_group(operation: str) -> UsageError:
    return UsageError(
        f"{operation}: this process has no default group; call shoal.distributed.init_process_group() first"
    )


def _here() -> str:
    return "" if state.world is None else f" on rank {state.world.rank}"
