"""Groups made from a group: ``split``, ``subgroup``, and the properties that may differ from the parent's."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..backend.base import GroupSpec, check_options
from ..backend.identity import group_ident
from ..backend.registry import BackendFactory, backend_factory
from ..common.arguments import keyword_names
from ..common.formatting import encodable
from ..errors import UnsupportedOperation
from ..links import Links, connect_members
from ..spec import FailureScope
from ..store import PrefixStore, Store
from .diagnostics.member_lists import SubgroupCall
from .operations import operation_label
from .validation.arguments import OperationCall

if TYPE_CHECKING:
    from .process_group import ProcessGroup


@dataclass(frozen=True, slots=True)
class SubgroupOptions:
    """The arguments of ``split`` and ``subgroup`` on which all members must agree; None: as the parent.

    Attributes:
        scope: PAIR, or None for ALL.
        concurrency: number of lanes.
        algorithm: one of ``config.ALGORITHMS``.
        backend: name of another backend, or of the same one for separate connections.
        options: options of the backend.
    """

    scope: FailureScope | None = None
    concurrency: int | None = None
    algorithm: str | None = None
    backend: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        scope = None if self.scope is None else self.scope.value
        given = {
            "backend": self.backend,
            "concurrency": self.concurrency,
            "algorithm": self.algorithm,
            "scope": scope,
        }
        present = {name: value for name, value in given.items() if value is not None}
        return ", ".join(f"{name}={value!r}" for name, value in sorted({**present, **self.options}.items()))

    @classmethod
    def checked(
        cls,
        call: OperationCall,
        parent: ProcessGroup,
        scope: str | None,
        concurrency: int | None,
        algorithm: str | None,
        backend: str | None,
        options: Mapping[str, Any],
    ) -> SubgroupOptions:
        """Return validated options for a group made from ``parent``.

        Raises:
            UsageError: a value is invalid.
        """
        if scope is None:
            extent = parent._spec.scope
        else:
            try:
                extent = FailureScope(scope)
            except ValueError:
                call.refuse(f"scope={scope!r}: expected 'all' or 'pair'")
        only_messages = None if extent is FailureScope.ALL else extent
        chosen = cls(only_messages, concurrency, algorithm, backend, options)
        parent._spec.tuning.changed(concurrency, algorithm)
        scopes = parent._backend.scopes
        if chosen.needs_own_links:
            where, others = (
                operation_label(call.name, parent),
                keyword_names(getattr(type(parent), call.name)),
            )
            factory, given = chosen.backend_factory_and_options(parent._links)
            check_options(factory, given, where, others)
            scopes = getattr(factory, "scopes", scopes)
        if extent not in scopes:
            name = parent._backend.name if backend is None else backend
            raise UnsupportedOperation(f"groups of the backend {name!r} have no scope={extent.value!r}")
        return chosen

    @property
    def digest(self) -> int:
        """A hash of the options, equal on all ranks that passed the same ones."""
        digest = hashlib.blake2b(str(self).encode("utf-8", "backslashreplace"), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    @property
    def needs_own_links(self) -> bool:
        """Whether the group needs separate connections."""
        return self.backend is not None or bool(self.options)

    def backend_factory_and_options(self, parent: Links) -> tuple[BackendFactory, dict[str, Any]]:
        """The factory and options of the group's backend; the parent's options go with its backend."""
        factory = parent.factory if self.backend is None else backend_factory(self.backend)
        inherited = parent.options if factory is parent.factory else {}
        return factory, {**inherited, **self.options}


INHERITED = SubgroupOptions()


def split(
    group: ProcessGroup,
    call: OperationCall,
    color: int | None,
    key: int | None,
    timeout: float | None,
    options: SubgroupOptions,
) -> ProcessGroup | None:
    """See :meth:`shoal.ProcessGroup.split`."""
    seconds = group._submitter.checked_timeout(timeout)
    for what, value in (("color", color), ("key", key)):
        if value is not None and (not isinstance(value, int) or not -(2**63) <= value < 2**63):
            call.refuse(f"{what} must be a 64-bit integer or None, got {value!r}")
    mine = [color is not None, color or 0, group.rank if key is None else key, options.digest]
    device = group._scratch_device
    table = torch.empty(group.size, len(mine), dtype=torch.int64, device=device)
    future = group.all_gather_single(table, torch.tensor(mine, device=device), timeout=timeout)
    rows = future.wait().tolist()
    digests = {(their_color, digest) for joins, their_color, _, digest in rows if joins}
    differing = {one for one, count in Counter(each for each, _ in digests).items() if count > 1}
    # All ranks have the same table, so either all of them call this or none.
    given = group.all_gather_object(str(options), timeout=timeout).wait() if differing else []
    if color is None:
        return None
    members = sorted(
        (their_key, rank)
        for rank, (joins, their_color, their_key, _) in enumerate(rows)
        if joins and their_color == color
    )
    if color in differing:
        asked = [f"rank {rank} gave {given[rank] or 'nothing'}" for rank in sorted(r for _, r in members)]
        call.refuse(f"the ranks of color {color} asked for different groups: {'; '.join(asked)}")
    # The key of the exchange is unique to this split, and equal on all ranks.
    return _make(group, [rank for _, rank in members], f"split:{future.key:x}:{color}", seconds, options)


def subgroup(
    group: ProcessGroup,
    members: list[int],
    name: str | None,
    timeout: float | None,
    options: SubgroupOptions,
    asked: str,
) -> ProcessGroup:
    """Make a group of ``members``, in any state of ``group``; ``asked``: the options as text."""
    with group._submitter.lock:
        identity = (name, asked, *members)
        group._made[identity] += 1
        call = SubgroupCall(name, asked, tuple(members), group._made[identity])
    listed = ",".join(map(str, members))
    label = f"{name or 'subgroup'}:{listed}:{call.count}{asked and f':{asked}'}"
    seconds = group.timeout if timeout is None else timeout
    made = _make(group, members, label, seconds, options, call)
    if len(members) > 1:
        made._submitter.on_first_operation = partial(group._lists.watch_operation, group, call)
    return made


def _make(
    group: ProcessGroup,
    members: list[int],
    label: str,
    timeout: float,
    options: SubgroupOptions,
    call: SubgroupCall | None = None,
) -> ProcessGroup:
    label = encodable(label)
    parent = group._spec
    ranks = tuple(parent.ranks[rank] for rank in members)
    store = PrefixStore(f"{label}/", group.store)
    links = _connected(group, ranks, store, timeout, options, call)
    spec = GroupSpec(
        name=f"{group.name}/{label}",
        ident=group_ident(f"{parent.ident:x}/{label}"),
        rank=members.index(group.rank),
        ranks=ranks,
        tuning=parent.tuning.changed(options.concurrency, options.algorithm),
        options=dict(links.options),
        scope=options.scope or FailureScope.ALL,
        world_ranks=parent.world_ranks and tuple(group.ranks[rank] for rank in members),
    )
    return group._in(group.world, links, spec, store, timeout=timeout, parent=group)


def _connected(
    group: ProcessGroup,
    ranks: tuple[int, ...],
    store: Store,
    timeout: float,
    options: SubgroupOptions,
    call: SubgroupCall | None,
) -> Links:
    """Return connections for ``options``: those of ``group``, or new ones."""
    if not options.needs_own_links:
        return group._links
    factory, given = options.backend_factory_and_options(group._links)
    if factory is group._links.factory and given == group._links.options:
        return group._links
    watching = nullcontext(lambda: None) if call is None else group._lists.watch_connect(group, call)
    with watching as check:
        return connect_members(
            group.world.membership, ranks, factory, timeout=timeout, options=given, store=store,
            status_page=group.world.links.backend.status_page(), lost=group._links.lost, check=check,
        )  # fmt: skip
