"""URLs of stores on servers that are not shoal's."""

from __future__ import annotations

import pytest

from shoal.errors import ConfigurationError, UsageError
from shoal.rendezvous import parse_url, rendezvous
from shoal.store import open_store
from shoal.store.external.url import ExternalUrl, parse_external_url, redacted, split_url


def _parsed(url: str) -> ExternalUrl:
    parts = split_url("store", url)
    if parts.scheme.startswith("redis"):
        return parse_external_url(parts, 6379, tls=parts.scheme == "rediss", databases=True)
    return parse_external_url(parts, 2379, tls=parts.scheme == "etcds")


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("etcd://h1", ExternalUrl(["h1:2379"])),
        ("etcd://h1:1,10.0.0.2:2/", ExternalUrl(["h1:1", "10.0.0.2:2"])),
        ("etcd://[::1]:5", ExternalUrl(["[::1]:5"])),
        ("etcd://[::1],h2", ExternalUrl(["[::1]:2379", "h2:2379"])),
        ("etcd://u%40:p%3Aw%2f@h1", ExternalUrl(["h1:2379"], "u@", "p:w/")),
        ("etcds://h1?ca=/a&cert=b&key=c", ExternalUrl(["h1:2379"], ca="/a", cert="b", key="c")),
        ("etcds://h1?ca=", ExternalUrl(["h1:2379"])),
        ("redis://h1", ExternalUrl(["h1:6379"])),
        ("redis://:p%40@h1:1/", ExternalUrl(["h1:1"], None, "p@")),
        ("rediss://u@[::1]/15?ca=/a", ExternalUrl(["[::1]:6379"], "u", ca="/a", database=15)),
    ],
)
def test_urls_name_servers_users_and_certificates(url: str, parsed: ExternalUrl) -> None:
    assert _parsed(url) == parsed
    assert "p:w/" not in repr(_parsed(url))


@pytest.mark.parametrize(
    "url",
    ["etcd://", "etcd://h1,", "etcd://h1:0x", "etcd://h1:99999", "etcd://h1/path", "etcd://h1#x", "etcd://h1?ca=a",
     "etcds://h1?Ca=a", "etcds://h1?ca=a&ca=b", "etcd://u:pass@h1/path", "etcd://u:pa/ss@h1", "etcd://u:pa:ss@:1",
     "etcd://h1/0x", "etcd://h1/1", "redis://", "redis://h1/x", "redis://h1/1/2", "redis://h1/-1", "redis://h1?ca=a",
     "redis://h1/٣", "redis://h1/1000000000", "rediss://h1?x=1", "redis://u:pass@h1,h2"],
)  # fmt: skip
def test_a_url_that_makes_no_sense_is_named_without_its_password(url: str) -> None:
    with pytest.raises(
        UsageError, match=r"expected (etcd|redis)s?://\[user:password@\]host:port\[[,/]"
    ) as raised:
        _parsed(url)
    assert redacted(url) in str(raised.value)
    assert "pa" not in str(raised.value).replace("/path", "").replace("password", "")


@pytest.mark.parametrize("url", ["etcd://[::1", "tcp://[::1:29400", "etcd://u:pass@[::1"])
def test_a_url_with_half_a_bracket_is_refused_as_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError, match=r"store .*Invalid IPv6 URL") as raised:
        open_store(url)
    assert "pass" not in str(raised.value)


def test_user_and_password_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_STORE_USER", "me")
    monkeypatch.setenv("SHOAL_STORE_PASSWORD", "secret")
    assert _parsed("etcd://h1") == ExternalUrl(["h1:2379"], "me", "secret")
    assert _parsed("etcd://you:open@h1") == ExternalUrl(["h1:2379"], "you", "open")
    assert _parsed("etcd://you@h1") == ExternalUrl(["h1:2379"], "you", "secret")


def test_no_error_shows_a_password() -> None:
    for wrong in (open_store, parse_url):
        with pytest.raises(UsageError) as raised:
            wrong("carrier://user:pass@roof")
        assert "carrier://user:***@roof" in str(raised.value)
    with pytest.raises(UsageError) as raised:
        rendezvous("etcd://user:pass@roof", store=object())
    assert "etcd://user:***@roof" in str(raised.value)


def test_a_job_without_a_secret_does_not_meet_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_SECRET", raising=False)
    with pytest.raises(ConfigurationError, match=r"a store at etcd:// needs a secret.*SHOAL_SECRET="):
        rendezvous("etcd://127.0.0.1:1", rank=0, size=1)
