"""The resolution of the argument ``group=``.

It may be a `ProcessGroup`, an object based on one, such as a group of torch.distributed with the backend
"shoal", or None for the default group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ..errors import UsageError
from .process_group import ProcessGroup

#: The attribute with the `ProcessGroup` of an object that is based on one.
GROUP_ATTRIBUTE = "__shoal_group__"
#: The value that torch returns instead of a group to a rank that is not in it.
NON_GROUP_MEMBER = -100

#: Functions that return the default group of an API, or None; each API adds its own on import.
default_groups: list[Callable[[], ProcessGroup | None]] = []


def resolve_group(group: object, caller: str, what: str = "group") -> ProcessGroup:
    """Return the `ProcessGroup` of an argument ``group=``.

    Args:
        group: a :class:`~shoal.ProcessGroup`, a group of torch.distributed over the backend "shoal", or
            None for the default group of ``torch.distributed`` or ``shoal.distributed``.
        caller: name of the function or class, for error messages.
        what: name of the argument.

    Raises:
        UsageError: ``group`` is another object, or None and there are no or two default groups.
    """
    if isinstance(group, ProcessGroup):
        return group
    if group is None:
        return _default(caller, what)
    found = unwrap_group(group)
    if found is None:
        raise not_a_shoal_group(group, caller, what)
    return found


def has_default_group() -> bool:
    """Whether this process has a default group of any API."""
    return any(find() is not None for find in default_groups)


def unwrap_group(group: object) -> ProcessGroup | None:
    """Return the `ProcessGroup` that ``group`` is or is based on, or None."""
    found = group if isinstance(group, ProcessGroup) else getattr(group, GROUP_ATTRIBUTE, None)
    return found if isinstance(found, ProcessGroup) else None


def not_a_shoal_group(group: object, caller: str, what: str = "group") -> UsageError:
    """Return the error for an argument that is not based on a `ProcessGroup`."""
    if isinstance(group, int) and group == NON_GROUP_MEMBER:
        return UsageError(
            f"{caller}: this rank is not a member of the {what} that was given "
            "(GroupMember.NON_GROUP_MEMBER, which new_group returns to ranks that are not in it); "
            "call it on the members only"
        )
    backend = backend_of(group)
    if backend is not None:
        return UsageError(
            f"{caller}: {what} is a group of torch.distributed over the backend {backend!r}, which shoal "
            'cannot use; make it with init_process_group("shoal") or new_group(..., backend="shoal"), or '
            "pass a group of shoal.init()"
        )
    return UsageError(
        f"{caller}: {what} must be a shoal.ProcessGroup (or a group of torch.distributed over the backend "
        f"'shoal'), or None for the default group, got {type(group).__name__}: {group!r}"
    )


def _default(caller: str, what: str) -> ProcessGroup:
    found = {id(group): group for find in default_groups if (group := find()) is not None}
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise UsageError(
            f"{caller}: both torch.distributed and shoal.distributed have a default group here; name one of "
            f"them, {what}=..."
        )
    raise UsageError(
        f"{caller}: {what} is not given, and this process has no default group of shoal; pass "
        f'{what}=shoal.init(), or call init_process_group("shoal") of torch.distributed first'
    )


def backend_of(group: object) -> str | None:
    """Return the backend of a group of torch.distributed; None if ``group`` is another object."""
    # Identified by its class name, as only shoal.compat imports torch.distributed.
    kinds = type(group).__mro__
    if not any(kind.__name__ == "ProcessGroup" and "distributed" in kind.__module__ for kind in kinds):
        return None
    names = []
    for device in getattr(group, "_device_types", ()):
        with contextlib.suppress(RuntimeError, AttributeError):
            names.append(group._get_backend(device).name())  # type: ignore[attr-defined]
    return ",".join(dict.fromkeys(names)) or "unknown"
