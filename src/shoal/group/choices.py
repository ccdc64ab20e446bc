"""The properties of a new group that differ from those of its parent."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..backend.arguments import check_options, lanes
from ..backend.registry import BackendFactory, backend_factory
from ..common.arguments import unknown_keyword_error
from ..links import Links


@dataclass(frozen=True, slots=True)
class Choices:
    """The arguments of ``split`` and ``subgroup`` on which all members must agree; None: as the parent.

    Attributes:
        scope: "pair", or None for "all".
        concurrency: number of lanes.
        backend: name of another backend, or of the same one for separate connections.
        options: options of the backend.
    """

    scope: str | None = None
    concurrency: int | None = None
    backend: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = {"backend": self.backend, "concurrency": self.concurrency, "scope": self.scope}
        named = {name: value for name, value in given.items() if value is not None}
        return ", ".join(f"{name}={value!r}" for name, value in sorted({**named, **self.options}.items()))

    def checked(self, where: str, others: Sequence[str], parent: Links) -> Choices:
        """Raise UsageError for invalid values.

        ``where`` is the function that takes the options, for the message, and ``others`` its other arguments.
        """
        if self.concurrency is not None:
            lanes(self.concurrency)
        if self.own_links:
            if parent.factory is None and self.backend is None:
                raise unknown_keyword_error(where, list(self.options), others)
            factory, options = self.engine(parent)
            check_options(factory, options, where, others)
        return self

    @property
    def code(self) -> int:
        """A hash of the choices, equal on all ranks that passed the same ones."""
        digest = hashlib.blake2b(str(self).encode("utf-8", "backslashreplace"), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    @property
    def own_links(self) -> bool:
        """Whether the group needs separate connections."""
        return self.backend is not None or bool(self.options)

    def engine(self, parent: Links) -> tuple[BackendFactory, dict[str, Any]]:
        """The factory and options of the group's backend; the parent's options go with its backend."""
        factory = parent.factory if self.backend is None else backend_factory(self.backend)
        assert factory is not None  # checked
        inherited = parent.options if factory is parent.factory else {}
        return factory, {**inherited, **self.options}


AS_PARENT = Choices()
