"""TLS to third-party servers, and the reasons of its failures for messages."""

from __future__ import annotations

import socket
import ssl

from ...errors import ConfigurationError

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


def talks_tls(server: str) -> bool:
    """Return whether ``host:port`` completes a TLS handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # no data is sent
    try:
        with _connected(server) as plain, context.wrap_socket(plain):
            return True
    except OSError:
        return False


def talks_plain(server: str, greeting: bytes, *answers: bytes) -> bool:
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
