"""Everything that holds for connections, servers and acceptors holds over TLS, on streams good and bad."""

from __future__ import annotations

import pytest

from shoal.net import stream
from shoal.net.stream import SocketStream

from . import test_acceptor as of_acceptors
from . import test_server as of_servers
from . import test_sockets as of_sockets
from .test_stream import ReadingAhead, Stuttering


@pytest.fixture(params=[SocketStream, Stuttering, ReadingAhead], autouse=True)
def _encrypted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if (
        request.node.originalname == "test_a_peer_that_closes_is_noticed"
        and request.param is not SocketStream
    ):
        pytest.skip("there may be no room for the end of TLS: it is a cut then")
    monkeypatch.setattr(stream, "SocketStream", request.param)
    monkeypatch.setenv("SHOAL_TLS", "1")


#: what is said otherwise over TLS; test_tls.py has its place
_NOT_HERE = {
    "test_a_connection_can_be_handed_over_between_frames",
    "test_a_message_that_came_with_a_wrong_proof_is_never_read",
    "test_a_server_listens_on_a_unix_socket_too",
}

for _module in (of_sockets, of_acceptors, of_servers):
    for _name, _object in vars(_module).items():
        if _name not in _NOT_HERE and (
            _name.startswith("test_") or _name in ("listener", "pair", "acceptor", "server")
        ):
            globals()[_name] = _object
