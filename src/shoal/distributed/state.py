"""The default group, the only state of the package that belongs to the process.

There is one per process, shared by its threads.  Ranks that are threads of one process must therefore use
the object API, where each rank has its own group.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import TypeAlias

from ..errors import UsageError
from ..group import ProcessGroup
from ..group.group_argument import NON_GROUP_MEMBER, default_groups, not_a_shoal_group, unwrap_group

#: The type of the argument ``group``: None means the default group.
GroupLike: TypeAlias = ProcessGroup | int | None


class _DefaultGroup:
    """The default group, and the arguments it was created with."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._creation = threading.Lock()
        self.world: ProcessGroup | None = None
        #: name of the backend, as the user passed it
        self.backend = ""
        #: number of groups created so far, including the default group
        self.groups = 0

    @contextlib.contextmanager
    def creating(self) -> Iterator[None]:
        """Context in which only this thread may create the default group."""
        if not self._creation.acquire(blocking=False):
            raise UsageError(
                "init_process_group: another thread of this process is creating the default group; "
                "one call creates it for all threads"
            )
        try:
            if (world := self.world) is not None:
                raise UsageError(
                    f"init_process_group on rank {world.rank}: a default group exists already "
                    f"({world!r}); call destroy_process_group() before creating another one"
                )
            yield
        finally:
            self._creation.release()

    def set_world(self, world: ProcessGroup, backend: str) -> None:
        """Set the default group."""
        with self._lock:
            self.world, self.backend, self.groups = world, backend, 1

    def count(self) -> None:
        """Count a newly created group."""
        with self._lock:
            self.groups += 1

    def clear(self) -> ProcessGroup:
        """Unset the default group and return it."""
        with self._lock:
            world, self.world, self.backend, self.groups = self.world, None, "", 0
        if world is None:
            raise _no_group("destroy_process_group")
        return world


state = _DefaultGroup()
default_groups.append(lambda: state.world)


class _World(type):
    """Metaclass with the property ``WORLD``."""

    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group, or None."""
        return state.world


class group(metaclass=_World):
    """``group.WORLD`` is the default group, a :class:`shoal.ProcessGroup`, or None if there is none."""


class GroupMember(metaclass=_World):
    """``WORLD`` as in :class:`group`; ``NON_GROUP_MEMBER`` represents a group without this rank."""

    NON_GROUP_MEMBER = NON_GROUP_MEMBER


def default_group(operation: str) -> ProcessGroup:
    """Return the default group, or raise UsageError if there is none."""
    world = state.world
    if world is None:
        raise _no_group(operation)
    return world


def member_group(group: GroupLike, operation: str) -> ProcessGroup | None:
    """Return the group that a function works on; None, with a warning, if this rank is not a member.

    Raises UsageError if there is no default group, or ``group`` is not a group.
    """
    if group is None:  # the common case, without further calls
        return default_group(operation)
    if is_non_member(group):
        warnings.warn(
            f"{operation} on global rank {default_group(operation).rank}: this rank is not in the given "
            "group, so nothing is done",
            stacklevel=3,
        )
        return None
    return own_group(group, operation)


def own_group(group: GroupLike, operation: str) -> ProcessGroup:
    """Return a group that this rank is a member of; raise UsageError for anything else."""
    if group is None:
        return default_group(operation)
    if (pg := unwrap_group(group)) is not None:
        return pg
    where = "" if state.world is None else f" on rank {state.world.rank}"
    raise not_a_shoal_group(group, f"{operation}{where}")


def is_non_member(group: object) -> bool:
    """Return whether ``group`` represents a group without this rank."""
    return isinstance(group, int) and group == NON_GROUP_MEMBER


def _no_group(operation: str) -> UsageError:
    return UsageError(
        f"{operation}: this process has no default group; call shoal.distributed.init_process_group() first"
    )
