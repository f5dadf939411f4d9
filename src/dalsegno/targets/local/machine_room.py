"""The machine room: a small service outside the virtual hosts that boots, replaces and resets them.

It corresponds to a BMC or a cloud's API. The controller runs inside the head host and cannot do this work itself. The
controller, and programs outside the hosts, send requests with `HostControlClient`.

A request and its answer are one line of JSON each, such as {"do": "reboot", "node": "gpu-2"}. The machine room may be
killed at any moment, because a repeated request does all of the work again.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dalsegno.errors import DalsegnoError, TargetError, UsageError
from dalsegno.health.result import Remedy
from dalsegno.log import start_logging
from dalsegno.system.files import locked, make_folder, read_text, remove_tree, user_of, write_atomic
from dalsegno.system.network import listen_at
from dalsegno.system.processes import LocalRunner
from dalsegno.targets.base import DaemonStatus
from dalsegno.targets.local.fault_access import LocalAccess, end_faults, replacement_has_old_gpus
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.nodes import LocalNodes, open_nodes, power_off, power_on
from dalsegno.targets.local.placement import ROOM
from dalsegno.wire.peer import uid_of

log = logging.getLogger("machine-room")


def reset_gpus(nodes: LocalNodes, node: str) -> None:
    if not nodes.is_on(node):
        raise TargetError(f"{node} is off", hint="reboot or replace it")
    if not nodes.placement.gpus_simulated:
        raise TargetError(f"the GPUs of {node} are this machine's own", hint="reset them there: `nvidia-smi -r`")
    end_faults(nodes, node, Remedy.RESET)


def reboot(nodes: LocalNodes, node: str) -> None:
    """Reboot a node, even if it hangs or is off."""
    power_off(nodes, node)
    end_faults(nodes, node, Remedy.REBOOT)
    power_on(nodes, node)


def replace(nodes: LocalNodes, node: str) -> None:
    """Replace the machine of a node. The new machine has another secret and empty disks.

    It also has other GPUs, unless an injected fault makes it have the old ones.
    """
    power_off(nodes, node)
    remove_tree(nodes.folder.spool(node))
    make_folder(nodes.folder.spool(node))
    if nodes.folder.scratch(node).exists():
        remove_tree(nodes.folder.scratch(node))
        make_folder(nodes.folder.scratch(node))
    if not replacement_has_old_gpus(nodes.folder, node):
        write_atomic(nodes.folder.machine(node), secrets.token_hex(8), durable=False)
    draw_secret(nodes.folder, node)
    end_faults(nodes, node, Remedy.REPLACE)
    power_on(nodes, node)


def draw_secret(folder: Folder, node: str) -> None:
    make_folder(folder.agent_secret(node).parent, 0o700)
    write_atomic(folder.agent_secret(node), secrets.token_hex(32), 0o600, durable=False)


REQUEST_TIMEOUT_S = 5.0  # time limit for a caller to send its request
MAX_REQUEST_BYTES = 4096
MAX_CALLERS = 256  # maximum number of callers at a time, each with a thread
WORK: Mapping[str, Callable[[LocalNodes, str], None]] = {"reboot": reboot, "replace": replace, "reset_gpus": reset_gpus}
ACTIONS = (*WORK, "power", "inject", "daemons", "user")


@dataclass(frozen=True)
class RoomFault:
    """A fault to inject. `code` is the Xid of the fault `xid`; None for other faults."""

    name: str
    code: int | None = None


def main(arguments: list[str]) -> int:
    """Run `machine-room STATE-FOLDER` until it is killed."""
    start_logging("machine-room")
    folder = Folder(Path(arguments[0]))
    try:
        with locked(folder.host(ROOM) / "lock", "this cluster's machine room", wait_s=5.0):
            HostControlServer(folder).serve()
    except DalsegnoError as error:
        log.error("the machine room stops: %s", error)
    return 1


class HostControlServer:
    """The server of the machine room. Each caller has its own thread, but only one request at a time acts on a node.

    It is not a `RequestServer` (`wire/requests.py`), which answers one request after the other: here a request takes up
    to a minute, and several nodes boot at the same time. Only root and the cluster's owner can connect. While too many
    callers are served, others wait in the listen queue.
    """

    def __init__(self, folder: Folder, max_callers: int = MAX_CALLERS) -> None:
        self.folder = folder
        self.free = threading.BoundedSemaphore(max_callers)
        self.busy: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self.listener = listen_at(folder.room_socket, 0o600)

    def serve(self) -> None:
        while True:
            self.free.acquire()
            sock, _ = self.listener.accept()
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            self._talk(sock)
        finally:
            self.free.release()

    def _talk(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):  # the work is done even if the caller disconnects
            sock.settimeout(REQUEST_TIMEOUT_S)
            if line := _read_line(sock):  # the line is empty if the caller only checked that this server listens
                answer = self.answer(uid_of(sock), line)
                sock.sendall(json.dumps(answer).encode() + b"\n")

    def answer(self, uid: int, line: str) -> dict[str, Any]:
        """Carry out one request from a user and return the answer."""
        try:
            if uid not in (0, os.geteuid()):
                raise UsageError("only root and the cluster's owner may use the machine room", hint="use sudo")
            action, node, fault = _parse(line)
            if action == "daemons":
                return self.daemons()
            if action == "user":
                return self.user(node)
            if fault:
                return self.inject(node, fault)
            return self.power(node) if action == "power" else self.do(action, node)
        except DalsegnoError as error:
            log.warning("refused uid %d: %s", uid, error.what)
            return {"error": error.what, "hint": error.hint}
        except Exception as error:  # a failed request must not end the server
            log.exception("a request of uid %d failed", uid)
            return {"error": f"the machine room failed: {error}", "hint": "its log shows the error; try again"}

    def daemons(self) -> dict[str, Any]:
        from dalsegno.targets.local.observe import dead_daemons  # imported here to save memory

        return {"ok": True, "dead": [[each.host, each.name, each.detail] for each in dead_daemons(self.folder)]}

    def user(self, uid: str) -> dict[str, Any]:
        if not (uid.isascii() and uid.isdecimal()):
            raise UsageError("a request for the name of a user needs a uid", hint="send it as `node`")
        return {"ok": True, "name": user_of(int(uid[:10]))}

    def power(self, node: str) -> dict[str, Any]:
        nodes = open_nodes(LocalRunner(), self.folder, read_only=True)
        nodes.node(node)
        boot = (read_text(self.folder.boot_id(node)) or "").strip()
        return {"ok": True, "on": nodes.is_on(node), "boot": boot}

    def do(self, action: str, node: str) -> dict[str, Any]:
        """Carry out an action on a node and return the node's power state. Actions on the same node wait for each
        other."""
        with self.busy[node], self._excluding_up_and_down():
            nodes = open_nodes(LocalRunner(), self.folder)
            nodes.node(node)
            began = time.monotonic()
            WORK[action](nodes, node)
            log.info("%s %s: %.2f s", action, node, time.monotonic() - began)
        return self.power(node)

    def inject(self, node: str, fault: RoomFault) -> dict[str, Any]:
        """Inject a fault into a node. Programs inside a host, such as the observer, need this, because they cannot
        reach the other hosts."""
        from dalsegno.inject.faults import FaultOptions, check_options, find_fault
        from dalsegno.inject.injection import inject

        found, options = find_fault(fault.name), FaultOptions(code=fault.code)
        check_options(found, options)
        with self.busy[node], self._excluding_up_and_down():
            nodes = open_nodes(LocalRunner(), self.folder)
            nodes.node(node)
            inject(LocalAccess(nodes), found, node, options)
            log.info("inject %s into %s", fault.name, node)
        return {"ok": True}

    @contextlib.contextmanager
    def _excluding_up_and_down(self) -> Any:
        """Make `up` and `down` wait until a request is done. If `up` or `down` already runs, refuse the request."""
        with locked(self.folder.node_lock, f"{self.folder.name}", shared=True):
            with locked(self.folder.lock, f"{self.folder.name}", shared=True):
                pass  # no `up` or `down` runs now, and one that starts later waits for the node lock
            yield


def _parse(line: str) -> tuple[str, str, RoomFault | None]:
    """Return the action, its node, and for `inject` the fault."""
    try:
        request = json.loads(line)
        action, node = request["do"], request["node"]
        fault, code = request.get("fault", ""), request.get("code")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        action, node, fault, code = "", "", "", None
    named = isinstance(node, str) and isinstance(fault, str) and (code is None or type(code) is int)
    if not named or not isinstance(action, str) or action not in ACTIONS or bool(fault) != (action == "inject"):
        raise UsageError("invalid request to the machine room", hint=f"use one of {', '.join(ACTIONS)}")
    return action, node, RoomFault(fault, code) if fault else None


def _read_line(sock: socket.socket) -> str:
    data = b""
    while not data.endswith(b"\n") and len(data) < MAX_REQUEST_BYTES:
        piece = sock.recv(MAX_REQUEST_BYTES)
        if not piece:
            break
        data += piece
    return data.decode(errors="replace")


MAX_LOG_CHARS = 64 << 10  # maximum length of a log in an answer; only the end of a longer log is returned
WORK_TIMEOUT_S = 60.0  # time limit of a request; a boot takes 0.5 s, or longer on a loaded machine
POWER_TIMEOUT_S = 1.0  # time limit for the power state, which takes milliseconds to read


class HostControlClient:
    """Implements `CanReset`, `CanReboot`, `CanReplace`, `CanSeePower` and `CanReadLogs` for a local cluster. Set a node
    down in Slurm before you reset, reboot or replace it.

    If the machine room dies during a request, the request is repeated for up to `retry_s` seconds. This is enough time
    to restart the machine room.
    """

    def __init__(self, root: Path, retry_s: float = 5.0) -> None:
        self.folder, self.retry_s = Folder(root), retry_s

    def reset_gpus(self, node: str) -> None:
        self._ask("reset_gpus", node)

    def reboot(self, node: str) -> None:
        self._ask("reboot", node)

    def replace(self, node: str) -> None:
        self._ask("replace", node)

    def inject(self, node: str, fault: str, code: int | None) -> dict[str, Any]:
        return self._ask("inject", node, fault=fault, code=code)

    def user_name(self, uid: int) -> str:
        """Return the name of a user of the machine."""
        return str(self._ask("user", str(uid))["name"])

    def dead_daemons(self) -> list[DaemonStatus]:
        """Return the daemons of all hosts that should run and do not."""
        return [DaemonStatus(host, name, False, detail) for host, name, detail in self._ask("daemons", "")["dead"]]

    def read_logs(self, node: str) -> dict[str, str]:
        """Return the logs of the node's daemons and the telemetry of its hardware. This works whether the node is on or
        off."""
        folder = self.folder.host(node)
        files = [*sorted(folder.glob("*.log")), self.folder.telemetry(node)]
        found = {path.name: read_text(path) for path in files}
        return {name: text[-MAX_LOG_CHARS:] for name, text in found.items() if text}

    def is_on(self, node: str) -> bool:
        return bool(self._ask("power", node)["on"])

    def is_off(self, node: str) -> bool:
        try:
            return self._exchange({"do": "power", "node": node}, POWER_TIMEOUT_S).get("on") is False
        except (OSError, ValueError):
            return False  # an unknown power state does not count as off

    def boot_id(self, node: str) -> str:
        """Return the id of the node's last boot; "" if it never booted."""
        return str(self._ask("power", node)["boot"])

    def _ask(self, action: str, node: str, **more: str | int | None) -> dict[str, Any]:
        until = time.monotonic() + self.retry_s
        while (answer := self._try({"do": action, "node": node, **more}, until)) is None:
            time.sleep(0.1)
        if not answer.get("ok"):
            raise TargetError(str(answer.get("error", "the machine room refused")), hint=str(answer.get("hint", "")))
        return answer

    def _try(self, request: Mapping[str, str | int | None], until: float) -> dict[str, Any] | None:
        """Return the answer; None if the request failed and time is left to repeat it."""
        try:
            return self._exchange(request)
        except (OSError, ValueError) as error:
            if time.monotonic() < until and not isinstance(error, TimeoutError):
                return None
            raise TargetError(
                f"the machine room of {self.folder.name} does not answer: {error}",
                where=str(self.folder.room_socket),
                hint="`dalsegno status` shows whether it runs, `dalsegno up` starts it",
            ) from error

    def _exchange(self, request: Mapping[str, str | int | None], timeout_s: float = WORK_TIMEOUT_S) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            sock.connect(str(self.folder.room_socket))
            sock.sendall(json.dumps(request).encode() + b"\n")
            with sock.makefile("rb") as answers:
                answer = json.loads(answers.readline() or b"null")
        if not isinstance(answer, dict):
            raise ConnectionError("it hung up")
        return answer
