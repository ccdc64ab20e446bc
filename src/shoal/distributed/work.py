"""Results of operations: torch's ``Work`` on a shoal future with ``async_op=True``, otherwise a result."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ..future import Future
from ..group.submission import map_future
from ..torch_terms.arguments import Duration
from ..torch_terms.work import WorkMethods, source_of

#: Held while a work creates its future for callbacks.
_making = threading.Lock()


class Work(WorkMethods):
    """An operation that may still be running; returned by the functions of this package."""

    __slots__ = ("_future", "_listed", "_outputs", "_source")

    def __init__(
        self, future: Future[Any], outputs: Sequence[torch.Tensor], source: int | None = None
    ) -> None:
        """Wrap a future; users get a work from an operation instead.

        Args:
            future: the operation's future.
            outputs: the tensors that it writes.
            source: for a receive from a given rank: that rank in the group.
        """
        self._future = future
        self._outputs = list(outputs)
        self._source = source
        self._listed: Future[list[torch.Tensor]] | None = None

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the operation wrote.

        Raises:
            InvalidFutureState: the operation is not complete.
        """
        self._future.value()
        return list(self._outputs)

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Return the :class:`shoal.Future` of the list of output tensors; always the same object."""
        with _making:
            if self._listed is None:
                # One future for all callers: callbacks are matched across ranks by their order on it.
                self._listed = map_future(self._future, lambda _: list(self._outputs))
            return self._listed

    def source_rank(self) -> int:
        """Return the sender of the received message, as a rank in the group.

        Raises:
            UsageError: the operation is not a receive.
            InvalidFutureState: the operation receives from any rank and is not complete.
        """
        if self._source is not None:
            return self._source
        return source_of(self._future.value())

    def __repr__(self) -> str:
        return f"<Work of {self._future!r}>"


class WorkTensor(torch.Tensor):
    """The result of a synchronous :func:`all_reduce`: the reduced tensor, which is also a :class:`Work`.

    In the first draft of torch.distributed, ``all_reduce(x)`` returned a tensor; torch's returns None, and
    programs test that: ``if handle is not None: handle.wait()``.  So this is ``x`` as another type, with the
    methods of a completed work.  Torch functions on it return plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def wait(self, timeout: Duration | None = None) -> bool:
        """Return True immediately."""
        return True

    def synchronize(self) -> None:
        """Do nothing: the operation is complete."""

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
        """Return a list of the reduced tensor."""
        return [self._plain()]

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Return a completed :class:`shoal.Future` of :meth:`result`."""
        future: Future[list[torch.Tensor]] = Future()
        future.set_result(self.result())
        return future

    def __bool__(self) -> bool:
        """Return the value of one element, as for any tensor; True for several elements, as for a work."""
        return bool(self._plain()) if self.numel() == 1 else True

    # Printing, pickling and copying produce a plain tensor.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return copy.deepcopy(self._plain(), memo)

    def _plain(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def work_or_wait(future: Future[Any], outputs: Sequence[torch.Tensor], async_op: bool) -> Work | None:
    """Return a work with ``async_op``; otherwise wait and return None."""
    if async_op:
        return Work(future, outputs)
    future.wait(blocking=False)
    return None
