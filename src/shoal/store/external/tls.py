"""TLS to third-party servers, and the reasons of its failures for messages."""

from __future__ import annotations

import socket
import ssl

from ...errors import AuthenticationError, ConfigurationError, StoreError

#: timeout in seconds for a connection, and for an answer on it
_CONNECT_TIMEOUT_S = 3.0


def tls_context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """Return the TLS context for servers whose certificates ``ca`` signed (None: the system's authorities).

    Args:
        ca, cert, key: paths of PEM files; ``cert`` and ``key`` identify this client.

    Raises:
        ConfigurationError: a file cannot be used.
    """
    try:
        _try_to_read(ca)
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"ca={ca}: no certificates can be read from it: {cause(error)}") from None
    if cert is not None:
        try:
            _try_to_read(cert)
            _try_to_read(key)
            context.load_cert_chain(cert, key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"cert={cert}, key={key}: no certificate with its key can be read: {cause(error)}"
            ) from None
    elif key is not None:
        raise ConfigurationError(f"key={key} without cert=, the certificate that it belongs to")
    return context


def _try_to_read(path: str | None) -> None:
    """Raise the ``OSError`` of a file that cannot be read: OpenSSL may report another reason."""
    if path is not None:
        with open(path, "rb") as file:
            file.read(1)


def raise_for_tls(
    kind: str, server: str, *, encrypted: bool, greeting: bytes, answers: tuple[bytes, ...], error: Exception
) -> None:
    """Raise if ``error``, which ended a connection, shows that further attempts would fail too.

    Args:
        kind: ``"etcd"`` or ``"Redis"``.
        encrypted: whether this side uses TLS.
        greeting, answers: plain text, and the first bytes of possible answers; none if the server has
            answered before, so it uses TLS or not as this side does.
    """
    text, scheme = _all_texts(error), kind.lower()
    if "CERTIFICATE_VERIFY_FAILED" in text:
        raise AuthenticationError(
            f"this process does not trust the certificate of {kind} at {server} ({cause(error)}); "
            "give the file of the authority that signed it as ca= in the URL"
        ) from error
    if "CERTIFICATE_REQUIRED" in text or "BAD_CERTIFICATE" in text:
        raise AuthenticationError(
            f"{kind} at {server} requires a client certificate of its own authority ({cause(error)}): "
            "give it as cert= and key= in the URL"
        ) from error
    if not answers or "refused" in text:
        return
    if not encrypted and ("closed" in text or "reset" in text) and _talks_tls(server):
        raise StoreError(f"{kind} at {server} uses TLS: use {scheme}s:// instead of {scheme}://") from error
    if encrypted and _talks_plain(server, greeting, answers):
        raise StoreError(
            f"{kind} at {server} does not use TLS: use {scheme}:// instead of {scheme}s://"
        ) from error


def _talks_tls(server: str) -> bool:
    """Return whether ``host:port`` completes a TLS handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # no data is sent
    try:
        with _connected(server) as plain, context.wrap_socket(plain):
            return True
    except OSError:
        return False


def _talks_plain(server: str, greeting: bytes, answers: tuple[bytes, ...]) -> bool:
    """Return whether ``host:port`` answers the plain text ``greeting`` with one of ``answers``, or more."""
    try:
        with _connected(server) as plain:
            plain.sendall(greeting)
            return plain.recv(16).startswith(answers)
    except OSError:
        return False


def _connected(server: str) -> socket.socket:
    host, _, port = server.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S)


def cause(error: Exception) -> str:
    """Return the text of ``error``, or of the system error that caused it."""
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.strerror:
        return error.strerror
    cause = error.__cause__ or error.__context__
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    while error.args and isinstance(error.args[-1], Exception):
        error = error.args[-1]
    return str(error) or type(error).__name__


def _all_texts(error: BaseException | None) -> str:
    """Return the texts of ``error`` and of its causes."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    return " ".join(texts)
