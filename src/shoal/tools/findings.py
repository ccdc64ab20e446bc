"""A finding: a fact, whether it is a problem, and what to do about it."""

from __future__ import annotations

from typing import Literal

import msgspec


class Finding(msgspec.Struct):
    """The result of a check.

    Attributes:
        status: ``"ok"``; ``"warn"``: some jobs fail or are slow; ``"fail"``: jobs fail.
        fact: one sentence without a full stop.
        advice: what to do, one sentence without a full stop; "" if nothing is to be done.
        topic, check: of ``shoal doctor``; "" elsewhere.
    """

    status: Literal["ok", "warn", "fail"]
    fact: str
    advice: str = ""
    topic: str = ""
    check: str = ""

    def placed(self, topic: str, check: str) -> Finding:
        """Set topic and check; return the finding."""
        self.topic, self.check = topic, check
        return self


def ok(fact: str) -> Finding:
    """Return a finding without a problem."""
    return Finding("ok", fact)


def warn(fact: str, advice: str) -> Finding:
    """Return a finding that makes some jobs fail or slow."""
    return Finding("warn", fact, advice)


def fail(fact: str, advice: str) -> Finding:
    """Return a finding that makes jobs fail."""
    return Finding("fail", fact, advice)
