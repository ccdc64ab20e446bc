"""The mutual challenge-response handshake of every connection, without I/O.

    connecting side                        accepting side
        greeting  ------------------------>
                  <------------------------  greeting
        (TLS handshake, if both sides encrypt)
        proof     ------------------------>
                  <------------------------  proof, or 32 zero bytes: refused

A greeting has a fixed size: magic, protocol version, build version, purpose, whether TLS follows, and 32
random bytes.  A proof is HMAC-SHA256, keyed with the job's secret, over the prover's role, both greetings
and, with TLS, the SHA-256 of the certificate that the accepting side presented. So

* a replayed proof fails: the random bytes of the other side differ each time;
* a proof reflected to its sender fails: the role differs;
* a proof for one purpose or version fails for another;
* a man in the middle with another certificate fails: the two sides see different certificates.

The connecting side sends its proof first, so a port scanner receives nothing that depends on the secret.
Versions are compared before, because another version may have another kind of proof.
"""

from __future__ import annotations

import functools
import hmac
import os
import struct

from ..errors import AuthenticationError, UsageError, VersionMismatch, WireError

#: incremented with every incompatible change of the wire format
PROTOCOL_VERSION = 4

#: seconds for the handshake of an accepted connection
HANDSHAKE_TIMEOUT_S = 10.0

_MAGIC = b"\x89SHOAL\r\n"
_GREETING = struct.Struct("<8sI64s15sB32s")
_PROOF_SIZE = 32
_REFUSED = bytes(_PROOF_SIZE)


@functools.cache
def build_version() -> str:
    """Return the version of the installed package, or of this source tree if it is not installed."""
    from importlib import metadata  # a slow import, which would delay the start of the launcher

    try:
        return metadata.version("shoal")
    except metadata.PackageNotFoundError:
        return "0.1.0"


@functools.cache
def _field(text: str, size: int, what: str) -> bytes:
    raw = text.encode("ascii", "replace")
    if not 0 < len(raw) <= size:
        raise UsageError(f"{what} {text!r}: expected 1 to {size} ASCII characters")
    return raw.ljust(size, b"\0")


def _readable(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii", "backslashreplace")


class Handshake:
    """One side of the handshake.

    Send :attr:`greeting`.  Then, until :attr:`done`, read exactly :attr:`needed` bytes, pass them to
    :meth:`feed`, send the bytes that it returns, and raise :attr:`failure` if it is set.  When
    :attr:`encrypting` is set, first do the TLS handshake, then send the bytes that :meth:`tls_established`
    returns.

    Args:
        purpose: of the connection, a short ASCII word, the same on both sides.
        tls: whether this side encrypts everything after the greetings.
    """

    def __init__(self, *, connecting: bool, secret: bytes, purpose: str, tls: bool = False) -> None:
        self._connecting = connecting
        self._secret = secret
        self._purpose = _field(purpose, 15, "purpose")
        self._build = _field(build_version()[:64], 64, "build version")
        self._tls = tls
        self._theirs = b""
        self._certificate = b""
        #: the first bytes to send
        self.greeting = _GREETING.pack(
            _MAGIC, PROTOCOL_VERSION, self._build, self._purpose, tls, os.urandom(32)
        )
        #: number of bytes that the other side sends next
        self.needed = _GREETING.size
        #: the error, to be raised after the last reply was sent
        self.failure: WireError | None = None
        #: whether the TLS handshake comes next
        self.encrypting = False
        #: whether the other side has proved that it holds the secret
        self.done = False

    def feed(self, data: bytes | bytearray) -> bytes:
        """Process exactly :attr:`needed` bytes from the other side; return the bytes to send, if any."""
        if not self._theirs:
            return self._on_greeting(bytes(data))
        return self._on_proof(bytes(data))

    def tls_established(self, certificate: bytes) -> bytes:
        """Continue after the TLS handshake; return the bytes to send, if any.

        Args:
            certificate: SHA-256 of the certificate of the accepting side, as seen by this side.
        """
        self.encrypting = False
        self._certificate = certificate
        return self._proof(connecting=True) if self._connecting else b""

    def _on_greeting(self, theirs: bytes) -> bytes:
        self._theirs = theirs
        self.needed = _PROOF_SIZE
        magic, protocol, build, purpose, tls, _ = _GREETING.unpack(theirs)
        if magic != _MAGIC:
            self.failure = WireError("the other side does not speak shoal's protocol")
        elif (protocol, build) != (PROTOCOL_VERSION, self._build):
            self.failure = VersionMismatch(
                f"this process runs shoal {_readable(self._build)} (protocol {PROTOCOL_VERSION}), "
                f"the other side {_readable(build)} (protocol {protocol}); "
                "install the same version everywhere"
            )
        elif purpose != self._purpose:
            self.failure = WireError(
                f"this connection is for {_readable(self._purpose)!r}, "
                f"the other side expects {_readable(purpose)!r}: wrong port?"
            )
        elif tls != self._tls:
            with_tls, without = (
                "encrypts its connections (SHOAL_TLS=1)",
                "does not encrypt them (no SHOAL_TLS)",
            )
            self.failure = VersionMismatch(
                f"this process {with_tls if self._tls else without}, the other side "
                f"{without if self._tls else with_tls}: set SHOAL_TLS=1 for every process of the job and for "
                "its store, or for none (--tls of shoal run and shoal store sets it for what they start)"
            )
        elif self._tls:
            self.encrypting = True
        elif self._connecting:
            return self._proof(connecting=True)
        return b""

    def _on_proof(self, theirs: bytes) -> bytes:
        if hmac.compare_digest(theirs, self._proof(connecting=not self._connecting)):
            self.done = True
            return b"" if self._connecting else self._proof(connecting=False)
        if not self._connecting:
            self.failure = AuthenticationError(
                "a process that does not hold the job's secret tried to connect"
                + self._man_in_the_middle_hint
            )
            return _REFUSED
        self.failure = AuthenticationError(
            (
                "the other side refused the secret of this process"
                if theirs == _REFUSED
                else "the other side does not hold the job's secret"
            )
            + self._man_in_the_middle_hint
        )
        return b""

    @property
    def _man_in_the_middle_hint(self) -> str:
        """With TLS: a second possible cause of a wrong proof, for messages."""
        return ", or there is a man in the middle, with a certificate that is not the server's" * self._tls

    def _proof(self, *, connecting: bool) -> bytes:
        greetings = (self.greeting, self._theirs)
        if not self._connecting:
            greetings = greetings[::-1]
        role = b"connect" if connecting else b"accept_"
        return hmac.digest(self._secret, role + b"".join(greetings) + self._certificate, "sha256")
