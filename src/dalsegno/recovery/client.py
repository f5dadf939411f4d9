"""Client of the controller's socket: start a run, or test whether the controller answers."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.system.hanging_calls import slowness
from dalsegno.wire.frames import BadFrame, Message, Reader, send

START_S = 10.0  # time limit for starting a run: the controller writes two files and starts a process
ANSWERS_S = 2.0
# Files in the state folder of `dalsegno adopt watch`: the watcher's socket, and a file with the path of the cluster's
# slurm.conf.
WATCHER_SOCKET, WATCHER_CONF = "run/controller.sock", "slurm-conf"
MAX_ANSWER = 16 << 20  # maximum bytes of an answer: enough for thousands of nodes, each with its reason


def start_run(path: Path, folder: Path) -> None:
    """Ask the controller at this socket to start the run in this folder. If the run is already started, do nothing."""
    answer = ask(path, {"start": str(folder)}, START_S)
    if not answer.get("ok"):
        raise DalsegnoError(str(answer.get("error", "the controller refused")), hint=str(answer.get("hint", "")))


def controller_answers(path: Path) -> bool:
    """Return whether a controller answers at this socket."""
    try:
        return "runs" in ask(path, {"runs": True}, ANSWERS_S)
    except DalsegnoError:
        return False


def ask(path: Path, request: Message, timeout_s: float) -> Message:
    """Return the answer to one request. The timeout is extended on a slow machine."""
    timeout_s *= slowness()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            _connect(sock, path, time.monotonic() + timeout_s)
            send(sock, request)
            return _receive(sock)
    except (OSError, BadFrame) as error:
        raise DalsegnoError(
            f"the cluster's controller does not answer: {error}",
            where=str(path),
            hint=start_hint(path, os.geteuid()),
        ) from error


def start_hint(path: Path, uid: int) -> str:
    """Return a hint for this user on how to start the daemon of this socket. Only root and its owner may run `up`."""
    try:
        operates = uid in (0, path.parent.stat().st_uid)
    except OSError:
        operates = True
    if operates:
        return "`dalsegno status` shows whether it runs, `dalsegno up` starts it"
    return "the cluster's owner can start it with `dalsegno up`"


def _connect(sock: socket.socket, path: Path, until: float) -> None:
    """Connect, and retry while the listen queue is full: the kernel reports that as an error at once."""
    while True:
        try:
            sock.connect(str(path))
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def _receive(sock: socket.socket) -> Message:
    reader = Reader(MAX_ANSWER)
    while data := sock.recv(65536):
        for message in reader.feed(data):
            return message
    raise BadFrame("the connection was closed")
