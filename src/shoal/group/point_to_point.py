"""Point-to-point messages, which are matched by sender and tag, in the order in which they were sent.

Messages are not numbered with the collectives: they may be sent at any time, from any thread.  Each message
contains its dtype and shape, so the receiver need not know them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..common.arguments import explain_unknown_keywords
from ..future import Future
from ..spec import ANY_SOURCE, Operation, OpKind
from .staging import Staging, readable
from .submission import Submitter, called, mapped
from .validation.arguments import OperationCall


class Message(NamedTuple):
    """The result of :meth:`PointToPoint.recv_message`: a tensor, the rank that sent it, and its tag."""

    tensor: torch.Tensor
    source: int
    tag: int


class PointToPoint(Submitter):
    """The point-to-point operations of a group."""

    @explain_unknown_keywords(called)
    def send(self, x: torch.Tensor, dst: int, tag: int = 0, *, timeout: float | None = None) -> Future[None]:
        """Send ``x`` to rank ``dst``.

        Args:
            x: any dense tensor.  It must not be changed before the future completes.
            dst: a rank of the group, other than this one.
            tag: 0 to 2**30 - 1; the receiver must pass the same tag.

        Returns:
            A future that completes when ``x`` may be changed; the message may not have arrived yet.
        """
        return self._submit_messages([self._send_operation(self._call("send"), x, dst, tag, timeout)])[0]

    @explain_unknown_keywords(called)
    def recv(
        self,
        x: torch.Tensor | None = None,
        src: int = ANY_SOURCE,
        tag: int = 0,
        *,
        timeout: float | None = None,
    ) -> Future[torch.Tensor]:
        """Receive a tensor from rank ``src``.

        Args:
            x: the tensor to fill, with the dtype and number of elements of the message.  None: allocate a
                tensor with the dtype and shape of the message.
            src: a rank of the group, other than this one, or ANY_SOURCE (-1).
            tag: the tag of the message.

        Returns:
            A future of the tensor.  :meth:`recv_message` also returns the rank of the sender.
        """
        return self._recv("recv", x, src, tag, timeout, lambda message: message.tensor)

    @explain_unknown_keywords(called)
    def recv_message(
        self,
        x: torch.Tensor | None = None,
        src: int = ANY_SOURCE,
        tag: int = 0,
        *,
        timeout: float | None = None,
    ) -> Future[Message]:
        """Receive like :meth:`recv`; the future's value is a :class:`Message` with the sender's rank."""
        return self._recv("recv_message", x, src, tag, timeout, lambda message: message)

    # -- shared with batches and operations on objects -----------------------------------------

    def _recv(
        self, name: str, x: torch.Tensor | None, src: int, tag: int, timeout: float | None, value: Any
    ) -> Future[Any]:
        staging = Staging()
        operation = self._recv_operation(self._call(name), x, src, tag, timeout, staging)
        return self._received(self._submit_messages([operation])[0], x, staging, value)

    def _send_operation(
        self, call: OperationCall, x: torch.Tensor, dst: int, tag: int, timeout: float | None
    ) -> Operation:
        call.tensor(x, "x")
        peer = call.peer(dst, "dst")
        return self._message(OpKind.SEND, (readable(x),), (), timeout, peer, call.tag(tag))

    def _recv_operation(
        self,
        call: OperationCall,
        x: torch.Tensor | None,
        src: int,
        tag: int,
        timeout: float | None,
        staging: Staging,
    ) -> Operation:
        outputs: tuple[torch.Tensor, ...] = ()
        if x is not None:
            call.output(x, "x")
            outputs = (staging.writable(x),)
        peer = src if src == ANY_SOURCE else call.peer(src, "src")
        return self._message(OpKind.RECV, (), outputs, timeout, peer, call.tag(tag))

    @staticmethod
    def _received(future: Future[Any], x: torch.Tensor | None, staging: Staging, value: Any) -> Future[Any]:
        def finish(arrived: tuple[torch.Tensor, int, int]) -> Any:
            staging.copy_back()
            tensor, source, tag = arrived
            return value(Message(tensor if x is None else x, source, tag))

        return mapped(future, finish)
