"""What a server of Redis refuses, in words, and what to do."""

from __future__ import annotations

from ...errors import AuthenticationError, StoreError
from ..external.tls import cause, talks_plain, talks_tls

#: what a server of Redis answers to a line of text
_GREETING, _ANSWERS = b"PING\r\n", (b"+", b"-")


def not_taken(name: str, user: str | None, text: str) -> AuthenticationError:
    """The error of a server that does not take ``user`` (None: nobody in particular)."""
    if "without any password" in text or "no password is set" in text:
        why = "asks for no password, and this process gives one"
    elif "required" in text:
        why = (
            "asks for a password: set SHOAL_STORE_PASSWORD (and SHOAL_STORE_USER), or put it into the URL, "
            "as in redis://user:password@host:6379"
        )
    else:
        why = f"does not take user {user or 'default'!r} with this password"
    return AuthenticationError(f"{name} {why}: {text}")


def refused(name: str, user: str | None, text: str) -> StoreError:
    """The error of a request that the server answers with the error ``text``; it has done nothing."""
    if any(each in text for each in ("NOPERM", "ACL failure", "user executing the script can't")):
        return StoreError(
            f"{name}: user {user or 'default'!r} may not do this: {text}; docs/stores.md has the keys, "
            "channels and commands that a job needs"
        )
    if "OOM " in text:
        return StoreError(
            f"{name}: its memory is full: nothing can be written before keys are removed or maxmemory is "
            f"raised ({text})"
        )
    if "READONLY" in text:
        return StoreError(f"{name} is a replica that takes no changes: name its primary ({text})")
    return StoreError(f"{name}: {text}")


def refuse_tls(server: str, encrypted: bool, answered: bool, error: Exception) -> None:
    """Raise if ``error``, with which a connection ended, says that no other try can do better.

    Args:
        encrypted: whether this side talks TLS.
        answered: whether the server has ever answered.
    """
    text = _whole(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        raise AuthenticationError(
            f"the certificate of Redis at {server} is not one that this process trusts ({cause(error)}); the "
            "parameter ca= of the URL names the file of the authority that signed it"
        ) from error
    if "CERTIFICATE_REQUIRED" in text or "BAD_CERTIFICATE" in text:
        raise AuthenticationError(
            f"Redis at {server} wants a certificate of its own authority from each client ({cause(error)}): "
            "give it as cert= and key= in the URL"
        ) from error
    if answered or "refused" in text:
        return
    if not encrypted and ("closed" in text or "reset" in text) and talks_tls(server):
        raise StoreError(f"Redis at {server} talks TLS: use rediss:// in place of redis://") from error
    if encrypted and talks_plain(server, _GREETING, *_ANSWERS):
        raise StoreError(f"Redis at {server} talks no TLS: use redis:// in place of rediss://") from error


def _whole(error: BaseException | None) -> str:
    """The texts of ``error`` and of those that it came from."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    return " ".join(texts)
