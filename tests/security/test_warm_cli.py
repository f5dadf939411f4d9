"""Test that the process which runs commands for the cluster tests serves only the user who runs the tests."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from tests.cluster.warm_cli import WarmCli
from tests.security.other_user import as_user

NOBODY = 65534


def answer(address: bytes, request: str) -> bytes:
    """Return the server's answer to a request; nothing if it closes the connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, open(os.devnull, "w") as output:
        connection.connect(address)
        try:
            socket.send_fds(connection, [request.encode()], [output.fileno(), output.fileno()])
            return connection.recv(32)
        except OSError:
            return b""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_warm_command_line_refuses_other_users(tmp_path: Path):
    warm = WarmCli()
    env = {"PATH": os.environ["PATH"], "DALSEGNO_HOME": str(tmp_path)}
    try:
        assert warm.run(["ls"], env, tmp_path, timeout_s=60).returncode == 0
        request = json.dumps({"args": ["ls"], "env": env, "cwd": str(tmp_path)})
        assert answer(warm.address, request).isdigit()
        assert as_user(NOBODY, lambda: answer(warm.address, request)) == b""
    finally:
        warm.process.stdin.close()
        warm.process.wait(10)
