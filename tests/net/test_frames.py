"""Cutting bytes into frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import WireError
from shoal.net import FrameReader, frame_header


@given(st.lists(st.binary(max_size=50), max_size=10), st.integers(1, 20))
def test_messages_come_out_as_they_went_in_whatever_the_pieces(messages: list[bytes], piece: int) -> None:
    stream = b"".join(frame_header(len(message)) + message for message in messages)
    reader, received = FrameReader(50), []
    while stream:
        view = reader.view()[:piece]
        count = min(len(view), len(stream))
        view[:count] = stream[:count]
        stream = stream[count:]
        message = reader.advance(count)
        if message is not None:
            received.append(bytes(message))
    assert received == messages
    assert reader.between_frames


def test_a_frame_beyond_the_limit_is_refused_at_its_header() -> None:
    reader = FrameReader(10)
    reader.view()[:] = frame_header(2**32 - 1)
    with pytest.raises(WireError, match="4294967295 bytes came, at most 10"):
        reader.advance(4)
