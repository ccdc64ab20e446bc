"""The results of operations: torch's ``Work`` over a shoal future with ``async_op=True``, or a result."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ..future import Future
from ..group.submission import mapped
from ..torch_terms.durations import Duration
from ..torch_terms.work import WorkMethods, source_of

#: Held while a work makes its one future for callbacks.
_making = threading.Lock()


class Work(WorkMethods):
    """One operation that may still be running; made by the functions of this package."""

    __slots__ = ("_future", "_listed", "_outputs", "_source")

    def __init__(
        self, future: Future[Any], outputs: Sequence[torch.Tensor], source: int | None = None
    ) -> None:
        """Wrap a future; users get a work from an operation instead.

        Args:
            future: of the operation.
            outputs: the tensors that it writes.
            source: for a receive that names the sender: its rank in the group.
        """
        self._future = future
        self._outputs = list(outputs)
        self._source = source
        self._listed: Future[list[torch.Tensor]] | None = None

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation wrote.

        Raises:
            InvalidFutureState: it is not complete.
        """
        self._future.value()
        return list(self._outputs)

    def get_future(self) -> Future[list[torch.Tensor]]:
        """The :class:`shoal.Future` of the list of tensors that the operation writes; always the same one."""
        with _making:
            if self._listed is None:
                # One for all callers: callbacks are matched across ranks by their order on it.
                self._listed = mapped(self._future, lambda _: list(self._outputs))
            return self._listed

    def source_rank(self) -> int:
        """The sender of the message that a receive took, as a rank of the group.

        Raises:
            UsageError: the operation is no receive.
            InvalidFutureState: it takes from any sender and is not complete.
        """
        if self._source is not None:
            return self._source
        return source_of(self._future.value())

    def __repr__(self) -> str:
        return f"<Work of {self._future!r}>"


class WorkTensor(torch.Tensor):
    """The result of a finished :func:`all_reduce`: the reduced tensor, which is a :class:`Work` too.

    ``result = all_reduce(x)`` was to give a tensor when torch.distributed was drafted; torch's gives None,
    which programs tell from a work: ``if handle is not None: handle.wait()``.  So this is ``x`` under another
    type, with the methods of a work that is complete.  What torch's functions make of it are plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def wait(self, timeout: Duration | None = None) -> bool:
        """True at once."""
        return True

    def synchronize(self) -> None:
        """Nothing: the operation is complete."""

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True: the call raised if anything went wrong."""
        return True

    def exception(self) -> BaseException | None:
        """None."""
        return None

    def result(self) -> list[torch.Tensor]:
        """The list of the reduced tensor."""
        return [self._plain()]

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A :class:`shoal.Future` of :meth:`result`, which is complete."""
        future: Future[list[torch.Tensor]] = Future()
        future.set_result(self.result())
        return future

    def __bool__(self) -> bool:
        """The value of one element, as of any tensor; True for several, as of a work."""
        return bool(self._plain()) if self.numel() == 1 else True

    # It is printed, pickled and copied as a plain tensor.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return copy.deepcopy(self._plain(), memo)

    def _plain(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def finished(future: Future[Any], outputs: Sequence[torch.Tensor], async_op: bool) -> Work | None:
    """The result of a function: a work if it was called with ``async_op``, else None after waiting."""
    if async_op:
        return Work(future, outputs)
    future.wait(blocking=False)
    return None
