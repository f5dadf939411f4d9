"""Tests of listening ports."""

import socket
from pathlib import Path

from dalsegno.system.kernel import listening_ports, parse_listening


def test_port_is_listed_while_it_has_a_listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = {server.getsockname()[1]}
        assert ports <= listening_ports()
        assert server.getsockname()[1] in parse_listening(Path("/proc/net/tcp").read_text())
        with socket.create_connection(server.getsockname()) as caller:
            assert caller.getsockname()[1] not in listening_ports(), "a connection is not a listener"
    assert not ports & listening_ports()
