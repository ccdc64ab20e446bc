"""Moving gradients from their parameters into the buckets, and the averages back.

A gradient is copied into its bucket when it arrives, while it is still in the cache and its memory can be
reused for the next one.  The hook itself (``cpp/python/ddp.cc``) does this if copying bytes suffices,
otherwise :meth:`Gradients.copy_to_bucket`.

The next pass overwrites a gradient that is a view of its bucket, unless the program still references it (as
PCGrad, GradNorm and loggers do).  Before a pass writes to the buckets, :meth:`Gradients.preserve_referenced`
counts the references to each view and, to find other aliases (a slice, a numpy array), to the memory of each
bucket.  If there are any, the program keeps that memory, the bucket gets new memory, and averages of these
parameters are copied out of it from then on.  CPU only: on other devices pending work holds references too.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...errors import UsageError
from ...group import ProcessGroup
from .buckets import Bucket, BucketSet, build_buckets, renew_bucket

#: An address that no gradient has.
_NO_ADDRESS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerOptions:
    """The options of a reducer; parameters are given by their indices."""

    max_bytes: int  # maximum size of a bucket in bytes
    find_unused: bool = False  # parameters may have no gradient, different ones in each pass
    static_graph: bool = False  # every pass uses the same parameters equally often, as found in the first one
    #: after a pass, gradients are views of the buckets, except those that the program kept references to;
    #: otherwise averages are copied back
    as_views: bool = True
    #: with ``find_unused``: do not send buckets without a parameter used on any rank
    skip_unused: bool = False
    #: the number of sparse dimensions of each parameter with sparse gradients
    sparse: Mapping[int, int] = field(default_factory=dict)
    #: parameters whose buckets are sent only after the gradient of ``delayed_until`` has arrived
    delayed: tuple[int, ...] = ()
    delayed_until: int | None = None
    #: the first copy has the parameters to update; autograd writes gradients only to the others
    has_master_copy: bool = False
    #: the dtype to reduce in, if not that of the parameters; then needs ``as_views=False``
    reduce_dtype: torch.dtype | None = None


class Gradients:
    """The gradients of all copies of a model in this process, and their buckets (``set``)."""

    def __init__(
        self,
        group: ProcessGroup,
        names: Sequence[str],
        copies: Sequence[Sequence[torch.Tensor]],
        options: ReducerOptions,
    ) -> None:
        self._group = group
        self._names = names
        self._copies = copies
        self._parameters = copies[0]
        self._options = options
        self.has_copies = len(copies) > 1
        #: The parameters whose averages are copied out of the buckets (others get views of them).
        self.copied = set() if options.as_views else set(range(len(names)))
        # On other devices unfinished work references the memory too.
        self._counts_references = all(parameter.device.type == "cpu" for parameter in self._parameters)
        self.set = BucketSet((), torch.empty(0, device="cpu"), ())
        #: The value of ``parameter.grad`` while the gradient is in its bucket.  The list is never replaced.
        self.views: list[torch.Tensor] = []
        #: The addresses of ``views``, _NO_ADDRESS for ``copied`` parameters.  The list is never replaced.
        self.addresses: list[int] = []
        #: The memory of each bucket, and its number of references without the program's; None: not counted.
        self._references: list[tuple[torch.UntypedStorage, int] | None] = []

    # -- buckets ---------------------------------------------------------------------------------

    def arrange_buckets(self, order: Iterable[int]) -> None:
        """Build the buckets for gradients in this ``order``, or rebuild them and move their contents.

        Raises OutOfSharedMemory if they do not fit.
        """
        options, old, views_before = self._options, self.set, list(self.views)
        expected_order: list[int] = []
        for index in order:
            if index not in options.delayed:
                expected_order.append(index)
            if index == options.delayed_until:
                expected_order += options.delayed
        new = build_buckets(
            self._group,
            self._parameters,
            expected_order,
            options.max_bytes,
            sparse=options.sparse,
            separate=options.delayed,
            reduce_dtype=options.reduce_dtype,
        )
        if new.members() == old.members():
            return
        self.set = new
        self.views[:] = map(_gradient_at, new.views)
        self.addresses[:] = [
            _NO_ADDRESS if index in self.copied else place.data_ptr() for index, place in enumerate(new.views)
        ]
        if views_before:
            with torch.no_grad():
                torch._foreach_copy_(list(new.views), list(old.views))
            for parameter, before, after in zip(self._parameters, views_before, self.views, strict=True):
                if parameter.grad is before:
                    parameter.grad = after

    def _view_of(self, index: int) -> torch.Tensor:
        """Return the view of one parameter, renewed if it was changed to refer to other memory."""
        view = self.views[index]
        if view.data_ptr() != self.addresses[index]:
            view = self.views[index] = _gradient_at(self.set.views[index])
        return view

    # -- references that the program keeps -------------------------------------------------------

    def count_references(self, renewed: Collection[int] | None = None) -> None:
        """Count the reducer's own references to the memory of ``renewed`` buckets (None: all)."""
        if renewed is None:
            self._references = [None] * len(self.set.buckets)
            renewed = range(len(self.set.buckets))
        for number in renewed:
            memory = self.set.buckets[number].flat.untyped_storage()
            own = _references_to(memory)  # before the tuple references it
            self._references[number] = memory, own

    def preserve_referenced(self) -> Collection[int]:
        """Preserve gradients of earlier passes that the program references; return buckets with new memory.

        Called before a pass writes to the buckets.  The current gradient of a parameter is not preserved: as
        without data parallelism, the pass accumulates into it.
        """
        if not self._counts_references:
            return ()
        kept = [
            number
            for number, noted in enumerate(self._references)
            if noted is not None
            and _references_to(noted[0]) > noted[1]
            and not self.copied.issuperset(self.set.buckets[number].members)
        ]
        renewed = {number: set(self.set.buckets[number].members) for number in kept}
        # The list and the argument of getrefcount() are two references to each view.
        if max(map(sys.getrefcount, self.views)) > 2:
            for number, bucket in enumerate(self.set.buckets):
                for index in bucket.members:
                    if sys.getrefcount(self.views[index]) > 2 and self._is_replaced(index):
                        renewed.setdefault(number, set()).add(index)
        for number, members in renewed.items():
            self._renew(number, members)
        return renewed

    def _is_replaced(self, index: int) -> bool:
        """Whether the view of a parameter is no longer its gradient."""
        return index not in self.copied and self._parameters[index].grad is not self.views[index]

    def _renew(self, number: int, kept: set[int]) -> None:
        """Give a bucket new memory; averages of members ``kept`` by the program will be copied out of it."""
        bucket = renew_bucket(self._group, self.set.buckets[number])
        self.set = self.set.replaced(number, bucket)
        for index, place in zip(bucket.members, bucket.views, strict=True):
            if self._parameters[index].grad is self.views[index]:
                kept.add(index)  # its gradient stays in the old memory
            self.views[index] = _gradient_at(place)
            self.addresses[index] = place.data_ptr()
        self.copied |= kept
        for index in kept:
            self.addresses[index] = _NO_ADDRESS
        self._references[number] = None

    # -- into the buckets ------------------------------------------------------------------------

    def copy_to_bucket(self, index: int) -> None:
        """Copy a gradient that autograd allocated elsewhere into its bucket."""
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is None:
            raise UsageError(
                f"the gradient of {self._names[index]!r} on rank {self._group.rank} was removed before it "
                "was reduced: a hook of the parameter must not apply gradients during backward; use a "
                "communication hook for that (shoal.parallel.hooks.hook_then_optimizer)"
            )
        if index in self._options.sparse:
            return
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        # backward(create_graph=True) runs hooks with gradients enabled
        self.set.views[index].copy_(gradient.detach() if gradient.requires_grad else gradient)
        if index not in self.copied:
            parameter.grad = self._view_of(index)

    def fill_gaps(self, bucket: Bucket, counts: Sequence[int]) -> None:
        """Fill ``bucket`` with older gradients, or zeros, where none arrived in this pass."""
        for index, view in zip(bucket.members, bucket.views, strict=True):
            if counts[index] == 0:
                gradient = self._parameters[index].grad
                if gradient is None:
                    view.zero_()
                elif gradient.data_ptr() != self.addresses[index]:
                    self.copy_to_bucket(index)

    def sum_into_bucket(self, bucket: Bucket) -> None:
        """Write the sums of the copies' gradients into ``bucket``, added in the order of the copies.

        The gradients of all copies but the first become None, so that their memory can be reused.
        """
        terms: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []) for _ in self._copies]
        for index, view in zip(bucket.members, bucket.views, strict=True):
            present = self.present(index)
            if not present:
                view.zero_()
            for (into, out), gradient in zip(terms, present, strict=False):
                if gradient.layout is not torch.strided:
                    gradient = gradient.to_dense()
                if gradient.data_ptr() != self.addresses[index]:
                    into.append(view)
                    out.append(gradient.detach().to(view.device))
            for copy in self._copies[1:]:
                copy[index].grad = None
        with torch.no_grad():
            for number, (into, out) in enumerate(terms):
                if into:
                    (torch._foreach_add_ if number else torch._foreach_copy_)(into, out)

    def present(self, index: int) -> list[torch.Tensor]:
        """Return the gradients of one parameter in all copies that have one."""
        return [gradient for copy in self._copies if (gradient := copy[index].grad) is not None]

    def sparse(self, index: int) -> list[torch.Tensor]:
        """Return the sparse gradients of one parameter in all copies; raise UsageError if one is dense."""
        present = self.present(index)
        if any(gradient.layout is torch.strided for gradient in present):
            raise UsageError(
                f"the gradient of {self._names[index]!r} on rank {self._group.rank} is dense, but its module "
                "was made with sparse=True: the parameter is used outside of that module too, or its old "
                "gradient was dense; make the module with sparse=False"
            )
        return present

    # -- out of the buckets ----------------------------------------------------------------------

    def deliver(self, used: Sequence[bool], *, gaps: bool) -> None:
        """Set the gradients of the parameters to the averages.

        Args:
            used: whether each parameter had a gradient on any rank; other gradients are not changed.
            gaps: whether a gradient did not arrive on this rank.
        """
        if self.copied:
            self._copy_out(used)
        if (gaps or self.has_copies) and len(self.copied) < len(self._parameters):
            for index, parameter in enumerate(self._parameters):
                if used[index] and index not in self._options.sparse and index not in self.copied:
                    parameter.grad = self._view_of(index)

    def _copy_out(self, used: Sequence[bool]) -> None:
        into: list[torch.Tensor] = []
        out: list[torch.Tensor] = []
        for index in self.copied:
            parameter, view = self._parameters[index], self.set.views[index]
            if not used[index] or index in self._options.sparse:
                continue
            own = parameter.grad
            # torch._foreach_copy_ cannot write to lazily conjugated or negated tensors.
            if own is None or own.is_conj() or own.is_neg():
                parameter.grad = own = torch.empty_like(parameter)
            into.append(own)
            out.append(view)
        if into:
            with torch.no_grad():  # backward(create_graph=True)
                torch._foreach_copy_(into, out)

    def clear(self) -> None:
        """Set gradients that are in the buckets to None."""
        for parameter, view in zip(self._parameters, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = None

    def copy_out_all(self) -> None:
        """Copy gradients out of the buckets, whose memory is released with the group."""
        for parameter, view in zip(self._parameters, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()

    # -- of the copies ---------------------------------------------------------------------------

    def is_further(self, index: int, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` belongs to a copy other than the first."""
        return parameter is not self._parameters[index]

    def sum_copies(self) -> None:
        """Add the gradients of the other copies to those of the first."""
        with torch.no_grad():
            for copy in self._copies[1:]:
                for parameter, other in zip(self._parameters, copy, strict=True):
                    if other.grad is None:
                        continue
                    own = other.grad.to(parameter.device, parameter.dtype)
                    if parameter.grad is None:
                        parameter.grad = own
                    elif parameter.grad.is_sparse:
                        parameter.grad = own + parameter.grad
                    else:
                        parameter.grad.add_(own)
                    other.grad = None

    def clear_copies(self) -> None:
        """Set the gradients of the other copies to None."""
        for copy in self._copies[1:]:
            for parameter in copy:
                parameter.grad = None


def _gradient_at(place: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the memory of ``place``, to be used as ``parameter.grad``.

    A separate object, as module.to() changes a gradient's memory; no view, as views refuse ``detach_()``.
    """
    return place.data


def _references_to(memory: torch.UntypedStorage) -> int:
    """Count the references to a storage: by tensors, and by Python to its wrapper object."""
    tensors: int = torch._C._storage_Use_Count(memory._cdata)
    return tensors + sys.getrefcount(memory)
