"""TLS on a non-blocking stream.

OpenSSL reads and writes two memory buffers; :class:`TlsStream` moves their contents from and to the stream
below.  So it never blocks, and can be used like any other stream.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import ssl
import threading
from dataclasses import dataclass

from ...errors import AuthenticationError, WireError
from ..stream import ByteStream

#: maximum bytes that are encrypted before the stream below has accepted all of them
_CHUNK = 2**16
#: bounds in bytes of one read from the stream below
_LEAST_READ, _MOST_READ = 2**12, 2**18
#: maximum bytes that TLS adds to a record
_OVERHEAD = 512
#: maximum unsent bytes: more than a chunk are TLS answers that the other side provokes but does not receive
_MAX_UNSENT_BYTES = 4 * _CHUNK

_CUT = "the connection was cut: it did not end as TLS ends"


@dataclass(frozen=True)
class TlsConfig:
    """The TLS configuration of one side.

    Attributes:
        context: the OpenSSL context.
        certificate: SHA-256 of the certificate of an accepting side; b"" on the connecting side.
    """

    context: ssl.SSLContext
    certificate: bytes = b""

    def stream(self, below: ByteStream) -> TlsStream:
        """Return a stream that wraps and owns ``below``."""
        return TlsStream(below, self)


class TlsStream:
    """A stream that is unencrypted until :meth:`encrypt` is called.

    One thread may send while another receives; a lock protects OpenSSL's object.

    Attributes:
        certificate: SHA-256 of the certificate of the accepting side.
    """

    def __init__(self, below: ByteStream, side: TlsConfig) -> None:
        self._below = below
        self._side = side
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        #: whether the TLS handshake has succeeded; nothing is sent unencrypted after its beginning
        self._encrypted = False
        self._closed = False
        #: encrypted bytes that the stream below has not accepted yet
        self._unsent = b""
        #: number of the caller's bytes in ``_unsent`` that :meth:`send` has not returned yet
        self._accepted_bytes = 0
        #: whether there are received bytes that :meth:`recv_into` has not returned yet
        self._has_unread = False
        #: whether the other side has sent data after the TLS handshake
        self._received_data = False
        #: to be raised after all data received before it was returned
        self._failure: OSError | None = None
        self.certificate = side.certificate
        self.fileno = below.fileno

    @property
    def socket(self) -> socket.socket:
        return self._below.socket

    @property
    def has_unsent(self) -> bool:
        """Whether there are unsent encrypted bytes: wait until the descriptor is writable."""
        return bool(self._unsent)

    def encrypt(self) -> bool:
        """Continue the TLS handshake without blocking; return whether it has succeeded.

        Until then no other data may be read or written.

        Raises:
            AuthenticationError: one side rejects the certificate of the other.
            WireError: received data is not a TLS handshake.  OSError: the connection is lost.
        """
        with self._lock:
            if self._tls is None:
                accepting = bool(self._side.certificate)
                self._tls = self._side.context.wrap_bio(self._incoming, self._outgoing, server_side=accepting)
            while True:
                done = self._continue_handshake(self._tls)
                self._push()
                if self._unsent:
                    return False
                if done:
                    break
                try:
                    self._fetch(_LEAST_READ)
                except BlockingIOError:
                    if self._below.pending():
                        continue
                    return False
            if not self.certificate:
                shown = self._tls.getpeercert(binary_form=True)
                if not shown:
                    raise WireError("the other side has not presented a certificate")
                self.certificate = hashlib.sha256(shown).digest()
            self._encrypted = True
            self._has_unread = bool(self._incoming.pending)
            return True

    def recv_into(self, view: memoryview, /) -> int:
        if self._tls is None:
            return self._below.recv_into(view)
        with self._lock:
            self._check_encrypted()
            while True:
                count = self._decrypt(view)
                if count is not None:
                    return count
                self._fetch(len(view))

    def send(self, data: bytes | bytearray | memoryview, /) -> int:
        if self._tls is None:
            return self._below.send(data)
        if not data:
            return 0
        with self._lock:
            self._check_encrypted()
            if not self._accepted_bytes:
                self._flush()  # for example, the answer to a key update
                self._accepted_bytes = self._encrypt(data)
                self._take_outgoing()
            self._flush()
            sent, self._accepted_bytes = self._accepted_bytes, 0
            return sent

    def pending(self) -> bool:
        return self._has_unread or self._below.pending()

    def detach(self) -> int:
        raise WireError(
            "an encrypted connection cannot be detached: the bytes of its descriptor are encrypted"
        )

    def shutdown(self) -> None:
        self._below.shutdown()

    def close(self) -> None:
        """Send the TLS close notification if possible without blocking, and close the stream below."""
        # A forked child must not send it for its parent, and may have inherited a locked lock.
        if os.getpid() == self._pid and self._lock.acquire(blocking=False):
            try:
                if self._encrypted and not self._closed:
                    self._closed = True
                    self._send_close_notification()
            finally:
                self._lock.release()
        self._below.close()

    # -- called with the lock held -------------------------------------------------------------

    def _check_encrypted(self) -> None:
        if not self._encrypted or self._closed:
            raise OSError(errno.EBADF, "the stream is closed, or its TLS handshake has not succeeded")

    def _send_close_notification(self) -> None:
        assert self._tls is not None
        with contextlib.suppress(OSError, ValueError):
            with contextlib.suppress(ssl.SSLError):  # do not wait for the other side's close notification
                self._tls.unwrap()
            self._push()

    def _continue_handshake(self, tls: ssl.SSLObject) -> bool:
        try:
            tls.do_handshake()
            return True
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLEOFError:
            raise ConnectionResetError(errno.ECONNRESET, "the other side left in the TLS handshake") from None
        except ssl.SSLError as error:
            with contextlib.suppress(OSError):
                self._push()  # sends the alert
            raise exception_of(error) from None

    def _decrypt(self, view: memoryview) -> int | None:
        """Decrypt received data into ``view``; return the bytes, 0 at the end; None: no complete record."""
        assert self._tls is not None
        if self._failure is not None:
            raise self._failure
        count, ended = 0, False
        try:
            while count < len(view) and not ended:
                # Typed as returning bytes, but with a buffer it returns their number.
                got = int(self._tls.read(len(view) - count, view[count:]))
                count, ended = count + got, not got
            self._has_unread = ended or bool(self._tls.pending() or self._incoming.pending)
        except ssl.SSLWantReadError:
            self._has_unread = False
            if not count:
                self._answer()
                return None
        except ssl.SSLZeroReturnError:
            self._has_unread = True
        except ssl.SSLError as error:
            with contextlib.suppress(OSError):
                self._push()  # sends the alert
            self._failure, self._has_unread = exception_of(error), True
            if not count:
                raise self._failure from None
        self._received_data = self._received_data or count > 0
        self._answer()
        return count

    def _fetch(self, wanted: int) -> int:
        """Read from the stream below; return the bytes, 0 at the end.  Raises like ``recv_into``."""
        buffer = bytearray(min(max(wanted + _OVERHEAD, _LEAST_READ), _MOST_READ))
        with memoryview(buffer) as view:
            count = self._below.recv_into(view)
            if count:
                self._incoming.write(view[:count])
            else:
                self._incoming.write_eof()
        return count

    def _encrypt(self, data: bytes | bytearray | memoryview) -> int:
        assert self._tls is not None
        chunk = memoryview(data)[:_CHUNK]
        count = 0
        try:
            while count < len(chunk):
                count += self._tls.write(chunk[count:])
        except ssl.SSLError as error:
            raise exception_of(error) from None
        return count

    def _take_outgoing(self) -> None:
        if self._outgoing.pending:
            self._unsent += self._outgoing.read()

    def _answer(self) -> None:
        """Send OpenSSL's answers to received data; a failure is raised after that data was returned."""
        try:
            self._push()
        except OSError as error:
            self._failure, self._has_unread = self._failure or error, True

    def _push(self) -> None:
        """Send OpenSSL's own messages as far as possible without blocking."""
        self._take_outgoing()
        if self._unsent:
            with contextlib.suppress(BlockingIOError):
                self._flush()
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            raise ConnectionAbortedError(errno.ECONNABORTED, "the other side does not receive TLS answers")

    def _flush(self) -> None:
        """Send the encrypted bytes.  BlockingIOError: not all could be sent now."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._below.send(self._unsent) :]
        except BlockingIOError:
            raise
        except OSError as error:
            raise self._alert_or(error) from None

    def _alert_or(self, error: OSError) -> OSError:
        """Return the error for an alert that the other side sent before it closed, or ``error`` itself."""
        if self._tls is None or self._received_data:
            return error
        with contextlib.suppress(OSError):
            while self._fetch(_LEAST_READ):
                try:
                    self._tls.read(_LEAST_READ)
                    break
                except ssl.SSLWantReadError:
                    continue
                except ssl.SSLError as told:
                    return exception_of(told) if "ALERT" in (told.reason or "") else error
        return error


def exception_of(error: ssl.SSLError) -> OSError:
    """Return the exception to raise for an error of OpenSSL."""
    if isinstance(error, ssl.SSLEOFError):
        return ConnectionResetError(errno.ECONNRESET, _CUT)
    reason = error.reason or str(error)
    words = reason.lower().replace("_", " ")
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthenticationError(
            f"the certificate of the other side is refused: {error.verify_message}.  Each process needs a "
            "valid one, signed by the authority in SHOAL_TLS_CA (SHOAL_TLS_CERT, SHOAL_TLS_KEY)"
        )
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return AuthenticationError(
            "the other side shows no certificate: set SHOAL_TLS_CA, SHOAL_TLS_CERT and SHOAL_TLS_KEY there "
            "too"
        )
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return AuthenticationError(
            f"the other side refuses the certificate of this process, or did not receive one ({words}): set "
            "SHOAL_TLS_CA, SHOAL_TLS_CERT and SHOAL_TLS_KEY for every process of the job, or for none"
        )
    return WireError(f"received data is not valid TLS ({words})")
