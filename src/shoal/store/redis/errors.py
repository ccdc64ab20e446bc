"""The errors of a Redis server as exceptions, with advice."""

from __future__ import annotations

from ...errors import AuthenticationError, StoreError
from ..external.tls import cause, talks_plain, talks_tls

#: a line of plain text, and the first bytes of the possible answers of Redis
_GREETING, _ANSWERS = b"PING\r\n", (b"+", b"-")


def not_taken(name: str, user: str | None, text: str) -> AuthenticationError:
    """Return the error of a server that does not accept ``user`` (None: the default user)."""
    if "without any password" in text or "no password is set" in text:
        why = "asks for no password, and this process gives one"
    elif "required" in text:
        why = (
            "asks for a password: set SHOAL_STORE_PASSWORD (and SHOAL_STORE_USER), or put it into the URL, "
            "as in redis://user:password@host:6379"
        )
    else:
        why = f"does not accept user {user or 'default'!r} with this password"
    return AuthenticationError(f"{name} {why}: {text}")


def refused(name: str, user: str | None, text: str) -> StoreError:
    """Return the exception for the error ``text`` of a request; the server has executed nothing."""
    if any(each in text for each in ("NOPERM", "ACL failure", "user executing the script can't")):
        return StoreError(
            f"{name}: user {user or 'default'!r} lacks permission: {text}; docs/stores.md lists the keys, "
            "channels and commands that a job needs"
        )
    if "OOM " in text:
        return StoreError(
            f"{name}: its memory is full: nothing can be written before keys are removed or maxmemory is "
            f"raised ({text})"
        )
    if "READONLY" in text:
        return StoreError(f"{name} is a read-only replica: name its primary ({text})")
    return StoreError(f"{name}: {text}")


def refuse_tls(server: str, encrypted: bool, answered: bool, error: Exception) -> None:
    """Raise if ``error``, which ended a connection, shows that further attempts would fail too.

    ``encrypted``: whether this side uses TLS; ``answered``: whether the server has ever answered.
    """
    text = _whole(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        raise AuthenticationError(
            f"this process does not trust the certificate of Redis at {server} ({cause(error)}); "
            "give the file of the authority that signed it as ca= in the URL"
        ) from error
    if "CERTIFICATE_REQUIRED" in text or "BAD_CERTIFICATE" in text:
        raise AuthenticationError(
            f"Redis at {server} requires a client certificate of its own authority ({cause(error)}): "
            "give it as cert= and key= in the URL"
        ) from error
    if answered or "refused" in text:
        return
    if not encrypted and ("closed" in text or "reset" in text) and talks_tls(server):
        raise StoreError(f"Redis at {server} uses TLS: use rediss:// instead of redis://") from error
    if encrypted and talks_plain(server, _GREETING, *_ANSWERS):
        raise StoreError(f"Redis at {server} does not use TLS: use redis:// instead of rediss://") from error


def _whole(error: BaseException | None) -> str:
    """Return the texts of ``error`` and of its causes."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    return " ".join(texts)
