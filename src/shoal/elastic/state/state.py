"""The state that training changes on this rank, its restoration for repeated steps, and checkpoints."""

from __future__ import annotations

import copy
import os
import zipfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...common.atomic_file import AtomicFile
from ...errors import GroupError, ShoalError, UsageError
from ...parallel import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from ...parallel.coalesced import broadcast_obstacle, writable_elements
from ...parallel.consistency import Digest
from ..samples import Samples
from .values import decode, encode

#: Format 2 can contain numpy values, which readers of format 1 would load as dicts.
_FORMAT, _READABLE = 2, (1, 2)


class State:
    """The parts of a session: models, optimisers, other objects with a ``state_dict``, and plain values.

        state = State(model=net, optimizer=opt, scheduler=sched, samples=samples, best=0.0)
        state.best = max(state.best, accuracy)

    Parts are attributes with names of your choice.  Plain values can be assigned.  When a step is repeated,
    plain values and the buffers of models are restored first.  All other parts may change only after
    ``step.commit()``.

    Plain values, and the results of ``state_dict``, consist of None, numbers, strings, bytes, tensors, numpy
    scalars and arrays, and lists, tuples, dicts and sets of them.  Other values are refused, as :meth:`load`
    could not read them: when the State is made, when a part is assigned, and when the next step begins.

    Args:
        samples: the order of the samples; None: the program selects its data itself.
        parts: all other parts.

    Attributes:
        steps: number of completed steps.

    Raises:
        UsageError: a part cannot be used here; the message says why.
    """

    _parts: dict[str, Any]
    _samples: Samples | None
    _steps: int

    def __init__(self, *, samples: Samples | None = None, **parts: Any) -> None:
        if samples is not None and not isinstance(samples, Samples):
            raise UsageError(f"State: samples must be shoal.elastic.Samples, got {type(samples).__name__}")
        for name, part in parts.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(f"State: {name!r} cannot be the name of a part")
            _refuse(name, part)
        held = BufferSnapshot([part for part in parts.values() if isinstance(part, nn.Module)])
        self.__dict__.update(_parts=dict(parts), _samples=samples, _steps=0, _held=held, _values={})
        self.content(shared=True)  # refuses values that cannot be loaded

    @property
    def samples(self) -> Samples | None:
        """The order of the samples."""
        return self._samples

    @property
    def steps(self) -> int:
        """Number of completed steps, which is also the number of the next step."""
        return self._steps

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_parts"][name]
        except KeyError:
            raise AttributeError(f"this State has no part {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._parts:
            raise AttributeError(f"this State has no part {name!r}: give it a first value, State({name}=...)")
        if not _is_plain(self._parts[name]):
            raise UsageError(
                f"State: {name!r} is a {type(self._parts[name]).__name__}, which cannot be replaced"
            )
        _refuse(name, value)
        if not _is_plain(value):
            raise UsageError(f"State: {name!r} is a plain value, and cannot become a {type(value).__name__}")
        encode(value, name)
        self._parts[name] = value

    def all_models(self) -> Iterator[nn.Module]:
        """Return the parts that are modules."""
        return (part for part in self._parts.values() if isinstance(part, nn.Module))

    def all_optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """Return the parts that are optimisers."""
        return (part for part in self._parts.values() if isinstance(part, torch.optim.Optimizer))

    def digest(self) -> bytes:
        """Return the SHA-256 digest of all parameters and the state of all optimisers.

        It is equal on ranks that agree in every bit.  It takes about a second per gigabyte.
        """
        digest = Digest()
        for name, part in sorted(self._parts.items()):
            if isinstance(part, nn.Module):
                digest.add(name, dict(part.named_parameters()))
            elif isinstance(part, ZeroRedundancyOptimizer):
                digest.add(name, part.common_options())  # the owners compare the sharded state
            elif isinstance(part, torch.optim.Optimizer):
                digest.add(name, part.state_dict())
        return digest.value()

    # -- a step --------------------------------------------------------------------------------

    def hold(self) -> None:
        """Save buffers and plain values for :meth:`put_back`; raises UsageError as :meth:`content` does."""
        self._held.take()
        plain = {name: value for name, value in self._parts.items() if _is_plain(value)}
        for name, value in plain.items():
            encode(value, name)  # raises if it cannot be saved
        self.__dict__["_values"] = copy.deepcopy(plain)

    def put_back(self, *, gradients: bool = True) -> None:
        """Restore the buffers and plain values saved by :meth:`hold`, and drop all ``gradients``."""
        self._held.put_back()
        self._parts.update(self.__dict__["_values"])
        self.__dict__["_values"] = {}
        for model in self.all_models() if gradients else ():
            for parameter in model.parameters():
                parameter.grad = None

    def step_counts(self, batch: int) -> None:
        """Count a completed step of ``batch`` samples."""
        self.__dict__["_steps"] += 1
        if self.samples is not None:
            self.samples.advance(batch)

    # -- checkpoints ---------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a file, between two steps; one rank does it, as all ranks hold the same state.

        The write is atomic, even if the machine fails: a temporary file in the same directory is written,
        flushed to disk, and renamed.  The next save deletes temporary files of killed processes.

        Args:
            path: path of the file; an existing file is replaced.

        Raises:
            UsageError: the state contains something that :meth:`load` could not read.
            OSError: the file cannot be written.
        """
        content = {"format": _FORMAT, **self.content()}
        with AtomicFile(path) as draft:
            try:
                torch.save(content, draft.file)
            except RuntimeError as error:
                # torch reports an error of the file system as an error of its archive
                if not isinstance(error.__context__, OSError):
                    raise
                raise OSError(error.__context__.errno, error.__context__.strerror) from error
            draft.replace(durable=True)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load a file written by :meth:`save`; call it on every rank, before the session begins.

        If a part refuses its content, those before it keep what they have loaded.

        Raises:
            UsageError: the file is damaged, or was not written by :meth:`save`, or has other parts.
            OSError: the file cannot be read.
        """
        file = os.fspath(path)
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            _verify_checksums(file)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # damaged files make torch raise any exception
            raise UsageError(
                f"{file} is damaged or was not written by State.save: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(saved, dict) or saved.get("format") not in _READABLE:
            raise UsageError(f"{file} was not written by State.save of this release")
        if saved.keys() != {"format", "steps", "samples", "parts"} or not isinstance(saved["parts"], dict):
            raise UsageError(f"{file} is damaged: it does not hold what State.save writes")
        self.take_over(saved, file)

    # -- the whole of it -----------------------------------------------------------------------

    def content(self, *, shared: bool = False) -> dict[str, Any]:
        """Return the whole state as dicts, lists, plain values and tensors, which are not copied.

        Args:
            shared: only what is equal on all ranks, without the state of a ``ZeroRedundancyOptimizer``.

        Raises:
            UsageError: the state contains something that cannot be loaded.
        """
        return {
            "steps": self.steps,
            "samples": None if self.samples is None else self.samples.state_dict(),
            "parts": {
                name: encode(part, name)
                if _is_plain(part)
                else encode(part.common_options(), f"{name}.state_dict()")
                if shared and isinstance(part, ZeroRedundancyOptimizer)
                else encode(part.state_dict(), f"{name}.state_dict()")
                for name, part in self._parts.items()
            },
        }

    def take_over(self, content: dict[str, Any], source: str) -> None:
        """Take over ``content``, the result of :meth:`content` of another state, called ``source``.

        Raises:
            UsageError: the other state has other parts, or a part refuses its new state.
        """
        parts = content["parts"]
        if parts.keys() != self._parts.keys() or (content["samples"] is None) != (self.samples is None):
            raise UsageError(
                f"{source} holds the parts {', '.join(sorted(parts))}"
                f"{' and samples' if content['samples'] is not None else ''}; this State has "
                f"{', '.join(sorted(self._parts))}{' and samples' if self.samples is not None else ''}"
            )
        for name, part in self._parts.items():
            try:
                self._take_over_part(name, part, parts[name])
            except GroupError:
                raise
            except Exception as error:  # raised by a class of the program
                raise UsageError(
                    f"{source}: the content of the part {name!r} does not fit this State's "
                    f"{type(part).__name__}: {type(error).__name__}: {error}"
                ) from error
        try:
            if self.samples is not None:
                self.samples.load_state_dict(content["samples"])
            self.__dict__["_steps"] = int(content["steps"])
        except (KeyError, TypeError, ValueError, ShoalError) as error:
            raise UsageError(f"{source}: its samples or steps do not fit this State: {error}") from error

    def _take_over_part(self, name: str, part: Any, saved: Any) -> None:
        saved = decode(saved)
        if _is_plain(part):
            self._parts[name] = saved
        elif isinstance(part, ZeroRedundancyOptimizer) and "state" not in saved:
            part.load_common_options(saved)
        else:
            part.load_state_dict(saved)


def _verify_checksums(file: str) -> None:
    """Compare the records of an archive with their CRC-32, which torch.load does not do.

    A program that disables them (torch.serialization.set_crc32_options) writes zeros instead.

    Raises:
        ValueError: a record is damaged.
        zipfile.BadZipFile: the archive is damaged.
    """
    with zipfile.ZipFile(file) as archive:
        written = any(record.CRC for record in archive.infolist())
        if written and (name := archive.testzip()) is not None:
            raise ValueError(f"the record {name} does not match its checksum")


class BufferSnapshot:
    """Copies of the buffers of modules."""

    def __init__(self, modules: list[nn.Module]) -> None:
        # Modules instead of buffers: a module may replace a buffer at any time.
        self._owners = {id(owner): owner for module in modules for owner in module.modules()}
        self._held: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._copies: list[torch.Tensor] = []

    def take(self) -> None:
        """Copy the buffers."""
        self._held = [
            (owner, name, buffer)
            for owner in self._owners.values()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        buffers = [_writable_view(buffer) for _, _, buffer in self._held]
        if not buffers:
            self._copies = []
            return
        with torch.no_grad():
            if len(buffers) == len(self._copies) and all(map(_can_copy_into, buffers, self._copies)):
                torch._foreach_copy_(self._copies, buffers)
            else:
                self._copies = [buffer.clone() for buffer in buffers]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the buffers."""
        for (owner, name, buffer), kept in zip(self._held, self._copies, strict=True):
            if broadcast_obstacle(buffer) is None:
                _writable_view(buffer).copy_(kept)
                setattr(owner, name, buffer)
            else:
                setattr(owner, name, kept.clone())


def _writable_view(buffer: torch.Tensor) -> torch.Tensor:
    """Return a writable view of ``buffer``, or ``buffer`` if it can only be replaced (a sparse one)."""
    return writable_elements(buffer) if broadcast_obstacle(buffer) is None else buffer


def _can_copy_into(copy: torch.Tensor, other: torch.Tensor) -> bool:
    alike = copy.shape == other.shape and copy.dtype == other.dtype and copy.device == other.device
    return alike and broadcast_obstacle(copy) is None


def _is_plain(part: Any) -> bool:
    return not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict"))


def _refuse(name: str, part: Any) -> None:
    """Raise UsageError if ``part`` cannot be used in a session."""
    if isinstance(part, type):
        raise UsageError(f"State: {name!r} is the class {part.__name__}; pass an instance of it")
    if isinstance(part, ZeroRedundancyOptimizer) and part.copies == 1:
        raise UsageError(
            f"State: {name!r} is a ZeroRedundancyOptimizer, which keeps each part of its state on one rank: "
            "the part would be lost with the rank.  Make it with copies=2"
        )
    if isinstance(part, PostLocalSGDOptimizer):
        raise UsageError(
            f"State: {name!r} is a PostLocalSGDOptimizer: its ranks differ between two averages, so the "
            "updates of a lost rank would be lost.  Use the optimiser inside, with session.parallel(model)"
        )
    inside = part.values() if isinstance(part, dict) else part if isinstance(part, (list, tuple)) else ()
    for each in inside:
        if not _is_plain(each):
            raise UsageError(
                f"State: {name!r} has a {type(each).__name__} inside; pass each such object as a part"
            )
    if isinstance(part, nn.Module) and hasattr(part, "regroup"):
        raise UsageError(
            f"State: {name!r} is wrapped already; give State the module itself, and wrap it with "
            "session.parallel(module)"
        )
