"""A client of TLS 1.3 that asks for new keys again and again, which Python's cannot do.

It shakes hands by OpenSSL, which logs its secret; from then on the records are made here (RFC 8446, sections
4.6.3, 5.2 and 7).
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

_HANDSHAKE, _DATA = 22, 23


class Updater:
    """Shakes hands on ``sock``, on which both greetings have passed."""

    def __init__(self, sock: socket.socket, folder: Path) -> None:
        self._sock = sock
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        log = folder / "secrets"
        context.keylog_filename = str(log)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = context.wrap_bio(incoming, outgoing)
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                client.do_handshake()
                sock.sendall(outgoing.read())
                break
            sock.sendall(outgoing.read())
            incoming.write(sock.recv(2**16))
        assert client.cipher()[0] == "TLS_AES_256_GCM_SHA384"  # type: ignore[index]
        (secret,) = (
            line.split()[2]
            for line in log.read_text().splitlines()
            if line.startswith("CLIENT_TRAFFIC_SECRET_0")
        )
        self._begin(bytes.fromhex(secret))

    def update(self, count: int) -> None:
        """Take new keys, and ask for new ones of the other side, ``count`` times."""
        for _ in range(count):
            self._sock.sendall(self._record(_HANDSHAKE, b"\x18\0\0\1\1"))
            self._begin(_expand(self._secret, b"traffic upd", 48))

    def send(self, data: bytes) -> None:
        """Send bytes with the keys of now."""
        self._sock.sendall(self._record(_DATA, data))

    def _begin(self, secret: bytes) -> None:
        self._secret = secret
        self._key, self._iv = AESGCM(_expand(secret, b"key", 32)), _expand(secret, b"iv", 12)
        self._number = 0

    def _record(self, kind: int, data: bytes) -> bytes:
        head = struct.pack(">BHH", _DATA, 0x0303, len(data) + 17)
        nonce = bytes(a ^ b for a, b in zip(self._iv, self._number.to_bytes(12, "big"), strict=True))
        self._number += 1
        return head + self._key.encrypt(nonce, data + bytes([kind]), head)


def _expand(secret: bytes, label: bytes, length: int) -> bytes:
    label = b"tls13 " + label
    info = struct.pack(">HB", length, len(label)) + label + b"\0"
    return HKDFExpand(SHA384(), length, info).derive(secret)
