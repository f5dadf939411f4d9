"""The machine room: a small service outside the virtual hosts that boots, replaces and resets them, as a BMC or a
cloud's API does. The controller, inside the head's host, cannot.

A line of JSON in, a line out: {"do": "reboot", "node": "gpu-2"}. Each request does all of its work from the start, so
that it may be killed at any moment: the next request finds what is there and goes on from it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dalsegno.errors import DalsegnoError, TargetError, UsageError
from dalsegno.health.result import Remedy
from dalsegno.log import start_logging
from dalsegno.system.files import locked, make_folder, read_text, remove_tree, write_atomic
from dalsegno.system.network import listen_at
from dalsegno.system.processes import LocalRunner
from dalsegno.targets.local.fault_access import end_faults, replacement_has_old_gpus
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.nodes import LocalNodes, open_nodes
from dalsegno.targets.local.placement import ROOM
from dalsegno.targets.local.rack import power_off, power_on
from dalsegno.wire.peer import uid_of

log = logging.getLogger("machine-room")

# ---- What the machine room does to a node: its GPUs reset, its host booted anew, another machine in its place.


def reset_gpus(nodes: LocalNodes, node: str) -> None:
    if not nodes.is_on(node):
        raise TargetError(f"{node} is off", hint="reboot or replace it")
    if not nodes.placement.gpus_simulated:
        raise TargetError(f"the GPUs of {node} are this machine's own", hint="reset them there: `nvidia-smi -r`")
    end_faults(nodes, node, Remedy.RESET)


def reboot(nodes: LocalNodes, node: str) -> None:
    """Whether it is on, hangs or is off."""
    power_off(nodes, node)
    end_faults(nodes, node, Remedy.REBOOT)
    power_on(nodes, node)


def replace(nodes: LocalNodes, node: str) -> None:
    """Other GPUs, another secret, nothing of what the old machine kept."""
    power_off(nodes, node)
    remove_tree(nodes.folder.spool(node))
    make_folder(nodes.folder.spool(node))
    if not replacement_has_old_gpus(nodes.folder, node):
        write_atomic(nodes.folder.machine(node), secrets.token_hex(8), durable=False)
    draw_secret(nodes.folder, node)
    end_faults(nodes, node, Remedy.REPLACE)
    power_on(nodes, node)


def draw_secret(folder: Folder, node: str) -> None:
    make_folder(folder.agent_secret(node).parent, 0o700)
    write_atomic(folder.agent_secret(node), secrets.token_hex(32), 0o600, durable=False)


# ---- The machine room: a small service outside the virtual hosts that boots, replaces and resets them, as a BMC or
# a cloud's API does. The controller, inside the head's host, cannot.


CALL_S = 5.0  # whoever has not asked by then is cut off
LONGEST = 4096
WORK: Mapping[str, Callable[[LocalNodes, str], None]] = {"reboot": reboot, "replace": replace, "reset_gpus": reset_gpus}


def main(arguments: list[str]) -> int:
    """`machine-room STATE-FOLDER`: serves until it is killed."""
    start_logging("machine-room")
    folder = Folder(Path(arguments[0]))
    try:
        with locked(folder.host(ROOM) / "lock", "this cluster's machine room", wait_s=5.0):
            MachineRoomServer(folder).serve()
    except DalsegnoError as error:
        log.error("the machine room stops: %s", error)
    return 1


class MachineRoomServer:
    """A thread for each caller; never two at work on one node."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.busy: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self.listener = listen_at(folder.room_socket, 0o600)

    def serve(self) -> None:
        while True:
            sock, _ = self.listener.accept()
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):  # a caller who hangs up does not matter: the work is done all the same
            sock.settimeout(CALL_S)
            if line := _read_line(sock):  # nothing: somebody looked whether we are there
                answer = self.answer(uid_of(sock), line)
                sock.sendall(json.dumps(answer).encode() + b"\n")

    def answer(self, uid: int, line: str) -> dict[str, Any]:
        """One request of one user."""
        try:
            if uid not in (0, os.geteuid()):
                raise UsageError("the machine room answers its owner alone", hint="use sudo")
            word, node = _parse(line)
            return self.power(node) if word == "power" else self.do(word, node)
        except DalsegnoError as error:
            log.warning("refused uid %d: %s", uid, error.what)
            return {"error": error.what, "hint": error.hint}
        except Exception as error:  # whatever one request runs into, the others must be served
            log.exception("a request of uid %d failed", uid)
            return {"error": f"the machine room failed: {error}", "hint": "its log says why; ask again"}

    def power(self, node: str) -> dict[str, Any]:
        nodes = open_nodes(LocalRunner(), self.folder, to_look=True)
        nodes.node(node)
        boot = (read_text(self.folder.boot_id(node)) or "").strip()
        return {"ok": True, "on": nodes.is_on(node), "boot": boot}

    def do(self, word: str, node: str) -> dict[str, Any]:
        """Answered when it is done. Who asks for a node that is being worked on, waits."""
        with self.busy[node], self._alone():
            nodes = open_nodes(LocalRunner(), self.folder)
            nodes.node(node)
            began = time.monotonic()
            WORK[word](nodes, node)
            log.info("%s %s: %.2f s", word, node, time.monotonic() - began)
        return self.power(node)

    @contextlib.contextmanager
    def _alone(self) -> Any:
        """Not beside an `up` or `down`: they do not begin while we work, and while they do, we refuse."""
        with locked(self.folder.node_lock, f"{self.folder.name}", shared=True):
            with locked(self.folder.lock, f"{self.folder.name}", shared=True):
                pass  # nobody is: and whoever comes now waits for us
            yield


def _parse(line: str) -> tuple[str, str]:
    try:
        request = json.loads(line)
        word, node = request["do"], request["node"]
    except (ValueError, KeyError, TypeError, RecursionError):
        word, node = "", ""
    if not (isinstance(word, str) and isinstance(node, str) and (word in WORK or word == "power")):
        raise UsageError("the machine room does not understand this", hint=f"ask for one of {', '.join(WORK)}, power")
    return word, node


def _read_line(sock: socket.socket) -> str:
    data = b""
    while not data.endswith(b"\n") and len(data) < LONGEST:
        piece = sock.recv(LONGEST)
        if not piece:
            break
        data += piece
    return data.decode(errors="replace")
