"""The handshake by itself: two sides, no sockets."""

from __future__ import annotations

import pytest

from shoal.errors import AuthenticationError, UsageError, VersionMismatch, WireError
from shoal.net import handshake
from shoal.net.handshake import Handshake


def _side(
    connecting: bool, secret: bytes = b"secret", purpose: str = "store", *, tls: bool = False
) -> Handshake:
    return Handshake(connecting=connecting, secret=secret, purpose=purpose, tls=tls)


def _shake(left: Handshake, right: Handshake) -> None:
    """Let a connecting and an accepting side talk until neither has more to say."""
    to_right, to_left = left.greeting, right.greeting
    while to_left or to_right:
        incoming_left, incoming_right, to_left, to_right = to_left, to_right, b"", b""
        if incoming_left:
            assert len(incoming_left) == left.needed
            to_right = left.feed(incoming_left)
        if incoming_right:
            assert len(incoming_right) == right.needed
            to_left = right.feed(incoming_right)


@pytest.mark.parametrize("secret", [b"", b"x", b"a long secret" * 100])
def test_two_sides_with_one_secret_agree(secret: bytes) -> None:
    left, right = _side(True, secret), _side(False, secret)
    _shake(left, right)
    assert left.done
    assert right.done
    assert left.failure is None
    assert right.failure is None


def test_another_secret_is_noticed_on_both_sides() -> None:
    left, right = _side(True, b"one"), _side(False, b"another")
    _shake(left, right)
    assert not left.done
    assert not right.done
    assert isinstance(left.failure, AuthenticationError)
    assert isinstance(right.failure, AuthenticationError)


def test_another_purpose_is_refused_by_both_and_named() -> None:
    left, right = _side(True, purpose="store"), _side(False, purpose="mesh")
    _shake(left, right)
    assert isinstance(left.failure, WireError)
    assert "'store'" in str(left.failure)
    assert "'mesh'" in str(left.failure)
    assert isinstance(right.failure, WireError)


def test_another_build_is_refused_by_both_and_both_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    left = _side(True)
    monkeypatch.setattr(handshake, "build_version", lambda: "9.9.9")
    right = _side(False)
    _shake(left, right)
    for failure in (left.failure, right.failure):
        assert isinstance(failure, VersionMismatch)
        assert "9.9.9" in str(failure)
    assert not left.done
    assert not right.done


def _greeted(secret: bytes = b"secret") -> tuple[Handshake, Handshake]:
    """A connecting and an accepting side between which TLS is to begin."""
    left, right = _side(True, secret, tls=True), _side(False, tls=True)
    assert left.feed(right.greeting) == b""
    assert right.feed(left.greeting) == b""
    assert left.encrypting
    assert right.encrypting
    return left, right


def test_two_sides_that_know_one_certificate_agree() -> None:
    left, right = _greeted()
    assert right.tls_established(b"c" * 32) == b""
    left.feed(right.feed(left.tls_established(b"c" * 32)))
    assert left.done
    assert right.done
    assert not left.encrypting


def test_an_accepting_side_refuses_who_has_seen_another_certificate() -> None:
    left, right = _greeted()
    right.tls_established(b"c" * 32)
    assert right.feed(left.tls_established(b"d" * 32)) == bytes(32)
    assert isinstance(right.failure, AuthenticationError)
    assert "there is a man in the middle" in str(right.failure)
    left.feed(bytes(32))
    assert isinstance(left.failure, AuthenticationError)


def test_a_connecting_side_refuses_the_proof_of_who_has_shown_another_certificate() -> None:
    left, right = _greeted()
    left.tls_established(b"d" * 32)
    right.tls_established(b"c" * 32)
    left.feed(right._proof(connecting=False))  # as if it had taken the proof
    assert not left.done
    assert isinstance(left.failure, AuthenticationError)
    assert "there is a man in the middle" in str(left.failure)


def test_a_proof_of_a_plain_connection_is_worth_nothing_on_an_encrypted_one() -> None:
    left, right = _greeted()
    right.tls_established(b"c" * 32)
    assert right.feed(left._proof(connecting=True)) == bytes(32)


@pytest.mark.parametrize("tls", [True, False])
def test_a_side_that_encrypts_and_one_that_does_not_refuse_each_other(tls: bool) -> None:
    left, right = _side(True, tls=tls), _side(False, tls=not tls)
    assert left.feed(right.greeting) == b""
    assert right.feed(left.greeting) == b""
    for side in (left, right):
        assert isinstance(side.failure, VersionMismatch)
        assert "SHOAL_TLS=1" in str(side.failure)
        assert not side.encrypting


def test_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    left = _side(True)
    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", 77)
    right = _side(False)
    right.feed(left.greeting)
    assert isinstance(right.failure, VersionMismatch)
    assert "protocol 77" in str(right.failure)


def test_a_stranger_is_refused_before_it_proves_anything() -> None:
    side = _side(False)
    assert side.feed(b"GET / HTTP/1.1\r\n".ljust(side.needed, b"x")) == b""
    assert isinstance(side.failure, WireError)


def test_a_proof_that_is_sent_back_to_its_maker_fails() -> None:
    side = _side(True)
    proof = side.feed(side.greeting)
    side.feed(proof)
    assert isinstance(side.failure, AuthenticationError)
    assert not side.done


def test_a_recorded_proof_fails_the_second_time() -> None:
    left, right = _side(True), _side(False)
    right.feed(left.greeting)
    proof = left.feed(right.greeting)
    again = _side(False)
    again.feed(left.greeting)
    assert again.feed(proof) == bytes(32)
    assert isinstance(again.failure, AuthenticationError)
    assert right.feed(proof) != bytes(32)
    assert right.done


def test_a_proof_does_not_hold_for_a_greeting_that_was_changed_on_the_way() -> None:
    left, right = _side(True), _side(False)
    changed = bytearray(left.greeting)
    changed[-1] ^= 1
    right.feed(changed)
    right.feed(left.feed(right.greeting))
    assert isinstance(right.failure, AuthenticationError)


def test_the_accepting_side_says_nothing_about_the_secret_to_a_stranger() -> None:
    side = _side(False)
    assert side.feed(_side(True).greeting) == b""


@pytest.mark.parametrize("purpose", ["", "a purpose that is too long"])
def test_a_purpose_must_be_a_short_word(purpose: str) -> None:
    with pytest.raises(UsageError, match="purpose"):
        _side(True, purpose=purpose)
