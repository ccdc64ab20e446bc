"""Moving gradients from their parameters into the buckets, and the averages back.

A gradient is copied into its bucket when it arrives, while it is in the cache still and its memory can serve
the next one.  So nothing is left to copy when a bucket is sent.  The hook itself (``cpp/bind/reducer.cc``)
does so where it takes no more than copying bytes; :meth:`Gradients.take` does in all other cases.

A gradient that is a view of its bucket is overwritten by the next pass, unless the program still refers to it
(PCGrad, GradNorm and loggers do).  :meth:`Gradients.keep_references` looks for such references before a pass
writes to the buckets: it counts those to each view, and to the memory of each bucket, which any other alias
(a slice, a numpy array) refers to.  The program keeps that memory, the bucket gets new memory, and averages
of these parameters are copied out of it from then on.  Not so on other devices than the CPU, where work that
is not done yet holds references, too.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from ...errors import UsageError
from ...group import ProcessGroup
from .buckets import Bucket, BucketSet, build_buckets, renew_bucket

#: An address at which no gradient lies.
_NOWHERE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerOptions:
    """How a reducer works.

    Attributes:
        cap: the largest bucket in bytes.
        find_unused: parameters may lack a gradient, others in each pass.
        static_graph: every pass uses the same parameters equally often; the first shows which.
        as_views: after a pass, gradients are views of the buckets, except those that the program was found
            to refer to in a later pass; else they are copied back.
        skip_unused: with ``find_unused``: do not send buckets of which no rank uses anything.
        sparse: for the parameters with sparse gradients, the number of sparse dimensions.
        delayed: parameters whose buckets are sent only after the gradient of ``after`` has arrived.
        masters: autograd gives gradients to the other copies only, which were made from the first.
        reduce_dtype: what to reduce in, if not in the dtype of the parameters; needs ``as_views=False``
            wherever the two differ.
    """

    cap: int
    find_unused: bool = False
    static_graph: bool = False
    as_views: bool = True
    skip_unused: bool = False
    sparse: Mapping[int, int] = field(default_factory=dict)
    delayed: tuple[int, ...] = ()
    after: int | None = None
    masters: bool = False
    reduce_dtype: torch.dtype | None = None


class Gradients:
    """The gradients of all copies of a model in this process, and the buckets that they are reduced in.

    Args:
        names: what error messages call the parameters.
        copies: the parameters of each copy.

    Attributes:
        set: the buckets.
        several: there is more than one copy.
        copied: the parameters whose averages are copied out of the buckets; the gradients of others are
            views of the buckets after a pass.
        views: what ``parameter.grad`` is when a gradient is in its bucket; the same list for ever.
        addresses: where the views lie, likewise; ``_NOWHERE`` for the parameters that are ``copied``.
    """

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
        self.several = len(copies) > 1
        self.copied = set() if options.as_views else set(range(len(names)))
        # The work that another device has not done yet refers to its memory, too.
        self._counts_references = all(parameter.device.type == "cpu" for parameter in self._parameters)
        self.set = BucketSet((), torch.empty(0, device="cpu"), ())
        self.views: list[torch.Tensor] = []
        self.addresses: list[int] = []
        #: The memory of each bucket, and the number of references to it if the program has none; None: not
        #: counted yet.
        self._references: list[tuple[torch.UntypedStorage, int] | None] = []

    # -- buckets ---------------------------------------------------------------------------------

    def arrange(self, order: Iterable[int]) -> None:
        """Lay out the buckets, anew if need be; what is in them moves along.

        Args:
            order: the parameters in the order in which their gradients are expected.

        Raises:
            OutOfSharedMemory: they do not fit.
        """
        old = self.set
        new = self._build(order)
        if new.members() != old.members():
            self.set = new
            before = list(self.views)
            self.views[:] = map(_gradient_at, new.views)
            self.addresses[:] = [
                _NOWHERE if index in self.copied else place.data_ptr()
                for index, place in enumerate(new.views)
            ]
            if before:
                self._move(old.views, before)

    def _build(self, order: Iterable[int]) -> BucketSet:
        options = self._options
        arranged: list[int] = []
        for index in order:
            if index not in options.delayed:
                arranged.append(index)
            if index == options.after:
                arranged += options.delayed
        return build_buckets(
            self._group,
            self._parameters,
            arranged,
            options.cap,
            sparse=options.sparse,
            apart=options.delayed,
            reduce_dtype=options.reduce_dtype,
        )

    def _move(self, places: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(self.set.views), list(places))
        for parameter, before, after in zip(self._parameters, views, self.views, strict=True):
            if parameter.grad is before:
                parameter.grad = after

    def _own(self, index: int) -> torch.Tensor:
        """The view of one parameter, mended if it was made to refer to other memory."""
        view = self.views[index]
        if view.data_ptr() != self.addresses[index]:
            view = self.views[index] = _gradient_at(self.set.views[index])
        return view

    # -- references that the program keeps -------------------------------------------------------

    def count_references(self, renewed: Collection[int] | None = None) -> None:
        """Note how many references the reducer itself has to the memory of new buckets.

        Args:
            renewed: the result of :meth:`keep_references`; None: all buckets are new.
        """
        if renewed is None:
            self._references = [None] * len(self.set.buckets)
            renewed = range(len(self.set.buckets))
        for number in renewed:
            memory = self.set.buckets[number].flat.untyped_storage()
            own = _references_to(memory)  # before a tuple refers to it
            self._references[number] = memory, own

    def keep_references(self) -> Collection[int]:
        """Leave gradients of earlier passes that the program refers to as they are.

        Called before a pass writes to the buckets.  A gradient that a parameter still has is no such one: as
        without data parallelism, it accumulates in place.

        Returns:
            The buckets that have new memory now.
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
        # The list has one reference to each view, the argument of getrefcount() another one.
        if max(map(sys.getrefcount, self.views)) > 2:
            for number, bucket in enumerate(self.set.buckets):
                for index in bucket.members:
                    if sys.getrefcount(self.views[index]) > 2 and self._is_left(index):
                        renewed.setdefault(number, set()).add(index)
        for number, members in renewed.items():
            self._renew(number, members)
        return renewed

    def _is_left(self, index: int) -> bool:
        """Whether the view of a parameter is not its gradient any more."""
        return index not in self.copied and self._parameters[index].grad is not self.views[index]

    def _renew(self, number: int, kept: set[int]) -> None:
        """Give a bucket new memory: the program has references into the old one.

        Args:
            kept: the members that it may refer to; their averages are copied out from now on.
        """
        bucket = renew_bucket(self._group, self.set.buckets[number])
        self.set = self.set.replaced(number, bucket)
        for index, place in zip(bucket.members, bucket.views, strict=True):
            if self._parameters[index].grad is self.views[index]:
                kept.add(index)  # it stays what it is, in the old memory
            self.views[index] = _gradient_at(place)
            self.addresses[index] = place.data_ptr()
        self.copied |= kept
        for index in kept:
            self.addresses[index] = _NOWHERE
        self._references[number] = None

    # -- into the buckets ------------------------------------------------------------------------

    def take(self, index: int) -> None:
        """Bring a gradient into its bucket that autograd put elsewhere."""
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is None:
            self._complain_of_theft(index)
        if index in self._options.sparse:
            return
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        # backward(create_graph=True) runs hooks with gradients enabled
        self.set.views[index].copy_(gradient.detach() if gradient.requires_grad else gradient)
        if index not in self.copied:
            parameter.grad = self._own(index)

    def _complain_of_theft(self, index: int) -> NoReturn:
        raise UsageError(
            f"the gradient of {self._names[index]!r} on rank {self._group.rank} was taken away before it "
            "could be reduced: a hook of the parameter must not apply gradients during backward; let a "
            "communication hook do that (shoal.parallel.hooks.hook_then_optimizer)"
        )

    def fill_gaps(self, bucket: Bucket, counts: Sequence[int]) -> None:
        """Bring into ``bucket`` what did not arrive in this pass: older gradients, or zeros."""
        for index, view in zip(bucket.members, bucket.views, strict=True):
            if counts[index] == 0:
                gradient = self._parameters[index].grad
                if gradient is None:
                    view.zero_()
                elif gradient.data_ptr() != self.addresses[index]:
                    self.take(index)

    def add_up(self, bucket: Bucket) -> None:
        """Bring into ``bucket`` the sums of the copies' gradients, added in the order of the copies.

        Those of the further copies are None then; their memory can serve the next ones.
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
        """The gradients of one parameter in all copies that have one."""
        return [gradient for copy in self._copies if (gradient := copy[index].grad) is not None]

    def sparse(self, index: int) -> list[torch.Tensor]:
        """The gradients of one parameter, which must be sparse, in all copies that have one.

        Raises:
            UsageError: one is dense.
        """
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
        """Make the averages the gradients of the parameters.

        Args:
            used: which parameters had a gradient on any rank; the gradients of others are left alone.
            gaps: whether any did not arrive here.
        """
        if self.copied:
            self._copy_out(used)
        if (gaps or self.several) and len(self.copied) < len(self._parameters):
            for index, parameter in enumerate(self._parameters):
                if used[index] and index not in self._options.sparse and index not in self.copied:
                    parameter.grad = self._own(index)

    def _copy_out(self, used: Sequence[bool]) -> None:
        into: list[torch.Tensor] = []
        out: list[torch.Tensor] = []
        for index in self.copied:
            parameter, view = self._parameters[index], self.set.views[index]
            if not used[index] or index in self._options.sparse:
                continue
            own = parameter.grad
            # torch._foreach_copy_ writes to no tensor that is conjugated or negated lazily.
            if own is None or own.is_conj() or own.is_neg():
                parameter.grad = own = torch.empty_like(parameter)
            into.append(own)
            out.append(view)
        if into:
            with torch.no_grad():  # backward(create_graph=True)
                torch._foreach_copy_(into, out)

    def deliver_sparse(self, index: int, gradient: torch.Tensor) -> None:
        """Give the average of a sparse gradient to its parameter."""
        parameter = self._parameters[index]
        parameter.grad = gradient.to(parameter.dtype)

    def drop(self) -> None:
        """Forget the gradients that are in the buckets."""
        for parameter, view in zip(self._parameters, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = None

    def release(self) -> None:
        """Copy the gradients out that are in the buckets: these go with their group."""
        for parameter, view in zip(self._parameters, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()

    # -- of the copies ---------------------------------------------------------------------------

    def is_further(self, index: int, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` belongs to another copy than the first."""
        return parameter is not self._parameters[index]

    def fold(self) -> None:
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

    def drop_copies(self) -> None:
        """Forget the gradients of the other copies."""
        for copy in self._copies[1:]:
            for parameter in copy:
                parameter.grad = None


def _gradient_at(place: torch.Tensor) -> torch.Tensor:
    """What a parameter's gradient is that lies in ``place``.

    A tensor of its own: module.to() changes what a gradient refers to.  For autograd it is no view, which
    would refuse ``detach_()``.
    """
    return place.data


def _references_to(memory: torch.UntypedStorage) -> int:
    """The number of references to a storage: those of tensors, and Python's to the object that wraps it."""
    tensors: int = torch._C._storage_Use_Count(memory._cdata)
    return tensors + sys.getrefcount(memory)
