"""The client of the machine room, for use on the head or outside."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

from dalsegno.errors import TargetError
from dalsegno.system.files import read_text
from dalsegno.targets.local.folder import Folder

MOST_SAID = 64 << 10  # of one log: its end matters
WORK_S = 60.0  # a boot takes 0.5 s, longer on a loaded machine
LOOK_S = 1.0  # reading the power state is cheap


class MachineRoom:
    """A local cluster's `CanReset`, `CanReboot`, `CanReplace`, `CanSeePower` and `CanReadLogs`. Slurm must have
    set a node down before it is touched.

    If the machine room dies at work, it is asked again until its host has restarted it.
    """

    def __init__(self, root: Path, patience_s: float = 5.0) -> None:
        self.folder, self.patience_s = Folder(root), patience_s

    def reset_gpus(self, node: str) -> None:
        self._ask("reset_gpus", node)

    def reboot(self, node: str) -> None:
        self._ask("reboot", node)

    def replace(self, node: str) -> None:
        self._ask("replace", node)

    def read_logs(self, node: str) -> dict[str, str]:
        """Return the logs of its daemons and the telemetry of its hardware, whether it is on or off."""
        folder = self.folder.host(node)
        files = [*sorted(folder.glob("*.log")), self.folder.telemetry(node)]
        found = {path.name: read_text(path) for path in files}
        return {name: text[-MOST_SAID:] for name, text in found.items() if text}

    def is_on(self, node: str) -> bool:
        return bool(self._ask("power", node)["on"])

    def is_off(self, node: str) -> bool:
        try:
            return self._exchange({"do": "power", "node": node}, LOOK_S).get("on") is False
        except (OSError, ValueError):
            return False  # unknown

    def boot_id(self, node: str) -> str:
        """Return the id of its last boot; "" if it never booted."""
        return str(self._ask("power", node)["boot"])

    def _ask(self, word: str, node: str) -> dict[str, Any]:
        until = time.monotonic() + self.patience_s
        while (answer := self._try({"do": word, "node": node}, until)) is None:
            time.sleep(0.1)
        if not answer.get("ok"):
            raise TargetError(str(answer.get("error", "the machine room refused")), hint=str(answer.get("hint", "")))
        return answer

    def _try(self, request: dict[str, str], until: float) -> dict[str, Any] | None:
        """Return the answer; None if there is none and time is left to ask again."""
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

    def _exchange(self, request: dict[str, str], timeout_s: float = WORK_S) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            sock.connect(str(self.folder.room_socket))
            sock.sendall(json.dumps(request).encode() + b"\n")
            with sock.makefile("rb") as answers:
                answer = json.loads(answers.readline() or b"null")
        if not isinstance(answer, dict):
            raise ConnectionError("it hung up")
        return answer
