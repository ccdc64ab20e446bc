"""The mutual challenge that starts every connection, without doing any I/O.

    connecting side                        accepting side
        greeting  ------------------------>
                  <------------------------  greeting
        proof     ------------------------>
                  <------------------------  proof, or 32 zero bytes: refused

A greeting has a fixed size: magic, protocol version, build version, purpose and 32 random bytes.
A proof is HMAC-SHA256, keyed with the job's secret, over the prover's role and both greetings. So

* a recorded proof is worth nothing: the other side's random bytes differ each time;
* a proof sent back to its maker fails: the role differs;
* a proof made for one purpose or version fails for another.

The connecting side proves itself first: a stranger that scans ports learns nothing that depends on
the secret.  Versions are compared before, because another version may prove in another way.
"""

from __future__ import annotations

import functools
import hmac
import os
import struct

from ..errors import AuthenticationError, UsageError, VersionMismatch, WireError

#: counted up whenever something on the wire changes its meaning
PROTOCOL_VERSION = 2

#: seconds that a stranger gets to prove itself
HANDSHAKE_TIMEOUT = 10.0

_MAGIC = b"\x89SHOAL\r\n"
_GREETING = struct.Struct("<8sI64s16s32s")
_PROOF_SIZE = 32
_REFUSED = bytes(_PROOF_SIZE)


@functools.cache
def build_version() -> str:
    """The version of the installed package, or of this source tree when it is not installed."""
    from importlib import metadata  # slow to import, and the launcher's start should be quick

    try:
        return metadata.version("shoal")
    except metadata.PackageNotFoundError:
        return "0.1.0"


def _field(text: str, size: int, what: str) -> bytes:
    raw = text.encode("ascii", "replace")
    if not 0 < len(raw) <= size:
        raise UsageError(f"{what} {text!r}: expected 1 to {size} ASCII characters")
    return raw.ljust(size, b"\0")


def _readable(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii", "backslashreplace")


class Handshake:
    """One side of the handshake.

    Send :attr:`greeting`, then read exactly :attr:`needed` bytes at a time and give them to
    :meth:`feed`, send what it returns, and raise :attr:`failure` if there is one, until
    :attr:`done`.

    Args:
        connecting: whether this side made the connection (the other one accepted it).
        secret: the job's secret.
        purpose: what the connection is for, a short ASCII word equal on both sides.
    """

    def __init__(self, *, connecting: bool, secret: bytes, purpose: str) -> None:
        self._connecting = connecting
        self._secret = secret
        self._purpose = _field(purpose, 16, "purpose")
        self._build = _field(build_version()[:64], 64, "build version")
        self._theirs = b""
        #: the first bytes to send
        self.greeting = _GREETING.pack(_MAGIC, PROTOCOL_VERSION, self._build, self._purpose, os.urandom(32))
        #: how many bytes the other side sends next
        self.needed = _GREETING.size
        #: the error, to be raised after the last reply is sent
        self.failure: WireError | None = None
        #: whether the other side has proved that it holds the secret
        self.done = False

    def feed(self, data: bytes | bytearray) -> bytes:
        """Take exactly :attr:`needed` bytes from the other side; what to send in return, if anything."""
        if not self._theirs:
            return self._greeted(bytes(data))
        return self._proved(bytes(data))

    def _greeted(self, theirs: bytes) -> bytes:
        self._theirs = theirs
        self.needed = _PROOF_SIZE
        magic, protocol, build, purpose, _ = _GREETING.unpack(theirs)
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
                f"the other side takes it for {_readable(purpose)!r}: wrong port?"
            )
        elif self._connecting:
            return self._proof(connecting=True)
        return b""

    def _proved(self, theirs: bytes) -> bytes:
        if hmac.compare_digest(theirs, self._proof(connecting=not self._connecting)):
            self.done = True
            return b"" if self._connecting else self._proof(connecting=False)
        if not self._connecting:
            self.failure = AuthenticationError(
                "a process that does not hold the job's secret tried to connect"
            )
            return _REFUSED
        self.failure = AuthenticationError(
            "the other side refused the secret of this process"
            if theirs == _REFUSED
            else "the other side does not hold the job's secret"
        )
        return b""

    def _proof(self, *, connecting: bool) -> bytes:
        greetings = (self.greeting, self._theirs)
        if not self._connecting:
            greetings = greetings[::-1]
        role = b"connect" if connecting else b"accept_"
        return hmac.digest(self._secret, role + b"".join(greetings), "sha256")
