"""What is forked beside the workers and outlives them: a rank's saver, a node's keeper."""

from __future__ import annotations

import os
import socket

from dalsegno.train.contract import AGENT
from dalsegno.train.frames import Message
from dalsegno.train.peer import uid_of

CONNECT_S = 60.0


def become_saver(task: Message) -> None:
    """Serve the one worker that was told of our socket."""
    os.environ[AGENT] = task["door"]
    with socket.socket(fileno=task["files"][0]) as listener:
        worker = _first_of_ours(listener)
    if worker is not None:
        from dalsegno.train.saver import serve

        serve(worker)


def become_keeper(task: Message) -> None:
    from dalsegno.train.keeper import serve

    serve(task["door"], socket.socket(fileno=task["files"][0]))


def _first_of_ours(listener: socket.socket) -> socket.socket | None:
    """Anyone on the machine can see the socket; only the same user is let in."""
    listener.settimeout(CONNECT_S)
    while True:
        try:
            sock, _ = listener.accept()
        except socket.timeout:
            return None
        sock.settimeout(None)
        if uid_of(sock) == os.getuid():
            return sock
        sock.close()
